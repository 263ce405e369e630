//! What people and scripts see of a send.

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use drover_agent::text::{bytes, clean, count};
use drover_core::BLOCK_SIZE_U64;
use drover_teleport::progress::{Counters, ImageReport, SendEvent, WireTotals};
use drover_teleport::protocol::BATCH_BLOCKS;
use drover_teleport::stages::StageTime;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use crate::out;

/// How often a JSON line tells the progress.
const JSON_EVERY: Duration = Duration::from_millis(500);

/// How often a plain line does, where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Over how long the rate on the wire is taken.
const RATE_OVER: Duration = Duration::from_secs(5);

/// Shows a send: JSON lines on stdout, or a bar or plain lines on stderr.
pub struct Show {
    mode: Mode,
    dry_run: bool,
    peer: String,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    state: Mutex<State>,
}

enum Mode {
    Json,
    Bar(ProgressBar),
    Lines,
}

#[derive(Default)]
struct State {
    image: Option<Image>,
    told: Option<Instant>,
    /// Blocks complete there when that last changed, and blocks sent by then.
    complete: (u64, u64),
    /// Bytes on the wire at moments of the last seconds.
    wire: Vec<(Instant, u64)>,
    /// What a dry run has found, for the last line.
    estimates: Vec<Value>,
    /// What was delivered so far.
    delivered: Vec<ImageReport>,
}

struct Image {
    name: String,
    walk_blocks: u64,
    /// The length of the file: what is data of it is not the same every time that it is looked at.
    size_bytes: u64,
    started: Instant,
    /// Blocks that an earlier session had brought.
    resumed: u64,
    /// Blocks that were there when this attempt was first looked at: those took none of its time.
    before: Option<u64>,
}

/// What is known at one moment.
struct Now {
    name: String,
    /// Bytes read and hashed here: ahead of what is complete there.
    walked: u64,
    total: u64,
    /// Bytes complete there, about.
    done: u64,
    sent: u64,
    received: u64,
    rate: u64,
    /// Bytes that the destination had, of batches that are complete there.
    matched: u64,
    /// Unknown until the destination has answered.
    matched_share: Option<f64>,
    left: Option<Duration>,
}

