//! A transfer at the destination: its directory with the log and the partial file, recovery after a crash, and
//! renaming the finished file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::{Digest, ImageName, put_varint};
use drover_image::Layout;
use drover_index::{ImageId, Plan};
use drover_net::PeerKey;
use drover_storage::{Disk, SyncedFile, create_private, make_private_dir, sync_parent};
use drover_store::{DataBits, layout_limits};
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::codec::{Batch, PROOF_BLOCKS, Reader, Runs, decode_plan, encode_plan, proofs_of};
use crate::files;
use crate::log::{Log, LogReader, RecordKind};
use crate::partials::Contents;
use crate::protocol::{Offer, WINDOW_BATCHES};

mod ahead;
mod profile;

use ahead::AheadLog;
pub use ahead::read_ahead;
pub(crate) use profile::{BOOTS, PROFILE};
pub use profile::{keep_boots, keep_profile, kept_boots, kept_profile};

/// Marker file: the last sync of a stopped transfer succeeded. Never synced itself: it describes the page cache's
/// state of the other files, and vanishes with it in a machine crash.
const RESTED: &str = "rested";

/// The log's first record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// The sender's key.
    pub peer: PeerKey,
    /// This site's name for the sender.
    pub peer_name: String,
    /// The offer.
    pub offer: Offer,
    /// The image ID to be assigned.
    pub image: u64,
}

/// The log's last record: the file is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closing {
    /// Its digest.
    pub digest: Digest,
    /// When it was completed, in seconds since 1970.
    pub added_unix: i64,
}

/// Opens the partial file of the transfer in `dir` for reading.
///
/// # Errors
/// When it cannot be opened.
pub fn open_part(dir: &Path) -> Result<File, TeleportError> {
    let path = dir.join("image.part");
    File::open(&path).map_err(TeleportError::file("open", path))
}

/// Derives a transfer's key from the sender and the image's name. Whether it is still the same file is determined
/// from its contents.
#[must_use]
pub fn transfer_key(peer: &PeerKey, name: &ImageName) -> String {
    let mut h = blake3::Hasher::new_derive_key("drover 2026-11 transfer key");
    h.update(&peer.0);
    h.update(name.as_str().as_bytes());
    h.finalize().to_hex().as_str()[..32].to_owned()
}

/// A logged batch, and which of its blocks the partial file lacks.
pub struct Restored {
    /// The batch.
    pub batch: Arc<Batch>,
    /// Missing data blocks, by order among the batch's data blocks.
    pub missing: DataBits,
    /// Its plan; kept only while blocks are missing.
    pub plan: Option<Plan>,
    /// The digests of its data blocks as found in the partial file.
    pub full: Vec<Digest>,
}

/// An open transfer.
pub struct Transfer {
    /// Its directory.
    pub dir: PathBuf,
    /// Its log, open for appending.
    pub log: Log,
    /// The partial file, read and write.
    pub part: Arc<SyncedFile>,
    /// How the file is laid out for the walk.
    pub layout: Arc<Layout>,
    /// The offer and its sender.
    pub opening: Opening,
    /// Whether the partial file may hold blocks that the log does not mention: every batch must be compared with it.
    pub compare: bool,
    /// Offset of the first batch's record in the log.
    front: u64,
    /// Index of the next batch to append to the log.
    next: u64,
    /// Encoded records of later batches.
    held: BTreeMap<u64, Vec<u8>>,
    /// What came ahead of the batches.
    ahead: Option<AheadLog>,
}

impl Transfer {
    /// The partial file's path.
    #[must_use]
    pub fn part_path(&self) -> PathBuf {
        self.dir.join("image.part")
    }

    /// The image ID to be assigned.
    #[must_use]
    pub fn image(&self) -> ImageId {
        ImageId(self.opening.image)
    }

    /// Starts a transfer in `dir`, which must not exist. Durable on return.
    ///
    /// # Errors
    /// When the files cannot be created.
    pub fn create(
        dir: &Path,
        opening: Opening,
        layout: Arc<Layout>,
        encoded_layout: &[u8],
        disk: &Arc<dyn Disk>,
    ) -> Result<Self, TeleportError> {
        make_private_dir(dir).map_err(TeleportError::file("create", dir))?;
        let part_path = dir.join("image.part");
        let part = create_private(&part_path).map_err(TeleportError::file("create", &part_path))?;
        part.set_len(opening.offer.file_bytes)
            .map_err(TeleportError::file("size", &part_path))?;
        let log = new_log(&dir.join("log"), &opening, encoded_layout, disk)?;
        sync_parent(&part_path).map_err(TeleportError::file("sync", dir))?;
        sync_parent(dir).map_err(TeleportError::file("sync", dir))?;
        let part = Arc::new(SyncedFile::new(part, disk.clone()));
        Ok(Transfer::begun(dir, log, part, layout, opening))
    }

