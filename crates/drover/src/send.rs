//! `send`: sends images to a peer and shows the progress.

mod along;
mod bars;
mod by_nodes;
mod flock;
mod items;
mod show;

use std::sync::Arc;

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::mounts::refuse_written;
use drover_agent::signals::Stop;
use drover_agent::site;
use drover_agent::site::find_peer;
use drover_net::RateLimit;
use drover_teleport::SendOptions;
use drover_teleport::progress::{Counters, SendEvent, WireTotals};

use crate::cli::SendArgs;
use crate::failure;
pub use show::{Show, short};

/// Sends images.
///
/// # Errors
/// Usage errors of the names; else errors from the image, the link or the peer.
pub async fn send(home: &Home, args: SendArgs) -> Result<()> {
    if args.together.flock.is_some() || args.together.flock_file.is_some() {
        return flock::send(home, args).await;
    }
    if args.together.atomic || args.together.at_once.is_some() {
        return Err(failure::usage(
            "--atomic and --at-once are for a flock: give it a name with --flock, or name its file with --flock-file",
        ));
    }
    let (peer_name, items) = items::from_args(&args)?;
    let catalog = site::open_catalog(home)?;
    let peer = find_peer(&catalog, &peer_name)?;
    items::must_have_address(&peer)?;
    for item in &items {
        refuse_written(home, &item.path)?;
    }
    let stop = Stop::on_signals()?;
    let asked = args.with_parts;
    let (of, dry_run) = (home.clone(), args.dry_run);
    let read = move || {
        let mut sent = items::with_parts(items, asked)?;
        if !dry_run {
            along::add_profiles(&of, &mut sent.items, &mut sent.notes);
        }
        anyhow::Ok(sent)
    };
    let sent = tokio::task::spawn_blocking(read).await??;
    let limit = args
        .limit
        .or(home.config.limit)
        .map(|rate| Arc::new(RateLimit::new(rate)));
    let options = SendOptions {
        limit,
        dry_run: args.dry_run,
        connections: args.connections,
        compress: args.compress.0,
        give_up_after: args.give_up_after,
        ..SendOptions::to_peer(home.identity()?, &peer)
    };
    let counters = Arc::new(Counters::default());
    let wire = Arc::new(WireTotals::default());
    let show = Arc::new(Show::new(
        args.json,
        args.dry_run,
        true,
        peer.name,
        Arc::clone(&counters),
        Arc::clone(&wire),
    ));
    for (path, text) in sent.notes {
        show.event(SendEvent::Note { path, text });
    }
    let events = {
        let show = Arc::clone(&show);
        Arc::new(move |event| show.event(event))
    };
    let sending = drover_teleport::send(sent.items, options, events, counters, wire, stop.watch());
    let sent = show::sampled(sending, std::slice::from_ref(&show)).await;
    match sent {
        Ok(reports) => show.done(&reports),
        Err(e) => {
            show.failed();
            Err(failure::of_sending(e, &peer_name))
        }
    }
}
