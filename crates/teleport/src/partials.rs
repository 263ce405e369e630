//! Images in transit as sources of blocks: data already in a partial file can be reused like that of any other image,
//! while the transfer runs and after it has stopped.
//!
//! While a transfer runs, the blocks in place are known exactly. After a restart they are inferred from the log: a
//! block that is missing after all fails verification, is requested, and is not looked up there again.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::{BlockIndex, CompactIndex};
use drover_image::Layout;
use drover_index::ImageId;
use drover_net::PeerKey;
use drover_store::sequences::Reach;
use drover_store::{BlockMap, DataBits};
use parking_lot::RwLock;

use crate::TeleportError;
use crate::codec::Batch;
use crate::protocol::BATCH_BLOCKS;

/// Limit on stopped transfers that serve as sources.
pub(crate) const MAX_STOPPED: usize = 256;

/// Limit on the memory for them, in bytes. Beyond it, the peer that has the most loses its oldest.
const MAX_STOPPED_BYTES: usize = 64 << 20;

/// An image in transit.
#[derive(Debug)]
pub struct Partial {
    /// Who sends it.
    peer: PeerKey,
    path: PathBuf,
    layout: Arc<Layout>,
    state: RwLock<State>,
}

#[derive(Debug)]
struct State {
    /// The partial file, while the transfer runs.
    file: Option<Arc<File>>,
    blocks: BlockMap,
    /// Blocks not yet in place (by position in the batch), for each incomplete batch.
    missing: HashMap<u64, DataBits>,
}

/// Blocks that can be read.
#[derive(Debug)]
pub struct Readable {
    /// The partial file.
    pub file: Arc<File>,
    /// How the file is laid out for the walk.
    pub layout: Arc<Layout>,
    /// The blocks, as runs `(block, count)` in walk order.
    pub runs: Vec<(BlockIndex, u64)>,
}

impl State {
    fn missing_of(&self, runs: &[(BlockIndex, u64)]) -> u64 {
        let walk = runs.iter().flat_map(|&(block, n)| block.0..block.0 + n);
        walk.filter(|w| self.is_missing(*w)).count() as u64
    }

    fn is_missing(&self, block: u64) -> bool {
        let open = self.missing.get(&(block / BATCH_BLOCKS));
        open.is_some_and(|bits| bits.get(block % BATCH_BLOCKS))
    }
}

impl Partial {
    /// A batch has been announced; its blocks are not in place yet.
    pub fn arrived(&self, batch: &Batch) {
        let mut state = self.state.write();
        state.blocks.push(&batch.data);
        if batch.data.count() > 0 {
            state.missing.insert(batch.index, batch.data.clone());
        }
    }

    /// Marks blocks of the walk as in place.
    pub fn written(&self, blocks: impl Iterator<Item = u64>) {
        let mut state = self.state.write();
        for block in blocks {
            if let Some(bits) = state.missing.get_mut(&(block / BATCH_BLOCKS))
                && block % BATCH_BLOCKS < bits.blocks()
            {
                bits.clear(block % BATCH_BLOCKS);
            }
        }
    }

    /// Marks all blocks of a batch as in place.
    pub fn complete(&self, index: u64) {
        self.state.write().missing.remove(&index);
    }

    /// Whether data blocks can be read; for a stopped transfer, whether any of them is present.
    fn reach(&self, first: CompactIndex, count: u64) -> Reach {
        let state = self.state.read();
        let Some(runs) = state.blocks.walk_runs(first, count) else {
            return Reach::Gone;
        };
        match (state.missing_of(&runs), &state.file) {
            (0, _) => Reach::Here,
            (_, Some(_)) => Reach::Coming,
            (n, None) if n < count => Reach::Here,
            _ => Reach::Gone,
        }
    }

    /// Length of the run from `first`, at most `count`, in which all data blocks are readable or none is, as far as
    /// is known of a stopped transfer; `count` for a running one.
    fn alike(&self, first: CompactIndex, count: u64) -> u64 {
        let state = self.state.read();
        if state.file.is_some() || state.missing.is_empty() {
            return count;
        }
        let Some(runs) = state.blocks.walk_runs(first, count) else {
            return count;
        };
        let mut walk = runs.iter().flat_map(|&(block, n)| block.0..block.0 + n);
        let missing = walk.next().is_some_and(|b| state.is_missing(b));
        1 + walk.take_while(|b| state.is_missing(*b) == missing).count() as u64
    }

    /// Marks data blocks that failed verification as missing. A running transfer knows exactly which it has, so this
    /// applies only to stopped ones.
    fn refute(&self, blocks: impl Iterator<Item = CompactIndex>) {
        let mut state = self.state.write();
        if state.file.is_some() {
            return;
        }
        for BlockIndex(block) in blocks
            .filter_map(|i| state.blocks.walk_of(i))
            .collect::<Vec<_>>()
        {
            let of_batch = state.missing.entry(block / BATCH_BLOCKS);
            let bits = of_batch.or_insert_with(|| DataBits::new(BATCH_BLOCKS));
            if block % BATCH_BLOCKS < bits.blocks() {
                bits.set(block % BATCH_BLOCKS);
            }
        }
    }

