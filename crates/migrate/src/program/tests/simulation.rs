//! Whole moves of a program, with its data: rounds while it writes, the hand-over, and what follows while it writes there; the
//! processes of both ends die, and their connections break, between any two steps.
//!
//! The two ends are their state machines, the records, [`Blocks`], [`Transfer`] and the stages of its targets; what the drivers
//! do around them is done here in steps that a seed chooses, each connection being a queue. A plain model has all that the
//! program was told is written.

mod end;
mod leaving;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::MemoryDevice;
use drover_net::Frame;
use drover_store::machine::{MachineRecord, Move, Other, Seed, Token};
use fastrand::Rng;

use crate::protocol::{Answer, Ask, OpenMove};
use end::There;
use leaving::Here;

const BLOCK: usize = super::super::protocol::BLOCK as usize;

/// Of its memory, which dies with the process, and of its disk, which does not.
const SIZES: [usize; 2] = [12 * BLOCK, 9 * BLOCK + 512];

const SEED: Seed = Seed([9; 16]);

fn other(n: u8) -> Other {
    Other {
        key: [n; 32],
        name: format!("process{n}"),
    }
}

/// What is carried by a connection.
#[derive(Clone, Debug)]
enum Said {
    Open(OpenMove),
    Opened(Answer),
    Ask(Ask),
    Answer(Answer),
    Frame(Frame),
    Flushed,
    Want(usize, Range<u64>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Talk,
    Pages,
    Fetches,
}

/// A connection.
struct Link {
    kind: Kind,
    there: VecDeque<Said>,
    back: VecDeque<Said>,
    /// The seeder's end is closed; what was sent before may arrive still.
    is_closed: bool,
    /// Its own.
    number: u64,
    /// The copy that it brings.
    copy: u64,
}

/// All of the program's bytes, as it was told that they are written.
type Model = [Vec<u8>; 2];

#[derive(Default)]
struct Seen {
    /// Bytes that were asked for, and written there, before they had arrived.
    asked: u64,
    overwritten: u64,
    /// Moves with and without something left when it was taken.
    in_part: u64,
    whole: u64,
}

struct World {
    rng: Rng,
    /// The records, as they are durable.
    records: [Option<MachineRecord>; 2],
    here: Option<Here>,
    there: Option<There>,
    /// The program's disk, at its first place.
    disk: Arc<MemoryDevice>,
    /// The one at its next place, of the move that was taken.
    disk_there: Option<Arc<MemoryDevice>>,
    links: Vec<Link>,
    model: Model,
    numbers: u64,
    /// Of 100 actions, how many a crash interrupts.
    crashes: u8,
    /// Whether a process has died, or given up, while what the other one had was not whole.
    may_lack: bool,
    seen: Seen,
    trace: Vec<String>,
}

fn content(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0; device.size() as usize];
    device.read(0, &mut bytes).unwrap();
    bytes
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut model = SIZES.map(|size| vec![0; size]);
        rng.fill(&mut model[1][..3 * BLOCK]);
        let mut world = Self {
            rng,
            records: [None, None],
            here: None,
            there: None,
            disk: Arc::new(MemoryDevice::from_bytes(&model[1])),
            disk_there: None,
            links: Vec::new(),
            model,
            numbers: 0,
            crashes: 0,
            may_lack: false,
            seen: Seen::default(),
            trace: Vec::new(),
        };
        world.start_here();
        world.start_there();
        world
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn token(&mut self) -> Token {
        let mut token = [0; 16];
        token[..8].copy_from_slice(&self.number().to_le_bytes());
        Token(token)
    }

    fn note(&mut self, what: String) {
        self.trace.push(what);
    }

    /// Whether a process dies before its next action.
    fn is_struck(&mut self) -> bool {
        self.rng.u8(0..100) < self.crashes
    }

    fn keep(&mut self, end: usize, record: MachineRecord) {
        let what = match &record.under_way {
            None => "nothing under way",
            Some(Move::Leaving(..)) => "leaving",
            Some(Move::Committed(..)) => "committed",
            Some(Move::Coming(..)) => "coming",
            Some(Move::Taken(..)) => "taken",
            Some(Move::Partial(..)) => "taken in part",
        };
        self.note(format!(
            "{end} keeps: {what}, may run: {}",
            record.may_run()
        ));
        self.records[end] = Some(record);
        let [here, there] = &self.records;
        let may_run =
            |record: &Option<MachineRecord>| record.as_ref().is_some_and(MachineRecord::may_run);
        assert!(
            !(may_run(here) && may_run(there)),
            "two have it\n{}",
            self.trace.join("\n")
        );
    }

