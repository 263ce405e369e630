//! Everything a site counts, under the names by which Prometheus knows it. No other file has metric names.

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

use crate::mounts::{self, DiskStatus, State};
use crate::status::Status;

/// What the program itself counts.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Connections that were taken.
    pub connections: AtomicU64,
    /// Connections that are open.
    pub connections_open: AtomicI64,
    /// Connections turned away because there were too many.
    pub rejected_limit: AtomicU64,
    /// Connections whose handshake or hello failed.
    pub rejected_handshake: AtomicU64,
    /// Requests of keys that are not trusted.
    pub rejected_trust: AtomicU64,
    /// Peers that were paired.
    pub pairings: AtomicU64,
    /// Tickets that were refused.
    pub tickets_refused: AtomicU64,
    /// Sessions that ended well.
    pub sessions_done: AtomicU64,
    /// Sessions that failed or were cut.
    pub sessions_failed: AtomicU64,
    /// Sessions that are open.
    pub sessions_open: AtomicI64,
    /// Bytes that left on closed connections, encryption counted.
    pub wire_sent: AtomicU64,
    /// Bytes that came in on closed connections, encryption counted.
    pub wire_received: AtomicU64,
    /// Images whose digest was right when it was checked.
    pub verified_good: AtomicU64,
    /// Images whose digest was wrong.
    pub verified_bad: AtomicU64,
}

impl Metrics {
    /// The metrics in Prometheus's text format (OpenMetrics), with those of `now`.
    pub fn render(self: &Arc<Self>, now: Status) -> String {
        page(Site(Arc::clone(self), now))
    }
}

/// What is mounted here, in the same format.
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

/// What metrics are written to.
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

    /// A metric for each of some sets of labels.
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

    /// Counts by the values of one label.
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
    page.each("build_info", "The program.", ["version"], version)?;
    let help = "When the site became ready, since 1970.";
    page.gauge("start_time_seconds", help, now.started_unix)?;
    let help = "Memory of the process.";
    page.gauge("resident_memory_bytes", help, resident_bytes())?;
    page.gauge("images", "Images in the catalog.", now.images)?;
    page.gauge("peers", "Peers that are trusted.", now.peers)?;
    page.counter("connections", "Connections taken.", c(&m.connections))?;
    page.gauge(
        "connections_open",
        "Connections open.",
        now.connections_open,
    )?;
    page.counters(
        "connections_rejected",
        "Connections turned away.",
        "reason",
        &[
            ("limit", c(&m.rejected_limit)),
            ("handshake", c(&m.rejected_handshake)),
            ("trust", c(&m.rejected_trust)),
        ],
    )?;
    page.counter("pairings", "Peers paired.", c(&m.pairings))?;
    let help = "Tickets that were used, too old or unknown.";
    page.counter("tickets_refused", help, c(&m.tickets_refused))?;
    page.counters(
        "sessions",
        "Sessions that ended.",
        "result",
        &[
            ("done", c(&m.sessions_done)),
            ("failed", c(&m.sessions_failed)),
        ],
    )?;
    page.gauge("sessions_open", "Sessions open.", now.sessions_open)?;
    page.counters(
        "wire_bytes",
        "Bytes of closed connections, encryption counted.",
        "direction",
        &[("sent", c(&m.wire_sent)), ("received", c(&m.wire_received))],
    )?;
    page.counters(
        "verified",
        "Images checked against their digest.",
        "result",
        &[("good", c(&m.verified_good)), ("bad", c(&m.verified_bad))],
    )
}