    /// A transfer whose log has nothing but the opening.
    fn begun(
        dir: &Path,
        log: Log,
        part: Arc<SyncedFile>,
        layout: Arc<Layout>,
        opening: Opening,
    ) -> Self {
        Transfer {
            dir: dir.into(),
            front: log.bytes(),
            log,
            part,
            layout,
            opening,
            compare: false,
            next: 0,
            held: BTreeMap::new(),
            ahead: None,
        }
    }

    /// Replaces a transfer with a new one that continues its partial file: every batch is compared with its contents.
    /// Durable on return; a crash leaves either the old or the new one.
    ///
    /// # Errors
    /// When there is no partial file, or the files cannot be written.
    pub fn replace(
        dir: &Path,
        opening: Opening,
        layout: Arc<Layout>,
        encoded_layout: &[u8],
        disk: &Arc<dyn Disk>,
    ) -> Result<Self, TeleportError> {
        let part_path = dir.join("image.part");
        let part = File::options()
            .read(true)
            .write(true)
            .open(&part_path)
            .map_err(TeleportError::file("open", &part_path))?;
        let mut log = new_log(&dir.join("log.new"), &opening, encoded_layout, disk)?;
        log.rename(&dir.join("log"))?;
        sync_parent(&part_path).map_err(TeleportError::file("sync", dir))?;
        // It is of the earlier image.
        ahead::forget(dir);
        part.set_len(opening.offer.file_bytes)
            .map_err(TeleportError::file("size", &part_path))?;
        files::clear(&part, files::uncovered(&layout))
            .map_err(TeleportError::file("write", &part_path))?;
        let part = Arc::new(SyncedFile::new(part, disk.clone()));
        Ok(Transfer {
            compare: true,
            ..Transfer::begun(dir, log, part, layout, opening)
        })
    }

    /// Resumes a transfer of `layout` in `dir`, if its log has the same layout, encoded. Every logged batch is digested
    /// again in the partial file and passed to `restored`; the log is truncated after the last batch that was accepted.
    /// `None` when nothing is usable.
    ///
    /// # Errors
    /// When the files cannot be read, or `restored` returns an error.
    pub fn resume(
        dir: &Path,
        offer: &Offer,
        layout: &Arc<Layout>,
        encoded_layout: &[u8],
        disk: &Arc<dyn Disk>,
        mut restored: impl FnMut(&Opening, Restored) -> Result<(), TeleportError>,
    ) -> Result<Option<Self>, TeleportError> {
        let log_path = dir.join("log");
        let part_path = dir.join("image.part");
        if std::fs::remove_file(dir.join(RESTED)).is_err() {
            read_from_disk(disk, &log_path)?;
            read_from_disk(disk, &part_path)?;
        }
        let Some(mut reader) = open_if_there(&log_path)? else {
            return Ok(None);
        };
        let Some(opening) = read_opening(&mut reader) else {
            return Ok(None);
        };
        let same = Offer {
            slot: offer.slot,
            ..opening.offer.clone()
        };
        // Another layout is not decoded: it may take more memory than that of the offer.
        if same != *offer || !reader.pass(RecordKind::Layout, encoded_layout) {
            return Ok(None);
        }
        let Ok(part) = File::options().read(true).write(true).open(&part_path) else {
            return Ok(None);
        };
        part.set_len(offer.file_bytes)
            .map_err(TeleportError::file("size", &part_path))?;
        files::clear(&part, files::uncovered(layout))
            .map_err(TeleportError::file("write", &part_path))?;
        let front = reader.valid_bytes();
        let mut keep = front;
        let mut incomplete = 0;
        let mut next = 0;
        for record in reader.by_ref() {
            if record.kind != RecordKind::Batch {
                break;
            }
            let Some((batch, plan)) = decode_batch_record(&record.payload) else {
                break;
            };
            if batch.index != next {
                break;
            }
            clear_zeros(&part, layout, &batch).map_err(TeleportError::file("write", &part_path))?;
            let (missing, full) = missing_blocks(&part, layout, &batch)
                .map_err(TeleportError::file("read", &part_path))?;
            let plan = (missing.count() > 0).then_some(plan);
            incomplete += u64::from(plan.is_some());
            if incomplete > WINDOW_BATCHES {
                break;
            }
            restored(
                &opening,
                Restored {
                    batch: Arc::new(batch),
                    missing,
                    plan,
                    full,
                },
            )?;
            keep = record.end;
            next += 1;
        }
        let log = Log::reopen(&log_path, keep, disk)?;
        Ok(Some(Transfer {
            dir: dir.into(),
            log,
            part: Arc::new(SyncedFile::new(part, disk.clone())),
            layout: layout.clone(),
            opening,
            compare: true,
            front,
            next,
            held: BTreeMap::new(),
            ahead: None,
        }))
    }

