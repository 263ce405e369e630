//! The metrics of a site and of mounts, in OpenMetrics text. All metric names are in this file.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use drover_mount::server::MountCounts;
use drover_teleport::SiteStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::mounts::{self, DiskStatus, MountState};
use crate::status::Status;

/// Counters of a site's process.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Open connections.
    pub connections_open: AtomicI64,
    /// Connections rejected by a limit.
    pub rejected_limit: AtomicU64,
    /// Connections whose handshake or hello failed.
    pub rejected_handshake: AtomicU64,
    /// Requests rejected because the key is not trusted.
    pub rejected_trust: AtomicU64,
    /// Peers paired.
    pub pairings: AtomicU64,
    /// Tickets refused.
    pub tickets_refused: AtomicU64,
    /// Sessions that succeeded.
    pub sessions_done: AtomicU64,
    /// Sessions that failed or were interrupted.
    pub sessions_failed: AtomicU64,
    /// Open sessions.
    pub sessions_open: AtomicI64,
    /// Bytes sent on closed connections, including encryption.
    pub wire_sent: AtomicU64,
    /// Bytes received on closed connections, including encryption.
    pub wire_received: AtomicU64,
    /// Images whose digest matched when verified.
    pub verified_good: AtomicU64,
    /// Images whose digest did not match.
    pub verified_bad: AtomicU64,
    /// Events that could not be written to the audit log.
    pub audit_failed: AtomicU64,
}

impl Metrics {
    /// These counters and the metrics of `now`, in OpenMetrics text format.
    pub fn render(self: &Arc<Self>, now: Status) -> String {
        page(Site(Arc::clone(self), now))
    }
}

/// The metrics of mounts, in the same format.
pub fn of_mounts(mounts: Vec<mounts::Status>) -> String {
    page(Mounts(mounts))
}

fn page(of: impl Collector) -> String {
    let mut registry = Registry::with_prefix("drover");
    registry.register_collector(Box::new(of));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Site(Arc<Metrics>, Status);

#[derive(Debug)]
struct Mounts(Vec<mounts::Status>);

impl Collector for Site {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        program(&mut page, &self.0, &self.1)?;
        if let Some(counted) = &self.1.served {
            served(&mut page, counted, self.1.leases)?;
        }
        mounted(&mut page, &self.1.mounts)?;
        match &self.1.site {
            Some(site) => transfers(&mut page, site),
            None => Ok(()),
        }
    }
}

impl Collector for Mounts {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        mounted(&mut Page(encoder), &self.0)
    }
}

/// Writes metrics.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    /// A metric without labels.
    fn one(&mut self, name: &str, help: &str, metric: impl EncodeMetric) -> fmt::Result {
        let kind = metric.metric_type();
        metric.encode(self.0.encode_descriptor(name, help, None, kind)?)
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        self.one(name, help, ConstGauge::new(value))
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.one(name, help, ConstCounter::new(value))
    }

    /// One sample for each set of label values.
    fn each<const N: usize, M: EncodeMetric + TypedMetric>(
        &mut self,
        name: &str,
        help: &str,
        labels: [&str; N],
        samples: impl IntoIterator<Item = ([String; N], M)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, M::TYPE)?;
        for (values, metric) in samples {
            let values = values.map(|value| label(&value));
            let set: Vec<_> = labels.into_iter().zip(&values).collect();
            metric.encode(family.encode_family(&set)?)?;
        }
        Ok(())
    }

    /// A counter with one sample per value of its label.
    fn counters(
        &mut self,
        name: &str,
        help: &str,
        by: &str,
        counts: &[(&str, u64)],
    ) -> fmt::Result {
        let samples = counts
            .iter()
            .map(|(value, n)| ([value.to_string()], ConstCounter::new(*n)));
        self.each(name, help, [by], samples)
    }
}

/// The program itself.
fn program(page: &mut Page<'_>, m: &Metrics, now: &Status) -> fmt::Result {
    let c = |v: &AtomicU64| v.load(Relaxed);
    let version = [([now.version.clone()], ConstGauge::new(1))];
    page.each(
        "build_info",
        "Version of the running drover.",
        ["version"],
        version,
    )?;
    let help = "Start time of the site, in seconds since the Unix epoch.";
    page.gauge("start_time_seconds", help, now.started_unix)?;
    let help = "Resident memory of the process in bytes.";
    page.gauge("resident_memory_bytes", help, resident_bytes())?;
    page.gauge("images", "Images in the catalog.", now.images)?;
    page.gauge("peers", "Paired peers.", now.peers)?;
    page.counter("connections", "Connections accepted.", c(&m.connections))?;
    page.gauge(
        "connections_open",
        "Open connections.",
        now.connections_open,
    )?;
    page.counters(
        "connections_rejected",
        "Connections rejected, by reason.",
        "reason",
        &[
            ("limit", c(&m.rejected_limit)),
            ("handshake", c(&m.rejected_handshake)),
            ("trust", c(&m.rejected_trust)),
        ],
    )?;
    page.counter("pairings", "Peers paired.", c(&m.pairings))?;
    let help = "Pairing tickets refused as used, expired or unknown.";
    page.counter("tickets_refused", help, c(&m.tickets_refused))?;
    page.counters(
        "sessions",
        "Transfer sessions ended, by result.",
        "result",
        &[
            ("done", c(&m.sessions_done)),
            ("failed", c(&m.sessions_failed)),
        ],
    )?;
    page.gauge(
        "sessions_open",
        "Open transfer sessions.",
        now.sessions_open,
    )?;
    page.counters(
        "wire_bytes",
        "Bytes on closed connections, including encryption, by direction.",
        "direction",
        &[("sent", c(&m.wire_sent)), ("received", c(&m.wire_received))],
    )?;
    page.counters(
        "images_verified",
        "Images checked against their digest, by result.",
        "result",
        &[("good", c(&m.verified_good)), ("bad", c(&m.verified_bad))],
    )?;
    let help = "Events that could not be written to the audit log.";
    page.counter("audit_failed", help, c(&m.audit_failed))
}