    /// Memory that it takes while it has stopped, in bytes; none while it runs, when it is counted elsewhere.
    fn stopped_bytes(&self) -> Option<usize> {
        let state = self.state.read();
        let missing = state.missing.len() * size_of::<[u64; BATCH_BLOCKS as usize / 64]>();
        let bytes = self.layout.memory_bytes() + state.blocks.memory_bytes() + missing;
        // The files and names of many small ones take memory, too.
        (state.file.is_none()).then_some(bytes.max(MAX_STOPPED_BYTES / MAX_STOPPED))
    }

    fn read(&self, first: CompactIndex, count: u64) -> Option<Readable> {
        let state = self.state.read();
        let runs = state.blocks.walk_runs(first, count)?;
        let file = match &state.file {
            Some(file) => file.clone(),
            None => Arc::new(File::open(&self.path).ok()?),
        };
        Some(Readable {
            file,
            layout: self.layout.clone(),
            runs,
        })
    }
}

/// All images in transit of a site.
#[derive(Debug, Default)]
pub struct Partials {
    all: RwLock<HashMap<ImageId, Arc<Partial>>>,
}

impl Partials {
    /// Registers a running transfer of an image: the blocks of its batches so far, and those of them not in place.
    ///
    /// # Errors
    /// When the partial file cannot be opened.
    pub fn begin(
        self: &Arc<Self>,
        image: ImageId,
        peer: PeerKey,
        path: &Path,
        layout: Arc<Layout>,
        blocks: BlockMap,
        missing: HashMap<u64, DataBits>,
    ) -> Result<Transit, TeleportError> {
        let file = File::open(path).map_err(TeleportError::file("open", path))?;
        let partial = Arc::new(Partial {
            peer,
            path: path.into(),
            layout,
            state: RwLock::new(State {
                file: Some(Arc::new(file)),
                blocks,
                missing,
            }),
        });
        self.all.write().insert(image, partial.clone());
        Ok(Transit {
            all: self.clone(),
            image,
            partial,
        })
    }

    /// Adds a transfer that stopped before the site was started.
    pub fn add_stopped(
        &self,
        image: ImageId,
        peer: PeerKey,
        path: &Path,
        layout: Arc<Layout>,
        blocks: BlockMap,
    ) {
        let partial = Partial {
            peer,
            path: path.into(),
            layout,
            state: RwLock::new(State {
                file: None,
                blocks,
                missing: HashMap::new(),
            }),
        };
        self.all.write().insert(image, Arc::new(partial));
        self.trim();
    }

    /// Drops stopped transfers beyond the limit.
    fn trim(&self) {
        let mut all = self.all.write();
        let mut by_peer: HashMap<PeerKey, (usize, BTreeMap<ImageId, usize>)> = HashMap::new();
        let mut sum = 0;
        for (image, partial) in &*all {
            if let Some(bytes) = partial.stopped_bytes() {
                let of_peer = by_peer.entry(partial.peer).or_default();
                of_peer.0 += bytes;
                of_peer.1.insert(*image, bytes);
                sum += bytes;
            }
        }
        while sum > MAX_STOPPED_BYTES
            && let Some(most) = by_peer.values_mut().max_by_key(|of_peer| of_peer.0)
            && let Some((oldest, bytes)) = most.1.pop_first()
        {
            all.remove(&oldest);
            most.0 -= bytes;
            sum -= bytes;
        }
    }

    /// Removes an image that is complete, or whose partial file is being deleted.
    pub fn remove(&self, image: ImageId) {
        self.all.write().remove(&image);
    }

    /// Whether the image is in transit, stopped or running.
    #[must_use]
    pub fn knows(&self, image: ImageId) -> bool {
        self.all.read().contains_key(&image)
    }

    /// Whether a transfer of the image is running.
    #[must_use]
    pub fn is_live(&self, image: ImageId) -> bool {
        let all = self.all.read();
        all.get(&image)
            .is_some_and(|p| p.state.read().file.is_some())
    }

    /// Whether `count` data blocks of an image, from `first` on, can be read.
    #[must_use]
    pub fn reach(&self, image: ImageId, first: CompactIndex, count: u64) -> Reach {
        let partial = self.all.read().get(&image).cloned();
        partial.map_or(Reach::Gone, |p| p.reach(first, count))
    }

    /// How many of `count` data blocks of an image from `first` on are in the same state as the first: present or
    /// missing.
    #[must_use]
    pub fn alike(&self, image: ImageId, first: CompactIndex, count: u64) -> u64 {
        let partial = self.all.read().get(&image).cloned();
        partial.map_or(count, |p| p.alike(first, count))
    }

