//! `space`: the disk space used by a site.

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::site;
use drover_agent::text::{bytes, clean, count};
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_store::space::{Kind, Room, Space};

use crate::cli::SpaceArgs;
use crate::out;

/// The name of a kind of use, and how to free the space.
fn words(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Images => ("images", "drover rm"),
        Kind::Changes => ("changes to images", "drover changes drop"),
        Kind::Transfers => ("unfinished transfers", "drover transfers rm, or send again"),
        Kind::MountCaches => ("mount caches", "drover unmount"),
        Kind::SequenceData => ("sequence cache", "lower sequence-data in config.toml"),
        Kind::Index => ("index", "removed with the images"),
        Kind::Reserve => (
            "emergency space",
            "cannot be freed: used when the disk is full",
        ),
        Kind::Other => ("other", "cannot be freed: catalog, config, keys"),
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
            "not drover's files; drover rm removes the entry",
        ));
    }
    let heading = ["use", "files", "size", "on disk", "how to free"];
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
    let heading = ["file system", "holds", "size", "free"];
    out::line(&out::table(&heading, rows, &[2, 3]))?;
    if let Some(first) = space.unreadable.first() {
        let others = space.unreadable.len() - 1;
        let more = match others {
            0 => String::new(),
            n => format!(" (and {})", count(n, "more error")),
        };
        out::note(&format!("drover: not counted: {}{more}", clean(first)));
    }
    Ok(())
}
