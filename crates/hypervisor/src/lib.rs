//! Hypervisors: QEMU by QMP, and libvirt.
//!
//! [`qmp`] is a client of the protocol, [`Machine`] has what a migration needs of a QEMU as typed commands: its disks and
//! their dirty bitmaps, NBD exports, block nodes, the migration itself. [`Rounds`] offers what a running machine writes
//! to plain files, round by round. [`CommandLine`] is how one was started, and [`spec`] how one is built for a machine of another
//! site. [`libvirt`] has what a migration needs of a
//! machine that libvirt manages. Nothing here knows drover's protocols, and nothing
//! decides when a machine moves or who owns it: QEMU runs a machine on both sides if it is told to.
//!
//! Sockets of QEMU are trusted to do what they say they do, but what they say is parsed as hostile input. Errors are one
//! [`HypervisorError`].
//!
//! ```no_run
//! use drover_hypervisor::Machine;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let machine = Machine::connect("/run/web.qmp").await?;
//! println!("{}: {}", machine.version(), machine.status().await?);
//! for disk in machine.disks().await? {
//!     println!("{}: {:?}", disk.name, disk.medium);
//! }
//! machine.stop().await?;
//! machine.cont().await?;
//! # Ok(())
//! # }
//! ```
//!
//! The feature `testing` has a real QEMU with a small guest, for the tests of other crates.

mod command_line;
mod error;
mod guest_agent;
pub mod libvirt;
pub mod machine;
mod place;
pub mod qmp;
pub mod rounds;
pub mod spec;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod writers;

pub use command_line::CommandLine;
pub use error::{ErrorClass, HypervisorError};
pub use guest_agent::{Agent, GuestAgent};
pub use machine::Machine;
pub use place::{Hypervisor, Place};
pub use rounds::Rounds;
pub use writers::{Writer, writers_of};
