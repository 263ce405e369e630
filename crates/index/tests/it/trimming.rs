//! Trimming while plans are in flight on several connections and either side may crash: the matcher finds exactly the
//! blocks that the destination still has.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;

use drover_core::Digest;
use drover_index::{
    Cursor, ImageId, Matcher, MatcherConfig, Origin, Plan, SEGMENT_SLOTS, Trim, Trimmed,
};
use drover_storage::FakeDirectory;

use crate::library::Image;

const CONNECTIONS: usize = 3;

/// A transfer on its way, and the plans that are.
#[derive(Default)]
struct Connection {
    cursor: Option<Cursor>,
    image: Image,
    sent: usize,
    plans: VecDeque<(Plan, Vec<Digest>)>,
    /// Plans that were made on it, and those that were taken over.
    made: u64,
    taken: u64,
}

/// A trimming that the destination has begun.
struct Trimming {
    trim: Trim,
    answer: Option<Trimmed>,
    /// Plans that must be taken over before the next step.
    wait: [u64; CONNECTIONS],
}

struct World {
    rng: fastrand::Rng,
    storage: FakeDirectory,
    matcher: Matcher,
    connections: [Connection; CONNECTIONS],
    trimming: Option<Trimming>,
    /// The destination's data file.
    data: HashMap<u64, Digest>,
    /// Slots of plans that never came.
    lost: HashSet<u64>,
    images: u64,
    freed: usize,
}

fn config() -> MatcherConfig {
    MatcherConfig {
        c0_bytes: 1 << 16,
        c1_bytes: 1 << 16,
        // Nothing is pushed out, and no segment is used again before it was freed.
        c2_bytes: 1 << 20,
        sequence_limit: 4000,
        ..MatcherConfig::default()
    }
}

fn image(rng: &mut fastrand::Rng) -> Image {
    let mut image = Image::default();
    for _ in 0..rng.u64(3..9) {
        let file = rng.u64(..30);
        image.file(file, 0, 20 + file * 13);
    }
    image
}

impl World {
    fn new(seed: u64) -> Self {
        let storage = FakeDirectory::default();
        World {
            rng: fastrand::Rng::with_seed(seed),
            matcher: Matcher::open(storage.clone(), config()).unwrap().0,
            storage,
            connections: Default::default(),
            trimming: None,
            data: HashMap::new(),
            lost: HashSet::new(),
            images: 0,
            freed: 0,
        }
    }

    /// The next batch of a connection's image is matched, or that ends.
    fn send(&mut self, n: usize) {
        let c = &mut self.connections[n];
        let Some(cursor) = &mut c.cursor else {
            self.images += 1;
            c.image = image(&mut self.rng);
            c.sent = 0;
            c.cursor = Some(self.matcher.begin(ImageId(self.images)).unwrap());
            return;
        };
        let end = c.image.digests.len().min(c.sent + self.rng.usize(1..500));
        if c.sent == end {
            self.matcher.finish(c.cursor.take().unwrap()).unwrap();
            return;
        }
        let (digests, heads) = (&c.image.digests[c.sent..end], &c.image.heads[c.sent..end]);
        let plan = self.matcher.batch(cursor, digests, heads).unwrap();
        c.sent = end;
        c.made += 1;
        c.plans.push_back((plan, c.image.digests.clone()));
    }

    /// The destination takes the next plan of a connection over.
    fn take(&mut self, n: usize) {
        let c = &mut self.connections[n];
        let Some((plan, digests)) = c.plans.pop_front() else {
            return;
        };
        c.taken += 1;
        for store in &plan.stores {
            for k in 0..u64::from(store.count) {
                let slot = store.first + k;
                self.data.insert(slot, digests[(store.from.0 + k) as usize]);
                self.lost.remove(&slot);
            }
        }
    }

    fn settled(&self, wait: &[u64; CONNECTIONS]) -> bool {
        let c = self.connections.iter().zip(wait);
        c.into_iter().all(|(c, wait)| c.taken >= *wait)
    }

    /// The destination continues its trimming, or begins one.
    fn trim(&mut self) {
        let have = 1 + self.data.keys().max().map_or(0, |s| s / SEGMENT_SLOTS) as u32;
        let Some(mut t) = self.trimming.take() else {
            let keep = self.rng.u32(..=self.matcher.sequence_segments());
            self.trimming = Some(Trimming {
                trim: self.matcher.begin_trim(keep, have),
                answer: None,
                wait: [0; CONNECTIONS],
            });
            return;
        };
        match t.answer.take() {
            None if self.settled(&t.wait) => t.answer = Some(self.matcher.trim(&mut t.trim)),
            None => {}
            Some(Trimmed::Done) => return,
            Some(answer) => {
                self.give_back(answer);
                t.wait = std::array::from_fn(|n| self.connections[n].made);
            }
        }
        self.trimming = Some(t);
    }

