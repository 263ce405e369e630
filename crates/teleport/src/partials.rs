//! Images in transit as sources of blocks: data already in a partial file can be reused like that of any other image,
//! while the transfer runs and after it has stopped.
//!
//! While a transfer runs, the blocks in place are known exactly. After a restart they are inferred from the log: a
//! block that is missing after all fails verification, is requested, and is not looked up there again.
//!
//! A machine may run from an image in transit ([`crate::launch`]): it reads what is in place. Blocks that it waited for came
//! ahead of their batches.

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
use tokio::sync::Notify;

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
    /// Notified whenever there is more of an image.
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct State {
    /// The partial file, while the transfer runs.
    file: Option<Arc<File>>,
    blocks: BlockMap,
    /// Blocks not yet in place (by position in the batch), for each incomplete batch.
    missing: HashMap<u64, DataBits>,
    /// Blocks in place of batches that have not been announced.
    ahead: HashMap<u64, DataBits>,
    /// Whether that is known, not inferred.
    exact: bool,
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

    /// Whether a block of the walk is known to be in place.
    fn has(&self, block: u64) -> bool {
        let index = block / BATCH_BLOCKS;
        if index < self.blocks.batches() {
            return self.exact && !self.is_missing(block);
        }
        let ahead = self.ahead.get(&index);
        ahead.is_some_and(|bits| bits.get(block % BATCH_BLOCKS))
    }
}

