//! Everything a site counts, under the names by which Prometheus knows it. No other file has metric names.

use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use drover_mount::server::Counted;
use serde_json::Value;

use crate::mounts::{DiskStatus, State, Status};

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

/// What is looked up when metrics are asked for.
#[derive(Debug)]
pub struct Snapshot {
    /// Images in the catalog.
    pub images: usize,
    /// Peers in the catalog.
    pub peers: usize,
    /// When this process became ready, in seconds since 1970.
    pub started_unix: i64,
    /// What the teleport layer says of itself.
    pub site: Value,
    /// What is served to mounts of other sites, and how many writers' leases there are, where that can be
    /// read; none for a teleporter.
    pub served: Option<(Counted, Option<usize>)>,
    /// What is mounted here, by processes of their own.
    pub mounts: Vec<Status>,
}

impl Metrics {
    /// The metrics in Prometheus's text format.
    pub fn render(&self, now: &Snapshot) -> String {
        let mut out = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(&str, f64)]| {
            write_family(&mut out, name, kind, help, samples);
        };
        let c = |v: &AtomicU64| v.load(Relaxed) as f64;
        let g = |v: &AtomicI64| v.load(Relaxed) as f64;
        let version = format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
        family("build_info", "gauge", "The program.", &[(&version, 1.0)]);
        family(
            "start_time_seconds",
            "gauge",
            "When the site became ready, since 1970.",
            &[("", now.started_unix as f64)],
        );
        family(
            "resident_memory_bytes",
            "gauge",
            "Memory of the process.",
            &[("", resident_bytes() as f64)],
        );
        family(
            "images",
            "gauge",
            "Images in the catalog.",
            &[("", now.images as f64)],
        );
        family(
            "peers",
            "gauge",
            "Peers that are trusted.",
            &[("", now.peers as f64)],
        );
        family(
            "connections_total",
            "counter",
            "Connections taken.",
            &[("", c(&self.connections))],
        );
        family(
            "connections_open",
            "gauge",
            "Connections open.",
            &[("", g(&self.connections_open))],
        );
        family(
            "connections_rejected_total",
            "counter",
            "Connections turned away.",
            &[
                ("{reason=\"limit\"}", c(&self.rejected_limit)),
                ("{reason=\"handshake\"}", c(&self.rejected_handshake)),
                ("{reason=\"trust\"}", c(&self.rejected_trust)),
            ],
        );
        family(
            "pairings_total",
            "counter",
            "Peers paired.",
            &[("", c(&self.pairings))],
        );
        family(
            "tickets_refused_total",
            "counter",
            "Tickets that were used, too old or unknown.",
            &[("", c(&self.tickets_refused))],
        );
        family(
            "sessions_total",
            "counter",
            "Sessions that ended.",
            &[
                ("{result=\"done\"}", c(&self.sessions_done)),
                ("{result=\"failed\"}", c(&self.sessions_failed)),
            ],
        );
        family(
            "sessions_open",
            "gauge",
            "Sessions open.",
            &[("", g(&self.sessions_open))],
        );
        family(
            "wire_bytes_total",
            "counter",
            "Bytes of closed connections, encryption counted.",
            &[
                ("{direction=\"sent\"}", c(&self.wire_sent)),
                ("{direction=\"received\"}", c(&self.wire_received)),
            ],
        );
        family(
            "verified_total",
            "counter",
            "Images checked against their digest.",
            &[
                ("{result=\"good\"}", c(&self.verified_good)),
                ("{result=\"bad\"}", c(&self.verified_bad)),
            ],
        );
        if let Some((counted, leases)) = &now.served {
            served(counted, *leases, &mut family);
        }
        mounted(&now.mounts, &mut family);
        let mut numbers = Vec::new();
        flatten("site", &now.site, &mut numbers);
        for (name, value) in numbers {
            family(
                &name,
                "untyped",
                "See `drover status --json`.",
                &[("", value)],
            );
        }
        out
    }
}

/// What is mounted here, in Prometheus's text format.
pub fn of_mounts(mounts: &[Status]) -> String {
    let mut out = String::new();
    mounted(mounts, &mut |name, kind, help, samples| {
        write_family(&mut out, name, kind, help, samples);
    });
    out
}

/// Writes a family: its name, kind and help, and samples as labels and value.
type Family<'a> = dyn FnMut(&str, &str, &str, &[(&str, f64)]) + 'a;

