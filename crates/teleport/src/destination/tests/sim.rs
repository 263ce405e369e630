//! A source, a destination and everything between them in one thread, driven by a seed: a network that delays and
//! reorders, a matcher that is sometimes wrong, a disk that loses unsynced writes, power failures, and a machine that waits for
//! blocks while they arrive.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use drover_core::{CompactIndex, Digest, Head};
use drover_index::{ImageId, Via};
use fastrand::Rng;

use super::super::*;
use crate::codec::{Need, PROOF_BLOCKS, Want, proofs_of};
use crate::protocol::{Accept, Delivered};
use crate::source::{self, Gives, Source};

mod reads;

/// Stands for the digest of the whole image.
pub const WHOLE: Digest = Digest([0xee; 32]);

/// Turns a block's content into another with the same short digest.
const TWIN: u64 = 1 << 63;

/// A block's content is a number; zero is a zero block.
pub fn digest_of(content: u64) -> Digest {
    let mut d = [0x5a; 32];
    d[..8].copy_from_slice(&(content & !TWIN).to_le_bytes());
    d[31] = (content >> 63) as u8;
    Digest(d)
}

/// The batch `index` of an image.
pub fn batch_of(image: &[u64], index: u64) -> Batch {
    let blocks = &image[(index * BATCH_BLOCKS) as usize..];
    let blocks = &blocks[..blocks.len().min(BATCH_BLOCKS as usize)];
    let mut data = DataBits::new(blocks.len() as u64);
    let mut digests = Vec::new();
    for (i, &content) in blocks.iter().enumerate().filter(|(_, c)| **c != 0) {
        data.set(i as u64);
        digests.push(digest_of(content));
    }
    Batch::new(index, data, vec![Head::No; digests.len()], &digests)
}

/// Blocks with runs of zeros, of new data, and of repeated data.
pub fn random_image(rng: &mut Rng, blocks: usize) -> Vec<u64> {
    let mut out: Vec<u64> = Vec::with_capacity(blocks);
    let style = rng.u8(0..4);
    while out.len() < blocks {
        let n = rng.usize(1..=if style == 3 { 4000 } else { 150 });
        match rng.u8(0..10) {
            0..3 => out.resize(out.len() + n, 0),
            3..6 if style > 0 && !out.is_empty() => {
                let from = rng.usize(0..out.len());
                (from..from + n).for_each(|i| out.push(out[i]));
            }
            6 if style == 1 => {
                let content = rng.u64(1..9);
                out.resize(out.len() + n, content);
            }
            _ if style == 3 => out.resize(out.len() + n, 0),
            _ => out.extend((0..n).map(|_| rng.u64(100..))),
        }
    }
    out.truncate(blocks);
    out
}

/// A plan before it is resolved, as kept in the log.
#[derive(Clone)]
struct Record {
    batch: Arc<Batch>,
    runs: Vec<Run>,
}

/// What survives a crash.
struct Disk {
    part: Vec<u64>,
    /// Blocks written since the last sync, with their previous contents.
    unsynced: HashMap<u64, u64>,
    log: Vec<Record>,
    synced_records: usize,
    /// Other images, by number: they may be wrong, and may change.
    others: HashMap<u64, Vec<u64>>,
}

/// One simulated transfer, through all its sessions.
pub struct World {
    rng: Rng,
    image: Vec<u64>,
    /// The content of each data block, by compact index.
    compact: Vec<u64>,
    disk: Disk,
    crashes_left: u32,
    /// Answers come in the order of the requests.
    ordered_plans: bool,
    wrong: f64,
    /// Probability that another transfer does not deliver its blocks in time.
    never_comes: f64,
    /// Of how many steps one is a read of a machine that runs from the image; 0 if there is none.
    reads: u32,
    session: Session,
    /// Blocks that came ahead of their batches, as far as they were noted.
    ahead: HashSet<u64>,
    /// Blocks that came because they were wanted.
    pub given: u64,
    /// Blocks requested, over all sessions.
    pub asked: u64,
    pub counts: Counts,
    pub sessions: u32,
    pub invalid: u64,
    /// Groups whose proof was wrong although their short digests matched.
    pub disproved: u64,
}

