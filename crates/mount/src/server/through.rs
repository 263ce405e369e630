//! A disk whose writes go to where it is itself, a store for example, and not to an overlay of the site: epochs of mounts
//! are staged and committed there.

use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, DeviceError};
use drover_device::local_remote::Committer;
use drover_device::remote::{Change, Epoch};
use drover_net::{Code, Refusal};
use parking_lot::Mutex;
use roaring::RoaringTreemap;

use super::pool::Pool;
use crate::protocol::refusal_of;

/// How a disk is written that takes its writes itself.
#[derive(Clone)]
pub struct WriteThrough {
    /// Takes the epochs of mounts, and writes to the same device.
    pub committer: Arc<dyn Committer>,
    /// Threads that read it, about; half as many write. Its requests may take long, and keep no other disk's waiting.
    pub threads: usize,
}

/// Such a disk while mounts have it open.
pub struct Through {
    committer: Arc<dyn Committer>,
    size: u64,
    pool: Arc<Pool>,
    staged: Mutex<Option<Staged>>,
}

/// What is staged: an epoch, and which blocks of the disk.
struct Staged {
    epoch: u64,
    blocks: RoaringTreemap,
}

impl Through {
    /// Opens it. What an earlier process or mount staged and did not commit is dropped.
    pub fn open(through: &WriteThrough, size: u64) -> Result<Self, Refusal> {
        through.committer.abandon().map_err(refusal_of)?;
        let pool = Pool::new(through.threads);
        let pool = pool.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
        Ok(Through {
            committer: Arc::clone(&through.committer),
            size,
            pool: Arc::new(pool),
            staged: Mutex::default(),
        })
    }

    /// The threads for its requests.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The last committed epoch.
    pub fn committed(&self) -> u64 {
        self.committer.committed().0
    }

    /// Stages part of an epoch that follows the committed one; one with a lower number than what is staged is refused, one
    /// with a higher replaces it.
    pub fn stage(&self, epoch: u64, changes: &[Change]) -> Result<(), Refusal> {
        let mut blocks = RoaringTreemap::new();
        for change in changes {
            let (offset, length) = (change.offset(), change.covers());
            let end = offset.saturating_add(length);
            let is_whole = |at: u64| at.is_multiple_of(BLOCK_SIZE_U64);
            if end > self.size || !is_whole(offset) || !(is_whole(end) || end == self.size) {
                let text =
                    format!("{length} bytes from {offset} on are not whole blocks of the disk");
                return Err(Refusal::new(Code::OutOfRange, text));
            }
            blocks.insert_range(offset / BLOCK_SIZE_U64..end.div_ceil(BLOCK_SIZE_U64));
        }
        let mut staged = self.staged.lock();
        match &*staged {
            Some(now) if now.epoch > epoch => {
                let text = format!("epoch {epoch} cannot follow epoch {}", now.epoch);
                return Err(Refusal::new(Code::OutOfOrder, text));
            }
            Some(now) if now.epoch == epoch => {}
            _ => {
                self.drop_staged(&mut staged)?;
                *staged = Some(Staged {
                    epoch,
                    blocks: RoaringTreemap::new(),
                });
            }
        }
        let pushed = self.committer.push(Epoch(epoch), changes);
        if let (Ok(()), Some(staged)) = (&pushed, &mut *staged) {
            staged.blocks |= blocks;
        }
        pushed.map_err(refusal_of)
    }

    /// The staged epoch (0: none), what is staged of `epoch` from a byte on, in at most `most` runs, and up to which byte that
    /// is complete.
    pub fn staged(&self, epoch: u64, from: u64, most: usize) -> (u64, Vec<(u64, u64)>, u64) {
        let staged = self.staged.lock();
        let now = staged.as_ref().map_or(0, |staged| staged.epoch);
        let Some(staged) = staged.as_ref().filter(|staged| staged.epoch == epoch) else {
            return (now, Vec::new(), self.size);
        };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut blocks = staged.blocks.iter();
        blocks.advance_to(from.min(self.size) / BLOCK_SIZE_U64);
        for block in blocks {
            let offset = block * BLOCK_SIZE_U64;
            let length = BLOCK_SIZE_U64.min(self.size - offset);
            let is_full = runs.len() >= most;
            match runs.last_mut() {
                Some(last) if last.0 + last.1 == offset => last.1 += length,
                Some(_) if is_full => return (now, runs, offset),
                _ => runs.push((offset, length)),
            }
        }
        (now, runs, self.size)
    }

    /// Commits an epoch that covers this many bytes, as a whole and as durably as the store does that.
    pub fn commit(&self, epoch: u64, covers: u64) -> Result<(), Refusal> {
        let mut staged = self.staged.lock();
        let has = match &*staged {
            Some(now) if now.epoch == epoch => now.covers(self.size),
            _ => 0,
        };
        if has != covers {
            let text = format!("{has} bytes of epoch {epoch} are staged, not {covers}");
            return Err(Refusal::new(Code::OutOfOrder, text));
        }
        match self.committer.commit(Epoch(epoch), covers) {
            Ok(()) => {
                *staged = None;
                Ok(())
            }
            // What it stood in is lost: all of it is sent again.
            Err(error @ DeviceError::Corrupt(_)) => {
                self.drop_staged(&mut staged)?;
                Err(refusal_of(error))
            }
            Err(error) => Err(refusal_of(error)),
        }
    }

    /// Drops what is staged.
    pub fn abandon(&self) -> Result<(), Refusal> {
        self.drop_staged(&mut self.staged.lock())
    }

    fn drop_staged(&self, staged: &mut Option<Staged>) -> Result<(), Refusal> {
        if staged.is_some() {
            self.committer.abandon().map_err(refusal_of)?;
            *staged = None;
        }
        Ok(())
    }
}

