//! The process that the program leaves.

use std::ops::Range;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_device::stage::Tracked;
use drover_net::{Frame, encode};
use drover_store::machine::{Decision, Generation, MachineRecord, Move, Owner};

use super::super::super::parts::{Blocks, Part};
use super::super::super::protocol;
use super::{
    Answer, Kind, Link, Model, OpenMove, SEED, SIZES, Said, World, content, other, program,
};
use crate::disks::pack_write;
use crate::protocol::{Ask, kind};
use crate::seeder::{Action, End, Event, Seeder};

/// Bytes of a frame.
const STEP: u64 = 2 * protocol::BLOCK;

pub struct Here {
    /// What the program uses; none if this process has only asked where it is.
    program: Option<Program>,
    mover: Option<Mover>,
}

struct Program {
    parts: Vec<Part>,
    runs: bool,
}

struct Mover {
    machine: Seeder,
    stage: Stage,
    /// Whether an answer is waited for.
    asked: bool,
    left: Blocks,
    /// All that was left when it was handed over.
    all: Blocks,
    cursor: (usize, u32),
    rounds: u8,
    max_rounds: u8,
    post_copy: bool,
    /// It was taken there: its record here is kept when all of it is there.
    is_released: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    Beginning,
    Preparing,
    Round,
    Flushing,
    /// It is paused, and waits until all is flushed.
    LastFlushing,
    /// Handed over, and asked about.
    Deciding,
    Rest,
    RestFlushing,
}

fn none() -> Blocks {
    Blocks::none_of(SIZES.map(|size| size as u64).to_vec())
}

impl Here {
    pub fn is_moving(&self) -> bool {
        self.mover.is_some()
    }

    pub fn runs(&self) -> bool {
        self.program.as_ref().is_some_and(|program| program.runs)
    }

    pub fn content(&self) -> Model {
        let program = self.program.as_ref().expect("it is here");
        [0, 1].map(|part| content(&*program.parts[part].device))
    }

    fn device(&self, part: usize) -> &Arc<dyn BlockDevice> {
        &self.program.as_ref().expect("it is here").parts[part].device
    }
}

impl World {
    /// A process starts, and finds out where the program is, as [`settle`](super::super::super::settle) does.
    pub(super) fn start_here(&mut self) {
        let mut mover = None;
        if let Some(record) = self.records[0].clone() {
            match &record.under_way {
                Some(Move::Leaving(token, _)) => {
                    let stays = record.stay(*token).expect("it leaves");
                    self.keep(0, stays);
                }
                Some(Move::Committed(..)) => mover = Some(record),
                _ if record.owner != Owner::Here => return,
                _ => {}
            }
        }
        self.note("here: starts".into());
        let (program, is_asked) = (None, mover.is_some());
        self.here = Some(Here {
            program,
            mover: None,
        });
        match mover {
            Some(record) => self.begin(&record, Stage::Deciding),
            None => self.start_program(),
        }
        assert!(is_asked || self.here.as_ref().is_some_and(Here::runs));
    }

    /// From its disk: what it had in memory is lost.
    fn start_program(&mut self) {
        assert!(
            content(&*self.disk) == self.model[1],
            "its disk lacks something"
        );
        self.model[0].fill(0);
        let memory = Arc::new(MemoryDevice::new(SIZES[0] as u64));
        let disk = Arc::clone(&self.disk);
        let part = |name: &str, device: Arc<MemoryDevice>| {
            let (tracked, handle) = Tracked::new(device as Arc<dyn BlockDevice>, 4096);
            Part::device(name, Arc::new(tracked), handle)
        };
        let parts = vec![part("memory", memory), part("disk", disk)];
        let here = self.here.as_mut().expect("it is up");
        here.program = Some(Program { parts, runs: true });
    }

    fn begin(&mut self, record: &MachineRecord, stage: Stage) {
        let (token, mut actions) = (self.token(), Vec::new());
        let machine = Seeder::start(record, token, other(2), &mut actions).expect("it may leave");
        let mover = Mover {
            machine,
            stage,
            asked: false,
            left: none(),
            all: none(),
            cursor: (0, 0),
            rounds: 0,
            max_rounds: self.rng.u8(1..5),
            post_copy: self.rng.bool(),
            is_released: false,
        };
        self.here.as_mut().expect("it is up").mover = Some(mover);
        self.do_here(actions);
    }