fn write_family(out: &mut String, name: &str, kind: &str, help: &str, samples: &[(&str, f64)]) {
    let _ = writeln!(
        out,
        "# HELP drover_{name} {help}\n# TYPE drover_{name} {kind}"
    );
    for (labels, value) in samples {
        let _ = writeln!(out, "drover_{name}{labels} {value}");
    }
}

/// Images of this site that other sites have mounted.
fn served(now: &Counted, leases: Option<usize>, family: &mut Family<'_>) {
    let n = |value: u64| value as f64;
    family(
        "served_mounts",
        "gauge",
        "Mounts of this site's images that are connected.",
        &[
            ("{access=\"write\"}", n(now.writers)),
            ("{access=\"read\"}", n(now.readers)),
        ],
    );
    let gauges = [
        ("served_lanes", "Connections of these mounts.", n(now.lanes)),
        (
            "served_images",
            "Images that are open for mounts.",
            n(now.images),
        ),
        (
            "served_leases",
            "Writers' leases, of mounts that are connected or not.",
            leases.map_or(f64::NAN, |leases| leases as f64),
        ),
    ];
    for (name, help, value) in gauges {
        family(name, "gauge", help, &[("", value)]);
    }
    let pairs = [
        (
            "served_reads_total",
            "Reads of chunks by mounts.",
            ("{kind=\"waited\"}", n(now.reads_waited)),
            ("{kind=\"background\"}", n(now.reads_background)),
        ),
        (
            "served_chunks_total",
            "Chunks that mounts read.",
            ("{kind=\"data\"}", n(now.chunks)),
            ("{kind=\"zero\"}", n(now.chunks_zero)),
        ),
        (
            "served_bytes_total",
            "Bytes of images that mounts read, zeros included, and wrote.",
            ("{direction=\"read\"}", n(now.bytes_read)),
            ("{direction=\"written\"}", n(now.bytes_written)),
        ),
        (
            "served_link_bytes_total",
            "Bytes of mounts' messages, packed.",
            ("{direction=\"sent\"}", n(now.link_out)),
            ("{direction=\"received\"}", n(now.link_in)),
        ),
    ];
    for (name, help, one, other) in pairs {
        family(name, "counter", help, &[one, other]);
    }
    for (name, help, value) in [
        (
            "served_epochs_total",
            "Sets of writes that were made to count.",
            n(now.epochs),
        ),
        (
            "served_leases_broken_total",
            "Leases that were broken.",
            n(now.broken),
        ),
    ] {
        family(name, "counter", help, &[("", value)]);
    }
    let reasons = [
        (
            "served_refused_total",
            "Connections of mounts that were refused.",
            &now.refused,
        ),
        (
            "served_errors_total",
            "Requests of mounts that failed.",
            &now.failed,
        ),
    ];
    for (name, help, by_reason) in reasons {
        let labelled: Vec<_> = by_reason
            .iter()
            .map(|(reason, count)| (format!("{{reason=\"{reason}\"}}"), n(*count)))
            .collect();
        family(name, "counter", help, &borrowed(&labelled));
    }
}

/// What a disk of a mount is asked for.
type Ask = fn(&DiskStatus) -> Option<f64>;

/// Images of other sites that are mounted here.
fn mounted(mounts: &[Status], family: &mut Family<'_>) {
    let up: Vec<_> = mounts
        .iter()
        .map(|m| {
            let value = f64::from(u8::from(m.state == State::Up));
            (format!("{{mount=\"{}\"}}", label(&m.name)), value)
        })
        .collect();
    family(
        "mount_up",
        "gauge",
        "Whether a mount of this home can be used.",
        &borrowed(&up),
    );
    let asks: [(&str, &str, &str, Ask); 10] = [
        ("size_bytes", "gauge", "Size of the disk.", |d| {
            Some(d.size as f64)
        }),
        ("local_bytes", "gauge", "Bytes that are here.", |d| {
            Some(d.local as f64)
        }),
        (
            "dirty_bytes",
            "gauge",
            "Bytes written here that the other site does not have.",
            |d| Some(d.dirty as f64),
        ),
        ("in_flight_bytes", "gauge", "Bytes under way.", |d| {
            Some(d.in_flight as f64)
        }),
        (
            "rate_bytes_per_second",
            "gauge",
            "Bytes arriving in a second.",
            |d| Some(d.rate),
        ),
        (
            "seconds_left",
            "gauge",
            "Until all is here, as it goes now.",
            |d| d.seconds_left,
        ),
        (
            "link_up",
            "gauge",
            "Whether the other site can be reached.",
            |d| Some(f64::from(u8::from(d.link == "up"))),
        ),
        (
            "received_bytes_total",
            "counter",
            "Bytes that arrived on the link.",
            |d| Some(d.received as f64),
        ),
        (
            "sent_bytes_total",
            "counter",
            "Bytes that left on the link.",
            |d| Some(d.sent as f64),
        ),
        (
            "epochs",
            "gauge",
            "Sets of writes that the other site has.",
            |d| Some(d.epoch as f64),
        ),
    ];
    for (name, kind, help, ask) in asks {
        let mut samples = Vec::new();
        // Of one that nobody keeps no more is known than what is to be pushed.
        for mount in mounts {
            let is_kept = matches!(mount.state, State::Up | State::Ending);
            for disk in &mount.disks {
                if !is_kept && name != "dirty_bytes" {
                    continue;
                }
                let labels = format!(
                    "{{mount=\"{}\",image=\"{}\",mode=\"{}\"}}",
                    label(&mount.name),
                    label(&disk.image),
                    label(&disk.mode)
                );
                samples.extend(ask(disk).map(|value| (labels, value)));
            }
        }
        family(&format!("mount_{name}"), kind, help, &borrowed(&samples));
    }
}