impl Drop for Through {
    fn drop(&mut self) {
        // Its threads may wait for the store, as long as that does not answer: nobody waits for them.
        let pool = Arc::clone(&self.pool);
        let ending = std::thread::Builder::new().name("mount-end".into());
        let _ = ending.spawn(move || drop(pool));
    }
}

impl Staged {
    /// Bytes of the disk, whose last block may be short.
    fn covers(&self, size: u64) -> u64 {
        let whole = self.blocks.len() * BLOCK_SIZE_U64;
        let rest = size % BLOCK_SIZE_U64;
        match rest > 0 && self.blocks.contains(size / BLOCK_SIZE_U64) {
            true => whole - BLOCK_SIZE_U64 + rest,
            false => whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use drover_core::BlockDevice;
    use drover_device::backend::StoreDevice;
    use drover_device::backend::chunk_store::{
        ChunkStore, Epochs, MemoryStore, NewStore, StoreOptions, break_lease, create,
    };

    use super::*;

    /// 64 blocks and a short one.
    const SIZE: u64 = 64 * 4096 + 512;

    fn device(store: &Arc<MemoryStore>) -> Arc<StoreDevice> {
        let options = StoreOptions::new([1; 16], "a site");
        Arc::new(StoreDevice::open(store.clone(), &options).unwrap())
    }

    fn through(device: &Arc<StoreDevice>) -> Through {
        let committer = Arc::new(Epochs::new(Arc::clone(device)));
        let threads = 2;
        Through::open(&WriteThrough { committer, threads }, device.size()).unwrap()
    }

    fn new_store() -> Arc<MemoryStore> {
        let store = Arc::new(MemoryStore::new());
        let (size, chunk, object) = (SIZE, 4096, Some(16384));
        create(
            &*store,
            NewStore {
                size,
                chunk,
                object,
            },
        )
        .unwrap();
        store
    }

    fn content(device: &StoreDevice) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        device.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Epochs of two writers that take turns, with restarts of the site: each is there as a whole, or not at all.
    #[test]
    fn epochs_are_there_whole_or_not_at_all() {
        for seed in 0..40 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let store = new_store();
            let mut disk = device(&store);
            let mut site = through(&disk);
            let mut model = vec![0; SIZE as usize];
            for round in 0..30 {
                let epoch = site.committed() + rng.u64(1..4);
                let mut parts = BTreeMap::new();
                let mut next = model.clone();
                for _ in 0..rng.usize(1..5) {
                    let first = rng.u64(0..65);
                    let end = (rng.u64(first + 1..=65) * 4096).min(SIZE);
                    let offset = first * 4096;
                    let bytes = vec![rng.u8(..); (end - offset) as usize];
                    next[offset as usize..end as usize].copy_from_slice(&bytes);
                    let change = Change::Write(offset, bytes.into());
                    site.stage(epoch, &[change]).unwrap();
                    parts.extend((offset / 4096..end.div_ceil(4096)).map(|block| (block, ())));
                }
                let length = |block: &u64| 4096.min(SIZE - block * 4096);
                let covers = parts.keys().map(length).sum::<u64>();
                let mut seen = 0;
                let mut from = 0;
                while from < SIZE {
                    let (now, runs, end) = site.staged(epoch, from, 2);
                    assert_eq!(now, epoch, "seed {seed}");
                    seen += runs.iter().map(|run| run.1).sum::<u64>();
                    from = end;
                }
                assert_eq!(seen, covers, "seed {seed}, round {round}");
                let wrong = site.commit(epoch, covers + 512).unwrap_err();
                assert_eq!(wrong.code, Code::OutOfOrder);
                match rng.u8(0..4) {
                    0 => site.abandon().unwrap(),
                    1 => {
                        drop(site);
                        drop(disk);
                        disk = device(&store);
                        site = through(&disk);
                    }
                    _ => {
                        site.commit(epoch, covers).unwrap();
                        assert_eq!(site.committed(), epoch);
                        model = next;
                    }
                }
                if rng.bool() {
                    // Nothing that was dropped comes back with what a mount writes directly.
                    site.abandon().unwrap();
                    disk.write(100, &[round; 10]).unwrap();
                    disk.flush().unwrap();
                    model[100..110].fill(round);
                    assert!(content(&disk) == model, "seed {seed}, round {round}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_part_of_the_disk_or_of_an_epoch_is_refused() {
        let store = new_store();
        let disk = device(&store);
        let site = through(&disk);
        let write = |epoch, offset, length| {
            site.stage(epoch, &[Change::Write(offset, vec![1; length].into())])
        };
        assert!(write(9, 1, 4096).is_err());
        assert!(write(9, 0, 100).is_err());
        assert!(write(9, SIZE - 512, 513).is_err());
        assert!(write(9, u64::MAX - 4095, 4096).is_err());
        assert_eq!(site.staged(9, 0, 10).0, 0);
        write(9, SIZE - 512, 512).unwrap();
        for from in [0, SIZE - 512, u64::MAX] {
            assert_eq!(site.staged(9, from, 10), (9, vec![(SIZE - 512, 512)], SIZE));
        }
        assert_eq!(write(8, 0, 4096).unwrap_err().code, Code::OutOfOrder);
        write(10, 0, 4096).unwrap();
        assert_eq!(site.staged(9, 0, 10), (10, vec![], SIZE));
        assert!(site.commit(9, 512).is_err(), "it was replaced");
        // The site has lost its lease.
        break_lease(&*store as &dyn ChunkStore).unwrap().unwrap();
        let lost = site.commit(10, 4096).unwrap_err();
        assert!(lost.message.contains("lease was broken"), "{lost:?}");
        assert!(write(10, 0, 4096).is_err());
    }
}
