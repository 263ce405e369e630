//! Opens an index after a clean shutdown or a crash.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use drover_storage::{Directory, remove_if_exists};

use super::snapshot::{self, Loaded, SavedSlot};
use super::{ImageId, Matcher, MatcherConfig, MatcherContext, OpenReport, Repair};
use crate::convert::convert;
use crate::cuckoo::CuckooLru;
use crate::error::{IndexError, Result};
use crate::hash_file::{self, HashFile, Header, any_file_of, names, remove_files};
use crate::recent::{Recent, Slot};
use crate::sequence::SequenceCache;

impl Matcher {
    /// Opens the index in `storage`, or creates one if it is empty.
    ///
    /// Recovers from any crash: the caches are loaded from their snapshot if that is valid, else rebuilt from the
    /// hash files; damaged data is dropped and reported.
    ///
    /// # Errors
    /// [`IndexError::Config`], or storage errors.
    pub fn open(
        storage: impl Directory + 'static,
        config: MatcherConfig,
    ) -> Result<(Self, OpenReport)> {
        config.check()?;
        open(Arc::new(storage), config)
    }
}

fn open(storage: Arc<dyn Directory>, config: MatcherConfig) -> Result<(Matcher, OpenReport)> {
    let mut report = OpenReport::default();
    remove_if_exists(storage.as_ref(), snapshot::TEMPORARY)
        .map_err(IndexError::io("removing", snapshot::TEMPORARY))?;
    convert(storage.as_ref(), &mut report)?;
    let headers = find_images(storage.as_ref(), &mut report)?;
    let mut recent = Recent::new(&config);
    let mut sequences = SequenceCache::open(storage.as_ref(), &config, &mut report.repairs)
        .map_err(IndexError::io("opening", "the sequence cache"))?;
    let caches = [&mut recent.c0, &mut recent.c1, &mut sequences.c2];
    let loaded = snapshot::load(storage.as_ref(), &config, caches)
        .map_err(IndexError::io("reading", snapshot::NAME))?;
    let (epoch, saved) = match loaded {
        Loaded::Yes(s) if recent.numbers.restore(s.used_bits, &s.regions) => {
            (Some(s.epoch), s.slots)
        }
        Loaded::Yes(_) => {
            let caches = [&mut recent.c0, &mut recent.c1, &mut sequences.c2];
            caches.into_iter().for_each(CuckooLru::clear);
            report.repairs.push(Repair::Snapshot);
            (None, Vec::new())
        }
        Loaded::None => (None, Vec::new()),
        Loaded::Damaged => {
            report.repairs.push(Repair::Snapshot);
            (None, Vec::new())
        }
    };
    report.from_snapshot = epoch.is_some();
    let mut matcher = Matcher {
        shared: MatcherContext::new(config.cached_pages),
        config,
        recent,
        sequences,
        repeats: Default::default(),
        older: BTreeMap::new(),
        next_serial: 1 + headers.values().map(|h| h.serial).max().unwrap_or(0),
        closed_traffic: (0, 0),
        storage,
    };
    let stale = matcher.seat(&headers, &saved, &mut report)?;
    let clean = matcher.sequences.file.clean_epoch();
    if clean.is_none() || clean != epoch {
        if matcher.sequences.file.segments() > 0 {
            report.repairs.push(Repair::SequencesRebuilt);
        }
        matcher
            .sequences
            .rebuild(&mut matcher.shared)
            .map_err(IndexError::io("writing", "the sequence cache"))?;
    }
    for slot in stale {
        matcher.reindex_slot(slot);
        report
            .reindexed
            .extend(matcher.recent.slot(slot).map(|s| s.image));
    }
    report.images = matcher.images();
    report.repairs.extend(matcher.take_repairs());
    Ok((matcher, report))
}