    /// Marks data blocks of a stopped transfer, assumed present, as missing.
    pub fn refute(&self, image: ImageId, blocks: impl Iterator<Item = CompactIndex>) {
        let partial = self.all.read().get(&image).cloned();
        if let Some(partial) = partial {
            partial.refute(blocks);
        }
    }

    /// Where those blocks are in the file, whether in place or not.
    #[must_use]
    pub fn read(&self, image: ImageId, first: CompactIndex, count: u64) -> Option<Readable> {
        let partial = self.all.read().get(&image).cloned()?;
        partial.read(first, count)
    }
}

/// A running transfer; it counts as stopped when this is dropped.
#[derive(Debug)]
pub struct Transit {
    all: Arc<Partials>,
    image: ImageId,
    partial: Arc<Partial>,
}

impl std::ops::Deref for Transit {
    type Target = Partial;

    fn deref(&self) -> &Partial {
        &self.partial
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        tracing::trace!(image = self.image.0, "transfer ended");
        self.partial.state.write().file = None;
        self.all.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerKey = PeerKey([1; 32]);

    #[test]
    fn what_is_in_place_can_be_read_and_what_is_not_is_awaited_while_it_comes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.part");
        File::create_new(&path).unwrap();
        let all = Arc::new(Partials::default());
        let (image, layout) = (
            ImageId(7),
            Arc::new(Layout::in_file_order(
                8 << 20,
                std::slice::from_ref(&(0..8 << 20)),
            )),
        );
        let (blocks, missing) = (BlockMap::default(), HashMap::new());
        let transit = all
            .begin(image, PEER, &path, layout, blocks, missing)
            .unwrap();
        assert_eq!(all.reach(image, CompactIndex(0), 1), Reach::Gone);
        let mut data = DataBits::new(BATCH_BLOCKS);
        (100..200).for_each(|i| data.set(i));
        let digests = vec![drover_core::Digest([1; 32]); 100];
        let heads = vec![drover_core::Head::No; 100];
        transit.arrived(&Batch::new(0, data, heads, &digests));
        assert_eq!(all.reach(image, CompactIndex(0), 100), Reach::Coming);
        transit.written(100..150);
        assert_eq!(all.reach(image, CompactIndex(0), 50), Reach::Here);
        assert_eq!(all.reach(image, CompactIndex(49), 2), Reach::Coming);
        assert_eq!(all.reach(image, CompactIndex(99), 2), Reach::Gone);
        assert_eq!(
            all.read(image, CompactIndex(10), 20).unwrap().runs,
            [(BlockIndex(110), 20)]
        );
        assert!(all.is_live(image));
        drop(transit);
        assert!(!all.is_live(image) && all.knows(image));
        assert_eq!(all.reach(image, CompactIndex(49), 2), Reach::Here);
        assert_eq!(all.reach(image, CompactIndex(50), 2), Reach::Gone);
        assert_eq!(
            all.read(image, CompactIndex(10), 20).unwrap().runs,
            [(BlockIndex(110), 20)]
        );
        all.remove(image);
        assert_eq!(all.reach(image, CompactIndex(0), 1), Reach::Gone);
    }

    #[test]
    fn the_oldest_that_have_stopped_go() {
        let all = Partials::default();
        let layout = Arc::new(Layout::in_file_order(4096, &[]));
        for i in 0..=MAX_STOPPED as u64 {
            let path = Path::new("/nowhere");
            all.add_stopped(ImageId(i), PEER, path, layout.clone(), BlockMap::default());
        }
        assert!(!all.knows(ImageId(0)) && all.knows(ImageId(1)));
    }

    /// Layouts that take much memory do not stay because their transfers were given up.
    #[test]
    fn what_has_stopped_takes_a_limited_amount_of_memory() {
        let all = Arc::new(Partials::default());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.part");
        File::create_new(&path).unwrap();
        let small = Arc::new(Layout::in_file_order(4096, &[]));
        let other = PeerKey([2; 32]);
        all.add_stopped(ImageId(0), other, &path, small, BlockMap::default());
        let runs: Vec<_> = (0..1 << 17).map(|i| i * 4096..i * 4096 + 1).collect();
        let large = Arc::new(Layout::in_file_order(4096 << 17, &runs));
        let each = large.memory_bytes();
        assert!(each >= 1 << 20, "{each}");
        for i in 1..=200 {
            let (blocks, missing) = (BlockMap::default(), HashMap::new());
            let begun = all.begin(ImageId(i), PEER, &path, large.clone(), blocks, missing);
            drop(begun.unwrap());
        }
        let kept = (1..=200).filter(|i| all.knows(ImageId(*i))).count();
        assert!(kept > 1 && kept * each <= MAX_STOPPED_BYTES, "{kept}");
        assert!(all.knows(ImageId(200)), "the newest");
        assert!(all.knows(ImageId(0)), "another peer's");
    }
}
