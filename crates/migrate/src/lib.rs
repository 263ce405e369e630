//! Live migration: a running machine, its disks and its memory, moves to another site.
//!
//! - [`seeder`] and [`leecher`]: the two ends as state machines without I/O and without a clock. They decide who may run
//!   the machine; what is copied, and how, is the business of their drivers.
//! - [`protocol`]: what the seeder asks and the leecher answers, and how disks and memory follow.
//! - [`migrate()`] moves a machine of a QEMU to another site; [`Conversations`], [`DiskWrites`] and [`MemoryStreams`] are
//!   the services of a [`Site`] that takes it.
//!
//! What must not live here: QEMU and libvirt (`hypervisor`), sending images (`teleport`), remote devices (`mount`), the
//! record of a machine (`store`), and anything about a command line.

mod destination;
mod disks;
mod error;
pub mod leecher;
mod memory;
pub mod protocol;
pub mod seeder;
mod source;
mod talk;

pub use destination::{
    Conversations, DiskWrites, Happened, MemoryStreams, Moves, Pending, Served, Site,
};
pub use error::MigrateError;
pub use source::{
    MoveEvent, MoveOptions, MoveReport, OnMove, Pause, Step, estimate, give_up, migrate,
};

#[cfg(test)]
mod simulation;
