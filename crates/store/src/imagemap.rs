//! The map of an image: its layout and its block map, in a file next to the catalog, with enough metadata to rebuild
//! the catalog's record (`docs/format/image-map.md`).

use std::path::Path;
use std::sync::Arc;

use drover_core::{Digest, ImageName};
use drover_image::{Layout, LayoutLimits};
use drover_index::ImageId;
use drover_net::PeerKey;
use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::blockmap::BlockMap;
use crate::catalog::ImageRecord;

/// Upper bound on an encoded layout, from a file or from a peer.
pub const MAX_LAYOUT_BYTES: u64 = 64 << 20;

/// Upper bound on an image file, in bytes: the range of 32-bit block numbers.
pub const MAX_IMAGE_BYTES: u64 = 16 << 40;

const MAGIC: &[u8; 8] = b"DRVRMAP\0";
const VERSION: u32 = 2;

/// Upper bound on a map file: a layout at its limit and the block map of a full-size image.
const MAX_MAP_BYTES: u64 = MAX_LAYOUT_BYTES + (256 << 20);

/// Metadata to rebuild the catalog's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct About {
    /// What version 1 had.
    first: First,
    owner: Option<PeerKey>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct First {
    id: u64,
    name: ImageName,
    path: String,
    format: String,
    data_bytes: u64,
    virtual_bytes: u64,
    digest: Digest,
    added_unix: i64,
    from: String,
    external: bool,
}

/// An image's layout and block map.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageMap {
    /// The order in which the file is walked.
    pub layout: Arc<Layout>,
    /// Which blocks of the walk hold data.
    pub blocks: Arc<BlockMap>,
}

impl ImageMap {
    /// Approximate memory use in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.layout.memory_bytes() + self.blocks.memory_bytes()
    }

    /// Writes the map of `record` to `path`, atomically and durably.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, record: &ImageRecord, path: &Path) -> Result<(), StoreError> {
        drover_storage::atomic_replace(path, &self.encode(record))
            .map_err(StoreError::file("write", path))
    }

    /// Encodes the map of `record`.
    pub(crate) fn encode(&self, record: &ImageRecord) -> Vec<u8> {
        let about = About {
            first: First {
                id: record.id.0,
                name: record.name.clone(),
                path: record.path.to_string_lossy().into_owned(),
                format: record.format.clone(),
                data_bytes: record.data_bytes,
                virtual_bytes: record.virtual_bytes,
                digest: record.digest,
                added_unix: record.added_unix,
                from: record.from.clone(),
                external: record.external,
            },
            owner: record.owner,
        };
        let mut body = Vec::from(MAGIC);
        body.extend_from_slice(&VERSION.to_le_bytes());
        let blocks = self.blocks.encode();
        let packed = zstd::bulk::compress(&blocks, 3).unwrap_or_default();
        let parts = [drover_net::encode(&about), self.layout.encode(), packed];
        for part in &parts {
            body.extend_from_slice(&(part.len() as u64).to_le_bytes());
            body.extend_from_slice(part);
        }
        body.extend_from_slice(&(blocks.len() as u64).to_le_bytes());
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &body) as u32;
        body.extend_from_slice(&sum.to_le_bytes());
        body
    }

    /// Reads a map and its metadata. `None` when it is damaged.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn load(path: &Path) -> Result<Option<(ImageRecord, ImageMap)>, StoreError> {
        let failed = |e| StoreError::file("read", path)(e);
        if std::fs::metadata(path).map_err(failed)?.len() > MAX_MAP_BYTES {
            return Ok(None);
        }
        Ok(parse(&std::fs::read(path).map_err(failed)?))
    }
}