impl Show {
    /// Shows a send to `peer` whose counters are these.
    pub fn new(
        json: bool,
        dry_run: bool,
        peer: String,
        counters: Arc<Counters>,
        wire: Arc<WireTotals>,
    ) -> Show {
        let mode = if json {
            Mode::Json
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
            let style = "{prefix} {bar:16} {percent:>3}% {wide_msg}";
            bar.set_style(
                ProgressStyle::with_template(style)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            Mode::Bar(bar)
        } else {
            Mode::Lines
        };
        Show {
            mode,
            dry_run,
            peer,
            counters,
            wire,
            state: Mutex::default(),
        }
    }

    /// Shows what happened.
    pub fn event(&self, event: SendEvent) {
        match event {
            SendEvent::Note { path, text } => self.tell(
                json!({"event": "note", "path": path, "message": clean(&text)}),
                || format!("note: {}: {}", path.display(), text),
            ),
            SendEvent::Started {
                name,
                walk_blocks,
                size_bytes,
                data_bytes,
                resumed_blocks,
            } => {
                self.tell(
                    json!({
                        "event": "started", "name": name, "walk_bytes": walk_blocks * BLOCK_SIZE_U64,
                        "size_bytes": size_bytes, "data_bytes": data_bytes, "resumed_blocks": resumed_blocks,
                    }),
                    || match resumed_blocks {
                        0 => format!("{name}: {} to {}", bytes(data_bytes), self.peer),
                        n => format!("{name}: {} to {}, {} of it there already", bytes(data_bytes), self.peer, bytes(n * BLOCK_SIZE_U64)),
                    },
                );
                self.state().complete = (0, 0);
                self.state().image = Some(Image {
                    name,
                    walk_blocks,
                    size_bytes,
                    started: Instant::now(),
                    resumed: resumed_blocks,
                    before: None,
                });
            }
            SendEvent::Reconnecting { error, delay_ms } => {
                // Nothing goes on until it has started again.
                self.state().image = None;
                if let Mode::Bar(bar) = &self.mode {
                    bar.set_message("reconnecting");
                }
                self.tell(
                    json!({"event": "reconnecting", "message": clean(&error), "delay_ms": delay_ms}),
                    || format!("{error}; trying again in {:.1} s", delay_ms as f64 / 1000.0),
                );
            }
            SendEvent::Delivered(report) => {
                self.state().image = None;
                let mut line = of_report(&report);
                line["event"] = "delivered".into();
                self.tell(line, || {
                    format!("{}: delivered, digest {}", report.name, report.digest)
                });
                self.state().delivered.push(*report);
            }
            SendEvent::Failed { name, error } => {
                self.state().image = None;
                self.tell(
                    json!({"event": "failed", "name": name, "message": clean(&error)}),
                    || format!("{name}: not delivered: {error}"),
                );
            }
            SendEvent::Estimated {
                name,
                estimate,
                wire_bytes,
            } => {
                let found = json!({
                    "name": name, "wire_bytes": wire_bytes,
                    "matched_blocks": estimate.matched_blocks, "sent_blocks": estimate.sent_blocks,
                    "zero_blocks": estimate.zero_blocks,
                });
                let mut line = found.clone();
                line["event"] = "estimated".into();
                let mut state = self.state();
                state.image = None;
                state.estimates.push(found);
                drop(state);
                self.tell(line, || {
                    format!(
                        "{name}: about {} would cross the link; {} are at {} already, {} are not",
                        bytes(wire_bytes),
                        bytes(estimate.matched_blocks * BLOCK_SIZE_U64),
                        self.peer,
                        bytes(estimate.sent_blocks * BLOCK_SIZE_U64),
                    )
                });
            }
        }
    }

    /// Shows the progress when it is time to.
    pub fn look(&self) {
        let at = Instant::now();
        let mut state = self.state();
        let State {
            image,
            told,
            complete,
            wire,
            ..
        } = &mut *state;
        let Some(image) = image else { return };
        let sent = self.wire.sent();
        wire.push((at, sent));
        wire.retain(|(then, _)| at.duration_since(*then) <= RATE_OVER);
        let done = Counters::get(&self.counters.done_blocks);
        if complete.0 != done {
            *complete = (done, Counters::get(&self.counters.sent_blocks));
        }
        let every = match self.mode {
            Mode::Json => JSON_EVERY,
            Mode::Lines => LINE_EVERY,
            Mode::Bar(_) => Duration::ZERO,
        };
        if told.is_some_and(|then| at.duration_since(then) < every) {
            return;
        }
        *told = Some(at);
        let now = self.now(image, wire, *complete, at);
        drop(state);
        self.show(&now);
    }

    fn now(
        &self,
        image: &mut Image,
        wire: &[(Instant, u64)],
        complete: (u64, u64),
        at: Instant,
    ) -> Now {
        let c = &self.counters;
        let walked = Counters::get(&c.walked_blocks).min(image.walk_blocks);
        let sent = Counters::get(&c.sent_blocks);
        let done = done_of(complete, sent, image.resumed).min(image.walk_blocks);
        let before = *image.before.get_or_insert(done);
        let answered = Counters::get(&c.answered_blocks);
        let matched = Counters::get(&c.matched_blocks);
        let of_file = |blocks| part_of(image.size_bytes, blocks, image.walk_blocks);
        let rate = match (wire.first(), wire.last()) {
            (Some(first), Some(last)) if last.0 > first.0 => {
                ((last.1 - first.1) as f64 / (last.0 - first.0).as_secs_f64()) as u64
            }
            _ => 0,
        };
        Now {
            name: image.name.clone(),
            walked: of_file(walked),
            total: image.size_bytes,
            done: of_file(done),
            sent: self.wire.sent(),
            received: self.wire.received(),
            rate,
            matched: matched * BLOCK_SIZE_U64,
            matched_share: (answered > 0).then(|| matched as f64 / answered as f64),
            left: time_left(
                at - image.started,
                done.saturating_sub(before),
                image.walk_blocks - done,
            ),
        }
    }

    fn show(&self, now: &Now) {
        let percent = now.done * 100 / now.total.max(1);
        let left = now.left.map_or_else(|| "-".into(), short);
        let matched = now.matched_share.map_or_else(
            || "-".into(),
            |s| format!("{} ({:.0}%)", bytes(now.matched), s * 100.0),
        );
        match &self.mode {
            Mode::Json => emit(&json!({
                "event": "progress", "name": now.name, "walked_bytes": now.walked, "total_bytes": now.total,
                "done_bytes": now.done, "wire_sent_bytes": now.sent, "wire_received_bytes": now.received,
                "bytes_per_second": now.rate, "matched_bytes": now.matched, "matched_share": now.matched_share.map(|s| (s * 1e4).round() / 1e4),
                "seconds_left": now.left.map(|l| l.as_secs()),
            })),
            Mode::Bar(bar) => {
                bar.set_length(now.total);
                bar.set_position(now.done);
                bar.set_prefix(clean(&now.name));
                bar.set_message(format!(
                    "{}/{}, wire {} at {}/s, matched {matched}, {left} left",
                    bytes(now.done),
                    bytes(now.total),
                    bytes(now.sent),
                    bytes(now.rate)
                ));
            }
            Mode::Lines => out::note(&format!(
                "{}: {percent}% of {}, wire {} at {}/s, matched {matched}, {left} left",
                clean(&now.name),
                bytes(now.total),
                bytes(now.sent),
                bytes(now.rate)
            )),
        }
    }

    /// Shows the result.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn done(&self, reports: &[ImageReport]) -> Result<()> {
        self.clear();
        if let Mode::Json = self.mode {
            let images: Vec<Value> = reports.iter().map(of_report).collect();
            let mut last = json!({"event": "done", "images": images});
            if self.dry_run {
                last["estimates"] = std::mem::take(&mut self.state().estimates).into();
            }
            return out::json(&last);
        }
        if self.dry_run || reports.is_empty() {
            return Ok(());
        }
        out::line(&summary(reports))?;
        if let [_, _, ..] = reports {
            let wire: u64 = reports
                .iter()
                .map(|r| r.wire_sent_bytes + r.wire_received_bytes)
                .sum();
            out::note(&format!(
                "{}, {} on the wire",
                count(reports.len(), "image"),
                bytes(wire)
            ));
        }
        Ok(())
    }