    fn mover(&mut self) -> Option<&mut Mover> {
        self.here.as_mut()?.mover.as_mut()
    }

    /// Whether what is left is here, and not only known to be somewhere else.
    fn has_the_rest(&self) -> bool {
        self.here
            .as_ref()
            .is_some_and(|here| here.program.is_some())
    }

    pub(super) fn writes_here(&mut self) {
        if self.here.as_ref().is_some_and(Here::runs) {
            let (part, at, bytes) = self.draw();
            let here = self.here.as_ref().expect("it is up");
            here.device(part).write(at as u64, &bytes).unwrap();
            self.model[part][at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }

    pub(super) fn dies_here(&mut self) {
        self.note("here: dies".into());
        // What it asked last may be heard still: with something left it may be taken after this.
        let mover = self.mover().filter(|mover| mover.machine.is_committed());
        let has_left = mover.is_some_and(|mover| mover.all.bytes() > 0);
        self.may_lack |= has_left || self.is_partial_there();
        self.here = None;
        self.close_all();
    }

    fn is_partial_there(&self) -> bool {
        self.records[1]
            .as_ref()
            .is_some_and(MachineRecord::is_partial)
    }

    /// It is given up, by a person, or because no connection can be made for too long.
    pub(super) fn is_given_up(&mut self) {
        match self.mover().map(|mover| mover.stage) {
            None | Some(Stage::Deciding) => {}
            Some(Stage::Rest | Stage::RestFlushing) => {
                self.may_lack |= self.is_partial_there();
                self.gone();
            }
            Some(_) => self.stays("it was given up"),
        }
    }

    fn stays(&mut self, why: &str) {
        self.note(format!("here: {why}"));
        self.handle_here(Event::Abort(why.into()));
    }

    fn handle_here(&mut self, event: Event) {
        let mut actions = Vec::new();
        if let Some(mover) = self.mover() {
            mover.machine.handle(event, &mut actions);
        }
        self.do_here(actions);
    }

    fn do_here(&mut self, actions: Vec<Action>) {
        for action in actions {
            if self.is_struck() {
                return self.dies_here();
            }
            let Some(mover) = self.mover() else { return };
            match action {
                Action::Copy => {
                    mover.stage = Stage::Beginning;
                    self.ask(Ask::Begin);
                }
                Action::Keep(_) if mover.is_released => {}
                Action::Keep(record) => self.keep(0, record),
                Action::Ask(ask) => self.ask(ask),
                Action::Resume => {
                    assert!(self.owns(0), "it does not run twice");
                    let here = self.here.as_mut().expect("it is up");
                    match &mut here.program {
                        Some(program) => program.runs = true,
                        None => self.start_program(),
                    }
                }
                Action::Release => mover.is_released = true,
                Action::End(End::Moved) => {
                    mover.stage = Stage::Rest;
                    if !self.has_the_rest() {
                        // It died with the process before this one.
                        self.gone();
                    }
                }
                Action::End(End::Stayed(_)) => {
                    self.here.as_mut().expect("it is up").mover = None;
                    self.close_all();
                }
                Action::End(End::Unknown) => {
                    panic!("they do not agree\n{}", self.trace.join("\n"));
                }
            }
        }
    }

    /// It is there for good: this process ends.
    fn gone(&mut self) {
        let record = self.mover().expect("it moves").machine.record().clone();
        self.keep(0, record);
        self.here = None;
        self.close_all();
    }

    fn ask(&mut self, ask: Ask) {
        let Some(mover) = self.mover() else { return };
        mover.asked = true;
        self.send(Kind::Talk, Said::Ask(ask));
    }

    /// Opens a conversation, if there is somebody.
    fn talk(&mut self) -> bool {
        let Some(mover) = self.mover() else {
            return false;
        };
        mover.asked = true;
        let token = mover.machine.token();
        let generation = mover.machine.record().generation;
        self.close(Kind::Talk);
        if self.there.is_none() {
            return false;
        }
        let offer = OpenMove {
            kind: crate::protocol::Kind::Machine,
            token,
            machine: program(),
            seed: SEED,
            generation: Generation(generation.0),
            disks: Vec::new(),
            memory_bytes: SIZES.iter().sum::<usize>() as u64,
            mounted: Vec::new(),
        };
        self.connect(Kind::Talk, 0);
        self.send(Kind::Talk, Said::Open(offer));
        true
    }

    fn connect(&mut self, kind: Kind, copy: u64) {
        let number = self.number();
        self.links.push(Link {
            kind,
            there: [].into(),
            back: [].into(),
            is_closed: false,
            number,
            copy,
        });
    }

    /// Opens a connection about the copy; false if it is not known there.
    fn open_copy(&mut self, kind: Kind) -> bool {
        let Some(token) = self.mover().map(|mover| mover.machine.token()) else {
            return false;
        };
        self.close(kind);
        let copy = self.there.as_ref().and_then(|there| there.copy_of(token));
        if let Some(copy) = copy {
            self.connect(kind, copy);
        }
        copy.is_some()
    }

    fn frame(&mut self, on: Kind, kind: u8, payload: Vec<u8>) {
        let payload = payload.into();
        self.send(on, Said::Frame(Frame { kind, payload }));
    }

    /// Sends what is in a range now.
    fn write(&mut self, on: Kind, part: usize, range: &Range<u64>) {
        let here = self.here.as_ref().expect("it is up");
        let mut bytes = vec![0; (range.end - range.start) as usize];
        here.device(part).read(range.start, &mut bytes).unwrap();
        let packed = pack_write(part as u32, range.start, &bytes);
        self.frame(on, kind::WRITE, packed);
    }

    fn note_changes(&mut self, all: bool) {
        let here = self.here.as_mut().expect("it is up");
        let parts = &here.program.as_ref().expect("it is here").parts;
        let left = &mut here.mover.as_mut().expect("it moves").left;
        left.add_changes(parts).unwrap();
        if all {
            left.add_data(parts).unwrap();
        }
    }

    /// What was on its way may be lost: all that was left is sent again.
    fn begin_anew(&mut self) {
        if let Some(mover) = self.mover() {
            (mover.left, mover.cursor) = (mover.all.clone(), (0, 0));
        }
    }

    pub(super) fn goes_on_here(&mut self) {
        if self.here.is_none() {
            if self.rng.u8(..4) == 0 && !self.has_left() {
                self.start_here();
            }
            return;
        }
        let Some(stage) = self.mover().map(|mover| mover.stage) else {
            let record = self.records[0].clone();
            let record = record.unwrap_or_else(|| MachineRecord::new(SEED, Vec::new()));
            self.begin(&record, Stage::Opening);
            if self.mover().is_some() && !self.talk() {
                self.stays("nobody is there");
            }
            return;
        };
        let is_open = |world: &mut World, kind| world.link(kind).is_some();
        match stage {
            Stage::Opening | Stage::Beginning | Stage::Preparing => {
                if !is_open(self, Kind::Talk) {
                    self.stays("the conversation broke");
                }
            }
            Stage::Round | Stage::Flushing | Stage::LastFlushing => {
                if !is_open(self, Kind::Pages) {
                    self.stays("the copy broke");
                } else if stage == Stage::Round {
                    self.goes_on_with_round();
                }
            }
            Stage::Deciding => {
                if !is_open(self, Kind::Talk) {
                    self.talk();
                } else if self.mover().is_some_and(|mover| !mover.asked) {
                    self.ask(Ask::Commit);
                } else if !is_open(self, Kind::Fetches)
                    && self.has_the_rest()
                    && self.open_copy(Kind::Fetches)
                {
                    self.begin_anew();
                }
            }
            Stage::Rest | Stage::RestFlushing => {
                if is_open(self, Kind::Pages) && is_open(self, Kind::Fetches) {
                    if stage == Stage::Rest {
                        self.goes_on_with_rest();
                    }
                } else if self.there.is_some() {
                    self.close(Kind::Pages);
                    self.close(Kind::Fetches);
                    match self.open_copy(Kind::Pages) && self.open_copy(Kind::Fetches) {
                        true => {
                            self.mover().expect("it moves").stage = Stage::Rest;
                            self.begin_anew();
                        }
                        // That process knows nothing of it: it has all, or lacks the rest for good.
                        false => self.gone(),
                    }
                }
            }
        }
    }

    fn goes_on_with_round(&mut self) {
        let mover = self.mover().expect("it moves");
        if let Some((part, range)) = mover.left.take_next(&mut mover.cursor, STEP) {
            return self.write(Kind::Pages, part, &range);
        }
        mover.stage = Stage::Flushing;
        self.frame(Kind::Pages, kind::FLUSH, Vec::new());
    }

    fn goes_on_with_rest(&mut self) {
        let mover = self.mover().expect("it moves");
        if let Some((part, range)) = mover.left.take_next(&mut mover.cursor, STEP) {
            return self.write(Kind::Pages, part, &range);
        }
        mover.stage = Stage::RestFlushing;
        self.frame(Kind::Pages, kind::FLUSH, Vec::new());
    }

    /// Pauses the program, and says all that is to be said before it is handed over.
    fn last_round(&mut self) {
        if !self.open_copy(Kind::Fetches) {
            return self.stays("the process there is another one");
        }
        let here = self.here.as_mut().expect("it is up");
        here.program.as_mut().expect("it is here").runs = false;
        self.note_changes(false);
        let fits = self.rng.u8(..4) == 0;
        let mover = self.mover().expect("it moves");
        let post_copy = mover.post_copy;
        if !post_copy || fits {
            let left = std::mem::replace(&mut mover.left, none());
            for part in 0..SIZES.len() {
                for range in left.ranges(part) {
                    self.write(Kind::Pages, part, &range);
                }
            }
        }
        let named = self.mover().expect("it moves").left.named();
        for left in named {
            self.frame(Kind::Pages, protocol::kind::LEFT, encode(&left));
        }
        self.frame(
            Kind::Pages,
            protocol::kind::STATE,
            b"its own state".to_vec(),
        );
        match post_copy {
            true => self.commits(),
            false => {
                self.frame(Kind::Pages, kind::FLUSH, Vec::new());
                self.mover().expect("it moves").stage = Stage::LastFlushing;
            }
        }
    }

    fn commits(&mut self) {
        let mover = self.mover().expect("it moves");
        mover.all = mover.left.clone();
        mover.stage = Stage::Deciding;
        self.handle_here(Event::Copied);
    }

    pub(super) fn hear_here(&mut self, said: Said) {
        let Some(mover) = self.mover() else { return };
        match said {
            Said::Opened(answer) => {
                mover.asked = false;
                self.handle_here(Event::Opened(answer));
            }
            Said::Answer(answer) => {
                mover.asked = false;
                self.hear_answer(answer);
            }
            Said::Flushed => match mover.stage {
                Stage::Flushing => {
                    mover.rounds += 1;
                    let is_last = mover.rounds >= mover.max_rounds;
                    mover.stage = Stage::Round;
                    self.note_changes(false);
                    if is_last {
                        self.last_round();
                    }
                }
                Stage::LastFlushing => self.commits(),
                Stage::RestFlushing => self.gone(),
                // Of a connection before that.
                _ => {}
            },
            Said::Want(part, range) => {
                let ranges = mover.left.take_range(part, range);
                for range in ranges {
                    self.seen.asked += range.end - range.start;
                    self.write(Kind::Fetches, part, &range);
                }
            }
            _ => unreachable!("a seeder's message"),
        }
    }

    fn hear_answer(&mut self, answer: Answer) {
        let is_done = answer.decision == Decision::Open && answer.why.is_empty();
        match self.mover().expect("it moves").stage {
            Stage::Beginning if is_done => {
                self.mover().expect("it moves").stage = Stage::Preparing;
                self.ask(Ask::Prepare);
            }
            Stage::Preparing if is_done => match self.open_copy(Kind::Pages) {
                true => {
                    self.mover().expect("it moves").stage = Stage::Round;
                    self.note_changes(true);
                }
                false => self.stays("it is not prepared"),
            },
            Stage::Beginning | Stage::Preparing => self.stays(&answer.why),
            // It is asked again.
            Stage::Deciding if answer.decision == Decision::Open => {}
            Stage::Deciding => self.handle_here(Event::Answered(answer)),
            _ => {}
        }
    }
}
