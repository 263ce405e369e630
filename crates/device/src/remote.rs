//! The remote side of a managed device, as [`Synced`](crate::synced::Synced) sees it.
//!
//! A [`BlockDevice`](drover_core::BlockDevice) blocks its caller until a request completes. A remote must do more: keep
//! many requests in flight without a thread for each, serve waiting readers before background work, apply a set of
//! writes atomically, and recover after its link was lost. So there are two traits that call each other: requests go to
//! [`Remote`], completions and link changes to [`Local`].

use std::sync::Weak;

use bytes::Bytes;
use drover_core::{DeviceError, Digest};

/// The geometry of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Size of the device in bytes.
    pub size: u64,
    /// Chunk size in bytes, a power of two of at least 4096; the device's last chunk may be shorter.
    pub chunk: u32,
}

impl Shape {
    /// Number of chunks.
    #[must_use]
    pub fn chunks(self) -> u64 {
        self.size.div_ceil(u64::from(self.chunk))
    }

    /// Length of chunk `index` in bytes: less than [`Shape::chunk`] for a short last chunk.
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
    /// The first chunk.
    pub first: u64,
    /// Number of chunks; at least one.
    pub count: u32,
}

impl Chunks {
    /// The index after the last chunk.
    #[must_use]
    pub fn end(self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// A whole chunk that arrived and was verified.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its index.
    pub index: u64,
    /// Its contents.
    pub content: Content,
}

/// The contents of a chunk.
#[derive(Clone, Debug)]
pub enum Content {
    /// All zeros.
    Zero,
    /// These bytes, as many as [`Shape::length`] says, and their digest (256-bit BLAKE3), which was verified.
    Data(Bytes, Digest),
}

/// A change that is part of an epoch. Offsets and lengths are multiples of 4096, except at the device's end.
#[derive(Clone, Debug)]
pub enum Change {
    /// Bytes to write at an offset.
    Write(u64, Bytes),
    /// Zeros, `(offset, length)`.
    Zero(u64, u64),
}

impl Change {
    /// Offset in bytes.
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

/// The number of a set of writes that reaches the remote atomically. The remote's initial state is epoch 0; each epoch
/// pushed or committed is greater than the last committed one, but not by one: the writer chooses it with
/// [`Epoch::after`], the high half a counter, the low half random. So a writer that crashed between a commit request
/// and its reply recognises its own commit, and never mistakes another's for it.
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

/// Whether the remote can be reached.
#[derive(Clone, Debug)]
pub enum Link {
    /// Up. Numbered from 1, incremented each time the link is re-established.
    Up(u64),
    /// Down for now; reconnection is automatic. The reason is for display.
    Down(String),
    /// Permanently down: refused, replaced, lease lost. All requests fail with this error from now on.
    Gone(DeviceError),
}

/// Completion callback. Runs on a thread that may block, but only briefly: other completions queue behind it.
pub type Done = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

/// What the remote has staged of an epoch, from some byte of the device on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Staged {
    /// The epoch that is staged, which may differ from the requested one; 0 when there is none.
    pub epoch: Epoch,
    /// Staged runs `(offset, length)`, in order; none if another epoch is staged than the requested one.
    pub runs: Vec<(u64, u64)>,
    /// Offset at which to continue; at or beyond the end of the device the answer is complete.
    pub end: u64,
}

/// Completion of [`Remote::staged`].
pub type StagedDone = Box<dyn FnOnce(Result<Staged, DeviceError>) + Send>;

/// Completion of [`Remote::presence`]: the chunks known to be zero.
pub type PresenceDone = Box<dyn FnOnce(Result<Vec<Chunks>, DeviceError>) + Send>;

/// The remote side. No call blocks; results arrive as callbacks, from threads of the remote that may block on a disk.
///
/// Implementations MUST
/// - complete every request exactly once: with its result, or with an error after a timeout; requests made while the
///   link is down wait for that long;
/// - prioritise a [`Remote::fetch`] over all background work, on both sides;
/// - never deliver a chunk whose bytes do not match the digest claimed by the remote: that is [`DeviceError::Corrupt`];
/// - answer a fetch or presence query that follows the reply to a commit from that epoch or a later one, and deliver
///   nothing more for failed chunks until they are requested again;
/// - call [`Local::next`] for background work only while the link has capacity, so that about bandwidth x round trip is
///   in flight, and again after [`Remote::kick`].
pub trait Remote: Send + Sync {
    /// Device and chunk size. Constant, also across reconnections.
    fn shape(&self) -> Shape;

