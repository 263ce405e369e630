//! What a program's seeder is told, and tells.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_store::machine::{Machines, Other};

use super::site::Site;

/// A program that can be stopped and continued. The calls may block.
pub trait Program: Send + Sync + 'static {
    /// Stops the program: when this returns nobody writes its parts. What it returns, at most 1 MiB, is given to
    /// [`Host::run`](super::Host::run).
    ///
    /// # Errors
    /// Why it cannot be stopped: then it stays.
    fn pause(&self) -> io::Result<Vec<u8>>;

    /// Lets it run on here: it did not move. Also called after a failed [`Program::pause`].
    fn resume(&self);
}

/// How a program moves.
#[derive(Clone)]
pub struct SeederOptions {
    /// Its name here.
    pub name: ImageName,
    /// Its name there.
    pub name_there: ImageName,
    /// The records of this process: which of its programs are elsewhere.
    pub machines: Machines,
    /// Where it goes.
    pub to: Arc<dyn Site>,
    /// The pause that is aimed at: [`Seeder::track`](super::Seeder::track) ends when what is left can be sent in half of it.
    pub max_pause: Duration,
    /// Most rounds of [`Seeder::track`](super::Seeder::track).
    pub max_rounds: u32,
    /// Whether what is left and does not fit into the pause follows when the program runs there already. Then it depends on
    /// this process until [`Seeder::finalize`](super::Seeder::finalize) returns.
    pub post_copy: bool,
    /// How long it is tried to make a lost connection anew, after the hand-over, until the rest is given up. The other end is
    /// told: there who reads what is absent waits as long.
    pub give_up_after: Duration,
    /// Told how far it is, after each round and while the rest follows.
    pub on_progress: Arc<dyn Fn(&Progress) + Send + Sync>,
}

impl SeederOptions {
    /// A pause of 200 ms, 16 rounds, and what is left afterwards.
    #[must_use]
    pub fn new(name: ImageName, machines: Machines, to: Arc<dyn Site>) -> Self {
        Self {
            name_there: name.clone(),
            name,
            machines,
            to,
            max_pause: Duration::from_millis(200),
            max_rounds: 16,
            post_copy: true,
            give_up_after: Duration::from_secs(600),
            on_progress: Arc::new(|_| {}),
        }
    }

    pub(super) fn other(&self) -> Other {
        Other {
            key: self.to.key(),
            name: self.to.name(),
        }
    }
}

/// How far a move is.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Progress {
    /// Rounds that are over.
    pub rounds: u32,
    /// Bytes that are left to be sent now.
    pub left: u64,
    /// Bytes of the parts that were sent.
    pub sent: u64,
    /// The same, as they were packed.
    pub packed: u64,
    /// Bytes of the parts per second, in the last round.
    pub rate: f64,
    /// Whether the program runs there.
    pub is_there: bool,
}

/// What a move was like.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// From before [`Program::pause`] until it was known here that the program runs there.
    pub pause: Duration,
    /// Of that, stopping the program and finding out what it had written.
    pub stop: Duration,
    /// Of that, sending what fits, and naming the rest.
    pub send: Duration,
    /// Bytes that followed after the hand-over.
    pub behind: u64,
    /// Of those, what was asked for first.
    pub asked: u64,
    /// Rounds before the pause.
    pub rounds: u32,
    /// Bytes of the parts that were sent.
    pub sent: u64,
    /// The same, as they were packed.
    pub packed: u64,
    /// From the beginning until all was there.
    pub whole: Duration,
}
