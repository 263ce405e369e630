//! Making a snapshot.
//!
//! A thread reads and digests windows of 8 MiB; the caller's thread finds duplicates and writes the recipe; others
//! compress new blocks and write containers. In what order objects are written, and why a crash or a concurrent
//! deletion cannot leave a snapshot without its blocks, is in `docs/format/vault.md`.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crossbeam_channel::{Receiver, Sender, bounded};
use drover_core::{BLOCK_SIZE, Digest, is_zero};
use drover_image::Stamp;
use drover_index::ZERO_BLOCK;
use jiff::Timestamp;

use crate::commit::{Ended, MAX_ATTEMPTS};
use crate::compare::Compared;
use crate::container::{ContainerId, LocalIds};
use crate::error::{Result, VaultError};
use crate::index::VaultIndex;
use crate::names::{Machine, SnapshotId, hooks_key};
use crate::recipe::{MAX_CONTAINERS, MAX_PAGES, PAGE_BLOCKS, Placed, RecipeWriter, SEGMENT_BLOCKS};
use crate::record::{HookRecord, Made, SnapshotRecord};
use crate::sealer::{Filling, Job, MAX_SEALERS, MAX_WAITING_GROUPS, Sealing};
use crate::snapshot::Snapshot;
use crate::source::{Source, Unchanged};
use crate::sparse::{List, WINDOW_BLOCKS, hooks_of};
use crate::uses::Uses;
use crate::vault::Vault;

/// Blocks that are read and then digested, while they are in the processor's cache: 512 KiB.
const PIECE_BLOCKS: usize = 128;
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
    /// Bytes of the source that were read; the others are as in an earlier snapshot.
    pub read_bytes: u64,
}

/// 8 MiB of a walk.
struct Window {
    /// The number of its first segment.
    first: u64,
    bytes: Vec<u8>,
    /// Of every block; those of zero blocks are [`ZERO_BLOCK`].
    digests: Vec<Digest>,
}

/// A part of a walk.
enum Part {
    /// What was read.
    Window(Window),
    /// These segments are the parent's.
    Same(Range<u64>),
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
        let source = Source::file(path)?;
        let (now, note) = self.time_for(std::slice::from_ref(machine), now)?;
        let mut made = self.backup_source(&source, machine, host, now, progress)?;
        made.notes.extend(note);
        Ok(made)
    }

    /// When a snapshot of these machines is dated that is made now: a set has one time for all, and is after every earlier one. And a
    /// note, if a clock was set back.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn time_for(&self, machines: &[Machine], now: i64) -> Result<(i64, Option<String>)> {
        let mut latest: Option<SnapshotId> = None;
        for machine in machines {
            let of_it = self.ids("snapshots", Some(machine))?.pop_last();
            if of_it.as_ref().map(|id| id.time) > latest.as_ref().map(|id| id.time) {
                latest = of_it;
            }
        }
        Ok(match latest {
            Some(latest) if latest.time >= now => {
                let note = (latest.time > now + 1).then(|| {
                    format!(
                        "the clock of this host is behind the latest snapshot of {}; the snapshot is dated after it",
                        latest.machine
                    )
                });
                (latest.time + 1, note)
            }
            _ => (now, None),
        })
    }

    /// As [`Vault::backup_at`], of any source. If `time` is not after the latest snapshot of the machine, the new one is dated after that.
    ///
    /// # Errors
    /// As [`Vault::backup`].
    pub fn backup_source(
        &self,
        source: &Source,
        machine: &Machine,
        host: &str,
        time: i64,
        progress: &mut dyn FnMut(BackupProgress),
    ) -> Result<Backup> {
        self.probe()?;
        let mut notes = source.image.notes.clone();
        if source.image.layout.walk_blocks() > (MAX_PAGES * PAGE_BLOCKS) as u64 {
            return Err(VaultError::TooLarge(source.from.clone()));
        }
        self.check_owner(machine)?;
        let (time, _) = self.time_for(std::slice::from_ref(machine), time)?;
        notes.extend(self.other_host(machine, host)?);
        let mut sessions = Vec::new();
        let mut outcome = Err(VaultError::Overtaken(MAX_ATTEMPTS));
        let mut use_parent = true;
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
                source,
                use_parent,
                host,
                id,
            };
            match attempt.run(progress) {
                Ok(done) => {
                    outcome = Ok(Backup {
                        id: attempt.id,
                        record: done.record,
                        notes,
                        index_bytes: done.index_bytes,
                        read_bytes: done.read_bytes,
                    });
                    break;
                }
                // What it stored is found again by the next attempt. What the parent uses may go, or have gone: all is read.
                Err(Ended::Overtaken) => {
                    use_parent = false;
                    self.retract(&attempt.id);
                }
                // Perhaps the parent is damaged, or has gone: all is read, and looked up.
                Err(Ended::Failed(error)) if use_parent && error.is_damage() => {
                    tracing::info!("again, without an earlier snapshot: {error}");
                    use_parent = false;
                    self.retract(&attempt.id);
                    outcome = Err(error);
                }
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

    /// A note, if the latest snapshot of a machine was made on another host: there may be two of that name.
    fn other_host(&self, machine: &Machine, host: &str) -> Result<Option<String>> {
        let Some(latest) = self.live_ids(Some(machine))?.pop() else {
            return Ok(None);
        };
        Ok(match self.record_of(&latest) {
            Ok(Some(SnapshotRecord::Made(made))) if made.host != host => Some(format!(
                "the latest snapshot of {machine} was made on another host, {}, of {}: if that is another machine, give each a name of its own with --as",
                made.host, made.source
            )),
            Err(error) if !error.is_damage() => return Err(error),
            _ => None,
        })
    }
}