/// Images of this site that other sites have mounted.
fn served(page: &mut Page<'_>, now: &MountCounts, leases: Option<usize>) -> fmt::Result {
    page.each(
        "served_mounts",
        "Mounts of this site's images that are connected.",
        ["access"],
        [("write", now.writers), ("read", now.readers)]
            .map(|(access, n)| ([access.to_string()], ConstGauge::new(n))),
    )?;
    page.gauge(
        "served_lanes",
        "Connections of these mounts.",
        now.connections,
    )?;
    let help = "Images that are open for mounts.";
    page.gauge("served_images", help, now.images)?;
    let help = "Writers' leases, of mounts that are connected or not.";
    match leases {
        Some(leases) => page.gauge("served_leases", help, leases)?,
        None => page.gauge("served_leases", help, f64::NAN)?,
    }
    page.counters(
        "served_reads",
        "Reads of chunks by mounts.",
        "kind",
        &[
            ("waited", now.reads_waited),
            ("background", now.reads_background),
        ],
    )?;
    page.counters(
        "served_chunks",
        "Chunks that mounts read.",
        "kind",
        &[("data", now.chunks), ("zero", now.chunks_zero)],
    )?;
    page.counters(
        "served_bytes",
        "Bytes of images that mounts read, zeros included, and wrote.",
        "direction",
        &[("read", now.bytes_read), ("written", now.bytes_written)],
    )?;
    page.counters(
        "served_link_bytes",
        "Bytes of mounts' messages, packed.",
        "direction",
        &[("sent", now.link_out), ("received", now.link_in)],
    )?;
    let help = "Sets of writes that were made to count.";
    page.counter("served_epochs", help, now.epochs)?;
    page.counter(
        "served_leases_broken",
        "Leases that were broken.",
        now.broken,
    )?;
    let reasons = [
        (
            "served_refused",
            "Connections of mounts that were refused.",
            &now.refused,
        ),
        (
            "served_errors",
            "Requests of mounts that failed.",
            &now.failed,
        ),
    ];
    for (name, help, by_reason) in reasons {
        let counts: Vec<_> = by_reason.iter().map(|(r, n)| (r.as_str(), *n)).collect();
        page.counters(name, help, "reason", &counts)?;
    }
    Ok(())
}

/// What a disk of a mount is asked for.
type Ask<T> = fn(&DiskStatus) -> T;

/// Images of other sites that are mounted here.
fn mounted(page: &mut Page<'_>, mounts: &[mounts::Status]) -> fmt::Result {
    page.each(
        "mount_up",
        "Whether a mount of this home can be used.",
        ["mount"],
        mounts.iter().map(|m| {
            let up = i64::from(m.state == State::Up);
            ([m.name.clone()], ConstGauge::new(up))
        }),
    )?;
    const LABELS: [&str; 3] = ["mount", "image", "mode"];
    let is_kept = |m: &mounts::Status| matches!(m.state, State::Up | State::Ending);
    let disks = |kept: bool| {
        // Of one that nobody keeps no more is known than what is to be pushed.
        let mounts = mounts.iter().filter(move |m| !kept || is_kept(m));
        mounts.flat_map(|m| {
            let labels = move |d: &DiskStatus| [m.name.clone(), d.image.clone(), d.mode.clone()];
            m.disks.iter().map(move |d| (labels(d), d))
        })
    };
    let gauges: [(&str, &str, Ask<u64>); 6] = [
        ("size_bytes", "Size of the disk.", |d| d.size),
        ("local_bytes", "Bytes that are here.", |d| d.local),
        (
            "dirty_bytes",
            "Bytes written here that the other site does not have.",
            |d| d.dirty,
        ),
        ("in_flight_bytes", "Bytes under way.", |d| d.in_flight),
        ("link_up", "Whether the other site can be reached.", |d| {
            u64::from(d.link == "up")
        }),
        ("epochs", "Sets of writes that the other site has.", |d| {
            d.epoch
        }),
    ];
    for (name, help, ask) in gauges {
        let samples = disks(name != "dirty_bytes").map(|(l, d)| (l, ConstGauge::new(ask(d))));
        page.each(&format!("mount_{name}"), help, LABELS, samples)?;
    }
    let counters: [(&str, &str, Ask<u64>); 2] = [
        ("received_bytes", "Bytes that arrived on the link.", |d| {
            d.received
        }),
        ("sent_bytes", "Bytes that left on the link.", |d| d.sent),
    ];
    for (name, help, ask) in counters {
        let samples = disks(true).map(|(l, d)| (l, ConstCounter::new(ask(d))));
        page.each(&format!("mount_{name}"), help, LABELS, samples)?;
    }
    let measured: [(&str, &str, Ask<Option<f64>>); 2] = [
        (
            "rate_bytes_per_second",
            "Bytes arriving in a second.",
            |d| Some(d.rate),
        ),
        (
            "seconds_left",
            "Estimated seconds until fully cached at the current rate.",
            |d| d.seconds_left,
        ),
    ];
    for (name, help, ask) in measured {
        let known = disks(true).filter_map(|(l, d)| Some((l, ConstGauge::new(ask(d)?))));
        page.each(&format!("mount_{name}"), help, LABELS, known)?;
    }
    Ok(())
}

