//! Everything a site counts, under the names by which Prometheus knows it. No other file has metric names.

use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use serde_json::Value;

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
}

impl Metrics {
    /// The metrics in Prometheus's text format.
    pub fn render(&self, now: &Snapshot) -> String {
        let mut out = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(&str, f64)]| {
            let _ = writeln!(
                out,
                "# HELP drover_{name} {help}\n# TYPE drover_{name} {kind}"
            );
            for (labels, value) in samples {
                let _ = writeln!(out, "drover_{name}{labels} {value}");
            }
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
        });
        for line in [
            "drover_connections_total 3",
            "drover_connections_rejected_total{reason=\"trust\"} 1",
            "drover_images 2",
            "drover_site_matcher_c2_hits 7",
            "drover_site_matcher_ratio 0.5",
            "drover_site_matcher_counts_c1_hits 4",
            "# TYPE drover_sessions_total counter",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(!text.contains("transfers"));
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
