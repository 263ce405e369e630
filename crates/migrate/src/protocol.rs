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
//! The seeder makes a call ([`OpenMove`]) that lasts as long as the move. The leecher records the move and answers, or
//! answers what it decided about it before. The copy begins ([`Ask::Begin`]), perhaps not for the first time. The disks'
//! images are sent as any image is. Then the leecher prepares
//! ([`Ask::Prepare`]): it opens the disks and the hypervisor that waits for the machine. What is written to the disks in
//! the meantime follows in [`SendDisks`], the memory in [`SendMemory`], each a call of its own. Memory may come before the leecher is
//! asked to prepare; then it keeps it until it has.
//!
//! At the end, with the machine paused and all of it there ([`Ask::Arrived`]), the seeder records that it commits, and
//! asks the leecher to take the machine ([`Ask::Commit`]), again and again until there is an answer. Until it commits, it
//! can give the move up without one; [`Ask::Cancel`] merely tidies the other side.
//!
//! A leecher that builds the hypervisor is told before what the machine is made of ([`DescribeMachine`]).
//!
//! What of the disks does not fit into the pause is named instead of sent, and follows when the leecher has taken the machine:
//! what the machine waits for by [`FetchDisks`], the rest by [`SendDisks`]. Until then the seeder's move is committed and not
//! over, and the leecher's is in part.
//!
//! A disk that is a mount of a third site's image does not move: the leecher mounts that image, too, and stands by
//! ([`MountedDisk`]). Who may run the machine is decided as for any; only then, the seeder hands the write lease over, and until it
//! has, the machine waits for that disk.
//!
//! The encoding is in `docs/format/migrate-wire.md`.

use std::time::Duration;

use drover_core::ImageName;
use drover_hypervisor::spec::Spec;
use drover_net::{KeepAlive, PeerKey, request};
use drover_store::lease::{HandOverToken, MountId};
use drover_store::machine::{Decision, Generation, Seed, Token};
use drover_teleport::Packing;
use serde::{Deserialize, Serialize};

/// Kinds of the frames that follow the replies to [`OpenMove`], [`SendDisks`] and [`SendMemory`].
pub mod kind {
    /// An [`Ask`](super::Ask) of the seeder.
    pub const ASK: u8 = 0x75;
    /// An [`Answer`](super::Answer) of the leecher: one when the move is opened, and one to each question.
    pub const ANSWER: u8 = 0x76;
    /// Bytes of a disk: a [`WriteHead`](super::WriteHead), and the bytes.
    pub const WRITE: u8 = 0x70;
    /// What was written is to be made durable.
    pub const FLUSH: u8 = 0x71;
    /// It is durable.
    pub const FLUSHED: u8 = 0x72;
    /// Bytes of the hypervisor's stream, in either direction: a [`MemoryHead`](super::MemoryHead), and the bytes.
    pub const MEMORY: u8 = 0x73;
    /// No more of them follow in this direction.
    pub const MEMORY_END: u8 = 0x74;
    /// Bytes that measure the link, of which nothing is made.
    pub const MEASURE: u8 = 0x7b;
    /// They have come.
    pub const MEASURED: u8 = 0x7c;
    /// The leecher could not write to a disk: why, as text. Nothing follows.
    pub const FAILED: u8 = 0x77;
}

/// Upper bound on the bytes of a disk in one frame, unpacked.
pub const MAX_WRITE: usize = 1 << 20;

/// Upper bound on the bytes of the stream in one frame, unpacked.
pub const MAX_MEMORY: usize = 256 << 10;

/// Upper bound on frames.
pub const MAX_FRAME: usize = MAX_WRITE + 4096;

/// Ping interval of an idle connection, and the silence after which it is considered dead.
pub const KEEP_ALIVE: KeepAlive = KeepAlive {
    ping_every: Duration::from_secs(5),
    dead_after: Duration::from_secs(30),
    stalled_after: Duration::from_secs(30),
};

/// Upper bound on the text of an answer, in bytes.
pub const MAX_WHY: usize = 500;

/// Upper bound on the name of a device, in bytes.
pub const MAX_DEVICE: usize = 200;

/// What moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A machine, which runs at the leecher at the end.
    #[default]
    Machine,
    /// The disk of a program: at the end it is an image of the leecher.
    Disk,
}

/// Opens a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenMove {
    /// What moves: machines and disks have names of their own.
    pub kind: Kind,
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
    /// Size of its memory in bytes.
    pub memory_bytes: u64,
    /// Disks that do not move: they are images of other sites, which the leecher mounts, too. The seeder hands its write leases
    /// over when the leecher has taken the machine.
    pub mounted: Vec<MountedDisk>,
}

