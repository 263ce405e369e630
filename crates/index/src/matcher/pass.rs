//! Matches one batch: finds runs, then enters unmatched blocks and promotes matched ones.
//!
//! Blocks are processed in order. The current run is extended along its hash file; where it ends, the page in memory
//! is searched, then the batch itself, then the caches (C1, C0, C2). A hit is extended forwards, and backwards over
//! unmatched blocks of the batch. Entries are inserted and sequences stored only after the whole batch is matched, so
//! that no run refers to a sequence that the same plan stores (teleportation §2.6, §2.10, §2.15).

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;

use drover_core::{CompactIndex, Digest, Head};

use super::repeats::Repeats;
use super::{AnchorPolicy, MatcherConfig, MatcherContext, Origin, PlanRun, SequenceStore, Via};
use crate::page::{PER_PAGE, Page};
use crate::recent::{Lookup, Recent, sampled};
use crate::sequence::SequenceCache;

/// Number of blocks after the end of a match for which the page in memory is searched.
const ALIGNED_BLOCKS: usize = 64;

/// Blocks after a match's end that count as its boundary: they are looked up whether or not they are heads.
const BOUNDARY_BLOCKS: u32 = 1;

/// Blocks whose cache buckets are prefetched.
const AHEAD: usize = 32;

/// Where a run's blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Image(u8),
    Sequence,
}

/// State carried from one batch of an image to the next.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Walk {
    /// Where the current run continues.
    resume: Option<(Source, u64, Via)>,
    /// Blocks since the last match.
    cold: u32,
}

impl Walk {
    /// The same without a current run in that slot.
    pub(crate) fn without(self, slot: u8) -> Self {
        let resume = self
            .resume
            .filter(|(source, ..)| *source != Source::Image(slot));
        Walk { resume, ..self }
    }
}

/// What a pass does with its matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Plan a transfer: promote matches.
    Plan,
    /// Only record blocks that are not in the caches.
    Record,
}

/// A matched run of the batch.
#[derive(Debug, Clone, Copy)]
struct Run {
    start: usize,
    len: usize,
    source: Source,
    /// Compact index or slot of the first block.
    at: u64,
    via: Via,
    /// The block whose lookup found the run.
    hit: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.start + self.len
    }
}

/// A match for one block.
struct Hit {
    source: Source,
    at: u64,
    via: Via,
    page: Option<Arc<Page>>,
}

/// The pass over one batch.
pub(crate) struct Pass<'a> {
    pub config: &'a MatcherConfig,
    pub recent: &'a mut Recent,
    pub sequences: &'a mut SequenceCache,
    pub shared: &'a mut MatcherContext,
    pub purpose: Purpose,
    /// The slot of the batch's image.
    pub own: u8,
    /// Compact index of the batch's first block.
    pub base: u64,
    pub digests: &'a [Digest],
    pub heads: &'a [Head],
    pub walk: Walk,
    /// Cache buckets are prefetched up to this block.
    pub warmed: usize,
}

/// The page read last.
#[derive(Default)]
struct LastPage {
    of: Option<(Source, u64)>,
    page: Option<Arc<Page>>,
}

/// Result of a batch.
pub(crate) struct Outcome {
    pub runs: Vec<PlanRun>,
    pub stores: Vec<SequenceStore>,
    pub walk: Walk,
}

