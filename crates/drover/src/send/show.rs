//! The output of `send`: progress and results, for people and for scripts.

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use drover_agent::text::{bytes, clean, count};
use drover_core::BLOCK_SIZE_U64;
use drover_teleport::StageTime;
use drover_teleport::progress::{Counters, ImageReport, SendEvent, WireTotals};
use drover_teleport::protocol::BATCH_BLOCKS;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use super::bars::Bars;
use crate::out;

/// How often the progress is sampled.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// Interval of progress events with `--json`.
const JSON_INTERVAL: Duration = Duration::from_millis(500);

/// Interval of progress lines where stderr is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Period over which the network rate is averaged.
const RATE_PERIOD: Duration = Duration::from_secs(5);

/// Shows a send: JSON lines on stdout, or a bar or plain lines on stderr.
pub struct Show {
    mode: Mode,
    dry_run: bool,
    peer: String,
    counters: Arc<Counters>,
    /// Bytes on the sockets; of one of several that send images, none: they share them.
    wire: Option<Arc<WireTotals>>,
    progress: Mutex<Progress>,
}

enum Mode {
    Json,
    Bar(ProgressBar),
    /// One of several that send images of a flock, on a terminal.
    Bars(Arc<Bars>),
    Lines,
}

#[derive(Default)]
struct Progress {
    image: Option<Image>,
    /// When the progress was last shown.
    shown: Option<Instant>,
    /// Blocks complete at the peer when that number last changed, and blocks sent by then.
    complete: (u64, u64),
    /// Samples of the last seconds: bytes sent on the network.
    wire: Vec<(Instant, u64)>,
    /// The estimates of a dry run, for the last line.
    estimates: Vec<Value>,
    /// The images delivered so far.
    delivered: Vec<ImageReport>,
}

struct Image {
    name: String,
    walk_blocks: u64,
    /// The length of the file. Unlike the amount of data in it, it is the same each time the file is opened.
    size_bytes: u64,
    started: Instant,
    /// Blocks received in earlier sessions.
    resumed: u64,
    /// Blocks complete at the first sample: they took no time of this session.
    before: Option<u64>,
}

/// A sample of the progress.
struct Sample {
    name: String,
    /// Bytes read and hashed here, ahead of `done`.
    walked: u64,
    total: u64,
    /// Bytes complete at the peer, approximately.
    done: u64,
    sent: u64,
    received: u64,
    rate: u64,
    /// Bytes that the peer had already, of complete batches.
    matched: u64,
    /// Unknown until the peer has replied.
    matched_share: Option<f64>,
    left: Option<Duration>,
}

impl Show {
    /// Shows a send to `peer` with these counters; a bar only if it is `alone` on the terminal.
    pub fn new(
        json: bool,
        dry_run: bool,
        alone: bool,
        peer: String,
        counters: Arc<Counters>,
        wire: Arc<WireTotals>,
    ) -> Show {
        let mode = if json {
            Mode::Json
        } else if alone && std::io::stderr().is_terminal() {
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
            wire: Some(wire),
            progress: Mutex::default(),
        }
    }

    /// Shows one of several that send images of a flock, with `bars` if there is a terminal.
    pub fn of_flock(
        json: bool,
        bars: Option<Arc<Bars>>,
        peer: String,
        counters: Arc<Counters>,
    ) -> Show {
        let mode = match bars {
            _ if json => Mode::Json,
            Some(bars) => Mode::Bars(bars),
            None => Mode::Lines,
        };
        Show {
            mode,
            dry_run: false,
            peer,
            counters,
            wire: None,
            progress: Mutex::default(),
        }
    }

    /// Bytes sent and received; for one of several, of the image that it sends, before encryption.
    fn wire_bytes(&self) -> (u64, u64) {
        match &self.wire {
            Some(wire) => (wire.sent(), wire.received()),
            None => {
                let wire = self.counters.wire();
                (wire.data + wire.digests + wire.header, wire.plan)
            }
        }
    }

