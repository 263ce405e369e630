//! `flock`: the flocks that this site receives or sends.

use std::collections::BTreeMap;

use anyhow::Result;
use drover_agent::flocks;
use drover_agent::home::Home;
use drover_agent::text::{bytes, clean, count, moment};
use drover_teleport::{FlockImage, FlockInfo, FlockRecord, FlockState, ImageState};
use serde_json::{Value, json};

use crate::cli::FlockArgs;
use crate::out;

/// `drover flock`.
///
/// # Errors
/// When they cannot be listed.
pub async fn flock(home: &Home, args: &FlockArgs) -> Result<()> {
    let received = flocks::received(home, args.peer.as_deref()).await?;
    // At a peer, they come from here.
    let of = if args.peer.is_some() { "at" } else { "from" };
    let mut all: Vec<(FlockInfo, &str, bool)> = received
        .into_iter()
        .map(|info| {
            let busy = info.sessions > 0;
            (info, of, busy)
        })
        .collect();
    if args.peer.is_none() {
        for (sent, busy) in flocks::sent(home)? {
            let info = FlockInfo {
                record: sent.record,
                sessions: 0,
                under_way: Vec::new(),
                launchable: Vec::new(),
            };
            all.push((info, "to", busy));
        }
    }
    if args.json {
        let direction = |of: &str| if of == "to" { "sent" } else { "received" };
        return all
            .iter()
            .try_for_each(|(info, of, busy)| out::json(&object(info, direction(of), *busy)));
    }
    if all.is_empty() {
        out::note("drover: no flocks");
        return Ok(());
    }
    let mut rows = Vec::new();
    for (info, of, busy) in &all {
        let record = &info.record;
        let done = record
            .images
            .iter()
            .filter(|image| is_there(image.state))
            .count();
        let peer = match (*of, &args.peer) {
            ("at", Some(peer)) => format!("at {peer}"),
            _ => format!("{of} {}", clean(&record.peer_name)),
        };
        let mut row = vec![
            clean(record.name.as_str()),
            peer,
            format!("{done}/{}", record.images.len()),
        ];
        let blank = || std::iter::repeat_n(String::new(), 6);
        row.extend(blank());
        row.extend([state(record.state, *busy).into(), String::new()]);
        row.push(moment(record.touched_unix));
        rows.push(row);
        for image in &record.images {
            let mut row = vec![
                format!("  {}", clean(image.name.as_str())),
                String::new(),
                String::new(),
            ];
            row.extend(origins(image));
            row.push(
                match info.under_way.iter().find(|(name, ..)| *name == image.name) {
                    Some((_, done, total)) => {
                        format!("{}% has arrived", done * 100 / (*total).max(1))
                    }
                    None => image_state(image.state).into(),
                },
            );
            // Where it is sent from nobody knows.
            let launchable = match (*of, info.launchable.contains(&image.name)) {
                ("to", _) => "-",
                (_, true) => "yes",
                (_, false) => "no",
            };
            row.extend([launchable.into(), String::new()]);
            rows.push(row);
        }
    }
    let heading = [
        "flock",
        "peer",
        "complete",
        "zero",
        "own",
        "flock",
        "site",
        "sent",
        "resumed",
        "state",
        "launchable",
        "last change (UTC)",
    ];
    out::line(&out::table(&heading, rows, &[2, 3, 4, 5, 6, 7, 8]))?;
    for (info, ..) in &all {
        for (name, node) in by_node(&info.record) {
            out::note(&format!(
                "{}: node {}: {} of {} complete, {} sent",
                clean(info.record.name.as_str()),
                clean(name),
                node.done,
                count(node.images, "image"),
                bytes(node.sent_bytes)
            ));
        }
    }
    for (info, ..) in all.iter().filter(|(info, ..)| !info.record.why.is_empty()) {
        out::note(&format!(
            "{}: {}",
            clean(info.record.name.as_str()),
            clean(&info.record.why)
        ));
    }
    Ok(())
}

/// The bytes of an image by where they came from, once it is there: zero, own, flock, site, sent, resumed.
pub fn origins(image: &FlockImage) -> [String; 6] {
    match image.state {
        ImageState::Arrived | ImageState::Delivered => image.blocks.bytes().map(bytes),
        _ => std::array::from_fn(|_| "-".into()),
    }
}

fn is_there(state: ImageState) -> bool {
    matches!(
        state,
        ImageState::Arrived | ImageState::Delivered | ImageState::Unchanged
    )
}

fn state(state: FlockState, busy: bool) -> &'static str {
    match state {
        FlockState::Open if busy => "in progress",
        FlockState::Open => "interrupted",
        FlockState::Naming => "all has arrived, is being named",
        FlockState::Delivered => "delivered",
        FlockState::Failed => "failed",
    }
}