    fn give_back(&mut self, answer: Trimmed) {
        if let Trimmed::Freed(segments) = answer {
            self.freed += segments.len();
            let gone = |slot: &u64| {
                segments
                    .binary_search(&((slot / SEGMENT_SLOTS) as u32))
                    .is_ok()
            };
            self.data.retain(|slot, _| !gone(slot));
        }
    }

    /// All connections are gone, and what was under way on them.
    fn cut(&mut self) {
        if let Some(t) = self.trimming.take()
            && let Some(answer) = t.answer
            && self.rng.bool()
        {
            self.give_back(answer);
        }
        for c in &mut self.connections {
            for (plan, _) in c.plans.drain(..) {
                for s in &plan.stores {
                    self.lost.extend(s.first..s.first + u64::from(s.count));
                }
            }
            if let Some(cursor) = c.cursor.take() {
                self.matcher.abort(cursor);
            }
            c.taken = c.made;
        }
    }

    /// The matcher is started again.
    fn restart(&mut self) {
        self.cut();
        if self.rng.bool() {
            self.matcher.persist().unwrap();
        }
        self.matcher = Matcher::open(self.storage.clone(), config()).unwrap().0;
    }

    /// With nothing under way: whatever is found is there, whatever is there can be found.
    fn check(&mut self, seed: u64) -> usize {
        for n in 0..CONNECTIONS {
            while !self.connections[n].plans.is_empty() {
                self.take(n);
            }
            if let Some(cursor) = self.connections[n].cursor.take() {
                self.matcher.abort(cursor);
            }
        }
        if self.rng.bool() {
            while self.trimming.is_some() {
                self.trim();
            }
        }
        let mut trim = self.matcher.begin_trim(u32::MAX, config().sequence_limit);
        loop {
            match self.matcher.trim(&mut trim) {
                Trimmed::Done => break,
                answer => self.give_back(answer),
            }
        }
        self.trimming = None;
        let there: BTreeSet<u64> = self.data.keys().map(|s| s / SEGMENT_SLOTS).collect();
        let known = self.matcher.sequence_segments() as usize;
        assert!(
            there.len() <= known,
            "seed {seed}: {} for {known}",
            there.len()
        );

        for image in self.matcher.images() {
            self.matcher.forget(image.image).unwrap();
        }
        self.find(0..20, seed) + self.find(20..30, seed)
    }

    /// Sends these files: how many of their blocks are found in the sequence cache, where all of them must be.
    fn find(&mut self, files: Range<u64>, seed: u64) -> usize {
        self.images += 1;
        let mut cursor = self.matcher.begin(ImageId(self.images)).unwrap();
        let mut image = Image::default();
        for file in files {
            image.file(file, 0, 20 + file * 13);
        }
        let plan = self
            .matcher
            .batch(&mut cursor, &image.digests, &image.heads);
        let plan = plan.unwrap();
        let (mut at, mut found) = (0, 0);
        for run in &plan.runs {
            for k in 0..run.count as usize {
                if let Origin::Sequence { first } = run.origin {
                    let slot = first + k as u64;
                    let right = self.data.get(&slot) == Some(&image.digests[at + k]);
                    assert!(
                        right || self.lost.contains(&slot),
                        "seed {seed}: slot {slot}"
                    );
                    found += 1;
                }
            }
            at += run.count as usize;
        }
        self.connections[0].made += 1;
        self.connections[0].plans.push_back((plan, image.digests));
        self.take(0);
        self.matcher.finish(cursor).unwrap();
        found
    }
}

#[test]
fn what_is_freed_is_filled_anew_only_once_it_was_given_back() {
    let (mut found, mut freed) = (0, 0);
    for seed in 0..40 {
        let mut w = World::new(seed);
        for _ in 0..6 {
            for _ in 0..300 {
                let n = w.rng.usize(..CONNECTIONS);
                match w.rng.u32(..100) {
                    0..35 => w.send(n),
                    35..65 => w.take(n),
                    65..95 => w.trim(),
                    95..97 => {
                        let whole = w.matcher.images().into_iter().filter(|i| i.complete);
                        if let Some(i) = w.rng.choice(whole.collect::<Vec<_>>()) {
                            w.matcher.forget(i.image).unwrap();
                        }
                    }
                    97 => w.cut(),
                    98 => w.restart(),
                    // The destination is started again.
                    _ => w.trimming = None,
                }
            }
            found += w.check(seed);
        }
        freed += w.freed;
    }
    assert!(
        found > 10_000 && freed > 1000,
        "{found} found, {freed} freed"
    );
}