/// Images of this site that are mounted elsewhere.
fn served(page: &mut Page<'_>, now: &MountCounts, leases: Option<usize>) -> fmt::Result {
    page.each(
        "served_mounts",
        "Connected mounts of this site's images, by access.",
        ["access"],
        [("write", now.writers), ("read", now.readers)]
            .map(|(access, n)| ([access.to_string()], ConstGauge::new(n))),
    )?;
    let help = "Open connections of these mounts.";
    page.gauge("served_connections", help, now.connections)?;
    let help = "Images open for mounts.";
    page.gauge("served_images", help, now.images)?;
    let help = "Write leases, including those of disconnected mounts.";
    match leases {
        Some(leases) => page.gauge("served_leases", help, leases)?,
        None => page.gauge("served_leases", help, f64::NAN)?,
    }
    page.counters(
        "served_reads",
        "Chunk reads requested by mounts, by priority.",
        "kind",
        &[
            ("on_demand", now.reads_waited),
            ("background", now.reads_background),
        ],
    )?;
    page.counters(
        "served_chunks",
        "Chunks read by mounts, by content.",
        "kind",
        &[("data", now.chunks), ("zero", now.chunks_zero)],
    )?;
    page.counters(
        "served_bytes",
        "Bytes of images read (zeros included) and written by mounts.",
        "direction",
        &[("read", now.bytes_read), ("written", now.bytes_written)],
    )?;
    page.counters(
        "served_link_bytes",
        "Compressed message bytes exchanged with mounts, by direction.",
        "direction",
        &[("sent", now.link_out), ("received", now.link_in)],
    )?;
    let help = "Epochs of writes committed.";
    page.counter("served_epochs", help, now.epochs)?;
    page.counter(
        "served_leases_broken",
        "Write leases broken by the owner of the site.",
        now.broken,
    )?;
    let reasons = [
        (
            "served_refused",
            "Mount connections refused, by reason.",
            &now.refused,
        ),
        (
            "served_errors",
            "Mount requests that failed, by reason.",
            &now.failed,
        ),
    ];
    for (name, help, by_reason) in reasons {
        let counts: Vec<_> = by_reason.iter().map(|(r, n)| (r.as_str(), *n)).collect();
        page.counters(name, help, "reason", &counts)?;
    }
    Ok(())
}

/// Reads one value from the status of a disk.
type Read<T> = fn(&DiskStatus) -> T;

/// Mounts of this home.
fn mounted(page: &mut Page<'_>, mounts: &[mounts::Status]) -> fmt::Result {
    page.each(
        "mount_up",
        "Whether the mount is usable (0 or 1).",
        ["mount"],
        mounts.iter().map(|m| {
            let up = i64::from(m.state == MountState::Up);
            ([m.name.clone()], ConstGauge::new(up))
        }),
    )?;
    const LABELS: [&str; 3] = ["mount", "image", "mode"];
    let is_kept = |m: &mounts::Status| matches!(m.state, MountState::Up | MountState::Ending);
    let disks = |kept: bool| {
        // For a mount without a daemon, only the bytes still to push are known.
        let mounts = mounts.iter().filter(move |m| !kept || is_kept(m));
        mounts.flat_map(|m| {
            let labels = move |d: &DiskStatus| [m.name.clone(), d.image.clone(), d.mode.clone()];
            m.disks.iter().map(move |d| (labels(d), d))
        })
    };
    let gauges: [(&str, &str, Read<u64>); 6] = [
        ("size_bytes", "Size of the disk in bytes.", |d| d.size),
        ("local_bytes", "Bytes cached locally.", |d| d.local),
        (
            "dirty_bytes",
            "Bytes written locally and not yet pushed.",
            |d| d.dirty,
        ),
        ("in_flight_bytes", "Bytes in flight on the link.", |d| {
            d.in_flight
        }),
        (
            "link_up",
            "Whether the link to the other site is up (0 or 1).",
            |d| u64::from(d.link == "up"),
        ),
        (
            "epochs",
            "Last epoch of writes committed at the other site.",
            |d| d.epoch,
        ),
    ];
    for (name, help, read) in gauges {
        let samples = disks(name != "dirty_bytes").map(|(l, d)| (l, ConstGauge::new(read(d))));
        page.each(&format!("mount_{name}"), help, LABELS, samples)?;
    }
    let counters: [(&str, &str, Read<u64>); 2] = [
        ("received_bytes", "Bytes received on the link.", |d| {
            d.received
        }),
        ("sent_bytes", "Bytes sent on the link.", |d| d.sent),
    ];
    for (name, help, read) in counters {
        let samples = disks(true).map(|(l, d)| (l, ConstCounter::new(read(d))));
        page.each(&format!("mount_{name}"), help, LABELS, samples)?;
    }
    let measured: [(&str, &str, Read<Option<f64>>); 2] = [
        (
            "rate_bytes_per_second",
            "Current receive rate in bytes per second.",
            |d| Some(d.rate),
        ),
        (
            "remaining_seconds",
            "Estimated seconds until fully cached at the current rate.",
            |d| d.seconds_left,
        ),
    ];
    for (name, help, read) in measured {
        let known = disks(true).filter_map(|(l, d)| Some((l, ConstGauge::new(read(d)?))));
        page.each(&format!("mount_{name}"), help, LABELS, known)?;
    }
    Ok(())
}

