//! What a site remembers of a disk that it serves: `stores/NAME` in its home (`docs/format/served-disk.md`).

use std::path::PathBuf;

use drover_core::ImageName;
use drover_net::{decode, encode};
use drover_storage::Envelope;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Result, msg};

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRSVD\0",
    version: 1,
    max_bytes: 4096,
};

/// What is remembered of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Where it is; of another place nothing is remembered.
    pub store: String,
    /// The token of its write lease: random, so that no other site has it.
    pub token: [u8; 16],
    /// The disk as it was opened last.
    pub opened: Option<Opened>,
}

/// A disk as it was opened last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The number of the disk.
    pub disk: [u8; 16],
    /// Its session.
    pub session: u32,
    /// Random, and another whenever somebody else has written since: what mounts have of it is of no use then.
    pub line: [u8; 16],
}

/// The record of one disk.
pub struct Records {
    directory: PathBuf,
    path: PathBuf,
    name: ImageName,
}

/// Random bytes of the operating system.
pub fn random() -> Result<[u8; 16]> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(std::io::Error::from)?;
    Ok(random)
}

impl Records {
    /// In the directory of such records.
    pub fn new(directory: PathBuf, name: &ImageName) -> Records {
        Records {
            path: directory.join(name.as_str()),
            directory,
            name: name.clone(),
        }
    }

    /// The record of the disk at a place, a new one if it was not there before. A new one is durable when it returns: whoever
    /// takes a lease with its token can give it back.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, or cannot be written.
    pub fn load(&self, store: &str) -> Result<Record> {
        let file = self.path.display();
        let read = FORMAT.read(&self.path);
        let bytes = read.with_context(|| format!("cannot read {file}"))?;
        if let Some(bytes) = bytes {
            let damaged = |why: &dyn std::fmt::Display| {
                msg!(
                    "{file}: {why}; remove it, and end the lease of {} by `drover mounts break '{store}'`",
                    self.name
                )
            };
            let body = FORMAT.open(&bytes).map_err(|e| damaged(&e))?;
            let record: Record = decode(body).map_err(|e| damaged(&e))?;
            if record.store == store {
                return Ok(record);
            }
        }
        let record = Record {
            store: store.to_owned(),
            token: random()?,
            opened: None,
        };
        self.store(&record)?;
        Ok(record)
    }

    /// Replaces it; durable when it returns.
    ///
    /// # Errors
    /// When it cannot be written; the former one remains.
    pub fn store(&self, record: &Record) -> Result<()> {
        drover_storage::make_private_dir(&self.directory)
            .and_then(|()| FORMAT.write(&self.path, &encode(record)))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_of_one_place_and_a_damaged_one_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let name = ImageName::new("big").unwrap();
        let records = Records::new(directory.path().join("stores"), &name);
        let mut record = records.load("redis://lyon:6379/0?prefix=a").unwrap();
        record.opened = Some(Opened {
            disk: [1; 16],
            session: 7,
            line: [2; 16],
        });
        records.store(&record).unwrap();
        assert_eq!(records.load(&record.store).unwrap(), record);
        let path = directory.path().join("stores/big");
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, bad).unwrap();
            let error = records.load(&record.store).unwrap_err().to_string();
            assert!(error.contains("stores/big: it"), "byte {at}: {error}");
        }
        std::fs::write(&path, good).unwrap();
        let other = records.load("s3://bucket/a").unwrap();
        assert_ne!(other.token, record.token);
        assert_eq!(other.opened, None);
    }
}