    /// Syncs the received data for a later resume.
    ///
    /// # Errors
    /// When data was lost: a resume must not trust the page cache.
    pub fn rest(&self) -> Result<(), TeleportError> {
        self.part
            .sync_data()
            .map_err(TeleportError::file("sync", self.part_path()))?;
        self.log.sync()?;
        if let Some(ahead) = &self.ahead {
            ahead.sync()?;
        }
        self.mark_rested()
    }

    /// Records that the page cache holds no data of the transfer that the disk is known to have lost.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn mark_rested(&self) -> Result<(), TeleportError> {
        let mark = self.dir.join(RESTED);
        create_private(&mark).map_err(TeleportError::file("create", &mark))?;
        Ok(())
    }

    /// Marks the logged batches as no longer describing the image: a resume compares the partial file with what is
    /// offered then.
    ///
    /// # Errors
    /// When the log cannot be truncated.
    pub fn distrust(&mut self) -> Result<(), TeleportError> {
        self.held.clear();
        self.next = 0;
        self.ahead = None;
        ahead::forget(&self.dir);
        self.log.cut(self.front)
    }

    /// Notes blocks that came ahead of their batches, with their digests.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn log_ahead(&mut self, blocks: &[(u64, Digest)]) -> Result<(), TeleportError> {
        if blocks.is_empty() {
            return Ok(());
        }
        let log = match &mut self.ahead {
            Some(log) => log,
            none => none.insert(AheadLog::open(&self.dir, self.part.disk())?),
        };
        log.note(blocks)
    }

    /// Logs a batch with its plan, before it is acted on. Batches are logged in walk order: one that is early (zeros
    /// need no plan) waits for those before it. A source runs at most [`WINDOW_BATCHES`] ahead, which bounds their
    /// number.
    ///
    /// # Errors
    /// When the log cannot be written.
    pub fn log_batch(&mut self, batch: &Batch, plan: &Plan) -> Result<(), TeleportError> {
        let encoded = batch.encode();
        let mut out = Vec::with_capacity(encoded.len() + 64);
        put_varint(&mut out, encoded.len() as u64);
        out.extend_from_slice(&encoded);
        out.extend(encode_plan(plan));
        self.held.insert(batch.index, out);
        while let Some(record) = self.held.remove(&self.next) {
            self.log.append(RecordKind::Batch, &record)?;
            self.next += 1;
        }
        Ok(())
    }
}

/// Drops the file from the page cache, which may show data that the disk has lost.
fn read_from_disk(disk: &Arc<dyn Disk>, path: &Path) -> Result<(), TeleportError> {
    let failed = |e| TeleportError::file("read", path)(e);
    match File::options().read(true).write(true).open(path) {
        Ok(file) => disk.forget(&file).map_err(failed),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(failed(e)),
    }
}

/// Creates a log with its front, durable except for its name.
fn new_log(
    path: &Path,
    opening: &Opening,
    encoded_layout: &[u8],
    disk: &Arc<dyn Disk>,
) -> Result<Log, TeleportError> {
    let mut log = Log::create(path, disk)?;
    log.append(RecordKind::Opening, &drover_net::encode(opening))?;
    log.append(RecordKind::Layout, encoded_layout)?;
    log.sync()?;
    Ok(log)
}

/// The opening of the transfer in `dir`; `None` when there is none or its log is damaged.
pub fn opening_of(dir: &Path) -> Option<Opening> {
    read_opening(&mut open_if_there(&dir.join("log")).ok()??)
}

