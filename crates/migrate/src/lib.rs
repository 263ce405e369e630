//! Live migration: a running machine, its disks and its memory, moves to another site.
//!
//! - [`seeder`] and [`leecher`]: the two ends as state machines without I/O and without a clock. They decide who may run
//!   the machine; what is copied, and how, is the business of their drivers.
//! - [`protocol`]: what the seeder asks and the leecher answers.
//!
//! What must not live here: QEMU and libvirt (`hypervisor`), sending images (`teleport`), remote devices (`mount`), the
//! record of a machine (`store`), and anything about a command line.

pub mod leecher;
pub mod protocol;
pub mod seeder;

#[cfg(test)]
mod simulation;