struct Attempt<'a> {
    vault: &'a Vault,
    source: &'a Source,
    /// Whether what is the same is taken from the parent.
    use_parent: bool,
    host: &'a str,
    id: SnapshotId,
}

/// A snapshot that was committed.
struct Done {
    record: Made,
    index_bytes: u64,
    read_bytes: u64,
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
    read_bytes: u64,
}

impl Attempt<'_> {
    fn run(&self, progress: &mut dyn FnMut(BackupProgress)) -> Result<Done, Ended> {
        let walked = self.walk(progress)?;
        for (path, stamp) in &self.source.image.stamps {
            if Stamp::of_path(path).ok() != Some(*stamp) {
                return Err(VaultError::Changed(self.source.path()).into());
            }
        }
        let vault = self.vault;
        // Since the first container is there, no peer gets it any more.
        vault.check_owner(&self.id.machine)?;
        let first_last_part = walked.recipe.parts();
        let (head, last) = walked.recipe.finish(&self.source.image.layout);
        if let Some(part) = last {
            vault.put_own(&self.id.part(first_last_part), part)?;
        }
        vault.put_own(&self.id.recipe(), head.encode())?;
        if !walked.hooks.containers.is_empty() {
            vault.put_own(&hooks_key(self.id.session), walked.hooks.encode())?;
        }
        let record = Made {
            source: self.source.from.clone(),
            host: self.host.to_owned(),
            format: self.source.image.format.as_str().to_owned(),
            file_bytes: self.source.image.layout.file_len(),
            disk_bytes: self.source.image.virtual_size,
            data_bytes: walked.data_bytes,
            new_bytes: walked.new_bytes,
            stored_bytes: walked.stored_bytes,
            root: head.root(),
        };
        let written = head.parts + 1;
        let generations = walked.index.generations();
        vault.commit(&self.id, written, &walked.uses, &generations, &record)?;
        Ok(Done {
            record,
            index_bytes: walked.index.bytes() as u64,
            read_bytes: walked.read_bytes,
        })
    }

    fn walk(&self, progress: &mut dyn FnMut(BackupProgress)) -> Result<Walked> {
        let index = VaultIndex::load(self.vault, &self.id.machine, self.id.session)?;
        let unchanged = match self.use_parent {
            true => Unchanged::of(self.source, self.vault)?,
            false => Unchanged::default(),
        };
        let latest = match (self.use_parent, unchanged.parent()) {
            (true, None) => self.vault.latest(&self.id.machine)?,
            _ => None,
        };
        let parent = unchanged.parent().or(latest.as_ref());
        let sealing = Sealing::new(&*self.vault.objects, &self.id.machine, self.id.session);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_SEALERS));
        std::thread::scope(|scope| {
            let (to_windows, windows) = bounded(MAX_WAITING_WINDOWS);
            let (spares, to_reuse) = bounded(MAX_WAITING_WINDOWS + 1);
            let reader = scope.spawn(|| self.read(to_windows, to_reuse, &unchanged));
            let (jobs, to_do) = bounded::<Job>(MAX_WAITING_GROUPS);
            let sealers: Vec<_> = (0..threads)
                .map(|_| {
                    let (sealing, to_do) = (&sealing, to_do.clone());
                    scope.spawn(move || sealing.work(&to_do))
                })
                .collect();
            drop(to_do);
            let walked = self.look_up(
                (&windows, &spares),
                index,
                parent,
                (&sealing, jobs),
                progress,
            );
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

    /// Reads and digests the walk, into buffers that were used before if there are any.
    fn read(
        &self,
        windows: Sender<Part>,
        spares: Receiver<Vec<u8>>,
        unchanged: &Unchanged,
    ) -> Result<()> {
        const SEGMENT: u64 = SEGMENT_BLOCKS as u64;
        let layout = &self.source.image.layout;
        let total = layout.walk_blocks();
        let mut at = 0;
        while at < total {
            if let Some(same) = unchanged.from(at / SEGMENT) {
                at = total.min(same.end * SEGMENT);
                if windows.send(Part::Same(same)).is_err() {
                    return Ok(());
                }
                continue;
            }
            let until = unchanged.next(at / SEGMENT).map_or(total, |n| n * SEGMENT);
            let blocks = (total.min(until) - at).min(WINDOW_BLOCKS as u64) as usize;
            let mut bytes = spares.try_recv().unwrap_or_default();
            bytes.resize(blocks * BLOCK_SIZE, 0);
            let mut digests = Vec::with_capacity(blocks);
            for from in (0..blocks).step_by(PIECE_BLOCKS) {
                let to = blocks.min(from + PIECE_BLOCKS);
                let piece = &mut bytes[from * BLOCK_SIZE..to * BLOCK_SIZE];
                let offset = (at + from as u64) * BLOCK_SIZE as u64;
                layout
                    .read(&*self.source.image.content, offset, piece)
                    .map_err(|source| VaultError::File {
                        doing: "read",
                        path: self.source.path(),
                        source,
                    })?;
                self.digest(piece, &mut digests);
            }
            let window = Window {
                first: at / SEGMENT,
                bytes,
                digests,
            };
            if windows.send(Part::Window(window)).is_err() {
                return Ok(());
            }
            at += blocks as u64;
        }
        Ok(())
    }

    /// Appends the digests of blocks; many that are not zero are digested together.
    fn digest(&self, bytes: &[u8], digests: &mut Vec<Digest>) {
        let blocks = bytes.len() / BLOCK_SIZE;
        let mut from = 0;
        while from < blocks {
            let zero = is_zero(block(bytes, from));
            let to = (from + 1..blocks)
                .find(|&i| is_zero(block(bytes, i)) != zero)
                .unwrap_or(blocks);
            match zero {
                true => digests.resize(digests.len() + to - from, *ZERO_BLOCK),
                false => {
                    let data = &bytes[from * BLOCK_SIZE..to * BLOCK_SIZE];
                    self.vault.digester.blocks(data, digests);
                }
            }
            from = to;
        }
    }

    /// Finds duplicates, hands new blocks to the threads that compress, writes the recipe.
    fn look_up(
        &self,
        (windows, spares): (&Receiver<Part>, &Sender<Vec<u8>>),
        mut index: VaultIndex,
        parent: Option<&Snapshot>,
        (sealing, jobs): (&Sealing<'_>, Sender<Job>),
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
            total_bytes: self.source.image.layout.walk_blocks() * BLOCK_SIZE as u64,
            ..BackupProgress::default()
        };
        let (mut data_blocks, mut read_bytes) = (0u64, 0u64);
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
        for part in windows {
            if sealing.failed() {
                return Err(VaultError::Worker);
            }
            sealing.claim()?;
            let window = match (part, parent) {
                (Part::Window(window), _) => window,
                (Part::Same(segments), Some(parent)) => {
                    for segment in segments {
                        let same = parent.runs(segment)?;
                        let taken = self.take_over(same, &mut recipe, &mut uses)?;
                        data_blocks += taken.data_blocks;
                        now.done_bytes += taken.blocks * BLOCK_SIZE as u64;
                    }
                    if recipe.containers() > MAX_CONTAINERS {
                        return Err(VaultError::TooLarge(self.source.from.clone()));
                    }
                    progress(now);
                    continue;
                }
                (Part::Same(_), None) => continue,
            };
            let compared = match parent {
                Some(parent) => Compared::with(parent, window.first, &window.digests, &index)?,
                None => Compared::default(),
            };
            let mut same = compared.same;
            same.resize_with(window.digests.len().div_ceil(SEGMENT_BLOCKS), || None);
            let segments = window.digests.chunks(SEGMENT_BLOCKS).zip(&same);
            let others = segments.filter(|(_, same)| same.is_none());
            let data: Vec<Digest> = others
                .flat_map(|(digests, _)| digests.iter().copied().filter(|d| d != &*ZERO_BLOCK))
                .collect();
            index.prepare(self.vault, &data, &compared.likely)?;
            data_blocks += data.len() as u64;
            let mut before = None;
            for (i, digest) in window.digests.iter().enumerate() {
                let in_segment = i % SEGMENT_BLOCKS;
                match &mut same[i / SEGMENT_BLOCKS] {
                    Some(same) if in_segment == 0 => {
                        let same = (same.0, std::mem::take(&mut same.1));
                        let taken = self.take_over(same, &mut recipe, &mut uses)?;
                        data_blocks += taken.data_blocks;
                        before = None;
                        continue;
                    }
                    Some(_) => continue,
                    None => {}
                }
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
                return Err(VaultError::TooLarge(self.source.from.clone()));
            }
            now.done_bytes += window.bytes.len() as u64;
            read_bytes += window.bytes.len() as u64;
            now.stored_bytes = sealing.stored();
            progress(now);
            let _ = spares.try_send(window.bytes);
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
            read_bytes,
        })
    }

    /// A segment as the parent has it.
    fn take_over(
        &self,
        (digest, runs): (Digest, Vec<Placed<'_>>),
        recipe: &mut RecipeWriter,
        uses: &mut Uses,
    ) -> Result<Taken> {
        let mut taken = Taken::default();
        for run in &runs {
            taken.blocks += u64::from(run.blocks);
            if let Some((machine, id, local)) = run.place {
                taken.data_blocks += u64::from(run.blocks);
                uses.insert_run(machine, id, local, run.blocks);
            }
        }
        let number = recipe.parts();
        let part = recipe.segment(digest, &runs);
        self.put_part(number, part)?;
        Ok(taken)
    }

    fn put_part(&self, number: u32, part: Option<Vec<u8>>) -> Result<()> {
        match part {
            Some(part) => self.vault.put_own(&self.id.part(number), part),
            None => Ok(()),
        }
    }
}

/// What was taken over of a parent.
#[derive(Default)]
struct Taken {
    blocks: u64,
    data_blocks: u64,
}

fn block(bytes: &[u8], i: usize) -> &[u8] {
    &bytes[i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE]
}
