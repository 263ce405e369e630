//! Making a snapshot.
//!
//! A thread reads and digests windows of 8 MiB; the caller's thread finds duplicates and writes the recipe; others
//! compress new blocks and write containers. In what order objects are written, and why a crash or a concurrent
//! deletion cannot leave a snapshot without its blocks, is in `docs/format/vault.md`.

use std::collections::HashMap;
use std::path::Path;

use crossbeam_channel::{Receiver, Sender, bounded};
use drover_core::{BLOCK_SIZE, Digest, is_zero};
use drover_image::{Conversion, Outgoing, Stamp, open_for_sending};
use drover_index::ZERO_BLOCK;
use jiff::Timestamp;

use crate::commit::{Ended, MAX_ATTEMPTS};
use crate::container::{ContainerId, LocalIds};
use crate::error::{Result, VaultError};
use crate::index::VaultIndex;
use crate::names::{Machine, SnapshotId, hooks_key};
use crate::recipe::{MAX_CONTAINERS, MAX_PAGES, PAGE_BLOCKS, RecipeWriter};
use crate::record::{HookRecord, Made};
use crate::sealer::{Filling, Job, MAX_SEALERS, MAX_WAITING_GROUPS, Sealing};
use crate::sparse::{List, WINDOW_BLOCKS, hooks_of};
use crate::uses::Uses;
use crate::vault::Vault;

/// Windows that may wait to be looked up.
const MAX_WAITING_WINDOWS: usize = 1;

/// How far a backup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackupProgress {
    /// Bytes of the walk that are done.
    pub done_bytes: u64,
    /// Bytes of the walk.
    pub total_bytes: u64,
    /// Bytes that no snapshot had before.
    pub new_bytes: u64,
    /// Bytes written to containers, compressed.
    pub stored_bytes: u64,
}

/// A snapshot that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backup {
    /// Which.
    pub id: SnapshotId,
    /// Its record.
    pub record: Made,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Memory of the index that grows with the vault, in bytes.
    pub index_bytes: u64,
}

/// 8 MiB of a walk.
struct Window {
    bytes: Vec<u8>,
    /// Of every block; those of zero blocks are [`ZERO_BLOCK`].
    digests: Vec<Digest>,
}

impl Vault {
    /// Makes a snapshot of the image file at `path`, which is not written to, as one of `machine`. `host` is recorded.
    ///
    /// # Errors
    /// Errors of the image, [`VaultError::Changed`], errors of the store. The vault is as before then, but for
    /// containers that nothing uses, which [`Vault::collect`] removes a day later.
    pub fn backup(
        &self,
        path: &Path,
        machine: &Machine,
        host: &str,
        progress: &mut dyn FnMut(BackupProgress),
    ) -> Result<Backup> {
        self.backup_at(path, machine, host, Timestamp::now().as_second(), progress)
    }

