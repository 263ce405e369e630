//! The program itself, with a stand-in for drover that hangs: Ctrl-C and `kill -9` leave nothing behind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Serves and pairs as drover does; a send says that it has begun, and hangs.
const HANGS: &str = r#"#!/bin/sh
mkdir -p "$DROVER_HOME/images"
case "$1" in
serve) echo "$DROVER_HOME"; echo $$ >> HERE/pids; exec sleep 600 ;;
pair) echo "$2" > "$DROVER_HOME/peer" ;;
send) echo $$ >> HERE/pids; touch HERE/begun; exec sleep 600 ;;
esac
"#;
/// Within which the case begins, and within which everything is gone: busy machines are slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// A library of two tiny images, a stand-in, and a run that has begun to send.
fn begun(dir: &Path) -> Child {
    fs::create_dir_all(dir.join("cache/images")).unwrap();
    for (name, byte) in [("small-one.raw", 1), ("small-two.raw", 2)] {
        fs::write(dir.join("cache/images").join(name), vec![byte; 64 << 10]).unwrap();
    }
    let drover = dir.join("drover");
    fs::write(&drover, HANGS.replace("HERE", dir.to_str().unwrap())).unwrap();
    fs::set_permissions(&drover, fs::Permissions::from_mode(0o755)).unwrap();
    let child = lab(
        dir,
        &[
            "bench",
            "--small",
            "--only",
            "library/*-limit",
            "library/*-drover",
        ],
    )
    .stdout(Stdio::null())
    .stderr(fs::File::create(dir.join("said")).unwrap())
    .spawn()
    .unwrap();
    let said = || fs::read_to_string(dir.join("said")).unwrap();
    wait("a send begins", said, || dir.join("begun").exists());
    child
}

fn lab(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command
        .args(args)
        .arg("--drover")
        .arg(dir.join("drover"))
        .arg("--dir")
        .arg(dir.join("cache"))
        .arg("--out")
        .arg(dir.join("out"))
        .stdin(Stdio::null());
    command
}

fn wait(what: &str, said: impl Fn() -> String, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}: {}", said());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// The child of a process.
fn child_of(parent: i32) -> i32 {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let children = fs::read_to_string(path).unwrap();
    children.trim().parse().expect("one child")
}

/// Whether a process of the stand-in is still there.
fn some_run(dir: &Path) -> bool {
    let pids = fs::read_to_string(dir.join("pids")).unwrap();
    let alive = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie has ended; whoever inherited it has not asked yet.
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    };
    pids.lines().any(alive)
}

/// What is left in a directory, by name.
fn left(dir: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(prefix)).collect()
}

/// The cases whose results are kept.
fn kept(dir: &Path) -> Vec<String> {
    let rows = fs::read_to_string(dir.join("out/rows-small.jsonl")).unwrap_or_default();
    let case = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        record["case"].as_str().unwrap().to_owned()
    };
    rows.lines().map(case).collect()
}

#[test]
fn ctrl_c_ends_the_case_and_keeps_what_was_done() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = begun(dir.path());
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!some_run(dir.path()));
    assert_eq!(left(&dir.path().join("out"), "work-"), [""; 0]);
    let kept = kept(dir.path());
    assert!(kept.len() == 1 && kept[0].ends_with("-limit"), "{kept:?}");
}

#[test]
fn nothing_outlives_a_run_that_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = begun(dir.path());
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    wait("all ends", String::new, || !some_run(dir.path()));
    // What was kept can be read; the killed run's directories go with the next one.
    let kept = kept(dir.path());
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert_ne!(left(&dir.path().join("out"), "work-"), [""; 0]);
    let out = lab(
        dir.path(),
        &["bench", "--small", "--only", "library/*-limit"],
    )
    .output()
    .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(String::from_utf8_lossy(&out.stderr).contains("-limit: kept"));
    assert_eq!(left(&dir.path().join("out"), "work-"), [""; 0]);
}

#[test]
fn a_case_whose_process_dies_is_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = begun(dir.path());
    // The run has one child, `timeout`, and that has the case.
    let case = child_of(child_of(child.id().cast_signed()));
    kill_process(Pid::from_raw(case).unwrap(), Signal::KILL).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let said = fs::read_to_string(dir.path().join("said")).unwrap();
    assert!(said.contains("FAILED: its process ended"), "{said}");
    assert!(!some_run(dir.path()));
}
