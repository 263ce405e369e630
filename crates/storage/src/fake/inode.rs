//! A file of the fake: the live image, the durable one, and the history between them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use fastrand::Rng;

/// The nonzero sectors of a file, and its length.
#[derive(Clone, Default)]
pub struct Image {
    pub sectors: BTreeMap<u64, Arc<[u8]>>,
    pub length: u64,
}

/// The contents of a sector after a change; no bytes means zeros.
struct Version {
    change: u64,
    bytes: Option<Arc<[u8]>>,
}

/// By sector, its contents since the last sync, oldest first.
type History = BTreeMap<u64, Vec<Version>>;

/// A file: its current contents, and what a power failure may leave of it.
#[derive(Default)]
pub struct Inode {
    /// Its last name, for fault injection.
    pub name: String,
    /// The current contents.
    pub live: Image,
    /// The synced contents.
    pub durable: Image,
    history: History,
    /// Its lengths since the last sync.
    pub lengths: Vec<u64>,
    /// Total number of changes.
    pub changes: u64,
    /// The range on bad sectors.
    pub unreadable: Option<Range<u64>>,
    /// Sectors that are reserved but not written.
    pub reserved: BTreeSet<u64>,
}

impl Image {
    /// Fills `buffer`, which may extend beyond the end of the file.
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

    /// Bytes beyond the end must not reappear when the file grows again.
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

    /// A file with the contents `image`, all durable.
    pub fn durable(name: &str, image: Image) -> Self {
        Self {
            live: image.clone(),
            durable: image,
            ..Self::named(name)
        }
    }

    /// The contents after a power failure: about `keep` of the unsynced sectors survive.
    pub fn after_crash(&self, rng: &mut Rng, keep: f64, sector: u64) -> Image {
        let mut image = self.durable.clone();
        // Either independently per sector; or the sectors before and after some place as of two moments, which exposes
        // data that was overwritten long ago but is intact.
        let by_sector = rng.bool();
        let last = self.history.last_key_value().map_or(0, |(index, _)| *index);
        let place = rng.u64(0..=last + 1);
        let moments = [rng.u64(0..=self.changes), rng.u64(0..=self.changes)];
        for (index, versions) in &self.history {
            let count = match by_sector {
                true if rng.f64() >= keep => 0,
                // Mostly the latest version.
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

    /// Sets a sector's contents. `None` is zeros.
    fn put(&mut self, index: u64, content: Option<Arc<[u8]>>) {
        self.history.entry(index).or_default().push(Version {
            change: self.changes,
            bytes: content.clone(),
        });
        self.live.set(index, content);
    }

    /// Writes bytes, growing the file if necessary.
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

    /// Zeros a range, partial sectors too; visits only nonzero sectors.
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

    /// Unsynced data is lost or kept, by `rng`, and counts as synced: Linux marks pages clean after a failed
    /// write-back.
    pub fn fail_sync(&mut self, rng: &mut Rng, sector: u64) {
        self.durable = self.after_crash(rng, 0.5, sector);
        self.history.clear();
        self.lengths.clear();
    }

    /// Makes unsynced data durable; what a failed sync lost counts as clean and is not written again.
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