    /// As [`Vault::backup`], at a time in seconds since 1970.
    ///
    /// # Errors
    /// As [`Vault::backup`].
    pub fn backup_at(
        &self,
        path: &Path,
        machine: &Machine,
        host: &str,
        now: i64,
        progress: &mut dyn FnMut(BackupProgress),
    ) -> Result<Backup> {
        self.probe()?;
        let mut notes = Vec::new();
        let outgoing = match open_for_sending(path, Conversion::AsIs) {
            Err(error) if error.opaque_helps() => {
                notes.push(format!("{error}; stored in the order of the file"));
                open_for_sending(path, Conversion::Opaque)?
            }
            opened => opened?,
        };
        notes.extend(outgoing.notes.iter().cloned());
        if outgoing.layout.walk_blocks() > (MAX_PAGES * PAGE_BLOCKS) as u64 {
            return Err(VaultError::TooLarge(path.display().to_string()));
        }
        let latest = self
            .ids("snapshots", Some(machine))?
            .last()
            .map(|id| id.time);
        let time = match latest {
            Some(latest) if latest >= now => {
                if latest > now + 1 {
                    notes.push(format!(
                        "the clock of this host is behind the latest snapshot of {machine}; the snapshot is dated after it"
                    ));
                }
                latest + 1
            }
            _ => now,
        };
        let mut sessions = Vec::new();
        let mut outcome = Err(VaultError::Overtaken(MAX_ATTEMPTS));
        for _ in 0..MAX_ATTEMPTS {
            let session = self.claim()?;
            sessions.push(session);
            let id = SnapshotId {
                machine: machine.clone(),
                time,
                session,
            };
            let attempt = Attempt {
                vault: self,
                outgoing: &outgoing,
                path,
                host,
                id,
            };
            match attempt.run(progress) {
                Ok((record, index_bytes)) => {
                    outcome = Ok(Backup {
                        id: attempt.id,
                        record,
                        notes,
                        index_bytes,
                    });
                    break;
                }
                // What it stored is found again by the next attempt.
                Err(Ended::Overtaken) => self.retract(&attempt.id),
                Err(Ended::Failed(error)) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        for session in sessions {
            // A claim that stays is void after a day.
            let _ = self.release(session);
        }
        outcome
    }
}

struct Attempt<'a> {
    vault: &'a Vault,
    outgoing: &'a Outgoing,
    path: &'a Path,
    host: &'a str,
    id: SnapshotId,
}

/// What the walk yields.
struct Walked {
    recipe: RecipeWriter,
    uses: Uses,
    hooks: HookRecord,
    index: VaultIndex,
    data_bytes: u64,
    new_bytes: u64,
    stored_bytes: u64,
}

impl Attempt<'_> {
    fn run(&self, progress: &mut dyn FnMut(BackupProgress)) -> Result<(Made, u64), Ended> {
        let walked = self.walk(progress)?;
        for (path, stamp) in &self.outgoing.stamps {
            if Stamp::of_path(path).ok() != Some(*stamp) {
                return Err(VaultError::Changed(self.path.to_path_buf()).into());
            }
        }
        let vault = self.vault;
        let first_last_part = walked.recipe.parts();
        let (head, last) = walked.recipe.finish(&self.outgoing.layout);
        if let Some(part) = last {
            vault.put_own(&self.id.part(first_last_part), part)?;
        }
        vault.put_own(&self.id.recipe(), head.encode())?;
        if !walked.hooks.containers.is_empty() {
            vault.put_own(&hooks_key(self.id.session), walked.hooks.encode())?;
        }
        let record = Made {
            source: self.path.display().to_string(),
            host: self.host.to_owned(),
            format: self.outgoing.format.as_str().to_owned(),
            file_bytes: self.outgoing.layout.file_len(),
            disk_bytes: self.outgoing.virtual_size,
            data_bytes: walked.data_bytes,
            new_bytes: walked.new_bytes,
            stored_bytes: walked.stored_bytes,
            root: head.root(),
        };
        let written = head.parts + 1;
        let generations = walked.index.generations();
        vault.commit(&self.id, written, &walked.uses, &generations, &record)?;
        Ok((record, walked.index.bytes() as u64))
    }

