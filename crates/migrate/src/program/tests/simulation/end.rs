//! The process that the program goes to.

use std::ops::Range;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_store::machine::{Decision, MachineRecord, Move, Token};

use super::super::super::protocol;
use super::super::super::target::Target;
use super::super::super::transfer::{Phase, Transfer};
use super::{Answer, BLOCK, Kind, Model, OpenMove, SIZES, Said, World, content, other};
use crate::leecher::{Action, Event, Leecher};
use crate::protocol::{Ask, kind};

#[derive(Default)]
pub struct There {
    coming: Option<Coming>,
}

struct Coming {
    leecher: Leecher,
    /// The newest conversation, and the one in which it was prepared.
    conversation: u64,
    prepared: u64,
    copy: Option<Copy>,
    run: Run,
}

/// What it is copied into.
struct Copy {
    number: u64,
    transfer: Arc<Transfer>,
    targets: Vec<Target>,
    devices: Vec<Arc<dyn BlockDevice>>,
    below: [Arc<MemoryDevice>; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    No,
    /// Its host lets it run; the conversation that waits for that.
    Trying(Option<u64>),
    Runs,
}

impl Coming {
    fn answer_now(&self) -> Answer {
        let mut answer = self.leecher.answer();
        if matches!(self.run, Run::Trying(_)) {
            answer.decision = Decision::Open;
        }
        answer
    }
}

impl Copy {
    fn absent(&self, part: usize) -> Vec<Range<u64>> {
        self.targets[part].arrival().absent()
    }

    /// What of these bytes is absent.
    fn absent_of(&self, part: usize, range: &Range<u64>) -> Option<Range<u64>> {
        let absent = self.absent(part).into_iter();
        absent
            .map(|absent| absent.start.max(range.start)..absent.end.min(range.end))
            .find(|absent| !absent.is_empty())
    }
}

impl There {
    /// Whether it is being started.
    pub fn is_under_way(&self) -> bool {
        let coming = self.coming.as_ref();
        coming.is_some_and(|coming| matches!(coming.run, Run::Trying(_)))
    }

    /// The copy of a move, if it is prepared.
    pub fn copy_of(&self, token: Token) -> Option<u64> {
        let coming = self.coming.as_ref();
        let coming = coming.filter(|coming| coming.leecher.token() == token)?;
        Some(coming.copy.as_ref()?.number)
    }

    /// All that the program has here, if it was not started anew.
    pub fn content(&self) -> Option<Model> {
        let coming = self.coming.as_ref()?;
        let copy = coming.copy.as_ref().filter(|_| coming.run == Run::Runs)?;
        assert_eq!(copy.transfer.left(), 0);
        Some([0, 1].map(|part| content(&*copy.devices[part])))
    }
}

impl World {
    /// A process starts, and finds out where the program is, as [`settle`](super::super::super::settle) does.
    pub(super) fn start_there(&mut self) {
        self.note("there: starts".into());
        if let Some(record) = self.records[1].clone() {
            let settled = match &record.under_way {
                Some(Move::Taken(token, _)) => record.started(*token),
                Some(Move::Coming(token, ..)) => record.refuse(*token),
                _ => None,
            };
            if let Some(settled) = settled {
                self.keep(1, settled);
            }
        }
        self.there = Some(There::default());
    }

    pub(super) fn dies_there(&mut self) {
        self.note("there: dies".into());
        let record = self.records[1].as_ref();
        self.may_lack |= record.is_some_and(MachineRecord::is_partial);
        self.there = None;
        self.links.clear();
        if self.rng.bool() {
            self.start_there();
        }
    }

    fn coming(&mut self) -> Option<&mut Coming> {
        self.there.as_mut()?.coming.as_mut()
    }

    fn copy(&self, number: u64) -> Option<&Copy> {
        let copy = self.there.as_ref()?.coming.as_ref()?.copy.as_ref();
        copy.filter(|copy| copy.number == number)
    }

    /// Does with a message what is to be done; returns one that has to wait.
    pub(super) fn hear_there(&mut self, number: u64, copy: u64, said: Said) -> Option<Said> {
        match said {
            Said::Open(offer) => self.opened(number, &offer),
            Said::Ask(Ask::Commit) if self.is_said_later() => return Some(Said::Ask(Ask::Commit)),
            Said::Ask(ask) => self.asked(number, ask),
            Said::Frame(frame) if frame.kind == kind::FLUSH => {
                let known = self.copy(copy)?;
                if is_end(&known.transfer) && known.transfer.left() > 0 {
                    // The last blocks come by the other connection, or are lost with it.
                    let is_coming = self.links.iter().any(|link| {
                        link.kind == Kind::Fetches && link.copy == copy && !link.there.is_empty()
                    });
                    if is_coming {
                        return Some(Said::Frame(frame));
                    }
                    self.links.retain(|link| link.number != number);
                    self.hung_up(copy);
                    return None;
                }
                self.flush(copy);
                self.reply(number, Said::Flushed);
            }
            Said::Frame(frame) => {
                if let Some(known) = self.copy(copy)
                    && let Err(e) = known.transfer.apply(&frame)
                {
                    panic!("{e}\n{}", self.trace.join("\n"));
                }
            }
            _ => unreachable!("a leecher's message"),
        }
        None
    }

