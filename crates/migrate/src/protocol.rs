//! What the seeder asks and the leecher answers.
//!
//! # Participants
//! The **seeder** is the site that has the running machine, the **leecher** the one that it goes to.
//!
//! # Goals
//! - Never may both run the machine, and exactly one may once both are back, wherever either of them or the link dies.
//! - Every request may be repeated, after a cut or a restart of either, and gets the same answer.
//!
//! # Course of a move
//! The seeder opens a conversation ([`OpenMove`]), whose reply says that the leecher has recorded the move, or what it
//! decided about it before. Disks and
//! memory follow by other services. At the end, with the machine paused and all of it there, the seeder records that it
//! commits, and then asks the leecher to take the machine ([`Ask::Commit`]), again and again until there is an answer.
//! Until it commits, it can give the move up without an answer; [`Ask::Cancel`] merely tidies the other side.

use drover_core::ImageName;
use drover_net::request;
use drover_store::machine::{Decision, Generation, Seed, Token};
use serde::{Deserialize, Serialize};

/// Frame kinds of the conversation after the reply to [`OpenMove`].
pub mod kind {
    /// An [`Ask`](super::Ask).
    pub const ASK: u8 = 0x70;
    /// An [`Answer`](super::Answer).
    pub const ANSWER: u8 = 0x71;
}

/// A move, as the seeder offers it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenMove {
    /// The move.
    pub token: Token,
    /// The machine's name at the leecher.
    pub machine: ImageName,
    /// Its seed.
    pub seed: Seed,
    /// Its generation at the seeder.
    pub generation: Generation,
    /// Its disks, in its order.
    pub disks: Vec<DiskOffer>,
    /// Size of its memory in bytes; 0 when it does not move live.
    pub memory_bytes: u64,
}

request!(OpenMove: "migrate.open", Host, () => Answer);

/// A disk of a machine that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOffer {
    /// The name of its image at the leecher.
    pub image: ImageName,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Whether the machine cannot write it.
    pub read_only: bool,
}

/// What the seeder asks about the move of the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Take the machine: it is frozen at the seeder.
    Commit,
    /// Refuse the machine, unless it was taken.
    Cancel,
}

/// What the leecher answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// What became of the move.
    pub decision: Decision,
    /// Why it was refused, for a person; empty where there is nothing to say.
    pub why: String,
}
