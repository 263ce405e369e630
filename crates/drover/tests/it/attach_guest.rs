//! `drover attach` in a machine whose kernel has nbd and ublk, with the sites at both ends: `attach_guest.sh` runs
//! there and says how each step went.

use std::path::Path;
use std::process::Command;

/// Steps that must be among those that went well: none is left out by a script that ends early.
const STEPS: [&str; 25] = [
    "ublk before nbd",
    "every thread is an I/O flusher",
    "nbd: content",
    "nbd: busy",
    "nbd: the device is gone",
    "nbd read-only: content",
    "nbd read-only: fsck",
    "ublk: busy",
    "ublk: the device is gone",
    "ublk read-only: content",
    "nbd killed: nobody hangs",
    "nbd again: what was flushed",
    "ublk killed: nobody hangs",
    "ublk again: what was flushed",
    "nbd cut: the read comes",
    "nbd restart: the same bytes again",
    "ublk restart: the same bytes again",
    "nbd gives up: in time",
    "ublk gives up: in time",
    "nbd beside: content",
    "ublk beside: content",
    "loop: content",
    "nbd after the dead: content",
    "ublk after the dead: content",
    "the kernel is well",
];

#[test]
#[ignore = "boots a machine without KVM, which takes three minutes: \
            cargo test -p drover --test it -- --ignored attach_in_a_guest"]
fn attach_in_a_guest_by_nbd_and_by_ublk() {
    let test = "attach_in_a_guest_by_nbd_and_by_ublk";
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Without its debug information it fits the machine's memory.
    let lean = tempfile::tempdir().unwrap();
    let program = lean.path().join("drover");
    let stripped = Command::new("strip")
        .arg(assert_cmd::cargo::cargo_bin!("drover"))
        .arg("-o")
        .arg(&program)
        .status();
    if !stripped.is_ok_and(|status| status.success()) {
        return eprintln!("SKIP {test}: no strip (binutils)");
    }
    let mut guest = Command::new(here.join("../../lab/guest/run.sh"));
    guest.arg("--dir").arg(here.join("../../lab/cache"));
    guest.args(["--cpus", "2", "--timeout", "580", "--with"]);
    guest.arg(&program);
    for tool in [
        "sbin/mkfs.ext4",
        "sbin/e2fsck",
        "bin/dd",
        "bin/cmp",
        "bin/timeout",
    ] {
        guest.arg("--with").arg(Path::new("/usr").join(tool));
    }
    for module in [
        "crc16",
        "mbcache",
        "jbd2",
        "crc32c_generic",
        "libcrc32c",
        "ext4",
        "loop",
        "fuse",
        "nbd",
        "ublk_drv",
    ] {
        guest.args(["--module", module]);
    }
    let output = guest.arg(include_str!("attach_guest.sh")).output().unwrap();
    let console = String::from_utf8_lossy(&output.stdout);
    if output.status.code() == Some(77) {
        let why = String::from_utf8_lossy(&output.stderr);
        return eprintln!("{} ({test})", why.trim());
    }
    assert!(output.status.success(), "{console}");
    assert!(!console.contains("FAIL"), "{console}");
    // The kernel's own words may be before a line's.
    let went_well = |step: &str| {
        let line = format!("ok {step}");
        console.lines().any(|said| said.ends_with(&line))
    };
    for step in STEPS {
        assert!(went_well(step), "{step} is missing:\n{console}");
    }
    assert!(
        console.lines().any(|line| line.ends_with("done")),
        "{console}"
    );
    for line in console.lines().filter(|line| line.starts_with("figure ")) {
        eprintln!("{line}");
    }
}
