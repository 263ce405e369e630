//! `send`: images to a peer, with progress for people and for scripts.

mod items;
mod show;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use drover_agent::home::Home;
use drover_agent::remote::find_peer;
use drover_agent::signals::Stop;
use drover_agent::site;
use drover_net::RateLimit;
use drover_teleport::progress::{Counters, WireTotals};
use drover_teleport::session::{self, SendOptions};

use crate::cli::SendArgs;
use show::Show;

/// How often progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Sends images.
///
/// # Errors
/// Usage when the images and names do not make sense; else what reading, the link or the peer reports.
pub async fn send(home: &Home, args: SendArgs) -> Result<()> {
    let (peer_name, items) = items::of_args(&args)?;
    let catalog = site::open_catalog(home)?;
    let peer = find_peer(&catalog, &peer_name)?;
    if peer.addresses.is_empty() {
        bail!(
            "{peer_name} is paired but has told no address to call; make a ticket there (`drover ticket`) and `drover pair TICKET --name {peer_name}`"
        );
    }
    let stop = Stop::on_signals()?;
    let items = tokio::task::spawn_blocking(move || items::with_companions(items)).await??;
    let limit = args
        .limit
        .or(home.config.limit)
        .map(|rate| Arc::new(RateLimit::new(rate)));
    let options = SendOptions {
        identity: home.identity()?,
        peer: peer.key,
        peer_name: peer.name.clone(),
        addresses: peer.addresses,
        limit,
        dry_run: args.dry_run,
        lanes: args.lanes,
        compress: args.compress.0,
        give_up_after: args.give_up_after,
    };
    let counters = Arc::new(Counters::default());
    let wire = Arc::new(WireTotals::default());
    let show = Arc::new(Show::new(
        args.json,
        args.dry_run,
        peer.name,
        Arc::clone(&counters),
        Arc::clone(&wire),
    ));
    let events = {
        let show = Arc::clone(&show);
        Arc::new(move |event| show.event(event))
    };
    let sending = session::send(items, options, events, counters, wire, stop.watch());
    tokio::pin!(sending);
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let sent = loop {
        tokio::select! {
            sent = &mut sending => break sent,
            _ = looks.tick() => show.look(),
        }
    };
    match sent {
        Ok(reports) => show.done(&reports),
        Err(e) => {
            show.failed();
            Err(e.into())
        }
    }
}
