//! The remote side of a managed device, as [`Synced`](crate::synced::Synced) sees it.
//!
//! A [`BlockDevice`](drover_core::BlockDevice) blocks its caller until a request is done. A remote must do more: keep
//! many requests in flight without a thread for each, serve waiting readers before background work, apply a set of
//! writes as a whole or not at all, and recover after its link was lost. So there are two traits that call each other:
//! requests go to [`Remote`], completions and news of the link to [`Local`].

use std::sync::Weak;

use bytes::Bytes;
use drover_core::{DeviceError, Digest};

/// What a device is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of the device.
    pub size: u64,
    /// Bytes of a chunk, a power of two of at least 4096; the device's last chunk may be shorter.
    pub chunk: u32,
}

impl Shape {
    /// How many chunks there are.
    #[must_use]
    pub fn chunks(self) -> u64 {
        self.size.div_ceil(u64::from(self.chunk))
    }

    /// Bytes of chunk `index`: less than [`Shape::chunk`] for a last one that the device cuts short.
    #[must_use]
    pub fn length(self, index: u64) -> u32 {
        let start = index.saturating_mul(u64::from(self.chunk));
        let left = self.size.saturating_sub(start);
        u32::try_from(left).unwrap_or(u32::MAX).min(self.chunk)
    }
}

/// A run of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// The first.
    pub first: u64,
    /// How many; at least one.
    pub count: u32,
}

impl Chunks {
    /// The one after the last.
    #[must_use]
    pub fn end(self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// A whole chunk that arrived and was verified.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Which.
    pub index: u64,
    /// What it holds.
    pub content: Content,
}

/// What a chunk holds.
#[derive(Clone, Debug)]
pub enum Content {
    /// Zeros only.
    Zero,
    /// These bytes, as many as [`Shape::length`] says, and their digest (256-bit BLAKE3), which was compared.
    Data(Bytes, Digest),
}

/// A change that is part of an epoch. Offsets and lengths are multiples of 4096, but for the device's end.
#[derive(Clone, Debug)]
pub enum Change {
    /// These bytes at that offset.
    Write(u64, Bytes),
    /// Zeros, `(offset, length)`.
    Zero(u64, u64),
}

impl Change {
    /// Where it begins.
    #[must_use]
    pub fn offset(&self) -> u64 {
        match self {
            Change::Write(offset, _) | Change::Zero(offset, _) => *offset,
        }
    }

    /// Bytes of the device that it covers.
    #[must_use]
    pub fn covers(&self) -> u64 {
        match self {
            Change::Write(_, bytes) => bytes.len() as u64,
            Change::Zero(_, length) => *length,
        }
    }
}

/// The number of a set of writes that reaches the far side as a whole or not at all. The far side's first state is
/// epoch 0; each one that is pushed or committed is greater than the last that was committed, but not by one: whoever
/// writes chooses it with [`Epoch::after`], the high half counting, the low half random. So a writer that crashed
/// between asking for a commit and its answer knows its own commit again, and never takes another's for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The one after this one, with `random` bits to tell it by.
    #[must_use]
    pub fn after(self, random: u32) -> Self {
        Self((self.count() + 1) << 32 | u64::from(random))
    }

    /// How many were chosen up to this one: for people.
    #[must_use]
    pub fn count(self) -> u64 {
        self.0 >> 32
    }
}

/// Whether the far side can be reached.
#[derive(Clone, Debug)]
pub enum Link {
    /// It can. Numbered from 1: the number grows by one each time the link comes back.
    Up(u64),
    /// It cannot now; tried again without anybody's doing. The reason is for people.
    Down(String),
    /// It will not come back: refused, replaced, lease lost. The error that every request gets from now on.
    Gone(DeviceError),
}

/// Told when a request is done. Runs on a thread that may block, but not for long: others wait behind it.
pub type Done = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

/// What the far side has staged of an epoch, from some byte of the device on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Staged {
    /// The epoch that is staged there, which need not be the one that was asked about; 0 when there is none.
    pub epoch: Epoch,
    /// Runs `(offset, length)` of what is staged, in order; none of another epoch than the one that was asked about.
    pub runs: Vec<(u64, u64)>,
    /// Where to go on asking; at the end of the device, or behind it, there is no more.
    pub end: u64,
}

/// Told what is staged.
pub type StagedDone = Box<dyn FnOnce(Result<Staged, DeviceError>) + Send>;