/// What the teleport layer says of itself.
fn transfers(page: &mut Page<'_>, site: &SiteStatus) -> fmt::Result {
    let numbers = [
        ("images", site.images),
        ("sessions", site.sessions),
        ("delivered_images", site.delivered_images),
        ("matched_blocks", site.matched_blocks),
        ("sent_blocks", site.sent_blocks),
        ("pending_sequences", site.pending_sequences),
        ("catching_up", u64::from(site.catching_up)),
    ];
    let matcher = site.matcher.iter();
    let matcher = matcher.map(|(name, n)| (format!("matcher_{}", word(name)), *n));
    for (name, n) in numbers
        .map(|(k, n)| (k.to_string(), n))
        .into_iter()
        .chain(matcher)
    {
        page.gauge(&format!("site_{name}"), "See `drover status --json`.", n)?;
    }
    Ok(())
}

/// Text as the value of a label; the library does not escape it.
fn label(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    text.replace('\n', "\\n")
}

/// A name as a part of a metric's.
fn word(key: &str) -> String {
    key.replace(|c: char| !c.is_ascii_alphanumeric(), "_")
}

/// Memory of this process that is in RAM; zero when the system does not say.
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
mod tests {
    use super::*;

    fn mount(name: &str, state: State) -> mounts::Status {
        mounts::Status {
            name: name.into(),
            place: String::new(),
            devices: Vec::new(),
            process: 0,
            since_unix: 0,
            state,
            disks: vec![DiskStatus {
                image: "far:web".into(),
                mode: "managed".into(),
                size: 20,
                local: 10,
                dirty: 5,
                ..DiskStatus::default()
            }],
        }
    }

    /// Every name before there was a library that writes them, but for those of the matcher's counts.
    const NAMES: [&str; 46] = [
        "drover_build_info",
        "drover_start_time_seconds",
        "drover_resident_memory_bytes",
        "drover_images",
        "drover_peers",
        "drover_connections_total",
        "drover_connections_open",
        "drover_connections_rejected_total",
        "drover_pairings_total",
        "drover_tickets_refused_total",
        "drover_sessions_total",
        "drover_sessions_open",
        "drover_wire_bytes_total",
        "drover_verified_total",
        "drover_served_mounts",
        "drover_served_lanes",
        "drover_served_images",
        "drover_served_leases",
        "drover_served_reads_total",
        "drover_served_chunks_total",
        "drover_served_bytes_total",
        "drover_served_link_bytes_total",
        "drover_served_epochs_total",
        "drover_served_leases_broken_total",
        "drover_served_refused_total",
        "drover_served_errors_total",
        "drover_mount_up",
        "drover_mount_size_bytes",
        "drover_mount_local_bytes",
        "drover_mount_dirty_bytes",
        "drover_mount_in_flight_bytes",
        "drover_mount_rate_bytes_per_second",
        "drover_mount_seconds_left",
        "drover_mount_link_up",
        "drover_mount_received_bytes_total",
        "drover_mount_sent_bytes_total",
        "drover_mount_epochs",
        "drover_site_images",
        "drover_site_sessions",
        "drover_site_delivered_images",
        "drover_site_matched_blocks",
        "drover_site_sent_blocks",
        "drover_site_pending_sequences",
        "drover_site_catching_up",
        "drover_site_matcher_c1_hits",
        "drover_site_matcher_pages",
    ];

