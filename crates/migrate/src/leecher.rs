//! The end that the machine goes to.

use drover_net::{Code, Refusal};
use drover_store::machine::{Decision, MachineRecord, Move, Other, Token};

use crate::protocol::{Answer, Ask, OpenMove};

/// What happens to a leecher.
#[derive(Clone, Debug)]
pub enum Event {
    /// Its memory is copied, perhaps for another time: what has arrived before is void.
    Copying,
    /// All of the machine is here, paused: it can be taken.
    Ready,
    /// It can be taken, though some of it is at the seeder still, or not durable. [`Event::Whole`] follows.
    ReadyInPart,
    /// What was missing when it was taken is there, and durable.
    Whole,
    /// It runs.
    Running,
    /// It was taken, and could not be started: it stays here.
    NotStarted(String),
    /// It can no longer be taken: what has arrived of it is lost.
    Lost(String),
    /// The seeder asks.
    Asked(Ask),
}

/// What its driver does, in this order. When one fails, it does none of those that follow, and continues from the record
/// on the disk with another leecher.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there are few at a time")]
pub enum Action {
    /// Make this record durable.
    Keep(MachineRecord),
    /// Let the machine run. Repeated after a restart: it may run already.
    Run,
    /// End what has arrived of the machine.
    Discard,
    /// Answer the seeder.
    Answer(Answer),
}

/// How much of it has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ready {
    No,
    /// Enough to run.
    InPart,
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It arrives.
    Coming(Ready),
    /// It is recorded as taken, and is being started.
    Starting,
    /// It runs; the rest follows.
    Following,
    Over,
}

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Leecher {
    token: Token,
    record: MachineRecord,
    state: State,
    why: String,
}

impl Leecher {
    /// Receives a machine: a new one, or again after a cut. `known` is this site's record of it. If this process saw
    /// it arrive before, that is to be continued with [`Leecher::handle`], not begun anew.
    ///
    /// # Errors
    /// When it cannot be received, see [`MachineRecord::receive`].
    pub fn start(
        known: Option<&MachineRecord>,
        offer: &OpenMove,
        from: Other,
        actions: &mut Vec<Action>,
    ) -> Result<Self, Refusal> {
        let unknown = MachineRecord::foreign(offer.seed, offer.generation, from.clone());
        let before = known.unwrap_or(&unknown);
        let token = offer.token;
        let mut leecher = Self {
            token,
            record: before.clone(),
            state: State::Over,
            why: String::new(),
        };
        if let Some(
            Move::Coming(known, other, _) | Move::Taken(known, other) | Move::Partial(known, other),
        ) = &before.under_way
            && *known == token
            && other.key != from.key
        {
            return Err(Refusal::new(Code::Denied, "that move is not yours"));
        }
        let is_known = before.decision(token) != Decision::Unknown;
        match Self::restart(before, actions).filter(|old| is_known && old.token == token) {
            Some(old) => leecher = old,
            // Decided, and over.
            None if is_known && before.decision(token) != Decision::Open => {}
            None => {
                let disks = offer.disks.iter().map(|disk| disk.image.clone()).collect();
                let record = before.receive(token, offer.seed, offer.generation, from, disks)?;
                leecher.state = State::Coming(Ready::No);
                leecher.keep(record, actions);
            }
        }
        actions.push(Action::Answer(leecher.answer()));
        Ok(leecher)
    }

    /// Continues after a restart of the site, from its record; `None` if no move to this site is under way. What had
    /// arrived of the machine's memory is lost unless [`Event::Ready`] follows.
    #[must_use]
    pub fn restart(record: &MachineRecord, actions: &mut Vec<Action>) -> Option<Self> {
        let (token, state) = match &record.under_way {
            Some(Move::Coming(token, ..)) => (*token, State::Coming(Ready::No)),
            Some(Move::Taken(token, _) | Move::Partial(token, _)) => (*token, State::Starting),
            _ => return None,
        };
        if state == State::Starting {
            actions.push(Action::Run);
        }
        Some(Self {
            token,
            record: record.clone(),
            state,
            why: String::new(),
        })
    }

