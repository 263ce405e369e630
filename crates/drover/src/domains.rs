//! `domains`.

use anyhow::Result;
use drover_agent::domains;
use drover_agent::home::Home;
use drover_agent::text::bytes;
use serde_json::json;

use crate::bar::Bar;
use crate::cli::{DomainsAction, DomainsArgs};
use crate::{out, prompt};

/// Lists, adds and removes domains, and moves images between them.
///
/// # Errors
/// When the site refuses, or a catalog cannot be read.
pub async fn domains(home: &Home, args: DomainsArgs) -> Result<()> {
    match args.action {
        None => list(home, args.json),
        Some(DomainsAction::List { json }) => list(home, json),
        Some(DomainsAction::Add { name, json }) => {
            domains::add(home, &name).await?;
            match json {
                true => out::json(&json!({"name": name, "added": true})),
                false => out::line(&format!(
                    "added the domain {name}; `drover ticket --domain {name}` lets a peer in"
                )),
            }
        }
        Some(DomainsAction::Rm { name, yes, json }) => {
            prompt::confirm(
                &format!("Remove the domain {name}, which must be empty?"),
                yes,
            )?;
            domains::remove(home, &name).await?;
            match json {
                true => out::json(&json!({"name": name, "removed": true})),
                false => out::line(&format!("removed the domain {name}")),
            }
        }
        Some(DomainsAction::Move {
            image,
            from,
            to,
            json,
        }) => {
            let bar = Bar::new(image.as_str(), json);
            let shown = bar.clone();
            let progress = move |done, total| shown.at(done, total);
            let moved = domains::move_image(&home.domain(&from)?, &image, &to, progress).await;
            bar.clear();
            moved?;
            match json {
                true => out::json(&json!({"name": image.as_str(), "from": from, "to": to})),
                false => out::line(&format!("moved {image} from {from} to {to}")),
            }
        }
    }
}

fn list(home: &Home, json: bool) -> Result<()> {
    let all = domains::list(home)?;
    if json {
        return all.iter().try_for_each(out::json);
    }
    let row = |domain: domains::DomainInfo| {
        let peers = match domain.peers.is_empty() {
            true => "-".to_owned(),
            false => domain.peers.join(", "),
        };
        vec![
            domain.name,
            domain.images.to_string(),
            bytes(domain.data_bytes),
            peers,
        ]
    };
    let rows = all.into_iter().map(row).collect();
    out::line(&out::table(
        &["name", "images", "data", "peers"],
        rows,
        &[1, 2],
    ))
}
