//! Compressing blocks and writing containers, beside the thread that finds duplicates.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use drover_core::Digest;
use parking_lot::Mutex;

use crate::container::{
    ContainerId, GROUP_BYTES, LocalIds, MAX_BLOCKS, Packed, SessionId, assemble,
};
use crate::error::{Result, VaultError};
use crate::names::{Machine, claim_key, container_key};
use crate::objects::{Objects, put_own};

/// Groups that may wait for a thread: 4 MiB.
pub(crate) const MAX_WAITING_GROUPS: usize = 32;
/// Most threads that compress.
pub(crate) const MAX_SEALERS: usize = 4;
/// A session says that it lives at least this often.
pub(crate) const CLAIM_EVERY: Duration = Duration::from_secs(3600);

/// A container whose groups are being compressed.
pub(crate) struct Assembly {
    id: ContainerId,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: Vec<Option<Packed>>,
    done: usize,
    digests: Option<Vec<Digest>>,
}

/// A group to be compressed.
pub(crate) struct Job {
    assembly: Arc<Assembly>,
    number: usize,
    blocks: Vec<u8>,
}

/// What the threads share.
pub(crate) struct Sealing<'a> {
    objects: &'a dyn Objects,
    machine: &'a Machine,
    session: SessionId,
    error: Mutex<Option<VaultError>>,
    stored: AtomicU64,
    claimed: Mutex<(Instant, u32)>,
}

impl<'a> Sealing<'a> {
    pub(crate) fn new(objects: &'a dyn Objects, machine: &'a Machine, session: SessionId) -> Self {
        Sealing {
            objects,
            machine,
            session,
            error: Mutex::new(None),
            stored: AtomicU64::new(0),
            claimed: Mutex::new((Instant::now(), 0)),
        }
    }

    /// Bytes written so far.
    pub(crate) fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// The first error.
    pub(crate) fn take_error(&self) -> Option<VaultError> {
        self.error.lock().take()
    }

    /// Says that the session lives, every hour.
    pub(crate) fn claim(&self) -> Result<()> {
        let mut claimed = self.claimed.lock();
        if claimed.0.elapsed() >= CLAIM_EVERY {
            *claimed = (Instant::now(), claimed.1 + 1);
            let key = claim_key(self.session, claimed.1);
            put_own(self.objects, &key, b"claim".to_vec())?;
        }
        Ok(())
    }

    pub(crate) fn failed(&self) -> bool {
        self.error.lock().is_some()
    }

    /// Compresses until no more jobs come. After an error they are only taken.
    pub(crate) fn work(&self, jobs: &Receiver<Job>) {
        for job in jobs {
            if self.failed() {
                continue;
            }
            let packed = Packed::new(&job.blocks);
            drop(job.blocks);
            let complete = {
                let mut state = job.assembly.state.lock();
                state.groups[job.number] = Some(packed);
                state.done += 1;
                state.take_complete()
            };
            if let Some((digests, groups)) = complete {
                self.put(job.assembly.id, &digests, &groups);
            }
        }
    }

    fn put(&self, id: ContainerId, digests: &[Digest], groups: &[Packed]) {
        if let Err(error) = self.try_put(id, digests, groups) {
            self.error.lock().get_or_insert(error);
        }
    }

    fn try_put(&self, id: ContainerId, digests: &[Digest], groups: &[Packed]) -> Result<()> {
        let bytes = assemble(id, 0, digests, &LocalIds::first(digests.len()), groups);
        let len = bytes.len() as u64;
        put_own(self.objects, &container_key(self.machine, id, 0), bytes)?;
        self.stored.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }
}

impl State {
    /// Everything, once, when it is all there.
    fn take_complete(&mut self) -> Option<(Vec<Digest>, Vec<Packed>)> {
        if self.done < self.groups.len() || self.groups.is_empty() {
            return None;
        }
        let digests = self.digests.take()?;
        let groups = std::mem::take(&mut self.groups);
        Some((digests, groups.into_iter().flatten().collect()))
    }
}

/// The container that new blocks go to.
pub(crate) struct Filling<'a> {
    sealing: &'a Sealing<'a>,
    jobs: Sender<Job>,
    assembly: Arc<Assembly>,
    digests: Vec<Digest>,
    blocks: Vec<u8>,
}

impl<'a> Filling<'a> {
    pub(crate) fn new(sealing: &'a Sealing<'a>, jobs: Sender<Job>, id: ContainerId) -> Self {
        Filling {
            sealing,
            jobs,
            assembly: Arc::new(Assembly {
                id,
                state: Mutex::new(State::default()),
            }),
            digests: Vec::new(),
            blocks: Vec::new(),
        }
    }

    pub(crate) fn id(&self) -> ContainerId {
        self.assembly.id
    }

    /// Adds a block; its local id.
    pub(crate) fn push(&mut self, digest: Digest, block: &[u8]) -> Result<u16> {
        let local = self.digests.len() as u16;
        self.digests.push(digest);
        self.blocks.extend_from_slice(block);
        // The last group of a full container goes when it is sealed.
        if self.blocks.len() == GROUP_BYTES && self.digests.len() < MAX_BLOCKS {
            self.send_group()?;
        }
        Ok(local)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.digests.len() == MAX_BLOCKS
    }

    fn send_group(&mut self) -> Result<()> {
        let number = {
            let mut state = self.assembly.state.lock();
            state.groups.push(None);
            state.groups.len() - 1
        };
        let job = Job {
            assembly: self.assembly.clone(),
            number,
            blocks: std::mem::take(&mut self.blocks),
        };
        self.jobs.send(job).map_err(|_| VaultError::Worker)
    }

    /// Ends the container, and begins the next one; the digests of the one that ended.
    pub(crate) fn seal(&mut self, next: ContainerId) -> Result<(ContainerId, Vec<Digest>)> {
        let digests = std::mem::take(&mut self.digests);
        let id = self.id();
        if !digests.is_empty() {
            // Before the last group is sent, so that whoever compresses it completes the container.
            let last = !self.blocks.is_empty();
            {
                let mut state = self.assembly.state.lock();
                state.digests = Some(digests.clone());
                if last {
                    // Not complete before the last group is in.
                    state.groups.push(None);
                }
            }
            if last {
                let number = self.assembly.state.lock().groups.len() - 1;
                let job = Job {
                    assembly: self.assembly.clone(),
                    number,
                    blocks: std::mem::take(&mut self.blocks),
                };
                self.jobs.send(job).map_err(|_| VaultError::Worker)?;
            } else if let Some((digests, groups)) = self.assembly.state.lock().take_complete() {
                self.sealing.put(id, &digests, &groups);
            }
            self.assembly = Arc::new(Assembly {
                id: next,
                state: Mutex::new(State::default()),
            });
        }
        Ok((id, digests))
    }
}
