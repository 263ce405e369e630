//! `space`: what takes room at this home, and how it is given back.

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::site;
use drover_agent::text::{bytes, clean, count};
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_store::space::{Kind, Room, Space};

use crate::cli::SpaceArgs;
use crate::out;

/// The name of what takes room, and how its room is given back.
fn words(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Images => ("images", "drover rm"),
        Kind::Changes => ("changes to images", "drover changes drop"),
        Kind::Transfers => (
            "unfinished transfers",
            "send them again, or `drover transfers rm`",
        ),
        Kind::MountCaches => ("caches of mounts", "drover unmount"),
        Kind::SequenceData => ("sequence data", "sequence-data in config.toml"),
        Kind::Index => ("index", "goes with the images"),
        Kind::Reserve => ("reserve", "kept for a full disk"),
        Kind::Other => ("other", "catalog, settings, keys"),
    }
}

/// `drover space`.
///
/// # Errors
/// When the catalog cannot be read.
pub fn space(home: &Home, args: &SpaceArgs) -> Result<()> {
    let limit = home.config.sequence_data.unwrap_or(SEQUENCE_DATA_BYTES);
    let space = Space::look(home.places(), &site::look_at_catalog(home)?, limit)?;
    if args.json {
        return out::json(&space);
    }
    show(&space)
}

fn show(space: &Space) -> Result<()> {
    let row = |what: &str, room: &Room, free: &str| {
        vec![
            what.into(),
            room.files.to_string(),
            bytes(room.size_bytes),
            bytes(room.disk_bytes),
            free.into(),
        ]
    };
    let mut rows: Vec<_> = space
        .items
        .iter()
        .map(|item| {
            let (what, free) = words(item.kind);
            row(what, &item.room, free)
        })
        .collect();
    rows.push(row("total", &space.total, ""));
    if space.indexed.files > 0 {
        rows.push(row(
            "(indexed in place)",
            &space.indexed,
            "not drover's files",
        ));
    }
    let heading = ["what", "files", "size", "on disk", "to free it"];
    out::line(&out::table(&heading, rows, &[1, 2, 3]))?;
    let rows = space
        .file_systems
        .iter()
        .map(|f| {
            vec![
                clean(&f.path.display().to_string()),
                f.holds.join(", "),
                bytes(f.size_bytes),
                bytes(f.available_bytes),
            ]
        })
        .collect();
    out::line("")?;
    let heading = ["file system of", "holds", "size", "free"];
    out::line(&out::table(&heading, rows, &[2, 3]))?;
    if let Some(first) = space.unreadable.first() {
        let others = space.unreadable.len() - 1;
        let more = match others {
            0 => String::new(),
            n => format!(" (and {})", count(n, "other")),
        };
        out::note(&format!(
            "drover: not all was looked at: {}{more}",
            clean(first)
        ));
    }
    Ok(())
}
