//! The file of a profile (`docs/format/profile.md`): also what a peer is sent, and what `drover profile export` writes.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use drover_core::{Digest, blocks_for, put_varint, take_varint};
use drover_storage::{Envelope, EnvelopeError};

use super::{Entry, MAX_BLOCKS, MAX_BOOTS, MAX_DISK_BYTES, Profile};

/// Upper bound on an encoded profile, in bytes: one of [`MAX_BLOCKS`] scattered blocks is below it, and it fits a frame.
pub const MAX_BYTES: usize = 3_500_000;

const ENVELOPE: Envelope = Envelope {
    magic: *b"DRVRPRF\0",
    version: 1,
    max_bytes: MAX_BYTES as u64,
};

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It is damaged, or no profile, or of another version.
    #[error("it cannot be used as a profile: {0}")]
    Envelope(#[from] EnvelopeError),
    /// Its checksum is right, but not what it says.
    #[error("it cannot be used as a profile: {0}")]
    Content(&'static str),
    /// The same of the profile in a file.
    #[error("{} cannot be used as a profile: {why}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Its file cannot be read or written.
    #[error("{}: {why}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
}

impl Profile {
    /// The profile as the bytes of a file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.seal(&self.body())
    }

    fn body(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.entries.len() * (Digest::SHORT_LEN + 2) + 64);
        out.extend(self.image.0);
        put_varint(&mut out, self.disk_bytes);
        put_varint(&mut out, self.boots.into());
        put_varint(&mut out, self.entries.len() as u64);
        let (mut next, mut at_ms) = (0, 0);
        let mut rest = self.entries.as_slice();
        while let Some(first) = rest.first() {
            let is_next = |(n, entry): &(usize, &Entry)| {
                entry.block == first.block + *n as u64
                    && entry.at_ms == first.at_ms
                    && entry.boots == first.boots
            };
            let count = rest.iter().enumerate().take_while(is_next).count();
            let (run, after) = rest.split_at(count);
            put_varint(&mut out, count as u64);
            put_varint(&mut out, zigzag(first.block.wrapping_sub(next) as i64));
            put_varint(&mut out, zigzag(i64::from(first.at_ms) - at_ms));
            put_varint(&mut out, first.boots.into());
            run.iter().for_each(|entry| out.extend(entry.digest));
            next = first.block + count as u64;
            at_ms = i64::from(first.at_ms);
            rest = after;
        }
        out
    }

    /// Inverse of [`encode`](Self::encode).
    ///
    /// # Errors
    /// When it is damaged, or exceeds a limit.
    pub fn decode(bytes: &[u8]) -> Result<Profile, ProfileError> {
        parse(ENVELOPE.open(bytes)?).map_err(ProfileError::Content)
    }

    /// Writes it to `path`, atomically and durably.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), ProfileError> {
        let file = |why| ProfileError::File {
            path: path.to_owned(),
            why,
        };
        ENVELOPE.write(path, &self.body()).map_err(file)
    }

    /// Reads the file at `path`; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read, or used.
    pub fn read(path: &Path) -> Result<Option<Profile>, ProfileError> {
        let file = |why| ProfileError::File {
            path: path.to_owned(),
            why,
        };
        let bytes = ENVELOPE.read(path).map_err(file)?;
        bytes.as_deref().map(Profile::decode).transpose()
    }
}

/// Parses the body of a file.
pub(crate) fn parse(mut bytes: &[u8]) -> Result<Profile, &'static str> {
    let (image, rest) = bytes.split_first_chunk().ok_or("it is cut off")?;
    bytes = rest;
    let input = &mut bytes;
    let disk_bytes = take(input)?;
    if disk_bytes > MAX_DISK_BYTES {
        return Err("its disk is too large");
    }
    let boots = take(input)?;
    let boots = u8::try_from(boots).ok().filter(|n| *n <= MAX_BOOTS);
    let boots = boots.ok_or("it counts too many boots")?;
    let total = usize::try_from(take(input)?).ok();
    let total = total.filter(|n| *n <= MAX_BLOCKS);
    let total = total.ok_or("it has too many blocks")?;
    // As many as the bytes can hold.
    if input.len() / Digest::SHORT_LEN < total {
        return Err("it is cut off");
    }
    let end = blocks_for(disk_bytes);
    let mut entries: Vec<Entry> = Vec::with_capacity(total);
    let mut seen = HashSet::with_capacity(total);
    let (mut next, mut at_ms) = (0u64, 0i64);
    while entries.len() < total {
        let count = take(input)?;
        if count == 0 || count > (total - entries.len()) as u64 {
            return Err("a run of its blocks is too long");
        }
        let first = next.wrapping_add(unzigzag(take(input)?) as u64);
        // Both are far from overflow.
        if first >= end || end - first < count {
            return Err("a block is outside of its disk");
        }
        let time = at_ms.checked_add(unzigzag(take(input)?));
        let time = time.and_then(|time| u32::try_from(time).ok());
        let time = time.ok_or("a time is out of range")?;
        let read_by = u8::try_from(take(input)?).unwrap_or(u8::MAX);
        if read_by == 0 || read_by > boots {
            return Err("more boots read a block than there were");
        }
        for block in first..first + count {
            let (digest, rest) = input.split_first_chunk().ok_or("it is cut off")?;
            *input = rest;
            if !seen.insert(block) {
                return Err("it has a block twice");
            }
            entries.push(Entry {
                block,
                at_ms: time,
                boots: read_by,
                digest: *digest,
            });
        }
        (next, at_ms) = (first + count, i64::from(time));
    }
    if !input.is_empty() {
        return Err("something follows its end");
    }
    Ok(Profile {
        disk_bytes,
        image: Digest(*image),
        boots,
        entries,
    })
}

fn take(input: &mut &[u8]) -> Result<u64, &'static str> {
    take_varint(input).ok_or("it is cut off")
}

fn zigzag(n: i64) -> u64 {
    (n.wrapping_shl(1) ^ (n >> 63)) as u64
}

fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}
