//! `serve` and `teleporter`: the servers.

use drover_agent::error::Result;
use drover_agent::home::Home;
use drover_agent::pairing::ShownTicket;
use drover_agent::serve::{self, Listen, Ready};
use drover_agent::text::moment;

use crate::cli::{ListenArgs, ServeArgs};
use crate::out;

/// Runs a site until SIGTERM or Ctrl-C.
///
/// # Errors
/// When it cannot start.
pub async fn serve(mut home: Home, args: ServeArgs) -> Result<()> {
    if let Some(url) = args.catalog {
        home.use_catalog(url)?;
    }
    for (name, store) in args.disk {
        home.serve_disk(name, store)?;
    }
    serve::serve(home, listen(args.listen), announce).await
}

/// Runs a teleporter until SIGTERM or Ctrl-C.
///
/// # Errors
/// As [`serve()`].
pub async fn teleporter(home: Home, args: ListenArgs) -> Result<()> {
    serve::teleporter(home, listen(args), announce).await
}

fn listen(args: ListenArgs) -> Listen {
    Listen {
        listen: args.listen,
        advertise: args.advertise,
        metrics_listen: args.metrics_listen,
        ticket: !out::is_readable_by_others() && !out::is_null(),
    }
}

/// Announces that the server is ready: a ticket on stdout, the rest on stderr.
fn announce(ready: &Ready) {
    out::note(&format!(
        "drover: {} {} is listening on {}, key {}",
        ready.duty, ready.name, ready.listening, ready.key
    ));
    let Some(ShownTicket {
        ticket,
        expires_unix,
    }) = &ready.ticket
    else {
        if out::is_readable_by_others() {
            out::note(
                "drover: no ticket is printed: stdout is a file that other users can read; `drover ticket` makes one",
            );
        }
        return;
    };
    out::note(&format!(
        "drover: the ticket is valid once, until {} UTC; to use it at another site: drover pair --name {}",
        moment(*expires_unix),
        ready.name
    ));
    if let Err(e) = out::line(&ticket.to_string()) {
        tracing::warn!("cannot print the ticket: {e}; `drover ticket` prints a new one");
    }
}