/// Zeroes a batch's zero blocks in the partial file, whatever it held before.
pub fn clear_zeros(part: &File, layout: &Layout, batch: &Batch) -> std::io::Result<()> {
    let zeros = (0..batch.data.blocks()).filter(|i| !batch.data.get(*i));
    let runs: Runs = zeros.map(|i| batch.first_block() + i).collect();
    let runs = runs.to_vec();
    let spans = files::spans_of(layout, &runs);
    files::clear(
        part,
        spans.into_iter().filter_map(|(at, len)| Some((at?, len))),
    )
}

fn open_if_there(path: &Path) -> Result<Option<LogReader>, TeleportError> {
    if path.exists() {
        LogReader::open(path)
    } else {
        Ok(None)
    }
}

fn read_opening(reader: &mut LogReader) -> Option<Opening> {
    let opening = reader.next().filter(|r| r.kind == RecordKind::Opening)?;
    drover_net::decode(&opening.payload).ok()
}

/// The opening of the transfer in `dir`, and its layout; `None` when there is none or its log is damaged.
pub fn front_of(dir: &Path) -> Option<(Opening, Layout)> {
    read_front(&mut open_if_there(&dir.join("log")).ok()??)
}

/// Which blocks of the logged batches the partial file has, by digesting them: as when it is resumed, but nothing is written. Zeros
/// count as missing where the file has something else.
///
/// # Errors
/// When a file cannot be read.
pub fn read_logged(
    dir: &Path,
    part: &File,
    layout: &Layout,
    go_on: &dyn Fn() -> bool,
) -> Result<Contents, TeleportError> {
    let mut contents = Contents::default();
    let Some(mut reader) = open_if_there(&dir.join("log"))? else {
        return Ok(contents);
    };
    if read_opening(&mut reader).is_none() || reader.next().is_none() {
        return Ok(contents);
    }
    for record in reader.by_ref() {
        let batch = match record.kind {
            RecordKind::Batch => decode_batch_record(&record.payload),
            _ => None,
        };
        let Some((batch, _)) = batch.filter(|(b, _)| b.index == contents.blocks.batches()) else {
            break;
        };
        if !go_on() {
            break;
        }
        let read = |e| TeleportError::file("read", dir.join("image.part"))(e);
        let (lost, _) = missing_blocks(part, layout, &batch).map_err(read)?;
        let mut missing = DataBits::new(batch.data.blocks());
        for (i, place) in batch.data.iter().enumerate() {
            if lost.get(i as u64) {
                missing.set(place);
            }
        }
        let zeros = (0..batch.data.blocks()).filter(|i| !batch.data.get(*i));
        for place in zeros {
            let block = [(drover_core::BlockIndex(batch.first_block() + place), 1)];
            if files::has_data(part, &files::spans_of(layout, &block)).map_err(read)? {
                missing.set(place);
            }
        }
        contents.blocks.push(&batch.data);
        if missing.count() > 0 {
            contents.missing.insert(batch.index, missing);
        }
    }
    Ok(contents)
}

fn read_front(reader: &mut LogReader) -> Option<(Opening, Layout)> {
    let opening = read_opening(reader)?;
    let layout = reader.next().filter(|r| r.kind == RecordKind::Layout)?;
    let layout = Layout::decode(&layout.payload, layout_limits()).ok()?;
    Some((opening, layout))
}

fn decode_batch_record(bytes: &[u8]) -> Option<(Batch, Plan)> {
    let mut r = Reader::new(bytes, "batch record");
    let length = usize::try_from(r.varint().ok()?).ok()?;
    let batch = Batch::decode(r.take(length).ok()?).ok()?;
    let plan = decode_plan(r.rest(), batch.digests.len() as u64).ok()?;
    Some((batch, plan))
}