    /// Whether it is worth waiting for what the seeder sent before it committed.
    fn is_said_later(&mut self) -> bool {
        let is_late = self.rng.u8(..16) == 0;
        let copy = self.coming().and_then(|coming| coming.copy.as_ref());
        let Some(copy) = copy.filter(|copy| *copy.transfer.phase().borrow() == Phase::Copying)
        else {
            return false;
        };
        let number = copy.number;
        let mut links = self.links.iter();
        let is_coming = links
            .any(|link| link.kind == Kind::Pages && link.copy == number && !link.there.is_empty());
        is_coming && !is_late
    }

    fn opened(&mut self, number: u64, offer: &OpenMove) {
        let known = self.records[1].clone();
        let Some(there) = &mut self.there else { return };
        if let Some(coming) = &mut there.coming {
            if coming.leecher.token() == offer.token {
                coming.conversation = number;
                let answer = coming.answer_now();
                return self.reply(number, Said::Opened(answer));
            }
            if !(coming.leecher.is_over() || coming.leecher.may_begin()) {
                // It is refused, and hung up.
                return self.links.retain(|link| link.number != number);
            }
        }
        let mut actions = Vec::new();
        let Ok(leecher) = Leecher::start(known.as_ref(), offer, other(1), &mut actions) else {
            return self.links.retain(|link| link.number != number);
        };
        there.coming = Some(Coming {
            leecher,
            conversation: number,
            prepared: 0,
            copy: None,
            run: Run::No,
        });
        self.do_there(actions);
        let answer = self.coming().map(|coming| coming.leecher.answer());
        if let Some(answer) = answer {
            self.reply(number, Said::Opened(answer));
        }
    }

    fn asked(&mut self, number: u64, ask: Ask) {
        let coming = self.there.as_mut().and_then(|there| there.coming.as_mut());
        let Some(coming) = coming.filter(|coming| coming.conversation == number) else {
            // Another conversation has taken the place of this one.
            return self.links.retain(|link| link.number != number);
        };
        let mut events = Vec::new();
        if coming.leecher.may_begin() {
            match ask {
                Ask::Begin => {
                    coming.copy = None;
                    events.push(Event::Copying);
                }
                Ask::Prepare => {
                    events.push(Event::Copying);
                    let copy = self.number();
                    let coming = self.coming().expect("it comes");
                    coming.copy = Some(prepared(copy));
                    coming.prepared = number;
                }
                Ask::Arrived | Ask::Commit => {
                    let is_same = coming.prepared == number;
                    let transfer = coming.copy.as_ref().map(|copy| &copy.transfer);
                    let ready = transfer.filter(|transfer| {
                        *transfer.phase().borrow() != Phase::Copying
                            && (is_same || transfer.left() == 0)
                    });
                    events.extend(ready.map(|transfer| match transfer.is_durable() {
                        true => Event::Ready,
                        false => Event::ReadyInPart,
                    }));
                }
                Ask::Cancel => {}
            }
        }
        events.push(Event::Asked(ask));
        for event in events {
            self.handle_there(event);
        }
        let Some(coming) = self.coming() else { return };
        match &mut coming.run {
            Run::Trying(waits) if ask == Ask::Commit => *waits = Some(number),
            _ => {
                let answer = coming.leecher.answer();
                self.reply(number, Said::Answer(answer));
            }
        }
    }

    fn handle_there(&mut self, event: Event) {
        let mut actions = Vec::new();
        if let Some(coming) = self.coming() {
            coming.leecher.handle(event, &mut actions);
        }
        self.do_there(actions);
    }

    fn do_there(&mut self, actions: Vec<Action>) {
        for action in actions {
            if self.is_struck() {
                return self.dies_there();
            }
            match action {
                Action::Keep(record) => {
                    let is_taken = record.may_run() && !self.owns(1);
                    self.keep(1, record);
                    if is_taken {
                        self.taken();
                    }
                }
                Action::Run => self.run(),
                Action::Discard => {
                    if let Some(coming) = self.coming() {
                        coming.copy = None;
                    }
                }
                Action::Answer(_) => {}
            }
        }
    }