/// Finds the complete images and removes the files of others.
fn find_images(
    storage: &dyn Directory,
    report: &mut OpenReport,
) -> Result<BTreeMap<ImageId, Header>> {
    let names = storage.list().map_err(IndexError::io("listing", "."))?;
    let ids: BTreeSet<u64> = names.iter().filter_map(|n| any_file_of(n)).collect();
    let mut complete = BTreeMap::new();
    for id in ids {
        let look = inspect(storage, id).map_err(IndexError::io("opening", self::names(id).0))?;
        match look {
            HashFileState::Complete(header) => {
                complete.insert(ImageId(id), header);
                continue;
            }
            HashFileState::Interrupted => report.interrupted.push(ImageId(id)),
            HashFileState::Damaged => report.repairs.push(Repair::Image(ImageId(id))),
        }
        remove_files(storage, id).map_err(IndexError::io("removing", self::names(id).0))?;
    }
    Ok(complete)
}

enum HashFileState {
    Complete(Header),
    Interrupted,
    Damaged,
}

fn inspect(storage: &dyn Directory, id: u64) -> io::Result<HashFileState> {
    if let Some(file) = HashFile::open(storage, id)? {
        return Ok(HashFileState::Complete(file.header()));
    }
    let Some(side) = hash_file::open(storage, &names(id).1)? else {
        return Ok(HashFileState::Interrupted);
    };
    // Files that were just being created have no header.
    let header = Header::bytes_of(side.as_ref())?.filter(|b| b.iter().any(|b| *b != 0));
    let any_version = |b| Header::from_bytes(b).or_else(|| Header::of_version(1, b));
    Ok(match header.as_ref().map(any_version) {
        None => HashFileState::Interrupted,
        Some(Some(h)) if !h.complete => HashFileState::Interrupted,
        Some(_) => HashFileState::Damaged,
    })
}

impl Matcher {
    /// Assigns slots to images: those in the snapshot keep theirs, and the most recent of the others get the free
    /// ones. Returns the slots whose entries are missing or incomplete, oldest image first.
    fn seat(
        &mut self,
        headers: &BTreeMap<ImageId, Header>,
        saved: &[Option<SavedSlot>],
        report: &mut OpenReport,
    ) -> Result<Vec<u8>> {
        let mut stale = Vec::new();
        let mut by_age: Vec<(&ImageId, &Header)> = headers.iter().collect();
        by_age.sort_by_key(|(_, h)| std::cmp::Reverse(h.serial));
        for (slot, saved) in saved.iter().enumerate() {
            let Some(saved) = saved else { continue };
            let same = headers
                .get(&saved.image)
                .filter(|h| h.serial == saved.serial && h.blocks >= saved.blocks);
            let seated = match same {
                Some(_) => self.take_seat(slot as u8, saved.image, report)?,
                None => false,
            };
            if !seated {
                self.recent.sweep(slot as u8);
            } else if same.is_some_and(|h| h.blocks != saved.blocks) {
                stale.push(slot as u8);
            }
        }
        for (&image, &header) in by_age {
            if self.recent.slot_of(image).is_some() {
                continue;
            }
            match self.recent.slots.iter().position(Option::is_none) {
                Some(free) => {
                    if self.take_seat(free as u8, image, report)? {
                        stale.push(free as u8);
                    }
                }
                None => {
                    self.older.insert(image, header);
                }
            }
        }
        stale.sort_by_key(|&s| self.recent.slot(s).map(|s| s.file.header().serial));
        Ok(stale)
    }

    fn take_seat(&mut self, slot: u8, image: ImageId, report: &mut OpenReport) -> Result<bool> {
        let file = HashFile::open(self.storage.as_ref(), image.0)
            .map_err(IndexError::io("opening", names(image.0).0))?;
        let Some(file) = file else {
            report.repairs.push(Repair::Image(image));
            return Ok(false);
        };
        self.recent.slots[usize::from(slot)] = Some(Slot {
            image,
            open: false,
            used: file.header().serial,
            file,
        });
        Ok(true)
    }
}