    /// Whether it refuses changes.
    fn read_only(&self) -> bool;

    /// Registers the receiver of callbacks; called once, before any request.
    fn attach(&self, local: Weak<dyn Local>);

    /// Demand fetch: requests chunks that a reader waits for. They are delivered by [`Local::arrived`], in any order
    /// and grouping, or [`Local::failed`]. Chunks already in flight as background work are promoted and delivered once;
    /// those handed out by [`Local::next`] only just now may be delivered twice.
    fn fetch(&self, chunks: Chunks);

    /// Announces that [`Local::next`] may return work after it returned none.
    fn kick(&self);

    /// Queries which chunks of a run are known to be zero; answered before background work.
    fn presence(&self, chunks: Chunks, done: PresenceDone);

    /// Sends part of an epoch. It takes effect only when the epoch is committed. Acknowledged parts stay staged across
    /// a loss of the link, until an epoch with a higher number is pushed; unacknowledged ones fail with
    /// [`DeviceError::Unavailable`].
    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: Done);

    /// Queries what is staged of an epoch, from byte `from` of the device on. Fails with [`DeviceError::Unavailable`]
    /// when the link is lost.
    fn staged(&self, epoch: Epoch, from: u64, done: StagedDone);

    /// Commits an epoch durably and atomically, after all its parts were acknowledged. Epochs are committed in order;
    /// whatever was pushed of an epoch overtaken by a later one is dropped. `covers` is the number of device bytes that
    /// its parts cover: if a different number is staged, nothing is committed, the staged parts stay, and it fails with
    /// [`DeviceError::Unavailable`]. Otherwise that error means that the link was lost; [`Remote::committed`] tells the
    /// outcome after the next [`Link::Up`].
    fn commit(&self, epoch: Epoch, covers: u64, done: Done);

    /// The last epoch committed at the remote, as of the last link establishment or commit reply.
    fn committed(&self) -> Epoch;

    /// The current state of the link; changes are reported by [`Local::link`].
    fn link(&self) -> Link;

    /// Bytes in flight and rates, for display.
    fn traffic(&self) -> Traffic;

    /// Returns the lease and closes the link; requests in flight fail with [`DeviceError::Closed`]. `done` is called
    /// when the remote has confirmed, or cannot be reached.
    fn close(&self, done: Done);
}

/// Transfer statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Requested chunk bytes that have not arrived.
    pub in_flight: u64,
    /// Current limit of background bytes in flight.
    pub window: u64,
    /// Current limit of pushed bytes in flight.
    pub push_window: u64,
    /// Total bytes received on the link, compressed.
    pub received: u64,
    /// Total bytes sent on the link, compressed.
    pub sent: u64,
    /// Minimum round-trip time observed, in seconds; 0 while unknown.
    pub round_trip: f64,
    /// Recent rate of arriving chunk bytes, per second.
    pub rate: f64,
}

/// The local side: callbacks from a [`Remote`].
pub trait Local: Send + Sync {
    /// Requested chunks have arrived.
    fn arrived(&self, chunks: Vec<Fetched>);

    /// A fetch of chunks has failed.
    fn failed(&self, chunks: Chunks, error: DeviceError);

    /// The next run to fetch in the background, at most `most` bytes (but at least one chunk); none when there is
    /// nothing to do now. It counts as in flight. Called often: must not block.
    fn next(&self, most: u64) -> Option<Chunks>;

    /// The link's state changed. Reported in order: the last report is the current state.
    fn link(&self, link: Link);
}
