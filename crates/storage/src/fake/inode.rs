//! A file of the fake: the image that is read, the durable one, and what lies between them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use fastrand::Rng;

/// The sectors of a file that hold anything but zeros, and its length.
#[derive(Clone, Default)]
pub struct Image {
    pub sectors: BTreeMap<u64, Arc<[u8]>>,
    pub length: u64,
}

/// What a sector held from a change on; no bytes are zeros.
struct Version {
    change: u64,
    bytes: Option<Arc<[u8]>>,
}

/// By sector, the contents it had since the last sync, oldest first.
type History = BTreeMap<u64, Vec<Version>>;

/// A file: what is read from it now, and what a power failure may leave of it.
#[derive(Default)]
pub struct Inode {
    /// The name it had last, for faults.
    pub name: String,
    /// What is read.
    pub live: Image,
    /// What was synced.
    pub durable: Image,
    history: History,
    /// Lengths that it had since the last sync.
    pub lengths: Vec<u64>,
    /// Changes in all.
    pub changes: u64,
    /// Bytes on bad sectors.
    pub unreadable: Option<Range<u64>>,
    /// Sectors that are reserved without holding anything.
    pub reserved: BTreeSet<u64>,
}

impl Image {
    /// Fills `buffer`, which may reach behind the end.
    pub fn read(&self, buffer: &mut [u8], offset: u64, sector: u64) {
        buffer.fill(0);
        let end = offset + buffer.len() as u64;
        for (index, bytes) in self.sectors.range(offset / sector..end.div_ceil(sector)) {
            let start = index * sector;
            let (from, to) = (start.max(offset), (start + sector).min(end));
            buffer[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
        }
    }

    /// No file system shows what is behind the end once the file grows again.
    fn drop_beyond_end(&mut self, sector: u64) {
        drop(self.sectors.split_off(&self.length.div_ceil(sector)));
        let within = (self.length % sector) as usize;
        if let Some(bytes) = self.sectors.get_mut(&(self.length / sector)) {
            let mut cut = bytes.to_vec();
            cut[within..].fill(0);
            *bytes = cut.into();
        }
    }

    fn set(&mut self, index: u64, content: Option<Arc<[u8]>>) {
        match content {
            Some(bytes) => drop(self.sectors.insert(index, bytes)),
            None => drop(self.sectors.remove(&index)),
        }
    }
}

impl Inode {
    /// An empty file.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }

    /// A file that holds `image`, all of it durable.
    pub fn durable(name: &str, image: Image) -> Self {
        Self {
            live: image.clone(),
            durable: image,
            ..Self::named(name)
        }
    }

    /// What a power failure leaves of it: about `keep` of the sectors that were not synced.
    pub fn after_crash(&self, rng: &mut Rng, keep: f64, sector: u64) -> Image {
        let mut image = self.durable.clone();
        // Each sector for itself; or the sectors before and behind some place as they were at two moments, which
        // finds what was long overwritten but whole.
        let by_sector = rng.bool();
        let last = self.history.last_key_value().map_or(0, |(index, _)| *index);
        let place = rng.u64(0..=last + 1);
        let moments = [rng.u64(0..=self.changes), rng.u64(0..=self.changes)];
        for (index, versions) in &self.history {
            let count = match by_sector {
                true if rng.f64() >= keep => 0,
                // Mostly the last that was written.
                true if rng.bool() => versions.len(),
                true => rng.usize(1..=versions.len()),
                false => {
                    let moment = moments[usize::from(*index < place)];
                    versions.partition_point(|v| v.change <= moment)
                }
            };
            if let Some(version) = count.checked_sub(1) {
                image.set(*index, versions[version].bytes.clone());
            }
        }
        if !self.lengths.is_empty() && rng.f64() < keep.max(0.2) {
            image.length = self.lengths[rng.usize(0..self.lengths.len())];
        }
        image.drop_beyond_end(sector);
        image
    }

    /// Gives a sector new content. `None` is zeros.
    fn put(&mut self, index: u64, content: Option<Arc<[u8]>>) {
        self.history.entry(index).or_default().push(Version {
            change: self.changes,
            bytes: content.clone(),
        });
        self.live.set(index, content);
    }

    /// Writes bytes; the file grows when it must.
    pub fn write(&mut self, offset: u64, data: &[u8], sector: u64) {
        let end = offset + data.len() as u64;
        for index in offset / sector..end.div_ceil(sector) {
            let start = index * sector;
            let mut bytes = match self.live.sectors.get(&index) {
                Some(bytes) => bytes.to_vec(),
                None => vec![0; sector as usize],
            };
            let (from, to) = (start.max(offset), (start + sector).min(end));
            bytes[(from - start) as usize..(to - start) as usize]
                .copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
            self.reserved.remove(&index);
            self.put(index, Some(bytes.into()));
        }
        if end > self.live.length && !data.is_empty() {
            self.live.length = end;
            self.lengths.push(end);
        }
    }

    /// Makes a range zero, inside sectors too; looks only at sectors that hold something.
    pub fn clear(&mut self, offset: u64, end: u64, sector: u64) {
        let range = offset / sector..end.div_ceil(sector);
        let there: Vec<u64> = self
            .live
            .sectors
            .range(range.clone())
            .map(|s| *s.0)
            .collect();
        for index in there {
            let start = index * sector;
            if start >= offset && start + sector <= end {
                self.put(index, None);
            } else if let Some(bytes) = self.live.sectors.get(&index) {
                let mut bytes = bytes.to_vec();
                let (from, to) = (start.max(offset), (start + sector).min(end));
                bytes[(from - start) as usize..(to - start) as usize].fill(0);
                self.put(index, Some(bytes.into()));
            }
        }
        let whole = offset.div_ceil(sector)..end / sector;
        self.reserved.retain(|index| !whole.contains(index));
    }

    /// What was not synced is lost or kept, by `rng`, and counts as synced: Linux takes pages for clean whose write-back
    /// failed.
    pub fn fail_sync(&mut self, rng: &mut Rng, sector: u64) {
        self.durable = self.after_crash(rng, 0.5, sector);
        self.history.clear();
        self.lengths.clear();
    }

    /// Makes durable what was not; what a failed sync lost was taken for clean and is not written again.
    pub fn sync_pending(&mut self) {
        for (index, mut versions) in std::mem::take(&mut self.history) {
            self.durable
                .set(index, versions.pop().and_then(|v| v.bytes));
        }
        if let Some(length) = self.lengths.pop() {
            self.durable.length = length;
        }
        self.lengths.clear();
    }
}
