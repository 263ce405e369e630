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
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::audit::Migration;
use crate::mounts::{self, DiskStatus, MountState};
use crate::replicas::ReplicaInfo;
use crate::status::{DomainStatus, Status, Taken};

/// Bounds of the pauses of machines that are counted together, in seconds.
const PAUSES: [f64; 10] = [0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0];

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
    /// Machines.
    pub migrations: Migrations,
}

/// Counters of migrations that have ended.
#[derive(Debug)]
pub struct Migrations {
    /// Machines that came here.
    pub arrived: AtomicU64,
    /// Machines that were to come, and stayed where they were.
    pub refused: AtomicU64,
    /// Machines that were to leave, and stayed here.
    pub stayed: AtomicU64,
    /// Machines that left.
    left: AtomicU64,
    /// Bytes that they took with them: images of disks, what was written to those meanwhile, memory.
    bytes: [AtomicU64; 3],
    rounds: AtomicU64,
    pauses: Histogram,
}

impl Default for Migrations {
    fn default() -> Self {
        Migrations {
            arrived: AtomicU64::default(),
            refused: AtomicU64::default(),
            stayed: AtomicU64::default(),
            left: AtomicU64::default(),
            bytes: Default::default(),
            rounds: AtomicU64::default(),
            pauses: Histogram::new(PAUSES),
        }
    }
}

impl Migrations {
    /// Counts a machine that left; how many there were before.
    pub fn left(&self, took: &Migration) -> u64 {
        let kinds = [took.image_bytes, took.disk_bytes, took.memory_bytes];
        for (sum, bytes) in self.bytes.iter().zip(kinds) {
            sum.fetch_add(bytes, Relaxed);
        }
        self.rounds.fetch_add(took.rounds.into(), Relaxed);
        self.pauses.observe(took.pause_ms as f64 / 1000.0);
        self.left.fetch_add(1, Relaxed)
    }
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
        mounted(&mut page, &self.1.mounts)?;
        let domains = &self.1.domains;
        if domains.is_empty() {
            return Ok(());
        }
        stored(&mut page, domains)?;
        replicated(&mut page, domains)?;
        served(&mut page, domains)?;
        transfers(&mut page, domains)
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

    /// One sample for each domain.
    fn domains<M: EncodeMetric + TypedMetric>(
        &mut self,
        name: &str,
        help: &str,
        domains: &[DomainStatus],
        read: impl Fn(&DomainStatus) -> Option<M>,
    ) -> fmt::Result {
        let samples = domains
            .iter()
            .filter_map(|d| Some(([d.name.clone()], read(d)?)));
        self.each(name, help, ["domain"], samples)
    }