/// Transfers and the matcher.
fn transfers(page: &mut Page<'_>, site: &SiteStatus) -> fmt::Result {
    let counters = [
        (
            "images_delivered",
            "Images delivered to this site.",
            site.delivered_images,
        ),
        (
            "blocks_matched",
            "Blocks reused from images or the sequence cache.",
            site.matched_blocks,
        ),
        (
            "blocks_received",
            "Blocks received over the link.",
            site.sent_blocks,
        ),
    ];
    for (name, help, n) in counters {
        page.counter(name, help, n)?;
    }
    let help = "Sequences waiting to be copied to the sequence cache.";
    page.gauge("sequences_pending", help, site.pending_sequences)?;
    let help = "Whether the matcher does not know all images yet (0 or 1).";
    page.gauge("matcher_catching_up", help, u64::from(site.catching_up))?;
    matcher(page, &site.matcher)
}

/// The matcher's counts by name, as [`SiteStatus::matcher`] has them.
fn matcher(page: &mut Page<'_>, counts: &[(String, u64)]) -> fmt::Result {
    if counts.is_empty() {
        return Ok(());
    }
    let of = |key: &str| counts.iter().find(|(k, _)| k == key).map_or(0, |(_, n)| *n);
    let caches = |what: &str| {
        let n = |cache: &str| ([cache.to_string()], of(&format!("{cache}_{what}")));
        ["c0", "c1", "c2"].map(n)
    };
    for (what, help) in [
        ("capacity", "Slots of the matcher's caches."),
        ("entries", "Slots in use in the matcher's caches."),
    ] {
        let samples = caches(what).map(|(cache, n)| (cache, ConstGauge::new(n)));
        page.each(&format!("matcher_cache_{what}"), help, ["cache"], samples)?;
    }
    for (what, help) in [
        ("lookups", "Digests looked up in the matcher's caches."),
        ("hits", "Lookups that found a verified match."),
        (
            "false_matches",
            "Lookups whose fingerprint matched another digest.",
        ),
        ("evictions", "Entries evicted from the matcher's caches."),
    ] {
        let samples = caches(what).map(|(cache, n)| (cache, ConstCounter::new(n)));
        page.each(&format!("matcher_cache_{what}"), help, ["cache"], samples)?;
    }
    let help = "Blocks in matched runs, by how the run was found.";
    let via = ["c0", "c1", "c2", "anchor", "aligned", "repeat"];
    let via = via.map(|by| (by, of(&format!("via_{by}"))));
    page.counters("matcher_run_blocks", help, "via", &via)?;
    for (key, name, help) in [
        (
            "blocks",
            "matcher_blocks",
            "Blocks looked up by the matcher.",
        ),
        ("heads", "matcher_heads", "Heads among them."),
        ("matched", "matcher_blocks_matched", "Blocks matched."),
        (
            "backward",
            "matcher_backward_blocks",
            "Blocks added to runs by backward extension.",
        ),
        ("runs", "matcher_runs", "Runs matched."),
        (
            "pages_read",
            "matcher_pages_read",
            "Hash pages read from storage.",
        ),
        (
            "bytes_read",
            "matcher_read_bytes",
            "Bytes read from storage by the matcher.",
        ),
        (
            "bytes_written",
            "matcher_written_bytes",
            "Bytes written to storage by the matcher.",
        ),
    ] {
        page.counter(name, help, of(key))?;
    }
    let help = "Memory of the matcher in bytes.";
    page.gauge("matcher_memory_bytes", help, of("memory"))
}

/// Escapes a label value; the library does not.
fn label(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    text.replace('\n', "\\n")
}

/// Resident memory of this process; zero when the system does not report it.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .unwrap_or_default();
    let kib: u64 = line
        .split_ascii_whitespace()
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    kib * 1024
}

#[cfg(test)]
mod tests;
