//! The processes of a site: the serving process, mount daemons, and what commands do without a running site. Combines
//! the services of the lower crates and adds configuration, mount records, control sockets and status.
//!
//! - [`home`]: a site's directory and its configuration; [`site`], [`own`]: opening the site in it.
//! - [`serve`]: the process that others connect to; [`remote`]: requests to it, or to a peer.
//! - [`domains`]: the parts of a site that do not see each other.
//! - [`machines`]: machines that migrate to this site or from it.
//! - [`flocks`]: images that are sent together.
//! - [`mounts`]: records and processes of mounts; [`changes`]: data that mounts wrote over this site's images.
//! - [`disks`]: disks in stores that a site serves.
//! - [`profiles`]: what machines read first of this site's images.
//! - [`vaults`]: the vaults that a site knows.
//! - [`status`]: a site's status; [`metrics`]: the same for Prometheus, with every metric's name.
//!
//! ```
//! use drover_agent::home::Home;
//! use drover_agent::mounts::{self, ANSWER_LIMIT};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! let home = Home::create(directory.path().join("site"))?;
//! for mount in mounts::all(&home, ANSWER_LIMIT).await? {
//!     println!("{} at {}: {:?}", mount.name, mount.place, mount.state);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What must not live here: the command line and its output (`drover`), protocols and formats (the crates below).

pub mod addresses;
pub mod audit;
pub mod changes;
pub mod disks;
pub mod domains;
pub mod error;
pub mod flocks;
pub mod home;
pub mod images;
pub mod join;
pub mod machines;
pub mod metrics;
pub mod mounts;
pub mod node;
mod notice;
pub mod own;
pub mod pairing;
pub mod profiles;
pub mod qemu;
mod quota;
pub mod remote;
pub mod replicas;
mod rights;
pub mod serve;
pub mod signals;
pub mod site;
pub mod status;
pub mod text;
pub mod transfers;
pub mod vaults;
