//! `status`: the status of the running site.

use anyhow::{Result, bail};
use drover_agent::home::Home;
use drover_agent::remote::Call;
use drover_agent::serve::{GetMetrics, GetStatus};
use drover_agent::status::{DomainStatus, Status, Taken};
use drover_agent::text::{bytes, clean, moment};
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
    if !status.domains.is_empty() {
        lines.push(domains_of(&status.domains));
    }
    let peers = status.domains.iter().flat_map(|d| {
        let of = |taken: &Taken| {
            let quota = taken.quota_bytes.map_or_else(|| "none".into(), bytes);
            let used = bytes(taken.taken_bytes);
            vec![clean(&taken.peer), clean(&d.name), used, quota]
        };
        d.peers.iter().map(of)
    });
    let heading = ["peer", "domain", "takes", "quota"];
    lines.extend(section(
        "disk space of peers",
        &heading,
        peers.collect(),
        &[2, 3],
    ));
    let disks = status.disks.iter().map(|disk| {
        let state = match &disk.why {
            Some(why) => format!("{}: {}", disk.state, clean(why)),
            None => disk.state.clone(),
        };
        let size = disk.size.map_or_else(|| "-".into(), bytes);
        let can = if disk.read_only { "read" } else { "write" };
        vec![
            clean(&disk.name),
            clean(&disk.store),
            size,
            can.into(),
            state,
        ]
    });
    let heading = ["name", "store", "size", "peers may", "state"];
    lines.extend(section("disks in stores", &heading, disks.collect(), &[2]));
    let transfers = status.domains.iter().flat_map(|d| {
        let transfers = d.site.iter().flat_map(|site| &site.transfers);
        transfers.map(|t| {
            let (done, total) = (t.done_blocks.to_string(), t.total_blocks.to_string());
            vec![clean(&t.name), clean(&t.peer), clean(&d.name), done, total]
        })
    });
    let heading = ["name", "from", "domain", "blocks", "of"];
    lines.extend(section("transfers", &heading, transfers.collect(), &[3, 4]));
    lines.join("\n")
}

/// A table with a title; nothing without rows.
fn section(
    title: &str,
    heading: &[&str],
    rows: Vec<Vec<String>>,
    numbers: &[usize],
) -> Option<String> {
    let table = || out::table(heading, rows.clone(), numbers);
    (!rows.is_empty()).then(|| format!("{title}:\n{}", table()))
}

/// The table of the domains.
fn domains_of(domains: &[DomainStatus]) -> String {
    let rows = domains.iter().map(|d| {
        let state = match (&d.problem, &d.site) {
            (Some(problem), _) => clean(problem),
            (None, None) => "closed".into(),
            (None, Some(site)) if site.catching_up => "catching up".into(),
            (None, Some(_)) => "open".into(),
        };
        let known = |n: usize| match d.problem {
            Some(_) => "-".into(),
            None => n.to_string(),
        };
        let open = |n: Option<u64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        let site = d.site.as_ref();
        let mounts = d.served.as_ref().map(|now| now.writers + now.readers);
        vec![
            clean(&d.name),
            known(d.images),
            known(d.unfinished),
            open(mounts),
            d.leases.map_or_else(|| "-".into(), |n| n.to_string()),
            open(site.map(|s| s.delivered_images)),
            open(site.map(|s| s.matched_blocks)),
            open(site.map(|s| s.sent_blocks)),
            d.matcher_bytes().map_or_else(|| "-".into(), bytes),
            state,
        ]
    });
    let heading = [
        "domain",
        "images",
        "unfinished",
        "mounts",
        "leases",
        "delivered",
        "matched",
        "received",
        "matcher",
        "state",
    ];
    out::table(&heading, rows.collect(), &[1, 2, 3, 4, 5, 6, 7, 8])
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
            sent_blocks: 4711,
            matcher: vec![("memory".into(), 32 << 20)],
            ..SiteStatus::default()
        };
        let domains = [
            DomainStatus {
                name: "default".into(),
                site: Some(site),
                ..DomainStatus::default()
            },
            DomainStatus {
                name: "acme".into(),
                images: 3,
                peers: vec![Taken {
                    peer: "web".into(),
                    taken_bytes: 1024,
                    quota_bytes: Some(1 << 20),
                }],
                ..DomainStatus::default()
            },
        ];
        let json = json!({
            "running": true, "duty": "site", "name": "a\u{1b}[31m", "version": "0.1.0", "process": 7, "key": "k",
            "home": "/h", "addresses": ["10.0.0.1:7377"], "started_unix": 0, "uptime_seconds": 1, "images": 3,
            "peers": 1, "connections_open": 0, "sessions_open": 1, "domains": domains, "mounts": [], "disks": [],
        });
        let text = text_of(&serde_json::from_value(json).unwrap());
        let line = |start: &str| text.lines().find(|l| l.starts_with(start)).unwrap();
        assert!(
            line("default").contains("4711") && line("default").contains("32.0 MiB"),
            "{text}"
        );
        assert!(line("acme").ends_with("closed"), "{text}");
        assert!(
            line("web").contains("1.0 KiB") && line("web").ends_with("1.0 MiB"),
            "{text}"
        );
        assert!(text.contains("x.img\\n"), "{text}");
        assert!(
            text.contains("images 3, peers 1, connections 0, sessions 1"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'));
    }
}
