//! Blocks that another node of the site has, or receives, for another image of the same flock: found by the index of which each node
//! has a range (`flock::hints`), and copied from the file that that node writes, once they are in it.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drover_core::{CompactIndex, Digest};
use drover_index::{ImageId, Via};
use drover_store::sequences::{From, Reach};

use super::Site;
use crate::codec::Batch;
use crate::destination::Run;
use crate::files::{Spans, spans_of};
use crate::flock::hints::{Claimed, Ranges};
use crate::flock::live::Flock;
use crate::flock::record::ImageState;
use crate::others::Others;
use crate::services::{ClaimBlocks, LookAt, Looked, Looks, MAX_LOOKED, MAX_SPANS};
use crate::transfers::is_key;

/// How long blocks are waited for whose image no node receives: its transfer was cut off, or its node died, and another takes it over
/// with what has come. Longer than a term, and than what follows it.
const MAX_LOST: Duration = Duration::from_secs(120);

/// What has not been asked for in this time is lost anew.
const LOST_AGAIN: Duration = Duration::from_secs(10);

/// How often the records of flocks are read again while blocks wait for such an image.
const REREAD_EVERY: Duration = Duration::from_secs(1);

/// Upper bound on the images that are known to arrive at other nodes; the oldest are not copied from any more.
const MAX_IMAGES: usize = 4096;

/// Blocks that are in a file of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct There {
    /// The file.
    pub path: PathBuf,
    /// Where in it.
    pub spans: Spans,
}

/// A run of blocks of an image: the image, the first of them, and how many.
pub(crate) type RunOf = (ImageId, CompactIndex, u32);

/// How a run stands at another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    Coming,
    Gone,
    There(There),
}

/// How an image stands that the node which was to receive it does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// Nobody receives it any more.
    Gone,
    /// Another node will, or does.
    WillComeBack,
    /// It is complete.
    Delivered,
}

impl Site {
    /// Blocks that a peer's node of this site is about to ask for: the range of this node says which of them were asked for before.
    pub fn claim(&self, claim: &ClaimBlocks) -> Claimed {
        let (image, blocks) = ((claim.image, &*claim.node), claim.blocks());
        let mut hints = self.elsewhere.hints.lock();
        hints.claim(&claim.flock, image, &blocks)
    }

    /// The nodes of this site, if the images of a flock may be received by several.
    fn siblings(&self, flock: &Flock) -> Option<&dyn Others> {
        let shared = self.config.shared.as_ref()?;
        (!flock.atomic).then_some(&*shared.others)
    }

    /// Whether several nodes may receive the images of a flock.
    pub(crate) fn may_have_siblings(&self, flock: &Flock) -> bool {
        self.siblings(flock).is_some()
    }

    /// Whether several nodes receive the images of a flock.
    pub(crate) fn has_siblings(&self, flock: &Flock) -> bool {
        let siblings = self.siblings(flock);
        siblings.is_some_and(|others| others.owners().len() > 1)
    }

    /// Replaces literal blocks of an image of a flock by those that another image of it has asked for before.
    pub(crate) fn find_elsewhere(
        &self,
        flock: &Flock,
        image: ImageId,
        base: CompactIndex,
        batch: &Batch,
        runs: Vec<Run>,
    ) -> Vec<Run> {
        let Some(others) = self.siblings(flock) else {
            return runs;
        };
        let nodes = others.owners();
        if nodes.len() < 2 {
            return runs;
        }
        let ranges = Ranges::of(&nodes);
        let mut asked: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut at = 0;
        for run in &runs {
            let end = (at + run.count as usize).min(batch.digests.len());
            if run.from == From::Literal {
                for nth in at..end {
                    let owner = ranges.owner_of(&batch.digests[nth]);
                    asked.entry(owner).or_default().push(nth);
                }
            }
            at = end;
        }
        let own = others.name();
        let mut found: HashMap<usize, (ImageId, CompactIndex)> = HashMap::new();
        for (owner, places) in asked {
            let of = |nth: &usize| (batch.digests[*nth], base.0 + *nth as u64);
            let blocks: Vec<(Digest, u64)> = places.iter().map(of).collect();
            let claim = ClaimBlocks::new(flock.id, image.0, &own, &blocks);
            let claimed = match nodes[owner] == own {
                true => self.claim(&claim),
                // Without an answer they are sent.
                false => others.claim(&nodes[owner], &claim).unwrap_or_default(),
            };
            for (place, of, index) in claimed.found {
                let nth = places.get(place as usize);
                let image = claimed.images.get(of as usize);
                let (Some(nth), Some((image, node))) = (nth, image) else {
                    continue;
                };
                let image = ImageId(*image);
                self.note_elsewhere(image, node);
                if !flock.has(image) {
                    flock.begin(image);
                }
                found.insert(*nth, (image, CompactIndex(index)));
            }
        }
        match found.is_empty() {
            true => runs,
            false => split(&runs, &found),
        }
    }

