//! A snapshot that is read: every block proved by the root digest of its record.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Digest};
use drover_image::Layout;
use drover_index::ZERO_BLOCK;
use parking_lot::Mutex;

use crate::container::ContainerId;
use crate::error::{Result, VaultError};
use crate::lru::Lru;
use crate::names::{Machine, SnapshotId};
use crate::reader::Reader;
use crate::recipe::{
    PAGE_BLOCKS, PAGE_SEGMENTS, Page, Place, Placed, RecipeError, RecipeHead, Run, SEGMENT_BLOCKS,
    page_checksum, page_digest, segment_digest,
};
use crate::record::{Made, SnapshotRecord};
use crate::vault::Vault;

/// Pages that are kept.
const MAX_PAGES_KEPT: usize = 8;
/// Segments that are kept, of 24 KiB.
const MAX_SEGMENTS_KEPT: usize = 128;

/// A snapshot, open for reading from any number of threads.
pub struct Snapshot {
    id: SnapshotId,
    record: Made,
    head: RecipeHead,
    layout: Layout,
    pub(crate) reader: Reader,
    objects: Arc<dyn crate::objects::Objects>,
    pages: Mutex<Lru<usize, Arc<Page>>>,
    segments: Mutex<Lru<u64, Arc<Segment>>>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot({})", self.id)
    }
}

/// The blocks of 2 MiB: digests that the root proves, and places.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) digests: Vec<Digest>,
    /// The number of the container in the recipe, and the local id; none for zeros.
    places: Vec<Option<(u32, u16)>>,
}

impl Vault {
    /// Opens a snapshot.
    ///
    /// # Errors
    /// [`VaultError::NoSnapshot`]; damage; errors of the store.
    pub fn open_snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        let Some(SnapshotRecord::Made(record)) = self.record_of(id)? else {
            return Err(self.no_snapshot(id));
        };
        let key = id.recipe();
        let bytes = self.objects.get(&key)?.ok_or_else(|| VaultError::Missing {
            key: key.clone(),
            vault: self.place(),
        })?;
        let (head, layout) = RecipeHead::decode(&bytes).map_err(|error| match error {
            RecipeError::Newer => self.newer(&key),
            error => self.damaged(&key, &error),
        })?;
        if head.root() != record.root {
            return Err(self.damaged(&key, &"it does not belong to its snapshot"));
        }
        Ok(Snapshot {
            id: id.clone(),
            record: *record,
            head,
            layout,
            reader: Reader::new(self.objects.clone(), self.digester),
            objects: self.objects.clone(),
            pages: Mutex::new(Lru::new(MAX_PAGES_KEPT)),
            segments: Mutex::new(Lru::new(MAX_SEGMENTS_KEPT)),
        })
    }
}

impl Snapshot {
    /// Which it is.
    #[must_use]
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// Its record.
    #[must_use]
    pub fn record(&self) -> &Made {
        &self.record
    }

    /// The order in which its file is walked.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The head of its recipe.
    #[must_use]
    pub fn recipe(&self) -> &RecipeHead {
        &self.head
    }

    /// How many segments of 2 MiB it has.
    #[must_use]
    pub fn segments(&self) -> u64 {
        self.head.walk_blocks.div_ceil(SEGMENT_BLOCKS as u64)
    }

    fn damaged(&self, key: &str, why: &dyn std::fmt::Display) -> VaultError {
        VaultError::Damaged {
            key: key.to_owned(),
            vault: self.objects.describe(),
            why: why.to_string(),
        }
    }

    /// Reads every page of the recipe, which is verified by that.
    ///
    /// # Errors
    /// Damage; errors of the store.
    pub(crate) fn check_pages(&self) -> Result<()> {
        (0..self.head.pages.len()).try_for_each(|number| self.page(number).map(drop))
    }

    fn page(&self, number: usize) -> Result<Arc<Page>> {
        if let Some(page) = self.pages.lock().get(&number) {
            return Ok(page);
        }
        let at = self.head.pages[number];
        let key = self.id.part(at.part);
        let range = u64::from(at.offset)..u64::from(at.offset) + u64::from(at.len);
        let bytes = self
            .objects
            .get_range(&key, range)?
            .ok_or_else(|| VaultError::Missing {
                key: key.clone(),
                vault: self.objects.describe(),
            })?;
        if page_checksum(&bytes) != at.checksum {
            return Err(self.damaged(&key, &"a checksum does not match"));
        }
        let before = number as u64 * PAGE_BLOCKS as u64;
        let blocks = (self.head.walk_blocks - before).min(PAGE_BLOCKS as u64) as usize;
        let page = Page::decode(&bytes, blocks, self.head.containers.len())
            .map_err(|e| self.damaged(&key, &e))?;
        if page_digest(&page.segments) != at.digest {
            return Err(self.damaged(&key, &"it does not belong to its snapshot"));
        }
        let page = Arc::new(page);
        self.pages.lock().put(number, page.clone());
        Ok(page)
    }