impl Pass<'_> {
    /// Runs the whole pass.
    pub(crate) fn run(mut self, repeats: &mut Repeats) -> Outcome {
        let mut held = LastPage::default();
        let mut mismatches = Vec::new();
        let mut known = Vec::new();
        let runs = self.find_runs(repeats, &mut held, &mut mismatches, &mut known);
        self.remember(&runs, &mismatches, &known);
        let mut stores = Vec::new();
        if self.purpose == Purpose::Plan {
            for run in &runs {
                self.promote(run, &mut stores);
            }
        }
        self.count(&runs);
        Outcome {
            runs: self.plan(&runs),
            stores,
            walk: self.walk,
        }
    }

    /// Only reports which blocks would be matched; nothing is recorded or promoted.
    pub(crate) fn probe(mut self, repeats: &mut Repeats) -> (Vec<bool>, Walk) {
        let mut known = vec![false; self.digests.len()];
        let runs = self.find_runs(
            repeats,
            &mut LastPage::default(),
            &mut Vec::new(),
            &mut Vec::new(),
        );
        for run in runs {
            known[run.start..run.end()].fill(true);
        }
        (known, self.walk)
    }

    fn find_runs(
        &mut self,
        repeats: &mut Repeats,
        held: &mut LastPage,
        mismatches: &mut Vec<(Source, u64, usize)>,
        known: &mut Vec<usize>,
    ) -> Vec<Run> {
        let n = self.digests.len();
        repeats.clear(n);
        let mut runs: Vec<Run> = Vec::new();
        let mut expected = self.walk.resume.take();
        // Block `i` corresponds to position `i + lead` of the page in memory.
        let mut lead = 0u64;
        let mut i = 0;
        while i < n {
            let digest = &self.digests[i];
            let hit = self
                .go_on(expected.take(), i, held)
                .or_else(|| self.aligned(&runs, i, lead, held))
                .or_else(|| self.repeated(repeats, &runs, i))
                .or_else(|| self.look_up(i, known));
            let Some(hit) = hit else {
                repeats.insert(self.digests, i);
                self.walk.cold = self.walk.cold.saturating_add(1);
                i += 1;
                continue;
            };
            if let Some(page) = &hit.page {
                held.of = Some((hit.source, hit.at / PER_PAGE as u64));
                held.page = Some(Arc::clone(page));
            }
            debug_assert!(self.at(hit.source, hit.at, held) == Some(*digest));
            let floor = runs.last().map_or(0, Run::end);
            let run = self.extend(&hit, i, floor, held);
            (i..run.end()).for_each(|j| repeats.insert(self.digests, j));
            i = run.end();
            self.walk.cold = 0;
            let next = run.at + run.len as u64;
            lead = next.wrapping_sub(i as u64);
            let stopped_at_itself =
                run.source == Source::Image(self.own) && next == self.base + run.start as u64;
            if i == n {
                self.walk.resume = Some((run.source, next, run.via));
            } else if stopped_at_itself {
                // Repeating blocks: continue from the first occurrence, doubling the length each time.
                expected = Some((run.source, run.at, run.via));
            } else {
                mismatches.push((run.source, next, i));
            }
            runs.push(run);
        }
        runs
    }

    /// The digest at a position; `held` is the page in memory.
    fn at(&mut self, source: Source, at: u64, held: &mut LastPage) -> Option<Digest> {
        let no = at / PER_PAGE as u64;
        if source == Source::Image(self.own)
            && let Some(i) = at.checked_sub(self.base)
        {
            return self.digests.get(usize::try_from(i).ok()?).copied();
        }
        if held.of != Some((source, no)) {
            held.page = match source {
                Source::Image(slot) => self.recent.page(slot, no, self.shared),
                Source::Sequence => {
                    let no = u32::try_from(no).ok()?;
                    Some(self.sequences.page(no, self.shared))
                }
            };
            held.of = Some((source, no));
        }
        let page = held.page.as_ref()?;
        page.get((at % PER_PAGE as u64) as usize)
    }

    /// Whether block `i` may be taken from there: from its own image only if the position is earlier.
    fn allowed(&self, source: Source, at: u64, i: usize) -> bool {
        source != Source::Image(self.own) || at < self.base + i as u64
    }

    /// Extends the current run.
    fn go_on(
        &mut self,
        expected: Option<(Source, u64, Via)>,
        i: usize,
        held: &mut LastPage,
    ) -> Option<Hit> {
        let (source, at, via) = expected?;
        let good = self.allowed(source, at, i) && self.at(source, at, held)? == self.digests[i];
        good.then_some(Hit {
            source,
            at,
            via,
            page: None,
        })
    }

    /// Searches the page in memory after a match ended: first where the block would be if only some blocks differ,
    /// then anywhere.
    fn aligned(&mut self, runs: &[Run], i: usize, lead: u64, held: &LastPage) -> Option<Hit> {
        let last = runs.last()?;
        if !self.config.aligned || i - last.end() > ALIGNED_BLOCKS {
            return None;
        }
        let (source, no) = held.of?;
        let page = held.page.as_ref()?;
        let digest = &self.digests[i];
        let expected = lead.wrapping_add(i as u64);
        let in_line = expected / PER_PAGE as u64 == no
            && page.holds((expected % PER_PAGE as u64) as usize, digest);
        let at = if in_line {
            expected
        } else {
            no * PER_PAGE as u64 + page.find(digest)? as u64
        };
        self.allowed(source, at, i).then_some(Hit {
            source,
            at,
            via: Via::Aligned,
            page: None,
        })
    }

    /// Finds an earlier block of the batch with the same digest; if that was matched, its source.
    fn repeated(&mut self, repeats: &Repeats, runs: &[Run], i: usize) -> Option<Hit> {
        let j = repeats.find(self.digests, i)?;
        let run = runs
            .get(runs.partition_point(|r| r.end() <= j))
            .filter(|r| r.start <= j);
        let (source, at) = match run {
            Some(r) => (r.source, r.at + (j - r.start) as u64),
            None => (Source::Image(self.own), self.base + j as u64),
        };
        Some(Hit {
            source,
            at,
            via: Via::Repeat,
            page: None,
        })
    }

    /// Looks a block up in the caches if that is worthwhile.
    fn look_up(&mut self, i: usize, known: &mut Vec<usize>) -> Option<Hit> {
        let digest = &self.digests[i];
        let head = self.heads[i];
        let ask = Lookup {
            strong: head == Head::Strong,
            head: head != Head::No,
            boundary: self.walk.cold < BOUNDARY_BLOCKS,
        };
        if !ask.head && !ask.boundary && !self.asks_for_anchor(digest) {
            return None;
        }
        if i >= self.warmed {
            self.warm_from(i);
        }
        // Images first: a match continues there as long as the images agree, but in the sequence cache only to the
        // end of a piece, and each piece costs a page read.
        if let Some(hit) = self.recent.lookup(digest, ask, self.shared) {
            let source = Source::Image(hit.slot);
            if self.allowed(source, hit.index, i) {
                if self.purpose == Purpose::Plan {
                    self.recent.touch(&hit);
                }
                return Some(Hit {
                    source,
                    at: hit.index,
                    via: hit.via,
                    page: Some(hit.page),
                });
            }
            known.push(i);
        }
        let hit = self.sequences.lookup(digest, self.shared)?;
        Some(Hit {
            source: Source::Sequence,
            at: hit.slot,
            via: Via::C2,
            page: Some(hit.page),
        })
    }

    /// Prefetches the buckets of the next blocks to be looked up: few after a match, because the next lookup is
    /// probably nearby.
    fn warm_from(&mut self, i: usize) {
        self.warmed = self
            .digests
            .len()
            .min(i + AHEAD.min(1 + self.walk.cold as usize));
        let mut ahead = [0; AHEAD];
        let mut n = 0;
        for j in i..self.warmed {
            let asked = self.heads[j] != Head::No || self.asks_for_anchor(&self.digests[j]);
            ahead[n] = j;
            n += usize::from(asked);
        }
        let touched = ahead[..n].iter().fold(0, |sum, &j| {
            let d = &self.digests[j];
            let recent = self.recent.c1.touch_buckets(d) ^ self.recent.c0.touch_buckets(d);
            sum ^ recent ^ self.sequences.c2.touch_buckets(d)
        });
        black_box(touched);
    }

    fn asks_for_anchor(&self, digest: &Digest) -> bool {
        let AnchorPolicy::FreeSlots {
            cold_after,
            cold_shift,
            ..
        } = self.config.anchors
        else {
            return false;
        };
        // When heads occupy all of C0, few anchors remain to be found.
        let shift = cold_shift + 2 * u8::from(!self.recent.has_room_for_anchors());
        self.walk.cold < cold_after || sampled(digest, shift)
    }

    /// Extends a hit into a run: forwards, then backwards down to `floor`.
    fn extend(&mut self, hit: &Hit, i: usize, floor: usize, held: &mut LastPage) -> Run {
        let Hit {
            source, at, via, ..
        } = *hit;
        let own = source == Source::Image(self.own);
        let own_start = self.base + i as u64;
        let mut len = 1;
        while i + len < self.digests.len() {
            let next = at + len as u64;
            // A run from the image itself must end before its own first block; one from a sequence must stay in its
            // segment, because what follows belongs to another sequence.
            let wall = (own && next >= own_start)
                || (source == Source::Sequence && next.is_multiple_of(PER_PAGE as u64));
            if wall || self.at(source, next, held) != Some(self.digests[i + len]) {
                break;
            }
            len += 1;
        }
        let mut run = Run {
            start: i,
            len,
            source,
            at,
            via,
            hit: i,
        };
        if !self.config.backward {
            return run;
        }
        let forward = (held.of, held.page.clone());
        while run.start > floor && run.at > 0 {
            let before = run.at - 1;
            let wall = (own && run.at + run.len as u64 >= self.base + run.start as u64)
                || (source == Source::Sequence && run.at.is_multiple_of(PER_PAGE as u64));
            if wall || self.at(source, before, held) != Some(self.digests[run.start - 1]) {
                break;
            }
            run.start -= 1;
            run.at = before;
            run.len += 1;
        }
        self.shared.stats.backward += (i - run.start) as u64;
        // Keep the page where the run ended: it is needed next.
        (held.of, held.page) = forward;
        run
    }

    /// Enters unmatched blocks, and the blocks at which matches ended, into C0 and C1.
    fn remember(&mut self, runs: &[Run], mismatches: &[(Source, u64, usize)], known: &[usize]) {
        let mut matched = runs.iter().peekable();
        let mut ends = mismatches.iter().map(|m| m.2).peekable();
        let mut known = known.iter().copied().peekable();
        let (mut i, mut warmed) = (0, 0);
        while i < self.digests.len() {
            if let Some(run) = matched.next_if(|r| r.start == i) {
                i = run.end();
                continue;
            }
            if i >= warmed && self.recent.has_room_for_anchors() {
                warmed = self.digests.len().min(i + AHEAD);
                let ahead = self.digests[i..warmed].iter();
                black_box(ahead.fold(0, |sum, d| sum ^ self.recent.c0.touch_buckets(d)));
            }
            while ends.next_if(|&e| e < i).is_some() {}
            let at_end = ends.peek() == Some(&i);
            let here = known.next_if(|&k| k == i).is_some();
            let (digest, index) = (&self.digests[i], self.base + i as u64);
            match self.heads[i] {
                _ if here => {}
                Head::Strong => self.recent.insert_c1(digest, self.own, index),
                _ if at_end => self.recent.insert_c1(digest, self.own, index),
                Head::Weak => self.recent.insert_c0(digest, self.own, index),
                Head::No => {
                    let admitted = self.recent.insert_anchor(digest, self.own, index);
                    self.shared.stats.anchors_admitted += u64::from(admitted);
                }
            }
            i += 1;
        }
        if self.purpose == Purpose::Record {
            return;
        }
        // The block at the mismatch in the other image.
        for &(source, at, _) in mismatches {
            let Source::Image(slot) = source else {
                continue;
            };
            let mut held = LastPage::default();
            // It was read before, so it is in memory or the page cache.
            if let Some(digest) = self.at(source, at, &mut held) {
                self.recent.insert_c1(&digest, slot, at);
            }
        }
    }

    /// Copies a run from an image to the sequence cache: entirely, because every piece costs a page read later;
    /// without the parts already there if those are most of it, or if space is scarce. Only C2 is consulted for this;
    /// no page is read.
    fn promote(&mut self, run: &Run, stores: &mut Vec<SequenceStore>) {
        let short = (run.len as u64) < u64::from(self.config.min_sequence);
        if run.source == Source::Sequence || run.via == Via::Repeat || short {
            return;
        }
        let new = self.unknown_to_sequences(run);
        let blocks: usize = new.iter().map(|r| r.len()).sum();
        if 2 * blocks > run.len && !self.sequences.is_filling() {
            self.store(run, run.start, run.end(), stores);
            return;
        }
        for piece in new {
            self.store(run, piece.start, piece.end, stores);
        }
    }

    /// The parts of a run that the sequence cache probably lacks: they begin at blocks that would have entries in C2
    /// otherwise.
    fn unknown_to_sequences(&self, run: &Run) -> Vec<Range<usize>> {
        let mut new: Vec<Range<usize>> = Vec::new();
        let mut known = false;
        for i in run.start..run.end() {
            let head = self.heads[i];
            let leads = i == run.start || i == run.hit || head == Head::Strong;
            if leads || head == Head::Weak {
                let there = self.sequences.may_have(&self.digests[i]);
                // Not every weak head of a sequence has an entry.
                known = there || (known && !leads);
            }
            match new.last_mut() {
                _ if known => {}
                Some(piece) if piece.end == i => piece.end += 1,
                _ => new.push(i..i + 1),
            }
        }
        new
    }

    fn store(&mut self, run: &Run, from: usize, to: usize, stores: &mut Vec<SequenceStore>) {
        if from < to {
            self.sequences.store(
                &self.digests[from..to],
                &self.heads[from..to],
                CompactIndex(self.base) + from as u64,
                run.hit.wrapping_sub(from),
                stores,
                self.shared,
            );
        }
    }

    fn plan(&self, runs: &[Run]) -> Vec<PlanRun> {
        let mut plan: Vec<PlanRun> = Vec::with_capacity(2 * runs.len() + 1);
        let mut at = 0;
        let literal = |count: usize| PlanRun {
            count: count as u32,
            origin: Origin::Literal,
            via: Via::Literal,
        };
        for run in runs {
            if run.start > at {
                plan.push(literal(run.start - at));
            }
            at = run.end();
            let origin = match run.source {
                Source::Sequence => Origin::Sequence { first: run.at },
                Source::Image(slot) => match self.recent.slot(slot) {
                    Some(s) => Origin::Image {
                        image: s.image,
                        first: CompactIndex(run.at),
                    },
                    // Images are not removed during a batch.
                    None => Origin::Literal,
                },
            };
            plan.push(PlanRun {
                count: run.len as u32,
                origin,
                via: run.via,
            });
        }
        if at < self.digests.len() {
            plan.push(literal(self.digests.len() - at));
        }
        plan
    }

    fn count(&mut self, runs: &[Run]) {
        if self.purpose == Purpose::Record {
            return;
        }
        let s = &mut self.shared.stats;
        s.blocks += self.digests.len() as u64;
        s.heads += self.heads.iter().filter(|h| **h != Head::No).count() as u64;
        s.strong_heads += self.heads.iter().filter(|h| **h == Head::Strong).count() as u64;
        s.runs += runs.len() as u64;
        for run in runs {
            let n = run.len as u64;
            s.matched += n;
            match run.via {
                Via::C0 => s.via_c0 += n,
                Via::C1 => s.via_c1 += n,
                Via::C2 => s.via_c2 += n,
                Via::Anchor => s.via_anchor += n,
                Via::Aligned => s.via_aligned += n,
                Via::Repeat => s.via_repeat += n,
                Via::Literal => {}
            }
        }
    }
}
