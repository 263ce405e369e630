//! `audit`.

use std::time::Duration;

use anyhow::{Context, Result};
use drover_agent::audit::{By, Event, Filter, Lines, Outcome, Record};
use drover_agent::home::Home;
use drover_agent::text::{bytes, clean, count};
use drover_net::DEFAULT_DOMAIN;

use crate::cli::AuditArgs;
use crate::out;

/// How often the log is looked at for more.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Times below this are not shown.
const MIN_SHOWN_MS: u64 = 100;

/// Shows the audit log.
///
/// # Errors
/// When it cannot be read.
pub fn audit(home: &Home, args: &AuditArgs) -> Result<()> {
    let filter = Filter {
        since: args.since,
        peer: args.peer.clone(),
        image: args.image.as_ref().map(ToString::to_string),
        refused: args.refused,
    };
    let opened = home.audit().lines();
    let mut lines = opened.with_context(|| cannot_read(home))?;
    let mut shown = show(home, &mut lines, &filter, args.json, 0)?;
    let damaged = lines.damaged();
    if damaged > 0 {
        let damaged = count(usize::try_from(damaged).unwrap_or(usize::MAX), "line");
        out::note(&format!(
            "drover: skipped {damaged} of the audit log: damaged"
        ));
    }
    if args.follow {
        loop {
            std::thread::sleep(LOOK_EVERY);
            shown = show(home, &mut lines, &filter, args.json, shown)?;
        }
    }
    if shown == 0 && !args.json {
        out::note("drover: no such events in the audit log");
    }
    Ok(())
}

/// Prints the events that there are, after `shown` others; returns how many were printed in all.
fn show(
    home: &Home,
    lines: &mut Lines,
    filter: &Filter,
    json: bool,
    mut shown: u64,
) -> Result<u64> {
    while let Some(entry) = lines.next_entry().with_context(|| cannot_read(home))? {
        if !filter.wants(&entry.record) {
            continue;
        }
        if json {
            out::line(&entry.line)?;
        } else {
            if shown == 0 {
                out::line(&row("TIME (UTC)", "EVENT", "PEER", "IMAGE", "DETAILS"))?;
            }
            out::line(&row_of(&entry.record))?;
        }
        shown += 1;
    }
    Ok(shown)
}

fn cannot_read(home: &Home) -> String {
    format!("cannot read the audit log in {}", home.dir().display())
}

/// A row of the table, whose columns have fixed widths: the log may be long.
fn row(time: &str, event: &str, peer: &str, image: &str, details: &str) -> String {
    let row = format!("{time:<19}  {event:<16}  {peer:<12}  {image:<20}  {details}");
    row.trim_end().to_owned()
}

fn row_of(record: &Record) -> String {
    let time = record
        .time
        .get(..19)
        .unwrap_or(&record.time)
        .replace('T', " ");
    let image = record
        .image
        .as_deref()
        .or(record.machine.as_deref())
        .unwrap_or("-");
    let row = row(
        &time,
        &record.event.name(),
        &who(record),
        image,
        &details(record),
    );
    clean(&row)
}

fn who(record: &Record) -> String {
    match (&record.peer, record.by) {
        (Some(peer), _) => peer.clone(),
        (None, By::User) => "(user)".into(),
        (None, By::Site) => "(site)".into(),
        (None, By::Stranger | By::Peer) => match record.key {
            Some(key) => format!("({})", key.short()),
            None => "(stranger)".into(),
        },
    }
}

/// What the other columns do not say.
fn details(record: &Record) -> String {
    let mut parts = Vec::new();
    if record.outcome == Outcome::Failed && record.event != Event::SendFailed {
        parts.push("failed".to_owned());
    }
    let request = record.request.as_deref().unwrap_or_default();
    match (&record.right, &record.detail) {
        (Some(right), _) => parts.push(format!("{request}: it does not have the right {right}")),
        (None, Some(detail)) if !request.is_empty() => parts.push(format!("{request}: {detail}")),
        (None, Some(detail)) => parts.push(detail.clone()),
        (None, None) if !request.is_empty() => parts.push(request.to_owned()),
        (None, None) => {}
    }
    parts.extend(record.bytes.map(bytes));
    let shown = record.ms.filter(|ms| *ms >= MIN_SHOWN_MS);
    parts.extend(shown.map(|ms| format!("{:.1} s", ms as f64 / 1000.0)));
    parts.extend(record.ticket.as_ref().map(|id| format!("ticket {id}")));
    let domain = record.domain.as_deref().filter(|d| *d != DEFAULT_DOMAIN);
    parts.extend(domain.map(|domain| format!("domain {domain}")));
    parts.extend(record.address.as_ref().map(|from| format!("from {from}")));
    parts.extend(record.more.map(|more| format!("and {more} more like it")));
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use drover_core::ImageName;
    use drover_net::{Code, PeerKey, Refusal, Right};

    use super::*;

    fn shown(record: Record) -> String {
        let record = Record {
            time: "2026-11-23T10:00:00.123Z".into(),
            ..record
        };
        row_of(&record)
    }

    #[test]
    fn rows_say_who_did_what_and_from_where() {
        let name = ImageName::new("web.img").unwrap();
        let refusal = Refusal::new(Code::Denied, "no");
        let refused = Record::refused("mount.open", &refusal, Some(Right::Write));
        let row = shown(
            refused
                .by_peer("zeta", PeerKey([1; 32]))
                .from("10.0.0.7:99")
                .image(&name)
                .in_domain("acme"),
        );
        assert!(
            row.starts_with("2026-11-23 10:00:00  refused           zeta          web.img "),
            "{row}"
        );
        assert!(
            row.ends_with(
                "mount.open: it does not have the right write; domain acme; from 10.0.0.7:99"
            ),
            "{row}"
        );
        let row = shown(Record {
            more: Some(7),
            ..Record::new(Event::Refused).by_stranger(None)
        });
        assert!(
            row.contains("(stranger)") && row.ends_with("and 7 more like it"),
            "{row}"
        );
        let sent = Record::new(Event::SendDelivered).bytes(8 << 20);
        let row = shown(sent.took(Duration::from_millis(1234)));
        assert!(
            row.contains("(user)") && row.ends_with("8.0 MiB; 1.2 s"),
            "{row}"
        );
    }
}