    fn walk(&self, progress: &mut dyn FnMut(BackupProgress)) -> Result<Walked> {
        let index = VaultIndex::load(self.vault, &self.id.machine)?;
        let sealing = Sealing::new(&*self.vault.objects, &self.id.machine, self.id.session);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_SEALERS));
        std::thread::scope(|scope| {
            let (to_windows, windows) = bounded(MAX_WAITING_WINDOWS);
            let reader = scope.spawn(|| self.read(to_windows));
            let (jobs, to_do) = bounded::<Job>(MAX_WAITING_GROUPS);
            let sealers: Vec<_> = (0..threads)
                .map(|_| {
                    let (sealing, to_do) = (&sealing, to_do.clone());
                    scope.spawn(move || sealing.work(&to_do))
                })
                .collect();
            drop(to_do);
            let walked = self.look_up(&windows, index, &sealing, jobs, progress);
            // Whoever waits for this thread goes on.
            drop(windows);
            let read = reader.join().map_err(|_| VaultError::Worker)?;
            for sealer in sealers {
                sealer.join().map_err(|_| VaultError::Worker)?;
            }
            if let Some(error) = sealing.take_error() {
                return Err(error);
            }
            read?;
            let mut walked = walked?;
            walked.stored_bytes = sealing.stored();
            Ok(walked)
        })
    }

    /// Reads and digests the walk.
    fn read(&self, windows: Sender<Window>) -> Result<()> {
        let layout = &self.outgoing.layout;
        let total = layout.walk_blocks();
        let mut at = 0;
        while at < total {
            let blocks = (total - at).min(WINDOW_BLOCKS as u64) as usize;
            let mut bytes = vec![0; blocks * BLOCK_SIZE];
            layout
                .read(&*self.outgoing.content, at * BLOCK_SIZE as u64, &mut bytes)
                .map_err(|source| VaultError::File {
                    doing: "read",
                    path: self.path.to_path_buf(),
                    source,
                })?;
            let mut digests = Vec::with_capacity(blocks);
            let mut from = 0;
            while from < blocks {
                let zero = is_zero(block(&bytes, from));
                let to = (from + 1..blocks)
                    .find(|&i| is_zero(block(&bytes, i)) != zero)
                    .unwrap_or(blocks);
                match zero {
                    true => digests.resize(to, *ZERO_BLOCK),
                    false => {
                        let data = &bytes[from * BLOCK_SIZE..to * BLOCK_SIZE];
                        self.vault.digester.blocks(data, &mut digests);
                    }
                }
                from = to;
            }
            if windows.send(Window { bytes, digests }).is_err() {
                return Ok(());
            }
            at += blocks as u64;
        }
        Ok(())
    }

    /// Finds duplicates, hands new blocks to the threads that compress, writes the recipe.
    fn look_up(
        &self,
        windows: &Receiver<Window>,
        mut index: VaultIndex,
        sealing: &Sealing<'_>,
        jobs: Sender<Job>,
        progress: &mut dyn FnMut(BackupProgress),
    ) -> Result<Walked> {
        let (machine, session) = (&self.id.machine, self.id.session);
        let mut recipe = RecipeWriter::default();
        let mut uses = Uses::default();
        let mut hooks = HookRecord::default();
        let mut counter = 0u32;
        let mut filling = Filling::new(sealing, jobs, ContainerId::new(session, counter));
        let mut open: HashMap<Digest, u16> = HashMap::new();
        let mut now = BackupProgress {
            total_bytes: self.outgoing.layout.walk_blocks() * BLOCK_SIZE as u64,
            ..BackupProgress::default()
        };
        let mut data_blocks = 0u64;
        let mut seal =
            |filling: &mut Filling<'_>, open: &mut HashMap<Digest, u16>, index: &mut VaultIndex| {
                counter += 1;
                let (id, digests) = filling.seal(ContainerId::new(session, counter))?;
                open.clear();
                if !digests.is_empty() {
                    let tags = hooks_of(&digests).collect();
                    hooks.containers.push((id, tags));
                    let present = LocalIds::first(digests.len());
                    index.add_own(id, machine, List::new(id, digests, &present));
                }
                Ok::<_, VaultError>(())
            };
        for window in windows {
            if sealing.failed() {
                return Err(VaultError::Worker);
            }
            sealing.claim()?;
            let data: Vec<Digest> = window
                .digests
                .iter()
                .copied()
                .filter(|d| d != &*ZERO_BLOCK)
                .collect();
            index.prepare(self.vault, &data)?;
            data_blocks += data.len() as u64;
            let mut before = None;
            for (i, digest) in window.digests.iter().enumerate() {
                if digest == &*ZERO_BLOCK {
                    let number = recipe.parts();
                    let part = recipe.zero();
                    self.put_part(number, part)?;
                    continue;
                }
                before = index.find(self.vault, digest, before)?;
                let (owner, id, local) = match (before, open.get(digest)) {
                    (Some(found), _) => {
                        let (owner, id) = index.place(found.ordinal);
                        (owner, id, found.local)
                    }
                    (None, Some(&local)) => (machine, filling.id(), local),
                    (None, None) => {
                        let local = filling.push(*digest, block(&window.bytes, i))?;
                        now.new_bytes += BLOCK_SIZE as u64;
                        open.insert(*digest, local);
                        (machine, filling.id(), local)
                    }
                };
                uses.insert(owner, id, local);
                let number = recipe.parts();
                let part = recipe.data(*digest, owner, id, local);
                self.put_part(number, part)?;
                if filling.is_full() {
                    seal(&mut filling, &mut open, &mut index)?;
                }
            }
            if recipe.containers() > MAX_CONTAINERS {
                return Err(VaultError::TooLarge(self.path.display().to_string()));
            }
            now.done_bytes += window.bytes.len() as u64;
            now.stored_bytes = sealing.stored();
            progress(now);
        }
        seal(&mut filling, &mut open, &mut index)?;
        Ok(Walked {
            recipe,
            uses,
            hooks,
            index,
            data_bytes: data_blocks * BLOCK_SIZE as u64,
            new_bytes: now.new_bytes,
            stored_bytes: 0,
        })
    }

    fn put_part(&self, number: u32, part: Option<Vec<u8>>) -> Result<()> {
        match part {
            Some(part) => self.vault.put_own(&self.id.part(number), part),
            None => Ok(()),
        }
    }
}

fn block(bytes: &[u8], i: usize) -> &[u8] {
    &bytes[i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE]
}