    fn link(&mut self, kind: Kind) -> Option<&mut Link> {
        let mut links = self.links.iter_mut();
        links.find(|link| link.kind == kind && !link.is_closed)
    }

    fn send(&mut self, kind: Kind, said: Said) {
        if let Some(link) = self.link(kind) {
            link.there.push_back(said);
        }
    }

    /// The seeder hangs up, or notices that the connection broke: some of what is on its way arrives still.
    fn close(&mut self, kind: Kind) {
        let is_reset = self.rng.bool();
        let keep = self.rng.usize(..8);
        if let Some(link) = self.link(kind) {
            link.is_closed = true;
            if is_reset {
                link.there.truncate(keep);
            }
        }
    }

    fn close_all(&mut self) {
        for kind in [Kind::Talk, Kind::Pages, Kind::Fetches] {
            self.close(kind);
        }
    }

    /// The program writes; returns what is about to be written.
    fn draw(&mut self) -> (usize, usize, Vec<u8>) {
        let part = self.rng.usize(..2);
        let length = match self.rng.u8(..4) {
            0 => BLOCK,
            1 => 2 * BLOCK,
            _ => 512 * self.rng.usize(1..6),
        };
        let at = self.rng.usize(..=(SIZES[part] - length) / 512) * 512;
        let at = if length % BLOCK == 0 {
            at / BLOCK * BLOCK
        } else {
            at
        };
        let byte = if self.rng.u8(..4) == 0 {
            0
        } else {
            self.rng.u8(1..)
        };
        (part, at, vec![byte; length])
    }

    /// One step in which nothing fails.
    fn step(&mut self) {
        match self.rng.u8(..8) {
            0 => self.writes_here(),
            1 => self.uses_there(),
            2 | 3 => self.goes_on_here(),
            4 => self.ran(),
            5 => self.deliver_back(),
            _ => self.deliver_there(),
        }
    }

    fn fault(&mut self) {
        match self.rng.u8(..8) {
            0 => self.close_all(),
            1 => self.close(Kind::Talk),
            2 | 3 => self.close(Kind::Pages),
            4 => self.close(Kind::Fetches),
            5 => self.dies_here(),
            6 => self.dies_there(),
            _ => self.is_given_up(),
        }
    }

    /// Hands the next message of a connection to the leecher.
    fn deliver_there(&mut self) {
        if self.links.is_empty() {
            return;
        }
        let n = self.rng.usize(..self.links.len());
        let kind = self.links[n].kind;
        // One connection of a kind at a time brings bytes.
        let n = self.links.iter().position(|link| link.kind == kind);
        let n = n.expect("a connection");
        let (number, copy) = (self.links[n].number, self.links[n].copy);
        match self.links[n].there.pop_front() {
            Some(said) => {
                self.note(format!("there {kind:?} {number}: {}", brief(&said)));
                if let Some(later) = self.hear_there(number, copy, said) {
                    // It waits, and what is behind it.
                    let mut links = self.links.iter_mut();
                    if let Some(link) = links.find(|link| link.number == number) {
                        link.there.push_front(later);
                    }
                }
            }
            None if self.links[n].is_closed => {
                self.links.remove(n);
                if kind == Kind::Pages {
                    self.hung_up(copy);
                }
            }
            None => {}
        }
    }

    fn reply(&mut self, number: u64, said: Said) {
        let mut links = self.links.iter_mut();
        if let Some(link) = links.find(|link| link.number == number && !link.is_closed) {
            link.back.push_back(said);
        }
    }

    /// Hands the next message of a connection to the seeder.
    fn deliver_back(&mut self) {
        let kind = [Kind::Talk, Kind::Pages, Kind::Fetches][self.rng.usize(..3)];
        let said = self.link(kind).and_then(|link| link.back.pop_front());
        if let Some(said) = said {
            self.note(format!("back: {}", brief(&said)));
            self.hear_here(said);
        }
    }

    /// Ends without faults, with both processes up.
    fn heals(&mut self) -> bool {
        self.crashes = 0;
        for _ in 0..20_000 {
            if self.here.is_none() && !self.has_left() {
                self.start_here();
            }
            if self.there.is_none() {
                self.start_there();
            }
            self.step();
            if self.is_settled() {
                return true;
            }
        }
        false
    }

