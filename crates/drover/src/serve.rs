//! `serve` and `teleporter`: the process that others connect to.

use drover_agent::error::Result;
use drover_agent::home::Home;
use drover_agent::serve::{self, Listen, Ready};

use crate::cli::ListenArgs;
use crate::out;

/// Runs a site until it is told to stop.
///
/// # Errors
/// When it cannot start.
pub async fn serve(home: Home, args: ListenArgs) -> Result<()> {
    serve::serve(home, listen(args), announce).await
}

/// Runs a lone teleporter until it is told to stop.
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
    }
}

/// Says that it is ready: one ticket on stdout, the rest on stderr.
fn announce(ready: &Ready) {
    out::note(&format!(
        "drover: {} {} listens on {}; its key is {}",
        ready.duty, ready.name, ready.listening, ready.key
    ));
    out::note(&format!(
        "drover: to pair with it once, within a day, run there: drover pair TICKET --name {}",
        ready.name
    ));
    if let Err(e) = out::line(&ready.ticket.to_string()) {
        tracing::warn!("the ticket could not be printed ({e}); `drover ticket` makes one");
    }
}
