//! `status`: the status of the running site.

use anyhow::{Result, bail};
use drover_agent::home::Home;
use drover_agent::remote::Call;
use drover_agent::serve::{GetMetrics, GetStatus};
use drover_agent::status::Status;
use drover_agent::text::{clean, moment};
use serde_json::json;

use crate::cli::StatusArgs;
use crate::out;

/// Prints the status of the running site.
///
/// # Errors
/// When no site is running, or it does not respond.
pub async fn status(home: &Home, args: StatusArgs) -> Result<()> {
    let Some(call) = Call::local(home).await? else {
        if args.json {
            out::json(&json!({"running": false, "home": home.dir()}))?;
        }
        bail!(
            "no site is running in {}; `drover serve` starts it",
            home.dir().display()
        );
    };
    if args.metrics {
        return out::line(call.ask(&GetMetrics, |()| {}).await?.trim_end());
    }
    let status = call.ask(&GetStatus, |()| {}).await?;
    match args.json {
        true => out::json(&status),
        false => out::line(&text_of(&status)),
    }
}

/// The status as text, with a table of the transfers.
fn text_of(status: &Status) -> String {
    let mut lines = vec![
        format!(
            "{} {} (drover {}, process {})",
            clean(&status.duty),
            clean(&status.name),
            clean(&status.version),
            status.process
        ),
        format!("key          {}", clean(&status.key)),
        format!("directory    {}", clean(&status.home)),
        format!("addresses    {}", clean(&status.addresses.join(", "))),
        format!("started      {} UTC", moment(status.started_unix)),
        format!(
            "images {}, peers {}, connections {}, sessions {}",
            status.images, status.peers, status.connections_open, status.sessions_open
        ),
    ];
    let Some(site) = &status.site else {
        return lines.join("\n");
    };
    for (what, n) in [
        ("images delivered", site.delivered_images),
        ("blocks matched", site.matched_blocks),
        ("sequences pending", site.pending_sequences),
        ("blocks received", site.sent_blocks),
    ] {
        lines.push(format!("{what}: {n}"));
    }
    if site.catching_up {
        lines.push("the matcher is catching up with the images of this site".into());
    }
    if !site.transfers.is_empty() {
        let rows = site.transfers.iter().map(|t| {
            let (done, total) = (t.done_blocks.to_string(), t.total_blocks.to_string());
            vec![clean(&t.name), clean(&t.peer), done, total]
        });
        let heading = ["name", "from", "blocks", "of"];
        let table = out::table(&heading, rows.collect(), &[2, 3]);
        lines.push(format!("transfers:\n{table}"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_teleport::{SiteStatus, TransferStatus};

    #[test]
    fn text_of_a_site_is_escaped() {
        let site = SiteStatus {
            transfers: vec![TransferStatus {
                name: "x.img\n".into(),
                ..TransferStatus::default()
            }],
            sent_blocks: 4,
            matcher: vec![("hits".into(), 5)],
            ..SiteStatus::default()
        };
        let json = json!({
            "running": true, "duty": "site", "name": "a\u{1b}[31m", "version": "0.1.0", "process": 7, "key": "k",
            "home": "/h", "addresses": ["10.0.0.1:7377"], "started_unix": 0, "uptime_seconds": 1, "images": 2,
            "peers": 1, "connections_open": 0, "sessions_open": 1, "site": site, "mounts": [],
        });
        let text = text_of(&serde_json::from_value(json).unwrap());
        assert!(text.contains("blocks received: 4"), "{text}");
        assert!(text.contains("x.img\\n"), "{text}");
        assert!(
            text.contains("images 2, peers 1, connections 0, sessions 1"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'));
    }
}