    /// One sample for each domain and each value of the label `by`.
    fn split<M: EncodeMetric + TypedMetric>(
        &mut self,
        name: &str,
        help: &str,
        by: &str,
        domains: &[DomainStatus],
        read: impl Fn(&DomainStatus) -> Option<Vec<(String, M)>>,
    ) -> fmt::Result {
        let samples = domains.iter().flat_map(|d| {
            let all = read(d).into_iter().flatten();
            all.map(|(value, metric)| ([d.name.clone(), value], metric))
        });
        self.each(name, help, ["domain", by], samples)
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
    page.counter("audit_failed", help, c(&m.audit_failed))?;
    migrated(page, &m.migrations)
}

/// Machines that came or left, or were to.
fn migrated(page: &mut Page<'_>, m: &Migrations) -> fmt::Result {
    let c = |counter: &AtomicU64| counter.load(Relaxed);
    page.counters(
        "migrations",
        "Migrations of machines that have ended, by result.",
        "result",
        &[
            ("left", c(&m.left)),
            ("stayed", c(&m.stayed)),
            ("arrived", c(&m.arrived)),
            ("refused", c(&m.refused)),
        ],
    )?;
    page.counters(
        "migration_bytes",
        "Bytes on the wire for machines that left, by kind.",
        "kind",
        &[
            ("images", c(&m.bytes[0])),
            ("disks", c(&m.bytes[1])),
            ("memory", c(&m.bytes[2])),
        ],
    )?;
    let help = "Rounds over the disks of machines that left.";
    page.counter("migration_rounds", help, c(&m.rounds))?;
    let help = "Pauses of machines that left, in seconds.";
    page.one("migration_pause_seconds", help, m.pauses.clone())
}

/// The replicas that the domains keep or send.
fn replicated(page: &mut Page<'_>, domains: &[DomainStatus]) -> fmt::Result {
    let mut all = Vec::new();
    for domain in domains {
        let labels = |replica: &ReplicaInfo| {
            let values = [&domain.name, &replica.name, &replica.peer, &replica.state];
            values.map(Clone::clone)
        };
        all.extend(domain.replicas.iter().map(|one| (labels(one), one)));
    }
    let by = ["domain", "replica", "peer", "state"];
    let help = "Age of the newest complete state of a replica in seconds: what would be lost.";
    let ages = all.iter().filter_map(|(values, replica)| {
        Some((values.clone(), ConstGauge::new(replica.age_seconds?)))
    });
    page.each("replica_age_seconds", help, by, ages)?;
    let help = "Bytes of the disks of a replica.";
    let sizes = all
        .iter()
        .map(|(values, replica)| (values.clone(), ConstGauge::new(replica.size_bytes)));
    page.each("replica_size_bytes", help, by, sizes)?;
    let help = "Complete rounds of a replica.";
    let rounds = all
        .iter()
        .map(|(values, replica)| (values.clone(), ConstCounter::new(replica.rounds)));
    page.each("replica_rounds", help, by, rounds)
}

/// What the domains have on disk, also those that are closed.
fn stored(page: &mut Page<'_>, domains: &[DomainStatus]) -> fmt::Result {
    let help = "Whether the domain is open (0 or 1).";
    let is_open = |d: &DomainStatus| Some(ConstGauge::new(u64::from(d.site.is_some())));
    page.domains("domain_open", help, domains, is_open)?;
    let known = |d: &DomainStatus| d.problem.is_none();
    let help = "Images in the catalog.";
    page.domains("images", help, domains, |d| {
        known(d).then(|| ConstGauge::new(d.images))
    })?;
    let help = "Unfinished transfers, also those in progress.";
    page.domains("transfers_unfinished", help, domains, |d| {
        known(d).then(|| ConstGauge::new(d.unfinished))
    })?;
    let help = "Write leases, including those of disconnected mounts.";
    page.domains("served_leases", help, domains, |d| {
        d.leases.map(ConstGauge::new)
    })?;
    let help =
        "Bytes of this site's disks that a peer takes: images, unfinished transfers, changes.";
    page.split("peer_taken_bytes", help, "peer", domains, |d| {
        let of = |t: &Taken| (t.peer.clone(), ConstGauge::new(t.taken_bytes));
        Some(d.peers.iter().map(of).collect())
    })?;
    let help = "Bytes that a peer may take.";
    page.split("peer_quota_bytes", help, "peer", domains, |d| {
        let of = |t: &Taken| Some((t.peer.clone(), ConstGauge::new(t.quota_bytes?)));
        Some(d.peers.iter().filter_map(of).collect())
    })
}

/// Name and help of a metric, and how it is read from the counts of a domain.
type Metric<T, V> = (&'static str, &'static str, fn(&T) -> V);

/// Name and help of a metric, its label, and how the values of the label are counted.
type Split = (
    &'static str,
    &'static str,
    &'static str,
    fn(&MountCounts) -> Vec<(&'static str, u64)>,
);

/// Images of this site that are mounted elsewhere.
fn served(page: &mut Page<'_>, domains: &[DomainStatus]) -> fmt::Result {
    let help = "Connected mounts of this site's images, by access.";
    page.split("served_mounts", help, "access", domains, |d| {
        let now = d.served.as_ref()?;
        let counts = [("write", now.writers), ("read", now.readers)];
        Some(Vec::from(
            counts.map(|(access, n)| (access.to_owned(), ConstGauge::new(n))),
        ))
    })?;
    let gauges: [Metric<MountCounts, u64>; 2] = [
        (
            "served_connections",
            "Open connections of these mounts.",
            |now| now.connections,
        ),
        ("served_images", "Images open for mounts.", |now| now.images),
    ];
    for (name, help, read) in gauges {
        page.domains(name, help, domains, |d| {
            Some(ConstGauge::new(read(d.served.as_ref()?)))
        })?;
    }
    let counters: [Split; 4] = [
        (
            "served_reads",
            "Chunk reads requested by mounts, by priority.",
            "kind",
            |now| {
                vec![
                    ("on_demand", now.reads_waited),
                    ("background", now.reads_background),
                ]
            },
        ),
        (
            "served_chunks",
            "Chunks read by mounts, by content.",
            "kind",
            |now| vec![("data", now.chunks), ("zero", now.chunks_zero)],
        ),
        (
            "served_bytes",
            "Bytes of images read (zeros included) and written by mounts.",
            "direction",
            |now| vec![("read", now.bytes_read), ("written", now.bytes_written)],
        ),
        (
            "served_link_bytes",
            "Compressed message bytes exchanged with mounts, by direction.",
            "direction",
            |now| vec![("sent", now.link_out), ("received", now.link_in)],
        ),
    ];
    for (name, help, by, read) in counters {
        page.split(name, help, by, domains, |d| {
            let counts = read(d.served.as_ref()?).into_iter();
            Some(
                counts
                    .map(|(value, n)| (value.to_owned(), ConstCounter::new(n)))
                    .collect(),
            )
        })?;
    }
    let counters: [Metric<MountCounts, u64>; 2] = [
        ("served_epochs", "Epochs of writes committed.", |now| {
            now.epochs
        }),
        (
            "served_leases_broken",
            "Write leases broken by the owner of the site.",
            |now| now.broken,
        ),
    ];
    for (name, help, read) in counters {
        page.domains(name, help, domains, |d| {
            Some(ConstCounter::new(read(d.served.as_ref()?)))
        })?;
    }
    let reasons: [Metric<MountCounts, Vec<(String, u64)>>; 2] = [
        (
            "served_refused",
            "Mount connections refused, by reason.",
            |now| now.refused.clone(),
        ),
        (
            "served_errors",
            "Mount requests that failed, by reason.",
            |now| now.failed.clone(),
        ),
    ];
    for (name, help, read) in reasons {
        page.split(name, help, "reason", domains, |d| {
            let counts = read(d.served.as_ref()?).into_iter();
            Some(
                counts
                    .map(|(reason, n)| (reason, ConstCounter::new(n)))
                    .collect(),
            )
        })?;
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

/// Transfers and the matcher, of the domains that are open.
fn transfers(page: &mut Page<'_>, domains: &[DomainStatus]) -> fmt::Result {
    let counters: [Metric<SiteStatus, u64>; 3] = [
        ("images_delivered", "Images delivered to this site.", |s| {
            s.delivered_images
        }),
        (
            "blocks_matched",
            "Blocks reused from images or the sequence cache.",
            |s| s.matched_blocks,
        ),
        ("blocks_received", "Blocks received over the link.", |s| {
            s.sent_blocks
        }),
    ];
    for (name, help, read) in counters {
        page.domains(name, help, domains, |d| {
            Some(ConstCounter::new(read(d.site.as_ref()?)))
        })?;
    }
    let gauges: [Metric<SiteStatus, u64>; 2] = [
        (
            "sequences_pending",
            "Sequences waiting to be copied to the sequence cache.",
            |s| s.pending_sequences,
        ),
        (
            "matcher_catching_up",
            "Whether the matcher does not know all images yet (0 or 1).",
            |s| u64::from(s.catching_up),
        ),
    ];
    for (name, help, read) in gauges {
        page.domains(name, help, domains, |d| {
            Some(ConstGauge::new(read(d.site.as_ref()?)))
        })?;
    }
    matcher(page, domains)
}

/// A count of the matcher of a domain by name, as [`SiteStatus::matcher`] has them; `None` without a matcher here.
fn matched(domain: &DomainStatus, key: &str) -> Option<u64> {
    let counts = &domain.site.as_ref()?.matcher;
    let of = || counts.iter().find(|(k, _)| k == key).map_or(0, |(_, n)| *n);
    (!counts.is_empty()).then(of)
}

/// The matchers.
fn matcher(page: &mut Page<'_>, domains: &[DomainStatus]) -> fmt::Result {
    if domains.iter().all(|d| matched(d, "memory").is_none()) {
        return Ok(());
    }
    let caches = |d: &DomainStatus, what: &str| {
        let n = |cache: &str| Some((cache.to_owned(), matched(d, &format!("{cache}_{what}"))?));
        ["c0", "c1", "c2"]
            .iter()
            .map(|cache| n(cache))
            .collect::<Option<Vec<_>>>()
    };
    for (what, help) in [
        ("capacity", "Slots of the matcher's caches."),
        ("entries", "Slots in use in the matcher's caches."),
    ] {
        page.split(
            &format!("matcher_cache_{what}"),
            help,
            "cache",
            domains,
            |d| {
                let all = caches(d, what)?.into_iter();
                Some(all.map(|(cache, n)| (cache, ConstGauge::new(n))).collect())
            },
        )?;
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
        page.split(
            &format!("matcher_cache_{what}"),
            help,
            "cache",
            domains,
            |d| {
                let all = caches(d, what)?.into_iter();
                Some(
                    all.map(|(cache, n)| (cache, ConstCounter::new(n)))
                        .collect(),
                )
            },
        )?;
    }
    let help = "Blocks in matched runs, by how the run was found.";
    page.split("matcher_run_blocks", help, "via", domains, |d| {
        let via = ["c0", "c1", "c2", "anchor", "aligned", "repeat"].into_iter();
        let n = |by: &str| matched(d, &format!("via_{by}")).map(ConstCounter::new);
        via.map(|by| Some((by.to_owned(), n(by)?))).collect()
    })?;
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
        page.domains(name, help, domains, |d| {
            matched(d, key).map(ConstCounter::new)
        })?;
    }
    let help = "Memory of the matcher in bytes.";
    page.domains("matcher_memory_bytes", help, domains, |d| {
        matched(d, "memory").map(ConstGauge::new)
    })
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