    /// The send failed: what was delivered of it is said all the same.
    pub fn failed(&self) {
        self.clear();
        let delivered = std::mem::take(&mut self.state().delivered);
        if !matches!(self.mode, Mode::Json) && !delivered.is_empty() {
            // That it cannot be written is no news beside the failure.
            let _ = out::line(&summary(&delivered));
        }
    }

    /// Takes the bar away.
    fn clear(&self) {
        if let Mode::Bar(bar) = &self.mode {
            bar.finish_and_clear();
        }
    }

    fn tell(&self, json: Value, text: impl FnOnce() -> String) {
        match &self.mode {
            Mode::Json => emit(&json),
            Mode::Bar(bar) => bar.suspend(|| out::note(&clean(&text()))),
            Mode::Lines => out::note(&clean(&text())),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Prints a JSON line; a send does not fail because nobody can read of its progress.
fn emit(value: &Value) {
    if let Err(e) = out::json(value) {
        tracing::debug!("{e:#}");
    }
}

/// The report with its digest as text and in the order that is documented.
fn of_report(r: &ImageReport) -> Value {
    json!({
        "name": r.name,
        "digest": r.digest.to_string(),
        "size_bytes": r.size_bytes,
        "data_bytes": r.data_bytes,
        "wire_sent_bytes": r.wire_sent_bytes,
        "wire_received_bytes": r.wire_received_bytes,
        "matched_blocks": r.matched_blocks,
        "sent_blocks": r.sent_blocks,
        "zero_blocks": r.zero_blocks,
        "seconds": (r.seconds * 1e3).round() / 1e3,
        "resumed_blocks": r.resumed_blocks,
        "matched": r.matched,
        "wire": r.wire,
        "stages": {
            "source": of_stages(&r.stages.source.named()),
            "destination": of_stages(&r.stages.destination.named()),
        },
    })
}

/// The stages of one end, each with what it did, in seconds.
fn of_stages(stages: &[(&str, StageTime)]) -> Value {
    let seconds = |ns: u64| (ns as f64 / 1e6).round() / 1e3;
    let of = |time: &StageTime| {
        json!({
            "busy_seconds": seconds(time.busy_ns),
            "wait_seconds": seconds(time.wait_ns),
            "socket_seconds": seconds(time.socket_ns),
            "bytes": time.bytes,
        })
    };
    stages
        .iter()
        .map(|(name, time)| ((*name).to_owned(), of(time)))
        .collect()
}

/// The table for people.
fn summary(reports: &[ImageReport]) -> String {
    let rows = reports
        .iter()
        .map(|r| {
            let blocks = r.matched_blocks + r.sent_blocks;
            vec![
                clean(&r.name),
                bytes(r.size_bytes),
                bytes(r.data_bytes),
                bytes(r.wire_sent_bytes + r.wire_received_bytes),
                format!(
                    "{:.1}%",
                    100.0 * r.matched_blocks as f64 / blocks.max(1) as f64
                ),
                format!("{:.1} s", r.seconds),
                r.digest.to_string()[..12].to_string(),
            ]
        })
        .collect();
    out::table(
        &["image", "size", "data", "wire", "matched", "time", "digest"],
        rows,
        &[1, 2, 3, 4, 5],
    )
}

/// Blocks that are there, about. Whole batches are told as complete (`complete`, and what was sent by then); what was sent since
/// belongs to the next of them. Of a transfer that goes on no batch need be complete and yet much of it be there.
fn done_of(complete: (u64, u64), sent: u64, resumed: u64) -> u64 {
    let since = sent.saturating_sub(complete.1).min(BATCH_BLOCKS - 1);
    (complete.0 + since).max(match resumed {
        0 => 0,
        n => n + sent,
    })
}

/// How much of a file is done when so many of the blocks are that are read of it: holes are not read, and how
/// many there are changes with what the file system has in memory.
fn part_of(size: u64, done: u64, blocks: u64) -> u64 {
    match blocks {
        0 => size,
        n => (u128::from(size) * u128::from(done.min(n)) / u128::from(n)) as u64,
    }
}

/// How long the rest takes if it goes on like this; unknown in the first second.
fn time_left(elapsed: Duration, done: u64, rest: u64) -> Option<Duration> {
    if elapsed < Duration::from_secs(1) || done == 0 {
        return None;
    }
    Some(elapsed.mul_f64((rest as f64 / done as f64).min(1e6)))
}

/// A duration in its two largest units.
fn short(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_core::Digest;

    fn report() -> ImageReport {
        ImageReport {
            name: "x\u{1b}.img".into(),
            digest: Digest([7; 32]),
            size_bytes: 10 << 20,
            data_bytes: 8 << 20,
            wire_sent_bytes: 1000,
            wire_received_bytes: 500,
            matched_blocks: 1500,
            sent_blocks: 500,
            zero_blocks: 48,
            resumed_blocks: 0,
            matched: Default::default(),
            wire: Default::default(),
            seconds: 1.23456,
            stages: Default::default(),
        }
    }

    #[test]
    fn scripts_find_what_was_promised() {
        let line = of_report(&report());
        assert_eq!(line["digest"], "07".repeat(32));
        for field in [
            "name",
            "size_bytes",
            "data_bytes",
            "wire_sent_bytes",
            "wire_received_bytes",
            "matched_blocks",
            "sent_blocks",
            "zero_blocks",
            "seconds",
            "stages",
        ] {
            assert!(!line[field].is_null(), "{field}");
        }
        assert_eq!(line["seconds"], 1.235);
    }

    #[test]
    fn people_find_a_table() {
        let text = summary(&[report()]);
        assert!(
            text.contains("75.0%") && text.contains("1.5 KiB") && text.contains("10.0 MiB"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn time_left_is_known_after_a_second() {
        let s = Duration::from_secs;
        assert_eq!(time_left(Duration::from_millis(900), 10, 10), None);
        assert_eq!(time_left(s(10), 10, 20), Some(s(20)));
        assert_eq!(time_left(s(10), 0, 20), None);
        assert_eq!(short(s(59)), "59 s");
        assert_eq!(short(s(61)), "1 min 1 s");
        assert_eq!(short(s(7384)), "2 h 3 min");
    }

    #[test]
    fn what_is_there_counts_before_its_batch_is_whole() {
        assert_eq!(done_of((0, 0), 100, 0), 100);
        assert_eq!(done_of((BATCH_BLOCKS, 1000), 1300, 0), BATCH_BLOCKS + 300);
        assert_eq!(done_of((0, 0), 9 * BATCH_BLOCKS, 0), BATCH_BLOCKS - 1);
        // Most of three batches came before, of none all.
        let resumed = 3 * BATCH_BLOCKS - 30;
        assert_eq!(done_of((0, 0), 10, resumed), resumed + 10);
        assert_eq!(
            done_of((4 * BATCH_BLOCKS, 30), 30, resumed),
            4 * BATCH_BLOCKS
        );
    }

    #[test]
    fn the_total_is_the_file_whatever_of_it_is_read() {
        let size = 10 << 20;
        assert_eq!(part_of(size, 0, 900), 0);
        assert_eq!(part_of(size, 450, 900), size / 2);
        assert_eq!(part_of(size, 500, 1000), size / 2);
        assert_eq!(
            (part_of(size, 900, 900), part_of(size, 1000, 1000)),
            (size, size)
        );
        assert_eq!((part_of(0, 0, 0), part_of(size, 0, 0)), (0, size));
        assert_eq!(part_of(u64::MAX, 7, 7), u64::MAX);
    }
}
