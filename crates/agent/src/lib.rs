//! A site's process and the processes of mounts: services put together, records, control, one typed status.
//!
//! - [`home`]: a site's directory and its configuration; [`site`], [`own`]: the site in it, opened.
//! - [`serve`]: the process that others connect to; [`remote`]: asking it, or a peer.
//! - [`mounts`]: records and processes of mounts; [`changes`]: what mounts wrote over this site's images.
//! - [`status`]: how a site is; [`metrics`]: that as Prometheus reads it, and every metric's name.
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
//! What must not live here: what a person types and sees (`drover`), protocols and formats (the crates below).

pub mod addresses;
pub mod changes;
pub mod error;
pub mod home;
pub mod images;
pub mod metrics;
pub mod mounts;
mod notice;
pub mod own;
pub mod pairing;
pub mod remote;
pub mod serve;
pub mod signals;
pub mod site;
pub mod status;
pub mod text;
pub mod transfers;
