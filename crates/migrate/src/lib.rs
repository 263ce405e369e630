//! Live migration: a running machine, its disks and its memory, moves to another site.
//!
//! - [`seeder`] and [`leecher`]: the two ends as state machines without I/O and without a clock. They decide who may run
//!   the machine; what is copied, and how, is the business of their drivers.
//! - [`protocol`]: what the seeder asks and the leecher answers, and how disks and memory follow.
//! - [`program`] moves a program of one's own: its memory regions and its devices.
//! - [`track`] makes any device movable, and [`move_device`] moves it while programs use it; [`Hooks`] pause them.
//! - [`replica`] sends the disks of a machine again and again, as of one moment each.
//! - [`moment`] holds the disks of a machine, or a device, as of one moment, to be read here.
//! - [`migrate()`] moves a machine of a QEMU to another site; [`Conversations`], [`DiskWrites`], [`DiskFetches`] and
//!   [`MemoryStreams`] are
//!   the services of a [`Site`] that takes it.
//!
//! What must not live here: QEMU and libvirt (`hypervisor`), sending images (`teleport`), remote devices (`mount`), the
//! record of a machine (`store`), and anything about a command line.

mod destination;
mod disks;
mod error;
mod hold;
mod hooks;
pub mod leecher;
mod measure;
mod memory;
pub mod moment;
mod movable;
pub mod program;
pub mod protocol;
pub mod replica;
pub mod seeder;
mod source;
mod talk;

pub use destination::{
    AllMoves, Conversations, DiskFetches, DiskWrites, Happened, Kept, Measures, MemoryStreams,
    Moves, Pending, Served, Site, boot,
};
pub use error::MigrateError;
pub use hooks::{Commands, Hooks};
pub use movable::{Movable, track};
pub use source::moving::{estimate_device, move_device};
pub use source::{
    Broken, DiskGenerations, Expected, FollowedFile, Heir, LeftFile, Mounted, Mounts, MoveEvent,
    MoveOptions, MoveReport, NoAnswer, OnMove, Pause, PostCopy, Step, ask_once, break_move,
    estimate, give_up, left_files, left_mounts, migrate,
};

#[cfg(test)]
mod simulation;

/// The page for programmers, whose code is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/tasks/move-a-program.md")]
struct MoveAProgram;

#[cfg(fuzzing)]
pub mod fuzzing;
