//! Hand-overs between two simulated sites whose processes, hypervisors and link die at any step. Whatever happens, never
//! may both run the machine, and once all is well again exactly one does, with all of it. If the destination is lost for good, a
//! person breaks a move that is committed, and the source has the machine.

use std::collections::VecDeque;

use drover_core::ImageName;
use drover_net::PeerKey;
use drover_store::machine::{Generation, MachineRecord, Move, Other, Owner, Seed, Token};
use fastrand::Rng;

use crate::leecher::{self, Leecher};
use crate::protocol::{Answer, Ask, Kind, OpenMove};
use crate::seeder::{self, End, Seeder};

const SEED: Seed = Seed([7; 16]);

fn other(n: u8) -> Other {
    Other {
        key: PeerKey([n; 32]).0,
        name: format!("site{n}"),
    }
}

#[derive(Clone, Debug)]
enum Message {
    Open(OpenMove),
    Opened(Answer),
    /// The copy begins, and is complete.
    Copying,
    All,
    Arrived,
    Ask(Ask),
    Answer(Answer),
}

/// The site that has the machine.
struct Source {
    disk: MachineRecord,
    process: Option<Seeder>,
    runs: bool,
    opened: bool,
    copying: bool,
    ended: Option<End>,
}

/// The site that it goes to.
struct Destination {
    disk: Option<MachineRecord>,
    process: Option<Leecher>,
    /// The hypervisor has all of the machine.
    has_all: bool,
    runs: bool,
}

struct World {
    rng: Rng,
    source: Source,
    destination: Destination,
    linked: bool,
    /// The destination will never be back.
    lost: bool,
    /// A person has ended a move for that.
    broken: bool,
    there: VecDeque<Message>,
    back: VecDeque<Message>,
    tokens: u8,
    /// Of 200 actions, how many a crash interrupts.
    crashes: u8,
    trace: Vec<String>,
}

impl World {
    fn new(seed: u64) -> World {
        let disk = MachineRecord::new(SEED, Vec::new());
        World {
            rng: Rng::with_seed(seed),
            source: Source {
                disk,
                process: None,
                runs: true,
                opened: false,
                copying: false,
                ended: None,
            },
            destination: Destination {
                disk: None,
                process: None,
                has_all: false,
                runs: false,
            },
            linked: false,
            lost: false,
            broken: false,
            there: VecDeque::new(),
            back: VecDeque::new(),
            tokens: 0,
            crashes: 0,
            trace: Vec::new(),
        }
    }

    fn seeder(&mut self, event: seeder::Event) {
        let mut actions = Vec::new();
        if let Some(process) = &mut self.source.process {
            process.handle(event, &mut actions);
        }
        self.do_seeder(actions);
    }

    fn do_seeder(&mut self, actions: Vec<seeder::Action>) {
        for action in actions {
            if self.rng.u8(0..200) < self.crashes {
                return self.crash_source();
            }
            self.trace.push(format!("source: {action:?}"));
            match action {
                seeder::Action::Copy => {
                    // A machine that was paused for an earlier attempt runs on.
                    assert!(self.source.disk.may_run());
                    self.source.runs = true;
                    self.source.copying = true;
                    self.send(Message::Copying);
                }
                seeder::Action::Keep(record) => self.source.disk = record,
                seeder::Action::Ask(ask) => self.send(Message::Ask(ask)),
                seeder::Action::Resume => {
                    assert!(self.source.disk.may_run());
                    self.source.runs = true;
                }
                seeder::Action::Release => {
                    // What is left follows first, or the process dies in the middle of it.
                    if self.lacks() && self.rng.u8(0..4) > 0 {
                        self.leecher(leecher::Event::Whole);
                    }
                    if self.lacks() {
                        return self.crash_source();
                    }
                    self.source.runs = false;
                }
                seeder::Action::End(end) => {
                    self.source.ended = Some(end);
                    self.cut();
                    self.source.process = None;
                }
            }
        }
    }

