//! How much of a site's disks its peers may take.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::{Code, PeerKey, Refusal};
use drover_store::{Catalog, CatalogError, Grant, ImageRecord, SiteCatalog, changes};
use drover_teleport::Unfinished;
use parking_lot::Mutex;
use rustix::fs::statvfs;

use crate::error::{Result, failed};
use crate::home::Home;
use crate::site;
use crate::text::bytes;

/// How long what a peer has taken is known before it is counted again.
const FRESH: Duration = Duration::from_secs(5);

/// The same when it has taken all: what it frees is noticed soon, and a peer at its quota does not have everything counted
/// at each of its writes.
const FRESH_AT_QUOTA: Duration = Duration::from_secs(1);

/// Bytes that changes under way may still take, in all domains: they may be on one disk.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// The quotas of peers in one domain of a site.
pub struct Quotas {
    home: Home,
    images: Arc<SiteCatalog>,
    peers: Arc<SiteCatalog>,
    /// Locked while a peer's bytes are counted, so that no other change of it is allowed meanwhile.
    accounts: Mutex<HashMap<PeerKey, Arc<Mutex<Account>>>>,
}

/// What is known of a peer.
#[derive(Default)]
struct Account {
    counted: Option<Instant>,
    /// Its quota, and what is left of it; `None` without one.
    quota: Option<(u64, u64)>,
    /// Bytes that its changes under way may still take.
    under_way: u64,
}

impl Account {
    fn has(&self, more: u64) -> bool {
        self.quota.is_none_or(|(_, left)| left >= more)
    }

    fn is_fresh(&self, more: u64) -> bool {
        let for_how_long = match self.has(more) {
            true => FRESH,
            false => FRESH_AT_QUOTA,
        };
        self.counted.is_some_and(|at| at.elapsed() < for_how_long)
    }