/// Parses a map; `None` when it is damaged.
pub(crate) fn parse(bytes: &[u8]) -> Option<(ImageRecord, ImageMap)> {
    let (body, sum) = bytes.split_last_chunk::<4>()?;
    let good = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, body) as u32;
    // Fuzzers must get past the checksum.
    if sum != &good.to_le_bytes() && !cfg!(fuzzing) {
        return None;
    }
    let (version, rest) = body.strip_prefix(MAGIC)?.split_first_chunk::<4>()?;
    let (about, rest) = part(rest)?;
    let (layout, rest) = part(rest)?;
    let (blocks, rest) = part(rest)?;
    let length = u64::from_le_bytes(rest.try_into().ok()?);
    let about = match u32::from_le_bytes(*version) {
        VERSION => drover_net::decode(about).ok()?,
        // What a peer has sent is nobody's then: a map must not give a peer more than the catalog did.
        1 => About {
            first: drover_net::decode(about).ok()?,
            owner: None,
        },
        _ => return None,
    };
    let About {
        first: about,
        owner,
    } = about;
    let layout = Layout::decode(layout, layout_limits()).ok()?;
    let blocks =
        zstd::bulk::decompress(blocks, usize::try_from(length.min(MAX_MAP_BYTES)).ok()?).ok()?;
    let blocks = BlockMap::decode(&blocks)?;
    if blocks.walk_blocks() != layout.walk_blocks() {
        return None;
    }
    let record = ImageRecord {
        id: ImageId(about.id),
        name: about.name,
        path: about.path.into(),
        format: about.format,
        size_bytes: layout.file_len(),
        data_bytes: about.data_bytes,
        virtual_bytes: about.virtual_bytes,
        digest: about.digest,
        stamp: None,
        added_unix: about.added_unix,
        from: about.from,
        external: about.external,
        owner,
        // A map must not give a peer more than the catalog did.
        shared: Vec::new(),
    };
    Some((
        record,
        ImageMap {
            layout: Arc::new(layout),
            blocks: Arc::new(blocks),
        },
    ))
}

#[cfg(fuzzing)]
pub(crate) fn about_for_fuzzing() -> impl Serialize {
    About {
        first: First {
            id: 1,
            name: ImageName::new("a").expect("a name"),
            path: "/a".into(),
            format: "raw".into(),
            data_bytes: 0,
            virtual_bytes: 0,
            digest: Digest::default(),
            added_unix: 0,
            from: String::new(),
            external: false,
        },
        owner: None,
    }
}

fn part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// Limits on a layout from a peer or a file.
#[must_use]
pub fn layout_limits() -> LayoutLimits {
    LayoutLimits {
        max_encoded: MAX_LAYOUT_BYTES as usize,
        max_file_len: MAX_IMAGE_BYTES,
        ..LayoutLimits::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blockmap::{DataBits, ENTRY_BLOCKS};

    fn sample() -> (ImageRecord, ImageMap) {
        let layout = Layout::in_file_order(10_000_000, &[0..4096, 8192..10_000_000]);
        let mut blocks = BlockMap::default();
        let mut left = layout.walk_blocks();
        while left > 0 {
            let n = left.min(ENTRY_BLOCKS);
            let mut bits = DataBits::new(n);
            (0..n).filter(|i| i % 7 != 3).for_each(|i| bits.set(i));
            blocks.push(&bits);
            left -= n;
        }
        let record = ImageRecord {
            id: ImageId(7),
            name: ImageName::new("a.raw").unwrap(),
            path: "/x/a.raw".into(),
            format: "raw".into(),
            size_bytes: 10_000_000,
            data_bytes: layout.covered_bytes(),
            virtual_bytes: 10_000_000,
            digest: Digest([3; 32]),
            stamp: None,
            added_unix: 5,
            from: "lyon".into(),
            external: false,
            owner: Some(PeerKey([4; 32])),
            shared: Vec::new(),
        };
        (
            record,
            ImageMap {
                layout: Arc::new(layout),
                blocks: Arc::new(blocks),
            },
        )
    }

    #[test]
    fn a_map_is_read_back_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("7.map");
        let (record, map) = sample();
        map.save(&record, &path).unwrap();
        assert_eq!(ImageMap::load(&path).unwrap(), Some((record, map)));
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(parse(&bad).is_none(), "byte {at}");
            assert!(parse(&good[..at]).is_none(), "cut at {at}");
        }
    }

    /// The map file with another version and entry.
    fn with_entry(map: &[u8], version: u32, entry: &[u8]) -> Vec<u8> {
        let (_, rest) = part(&map[12..map.len() - 4]).unwrap();
        let mut file = [&map[..8], &version.to_le_bytes()].concat();
        file.extend((entry.len() as u64).to_le_bytes());
        file.extend(entry);
        file.extend(rest);
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &file) as u32;
        file.extend(sum.to_le_bytes());
        file
    }

    #[test]
    fn a_map_without_an_owner_gives_the_image_to_no_peer() {
        let (record, map) = sample();
        let file = map.encode(&record);
        let (entry, _) = part(&file[12..]).unwrap();
        let about: About = drover_net::decode(entry).unwrap();
        let first = drover_net::encode(&about.first);
        let unowned = ImageRecord {
            owner: None,
            ..record
        };
        let read = parse(&with_entry(&file, 1, &first));
        assert_eq!(read, Some((unowned, map)));
        assert_eq!(parse(&with_entry(&file, 1, entry)), None);
        assert_eq!(parse(&with_entry(&file, 2, &first)), None);
        assert_eq!(parse(&with_entry(&file, 3, entry)), None);
    }
}
