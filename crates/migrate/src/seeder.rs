//! The end that has the machine.

use drover_store::machine::{Decision, MachineRecord, Move, Other, Token};

use crate::protocol::{Answer, Ask};

/// What happens to a seeder.
#[derive(Clone, Debug)]
pub enum Event {
    /// The leecher knows of the move, and this is what became of it. Also after a reconnection.
    Opened(Answer),
    /// The machine is paused, and all of it has arrived.
    Copied,
    /// The leecher's answer to the last question.
    Answered(Answer),
    /// The move has to end: it failed, or a person wants it to.
    Abort(String),
}

/// What its driver does, in this order. When one fails, it does none of those that follow, and continues from the record
/// on the disk with another seeder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there are few at a time")]
pub enum Action {
    /// Copy disks and memory, pause the machine, and report [`Event::Copied`].
    Copy,
    /// Make this record durable.
    Keep(MachineRecord),
    /// Ask the leecher; after a cut, again.
    Ask(Ask),
    /// Let the machine run on here: it stays.
    Resume,
    /// It runs there: end it here.
    Release,
    /// The move is over.
    End(End),
}

/// How a move ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The machine runs there.
    Moved,
    /// It runs here.
    Stayed(String),
    /// What the two sites have recorded does not agree: a person has to find out where it runs.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the leecher to record the move.
    Opening,
    Copying,
    /// The leecher decides; what it is asked.
    Committed(Ask),
    Over,
}

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Seeder {
    token: Token,
    record: MachineRecord,
    state: State,
}

impl Seeder {
    /// Begins a move, or continues the one in the record, after a restart. `machine` must be locked until the end.
    ///
    /// # Errors
    /// When the machine cannot leave, see [`MachineRecord::leave`].
    pub fn start(
        machine: &MachineRecord,
        new: Token,
        to: Other,
        actions: &mut Vec<Action>,
    ) -> Result<Self, drover_net::Refusal> {
        let record = machine.leave(new, to)?;
        let (token, state) = match &record.under_way {
            Some(Move::Committed(token, _)) => (*token, State::Committed(Ask::Commit)),
            Some(Move::Leaving(token, _)) => (*token, State::Opening),
            _ => (new, State::Opening),
        };
        if record != *machine {
            actions.push(Action::Keep(record.clone()));
        }
        Ok(Self {
            token,
            record,
            state,
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

    /// Whether it is frozen: nothing but the leecher's answer ends the move.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        matches!(self.state, State::Committed(_))
    }

    /// Whether the move is over, or will be when its last actions are done.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Handles an event.
    pub fn handle(&mut self, event: Event, actions: &mut Vec<Action>) {
        match (self.state, event) {
            (State::Opening | State::Copying, Event::Opened(answer)) => {
                self.opened(answer, actions);
            }
            (State::Copying, Event::Copied) => match self.record.commit(self.token) {
                Some(record) => {
                    self.state = State::Committed(Ask::Commit);
                    self.keep(record, actions);
                    actions.push(Action::Ask(Ask::Commit));
                }
                None => self.stay("the record of the machine was changed".into(), actions),
            },
            // Asked again after a cut: the answer may have been lost.
            (State::Committed(ask), Event::Opened(answer) | Event::Answered(answer)) => {
                self.decided(ask, answer, actions);
            }
            (State::Opening | State::Copying, Event::Abort(why)) => self.stay(why, actions),
            (State::Committed(_), Event::Abort(_)) => {
                self.state = State::Committed(Ask::Cancel);
                actions.push(Action::Ask(Ask::Cancel));
            }
            // Late or repeated: it changes nothing.
            _ => {}
        }
    }

    fn opened(&mut self, answer: Answer, actions: &mut Vec<Action>) {
        match answer.decision {
            // After a cut, the copy begins anew.
            Decision::Open => {
                self.state = State::Copying;
                actions.push(Action::Copy);
            }
            Decision::Refused => self.stay(answer.why, actions),
            // It was taken, but here nothing was committed: this record is an old one.
            Decision::Taken | Decision::Unknown => {
                self.state = State::Over;
                actions.push(Action::End(End::Unknown));
            }
        }
    }

    fn decided(&mut self, ask: Ask, answer: Answer, actions: &mut Vec<Action>) {
        match answer.decision {
            Decision::Open => actions.push(Action::Ask(ask)),
            Decision::Refused => self.stay(answer.why, actions),
            Decision::Taken => {
                if let Some(record) = self.record.gone(self.token) {
                    self.state = State::Over;
                    actions.push(Action::Release);
                    self.keep(record, actions);
                    actions.push(Action::End(End::Moved));
                }
            }
            Decision::Unknown => {
                self.state = State::Over;
                actions.push(Action::End(End::Unknown));
            }
        }
    }

    fn stay(&mut self, why: String, actions: &mut Vec<Action>) {
        self.state = State::Over;
        if let Some(record) = self.record.thaw(self.token) {
            self.keep(record, actions);
        }
        // It may have been paused for the hand-over. Only then is the move over: a crash in between leaves it to the next
        // seeder.
        actions.push(Action::Resume);
        if let Some(record) = self.record.stay(self.token) {
            self.keep(record, actions);
        }
        actions.extend([Action::Ask(Ask::Cancel), Action::End(End::Stayed(why))]);
    }

    fn keep(&mut self, record: MachineRecord, actions: &mut Vec<Action>) {
        self.record = record.clone();
        actions.push(Action::Keep(record));
    }
}
