//! The kernel's NBD client and ublk, in a virtual machine whose kernel has both: `kernel.sh` runs there and reports
//! each step; `examples/attach_memory.rs` is the server.

use std::path::Path;

#[path = "../../../../lab/guest/guest.rs"]
mod guest;

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
    let own = std::env::current_exe().unwrap();
    let examples = ["attach_memory", "readiness", "torture_device"]
        .map(|example| own.with_file_name("../examples").join(example));
    let programs = ["sbin/mkfs.ext4", "sbin/e2fsck", "bin/dd", "bin/timeout"]
        .map(|program| Path::new("/usr").join(program));
    guest::Guest {
        test,
        with: examples.into_iter().chain(programs).collect(),
        modules: [&guest::EXT4[..], &["nbd", "ublk_drv"]].concat(),
        nic: "",
        timeout: "1700",
        script: include_str!("kernel.sh"),
        steps: &STEPS,
    }
    .run();
}
