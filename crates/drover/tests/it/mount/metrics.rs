//! Metrics and status of mounts, at both ends.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use serde_json::Value;

use super::{Mounts, can_mount, text};
use crate::world::{signal, until};

/// The value of a sample of that name and labels.
#[track_caller]
fn value(metrics: &str, sample: &str) -> f64 {
    let found = metrics
        .lines()
        .find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    let found = found.unwrap_or_else(|| panic!("{sample} is not in {metrics}"));
    found.parse().unwrap()
}

#[test]
fn both_ends_count_what_mounts_do() {
    if !can_mount("both_ends_count_what_mounts_do") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 91);
    m.raw("other.raw", 92);
    let served = || m.world.run("far", &["status", "--metrics"]).ok().out;
    let before = served();
    for sample in [
        "drover_served_mounts{domain=\"default\",access=\"write\"}",
        "drover_served_leases{domain=\"default\"}",
        "drover_served_reads_total{domain=\"default\",kind=\"on_demand\"}",
        "drover_served_bytes_total{domain=\"default\",direction=\"written\"}",
        "drover_served_refused_total{domain=\"default\",reason=\"leased\"}",
    ] {
        assert_eq!(value(&before, sample), 0.0, "{sample}");
    }
    let disk = m.mount("web.raw", "disk", &["--push-interval", "100ms"]);
    let read_only = m.mount("other.raw", "reads", &["--read-only", "--prefetch", "none"]);
    fs::read(&read_only).unwrap();
    until("all is here", || {
        let here = m.list();
        let disk = here.iter().find(|row| row["place"] == text(&disk)).unwrap();
        disk["disks"][0]["local"] == disk["disks"][0]["size"]
    });
    File::options()
        .write(true)
        .open(&disk)
        .and_then(|file| {
            file.write_all_at(&[7; 65536], 0)?;
            file.sync_all()
        })
        .unwrap();
    until("it is pushed", || {
        value(&served(), "drover_served_epochs_total{domain=\"default\"}") >= 1.0
    });
    let second = m.world.path("second");
    m.near(&["mount", "far:web.raw", text(&second), "--read-only"])
        .fails(3, &["web.raw"]);
    m.near(&["mount", "far:nope", text(&second)]).fails(3, &[]);

    let after = served();
    let at_least = |sample: &str, least: f64| {
        assert!(value(&after, sample) >= least, "{sample}: {after}");
    };
    assert_eq!(
        value(
            &after,
            "drover_served_mounts{domain=\"default\",access=\"write\"}"
        ),
        1.0
    );
    assert_eq!(
        value(
            &after,
            "drover_served_mounts{domain=\"default\",access=\"read\"}"
        ),
        1.0
    );
    assert_eq!(
        value(&after, "drover_served_images{domain=\"default\"}"),
        2.0
    );
    assert_eq!(
        value(&after, "drover_served_leases{domain=\"default\"}"),
        1.0
    );
    at_least("drover_served_connections{domain=\"default\"}", 4.0);
    at_least(
        "drover_served_reads_total{domain=\"default\",kind=\"on_demand\"}",
        1.0,
    );
    at_least(
        "drover_served_reads_total{domain=\"default\",kind=\"background\"}",
        1.0,
    );
    // Each image has 2 MiB and 300 kB of random data.
    at_least(
        "drover_served_chunks_total{domain=\"default\",kind=\"data\"}",
        70.0,
    );
    at_least(
        "drover_served_bytes_total{domain=\"default\",direction=\"read\"}",
        4.5e6,
    );
    at_least(
        "drover_served_bytes_total{domain=\"default\",direction=\"written\"}",
        65536.0,
    );
    at_least(
        "drover_served_link_bytes_total{domain=\"default\",direction=\"sent\"}",
        4.5e6,
    );
    at_least(
        "drover_served_link_bytes_total{domain=\"default\",direction=\"received\"}",
        1.0,
    );
    at_least(
        "drover_served_refused_total{domain=\"default\",reason=\"leased\"}",
        1.0,
    );
    at_least(
        "drover_served_refused_total{domain=\"default\",reason=\"no_image\"}",
        1.0,
    );

    // The mounting end: progress, for scripts and for Prometheus.
    let here = m.near(&["mounts", "--metrics"]).ok().out;
    let rows = m.list();
    let row = rows.iter().find(|row| row["place"] == text(&disk)).unwrap();
    let labels = format!(
        "{{mount=\"{}\",image=\"far:web.raw\",mode=\"managed\"}}",
        row["name"].as_str().unwrap()
    );
    for (metric, field) in [
        ("size_bytes", "size"),
        ("local_bytes", "local"),
        ("dirty_bytes", "dirty"),
        ("in_flight_bytes", "in_flight"),
        ("remaining_seconds", "seconds_left"),
        ("epochs", "epoch"),
    ] {
        let shown = value(&here, &format!("drover_mount_{metric}{labels}"));
        assert_eq!(Some(shown), row["disks"][0][field].as_f64(), "{metric}");
    }
    assert_eq!(value(&here, &format!("drover_mount_link_up{labels}")), 1.0);
    assert!(row["disks"][0]["rate"].is_number());
    m.unmount(&read_only, &[]).ok();
    m.unmount(&disk, &[]).ok();
    let ended = served();
    assert_eq!(
        value(&ended, "drover_served_connections{domain=\"default\"}"),
        0.0
    );
    assert_eq!(
        value(&ended, "drover_served_leases{domain=\"default\"}"),
        0.0
    );
}

#[test]
fn a_stopped_daemon_is_distinguished_from_a_dead_one() {
    if !can_mount("a_stopped_daemon_is_distinguished_from_a_dead_one") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 93);
    // An export: looking at a FUSE file without a running daemon would block in the kernel.
    m.export("web.raw", &[]);
    let process = m.list()[0]["process"].as_u64().unwrap();
    let process = u32::try_from(process).unwrap();
    signal(process, "STOP");
    // A signal takes a moment to stop all its threads.
    let mut row = Value::Null;
    until("it is silent", || {
        row = m.list().remove(0);
        row["state"] != "up"
    });
    signal(process, "CONT");
    assert_eq!(row["state"], "silent", "{row}");
    assert_eq!(row["process"], u64::from(process));
    assert_eq!(row["disks"][0]["link"], "its process does not answer");
    let name = row["name"].as_str().unwrap();
    m.near(&["unmount", name]).ok();
}
