//! The experiments against a stand-in for drover, a shell script that keeps the promises that scripts rely on
//! (and, if asked, breaks one): that they run to their end, and notice a wrong file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Parser;

use super::{local, wire};
use crate::shell;

const STAND_IN: &str = r#"#!/bin/sh
set -e
mkdir -p "$DROVER_HOME/images"
case "$1" in
serve) echo "$DROVER_HOME"; exec sleep 60 ;;
pair) echo "$2" > "$DROVER_HOME/peer" ;;
send)
  name=$(basename "$2")
  to="$(cat "$DROVER_HOME/peer")/images/$name"
  cp "$2" "$to"
  DAMAGE
  size=$(stat -c %s "$2")
  echo '{"event":"progress"}'
  echo '{"event":"done","images":[{"name":"'$name'","size_bytes":'$size',"wire_sent_bytes":'$size',"wire_received_bytes":7,"matched_blocks":1}]}' ;;
esac
"#;

/// A stand-in, two small images, and where results go.
fn set_up(dir: &Path, damage: &str) -> Vec<String> {
    let drover = dir.join("drover");
    fs::write(&drover, STAND_IN.replace("DAMAGE", damage)).unwrap();
    fs::set_permissions(&drover, fs::Permissions::from_mode(0o755)).unwrap();
    for (name, byte) in [("one.raw", 1), ("two.raw", 2)] {
        fs::write(dir.join(name), [vec![byte; 5000], vec![9; 8192]].concat()).unwrap();
    }
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    vec![
        "--drover".into(),
        path("drover"),
        "--out".into(),
        path("out"),
        path("one.raw"),
    ]
}

#[derive(Parser)]
struct Wire {
    #[command(flatten)]
    args: wire::WireArgs,
}

#[derive(Parser)]
struct Local {
    #[command(flatten)]
    args: local::LocalArgs,
}

fn rows(out: PathBuf) -> Vec<serde_json::Value> {
    let report: serde_json::Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    report["rows"].as_array().unwrap().clone()
}

fn run_wire(dir: &Path, damage: &str) -> anyhow::Result<()> {
    let two = dir.join("two.raw").to_str().unwrap().to_owned();
    let given = [
        vec!["wire".into(), "--loopback".into()],
        set_up(dir, damage),
        vec![two],
    ]
    .concat();
    wire::run(&Wire::parse_from(given).args)
}

#[test]
fn the_library_is_sent_in_order_and_measured_against_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    // A run that was killed has left its sites; no process has this number.
    fs::create_dir_all(dir.path().join("out/work-wire-4194999/site")).unwrap();
    run_wire(dir.path(), "").unwrap();
    let rows = rows(dir.path().join("out/wire.json"));
    let names: Vec<_> = rows
        .iter()
        .map(|r| r["sent"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["one.raw", "two.raw"]);
    assert!(
        rows.iter()
            .all(|r| r["identical"] == true && r["sent"]["wire_sent_bytes"] == 13_192)
    );
    assert!(rows[0]["limit"]["limit_bytes"].as_u64().unwrap() > 0);
    assert!(rows[1]["limit"]["matched_blocks"].as_u64().unwrap() >= 1);
    // Nothing is left of the sites.
    assert_eq!(fs::read_dir(dir.path().join("out")).unwrap().count(), 1);
}

#[test]
fn a_wrong_file_is_shown_and_fails_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let error = run_wire(dir.path(), r#"echo x >> "$to""#)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("one.raw") && error.contains("two.raw"),
        "{error}"
    );
    assert!(
        rows(dir.path().join("out/wire.json"))
            .iter()
            .all(|r| r["identical"] == false)
    );
}

#[test]
fn a_failing_send_fails_the_run_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let error = run_wire(dir.path(), "echo no space there >&2; exit 3")
        .unwrap_err()
        .to_string();
    assert!(error.contains("no space there"), "{error}");
    assert!(rows(dir.path().join("out/wire.json")).is_empty());
}

#[test]
fn sends_are_measured_beside_rsync() {
    if !shell::have("rsync") {
        eprintln!("SKIP sends_are_measured_beside_rsync: no rsync");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let given = [
        vec!["local".into(), "--repeat".into(), "2".into()],
        set_up(dir.path(), ""),
    ];
    local::run(&Local::parse_from(given.concat()).args).unwrap();
    let rows = rows(dir.path().join("out/local.json"));
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().all(|r| r["identical"] == true));
    assert!(
        rows.iter()
            .all(|r| r["seconds"]["min"].as_f64().unwrap() > 0.0)
    );
}