    fn is_settled(&self) -> bool {
        let is_over = |record: &Option<MachineRecord>| {
            record
                .as_ref()
                .is_none_or(|record| record.under_way.is_none() || record.is_partial())
        };
        let is_moving = self.here.as_ref().is_some_and(Here::is_moving);
        let is_coming = self.there.as_ref().is_some_and(There::is_under_way);
        !is_moving && !is_coming && is_over(&self.records[0])
    }

    /// Whether the program is at its next place, and this end has done all it has to.
    fn has_left(&self) -> bool {
        let record = self.records[0].as_ref();
        record.is_some_and(|record| record.under_way.is_none() && !record.may_run())
    }

    fn owns(&self, end: usize) -> bool {
        match &self.records[end] {
            Some(record) => record.may_run(),
            None => end == 0,
        }
    }

    /// Exactly one has it, with every write that the program was told of.
    fn check(&self, seed: u64) -> &'static str {
        let trace = || self.trace.join("\n");
        let (here, there) = (self.owns(0), self.owns(1));
        assert!(here != there, "seed {seed}: one has it\n{}", trace());
        if here {
            let process = self.here.as_ref().expect("it is up");
            assert!(process.runs(), "seed {seed}: it does not run\n{}", trace());
            for (part, found) in process.content().into_iter().enumerate() {
                assert!(
                    found == self.model[part],
                    "seed {seed}: {part}\n{}",
                    trace()
                );
            }
            return "stayed";
        }
        if self.records[1]
            .as_ref()
            .is_some_and(MachineRecord::is_partial)
        {
            assert!(
                self.may_lack,
                "seed {seed}: it lacks something\n{}",
                trace()
            );
            return "lost";
        }
        let process = self.there.as_ref().expect("it is up");
        match process.content() {
            Some(all) => {
                for (part, found) in all.into_iter().enumerate() {
                    assert!(
                        found == self.model[part],
                        "seed {seed}: {part}\n{}",
                        trace()
                    );
                }
                "moved"
            }
            // Started again from its disk.
            None => {
                let disk = self.disk_there.as_ref().expect("it came with a disk");
                assert!(
                    content(disk) == self.model[1],
                    "seed {seed}: its disk\n{}",
                    trace()
                );
                "restarted"
            }
        }
    }
}

fn brief(said: &Said) -> String {
    match said {
        Said::Frame(frame) => format!("frame {:#x} of {} bytes", frame.kind, frame.payload.len()),
        Said::Open(offer) => format!("open {}", offer.token.0[0]),
        said => format!("{said:?}"),
    }
}

fn program() -> ImageName {
    ImageName::new("program").unwrap()
}

/// Says which seed failed.
struct Running(u64);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with DROVER_SIM_SEED={}", self.0);
        }
    }
}

/// `DROVER_SIM_SEED` runs one seed, `DROVER_SIM_SEEDS` the given number of seeds.
fn seeds() -> Range<u64> {
    let var = |name| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match var("DROVER_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..var("DROVER_SIM_SEEDS").unwrap_or(4000),
    }
}

#[test]
fn one_has_it_with_every_write_whatever_dies() {
    let mut ends = std::collections::BTreeMap::<&str, u64>::new();
    let mut seen = Seen::default();
    for seed in seeds() {
        let _seed = Running(seed);
        let mut world = World::new(seed);
        let steps = world.rng.usize(50..1500);
        let faults = match world.rng.u8(..3) {
            0 => 0,
            _ => world.rng.u8(0..30),
        };
        // Early and late ones.
        let from = world.rng.usize(..steps);
        for step in 0..steps {
            if step == from {
                world.crashes = world.rng.u8(..=faults);
            }
            match step >= from && world.rng.u8(..200) < faults {
                true => world.fault(),
                false => world.step(),
            }
        }
        assert!(
            world.heals(),
            "seed {seed}: it does not end: {:?}\n{}",
            world.records,
            world.trace.join("\n")
        );
        *ends.entry(world.check(seed)).or_default() += 1;
        seen.asked += world.seen.asked;
        seen.overwritten += world.seen.overwritten;
        seen.in_part += world.seen.in_part;
        seen.whole += world.seen.whole;
    }
    if seeds().count() >= 4000 {
        let of = |end| ends.get(end).copied().unwrap_or_default();
        assert!(
            of("moved") > 1000 && of("stayed") > 100 && of("lost") > 20 && of("restarted") > 20,
            "too easy: {ends:?}"
        );
        assert!(
            seen.asked > 1000 && seen.overwritten > 1000 && seen.in_part > 500 && seen.whole > 500,
            "too easy: {} {} {} {}",
            seen.asked,
            seen.overwritten,
            seen.in_part,
            seen.whole
        );
    }
}
