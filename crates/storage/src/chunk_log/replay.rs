//! Reading a log back, after a crash or damage.

use std::io;
use std::sync::Arc;

use super::format::{
    ALIGN, FIXED_HEADER, FRAME_HEADER, FRAME_RECORDS, FrameHeader, MAGIC, MAX_HEADER, RECORD_BYTES,
    VERSION, has_crc, header_length, records, temporary, u32_at, u64_at,
};
use super::{ChunkLog, ChunkLogError, Record};
use crate::record_log::{RecordLog, Window};
use crate::{Access, Directory, remove_if_exists};

/// Bytes of a log kept in memory while reading; more than a frame.
const WINDOW: usize = Window::BYTES;

/// A log whose header was read.
pub struct Opened {
    directory: Arc<dyn Directory>,
    name: String,
    frames: Frames,
    header: Vec<u8>,
    snapshot: u64,
}

impl ChunkLog {
    /// Opens an existing log and reads its header; continue with [`Opened::replay`].
    ///
    /// # Errors
    /// [`ChunkLogError::Io`] (see [`ChunkLogError::is_missing`]); [`ChunkLogError::NotALog`],
    /// [`ChunkLogError::Version`], [`ChunkLogError::Corrupt`].
    pub fn open(directory: Arc<dyn Directory>, name: &str) -> Result<Opened, ChunkLogError> {
        Opened::new(directory, name)
    }
}

impl Opened {
    pub(super) fn new(directory: Arc<dyn Directory>, name: &str) -> Result<Self, ChunkLogError> {
        let said = directory.describe(name);
        let file = directory
            .open(name, Access::Read)
            .map_err(ChunkLogError::io("open", &said))?;
        let read = ChunkLogError::io("read", &said);
        let mut window = Window::new(file).map_err(&read)?;
        let length = window.length();
        let bytes = window.at(0, header_length(MAX_HEADER)).map_err(&read)?;
        let corrupt = |offset: usize, what: &str| ChunkLogError::Corrupt {
            file: said.clone(),
            offset: offset as u64,
            what: what.to_owned(),
        };
        if bytes.len() < MAGIC.len() || bytes[..MAGIC.len()] != MAGIC {
            return Err(ChunkLogError::NotALog { file: said });
        }
        if bytes.len() < FIXED_HEADER {
            return Err(corrupt(bytes.len(), "it ends inside its header"));
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(ChunkLogError::Version {
                file: said,
                found: version,
                ours: VERSION,
            });
        }
        let own = u32_at(bytes, 12) as usize;
        if own > MAX_HEADER {
            return Err(corrupt(12, "a header longer than any"));
        }
        let end = FIXED_HEADER + own;
        if bytes.len() < header_length(own) {
            return Err(corrupt(bytes.len(), "it ends inside its header"));
        }
        if !has_crc(&bytes[..end], u32_at(bytes, end)) {
            return Err(corrupt(0, "the checksum of its header"));
        }
        let snapshot = u64_at(bytes, 16);
        let header = bytes[FIXED_HEADER..end].to_vec();
        if snapshot > length {
            return Err(corrupt(length as usize, "it ends inside its snapshot"));
        }
        Ok(Self {
            directory,
            name: name.to_owned(),
            frames: Frames(window),
            header,
            snapshot,
        })
    }

