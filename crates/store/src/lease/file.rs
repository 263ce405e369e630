//! The lease's file (`docs/format/mount-wire.md`).

use std::fs;
use std::io;
use std::path::Path;

use drover_core::is_disk_full;
use drover_net::{Code, NetError, Refusal, decode, encode};
use serde::Deserialize;

use super::record::{Broken, Holder, Loss, MountId, Record};

/// File name, in the directory of the image's overlay.
pub const FILE_NAME: &str = "lease";

/// Magic: the format and its version.
const MAGIC: [u8; 12] = *b"DRVRLSE\0\x04\0\0\0";

/// Previous versions: readable, and upgraded with the next change. Version 3 is the same without leases that were handed over.
const MAGIC_3: [u8; 12] = *b"DRVRLSE\0\x03\0\0\0";
const MAGIC_2: [u8; 12] = *b"DRVRLSE\0\x02\0\0\0";
const MAGIC_1: [u8; 12] = *b"DRVRLSE\0\x01\0\0\0";

/// The holder in versions 1 and 2, whose leases have no term.
#[derive(Deserialize)]
struct HolderV2 {
    peer: [u8; 32],
    peer_name: String,
    mount: MountId,
    since_unix: u64,
    note: String,
}

impl From<HolderV2> for Holder {
    fn from(old: HolderV2) -> Self {
        Self {
            peer: old.peer,
            peer_name: old.peer_name,
            mount: old.mount,
            since_unix: old.since_unix,
            note: old.note,
            term: None,
        }
    }
}

/// The record of version 1, which lacks the last holder.
#[derive(Deserialize)]
struct RecordV1 {
    edition: u64,
    last_writer: Option<([u8; 32], MountId)>,
    holder: Option<HolderV2>,
    broken: Vec<([u8; 32], MountId)>,
}

impl From<RecordV1> for Record {
    fn from(old: RecordV1) -> Self {
        let holder = old.holder.map(Holder::from);
        let revoked = |(peer, mount)| Broken {
            peer,
            mount,
            how: Loss::Revoked,
        };
        Self {
            edition: old.edition,
            last_writer: old.last_writer,
            last: holder.clone(),
            holder,
            broken: old.broken.into_iter().map(revoked).collect(),
        }
    }
}

/// The record of version 2, in which leases could only be revoked.
#[derive(Deserialize)]
struct RecordV2(RecordV1, Option<HolderV2>);

impl From<RecordV2> for Record {
    fn from(RecordV2(old, last): RecordV2) -> Self {
        Self {
            last: last.map(Holder::from),
            ..old.into()
        }
    }
}

/// Upper bound on the file size.
const MAX_BYTES: u64 = 64 << 10;

/// Loads the record of a directory; `None` without a file.
pub fn load(directory: &Path) -> Result<Option<Record>, Refusal> {
    let path = directory.join(FILE_NAME);
    let wrong = |code, why: &str| {
        let text = format!("{}: {why}", path.display());
        Refusal::new(code, text)
    };
    let bytes = match fs::metadata(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(wrong(Code::Io, &e.to_string())),
        Ok(about) if about.len() > MAX_BYTES => {
            return Err(wrong(Code::Corrupt, "too long for a lease"));
        }
        Ok(_) => fs::read(&path).map_err(|e| wrong(Code::Io, &e.to_string()))?,
    };
    parse(&bytes)
        .map(Some)
        .map_err(|why| wrong(Code::Corrupt, &why))
}

pub fn parse(bytes: &[u8]) -> Result<Record, String> {
    let damaged = "damaged; `drover mounts break` for this image, at this site, replaces it";
    let version = |magic: &[u8; 12], parse: Parse| Some((bytes.strip_prefix(&magic[..])?, parse));
    let known = version(&MAGIC, decode)
        .or_else(|| version(&MAGIC_3, decode))
        .or_else(|| version(&MAGIC_2, |body| decode::<RecordV2>(body).map(Record::from)))
        .or_else(|| version(&MAGIC_1, |body| decode::<RecordV1>(body).map(Record::from)));
    let Some((rest, parse)) = known else {
        return Err(match bytes.strip_prefix(&MAGIC[..8]) {
            Some(_) => "a lease of another version of drover; use that one, or `drover mounts break` for this \
                        image replaces it"
                .into(),
            None => damaged.into(),
        });
    };
    let Some((sum, body)) = rest.split_first_chunk::<32>() else {
        return Err(damaged.into());
    };
    if blake3::hash(body).as_bytes() != sum {
        return Err(damaged.into());
    }
    parse(body).map_err(|e| e.to_string())
}

/// Decodes the body of one version.
type Parse = fn(&[u8]) -> Result<Record, NetError>;

/// Removes temporary files of processes that crashed while they wrote the lease.
pub fn remove_leftovers(directory: &Path) {
    drover_storage::remove_leftovers(&directory.join(FILE_NAME));
}

/// Moves an unusable file out of the way, without deleting it.
pub fn set_aside(directory: &Path) -> io::Result<()> {
    fs::rename(
        directory.join(FILE_NAME),
        directory.join(format!("{FILE_NAME}.damaged")),
    )
}

/// Replaces the record atomically: after a crash, the file has the old one or the new one.
pub fn store(directory: &Path, record: &Record) -> Result<(), Refusal> {
    let path = directory.join(FILE_NAME);
    let body = encode(record);
    let write = || -> io::Result<()> {
        drover_storage::make_private_dir(directory)?;
        let bytes = [&MAGIC, &blake3::hash(&body).as_bytes()[..], &body].concat();
        drover_storage::atomic_replace(&path, &bytes)
    };
    write().map_err(|e| {
        let code = match is_disk_full(&e) {
            true => Code::NoSpace,
            false => Code::Io,
        };
        Refusal::new(code, format!("cannot write {}: {e}", path.display()))
    })
}