    /// Fails unless so much is left.
    fn check(&self, more: u64) -> Result<(), Refusal> {
        match self.quota {
            Some((quota, left)) if left < more => Err(Refusal::new(
                Code::NoSpace,
                format!(
                    "your site may take {} there, and has {} left: {} more are needed",
                    bytes(quota),
                    bytes(left),
                    bytes(more)
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// Space for a change of a peer, until it is made.
struct UnderWay {
    /// None of what is no image, and counts for no quota.
    account: Option<Arc<Mutex<Account>>>,
    bytes: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(self.bytes, Ordering::AcqRel);
        if let Some(account) = &self.account {
            account.lock().under_way -= self.bytes;
        }
    }
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
            accounts: Mutex::default(),
        })
    }

    /// Lets a mount of a peer take more bytes, or refuses. What is returned is kept until they are on the disk. Blocks on the
    /// disk from time to time.
    ///
    /// # Errors
    /// [`Code::NoSpace`] when its quota is used up, or the site keeps free what is left.
    pub fn take(&self, peer: &PeerKey, more: u64) -> Result<impl Send + use<>, Refusal> {
        let account = self.account(peer);
        let mut known = account.lock();
        if !known.is_fresh(more) {
            self.count(peer, None, &mut known).map_err(failed)?;
        }
        known.check(more)?;
        self.keep_free(self.home.dir(), more)?;
        if let Some((_, left)) = &mut known.quota {
            *left -= more;
        }
        known.under_way += more;
        drop(known);
        Ok(UnderWay {
            account: Some(account),
            bytes: more,
        })
    }

    /// Lets something that counts for no quota take more bytes of the disk of a directory, or refuses. What is returned is
    /// kept until they are on the disk.
    ///
    /// # Errors
    /// [`Code::NoSpace`] when the site keeps free what is left there.
    pub fn take_in(&self, dir: &Path, more: u64) -> Result<impl Send + use<>, Refusal> {
        self.keep_free(dir, more)?;
        Ok(UnderWay {
            account: None,
            bytes: more,
        })
    }

    /// Fails unless a peer may have an image of this name and size, instead of one that it has or is sending. Blocks on the
    /// disk.
    ///
    /// # Errors
    /// [`Code::NoSpace`] when it has not so much left.
    pub fn check(&self, peer: &PeerKey, name: &ImageName, size: u64) -> Result<(), Refusal> {
        let account = self.account(peer);
        let mut known = account.lock();
        self.count(peer, Some(name), &mut known).map_err(failed)?;
        // It was counted without that image.
        known.counted = None;
        known.check(size)
    }

    fn account(&self, peer: &PeerKey) -> Arc<Mutex<Account>> {
        Arc::clone(self.accounts.lock().entry(*peer).or_default())
    }

    /// Counts what a peer has taken, without the image `instead`.
    fn count(
        &self,
        key: &PeerKey,
        instead: Option<&ImageName>,
        account: &mut Account,
    ) -> Result<()> {
        account.counted = Some(Instant::now());
        let peer = self.peers.peer_by_key(key)?;
        account.quota = match peer.and_then(|peer| peer.grant.quota_bytes) {
            None => None,
            Some(quota) => {
                let taken = self.taken(key, instead)?.saturating_add(account.under_way);
                Some((quota, quota.saturating_sub(taken)))
            }
        };
        Ok(())
    }

    /// The name of a peer, or the beginning of a key that is none.
    pub fn name_of(&self, key: &PeerKey) -> String {
        let peer = self.peers.peer_by_key(key).ok().flatten();
        peer.map_or_else(|| key.short(), |peer| peer.name)
    }

    /// What a peer may do now; none of one that is not known.
    ///
    /// # Errors
    /// The catalog's.
    pub fn peer_now(&self, key: &PeerKey) -> Result<Option<Grant>, CatalogError> {
        Ok(self.peers.peer_by_key(key)?.map(|peer| peer.grant))
    }

    /// The bytes that a peer has taken, without the image `instead`.
    fn taken(&self, key: &PeerKey, instead: Option<&ImageName>) -> Result<u64> {
        let mut images = self.images.images()?;
        let mut transfers = drover_teleport::unfinished(&self.home.work_dir())?;
        if let Some(instead) = instead {
            images.retain(|image| image.name != *instead);
            transfers.retain(|transfer| transfer.name != instead.as_str());
        }
        let taken = taken(&self.home, &images, &transfers)?;
        Ok(taken.get(key).copied().unwrap_or_default())
    }

    /// Takes more bytes of the disk of a directory, unless that would not leave free what the site keeps free.
    fn keep_free(&self, dir: &Path, more: u64) -> Result<(), Refusal> {
        // Read first: what is made meanwhile counts twice rather than not at all.
        let before = UNDER_WAY.load(Ordering::Acquire);
        let free = statvfs(dir).map_or(u64::MAX, |fs| {
            let keep = site::reserve_bytes(&self.home);
            let free = fs.f_bavail.saturating_mul(fs.f_frsize);
            free.saturating_sub(keep)
        });
        let fits = |now: u64| {
            let taken = now.max(before).checked_add(more)?;
            (taken <= free).then(|| now + more)
        };
        match UNDER_WAY.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits) {
            Ok(_) => Ok(()),
            Err(_) => Err(Refusal::new(
                Code::NoSpace,
                format!(
                    "the site has {} left beside what it keeps free: {} more are needed",
                    bytes(free),
                    bytes(more)
                ),
            )),
        }
    }
}

/// What each peer has taken in the domain of this home, in bytes: images that it owns, unfinished transfers, and what its
/// mounts have written. A transfer counts as what it may become, for its sender and for the owner of the image that it will
/// replace.
///
/// # Errors
/// When the changes by mounts cannot be listed.
pub fn taken(
    home: &Home,
    images: &[ImageRecord],
    transfers: &[Unfinished],
) -> Result<HashMap<PeerKey, u64>> {
    let owned = images.iter().filter_map(|i| Some((i, i.owner?)));
    let owners: HashMap<_, _> = owned.map(|(i, owner)| (i.name.as_str(), owner)).collect();
    let images = images.iter().filter_map(|image| {
        // Small pieces of data take whole blocks.
        let owner = image.owner?;
        let room = fs::metadata(&image.path).map_or(0, |about| about.blocks() * 512);
        Some((Some(owner), image.data_bytes.max(room)))
    });
    let transfers = transfers.iter().flat_map(|t| {
        let owner = owners.get(&*t.name).copied();
        let owner = owner.filter(|owner| *owner != t.sender);
        let bytes = t.room_bytes.max(t.total_bytes);
        [(Some(t.sender), bytes), (owner, bytes)]
    });
    let written = changes::rooms(&home.mounted_dir())?.into_iter();
    let written = written.map(|(writer, room)| (writer.map(|by| PeerKey(by.peer)), room));
    let mut taken: HashMap<_, u64> = HashMap::new();
    for (peer, bytes) in images.chain(transfers).chain(written) {
        if let Some(peer) = peer {
            let sum = taken.entry(peer).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use drover_core::Digest;
    use drover_net::Rights;
    use drover_store::{Grant, Peer};
    use drover_teleport::TransferState;

    use super::*;

    const KEYS: [PeerKey; 2] = [PeerKey([1; 32]), PeerKey([2; 32])];

    /// A home with two peers, of which the first has this quota.
    fn with_peers(quota: u64) -> (tempfile::TempDir, Home, Quotas) {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("config.toml"), "reserve = \"4KiB\"\n").unwrap();
        let home = Home::create(tmp.path().into()).unwrap();
        let catalog = Arc::new(site::open_catalog(&home).unwrap());
        for (n, quota_bytes) in [(0, Some(quota)), (1, None)] {
            let peer = Peer {
                name: format!("p{n}"),
                key: KEYS[n],
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
        (tmp, home, quotas)
    }

    fn refused<T>(result: Result<T, Refusal>) -> Refusal {
        let refusal = result.err().expect("it was allowed");
        assert_eq!(refusal.code, Code::NoSpace, "{refusal}");
        refusal
    }

    #[test]
    fn a_peer_takes_what_it_may_and_no_more() {
        let (_tmp, _home, quotas) = with_peers(1000);
        let [key, other] = &KEYS;
        let first = quotas.take(key, 600).unwrap();
        let second = quotas.take(key, 400).unwrap();
        // None of it is on the disk yet.
        let refusal = refused(quotas.take(key, 1));
        assert!(refusal.message.contains("has 0 B left"), "{refusal}");
        let name = ImageName::new("a.img").unwrap();
        refused(quotas.check(key, &name, 1));
        drop(first);
        // Counted anew for an image, and for a write after that.
        quotas.check(key, &name, 600).unwrap();
        refused(quotas.check(key, &name, 601));
        drop(quotas.take(key, 600).unwrap());
        drop(second);
        quotas.check(other, &name, u64::MAX).unwrap();
        drop(quotas.take(other, 1 << 20).unwrap());
    }

    /// A backup into the site's vault, which may be on another disk.
    #[test]
    fn what_is_no_image_counts_for_no_quota_but_for_its_disk() {
        let (_tmp, home, quotas) = with_peers(1000);
        let first = quotas.take(&KEYS[0], 1000).unwrap();
        let more = quotas.take_in(home.dir(), 5000).unwrap();
        // Nothing is free there, whatever is on the disk of the home.
        refused(quotas.take_in(Path::new("/proc"), 1));
        refused(quotas.take_in(home.dir(), u64::MAX));
        drop((more, first));
    }

    #[test]
    fn a_refusal_is_not_counted_anew_at_each_write() {
        let (_tmp, _home, quotas) = with_peers(1000);
        refused(quotas.take(&KEYS[0], 1001));
        let counted = || quotas.account(&KEYS[0]).lock().counted;
        let first = counted();
        refused(quotas.take(&KEYS[0], 1001));
        assert_eq!(counted(), first);
        let since = |ago| quotas.account(&KEYS[0]).lock().counted = Instant::now().checked_sub(ago);
        since(FRESH_AT_QUOTA);
        refused(quotas.take(&KEYS[0], 1001));
        assert!(counted() > first);
    }

    #[test]
    fn what_is_kept_free_is_not_promised_twice() {
        let (_tmp, home, quotas) = with_peers(u64::MAX);
        let fs = statvfs(home.dir()).unwrap();
        let free = fs.f_bavail * fs.f_frsize;
        refused(quotas.take(&KEYS[1], u64::MAX));
        // Other processes use the disk, too.
        let most = quotas.take(&KEYS[0], free / 4 * 3).unwrap();
        refused(quotas.take(&KEYS[1], free / 2));
        drop(most);
        drop(quotas.take(&KEYS[1], free / 2).unwrap());
    }

    #[test]
    fn images_and_transfers_count_as_what_they_take_or_may_become() {
        let (tmp, home, quotas) = with_peers(0);
        let [key, other] = KEYS;
        let path = tmp.path().join("a.img");
        fs::write(&path, vec![1; 100_000]).unwrap();
        let image = ImageRecord {
            id: quotas.images.new_image_id().unwrap(),
            name: ImageName::new("a.img").unwrap(),
            path,
            format: "raw".into(),
            size_bytes: 1 << 30,
            // A byte here and there.
            data_bytes: 25,
            virtual_bytes: 1 << 30,
            digest: Digest([1; 32]),
            stamp: None,
            added_unix: 0,
            from: "p0".into(),
            external: false,
            owner: Some(key),
            shared: Vec::new(),
        };
        let transfer = |name: &str, sender, total_bytes| Unfinished {
            key: name.into(),
            name: name.into(),
            peer: String::new(),
            sender,
            state: TransferState::Stopped,
            done_bytes: 0,
            total_bytes,
            room_bytes: 4096,
            touched_unix: 0,
        };
        let taken = |transfers: &[Unfinished]| {
            let taken = taken(&home, std::slice::from_ref(&image), transfers).unwrap();
            KEYS.map(|key| taken.get(&key).copied().unwrap_or(0))
        };
        let [alone, none] = taken(&[]);
        assert!(alone >= 100_000 && none == 0, "{alone} {none}");
        let own = transfer("b.img", key, 1 << 20);
        assert_eq!(taken(std::slice::from_ref(&own)), [alone + (1 << 20), 0]);
        // The image stays its owner's.
        let instead = transfer("a.img", other, 1 << 20);
        let more = alone + (2 << 20);
        assert_eq!(taken(&[own, instead]), [more, 1 << 20]);
    }
}
