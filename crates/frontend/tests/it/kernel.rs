//! The kernel's NBD client and ublk, in a machine whose kernel has both: `kernel.sh` runs there and says how each step
//! went; `examples/attach_memory.rs` is the server.

use std::path::Path;
use std::process::Command;

/// Steps of `kernel.sh` that must be among those that went well: none is left out by a script that ends early.
const STEPS: [&str; 22] = [
    "nbd content",
    "nbd-4 content",
    "nbd-ioctl content",
    "ublk content",
    "ublk-slow server ends",
    "nbd torture",
    "nbd-4 torture",
    "ublk torture",
    "ublk-slow torture",
    "ublk stopped: the server ends",
    "ioctls alone: free",
    "nbd backing file",
    "ublk backing file",
    "ublk discard",
    "nbd slow side by side",
    "ublk slow side by side",
    "nbd killed: free",
    "ublk killed: the node goes",
    "ublk mounted: umount",
    "nbd restart: the reader goes on",
    "nbd stopped: removed",
    "the kernel is well",
];

#[test]
#[ignore = "boots a machine without KVM, which takes two minutes: \
            cargo test -p drover-frontend -- --ignored guest"]
fn both_drivers_serve_file_systems_in_a_guest() {
    let test = "both_drivers_serve_file_systems_in_a_guest";
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = std::env::current_exe().unwrap();
    let mut guest = Command::new(here.join("../../lab/guest/run.sh"));
    guest.arg("--dir").arg(here.join("../../lab/cache"));
    guest.args(["--cpus", "2", "--timeout", "500"]);
    for example in ["attach_memory", "readiness", "torture_device"] {
        let example = own.with_file_name("../examples").join(example);
        guest.arg("--with").arg(example);
    }
    for program in ["sbin/mkfs.ext4", "sbin/e2fsck", "bin/dd", "bin/timeout"] {
        guest.arg("--with").arg(Path::new("/usr").join(program));
    }
    for module in [
        "crc16",
        "mbcache",
        "jbd2",
        "crc32c_generic",
        "libcrc32c",
        "ext4",
        "nbd",
        "ublk_drv",
    ] {
        guest.args(["--module", module]);
    }
    let output = guest.arg(include_str!("kernel.sh")).output().unwrap();
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
