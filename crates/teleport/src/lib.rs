//! Sending disk images between sites: the three roles as state machines, and the sessions that
//! drive them.
//!
//! - [`protocol`]: what the roles say to each other, and its limits; [`services`]: what a site can be asked.
//! - [`Source`](source::Source), [`Destination`](destination::Destination) and
//!   [`Teleporter`](teleporter::Teleporter): protocol logic without I/O and without a clock.
//! - [`send`](session::send()) drives a source; [`Site`] is where images arrive and holds what the
//!   destinations of all its sessions share.
//!
//! What must not live here: sockets and TLS (`net`), the parsing of image formats (`image`), the
//! matcher's data structures (`index`), and anything about a command line.

pub mod codec;
pub mod compress;
pub mod destination;
mod error;
mod files;
mod frames;
#[cfg(fuzzing)]
pub mod fuzzing;
mod log;
pub mod matching;
mod partials;
pub mod progress;
pub mod protocol;
pub mod services;
pub mod session;
mod site;
pub mod source;
pub mod stages;
pub mod teleporter;
mod transfer;
pub mod transfers;
pub mod walk;

pub use error::TeleportError;
pub use matching::{RemoteTeleporter, open_teleporter};
pub use site::{Holder, Site, SiteConfig, SiteStatus, TransferStatus};