fn borrowed(samples: &[(String, f64)]) -> Vec<(&str, f64)> {
    samples.iter().map(|(l, v)| (l.as_str(), *v)).collect()
}

/// Text as the value of a label.
fn label(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    text.replace('\n', "\\n")
}

/// The numbers in nested objects, each named by its path. Other lists are left out: their members come and go.
fn flatten(path: &str, value: &Value, out: &mut Vec<(String, f64)>) {
    match value {
        Value::Number(n) => out.extend(n.as_f64().map(|n| (path.to_string(), n))),
        Value::Bool(b) => out.push((path.to_string(), f64::from(u8::from(*b)))),
        Value::Object(fields) => {
            for (key, value) in fields {
                flatten(&format!("{path}_{}", word(key)), value, out);
            }
        }
        Value::Array(items) => {
            // Lists of names with their numbers.
            for item in items {
                if let Some([Value::String(key), value @ Value::Number(_)]) =
                    item.as_array().map(Vec::as_slice)
                {
                    flatten(&format!("{path}_{}", word(key)), value, out);
                }
            }
        }
        _ => {}
    }
}

/// A key as part of a metric's name.
fn word(key: &str) -> String {
    key.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect()
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

    fn mount(name: &str, state: State) -> Status {
        Status {
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

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.connections.store(3, Relaxed);
        metrics.rejected_trust.store(1, Relaxed);
        let site = serde_json::json!({"matcher": {"c2": {"hits": 7}, "ratio": 0.5, "counts": [["c1 hits", 4]]}, "transfers": [{"x": 1}], "name": "y"});
        let text = metrics.render(&Snapshot {
            images: 2,
            peers: 1,
            started_unix: 5,
            site,
            served: Some((
                Counted {
                    writers: 1,
                    readers: 2,
                    reads_background: 7,
                    refused: vec![("leased", 3)],
                    ..Counted::default()
                },
                Some(4),
            )),
            mounts: vec![mount("a\"b", State::Up), mount("dead", State::Dead)],
        });
        for line in [
            "drover_connections_total 3",
            "drover_connections_rejected_total{reason=\"trust\"} 1",
            "drover_images 2",
            "drover_site_matcher_c2_hits 7",
            "drover_site_matcher_ratio 0.5",
            "drover_site_matcher_counts_c1_hits 4",
            "# TYPE drover_sessions_total counter",
            "drover_served_mounts{access=\"read\"} 2",
            "drover_served_reads_total{kind=\"background\"} 7",
            "drover_served_refused_total{reason=\"leased\"} 3",
            "drover_served_leases 4",
            "drover_mount_up{mount=\"a\\\"b\"} 1",
            "drover_mount_up{mount=\"dead\"} 0",
            "drover_mount_local_bytes{mount=\"a\\\"b\",image=\"far:web\",mode=\"managed\"} 10",
            "drover_mount_dirty_bytes{mount=\"dead\",image=\"far:web\",mode=\"managed\"} 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(!text.contains("transfers"));
        let has = |start: &str| text.lines().any(|l| l.starts_with(start));
        assert!(!has("drover_mount_seconds_left{"), "it is not known");
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