    fn status() -> Status {
        let mut up = mount("a\"b", State::Up);
        up.disks[0].seconds_left = Some(2.5);
        Status {
            running: true,
            duty: "site".into(),
            name: "y".into(),
            key: "k".into(),
            home: "/h".into(),
            version: "0.1.0".into(),
            process: 7,
            addresses: Vec::new(),
            started_unix: 5,
            uptime_seconds: 0,
            images: 2,
            peers: 1,
            connections_open: 0,
            sessions_open: 0,
            site: Some(SiteStatus {
                catching_up: true,
                matcher: vec![("c1 hits".into(), 4), ("pages".into(), 9)],
                ..SiteStatus::default()
            }),
            served: Some(MountCounts {
                writers: 1,
                readers: 2,
                reads_background: 7,
                refused: vec![("leased".into(), 3)],
                failed: vec![("io".into(), 0)],
                ..MountCounts::default()
            }),
            leases: Some(4),
            mounts: vec![up, mount("dead", State::Dead)],
        }
    }

    #[test]
    fn the_names_are_those_that_dashboards_know() {
        let text = Arc::new(Metrics::default()).render(status());
        let mut found: Vec<_> = text
            .lines()
            .filter(|l| !l.starts_with('#'))
            .filter_map(|l| l.split(['{', ' ']).next())
            .collect();
        found.dedup();
        found.sort_unstable();
        let mut names = NAMES;
        names.sort_unstable();
        assert_eq!(found, names);
    }

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Arc::new(Metrics::default());
        metrics.connections.store(3, Relaxed);
        metrics.rejected_trust.store(1, Relaxed);
        let text = metrics.render(status());
        for line in [
            "drover_build_info{version=\"0.1.0\"} 1",
            "drover_connections_total 3",
            "drover_connections_rejected_total{reason=\"trust\"} 1",
            "drover_images 2",
            "drover_site_catching_up 1",
            "drover_site_matcher_c1_hits 4",
            "# TYPE drover_sessions counter",
            "drover_served_mounts{access=\"read\"} 2",
            "drover_served_reads_total{kind=\"background\"} 7",
            "drover_served_refused_total{reason=\"leased\"} 3",
            "drover_served_leases 4",
            "drover_mount_up{mount=\"a\\\"b\"} 1",
            "drover_mount_up{mount=\"dead\"} 0",
            "drover_mount_local_bytes{mount=\"a\\\"b\",image=\"far:web\",mode=\"managed\"} 10",
            "drover_mount_seconds_left{mount=\"a\\\"b\",image=\"far:web\",mode=\"managed\"} 2.5",
            "drover_mount_dirty_bytes{mount=\"dead\",image=\"far:web\",mode=\"managed\"} 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let has = |start: &str| text.lines().any(|l| l.starts_with(start));
        assert!(
            !has("drover_mount_seconds_left{mount=\"dead\""),
            "it is not known"
        );
        assert!(
            !has("drover_mount_local_bytes{mount=\"dead\""),
            "nor is this"
        );
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(
                name.starts_with("drover_") && value.parse::<f64>().is_ok(),
                "{line}"
            );
        }
        let resident = text
            .lines()
            .find_map(|l| l.strip_prefix("drover_resident_memory_bytes "))
            .unwrap();
        assert!(resident.parse::<f64>().unwrap() > 1e6);
    }
}
