//! How much of a site's disks its peers may take.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::{Code, PeerKey, Refusal};
use drover_store::{Catalog, ImageRecord, SiteCatalog, changes};
use drover_teleport::Unfinished;
use parking_lot::Mutex;
use rustix::fs::statvfs;

use crate::error::{Result, failed};
use crate::home::Home;
use crate::site;
use crate::text::bytes;

/// How long what a peer has taken is known before it is counted again.
const FRESH: Duration = Duration::from_secs(5);

/// The quotas of peers in one domain of a site.
pub struct Quotas {
    home: Home,
    images: Arc<SiteCatalog>,
    peers: Arc<SiteCatalog>,
    left: Mutex<HashMap<PeerKey, Left>>,
}

#[derive(Clone, Copy)]
struct Left {
    counted: Instant,
    /// Its quota, and what is left of it; `None` without one.
    bytes: Option<(u64, u64)>,
}

impl Quotas {
    /// The quotas in the domain of this home.
    ///
    /// # Errors
    /// When the site's catalog cannot be opened.
    pub fn new(home: &Home, images: &Arc<SiteCatalog>) -> Result<Quotas> {
        let peers = match home.of_site() {
            Some(site) => Arc::new(site::open_catalog(&site)?),
            None => Arc::clone(images),
        };
        Ok(Quotas {
            home: home.clone(),
            images: Arc::clone(images),
            peers,
            left: Mutex::default(),
        })
    }

    /// Lets a peer take more bytes, or refuses. What it replaces, an image of the name `instead`, does not count. Blocks
    /// on the disk from time to time.
    ///
    /// # Errors
    /// [`Code::NoSpace`] when its quota is used up.
    pub fn take(
        &self,
        peer: &PeerKey,
        instead: Option<&ImageName>,
        more: u64,
    ) -> Result<(), Refusal> {
        let known = self.left.lock().get(peer).copied();
        let known = known.filter(|left| instead.is_none() && left.counted.elapsed() < FRESH);
        let known = known.filter(|left| left.bytes.is_none_or(|(_, left)| left >= more));
        let now = match known {
            Some(known) => known,
            None => self.count(peer, instead).map_err(failed)?,
        };
        let bytes_left = match now.bytes {
            None => None,
            Some((quota, left)) if left >= more => Some((quota, left - more)),
            Some((quota, left)) => {
                return Err(Refusal::new(
                    Code::NoSpace,
                    format!(
                        "your site may take {} there, and has {} left: {} more are needed",
                        bytes(quota),
                        bytes(left),
                        bytes(more)
                    ),
                ));
            }
        };
        let left = Left {
            bytes: bytes_left,
            ..now
        };
        self.left.lock().insert(*peer, left);
        Ok(())
    }

    /// The name of a peer, or the beginning of a key that is none.
    pub fn name_of(&self, key: &PeerKey) -> String {
        let peer = self.peers.peer_by_key(key).ok().flatten();
        peer.map_or_else(|| key.short(), |peer| peer.name)
    }

    /// Counts what a peer has taken.
    fn count(&self, key: &PeerKey, instead: Option<&ImageName>) -> Result<Left> {
        let counted = Instant::now();
        let peer = self.peers.peer_by_key(key)?;
        let quota = peer.and_then(|peer| peer.grant.quota_bytes);
        let Some(quota) = quota else {
            return Ok(Left {
                counted,
                bytes: None,
            });
        };
        let mut images = self.images.images()?;
        images.retain(|image| Some(&image.name) != instead);
        let transfers = drover_teleport::unfinished(&self.home.work_dir())?;
        let taken = taken(&self.home, &images, &transfers)?;
        let taken = taken.get(key).copied().unwrap_or_default();
        Ok(Left {
            counted,
            bytes: Some((quota, quota.saturating_sub(taken))),
        })
    }

    /// Fails if so many more bytes would not leave free what the site keeps free.
    ///
    /// # Errors
    /// [`Code::NoSpace`].
    pub fn keep_free(&self, more: u64) -> Result<(), Refusal> {
        let Ok(fs) = statvfs(self.home.dir()) else {
            return Ok(());
        };
        let free = fs.f_bavail.saturating_mul(fs.f_frsize);
        let keep = site::reserve_bytes(&self.home);
        match free.saturating_sub(keep) >= more {
            true => Ok(()),
            false => Err(Refusal::new(
                Code::NoSpace,
                format!("the site has {} left, which it keeps free", bytes(free)),
            )),
        }
    }
}

/// What each peer has taken in the domain of this home, in bytes: images that it owns, unfinished transfers, and what its
/// mounts have written.
///
/// # Errors
/// When the changes by mounts cannot be listed.
pub fn taken(
    home: &Home,
    images: &[ImageRecord],
    transfers: &[Unfinished],
) -> Result<HashMap<PeerKey, u64>> {
    let images = images.iter().map(|image| (image.owner, image.data_bytes));
    let transfers = transfers.iter().map(|t| (Some(t.sender), t.room_bytes));
    let written = changes::rooms(&home.mounted_dir())?.into_iter();
    let written = written.map(|(writer, room)| (writer.map(|by| PeerKey(by.peer)), room));
    let mut taken = HashMap::new();
    for (peer, bytes) in images.chain(transfers).chain(written) {
        if let Some(peer) = peer {
            *taken.entry(peer).or_default() += bytes;
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use drover_net::Rights;
    use drover_store::{Grant, Peer};

    use super::*;

    #[test]
    fn a_peer_takes_what_it_may_and_no_more() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().into()).unwrap();
        let catalog = Arc::new(site::open_catalog(&home).unwrap());
        let key = |n| PeerKey([n; 32]);
        for (n, quota_bytes) in [(1, Some(1000)), (2, None)] {
            let peer = Peer {
                name: format!("p{n}"),
                key: key(n),
                addresses: Vec::new(),
                paired_unix: 0,
                grant: Grant {
                    quota_bytes,
                    ..Grant::of(Rights::DEFAULT)
                },
            };
            catalog.put_peer(&peer).unwrap();
        }
        let quotas = Quotas::new(&home, &catalog).unwrap();
        quotas.take(&key(1), None, 600).unwrap();
        quotas.take(&key(1), None, 400).unwrap();
        quotas.take(&key(2), None, u64::MAX).unwrap();
        // Nothing of it is on the disk: it is counted again before it is refused.
        quotas.take(&key(1), None, 1000).unwrap();
        let refusal = quotas.take(&key(1), None, 1001).unwrap_err();
        assert_eq!(refusal.code, Code::NoSpace, "{refusal}");
        quotas.keep_free(0).unwrap();
        let refusal = quotas.keep_free(u64::MAX).unwrap_err();
        assert_eq!(refusal.code, Code::NoSpace);
    }
}