    /// Notes which node receives an image.
    fn note_elsewhere(&self, image: ImageId, node: &str) {
        let mut images = self.elsewhere.images.lock();
        let is_full = images.len() >= MAX_IMAGES && !images.contains_key(&image);
        if is_full {
            images.retain(|image, _| !self.images.knows(*image));
            make_room(&mut images);
        }
        images.insert(image, node.to_owned());
    }

    /// How this node reaches blocks of an image: as [`Site::reach`], but those that another node may have are coming.
    pub(crate) fn reach_anywhere(&self, image: ImageId, first: CompactIndex, count: u64) -> Reach {
        match self.reach(image, first, count) {
            Reach::Gone if self.elsewhere.images.lock().contains_key(&image) => Reach::Coming,
            reach => reach,
        }
    }

    /// Reads the records of flocks again, unless that was done a moment ago.
    fn reread_now_and_then(&self) {
        let mut reread = self.elsewhere.reread.lock();
        if reread.is_none_or(|reread| reread.elapsed() > REREAD_EVERY) {
            if let Err(e) = self.reread_flocks() {
                tracing::debug!("the records of flocks cannot be read again: {e}");
            }
            *reread = Some(Instant::now());
        }
    }

    /// How long an image has been received by no node; the first call in a while begins to count.
    fn lost_for(&self, image: ImageId) -> Duration {
        let mut lost = self.elsewhere.lost.lock();
        lost.retain(|_, (_, last)| last.elapsed() < LOST_AGAIN);
        if lost.len() >= MAX_IMAGES && !lost.contains_key(&image) {
            return MAX_LOST;
        }
        let now = Instant::now();
        let (since, last) = lost.entry(image).or_insert((now, now));
        *last = now;
        now.duration_since(*since)
    }

    /// How an image stands that the node which was to receive it does not.
    fn lost(&self, flock: &Flock, image: ImageId) -> Lost {
        let record = self.flocks.record(flock);
        let Some((state, node)) = record.and_then(|record| {
            let mut images = record.images.iter().zip(0u32..);
            let (of, nth) = images.find(|(of, _)| of.image == image.0)?;
            Some((of.state, record.nodes.get(&nth).cloned()))
        }) else {
            return Lost::Gone;
        };
        if let Some(node) = node {
            self.note_elsewhere(image, &node);
        }
        match state {
            ImageState::Failed => Lost::Gone,
            // Also what was delivered: it may have been removed or replaced since.
            _ if self.lost_for(image) >= MAX_LOST => Lost::Gone,
            ImageState::Delivered | ImageState::Unchanged => Lost::Delivered,
            _ => Lost::WillComeBack,
        }
    }