request!(OpenMove: "migrate.open", Host, () => ());

/// A disk of a machine that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOffer {
    /// The name of its image at the leecher.
    pub image: ImageName,
    /// What the seeder's hypervisor calls the device: at the leecher that of the same name gets it.
    pub device: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Whether the machine cannot write it.
    pub read_only: bool,
}

/// A disk of a machine that moves, which is an image of another site, mounted at the seeder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedDisk {
    /// What the seeder's hypervisor calls the device.
    pub device: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// The site that has the image.
    pub site: PeerKey,
    /// The image's name there.
    pub image: ImageName,
}

/// The mount with which the leecher stands by for a disk, by its place in [`OpenMove::mounted`], and the name of the hand-over to it.
/// Both ends know the token; nobody can choose one that leads to a mount that there is.
#[must_use]
pub fn heir(token: Token, disk: usize) -> (MountId, HandOverToken) {
    let derive = |what: &str| {
        let mut hasher = blake3::Hasher::new_derive_key(what);
        hasher.update(&token.0);
        hasher.update(&(disk as u64).to_le_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        id
    };
    (
        MountId(derive("drover mount of a disk of a machine that comes")),
        derive("drover hand-over of a disk of a machine that has left"),
    )
}

/// What the seeder asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The copy begins: what arrived before is void.
    Begin,
    /// The images of all disks have been sent: get ready for what follows.
    Prepare,
    /// Everything was sent: wait until the hypervisor has all of it.
    Arrived,
    /// Take the machine: it is frozen at the seeder.
    Commit,
    /// Refuse the machine, unless it was taken.
    Cancel,
}

/// What the leecher answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// What became of the move; [`Decision::Open`] where what was asked for is done.
    pub decision: Decision,
    /// Why it was refused, or was taken and does not run, for a person, at most [`MAX_WHY`] bytes; empty where there is
    /// nothing to say.
    pub why: String,
}

/// Sends what was written to the disks after their images were sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendDisks {
    /// What moves.
    pub kind: Kind,
    /// The machine's name at the leecher.
    pub machine: ImageName,
    /// Its move.
    pub token: Token,
}

request!(SendDisks: "migrate.disks", Host, () => ());

/// Offers to send what the leecher waits for of disks that were not sent before it took the machine. The leecher first says
/// what it lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchDisks {
    /// The machine's name at the leecher.
    pub machine: ImageName,
    /// Its move.
    pub token: Token,
}

request!(FetchDisks: "migrate.fetch", Host, () => ());

/// Tells what a machine is made of, so that the leecher can build a QEMU for it; before [`Ask::Prepare`], or, without a token,
/// only to ask. The reply says whether the leecher builds one. One that builds it, and not this, refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescribeMachine {
    /// The machine's name at the leecher.
    pub machine: ImageName,
    /// Its move, if it is under way.
    pub token: Option<Token>,
    /// What it is made of; `None` if the seeder cannot say.
    pub spec: Option<Spec>,
}

request!(DescribeMachine: "migrate.describe", Host, () => bool);

/// Measures the link, before a move: frames of [`kind::MEASURE`] follow, and the leecher answers each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasureLink;

request!(MeasureLink: "migrate.measure", Host, () => ());

/// Where bytes of a disk go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteHead {
    /// The disk, by its place in the offer.
    pub disk: u32,
    /// Where they begin.
    pub offset: u64,
    /// How many there are, at most [`MAX_WRITE`] unless they are zeros.
    pub length: u64,
    /// How they follow.
    pub coding: Coding,
}

/// How the bytes of a [`kind::WRITE`] are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Coding {
    /// Not at all.
    Plain,
    /// Compressed by zstd.
    Zstd,
    /// They are zeros, and do not follow.
    Zeros,
}

/// Carries the hypervisor's stream of memory and devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendMemory {
    /// The machine's name at the leecher.
    pub machine: ImageName,
    /// Its move.
    pub token: Token,
}

request!(SendMemory: "migrate.memory", Host, () => ());

/// Tells, after a move, the generations of a disk that was left behind, so that it can come back to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TellGenerations {
    /// The machine's name at the leecher, which runs it.
    pub machine: ImageName,
    /// The move by which it came.
    pub token: Token,
    /// The disk, by its place in the machine.
    pub disk: u32,
    /// A `drover_store::generations::Summary`, encoded; its last generation is over.
    pub generations: Vec<u8>,
}

request!(TellGenerations: "migrate.generations", Host, () => ());

/// How bytes of the stream follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryHead {
    /// How many there are, at most [`MAX_MEMORY`].
    pub length: u32,
    /// How they are packed.
    pub packing: Packing,
}