/// The data blocks of a batch (by order among them) whose contents in the file are wrong, and the digests of what it
/// contains.
fn missing_blocks(
    part: &File,
    layout: &Layout,
    batch: &Batch,
) -> std::io::Result<(DataBits, Vec<Digest>)> {
    let runs: Runs = batch.data.iter().map(|i| batch.first_block() + i).collect();
    let runs = runs.to_vec();
    let mut full = Vec::with_capacity(batch.digests.len());
    files::digest_in_place(part, layout, &runs, &mut full)?;
    let mut missing = DataBits::new(full.len() as u64);
    let groups = batch.proofs.iter().zip(proofs_of(&full));
    for (group, (claimed, found)) in groups.enumerate() {
        let start = group * PROOF_BLOCKS;
        let end = full.len().min(start + PROOF_BLOCKS);
        let wrong = (start..end).filter(|&i| full[i].short() != batch.digests[i]);
        wrong.for_each(|i| missing.set(i as u64));
        // All short digests match but the proof does not: none of them can be trusted.
        if *claimed != found && !(start..end).any(|i| missing.get(i as u64)) {
            (start..end).for_each(|i| missing.set(i as u64));
        }
    }
    Ok((missing, full))
}

/// Contents of a directory under `transfers/`, according to its log.
pub struct Leftover {
    /// The directory.
    pub dir: PathBuf,
    /// The offer.
    pub opening: Opening,
    /// How the file is laid out for the walk.
    pub layout: Arc<Layout>,
    /// Which blocks hold data, for the logged batches.
    pub data: Vec<DataBits>,
    /// Set when the file is complete; it may not have its final name yet.
    pub closing: Option<Closing>,
}

/// Inspects a transfer directory after a restart; `None` when its log is unusable.
///
/// # Errors
/// When the log cannot be read.
pub fn inspect(dir: &Path) -> Result<Option<Leftover>, TeleportError> {
    let Some(mut reader) = open_if_there(&dir.join("log"))? else {
        return Ok(None);
    };
    let Some((opening, layout)) = read_front(&mut reader) else {
        return Ok(None);
    };
    let mut left = Leftover {
        dir: dir.into(),
        opening,
        layout: Arc::new(layout),
        data: Vec::new(),
        closing: None,
    };
    for record in reader {
        match record.kind {
            RecordKind::Batch => {
                let Some((batch, _)) = decode_batch_record(&record.payload) else {
                    break;
                };
                if batch.index != left.data.len() as u64 {
                    break;
                }
                left.data.push(batch.data);
            }
            RecordKind::Closing => left.closing = drover_net::decode(&record.payload).ok(),
            _ => break,
        }
    }
    Ok(Some(left))
}

/// Removes the closing record from the log in `dir`: this makes it a stopped transfer with all blocks in place.
///
/// # Errors
/// When the log cannot be read or truncated.
pub fn reopen_closed(dir: &Path, disk: &Arc<dyn Disk>) -> Result<(), TeleportError> {
    let path = dir.join("log");
    let Some(reader) = open_if_there(&path)? else {
        return Ok(());
    };
    let before = reader.take_while(|r| r.kind != RecordKind::Closing);
    match before.last() {
        Some(last) => Log::reopen(&path, last.end, disk)?.sync(),
        None => Ok(()),
    }
}

/// Logs in `dir` that the file of that image is complete, durably; nothing if the log is of another image, or says so already.
///
/// # Errors
/// When the log cannot be read or written.
pub fn close(
    dir: &Path,
    image: u64,
    closing: &Closing,
    disk: &Arc<dyn Disk>,
) -> Result<(), TeleportError> {
    let path = dir.join("log");
    let Some(mut reader) = open_if_there(&path)? else {
        return Ok(());
    };
    if read_opening(&mut reader).is_none_or(|opening| opening.image != image)
        || reader.any(|record| record.kind == RecordKind::Closing)
    {
        return Ok(());
    }
    let mut log = Log::reopen(&path, reader.valid_bytes(), disk)?;
    log.append(RecordKind::Closing, &drover_net::encode(closing))?;
    log.sync()
}

/// Reads the batches of a transfer's log until `each` returns `false`.
///
/// # Errors
/// When the log cannot be read, or `each` returns an error.
pub fn each_batch(
    dir: &Path,
    mut each: impl FnMut(Batch) -> Result<bool, TeleportError>,
) -> Result<(), TeleportError> {
    let Some(mut reader) = open_if_there(&dir.join("log"))? else {
        return Ok(());
    };
    if read_front(&mut reader).is_none() {
        return Ok(());
    }
    for (next, record) in (0..).zip(reader) {
        let batch = (record.kind == RecordKind::Batch)
            .then(|| decode_batch_record(&record.payload))
            .flatten();
        match batch {
            Some((batch, _)) if batch.index == next => {
                if !each(batch)? {
                    return Ok(());
                }
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