    /// Asks the nodes that have these runs of a flock, of which this node has nothing, how they stand. Blocks.
    pub(crate) fn look_elsewhere(&self, flock: &Flock, runs: &[RunOf]) -> HashMap<RunOf, Found> {
        let mut out = HashMap::new();
        let Some(shared) = &self.config.shared else {
            return out;
        };
        let own = shared.others.name();
        let mut by_node: BTreeMap<String, Vec<RunOf>> = BTreeMap::new();
        {
            let images = self.elsewhere.images.lock();
            for run in runs {
                let node = images.get(&run.0).unwrap_or(&own);
                by_node.entry(node.clone()).or_default().push(*run);
            }
        }
        let (mut delivered, mut lost) = (false, Vec::new());
        for (node, mut runs) in by_node {
            runs.truncate(MAX_LOOKED);
            let of = |(image, first, count): &RunOf| (image.0, first.0, *count);
            let look = LookAt {
                runs: runs.iter().map(of).collect(),
            };
            let looks = match node == own {
                // Its transfer was cut off here.
                true => None,
                false => shared.others.look(&node, &look),
            };
            // A node that does not answer has nothing.
            let looks = looks.unwrap_or_else(|| Looks {
                runs: vec![Looked::Gone; runs.len()],
                ..Looks::default()
            });
            let dir = is_key(&looks.token).then(|| shared.work_dirs.join(&looks.token));
            for (run, looked) in runs.into_iter().zip(looks.runs) {
                let found = match looked {
                    Looked::Coming => Found::Coming,
                    Looked::Gone => {
                        lost.push(run);
                        continue;
                    }
                    Looked::Delivered => {
                        delivered = true;
                        Found::Coming
                    }
                    Looked::There(key, spans) => {
                        let key = looks.keys.get(key as usize).filter(|key| is_key(key));
                        match (&dir, key) {
                            (Some(dir), Some(key)) => Found::There(There {
                                path: dir.join("transfers").join(key).join("image.part"),
                                spans: spans.into_iter().map(|(at, len)| (Some(at), len)).collect(),
                            }),
                            _ => Found::Gone,
                        }
                    }
                };
                self.elsewhere.lost.lock().remove(&run.0);
                out.insert(run, found);
            }
        }
        if !lost.is_empty() {
            // Another node may have taken it over.
            self.reread_now_and_then();
            for run in lost {
                let how = self.lost(flock, run.0);
                delivered |= how == Lost::Delivered;
                let found = match how {
                    Lost::Gone => Found::Gone,
                    Lost::WillComeBack | Lost::Delivered => Found::Coming,
                };
                out.insert(run, found);
            }
        }
        // From the catalog it learns where the image is.
        if delivered && let Err(e) = self.refresh() {
            tracing::debug!("the catalog cannot be read again: {e}");
        }
        out
    }

    /// Whether none of these blocks of an image is known to be missing, as some of a transfer that has stopped are.
    pub(crate) fn is_whole(&self, (image, first, count): &RunOf) -> bool {
        self.partials.is_whole(*image, *first, u64::from(*count))
    }

    /// How runs of images that this node receives stand, for another node.
    #[must_use]
    pub fn look_at(&self, look: &LookAt) -> Looks {
        let token = self
            .config
            .work_dir
            .file_name()
            .and_then(|name| name.to_str());
        let mut looks = Looks {
            token: token.unwrap_or_default().to_owned(),
            ..Looks::default()
        };
        let mut room = MAX_SPANS;
        for (image, first, count) in look.runs.iter().take(MAX_LOOKED) {
            let (image, first, count) = (ImageId(*image), CompactIndex(*first), u64::from(*count));
            let looked = match self.partials.reach(image, first, count) {
                _ if self.images.knows(image) => Looked::Delivered,
                Reach::Coming => Looked::Coming,
                Reach::Gone => Looked::Gone,
                Reach::Here if !self.partials.is_whole(image, first, count) => Looked::Gone,
                Reach::Here => match self.place_of(image, first, count) {
                    Some((_, spans)) if spans.len() > room && room < MAX_SPANS => Looked::Coming,
                    Some((key, spans)) if spans.len() <= room => {
                        room -= spans.len();
                        let place = looks.keys.iter().position(|known| *known == key);
                        let place = place.unwrap_or_else(|| {
                            looks.keys.push(key);
                            looks.keys.len() - 1
                        });
                        Looked::There(place as u32, spans)
                    }
                    _ => Looked::Gone,
                },
            };
            looks.runs.push(looked);
        }
        looks
    }

