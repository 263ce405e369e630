//! Disks in stores that a site serves to its peers, under names of their own among its images.
//!
//! The site holds the write lease in the store while it runs, and decides among its peers by its own leases, as for
//! images. Epochs of their mounts are committed in the store as a whole, so the site keeps nothing that could be lost; what
//! it knows of a disk is one small file (`record`, `docs/format/served-disk.md`).
//!
//! - `served`: one disk: opened, tried again while its store is away, looked at, given back.
//! - `told`: the device that mounts use, whose errors do not name the store.

mod record;
mod served;
mod told;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_store::{Catalog, SiteCatalog};
use drover_teleport::services::{GuestInfo, ImageInfo};
use tokio::sync::mpsc;

use crate::error::{Error, Result};
use crate::home::Home;
use crate::notice::notice;
use served::Tried;
pub use served::{DiskStatus, DiskToServe, ServedDisk, lost as refusal_of_lost};

/// Disks that a site serves at most: each has threads, and 64 MiB of what was written and not flushed.
pub const MAX_DISKS: usize = 32;

/// How long a site that starts waits for the stores of its disks.
const START_WAIT: Duration = Duration::from_secs(20);

/// The disks that a site serves.
#[derive(Default)]
pub struct Disks(BTreeMap<ImageName, Arc<ServedDisk>>);

/// Disks that can no longer be used, and why, as they are found.
pub type LostDisks = mpsc::Receiver<(ImageName, String)>;

impl Disks {
    /// Opens those of a home. One whose store does not answer, or that somebody else writes, is opened when that has ended.
    /// Blocks.
    ///
    /// # Errors
    /// One that is none, or that cannot be served by this site.
    pub fn begin(home: &Home, catalog: &SiteCatalog) -> Result<(Disks, LostDisks)> {
        let (lose, lost) = mpsc::channel(MAX_DISKS);
        let wanted = home.config.disks.iter();
        let wanted: Vec<_> = wanted
            .map(|(name, disk)| DiskToServe {
                name: name.clone(),
                store: disk.store.clone(),
                read_only: disk.read_only,
            })
            .collect();
        if wanted.len() > MAX_DISKS {
            return Err(Error::usage(format!(
                "a site serves at most {MAX_DISKS} disks in stores"
            )));
        }
        if !wanted.is_empty() && home.config.catalog.is_some() {
            return Err(Error::refused(
                "a site with a catalog on a server may have several nodes, which cannot serve disks in stores: leave --disk (in config.toml, [disks]) out, or use a site of its own for them",
            ));
        }
        let mut disks = BTreeMap::new();
        let (tell, told) = channel();
        for disk in wanted {
            if catalog.by_name(&disk.name)?.is_some() {
                return Err(Error::refused(format!(
                    "the site has an image called {}: serve the disk at {} under another name",
                    disk.name, disk.store
                )));
            }
            let name = disk.name.clone();
            let served = Arc::new(ServedDisk::new(home, disk));
            disks.insert(name.clone(), Arc::clone(&served));
            let (tell, lose) = (tell.clone(), lose.clone());
            std::thread::Builder::new()
                .name("served-disk".into())
                .spawn(move || {
                    served.serve(&|tried| drop(tell.send((name.clone(), tried))), &lose)
                })?;
        }
        let disks = Disks(disks);
        let until = Instant::now() + START_WAIT;
        let mut missing: Vec<ImageName> = disks.0.keys().cloned().collect();
        while !missing.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((name, tried)) = told.recv_timeout(left) else {
                break;
            };
            missing.retain(|other| *other != name);
            match tried {
                Tried::Open => {}
                Tried::Waits(why) => notice(&format!("{name} is not served yet: {why}")),
                Tried::Never(why) => {
                    disks.close();
                    return Err(Error::refused(format!("cannot serve {name}: {why}")));
                }
            }
        }
        for name in missing {
            notice(&format!(
                "{name} is not served yet: its store has not answered"
            ));
        }
        Ok((disks, lost))
    }

    /// The disk of that name.
    #[must_use]
    pub fn get(&self, name: &ImageName) -> Option<&Arc<ServedDisk>> {
        self.0.get(name)
    }

    /// Why no image can have this name, if a disk has it.
    #[must_use]
    pub fn why_held(&self, name: &ImageName) -> Option<String> {
        let is_one = self.0.contains_key(name);
        is_one.then(|| format!("{name} is a disk in a store, which the site serves"))
    }

    /// Those that are open, as images are listed.
    #[must_use]
    pub fn listed(&self) -> Vec<ImageInfo> {
        let about = |disk: &Arc<ServedDisk>| {
            let about = disk.about()?;
            Some(ImageInfo {
                name: disk.name().to_string(),
                digest: about.digest,
                size_bytes: about.size,
                data_bytes: about.stored,
                virtual_bytes: about.size,
                format: disk.kind().to_owned(),
                added_unix: about.since_unix,
                from: String::new(),
                guest: GuestInfo::default(),
            })
        };
        self.0.values().filter_map(about).collect()
    }

    /// All of them, for the site's own user.
    #[must_use]
    pub fn status(&self) -> Vec<DiskStatus> {
        self.0.values().map(|disk| disk.status()).collect()
    }

    /// Gives their leases back, as far as their stores answer soon. What mounts had staged and not committed is dropped: they
    /// send it again. Blocks.
    pub fn close(&self) {
        std::thread::scope(|scope| {
            for disk in self.0.values() {
                scope.spawn(|| disk.close());
            }
        });
    }
}