    /// The move.
    #[must_use]
    pub fn token(&self) -> Token {
        self.token
    }

    /// The machine, as it is or is about to be recorded.
    #[must_use]
    pub fn record(&self) -> &MachineRecord {
        &self.record
    }

    /// Whether nothing of the move is left to do.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Whether it runs, or was to, and not all of it is known to be here.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.record.is_partial()
    }

    /// Whether it was taken, and is being started.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        self.state == State::Starting
    }

    /// Whether the copy may begin anew.
    #[must_use]
    pub fn may_begin(&self) -> bool {
        matches!(self.state, State::Coming(_))
    }

    /// Whether it can be taken.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.state, State::Coming(Ready::Whole | Ready::InPart))
    }

    /// Handles an event.
    pub fn handle(&mut self, event: Event, actions: &mut Vec<Action>) {
        match (self.state, event) {
            (State::Coming(_), Event::Copying) => self.state = State::Coming(Ready::No),
            (State::Coming(_), Event::Ready) => self.state = State::Coming(Ready::Whole),
            (State::Coming(_), Event::ReadyInPart) => self.state = State::Coming(Ready::InPart),
            (State::Coming(_), Event::Lost(why)) => self.refuse(why, actions),
            (State::Coming(ready @ (Ready::Whole | Ready::InPart)), Event::Asked(Ask::Commit)) => {
                let taken = match ready {
                    Ready::Whole => self.record.take(self.token),
                    _ => self.record.take_part(self.token),
                };
                if let Some(record) = taken {
                    self.state = State::Starting;
                    self.keep(record, actions);
                    actions.push(Action::Run);
                }
                actions.push(Action::Answer(self.answer()));
            }
            // It committed, so all had arrived.
            (State::Coming(Ready::No), Event::Asked(Ask::Commit)) => {
                self.refuse("what had arrived of it was lost".into(), actions);
                actions.push(Action::Answer(self.answer()));
            }
            (State::Coming(_), Event::Asked(Ask::Cancel)) => {
                self.refuse("cancelled".into(), actions);
                actions.push(Action::Answer(self.answer()));
            }
            (State::Starting, Event::Running) if self.record.is_partial() => {
                self.state = State::Following;
            }
            (State::Starting, Event::Running) => self.started(actions),
            (State::Starting | State::Following, Event::Whole) => {
                if let Some(record) = self.record.whole(self.token) {
                    match self.state {
                        State::Following => {
                            self.record = record;
                            self.started(actions);
                        }
                        _ => self.keep(record, actions),
                    }
                }
            }
            (State::Starting, Event::NotStarted(why)) => self.why = why,
            // Its driver does what else is asked, and says how it went.
            (State::Coming(_), Event::Asked(Ask::Begin | Ask::Prepare | Ask::Arrived)) => {
                actions.push(Action::Answer(self.answer()));
            }
            (State::Starting | State::Following | State::Over, Event::Asked(_)) => {
                actions.push(Action::Answer(self.answer()));
            }
            // Late or repeated: it changes nothing.
            _ => {}
        }
    }

    fn started(&mut self, actions: &mut Vec<Action>) {
        self.state = State::Over;
        if let Some(record) = self.record.started(self.token) {
            self.keep(record, actions);
        }
    }

    fn refuse(&mut self, why: String, actions: &mut Vec<Action>) {
        if let Some(record) = self.record.refuse(self.token) {
            (self.state, self.why) = (State::Over, why);
            self.keep(record, actions);
            actions.push(Action::Discard);
        }
    }

    /// What became of the move, as far as it is recorded.
    #[must_use]
    pub fn answer(&self) -> Answer {
        Answer {
            decision: self.record.decision(self.token),
            why: self.why.clone(),
        }
    }

    fn keep(&mut self, record: MachineRecord, actions: &mut Vec<Action>) {
        self.record = record.clone();
        actions.push(Action::Keep(record));
    }
}
