//! `send`: sends images to a peer and shows the progress.

mod items;
mod show;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use drover_agent::error::one_line;
use drover_agent::home::Home;
use drover_agent::mounts::refuse_written;
use drover_agent::profiles;
use drover_agent::signals::Stop;
use drover_agent::site;
use drover_agent::site::find_peer;
use drover_agent::text::{bytes, count};
use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_net::RateLimit;
use drover_store::Peer;
use drover_teleport::SendOptions;
use drover_teleport::progress::{Counters, SendEvent, WireTotals};

use crate::cli::SendArgs;
use crate::failure;
pub use show::Show;

/// How often the progress is sampled.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// Sends images.
///
/// # Errors
/// Usage errors of the names; else errors from the image, the link or the peer.
pub async fn send(home: &Home, args: SendArgs) -> Result<()> {
    let (peer_name, items) = items::from_args(&args)?;
    let catalog = site::open_catalog(home)?;
    let peer = find_peer(&catalog, &peer_name)?;
    if peer.addresses.is_empty() {
        bail!(
            "the address of {peer_name} is unknown: pair again with a ticket from {peer_name}: `drover pair --name {peer_name}`"
        );
    }
    for item in &items {
        refuse_written(home, &item.path)?;
    }
    let stop = Stop::on_signals()?;
    let asked = args.with_parts;
    let sent = tokio::task::spawn_blocking(move || items::with_parts(items, asked)).await??;
    let limit = args
        .limit
        .or(home.config.limit)
        .map(|rate| Arc::new(RateLimit::new(rate)));
    let peer_now = peer.clone();
    let delivered = sent.items.iter();
    let delivered: Vec<_> = delivered
        .map(|item| (item.path.clone(), item.name.clone()))
        .collect();
    let options = SendOptions {
        identity: home.identity()?,
        peer: peer.key,
        peer_name: peer.name.clone(),
        addresses: peer.addresses,
        limit,
        dry_run: args.dry_run,
        connections: args.connections,
        compress: args.compress.0,
        give_up_after: args.give_up_after,
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
    tokio::pin!(sending);
    let mut samples = tokio::time::interval(SAMPLE_EVERY);
    let sent = loop {
        tokio::select! {
            sent = &mut sending => break sent,
            _ = samples.tick() => show.sample(),
        }
    };
    match sent {
        Ok(reports) => {
            if !args.dry_run {
                send_profiles(home, &peer_now, &delivered, &show).await;
            }
            show.done(&reports)
        }
        Err(e) => {
            show.failed();
            Err(failure::of_sending(e, &peer_name))
        }
    }
}

/// Gives the peer the profiles of the images, of those that have one. Without them the images are as good.
async fn send_profiles(home: &Home, peer: &Peer, sent: &[(PathBuf, ImageName)], show: &Show) {
    for (path, name) in sent {
        let text = match profiles::send_along(home, peer, path, name).await {
            Ok(None) => continue,
            Ok(Some(put)) => format!(
                "its profile was sent along: {}, {}",
                bytes(put.blocks * BLOCK_SIZE_U64),
                count(put.boots.into(), "boot")
            ),
            Err(e) => format!("its profile was not sent along: {}", one_line(&e)),
        };
        let path = path.clone();
        show.event(SendEvent::Note { path, text });
    }
}
