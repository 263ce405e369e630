//! What the source of a replica asks the site that keeps it.
//!
//! A round: the source begins it ([`BeginRound`]), sends the images that it was named as any image is sent, and completes it
//! ([`CompleteRound`]). Each may be repeated. The encoding is in `docs/format/services.md`.

use drover_core::{Digest, ImageName};
use drover_net::request;
use drover_store::machine::{Seed, Token};
use serde::{Deserialize, Serialize};

/// Begins a round, or begins it anew: what arrived of one that is not complete is of no use but to be compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginRound {
    /// The name of the replica there.
    pub name: ImageName,
    /// Identifies what it is a replica of.
    pub seed: Seed,
    /// Whether that is a machine, not an image.
    pub is_machine: bool,
    /// Its disks, in its order: what its hypervisor calls the device of each, or nothing.
    pub disks: Vec<String>,
    /// Seconds from one round to the next; none if they are made one by one.
    pub every_seconds: Option<u64>,
}
request!(BeginRound: "replica.begin", Send, () => Begun);

/// A round has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// The round.
    pub round: Token,
    /// The images that are to be sent, in the order of the disks.
    pub images: Vec<ImageName>,
}

/// All images of a round have been delivered: they are the replica from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompleteRound {
    /// The replica.
    pub name: ImageName,
    /// The round.
    pub round: Token,
    /// How long ago the disks were in this state, in milliseconds.
    pub age_ms: u64,
    /// What was delivered, in the order of the disks.
    pub digests: Vec<Digest>,
}
request!(CompleteRound: "replica.complete", Send, () => ());

/// Tells the generations of a disk of the newest point, so that the next round sends only what was written since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TellPoint {
    /// The replica.
    pub name: ImageName,
    /// The round that the point came by.
    pub round: Token,
    /// The disk, by its place in the machine.
    pub disk: u32,
    /// A `drover_store::generations::Summary`, encoded; its last generation is over.
    pub generations: Vec<u8>,
}
request!(TellPoint: "replica.generations", Send, () => ());