    fn send(&mut self, message: Message) {
        if self.linked && self.source.opened {
            self.there.push_back(message);
        }
    }

    fn leecher(&mut self, event: leecher::Event) {
        let mut actions = Vec::new();
        if let Some(process) = &mut self.destination.process {
            process.handle(event, &mut actions);
        }
        self.do_leecher(actions, false);
    }

    fn do_leecher(&mut self, actions: Vec<leecher::Action>, opening: bool) {
        let mut runs = false;
        for action in actions {
            if self.rng.u8(0..200) < self.crashes {
                return self.crash_destination();
            }
            self.trace.push(format!("destination: {action:?}"));
            match action {
                leecher::Action::Keep(record) => self.destination.disk = Some(record),
                leecher::Action::Run => {
                    assert!(self.destination.disk.as_ref().unwrap().may_run());
                    self.destination.runs = true;
                    runs = true;
                }
                leecher::Action::Discard => self.destination.has_all = false,
                leecher::Action::Answer(answer) => match opening {
                    true => self.reply(Message::Opened(answer)),
                    false => self.reply(Message::Answer(answer)),
                },
            }
        }
        if runs {
            self.leecher(leecher::Event::Running);
        }
    }

    /// What the destination has recorded, unless that is lost.
    fn there(&self) -> Option<&MachineRecord> {
        self.destination.disk.as_ref().filter(|_| !self.lost)
    }

    /// Whether the destination has taken the machine, and not all of it.
    fn lacks(&self) -> bool {
        self.there().is_some_and(MachineRecord::is_partial)
    }

    fn lose_destination(&mut self) {
        self.trace.push("destination: lost for good".into());
        self.cut();
        self.lost = true;
        self.destination.process = None;
        (self.destination.has_all, self.destination.runs) = (false, false);
    }

    /// A person breaks a committed move, as `source::broken` does it; that process may die, too.
    fn break_move(&mut self) {
        let Some(Move::Committed(token, _)) = self.source.disk.under_way else {
            return;
        };
        // The command that moves it is stopped first.
        self.crash_source();
        self.trace.push("source: broken".into());
        self.source.disk = self.source.disk.thaw(token).unwrap();
        self.broken = true;
        if self.rng.u8(0..200) >= self.crashes {
            assert!(self.source.disk.may_run());
            self.source.runs = true;
            self.source.disk = self.source.disk.stay(token).unwrap();
        }
    }

    fn reply(&mut self, message: Message) {
        if self.linked {
            self.back.push_back(message);
        }
    }

    fn cut(&mut self) {
        self.linked = false;
        self.source.opened = false;
        self.source.copying = false;
        self.there.clear();
        self.back.clear();
    }

    /// A process starts with what its disk has. A person, or the site, continues what is under way.
    fn start_source(&mut self) {
        let mut actions = Vec::new();
        self.tokens += 1;
        let token = Token([self.tokens; 16]);
        let machine = self.source.disk.clone();
        if machine.owner != Owner::Here {
            return;
        }
        let seeder = Seeder::start(&machine, token, other(2), &mut actions).unwrap();
        self.source.process = Some(seeder);
        self.source.ended = None;
        self.do_seeder(actions);
    }

    fn start_destination(&mut self) {
        let mut actions = Vec::new();
        let Some(machine) = self.there() else {
            return;
        };
        self.destination.process = Leecher::restart(machine, &mut actions);
        self.do_leecher(actions, false);
        if self.destination.has_all {
            self.leecher(leecher::Event::Ready);
        }
    }

    fn connect(&mut self) {
        let Some(process) = self.source.process.as_ref().filter(|_| !self.lost) else {
            return;
        };
        self.linked = true;
        let offer = OpenMove {
            kind: Kind::Machine,
            token: process.token(),
            machine: ImageName::new("web").unwrap(),
            seed: SEED,
            generation: Generation(0),
            disks: Vec::new(),
            memory_bytes: 1,
            mounted: Vec::new(),
        };
        self.there.push_back(Message::Open(offer));
    }

