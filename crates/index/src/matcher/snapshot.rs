//! The snapshot of the caches (`docs/format/hash-files.md`): written to a temporary file, then renamed over the old
//! one. It only saves time: everything in it can be rebuilt.

use std::io;

use drover_storage::{Access, Directory, File, open_if_exists};
use xxhash_rust::xxh3::Xxh3;

use super::{ImageId, MatcherConfig};
use crate::cuckoo::CuckooLru;
use crate::recent::Region;

pub(crate) const NAME: &str = "caches.snap";
pub(crate) const TEMPORARY: &str = "caches.tmp";

const MAGIC: [u8; 8] = *b"DRVRSNP1";
const VERSION: u32 = 3;
/// Magic, version, layouts, sizes, epoch.
const HEADER: usize = 8 + 4 + 4 + 3 * 8 + 8;
/// Present, image, serial, blocks.
const SLOT: usize = 4 * 8;
const SUM: usize = 8;
/// More than any layout allows.
const MAX_REGIONS: u32 = 1 << 20;

/// The image that an entry's file number refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SavedSlot {
    pub image: ImageId,
    pub serial: u64,
    pub blocks: u64,
}

/// Snapshot contents other than the caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Saved {
    pub epoch: u64,
    pub slots: Vec<Option<SavedSlot>>,
    /// Bits used by the page numbers of C0 and C1.
    pub used_bits: u8,
    pub regions: Vec<Option<Region>>,
}

/// Result of loading.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Loaded {
    Yes(Saved),
    /// There is none, or it has another configuration.
    None,
    Damaged,
}

fn header(config: &MatcherConfig, caches: &[&CuckooLru; 3], epoch: u64) -> [u8; HEADER] {
    let mut h = [0; HEADER];
    h[..8].copy_from_slice(&MAGIC);
    h[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let (r, s) = (config.recent_layout, config.sequence_layout);
    h[12..16].copy_from_slice(&[
        r.fingerprint_bits,
        r.file_bits,
        s.fingerprint_bits,
        s.file_bits,
    ]);
    for (to, c) in h[16..40].chunks_exact_mut(8).zip(caches) {
        // Size and division into parts: an entry's place depends on both.
        let shape = (c.bytes() as u64) << 16 | (c.bytes() / c.part_bytes()) as u64;
        to.copy_from_slice(&shape.to_le_bytes());
    }
    h[40..].copy_from_slice(&epoch.to_le_bytes());
    h
}

/// Writes a snapshot and syncs it.
pub(crate) fn write(
    storage: &dyn Directory,
    config: &MatcherConfig,
    caches: [&CuckooLru; 3],
    saved: &Saved,
) -> io::Result<u64> {
    let written = write_anew(storage, config, caches, saved);
    if written.is_err() {
        // A partial snapshot only takes up space.
        let _ = storage.remove(TEMPORARY);
    }
    written
}

fn write_anew(
    storage: &dyn Directory,
    config: &MatcherConfig,
    caches: [&CuckooLru; 3],
    saved: &Saved,
) -> io::Result<u64> {
    let file = storage.create(TEMPORARY)?;
    let mut at = 0u64;
    let mut sum = Xxh3::new();
    let mut put = |bytes: &[u8]| {
        sum.update(bytes);
        file.write_at(bytes, at)?;
        at += bytes.len() as u64;
        io::Result::Ok(())
    };
    put(&header(config, &caches, saved.epoch))?;
    for slot in &saved.slots {
        let mut b = [0; SLOT];
        if let Some(s) = slot {
            let words = [1, s.image.0, s.serial, s.blocks];
            for (to, w) in b.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&w.to_le_bytes());
            }
        }
        put(&b)?;
    }
    put(&(saved.regions.len() as u64 | u64::from(saved.used_bits) << 32).to_le_bytes())?;
    for region in &saved.regions {
        let word = region.map_or(0, |r| 1 | u64::from(r.slot) << 8 | u64::from(r.part) << 32);
        put(&word.to_le_bytes())?;
    }
    for cache in caches {
        cache.save(&mut put)?;
    }
    file.write_at(&sum.digest().to_le_bytes(), at)?;
    file.sync()?;
    storage.rename(TEMPORARY, NAME)?;
    storage.sync()?;
    Ok(at + SUM as u64)
}

/// Loads a snapshot into caches of the configured shape. Unless the result is `Yes`, they are empty afterwards.
pub(crate) fn load(
    storage: &dyn Directory,
    config: &MatcherConfig,
    caches: [&mut CuckooLru; 3],
) -> io::Result<Loaded> {
    let Some(file) = open_if_exists(storage, NAME, Access::Read)? else {
        return Ok(Loaded::None);
    };
    let [c0, c1, c2] = caches;
    let loaded = read(file.as_ref(), config, [&mut *c0, &mut *c1, &mut *c2]);
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Loaded::Damaged,
        Err(e) => return Err(e),
    };
    if !matches!(loaded, Loaded::Yes(_)) {
        [c0, c1, c2].into_iter().for_each(CuckooLru::clear);
    }
    Ok(loaded)
}

fn read(
    file: &dyn File,
    config: &MatcherConfig,
    caches: [&mut CuckooLru; 3],
) -> io::Result<Loaded> {
    let mut at = 0u64;
    let mut sum = Xxh3::new();
    let mut get = |bytes: &mut [u8]| -> io::Result<()> {
        if file.read_at(bytes, at)? < bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += bytes.len() as u64;
        sum.update(bytes);
        io::Result::Ok(())
    };
    let mut h = [0; HEADER];
    get(&mut h)?;
    let [c0, c1, c2] = caches;
    let epoch = u64::from_le_bytes(h[40..].try_into().unwrap_or_default());
    let expected = header(config, &[&*c0, &*c1, &*c2], epoch);
    if h[..8] != expected[..8] {
        return Ok(Loaded::Damaged);
    }
    if h != expected {
        return Ok(Loaded::None);
    }
    let mut slots = Vec::new();
    for _ in 0..1usize << config.recent_layout.file_bits {
        let mut b = [0; SLOT];
        get(&mut b)?;
        let mut words = b.as_chunks().0.iter().map(|w| u64::from_le_bytes(*w));
        let mut word = || words.next().unwrap_or(0);
        let (present, image, serial, blocks) = (word(), word(), word(), word());
        slots.push((present == 1).then_some(SavedSlot {
            image: ImageId(image),
            serial,
            blocks,
        }));
    }
    let mut word = || -> io::Result<u64> {
        let mut b = [0; 8];
        get(&mut b)?;
        Ok(u64::from_le_bytes(b))
    };
    let numbers = word()?;
    let (count, used_bits) = (numbers as u32, (numbers >> 32) as u8);
    if numbers >> 40 != 0 || count > MAX_REGIONS {
        return Ok(Loaded::Damaged);
    }
    let mut regions = Vec::new();
    for _ in 0..count {
        let word = word()?;
        regions.push((word & 1 == 1).then_some(Region {
            slot: (word >> 8) as u8,
            part: (word >> 32) as u32,
        }));
    }
    for cache in [c0, c1, c2] {
        cache.load(&mut get)?;
    }
    let expected = sum.digest().to_le_bytes();
    let mut b = [0; SUM];
    let n = file.read_at(&mut b, at)?;
    Ok(if n == SUM && (b == expected || cfg!(fuzzing)) {
        Loaded::Yes(Saved {
            epoch,
            slots,
            used_bits,
            regions,
        })
    } else {
        Loaded::Damaged
    })
}