impl Partial {
    /// A batch has been announced; its blocks are not in place yet, nor are its zeros if the file may have had something
    /// else there (`compare`).
    pub fn arrived(&self, batch: &Batch, compare: bool) {
        let mut state = self.state.write();
        state.blocks.push(&batch.data);
        let mut missing = batch.data.clone();
        if compare {
            (0..missing.blocks()).for_each(|place| missing.set(place));
        }
        if let Some(ahead) = state.ahead.remove(&batch.index) {
            let there = ahead.iter().filter(|place| *place < missing.blocks());
            let there: Vec<u64> = there.collect();
            there.into_iter().for_each(|place| missing.clear(place));
        }
        if missing.count() > 0 {
            state.missing.insert(batch.index, missing);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Marks blocks of the walk as in place whose batches have not been announced.
    pub fn ahead(&self, blocks: impl Iterator<Item = u64>) {
        let mut state = self.state.write();
        for block in blocks {
            let bits = state.ahead.entry(block / BATCH_BLOCKS);
            let bits = bits.or_insert_with(|| DataBits::new(BATCH_BLOCKS));
            bits.set(block % BATCH_BLOCKS);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Those of some blocks of the walk that are not known to be in place.
    pub fn lacking(&self, blocks: impl Iterator<Item = u64>) -> Vec<u64> {
        let state = self.state.read();
        blocks.filter(|block| !state.has(*block)).collect()
    }

    /// The partial file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of blocks of the walk that have been announced.
    pub fn announced(&self) -> u64 {
        self.state.read().blocks.walk_blocks()
    }

    /// Whether it is known, not inferred, which blocks are in place.
    pub fn is_exact(&self) -> bool {
        self.state.read().exact
    }

    /// Number of blocks known to be in place, zeros included.
    pub fn blocks_in_place(&self) -> u64 {
        let state = self.state.read();
        if !state.exact {
            return 0;
        }
        let count = |bits: &HashMap<u64, DataBits>| bits.values().map(DataBits::count).sum::<u64>();
        state.blocks.walk_blocks() - count(&state.missing) + count(&state.ahead)
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
        drop(state);
        self.changed.notify_waiters();
    }

    /// Marks all blocks of a batch as in place.
    pub fn complete(&self, index: u64) {
        self.state.write().missing.remove(&index);
        self.changed.notify_waiters();
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

    /// Whether none of these blocks is known to be missing.
    fn is_whole(&self, first: CompactIndex, count: u64) -> bool {
        let state = self.state.read();
        let runs = state.blocks.walk_runs(first, count);
        !state.exact || runs.is_some_and(|runs| state.missing_of(&runs) == 0)
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
        let bitmaps = state.missing.len() + state.ahead.len();
        let bitmaps = bitmaps * size_of::<[u64; BATCH_BLOCKS as usize / 64]>();
        let bytes = self.layout.memory_bytes() + state.blocks.memory_bytes() + bitmaps;
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
    /// Notified whenever there is more of an image, or a transfer begins or ends.
    pub changed: Arc<Notify>,
}

/// What is known of a transfer.
#[derive(Debug, Default)]
pub struct Contents {
    /// Which blocks hold data, for the batches that are logged.
    pub blocks: BlockMap,
    /// Those of them not in place, by position in the batch.
    pub missing: HashMap<u64, DataBits>,
    /// Blocks in place beyond these batches.
    pub ahead: HashMap<u64, DataBits>,
}

impl Partials {
    /// Registers a running transfer of an image with what there is of it.
    ///
    /// # Errors
    /// When the partial file cannot be opened.
    pub fn begin(
        self: &Arc<Self>,
        image: ImageId,
        peer: PeerKey,
        path: &Path,
        layout: Arc<Layout>,
        contents: Contents,
    ) -> Result<Transit, TeleportError> {
        let file = File::open(path).map_err(TeleportError::file("open", path))?;
        let file = Some(Arc::new(file));
        let partial = Arc::new(self.partial(peer, path, layout, file, contents, true));
        self.all.write().insert(image, partial.clone());
        self.changed.notify_waiters();
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
        let contents = Contents {
            blocks,
            ..Contents::default()
        };
        let partial = self.partial(peer, path, layout, None, contents, false);
        self.all.write().insert(image, Arc::new(partial));
        self.trim();
    }

    /// Adds a stopped transfer whose blocks were found by reading them, unless it runs by now.
    pub fn add_read(
        &self,
        image: ImageId,
        peer: PeerKey,
        path: &Path,
        layout: Arc<Layout>,
        contents: Contents,
    ) {
        let partial = self.partial(peer, path, layout, None, contents, true);
        let mut all = self.all.write();
        if !all.get(&image).is_some_and(|p| p.state.read().exact) {
            all.insert(image, Arc::new(partial));
        }
        drop(all);
        self.changed.notify_waiters();
    }

    fn partial(
        &self,
        peer: PeerKey,
        path: &Path,
        layout: Arc<Layout>,
        file: Option<Arc<File>>,
        contents: Contents,
        exact: bool,
    ) -> Partial {
        Partial {
            peer,
            path: path.into(),
            layout,
            state: RwLock::new(State {
                file,
                blocks: contents.blocks,
                missing: contents.missing,
                ahead: contents.ahead,
                exact,
            }),
            changed: self.changed.clone(),
        }
    }

    /// An image in transit.
    #[must_use]
    pub fn get(&self, image: ImageId) -> Option<Arc<Partial>> {
        self.all.read().get(&image).cloned()
    }

    /// Whether no other image is in transit.
    #[must_use]
    pub fn is_only(&self, image: ImageId) -> bool {
        self.all.read().keys().all(|known| *known == image)
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
        self.changed.notify_waiters();
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

    /// Whether none of `count` data blocks of an image from `first` on is known to be missing.
    #[must_use]
    pub fn is_whole(&self, image: ImageId, first: CompactIndex, count: u64) -> bool {
        let partial = self.all.read().get(&image).cloned();
        partial.is_none_or(|p| p.is_whole(first, count))
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

impl Transit {
    /// What is known of its blocks.
    pub fn partial(&self) -> Arc<Partial> {
        Arc::clone(&self.partial)
    }
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
        self.all.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerKey = PeerKey([1; 32]);

    /// Which blocks a launched image has, against a set of blocks.
    #[test]
    fn the_blocks_in_place_are_those_that_were_put_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.part");
        File::create_new(&path).unwrap();
        let layout = Arc::new(Layout::in_file_order(4096, &[]));
        for seed in 0..40 {
            let mut random = fastrand::Rng::with_seed(seed);
            let all = Arc::new(Partials::default());
            let image = ImageId(seed);
            let begun = all.begin(image, PEER, &path, layout.clone(), Contents::default());
            let transit = begun.unwrap();
            let (batches, compare) = (4, random.bool());
            let blocks = batches * BATCH_BLOCKS;
            let mut here = std::collections::BTreeSet::new();
            let mut next = 0;
            for _ in 0..60 {
                let first = random.u64(0..blocks);
                let some = first..(first + random.u64(1..300)).min(blocks);
                match random.u8(0..5) {
                    0 if next < batches => {
                        let mut data = DataBits::new(BATCH_BLOCKS);
                        (0..BATCH_BLOCKS)
                            .filter(|_| random.bool())
                            .for_each(|i| data.set(i));
                        let digests = vec![drover_core::Digest([1; 32]); data.count() as usize];
                        let heads = vec![drover_core::Head::No; digests.len()];
                        if !compare {
                            let zeros = (0..BATCH_BLOCKS).filter(|i| !data.get(*i));
                            here.extend(zeros.map(|i| next * BATCH_BLOCKS + i));
                        }
                        transit.arrived(&Batch::new(next, data, heads, &digests), compare);
                        next += 1;
                    }
                    1 | 2 => {
                        let ahead = some.filter(|b| b / BATCH_BLOCKS >= next);
                        here.extend(ahead.clone());
                        transit.ahead(ahead);
                    }
                    3 => {
                        let written = some.filter(|b| b / BATCH_BLOCKS < next);
                        here.extend(written.clone());
                        transit.written(written);
                    }
                    _ if next > 0 => {
                        let index = random.u64(0..next);
                        here.extend(index * BATCH_BLOCKS..(index + 1) * BATCH_BLOCKS);
                        transit.complete(index);
                    }
                    _ => {}
                }
                let lacking = all.get(image).unwrap().lacking(0..blocks);
                let expected: Vec<u64> = (0..blocks).filter(|b| !here.contains(b)).collect();
                assert!(lacking == expected, "seed {seed}");
                assert_eq!(transit.blocks_in_place(), here.len() as u64, "seed {seed}");
            }
        }
    }

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
        let transit = all
            .begin(image, PEER, &path, layout, Contents::default())
            .unwrap();
        assert_eq!(all.reach(image, CompactIndex(0), 1), Reach::Gone);
        let mut data = DataBits::new(BATCH_BLOCKS);
        (100..200).for_each(|i| data.set(i));
        let digests = vec![drover_core::Digest([1; 32]); 100];
        let heads = vec![drover_core::Head::No; 100];
        transit.arrived(&Batch::new(0, data, heads, &digests), false);
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
        assert!(!all.is_whole(image, CompactIndex(49), 2));
        assert!(all.is_whole(image, CompactIndex(48), 2));
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
            let contents = Contents::default();
            let begun = all.begin(ImageId(i), PEER, &path, large.clone(), contents);
            drop(begun.unwrap());
        }
        let kept = (1..=200).filter(|i| all.knows(ImageId(*i))).count();
        assert!(kept > 1 && kept * each <= MAX_STOPPED_BYTES, "{kept}");
        assert!(all.knows(ImageId(200)), "the newest");
        assert!(all.knows(ImageId(0)), "another peer's");
    }
}