    fn deliver_there(&mut self) {
        let Some(message) = self.there.pop_front() else {
            return;
        };
        self.trace.push(format!("there: {message:?}"));
        match message {
            Message::Open(offer) => self.open(&offer),
            Message::Copying => {
                self.destination.has_all = false;
                self.leecher(leecher::Event::Copying);
            }
            Message::All => {
                let coming = self.destination.process.is_some();
                if coming && !self.destination.runs {
                    self.destination.has_all = true;
                    let ready = match self.rng.bool() {
                        true => leecher::Event::Ready,
                        false => leecher::Event::ReadyInPart,
                    };
                    self.leecher(ready);
                    self.reply(Message::Arrived);
                }
            }
            Message::Ask(ask) => self.leecher(leecher::Event::Asked(ask)),
            _ => unreachable!(),
        }
    }

    fn open(&mut self, offer: &OpenMove) {
        let mut actions = Vec::new();
        if let Some(process) = &self.destination.process
            && process.token() == offer.token
        {
            return self.reply(Message::Opened(process.answer()));
        }
        let known = self.destination.disk.as_ref();
        match Leecher::start(known, offer, other(1), &mut actions) {
            Ok(leecher) => {
                self.destination.process = Some(leecher);
                self.do_leecher(actions, true);
            }
            Err(refusal) => {
                self.trace.push(format!("refused: {refusal}"));
                self.cut();
                // A move that was begun anew while an older one is known there: the older one ends.
                if self.destination.process.is_some() {
                    self.leecher(leecher::Event::Asked(Ask::Cancel));
                }
            }
        }
    }

    fn deliver_back(&mut self) {
        let Some(message) = self.back.pop_front() else {
            return;
        };
        self.trace.push(format!("back: {message:?}"));
        match message {
            Message::Opened(answer) => {
                self.source.opened = true;
                self.seeder(seeder::Event::Opened(answer));
            }
            Message::Arrived if self.source.copying && !self.source.runs => {
                self.source.copying = false;
                self.seeder(seeder::Event::Copied);
            }
            Message::Arrived => {}
            Message::Answer(answer) => self.seeder(seeder::Event::Answered(answer)),
            _ => unreachable!(),
        }
    }

    /// One step in which nothing fails.
    fn step(&mut self) {
        match self.rng.u8(2..6) {
            2 => self.deliver_there(),
            3 => self.deliver_back(),
            4 if self.source.copying && self.source.runs && self.linked => {
                self.source.runs = false;
                self.send(Message::All);
            }
            5 if !self.linked => self.connect(),
            _ => {}
        }
    }

    fn fault(&mut self) {
        match self.rng.u8(0..8) {
            0 => self.cut(),
            1 => self.crash_source(),
            2 => self.crash_destination(),
            3 if !self.destination.runs => {
                self.destination.has_all = false;
                self.leecher(leecher::Event::Lost("its QEMU died".into()));
            }
            4 => self.seeder(seeder::Event::Abort("a person".into())),
            // The whole host of the destination: a machine that it owns is started again.
            5 => {
                self.cut();
                (self.destination.has_all, self.destination.runs) = (false, false);
                self.destination.process = None;
                self.start_destination();
                self.destination.runs = self.there().is_some_and(MachineRecord::may_run);
            }
            7 if self.lost => self.break_move(),
            7 if self.rng.u8(0..4) == 0 => self.lose_destination(),
            6 if self.source.process.is_none() => self.start_source(),
            _ => {}
        }
    }

    /// The process of the source dies; the machine does not.
    fn crash_source(&mut self) {
        self.trace.push("source: crash".into());
        self.cut();
        self.source.process = None;
    }

    fn crash_destination(&mut self) {
        self.trace.push("destination: crash".into());
        self.cut();
        self.destination.process = None;
        self.start_destination();
    }

