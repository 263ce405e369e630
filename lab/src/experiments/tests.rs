//! The experiments against a stand-in for drover, a shell script that keeps the promises that scripts rely on
//! (and, if asked, breaks one): that they run to their end, and notice a wrong file.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;

use super::{local, stand_in};
use crate::shell;

/// A stand-in, two small images, and where results go.
fn set_up(dir: &Path, damage: &str) -> Vec<String> {
    stand_in::binary(dir, damage);
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
struct Local {
    #[command(flatten)]
    args: local::LocalArgs,
}

fn rows(out: PathBuf) -> Vec<serde_json::Value> {
    let report: serde_json::Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    report["rows"].as_array().unwrap().clone()
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