    /// The header given to [`ChunkLog::create`] or the last [`ChunkLog::rewrite`].
    #[must_use]
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Calls `each` with every record in order and opens the log for appending. A torn tail is cut off; all records
    /// replayed are durable on return. Needs memory for one frame, however long the log is.
    ///
    /// # Errors
    /// [`ChunkLogError::Corrupt`] where the file is damaged, or where `each` rejects a record with a reason;
    /// [`ChunkLogError::Io`].
    pub fn replay(
        mut self,
        each: impl FnMut(Record) -> Result<(), String>,
    ) -> Result<ChunkLog, ChunkLogError> {
        let (end, sequence) = self.walk(each)?;
        let said = self.directory.describe(&self.name);
        let io = |doing| ChunkLogError::io(doing, &said);
        let file = self
            .directory
            .open(&self.name, Access::Write)
            .map_err(io("open"))?;
        let torn = self.frames.0.length() - end;
        if torn > 0 {
            tracing::info!(
                file = said,
                bytes = torn,
                "cut off the torn tail of a chunk log"
            );
        }
        let mut log = RecordLog::reopen(file.into(), end).map_err(io("cut"))?;
        // Writes of a killed process may only be in the page cache.
        log.sync().map_err(io("sync"))?;
        // Left by a rewrite that a crash interrupted.
        if let Err(error) = remove_if_exists(self.directory.as_ref(), &temporary(&self.name)) {
            tracing::warn!(file = said, %error, "cannot remove an unfinished rewrite");
        }
        Ok(ChunkLog {
            directory: self.directory,
            name: self.name,
            header: self.header,
            log,
            sequence,
            durable: sequence,
            pending: Vec::new(),
            snapshot: self.snapshot,
            name_pending: false,
        })
    }

    /// Calls `each` with every record in order and changes nothing.
    ///
    /// # Errors
    /// As [`Opened::replay`].
    pub fn read(
        mut self,
        each: impl FnMut(Record) -> Result<(), String>,
    ) -> Result<(), ChunkLogError> {
        self.walk(each).map(drop)
    }

    /// End offset and number of the last valid frame.
    fn walk(
        &mut self,
        mut each: impl FnMut(Record) -> Result<(), String>,
    ) -> Result<(u64, u64), ChunkLogError> {
        let said = self.directory.describe(&self.name);
        let read = ChunkLogError::io("read", &said);
        let corrupt = |offset, what| ChunkLogError::Corrupt {
            file: said.clone(),
            offset,
            what,
        };
        let mut at = header_length(self.header.len()) as u64;
        let mut sequence = 0;
        while at < self.frames.0.length() {
            let Some(payload) = self.frames.frame(at, sequence + 1).map_err(&read)? else {
                if at < self.snapshot {
                    return Err(corrupt(at, "in its snapshot".into()));
                }
                if let Some(proof) = self.frames.proof(at, sequence + 1).map_err(&read)? {
                    return Err(corrupt(
                        at,
                        format!("byte {proof} says that it was on disk"),
                    ));
                }
                break;
            };
            for record in records(payload) {
                each(record).map_err(|what| corrupt(at, what))?;
            }
            at += (FRAME_HEADER + payload.len()) as u64;
            sequence += 1;
        }
        Ok((at, sequence))
    }
}

/// The frames of a file.
struct Frames(Window);

impl Frames {
    /// The records of the frame at `offset`, if it is complete, valid and has number `sequence`.
    fn frame(&mut self, offset: u64, sequence: u64) -> io::Result<Option<&[u8]>> {
        let Some(header) = FrameHeader::parse(self.0.at(offset, FRAME_HEADER)?) else {
            return Ok(None);
        };
        let payload = self.0.at(offset + FRAME_HEADER as u64, header.length)?;
        let fine = header.sequence == sequence
            && payload.len() == header.length
            && has_crc(payload, header.crc);
        Ok(fine.then_some(payload))
    }

    /// Offset of a later frame that proves that frame `sequence` was on disk when it was written.
    fn proof(&mut self, offset: u64, sequence: u64) -> io::Result<Option<u64>> {
        let mut at = offset;
        while at < self.0.length() {
            let bytes = self.0.at(at, WINDOW)?;
            for step in (0..bytes.len()).step_by(ALIGN) {
                if let Some(header) = FrameHeader::parse(&bytes[step..])
                    && header.durable >= sequence
                    && header.sequence > header.durable
                {
                    return Ok(Some(at + step as u64));
                }
            }
            if bytes.is_empty() {
                break;
            }
            // A frame header may span the end of the window.
            let step = bytes.len().saturating_sub(FRAME_HEADER) / ALIGN * ALIGN;
            at += step.max(ALIGN) as u64;
        }
        Ok(None)
    }
}

const _: () = assert!(WINDOW > FRAME_HEADER + FRAME_RECORDS * RECORD_BYTES);
const _: () = assert!(WINDOW > FIXED_HEADER + MAX_HEADER + ALIGN);
