//! What is said while a program moves.
//!
//! # Participants
//! The **seeder** is the process that has the program, the **leecher** the one that it goes to.
//!
//! # Goals
//! - As for machines ([`crate::protocol`]): never may both run it, and every request may be repeated.
//! - What a program waits for at its new place comes before what follows behind.
//!
//! # Course of a move
//! The seeder opens a conversation ([`OpenProgram`]), in which it asks as it does for a machine. It sends the bytes of the
//! parts in [`SendPages`], and opens [`FetchPages`] for the way back: there the leecher says what is waited for. With the
//! program paused it says which blocks are out of date at the leecher ([`Left`]) and sends the program's own state, the last
//! frame of the copy. Then it commits, as it does a machine. From then on what it sends in either call is what was left.
//! The last FLUSH is answered when nothing is absent any more: the seeder may end.
//!
//! The encoding is in `docs/format/program-wire.md`.

use std::time::Duration;

use drover_core::ImageName;
use drover_net::request;
use drover_store::machine::{Generation, Seed, Token};
use serde::{Deserialize, Serialize};

/// Kinds of the frames that are not those of a machine's disks.
pub mod kind {
    /// Blocks that are out of date at the leecher, and absent from now on: a [`Left`](super::Left).
    pub const LEFT: u8 = 0x78;
    /// All was said: the program's own state, as it is.
    pub const STATE: u8 = 0x79;
    /// What is waited for: a [`Want`](super::Want).
    pub const WANT: u8 = 0x7a;
}

/// The unit of what is left.
pub const BLOCK: u64 = 4096;

/// Upper bound on the parts of a program.
pub const MAX_PARTS: usize = 64;

/// Upper bound on the name of a part, in bytes.
pub const MAX_NAME: usize = 200;

/// Upper bound on the program's own state, in bytes.
pub const MAX_STATE: usize = 1 << 20;

/// Upper bound on the runs in one [`Left`].
pub const MAX_RUNS: usize = 32_768;

/// Upper bound on the bytes of one [`Want`].
pub const MAX_WANT: u64 = 16 << 20;

/// Lower bound on the time that a leecher waits for a lost seeder.
pub const MIN_PATIENCE: Duration = Duration::from_secs(1);

/// Upper bound on the time that a leecher waits for a lost seeder.
pub const MAX_PATIENCE: Duration = Duration::from_secs(3600);

/// Opens a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenProgram {
    /// The move.
    pub token: Token,
    /// The program's name at the leecher.
    pub program: ImageName,
    /// Its seed.
    pub seed: Seed,
    /// Its generation at the seeder.
    pub generation: Generation,
    /// Its parts, at most [`MAX_PARTS`].
    pub parts: Vec<PartOffer>,
    /// How long the seeder tries to reach the leecher when it has been taken and something is left, in milliseconds; as long
    /// the leecher waits for it, between [`MIN_PATIENCE`] and [`MAX_PATIENCE`].
    pub patience_ms: u64,
}

request!(OpenProgram: "program.open", Host, () => ());

/// A part of a program that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartOffer {
    /// Its name, at most [`MAX_NAME`] bytes.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
}

/// Sends bytes of the parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendPages {
    /// The program's name at the leecher.
    pub program: ImageName,
    /// Its move.
    pub token: Token,
}

request!(SendPages: "program.pages", Host, () => ());

/// Offers to send what the leecher asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchPages {
    /// The program's name at the leecher.
    pub program: ImageName,
    /// Its move.
    pub token: Token,
}

request!(FetchPages: "program.fetch", Host, () => ());

/// Blocks that are out of date at the leecher.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The part, by its place in the offer.
    pub part: u32,
    /// Runs of blocks: the first, and how many. At most [`MAX_RUNS`].
    pub runs: Vec<(u32, u32)>,
}

/// What a reader waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// The part, by its place in the offer.
    pub part: u32,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How many bytes, at most [`MAX_WANT`].
    pub length: u64,
}