    /// Shows an event.
    pub fn event(&self, event: SendEvent) {
        match event {
            SendEvent::Note { path, text } => self.print(
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
                self.print(
                    json!({
                        "event": "started", "name": name, "walk_bytes": walk_blocks * BLOCK_SIZE_U64,
                        "size_bytes": size_bytes, "data_bytes": data_bytes, "resumed_blocks": resumed_blocks,
                    }),
                    || match resumed_blocks {
                        0 => format!("{name}: {} to {}", bytes(data_bytes), self.peer),
                        n => format!("{name}: {} to {}, resuming after {}", bytes(data_bytes), self.peer, bytes(n * BLOCK_SIZE_U64)),
                    },
                );
                self.progress().complete = (0, 0);
                self.progress().image = Some(Image {
                    name,
                    walk_blocks,
                    size_bytes,
                    started: Instant::now(),
                    resumed: resumed_blocks,
                    before: None,
                });
            }
            SendEvent::Skips { name } => {
                self.print(json!({"event": "skips", "name": name}), || {
                    format!(
                        "{name}: {} has an old copy: what did not change is not read",
                        self.peer
                    )
                })
            }
            SendEvent::Reconnecting { error, delay_ms } => {
                // No progress until the image has started again.
                self.progress().image = None;
                if let Mode::Bar(bar) = &self.mode {
                    bar.set_message("reconnecting");
                }
                self.print(
                    json!({"event": "reconnecting", "message": clean(&error), "delay_ms": delay_ms}),
                    || format!("{error}; retrying in {:.1} s", delay_ms as f64 / 1000.0),
                );
            }
            SendEvent::Delivered(report) => {
                self.progress().image = None;
                let mut line = of_report(&report);
                line["event"] = "delivered".into();
                let (done, then) = match report.waits {
                    true => ("complete", ", waits for the rest of the flock"),
                    false => ("delivered", ""),
                };
                if let Mode::Bars(bars) = &self.mode {
                    bars.ended(&report.name, done);
                }
                self.print(line, || {
                    format!("{}: {done}, digest {}{then}", report.name, report.digest)
                });
                self.progress().delivered.push(*report);
            }
            SendEvent::Failed { name, error } => {
                self.progress().image = None;
                if let Mode::Bars(bars) = &self.mode {
                    bars.ended(&name, "failed");
                }
                self.print(
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
                let mut progress = self.progress();
                progress.image = None;
                progress.estimates.push(found);
                drop(progress);
                self.print(line, || {
                    format!(
                        "{name}: about {} to transfer; {} of its data are at {} already, {} are not",
                        bytes(wire_bytes),
                        bytes(estimate.matched_blocks * BLOCK_SIZE_U64),
                        self.peer,
                        bytes(estimate.sent_blocks * BLOCK_SIZE_U64),
                    )
                });
            }
        }
    }

    /// Samples the progress, and shows it if the interval has passed.
    pub fn sample(&self) {
        let at = Instant::now();
        let mut progress = self.progress();
        let Progress {
            image,
            shown,
            complete,
            wire,
            ..
        } = &mut *progress;
        let Some(image) = image else { return };
        let sent = self.wire_bytes().0;
        wire.push((at, sent));
        wire.retain(|(then, _)| at.duration_since(*then) <= RATE_PERIOD);
        let done = Counters::get(&self.counters.done_blocks);
        if complete.0 != done {
            *complete = (done, Counters::get(&self.counters.sent_blocks));
        }
        let every = match self.mode {
            Mode::Json => JSON_INTERVAL,
            Mode::Lines => LINE_INTERVAL,
            Mode::Bar(_) | Mode::Bars(_) => Duration::ZERO,
        };
        if shown.is_some_and(|then| at.duration_since(then) < every) {
            return;
        }
        *shown = Some(at);
        let sample = self.sample_of(image, wire, *complete, at);
        drop(progress);
        self.show(&sample);
    }

    fn sample_of(
        &self,
        image: &mut Image,
        wire: &[(Instant, u64)],
        complete: (u64, u64),
        at: Instant,
    ) -> Sample {
        let c = &self.counters;
        let walked = Counters::get(&c.walked_blocks).min(image.walk_blocks);
        let sent = Counters::get(&c.sent_blocks);
        let done = done_of(complete, sent, image.resumed).min(image.walk_blocks);
        let before = *image.before.get_or_insert(done);
        let answered = Counters::get(&c.answered_blocks);
        let matched = Counters::get(&c.matched_blocks);
        let of_file = |blocks| part_of(image.size_bytes, blocks, image.walk_blocks);
        let (total_sent, total_received) = self.wire_bytes();
        let rate = match (wire.first(), wire.last()) {
            (Some(first), Some(last)) if last.0 > first.0 => {
                (last.1.saturating_sub(first.1) as f64 / (last.0 - first.0).as_secs_f64()) as u64
            }
            _ => 0,
        };
        Sample {
            name: image.name.clone(),
            walked: of_file(walked),
            total: image.size_bytes,
            done: of_file(done),
            sent: total_sent,
            received: total_received,
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

    fn show(&self, sample: &Sample) {
        let percent = sample.done * 100 / sample.total.max(1);
        let left = match sample.left {
            _ if sample.done >= sample.total => "verifying".into(),
            None => "unknown time left".into(),
            Some(left) => format!("{} left", short(left)),
        };
        let rate = match sample.rate {
            0 => String::new(),
            rate => format!(" at {}/s", bytes(rate)),
        };
        let matched = sample.matched_share.map_or_else(
            || "-".into(),
            |s| format!("{} ({:.0}%)", bytes(sample.matched), s * 100.0),
        );
        match &self.mode {
            Mode::Json => emit(&json!({
                "event": "progress", "name": sample.name, "walked_bytes": sample.walked, "total_bytes": sample.total,
                "done_bytes": sample.done, "wire_sent_bytes": sample.sent, "wire_received_bytes": sample.received,
                "bytes_per_second": sample.rate, "matched_bytes": sample.matched, "matched_share": sample.matched_share.map(|s| (s * 1e4).round() / 1e4),
                "seconds_left": sample.left.map(|l| l.as_secs()),
            })),
            Mode::Bar(bar) => {
                bar.set_length(sample.total);
                bar.set_position(sample.done);
                bar.set_prefix(clean(&sample.name));
                bar.set_message(format!(
                    "{}/{}, sent {}{rate}, matched {matched}, {left}",
                    bytes(sample.done),
                    bytes(sample.total),
                    bytes(sample.sent)
                ));
            }
            Mode::Bars(bars) => {
                let message = format!(
                    "{}/{}, matched {matched}, {left}",
                    bytes(sample.done),
                    bytes(sample.total)
                );
                bars.at(&sample.name, sample.done, sample.total, message);
            }
            Mode::Lines => out::note(&format!(
                "{}: {percent}% of {}, sent {}{rate}, matched {matched}, {left}",
                clean(&sample.name),
                bytes(sample.total),
                bytes(sample.sent)
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
                last["estimates"] = std::mem::take(&mut self.progress().estimates).into();
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
                "{}, {} transferred",
                count(reports.len(), "image"),
                bytes(wire)
            ));
        }
        Ok(())
    }

    /// The send failed: shows the images that were delivered before.
    pub fn failed(&self) {
        self.clear();
        let delivered = std::mem::take(&mut self.progress().delivered);
        if !matches!(self.mode, Mode::Json) && !delivered.is_empty() {
            // The failure of the send matters more than one of stdout.
            let _ = out::line(&summary(&delivered));
        }
    }

    /// Removes the bar.
    pub fn clear(&self) {
        if let Mode::Bar(bar) = &self.mode {
            bar.finish_and_clear();
        }
    }

    /// Prints an event: as JSON, or as a line of text.
    pub fn print(&self, json: Value, text: impl FnOnce() -> String) {
        match &self.mode {
            Mode::Json => emit(&json),
            Mode::Bar(bar) => bar.suspend(|| out::note(&clean(&text()))),
            Mode::Bars(bars) => bars.suspend(|| out::note(&clean(&text()))),
            Mode::Lines => out::note(&clean(&text())),
        }
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for what is sent, and shows how it goes meanwhile.
pub async fn sampled<T>(sending: impl Future<Output = T>, shows: &[Arc<Show>]) -> T {
    tokio::pin!(sending);
    let mut samples = tokio::time::interval(SAMPLE_EVERY);
    loop {
        tokio::select! {
            sent = &mut sending => return sent,
            _ = samples.tick() => shows.iter().for_each(|show| show.sample()),
        }
    }
}

/// Prints a JSON line; a send does not fail because its progress cannot be written.
fn emit(value: &Value) {
    if let Err(e) = out::json(value) {
        tracing::debug!("{e:#}");
    }
}

/// A report as JSON, in the documented order.
pub fn of_report(r: &ImageReport) -> Value {
    let mut report = json!({
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
    });
    if let Some(origins) = &r.origins {
        report["own_blocks"] = origins.own.into();
        report["flock_blocks"] = origins.flock.into();
        report["site_blocks"] = origins.site.into();
        report["waits"] = r.waits.into();
    }
    report
}

/// The stages of one side as JSON, with times in seconds.
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

/// The table of results.
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
        &[
            "image",
            "size",
            "data",
            "transferred",
            "matched",
            "time",
            "digest",
        ],
        rows,
        &[1, 2, 3, 4, 5],
    )
}

/// Blocks complete at the peer, approximately: whole batches that the peer has acknowledged (`complete`, with the blocks sent by then), and
/// the blocks sent since, which belong to the next batch. A resumed transfer may have many blocks and no complete batch.
fn done_of(complete: (u64, u64), sent: u64, resumed: u64) -> u64 {
    let since = sent.saturating_sub(complete.1).min(BATCH_BLOCKS - 1);
    (complete.0 + since).max(match resumed {
        0 => 0,
        n => n + sent,
    })
}

/// The part of a file that `done` of `blocks` stand for. Holes are not read, and the file system may report different holes each time.
fn part_of(size: u64, done: u64, blocks: u64) -> u64 {
    match blocks {
        0 => size,
        n => (u128::from(size) * u128::from(done.min(n)) / u128::from(n)) as u64,
    }
}

/// Time left at the average rate so far; unknown in the first second.
fn time_left(elapsed: Duration, done: u64, rest: u64) -> Option<Duration> {
    if elapsed < Duration::from_secs(1) || done == 0 {
        return None;
    }
    Some(elapsed.mul_f64((rest as f64 / done as f64).min(1e6)))
}

/// A duration in its two largest units.
pub fn short(d: Duration) -> String {
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
            unread_blocks: 0,
            origins: None,
            waits: false,
            matched: Default::default(),
            wire: Default::default(),
            seconds: 1.23456,
            stages: Default::default(),
        }
    }

    #[test]
    fn reports_have_the_documented_fields() {
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
    fn the_summary_is_a_table_without_control_characters() {
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
    fn blocks_count_before_their_batch_is_complete() {
        assert_eq!(done_of((0, 0), 100, 0), 100);
        assert_eq!(done_of((BATCH_BLOCKS, 1000), 1300, 0), BATCH_BLOCKS + 300);
        assert_eq!(done_of((0, 0), 9 * BATCH_BLOCKS, 0), BATCH_BLOCKS - 1);
        // Most of three batches was received before, none of them complete.
        let resumed = 3 * BATCH_BLOCKS - 30;
        assert_eq!(done_of((0, 0), 10, resumed), resumed + 10);
        assert_eq!(
            done_of((4 * BATCH_BLOCKS, 30), 30, resumed),
            4 * BATCH_BLOCKS
        );
    }

    #[test]
    fn the_total_is_the_file_with_its_holes() {
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