/// The state of an image, in words.
pub fn image_state(state: ImageState) -> &'static str {
    match state {
        ImageState::Waiting => "not complete",
        ImageState::Arrived => "complete, waits for the others",
        ImageState::Delivered => "delivered",
        ImageState::Unchanged => "unchanged",
        ImageState::Failed => "failed",
    }
}

/// A flock as JSON.
pub fn object(info: &FlockInfo, direction: &str, busy: bool) -> Value {
    let record = &info.record;
    let images: Vec<Value> = record
        .images
        .iter()
        .map(|image| {
            let [zero, own, flock, site, sent, resumed] = image.blocks.bytes();
            let mut object = json!({
                "name": image.name, "state": image.state, "size_bytes": image.size_bytes,
                "zero_bytes": zero, "own_bytes": own, "flock_bytes": flock, "site_bytes": site,
                "sent_bytes": sent, "resumed_bytes": resumed,
            });
            if direction == "received" {
                object["launchable"] = info.launchable.contains(&image.name).into();
            }
            if is_there(image.state) {
                object["digest"] = image.digest.to_string().into();
            }
            let under_way = info.under_way.iter().find(|(name, ..)| *name == image.name);
            if let Some((_, done, total)) = under_way {
                object["done_bytes"] = (*done).into();
                object["total_bytes"] = (*total).into();
            }
            object
        })
        .collect();
    let mut object = json!({
        "name": record.name, "direction": direction, "peer": record.peer_name, "atomic": record.atomic,
        "state": record.state, "in_progress": busy, "begun_unix": record.begun_unix,
        "touched_unix": record.touched_unix, "why": record.why, "images": images,
    });
    if !record.nodes.is_empty() {
        object["nodes"] = by_node(record)
            .into_iter()
            .map(|(name, node)| {
                json!({
                    "name": name, "images": node.images, "done": node.done,
                    "size_bytes": node.size_bytes, "sent_bytes": node.sent_bytes,
                })
            })
            .collect();
    }
    object
}

/// What a node of the site has received of a flock, or sent.
#[derive(Debug, Default, PartialEq, Eq)]
struct OfNode {
    images: usize,
    /// Those that are complete.
    done: usize,
    /// Bytes of the complete ones.
    size_bytes: u64,
    /// Those of them that crossed the link.
    sent_bytes: u64,
}

/// What each node of the site has received of a flock, or sent.
fn by_node(record: &FlockRecord) -> BTreeMap<&str, OfNode> {
    let mut all: BTreeMap<&str, OfNode> = BTreeMap::new();
    for (nth, name) in &record.nodes {
        let image = usize::try_from(*nth).ok();
        let Some(image) = image.and_then(|nth| record.images.get(nth)) else {
            continue;
        };
        let node = all.entry(name).or_default();
        node.images += 1;
        if is_there(image.state) {
            let [.., sent, _] = image.blocks.bytes();
            node.done += 1;
            node.size_bytes += image.size_bytes;
            node.sent_bytes += sent;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_core::ImageName;
    use drover_net::PeerKey;
    use drover_teleport::ImageBlocks;

    #[test]
    fn a_flock_as_json_has_its_images_by_origin() {
        let name = |text: &str| ImageName::new(text).unwrap();
        let there = FlockImage {
            state: ImageState::Arrived,
            blocks: ImageBlocks {
                flock: 2,
                sent: 1,
                ..ImageBlocks::default()
            },
            ..FlockImage::waiting(name("a.img"))
        };
        let info = FlockInfo {
            record: FlockRecord {
                name: name("shop"),
                id: [1; 16],
                peer: PeerKey([1; 32]),
                peer_name: "paris".into(),
                atomic: true,
                state: FlockState::Open,
                begun_unix: 1,
                touched_unix: 2,
                images: vec![there, FlockImage::waiting(name("b.img"))],
                why: String::new(),
                nodes: [(0, "lyon-1".to_owned())].into(),
            },
            sessions: 1,
            under_way: vec![(name("b.img"), 4096, 8192)],
            launchable: vec![name("a.img")],
        };
        let object = object(&info, "received", true);
        assert_eq!(object["state"], "open");
        assert_eq!(object["images"][0]["state"], "arrived");
        assert_eq!(object["images"][0]["flock_bytes"], 8192);
        assert_eq!(object["images"][1]["done_bytes"], 4096);
        assert!(object["images"][1].get("digest").is_none());
        assert_eq!(object["images"][0]["launchable"], true);
        assert_eq!(object["images"][1]["launchable"], false);
        let node = &object["nodes"][0];
        assert_eq!(
            (&node["name"], &node["sent_bytes"]),
            (&"lyon-1".into(), &4096.into())
        );
        let sent = super::object(&info, "sent", true);
        assert!(sent["images"][0].get("launchable").is_none());
    }
}