/// Told which of some chunks are known to hold zeros only.
pub type PresenceDone = Box<dyn FnOnce(Result<Vec<Chunks>, DeviceError>) + Send>;

/// The far side. No call blocks; answers come as calls, from threads of the far side's own that may block on a disk.
///
/// Implementations MUST
/// - answer every request once: with what was asked for, or with an error after a limit of time; what was asked while
///   the link is down waits for it that long;
/// - put a [`Remote::fetch`] before all background work, on both sides;
/// - hand out no chunk whose bytes do not have the digest the far side claims: that is [`DeviceError::Corrupt`];
/// - answer a fetch or a presence that is asked after a commit was answered from that epoch or a later one, and tell
///   nothing more of chunks that have failed until they are asked for again;
/// - ask [`Local::next`] for background work only while the link has room for it, so that what is under way is about
///   bandwidth x round trip, and ask again after [`Remote::kick`].
pub trait Remote: Send + Sync {
    /// Size and chunk. Does not change, also when the link comes back.
    fn shape(&self) -> Shape;

    /// Whether it takes no changes.
    fn read_only(&self) -> bool;

    /// Says whom to tell; called once, before anything is asked.
    fn attach(&self, local: Weak<dyn Local>);

    /// Asks for chunks that somebody waits for. They come by [`Local::arrived`], in any order and grouping, or
    /// [`Local::failed`]. Chunks that are under way as background work are hurried and come once; when they were
    /// handed out by [`Local::next`] only just now they may come twice.
    fn fetch(&self, chunks: Chunks);

    /// Says that [`Local::next`] may have something, after it had nothing.
    fn kick(&self);

    /// Asks which chunks of a run are known to hold zeros only, to be answered before background work.
    fn presence(&self, chunks: Chunks, done: PresenceDone);

    /// Sends part of an epoch. It counts only once the epoch is committed. What was answered stays staged over a loss of the
    /// link, until an epoch of a higher number is pushed; what was not answered fails as [`DeviceError::Unavailable`].
    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: Done);

    /// Asks what is staged of an epoch, from byte `from` of the device on. Fails as [`DeviceError::Unavailable`] when the
    /// link is lost.
    fn staged(&self, epoch: Epoch, from: u64, done: StagedDone);

    /// Makes an epoch count, durably and as a whole, after all its parts were answered. Epochs are committed in order;
    /// what was pushed of an epoch that a later one overtakes is dropped. `covers` is how many bytes of the device its
    /// parts cover: when other than so many are staged, none counts, what is staged stays, and it fails as
    /// [`DeviceError::Unavailable`]. That means otherwise that the link was lost; [`Remote::committed`] tells after the
    /// next [`Link::Up`] whether it counts.
    fn commit(&self, epoch: Epoch, covers: u64, done: Done);

    /// The last epoch that counts at the far side, as of when the link last came up or a commit was answered.
    fn committed(&self) -> Epoch;

    /// Whether the far side can be reached at this moment; changes are told by [`Local::link`].
    fn link(&self) -> Link;

    /// What is under way and how fast, for people.
    fn traffic(&self) -> Traffic;

    /// Gives the lease back and closes the link; requests under way fail as [`DeviceError::Closed`]. `done` is told
    /// when the far side knows, or cannot be told.
    fn close(&self, done: Done);
}

/// How much moves.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Chunks' bytes that were asked for and have not arrived.
    pub in_flight: u64,
    /// Background bytes that may be under way at once, as it is set now.
    pub window: u64,
    /// Bytes of changes that may be under way at once to the far side, as it is set now.
    pub push_window: u64,
    /// Bytes that arrived on the link in all, compressed.
    pub received: u64,
    /// Bytes that left on the link in all, compressed.
    pub sent: u64,
    /// The least round trip seen, in seconds; 0 while unknown.
    pub round_trip: f64,
    /// Chunks' bytes arriving in a second, lately.
    pub rate: f64,
}

/// The near side, told by a [`Remote`].
pub trait Local: Send + Sync {
    /// Chunks that were asked for are here.
    fn arrived(&self, chunks: Vec<Fetched>);

    /// Chunks that were asked for will not come.
    fn failed(&self, chunks: Chunks, error: DeviceError);

    /// The next run to fetch in the background, of at most `most` bytes (but at least one chunk); none when there is
    /// nothing to do now. It counts as asked for. Called often: must not block.
    fn next(&self, most: u64) -> Option<Chunks>;

    /// The link came up, went down, or is gone. Told in that order: the last is how it is.
    fn link(&self, link: Link);
}