/// State lost in a crash.
struct Session {
    source: Source,
    destination: Destination,
    walk_to: u64,
    walked: u64,
    end_sent: bool,
    to_destination: VecDeque<Event>,
    to_source: VecDeque<source::Event>,
    literals: Vec<Runs>,
    /// On the control connection.
    gives: Gives,
    /// What it is to send there, and whether a machine waits for it.
    to_give: HashMap<u64, bool>,
    wanted: HashSet<u64>,
    /// How often the source was told to send blocks ahead of others.
    hurried_times: HashMap<u64, u32>,
    questions: Vec<Arc<Batch>>,
    jobs: Vec<ReuseJob>,
    /// Plans whose batches are logged after earlier ones.
    unlogged: BTreeMap<u64, Record>,
    open: HashMap<u64, Arc<Batch>>,
    verified: Vec<bool>,
    asked: HashSet<u64>,
    acked: HashSet<u64>,
    restored: u64,
    done: bool,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let blocks = match rng.u8(0..10) {
            0 => rng.usize(0..3),
            1 => BATCH_BLOCKS as usize * rng.usize(1..4),
            2 => BATCH_BLOCKS as usize * rng.usize(97..260) + rng.usize(0..2000),
            _ => rng.usize(1..5 * BATCH_BLOCKS as usize),
        };
        let mut image = random_image(&mut rng, blocks);
        if blocks > 90 * BATCH_BLOCKS as usize {
            // A long image has little data, so that the test stays fast.
            let keep = rng.usize(20..60);
            (0..blocks)
                .filter(|i| i / 40 % keep != 0)
                .for_each(|i| image[i] = 0);
        }
        let compact: Vec<u64> = image.iter().copied().filter(|&c| c != 0).collect();
        // Data left by another transfer: zeros are written at once.
        let left = [0, 5, 10][rng.usize(0..3)];
        let part = image.iter().map(|&c| match rng.u8(0..10) {
            n if c == 0 || n >= left => 0,
            3 => c ^ TWIN,
            n if n % 3 == 0 => rng.u64(..),
            _ => c,
        });
        let disk = Disk {
            part: part.collect(),
            unsynced: HashMap::new(),
            log: Vec::new(),
            synced_records: 0,
            others: HashMap::new(),
        };
        let session = Session::new(blocks);
        let wrong = [0.0, 0.02, 0.5][rng.usize(0..3)];
        let never_comes = [0.0, 0.1, 0.9][rng.usize(0..3)];
        let mut world = World {
            crashes_left: rng.u32(0..4),
            ordered_plans: rng.bool(),
            wrong,
            never_comes,
            reads: [0, 0, 3, 50][rng.usize(0..4)],
            ahead: HashSet::new(),
            given: 0,
            rng,
            image,
            compact,
            disk,
            session,
            asked: 0,
            counts: Counts::default(),
            sessions: 0,
            invalid: 0,
            disproved: 0,
        };
        world.start();
        world
    }

    pub fn walk_blocks(&self) -> u64 {
        self.image.len() as u64
    }

    /// Runs until the source knows that the image was delivered.
    pub fn run(&mut self) {
        let mut steps = 0u64;
        while !self.session.done {
            steps += 1;
            assert!(steps < 5_000_000, "no end in sight");
            self.step();
        }
        assert!(self.disk.part == self.image, "delivered something else");
        self.counts = self.session.destination.counts();
        self.invalid = self.counts.matched.invalid;
    }

    fn step(&mut self) {
        if self.crashes_left > 0 && self.rng.u32(0..400) == 0 {
            self.crashes_left -= 1;
            return self.crash();
        }
        if self.rng.u32(0..100) == 0 {
            self.disk.unsynced.clear();
            self.disk.synced_records = self.disk.log.len();
        }
        if self.reads > 0 && !self.image.is_empty() && self.rng.u32(0..self.reads) == 0 {
            self.read();
        }
        let s = &mut self.session;
        let batches = (self.image.len() as u64).div_ceil(BATCH_BLOCKS);
        let can_walk = s.walked < s.walk_to.min(batches) || (s.walked == batches && !s.end_sent);
        let enabled = [
            can_walk,
            !s.to_destination.is_empty(),
            !s.to_source.is_empty(),
            !s.questions.is_empty(),
            !s.jobs.is_empty(),
            !s.literals.is_empty(),
            !s.gives.is_empty(),
        ];
        let choices: Vec<usize> = (0..7).filter(|&i| enabled[i]).collect();
        assert!(!choices.is_empty(), "stuck: nothing can happen any more");
        match choices[self.rng.usize(0..choices.len())] {
            0 if s.walked < batches => {
                let batch = batch_of(&self.image, s.walked);
                let event = source::Event::Walked {
                    index: s.walked,
                    frame: batch.encode(),
                };
                s.walked += 1;
                self.source(event);
            }
            0 => {
                s.end_sent = true;
                self.source(source::Event::WalkEnded(Some(WHOLE)));
            }
            1 => {
                let event = s.to_destination.pop_front().unwrap();
                self.destination(event);
            }
            2 => {
                let event = s.to_source.pop_front().unwrap();
                self.source(event);
            }
            3 => self.answer(),
            4 => self.carry_out(),
            5 => self.literal_arrives(),
            _ => self.given_arrives(),
        }
    }

    /// Starts a new session, resuming from the log and the partial file.
    fn start(&mut self) {
        self.sessions += 1;
        self.session = Session::new(self.image.len());
        let mut replan = Vec::new();
        let mut incomplete = 0;
        for n in 0..self.disk.log.len() {
            let record = self.disk.log[n].clone();
            let batch = record.batch.clone();
            let blocks: Vec<u64> = batch.data.iter().map(|i| batch.first_block() + i).collect();
            let wrong = self.wrong_groups(&batch);
            let mut missing = DataBits::new(blocks.len() as u64);
            let mut present = Vec::new();
            for (g, group) in blocks.chunks(PROOF_BLOCKS).enumerate() {
                let start = g * PROOF_BLOCKS;
                let bad = |i: &usize| !self.looks_right(group[*i], batch.digests[start + i]);
                let bad: Vec<usize> = (0..group.len()).filter(bad).collect();
                let all = bad.is_empty() && wrong.contains(&(g as u32));
                for (i, &block) in group.iter().enumerate() {
                    if all || bad.contains(&i) {
                        missing.set((start + i) as u64);
                    } else {
                        present.push(block);
                    }
                }
            }
            incomplete += u64::from(missing.count() > 0);
            if incomplete > WINDOW_BATCHES {
                self.disk.log.truncate(n);
                break;
            }
            present
                .iter()
                .for_each(|&b| self.session.verified[b as usize] = true);
            if missing.count() > 0 {
                self.session.open.insert(batch.index, batch.clone());
                replan.push((batch.index, record.runs));
            }
            let destination = &mut self.session.destination;
            destination.restore(batch, missing).unwrap();
        }
        let next = self.session.destination.next_batch();
        let (part, image) = (&self.disk.part, &self.image);
        self.ahead
            .retain(|b| b / BATCH_BLOCKS >= next && part[*b as usize] == image[*b as usize]);
        let mut there: [HashMap<u64, DataBits>; 2] = Default::default();
        for block in &self.ahead {
            let of = &mut there[usize::from(image[*block as usize] == 0)];
            let bits = of.entry(block / BATCH_BLOCKS);
            let bits = bits.or_insert_with(|| DataBits::new(BATCH_BLOCKS));
            bits.set(block % BATCH_BLOCKS);
        }
        let [data, zero] = there;
        self.session.destination.restore_ahead(data, zero);
        self.disk.synced_records = self.disk.log.len();
        self.session.restored = incomplete;
        let accept = Accept {
            resume_batch: self.session.destination.next_batch(),
            resumed_blocks: self.session.destination.counts().resumed_blocks,
            open_batches: self.session.destination.open_batches() as u64,
        };
        let accepted = source::Event::Accepted(accept);
        match self.rng.bool() {
            true => self.source(accepted),
            // The source sends ahead without knowing.
            false => {
                self.session.walk_to = source::FIRST_WINDOW;
                self.session.to_source.push_back(accepted);
            }
        }
        for (index, runs) in replan {
            self.destination(Event::Planned { index, runs });
        }
    }

    fn looks_right(&self, block: u64, short: Digest) -> bool {
        digest_of(self.disk.part[block as usize]).short() == short
    }

    /// The groups of a batch's data blocks whose proofs do not match.
    fn wrong_groups(&self, batch: &Batch) -> Vec<u32> {
        let digest = |i: u64| digest_of(self.disk.part[(batch.first_block() + i) as usize]);
        let found = proofs_of(&batch.data.iter().map(digest).collect::<Vec<_>>());
        let pairs = batch.proofs.iter().zip(&found).zip(0..);
        pairs.filter(|((a, b), _)| a != b).map(|(_, g)| g).collect()
    }

    /// A power failure: of unsynced data, some is present, some is lost, and some is garbage.
    fn crash(&mut self) {
        for (block, before) in self.disk.unsynced.drain() {
            match self.rng.u8(0..4) {
                0 => self.disk.part[block as usize] = before,
                1 => self.disk.part[block as usize] = self.rng.u64(1..50),
                2 if self.rng.u8(0..8) == 0 => self.disk.part[block as usize] ^= TWIN,
                _ => {}
            }
        }
        let kept = self
            .rng
            .usize(self.disk.synced_records..=self.disk.log.len());
        self.disk.log.truncate(kept);
        for other in self.disk.others.values_mut() {
            if self.rng.u8(0..4) == 0 {
                other.clear();
            }
        }
        self.start();
    }

    fn source(&mut self, event: source::Event) {
        let mut actions = Vec::new();
        let machine = &mut self.session.source;
        machine.handle(event, &mut actions).expect("a legal event");
        for action in actions {
            let s = &mut self.session;
            match action {
                source::Action::WalkTo(batch) => {
                    let first = (0..).find(|i| !s.acked.contains(i)).unwrap();
                    let resume = s.destination.next_batch().max(first);
                    assert!(batch <= resume + WINDOW_BATCHES, "beyond the window");
                    s.walk_to = batch;
                }
                source::Action::Batch(frame) => {
                    let batch = Batch::decode(&frame).unwrap();
                    s.to_destination.push_back(Event::Batch(Arc::new(batch)));
                }
                source::Action::End(digest) => s.to_destination.push_back(Event::End(digest)),
                source::Action::Skip(_) => unreachable!("it is not told what to skip"),
                source::Action::Give(want) => {
                    s.note_to_give(want.waited, want.runs.blocks());
                    s.gives.give(&want).unwrap();
                }
                source::Action::GiveQueued(want) => {
                    let hurried: HashSet<u64> = want.runs.blocks().collect();
                    let mut back = Vec::new();
                    for frame in &mut s.literals {
                        let (now, later) = frame.blocks().partition(|b| hurried.contains(b));
                        let now: Vec<u64> = now;
                        back.extend(now);
                        let later: Vec<u64> = later;
                        *frame = later.into_iter().collect();
                    }
                    s.literals.retain(|frame| !frame.is_empty());
                    back.sort_unstable();
                    s.hurried(&want, back);
                }
                source::Action::Literals(runs) => split(&mut self.rng, &runs, &mut s.literals),
                source::Action::Done(_) => s.done = true,
            }
        }
    }

    fn destination(&mut self, event: Event) {
        let mut actions = Vec::new();
        let machine = &mut self.session.destination;
        machine.handle(event, &mut actions).expect("a legal event");
        let open = machine.open_batches() as u64;
        assert!(open <= WINDOW_BATCHES + self.session.restored);
        if open < 8 {
            let coming = machine.open.values().map(|open| {
                let missing = open.missing.iter();
                missing.filter(|i| open.asked.get(*i)).count() as u64
            });
            assert_eq!(coming.sum::<u64>(), machine.coming());
        }
        actions.into_iter().for_each(|action| self.act(action));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Match(batch) if batch.digests.is_empty() => self.log(batch, Vec::new()),
            Action::Match(batch) => {
                self.session.open.insert(batch.index, batch.clone());
                self.session.questions.push(batch);
            }
            Action::Reuse(job) => {
                let s = &mut self.session;
                let places: Vec<u64> = job.batch.data.iter().collect();
                for (start, run) in &job.runs {
                    for i in *start..*start + run.count {
                        let block = job.batch.first_block() + places[i as usize];
                        assert!(!s.verified[block as usize], "{block} is in place");
                        assert!(!s.asked.contains(&block), "{block} was asked for");
                        assert!(!s.wanted.contains(&block), "{block} is on its way");
                    }
                    if let From::Own { first } = run.from {
                        for n in 0..u64::from(run.count) {
                            let from = s.destination.map().walk_of(first + n);
                            let from = from.expect("a block that came").0;
                            // Or it was until its proof failed: the proof here will fail too.
                            let was = s.verified[from as usize] || self.disproved > 0;
                            assert!(was, "{from} is not verified");
                        }
                    }
                    assert!(run.from != From::Literal);
                }
                s.jobs.push(job);
            }
            Action::Need(need) => {
                let need = Need::decode(&need.encode()).unwrap();
                for block in need.runs.blocks() {
                    assert!(self.image[block as usize] != 0, "{block} is zero");
                    assert!(!self.session.verified[block as usize], "{block} is there");
                    assert!(
                        !self.session.wanted.contains(&block),
                        "{block} is on its way"
                    );
                    assert!(self.session.asked.insert(block), "{block} asked for twice");
                    self.asked += 1;
                }
                self.session.to_source.push_back(source::Event::Need(need));
            }
            Action::Want(want) => {
                let want = Want::decode(&want.encode()).unwrap();
                for block in want.runs.blocks() {
                    let s = &mut self.session;
                    assert!(block / BATCH_BLOCKS >= s.destination.next_batch());
                    assert!(s.wanted.insert(block), "{block} wanted twice");
                }
                self.session.to_source.push_back(source::Event::Want(want));
            }
            Action::Hurry(hurry) => {
                for block in hurry.runs.blocks() {
                    let s = &mut self.session;
                    assert!(s.asked.contains(&block) || s.wanted.contains(&block));
                    let times = s.hurried_times.entry(block).or_default();
                    *times += 1;
                    assert!(*times <= 3, "{block} is hurried for ever");
                }
                self.session
                    .to_source
                    .push_back(source::Event::Hurry(hurry));
            }
            Action::Changed(block) => panic!("{block} has not changed"),
            Action::Prove(index) => {
                let batch = self.session.open[&index].clone();
                let wrong = self.wrong_groups(&batch);
                let blocks: Vec<u64> = batch.data.iter().map(|i| batch.first_block() + i).collect();
                for &g in &wrong {
                    let group = blocks.chunks(PROOF_BLOCKS).nth(g as usize).unwrap();
                    let s = &mut self.session;
                    for block in group.iter().filter(|b| !s.asked.contains(b)) {
                        s.verified[*block as usize] = false;
                    }
                }
                self.disproved += wrong.len() as u64;
                self.destination(Event::Proved { index, wrong });
            }
            Action::Complete(index) => {
                let s = &mut self.session;
                s.open.remove(&index);
                let batch = batch_of(&self.image, index);
                let mut blocks = batch.data.iter().map(|i| batch.first_block() + i);
                assert!(blocks.all(|b| s.verified[b as usize]));
                let start = batch.first_block() as usize;
                let range = start..start + batch.data.blocks() as usize;
                assert!(self.disk.part[range.clone()] == self.image[range]);
                assert!(s.acked.insert(index), "acknowledged twice");
                s.to_source.push_back(source::Event::Ack(index));
            }
            Action::Finish(digest) => {
                let delivered = Delivered {
                    digest: digest.expect("all was read"),
                    ..Delivered::default()
                };
                let event = source::Event::Delivered(delivered);
                self.session.to_source.push_back(event);
            }
        }
    }

    /// Logs a batch after those before it.
    fn log(&mut self, batch: Arc<Batch>, runs: Vec<Run>) {
        let unlogged = &mut self.session.unlogged;
        unlogged.insert(batch.index, Record { batch, runs });
        while let Some(record) = unlogged.remove(&(self.disk.log.len() as u64)) {
            self.disk.log.push(record);
        }
    }

    /// The matcher answers one request.
    fn answer(&mut self) {
        let at = match self.ordered_plans {
            true => 0,
            false => self.rng.usize(0..self.session.questions.len()),
        };
        let batch = self.session.questions.remove(at);
        let runs = self.plan(&batch);
        self.log(batch.clone(), runs.clone());
        let index = batch.index;
        // What came ahead is found by comparing.
        let came = self.ahead.iter().any(|b| b / BATCH_BLOCKS == batch.index);
        if came || self.rng.bool() {
            self.compare(&batch);
        }
        self.destination(Event::Planned { index, runs });
    }

    /// Compares a batch with the partial file.
    fn compare(&mut self, batch: &Batch) {
        let mut blocks = DataBits::new(batch.digests.len() as u64);
        for (i, place) in batch.data.iter().enumerate() {
            let block = batch.first_block() + place;
            if self.looks_right(block, batch.digests[i]) {
                blocks.set(i as u64);
                self.session.verified[block as usize] = true;
            }
        }
        let index = batch.index;
        let by = match self.rng.bool() {
            true => KeptBy::Session,
            false => KeptBy::OldCopy,
        };
        self.destination(Event::Kept { index, blocks, by });
    }

    fn plan(&mut self, batch: &Batch) -> Vec<Run> {
        let mut out = Vec::new();
        let before = self.session.destination.map().first_data_of(batch.index).0 as usize;
        let end = before + batch.digests.len();
        let mut at = before;
        let longest = [3, 60, 3000][self.rng.usize(0..3)];
        while at < end {
            let count = self.rng.usize(1..=longest).min(end - at);
            let (count, from) = match self.rng.u8(0..8) {
                0..2 => (count, From::Literal),
                2..4 => (count, self.elsewhere(at, count)),
                4..7 => self.own(at, count),
                // Anything at all: itself, a later block, or a nonexistent one.
                _ => {
                    let first = self.rng.u64(0..2 * self.compact.len() as u64 + 5);
                    (
                        count,
                        From::Own {
                            first: CompactIndex(first),
                        },
                    )
                }
            };
            let via = match from {
                From::Literal => Via::Literal,
                _ => [Via::C0, Via::C1, Via::C2, Via::Anchor, Via::Aligned][self.rng.usize(0..5)],
            };
            out.push(Run {
                count: count as u32,
                from,
                via,
            });
            at += count;
        }
        out
    }

    /// Another image, or the sequence cache, has these blocks or claims to.
    fn elsewhere(&mut self, at: usize, count: usize) -> From {
        let (which, is_image) = (self.rng.u64(0..6), self.rng.bool());
        let other = self.disk.others.entry(which).or_default();
        let first = other.len() as u64;
        for &content in &self.compact[at..at + count] {
            let wrong = self.rng.f64() < self.wrong;
            other.push(match self.rng.u8(0..9) {
                _ if !wrong => content,
                0 => content ^ TWIN,
                _ => self.rng.u64(..),
            });
        }
        match is_image {
            true => From::Image {
                image: ImageId(which),
                first: CompactIndex(first),
            },
            false => From::Sequence {
                first: which << 32 | first,
            },
        }
    }

    /// An earlier, equal run of the image, if a short search finds one.
    fn own(&mut self, at: usize, count: usize) -> (usize, From) {
        let start = self.rng.usize(0..=at);
        let found = (start..at.min(start + 500)).find(|&i| self.compact[i] == self.compact[at]);
        let Some(first) = found else {
            return (count, From::Literal);
        };
        let same = (0..count).take_while(|i| self.compact[first + i] == self.compact[at + i]);
        let mut n = same.count();
        if self.rng.f64() < self.wrong {
            n = count;
        }
        let first = CompactIndex(first as u64);
        (n, From::Own { first })
    }

    /// A reuse worker handles a job: copies, then verifies.
    fn carry_out(&mut self) {
        let at = self.rng.usize(0..self.session.jobs.len());
        let job = self.session.jobs.swap_remove(at);
        if self.rng.f64() < self.never_comes {
            return self.destination(Event::NotComing(job));
        }
        let places: Vec<u64> = job.batch.data.iter().collect();
        let mut failed = Vec::new();
        for (start, run) in &job.runs {
            for n in 0..run.count {
                let i = start + n;
                let content = match run.from {
                    From::Own { first } => {
                        let map = self.session.destination.map();
                        let walk = map.walk_of(first + u64::from(n)).unwrap().0;
                        Some(self.disk.part[walk as usize])
                    }
                    From::Image { image, first } => self.other(image.0, first.0 + u64::from(n)),
                    From::Sequence { first } => {
                        self.other(first >> 32, (first & u64::from(u32::MAX)) + u64::from(n))
                    }
                    From::Literal => unreachable!(),
                };
                let block = job.batch.first_block() + places[i as usize];
                if let Some(content) = content {
                    self.write(block, content);
                }
                if self.looks_right(block, job.batch.digests[i as usize]) {
                    self.session.verified[block as usize] = true;
                } else {
                    failed.push(i);
                }
            }
        }
        self.destination(Event::Reused { job, failed });
    }

    fn other(&self, which: u64, at: u64) -> Option<u64> {
        let other = self.disk.others.get(&which)?;
        other.get(usize::try_from(at).ok()?).copied()
    }

    fn write(&mut self, block: u64, content: u64) {
        let before = std::mem::replace(&mut self.disk.part[block as usize], content);
        self.disk.unsynced.entry(block).or_insert(before);
    }

    /// A data connection's frame arrives and is verified as in a real data connection.
    fn literal_arrives(&mut self) {
        let at = self.rng.usize(0..self.session.literals.len());
        let runs = self.session.literals.swap_remove(at);
        for block in runs.blocks() {
            let index = block / BATCH_BLOCKS;
            let batch = self.session.open.get(&index).expect("an open batch");
            assert!(batch.data.get(block % BATCH_BLOCKS));
            let content = self.image[block as usize];
            self.write(block, content);
            self.session.verified[block as usize] = true;
        }
        self.destination(Event::Written(runs));
    }
}