    /// The key of the transfer of an image, and where in its partial file these blocks are.
    fn place_of(
        &self,
        image: ImageId,
        first: CompactIndex,
        count: u64,
    ) -> Option<(String, Vec<(u64, u64)>)> {
        let partial = self.partials.get(image)?;
        let key = partial.path().parent()?.file_name()?.to_str()?.to_owned();
        let read = self.partials.read(image, first, count)?;
        let spans = spans_of(&read.layout, &read.runs).into_iter();
        let spans = spans.map(|(at, len)| Some((at?, len)));
        Some((key, spans.collect::<Option<Vec<_>>>()?))
    }
}

/// Forgets the oldest images until one more fits: numbers ascend. Some have failed, which nobody tells.
fn make_room(images: &mut HashMap<ImageId, String>) {
    while images.len() >= MAX_IMAGES
        && let Some(oldest) = images.keys().min().copied()
    {
        images.remove(&oldest);
    }
}

/// Splits literal runs where blocks of other images were found.
fn split(runs: &[Run], found: &HashMap<usize, (ImageId, CompactIndex)>) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::with_capacity(runs.len() + 8);
    let mut at = 0;
    for run in runs {
        if run.from != From::Literal {
            out.push(*run);
            at += run.count as usize;
            continue;
        }
        let start = out.len();
        for nth in at..at + run.count as usize {
            let here = found.get(&nth);
            let from = here.map_or(From::Literal, |(image, first)| From::Image {
                image: *image,
                first: *first,
            });
            let open = out.len() > start;
            match (out.last_mut().filter(|_| open), from) {
                (Some(last), From::Literal) if last.from == From::Literal => last.count += 1,
                (Some(last), From::Image { image, first }) if matches!(last.from, From::Image { image: i, first: f } if i == image && f + u64::from(last.count) == first) =>
                {
                    last.count += 1;
                }
                _ => out.push(Run {
                    count: 1,
                    from,
                    via: match here {
                        Some(_) => Via::Anchor,
                        None => run.via,
                    },
                }),
            }
        }
        at += run.count as usize;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_images_make_room() {
        let all = 5..5 + MAX_IMAGES as u64;
        let mut images: HashMap<_, _> = all.map(|n| (ImageId(n), String::new())).collect();
        make_room(&mut images);
        assert_eq!(images.len(), MAX_IMAGES - 1);
        assert!(!images.contains_key(&ImageId(5)) && images.contains_key(&ImageId(6)));
        make_room(&mut images);
        assert_eq!(images.len(), MAX_IMAGES - 1);
    }

    #[test]
    fn literal_runs_are_split_where_blocks_were_found() {
        let run = |count, from, via| Run { count, from, via };
        let image = |image, first| From::Image {
            image: ImageId(image),
            first: CompactIndex(first),
        };
        let runs = [
            run(2, image(9, 0), Via::C1),
            run(6, From::Literal, Via::Literal),
            run(2, From::Literal, Via::Literal),
        ];
        let at = |nth, of, index| (nth, (ImageId(of), CompactIndex(index)));
        // The first is of a run that is not literal.
        let found = [
            at(0, 5, 5),
            at(3, 7, 100),
            at(4, 7, 101),
            at(5, 7, 103),
            at(8, 7, 104),
        ];
        let split = split(&runs, &found.into());
        let expected = [
            run(2, image(9, 0), Via::C1),
            run(1, From::Literal, Via::Literal),
            run(2, image(7, 100), Via::Anchor),
            run(1, image(7, 103), Via::Anchor),
            run(2, From::Literal, Via::Literal),
            run(1, image(7, 104), Via::Anchor),
            run(1, From::Literal, Via::Literal),
        ];
        assert_eq!(split, expected);
    }
}
