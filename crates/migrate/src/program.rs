//! Programs move: their memory regions and their devices, handed over at one instant.
//!
//! A program that keeps its state in [`Region`]s and devices can go on in another process, here or at another host. Its
//! [`Part`]s are copied while it runs ([`Seeder::track`]): all of them, then in rounds what was written meanwhile. Then it
//! is paused, and handed over ([`Seeder::finalize`]); what is still missing follows while it runs there, what it waits for
//! first. The [`Leecher`] is the other end. What is said is in [`protocol`], and who decides that it moved in
//! [`crate::seeder`] and [`crate::leecher`], as for machines: of two records, one at each end, at most one says that the
//! program may run.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use drover_core::ImageName;
//! # use drover_frontend::region::Region;
//! # use drover_migrate::{MigrateError, program::{LocalSite, Part, Program, Seeder, SeederOptions}};
//! # use drover_store::machine::Machines;
//! struct Counter;
//!
//! impl Program for Counter {
//!     fn pause(&self) -> std::io::Result<Vec<u8>> {
//!         // From here on nobody writes; what is returned goes along.
//!         Ok(Vec::new())
//!     }
//!     fn resume(&self) {}
//! }
//!
//! # async fn example(region: Arc<Region>) -> Result<(), MigrateError> {
//! let records = Machines::new("/var/lib/counter/here".into());
//! let to = Arc::new(LocalSite::new("/run/counter.sock"));
//! let options = SeederOptions::new(ImageName::new("counter").unwrap(), records, to);
//! let parts = vec![Part::region("memory", region)];
//! let mut seeder = Seeder::open(parts, options).await?;
//! seeder.track().await?;
//! let report = seeder.finalize(Arc::new(Counter)).await?;
//! println!("paused for {:?}", report.pause);
//! # Ok(())
//! # }
//! ```
//!
//! [`Region`]: drover_frontend::region::Region

pub(crate) mod behind;
mod leecher;
mod options;
pub(crate) mod parts;
pub mod protocol;
mod seeder;
mod site;
mod target;
pub(crate) mod transfer;

pub use leecher::{Host, Leecher, Stage};
pub use options::{Program, Progress, Report, SeederOptions};
pub use parts::{Changes, Part};
pub use seeder::{Seeder, Settled, settle};
pub use site::{LocalSite, RemoteSite, Site};
pub use target::Target;

#[cfg(test)]
mod tests;