    /// It was taken: all of it is here, or named and at the seeder.
    fn taken(&mut self) {
        let coming = self.there.as_ref().and_then(|there| there.coming.as_ref());
        let copy = coming
            .and_then(|coming| coming.copy.as_ref())
            .expect("a copy");
        assert!(!self.here.as_ref().is_some_and(super::Here::runs));
        for part in 0..SIZES.len() {
            let (found, model) = (content(&*copy.below[part]), &self.model[part]);
            let mut at = 0;
            for absent in copy.absent(part) {
                let (start, end) = (absent.start as usize, absent.end as usize);
                assert!(
                    found[at..start] == model[at..start],
                    "{}",
                    self.trace.join("\n")
                );
                at = end;
            }
            assert!(found[at..] == model[at..], "{}", self.trace.join("\n"));
        }
        match copy.transfer.left() {
            0 => self.seen.whole += 1,
            _ => self.seen.in_part += 1,
        }
        self.disk_there = Some(Arc::clone(&copy.below[1]));
    }

    fn run(&mut self) {
        let Some(coming) = self.coming() else { return };
        let Some(copy) = &coming.copy else {
            let why = "it was lost with its process".to_owned();
            return self.handle_there(Event::NotStarted(why));
        };
        assert_eq!(copy.transfer.take_state(), b"its own state");
        coming.run = Run::Trying(None);
    }

    /// Its host has let it run.
    pub(super) fn ran(&mut self) {
        let Some(coming) = self.coming() else { return };
        let Run::Trying(waits) = coming.run else {
            return;
        };
        coming.run = Run::Runs;
        self.handle_there(Event::Running);
        let answer = self.coming().map(|coming| coming.leecher.answer());
        if let (Some(number), Some(answer)) = (waits, answer) {
            self.reply(number, Said::Answer(answer));
        }
    }

    /// The program reads and writes at its new place, and waits for what is absent.
    pub(super) fn uses_there(&mut self) {
        let (part, at, bytes) = self.draw();
        let is_read = self.rng.bool();
        let coming = self.there.as_ref().and_then(|there| there.coming.as_ref());
        let Some(coming) = coming.filter(|coming| coming.run != Run::No) else {
            return;
        };
        let copy = coming.copy.as_ref().expect("it runs");
        let range = at as u64..(at + bytes.len()) as u64;
        let absent = copy.absent_of(part, &range);
        let is_whole =
            range.start.is_multiple_of(BLOCK as u64) && range.end.is_multiple_of(BLOCK as u64);
        let device = &copy.devices[part];
        if let Some(absent) = absent.clone().filter(|_| is_read || !is_whole) {
            let number = copy.number;
            let mut links = self.links.iter_mut().rev();
            let wanted = absent.start / BLOCK as u64 * BLOCK as u64..absent.end;
            if let Some(link) = links
                .find(|link| link.kind == Kind::Fetches && link.copy == number && !link.is_closed)
            {
                link.back.push_back(Said::Want(part, wanted));
            }
        } else if is_read {
            let mut found = vec![0; bytes.len()];
            device.read(at as u64, &mut found).unwrap();
            let model = &self.model[part][at..at + bytes.len()];
            assert!(found == model, "{part} at {at}\n{}", self.trace.join("\n"));
        } else {
            device.write(at as u64, &bytes).unwrap();
            self.model[part][at..at + bytes.len()].copy_from_slice(&bytes);
            self.seen.overwritten += absent.map_or(0, |absent| absent.end - absent.start);
        }
    }

    /// A connection that brought bytes has ended.
    pub(super) fn hung_up(&mut self, number: u64) {
        let Some(copy) = self.copy(number) else {
            return;
        };
        let is_whole =
            *copy.transfer.phase().borrow() != Phase::Copying && copy.transfer.left() == 0;
        if is_whole {
            return self.flush(number);
        }
        let coming = self.coming().expect("it comes");
        if coming.leecher.may_begin() {
            coming.copy = None;
        }
    }

    fn flush(&mut self, number: u64) {
        let Some(copy) = self.copy(number) else {
            return;
        };
        let is_end = is_end(&copy.transfer);
        copy.transfer.flush().unwrap();
        if is_end {
            self.handle_there(Event::Whole);
        }
    }
}

/// Whether a flush is the end of all.
fn is_end(transfer: &Transfer) -> bool {
    *transfer.phase().borrow() == Phase::Said && transfer.is_taken()
}

fn prepared(number: u64) -> Copy {
    let below = SIZES.map(|size| Arc::new(MemoryDevice::new(size as u64)));
    let made = below.clone().map(|below| Target::device(below));
    let (targets, devices): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    assert!(targets.len() <= protocol::MAX_PARTS);
    Copy {
        number,
        transfer: Transfer::new(targets.clone()),
        targets,
        devices,
        below,
    }
}