    fn container(&self, number: u32) -> (&Machine, ContainerId) {
        let (machine, id) = self.head.containers[number as usize];
        (&self.head.machines[machine as usize], id)
    }

    /// The digest of a segment, which is proved, and where its blocks are.
    pub(crate) fn runs(&self, number: u64) -> Result<(Digest, Vec<Placed<'_>>)> {
        let in_page = (number % PAGE_SEGMENTS as u64) as usize;
        let page = self.page((number / PAGE_SEGMENTS as u64) as usize)?;
        let place = |run: Run| Placed {
            blocks: run.blocks,
            place: match run.place {
                Place::Zero => None,
                Place::At { container, local } => {
                    let (machine, id) = self.container(container);
                    Some((machine, id, local))
                }
            },
        };
        let runs = page.runs_of(in_page).into_iter().map(place).collect();
        Ok((page.segments[in_page], runs))
    }

    /// A segment, with digests that are proved.
    pub(crate) fn segment(&self, number: u64) -> Result<Arc<Segment>> {
        if let Some(segment) = self.segments.lock().get(&number) {
            return Ok(segment);
        }
        let (in_page, page) = (
            (number % PAGE_SEGMENTS as u64) as usize,
            (number / PAGE_SEGMENTS as u64) as usize,
        );
        let page = self.page(page)?;
        let (mut digests, mut places) = (Vec::new(), Vec::new());
        for run in page.runs_of(in_page) {
            match run.place {
                Place::Zero => {
                    digests.extend((0..run.blocks).map(|_| *ZERO_BLOCK));
                    places.extend((0..run.blocks).map(|_| None));
                }
                Place::At { container, local } => {
                    let (machine, id) = self.container(container);
                    let head = self.reader.head(machine, id)?;
                    for i in 0..run.blocks as u16 {
                        let at = head.position(local + i).ok_or_else(|| VaultError::Wrong {
                            what: format!("container {id}, which lacks block {}", local + i),
                            vault: self.objects.describe(),
                        })?;
                        digests.push(head.digests[at]);
                        places.push(Some((container, local + i)));
                    }
                }
            }
        }
        if Some(&segment_digest(&digests)) != page.segments.get(in_page) {
            return Err(VaultError::Wrong {
                what: format!("segment {number} of {}", self.id),
                vault: self.objects.describe(),
            });
        }
        let segment = Arc::new(Segment { digests, places });
        self.segments.lock().put(number, segment.clone());
        Ok(segment)
    }

    /// Reads those blocks of a segment for which `wanted` is true into their places in `out`, which has the whole
    /// segment; others are left as they are.
    pub(crate) fn read_segment(
        &self,
        segment: &Segment,
        wanted: impl Fn(usize) -> bool,
        out: &mut [u8],
    ) -> Result<()> {
        let mut by_container: BTreeMap<u32, Vec<(u16, usize)>> = BTreeMap::new();
        for (i, place) in segment.places.iter().enumerate() {
            if !wanted(i) {
                continue;
            }
            match place {
                None => out[i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE].fill(0),
                Some((container, local)) => by_container
                    .entry(*container)
                    .or_default()
                    .push((*local, i)),
            }
        }
        for (container, blocks) in by_container {
            let (machine, id) = self.container(container);
            self.reader.blocks(machine, id, &blocks, out)?;
        }
        Ok(())
    }

    /// Reads bytes of the walk; those beyond its end are zero.
    ///
    /// # Errors
    /// Damage; errors of the store.
    pub fn read_walk(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        const SEGMENT: u64 = SEGMENT_BLOCKS as u64 * BLOCK_SIZE_U64;
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let number = at / SEGMENT;
            if number >= self.segments() {
                out[done..].fill(0);
                break;
            }
            let within = (at % SEGMENT) as usize;
            let segment = self.segment(number)?;
            let len = segment.digests.len() * BLOCK_SIZE;
            let n = (out.len() - done).min(SEGMENT as usize - within);
            let inside = len.saturating_sub(within).min(n);
            let part = &mut out[done..done + n];
            part[inside..].fill(0);
            if inside > 0 {
                let blocks: Range<usize> =
                    within / BLOCK_SIZE..(within + inside).div_ceil(BLOCK_SIZE);
                let mut buffer = vec![0; len];
                self.read_segment(&segment, |i| blocks.contains(&i), &mut buffer)?;
                part[..inside].copy_from_slice(&buffer[within..within + inside]);
            }
            done += n;
        }
        Ok(())
    }
}
