//! `nodes`.

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::join;
use drover_agent::text::count;
use serde_json::json;

use crate::cli::{NodesAction, NodesArgs};
use crate::{out, prompt};

/// Lists nodes, drains and forgets them.
///
/// # Errors
/// When the site has no nodes, or its database refuses.
pub fn nodes(home: &Home, args: NodesArgs) -> Result<()> {
    match args.action {
        None => list(home, args.json),
        Some(NodesAction::List { json }) => list(home, json),
        Some(NodesAction::Drain { name, undo, json }) => {
            join::nodes(home)?.drain(&name, !undo)?;
            match (json, undo) {
                (true, _) => out::json(&json!({"name": name, "draining": !undo})),
                (false, false) => out::line(&format!("{name} takes no new sessions and mounts")),
                (false, true) => out::line(&format!("{name} serves again")),
            }
        }
        Some(NodesAction::Remove { name, yes, json }) => {
            let listed = join::nodes(home)?.list()?;
            let mounts = listed.iter().find(|node| node.name == name);
            let mounts = mounts.map_or(0, |node| node.mounts);
            let also = match mounts {
                0 => String::new(),
                n => format!(", which has mounts or changes of {}", count(n, "image")),
            };
            prompt::confirm(&format!("Forget the node {name}{also}?"), yes)?;
            join::remove_node(home, &name)?;
            match json {
                true => out::json(&json!({"name": name, "removed": true})),
                false => out::line(&format!("forgot the node {name}")),
            }
        }
    }
}

fn list(home: &Home, json: bool) -> Result<()> {
    let all = join::nodes(home)?.list()?;
    let own = home.node_name();
    if json {
        return all.iter().try_for_each(|node| {
            out::json(&json!({
                "name": node.name,
                "here": node.name == own,
                "state": node.row.state.as_str(),
                "term_left_ms": node.left_ms,
                "up_ms": node.up_ms,
                "transfers": node.transfers,
                "mounts": node.mounts,
                "addresses": node.row.addresses,
                "version": node.row.version,
            }))
        });
    }
    let rows = all.into_iter().map(|node| {
        let left = match node.row.state.is_in() {
            true => format!("{} s", node.left_ms.div_euclid(1000)),
            false => "-".to_owned(),
        };
        let here = if node.name == own { " (this one)" } else { "" };
        vec![
            format!("{}{here}", node.name),
            node.row.state.as_str().to_owned(),
            left,
            node.transfers.to_string(),
            node.mounts.to_string(),
            node.row.addresses.join(", "),
        ]
    });
    out::line(&out::table(
        &["name", "state", "term", "transfers", "mounts", "addresses"],
        rows.collect(),
        &[2, 3, 4],
    ))
}
