//! A real QEMU for tests, without KVM, and a small guest that shows what a migration must not break.
//!
//! The guest is one program (`guest.c`, which says what it does) on the kernel that `lab/guest/fetch.sh` keeps. Where
//! something is missing, [`program`] and [`Guest::build`] say SKIP and what to do, and return `None`.

mod booted;
mod guest;
mod libvirt;
mod qemu;

pub use guest::Guest;
pub use libvirt::Libvirt;
pub use qemu::{Launch, Qemu, program};

use std::time::Duration;

/// How long a test waits for what takes a guest seconds, also on a machine that has much else to do.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What is missing is said in a line that the summary of a test run repeats.
fn skip<T>(test: &str, why: &str) -> Option<T> {
    eprintln!("SKIP {test}: {why}");
    None
}