impl Session {
    fn new(blocks: usize) -> Self {
        Session {
            source: Source::new(blocks as u64),
            destination: Destination::new(blocks as u64),
            walk_to: 0,
            walked: 0,
            end_sent: false,
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            literals: Vec::new(),
            gives: Gives::default(),
            to_give: HashMap::new(),
            wanted: HashSet::new(),
            hurried_times: HashMap::new(),
            questions: Vec::new(),
            jobs: Vec::new(),
            unlogged: BTreeMap::new(),
            open: HashMap::new(),
            verified: vec![false; blocks],
            asked: HashSet::new(),
            acked: HashSet::new(),
            restored: 0,
            done: false,
        }
    }
}

/// Splits blocks into the frames of several data connections.
fn split(rng: &mut Rng, runs: &Runs, out: &mut Vec<Runs>) {
    let mut frames = vec![Runs::default(); rng.usize(1..4)];
    let longest = [1, 20, 256][rng.usize(0..3)];
    for (mut first, mut left) in runs.iter() {
        while left > 0 {
            let n = rng.u64(1..=longest).min(left);
            let at = rng.usize(0..frames.len());
            frames[at].push(first, n);
            (first, left) = (first + n, left - n);
            if rng.bool() {
                out.push(std::mem::take(&mut frames[at]));
            }
        }
    }
    out.extend(frames);
    out.retain(|f| !f.is_empty());
}