    fn check(&self, seed: u64) {
        let trace = || self.trace.join("\n");
        let there = self.there().is_some_and(MachineRecord::may_run);
        assert!(
            !(self.source.disk.may_run() && there),
            "seed {seed}: two owners\n{}",
            trace()
        );
        assert!(
            !self.lacks() || self.source.disk.is_committed(),
            "seed {seed}: what it lacks is nowhere\n{}",
            trace()
        );
        assert!(
            !(self.source.runs && self.destination.runs),
            "seed {seed}: it runs twice\n{}",
            trace()
        );
    }

    /// Lets everything end without faults.
    fn heal(&mut self) -> bool {
        self.crashes = 0;
        for _ in 0..4000 {
            self.step();
            if self.lost {
                self.break_move();
                // What is not committed is given up without the destination.
                self.seeder(seeder::Event::Abort("a person".into()));
            }
            if self.source.process.is_none() && self.source.disk.under_way.is_some() {
                self.start_source();
            }
            let coming = self.there();
            let coming = coming.is_some_and(|machine| machine.under_way.is_some());
            if self.source.process.is_none() && !coming {
                return true;
            }
        }
        false
    }
}

fn run(seed: u64) -> World {
    let mut world = World::new(seed);
    world.start_source();
    let steps = world.rng.usize(5..400);
    let faults = world.rng.u8(0..40);
    world.crashes = faults / 2;
    for _ in 0..steps {
        match world.rng.u8(0..200) < faults {
            true => world.fault(),
            false => world.step(),
        }
        world.check(seed);
    }
    world
}

#[test]
fn never_two_and_at_last_exactly_one() {
    let (mut moved, mut stayed, mut broken) = (0, 0, 0);
    for seed in 0..40_000 {
        let mut world = run(seed);
        let trace = |world: &World| world.trace.join("\n");
        // What a move that was given up left there ends with the next one.
        let healed = world.heal() || {
            world.source.process.is_none() && world.source.disk.under_way.is_none()
        };
        assert!(healed, "seed {seed}: it does not end\n{}", trace(&world));
        world.check(seed);
        assert_ne!(world.source.ended, Some(End::Unknown), "seed {seed}");
        let there = world.there().is_some_and(MachineRecord::may_run);
        let here = world.source.disk.may_run();
        if world.lost && world.source.disk.owner != Owner::Here {
            // It had moved, and is lost with the site.
            assert!(!world.source.runs, "seed {seed}");
            continue;
        }
        broken += usize::from(world.broken);
        assert!(
            !world.lacks(),
            "seed {seed}: not all of it\n{}",
            trace(&world)
        );
        assert!(here != there, "seed {seed}: no owner\n{}", trace(&world));
        // Its own site starts what it owns; nothing else may run.
        assert!(!world.source.runs || here, "seed {seed}");
        assert!(!world.destination.runs || there, "seed {seed}");
        assert!(
            world.source.runs || world.destination.runs,
            "seed {seed}: it runs nowhere\n{}",
            trace(&world)
        );
        match there {
            true => moved += 1,
            false => stayed += 1,
        }
    }
    assert!(
        moved > 4000 && stayed > 4000 && broken > 400,
        "{moved} moved, {stayed} stayed, {broken} broken"
    );
}

#[test]
fn without_faults_it_moves() {
    for seed in 0..200 {
        let mut world = World::new(seed);
        world.start_source();
        assert!(world.heal(), "seed {seed}\n{}", world.trace.join("\n"));
        assert_eq!(world.source.ended, Some(End::Moved), "seed {seed}");
        assert!(world.destination.runs && !world.source.runs);
        assert_eq!(world.source.disk.generation, Generation(1));
        let there = world.destination.disk.unwrap();
        assert_eq!(
            (there.generation, there.owner),
            (Generation(1), Owner::Here)
        );
        assert!(matches!(there.under_way, None | Some(Move::Taken(..))));
    }
}
