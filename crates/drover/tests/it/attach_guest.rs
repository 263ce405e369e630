//! `drover attach` in a virtual machine whose kernel has nbd and ublk, with the sites at both ends. `attach_guest.sh`
//! runs in it and reports each step.

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../../../lab/guest/guest.rs"]
pub mod guest;

/// Steps that must be among the successful ones, so that a script that ends early is noticed.
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

/// The program without its debug information, in that directory, to fit a machine's memory; none, said loudly, without `strip`.
pub fn lean_drover(test: &str, dir: &Path) -> Option<PathBuf> {
    let program = dir.join("drover");
    let stripped = Command::new("strip")
        .arg(assert_cmd::cargo::cargo_bin!("drover"))
        .arg("-o")
        .arg(&program)
        .status();
    if !stripped.is_ok_and(|status| status.success()) {
        eprintln!("SKIP {test}: no strip (binutils)");
        return None;
    }
    Some(program)
}

#[test]
#[ignore = "boots a machine without KVM, which takes three minutes: \
            cargo test -p drover --test it -- --ignored attach_in_a_guest"]
fn attach_in_a_guest_by_nbd_and_by_ublk() {
    let test = "attach_in_a_guest_by_nbd_and_by_ublk";
    let lean = tempfile::tempdir().unwrap();
    let Some(program) = lean_drover(test, lean.path()) else {
        return;
    };
    let mut with = vec![program];
    with.extend(
        [
            "sbin/mkfs.ext4",
            "sbin/e2fsck",
            "bin/dd",
            "bin/cmp",
            "bin/timeout",
        ]
        .map(|tool| Path::new("/usr").join(tool)),
    );
    guest::Guest {
        test,
        with,
        modules: [&guest::EXT4[..], &["loop", "fuse", "nbd", "ublk_drv"]].concat(),
        nic: "",
        timeout: "1700",
        script: include_str!("attach_guest.sh"),
        steps: &STEPS,
    }
    .run();
}
