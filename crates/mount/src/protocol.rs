//! The protocol between a mount and the site that has its image.
//!
//! # Participants
//! The **site** has an image and serves it as a device. The **mount** reads it, and writes it if it holds the image's
//! lease.
//!
//! # Goals
//! - A foreground read (one that a program waits for) takes little more than one round trip, even while a background
//!   pull of the rest of the device fills the link.
//! - The pull fills the link without building a queue in it.
//! - A chunk is used only if its bytes have the digest that the site sent.
//! - The site's copy is always a state that the mounted device really had: writes take effect in whole epochs.
//! - Parts of an epoch that have arrived are not sent again after a disconnect, or after a restart of the site: the
//!   mount queries them ([`Request::Staged`]) and sends the rest.
//! - Either side, and the link, may fail at any time; nothing that was acknowledged is lost.
//!
//! # Non-goals
//! Proving that the site's claims are those of the image's owner: a paired site is trusted with the contents, as it is
//! when it sends an image.
//!
//! # Course of a mount
//! A mount is several connections to the site, each a call with an [`Open`] that names the same mount. The site replies
//! to each with [`Opened`], or refuses it. From then on the mount sends requests ([`Request`]) and the site replies
//! ([`Reply`]) in any order, matched by ID; a request and all of its replies stay on one connection. Requests may
//! follow the open without waiting for its reply: a mount with an empty cache requests the chunks it needs first this
//! way.
//!
//! Background replies are limited by **credit** in bytes on the link, for the mount as a whole: on each connection the
//! mount reports how many bytes arrived on it and how many may be in flight in total ([`Request::Credit`]). So exactly
//! what the mount's [`Window`](drover_net::group::Window) allows is in flight, however well the chunks compress, and
//! everything else that was requested waits at the site, where a foreground read overtakes it.
//!
//! The encoding is in `docs/format/mount-wire.md`.

mod message;
mod refusal;

use std::ops::Range;
use std::time::Duration;

use drover_core::{Capabilities, Digest, ImageName};
use drover_device::remote::Shape;
use drover_net::{Code, KeepAlive, PeerKey, Refusal, request};
use drover_store::generations::{Comparison, Summary};
use drover_store::lease::{Access, HandOverToken, Identity, MAX_TERM, MountId};
use serde::{Deserialize, Serialize};

pub use message::{Message, Piece, decode_message, encode_message, pieces};
pub use refusal::{device_error, refusal_of};

/// Minimum chunk size in bytes.
pub const MIN_CHUNK: u32 = 4 << 10;

/// Maximum chunk size in bytes.
pub const MAX_CHUNK: u32 = 4 << 20;

/// Default chunk size in bytes.
pub const DEFAULT_CHUNK: u32 = 64 << 10;

/// Maximum device size in bytes.
pub const MAX_SIZE: u64 = 1 << 56;

/// Maximum chunks of a device.
pub const MAX_CHUNKS: u64 = 1 << 28;

/// Maximum message head in bytes.
pub const MAX_HEAD: usize = 48 << 10;

/// Maximum message body in bytes: a chunk and its digest, or many small ones.
pub const MAX_BODY: usize = MAX_CHUNK as usize + (64 << 10);

/// Maximum frame accepted by either side once a connection is open.
pub const MAX_MOUNT_FRAME: usize = 2 + MAX_HEAD + MAX_BODY;

/// Maximum bytes of chunks in one request; one chunk is always allowed.
pub const MAX_READ: u32 = 1 << 20;

/// Maximum bytes of chunks in one reply frame; one chunk is always allowed.
pub const MAX_UNIT: u32 = 256 << 10;

/// Maximum bytes covered by one direct read or write.
pub const MAX_DIRECT: u32 = 1 << 20;

/// Maximum runs in one [`Reply::Presence`], [`Reply::Extents`] or [`Reply::Staged`].
pub const MAX_RUNS: usize = 2048;

/// Maximum digests in one [`Reply::Digests`].
pub const MAX_DIGESTS: u32 = 1024;

/// Maximum connections of a mount.
pub const MAX_CONNECTIONS: usize = 9;

/// Maximum unanswered requests of a connection.
pub const MAX_ASKED: usize = 4096;

/// Maximum body bytes of unanswered requests of a connection.
pub const MAX_ASKED_BYTES: usize = 32 << 20;

/// Maximum length of a mount's name or note, in bytes.
pub const MAX_NAME: usize = 200;

/// Ping interval of an idle connection, and the silence after which it is considered dead.
pub const KEEP_ALIVE: KeepAlive = KeepAlive {
    ping_every: Duration::from_secs(5),
    dead_after: Duration::from_secs(30),
    stalled_after: Duration::from_secs(30),
};

/// Frame kinds.
pub mod kind {
    /// A [`Request`](super::Request) and its body.
    pub const REQUEST: u8 = 0x60;
    /// A [`Reply`](super::Reply) and its body.
    pub const REPLY: u8 = 0x61;
}

/// The role of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ConnectionKind {
    /// Control, presence queries, and both kinds of reads.
    Front,
    /// Reads: background ones, and foreground ones when it is the least loaded.
    Back,
    /// Writes.
    Push,
}

/// The request that opens a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The mount that the connection belongs to.
    pub mount: MountId,
    /// The connection's role.
    pub connection: ConnectionKind,
    /// The number of the mount's link, which grows with each reconnection. Once a later link is open, connections of
    /// earlier ones are dead and their unfinished requests are not executed.
    pub link: u64,
    /// The image to open.
    pub image: ImageName,
    /// Read-only, writable, or beside a writer in order to take over.
    pub access: Access,
    /// Chunk size in bytes: a power of two from [`MIN_CHUNK`] to [`MAX_CHUNK`].
    pub chunk: u32,
    /// The image state that the mount's cache belongs to, if it has one.
    pub expected: Option<Identity>,
    /// A note identifying the mounting party, for display; at most [`MAX_NAME`] bytes.
    pub note: String,
    /// The term of the write lease: how many seconds without a connection the mount wants to keep it, from 1 to
    /// [`MAX_TERM`]; `None` for ever.
    pub term: Option<u64>,
}

request!(Open: "mount.open", Read, () => Opened);

/// A mount that stands by, or holds the write lease, asks how things stand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookAtLease {
    /// The image.
    pub image: ImageName,
    /// The mount.
    pub mount: MountId,
    /// Whether to end the image's generation, and to tell what was written in which: once before anything is read, and once
    /// when the lease was handed over.
    pub point: bool,
}

request!(LookAtLease: "mount.lease", Write, () => LeaseSeen);

/// The reply to [`LookAtLease`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseSeen {
    /// Whether the mount holds the write lease.
    pub held: bool,
    /// Whether any mount does: otherwise nobody can hand it over.
    pub has_writer: bool,
    /// The image's state, or an earlier one: with `point`, that of the point or one before.
    pub identity: Identity,
    /// With `point`: an encoded [`Summary`], unless generations are not recorded.
    pub generations: Option<Vec<u8>>,
    /// The site that handed the lease over to whoever holds it, if it was.
    pub from: Option<PeerKey>,
}

impl LeaseSeen {
    /// The byte ranges that were written between the end of a point that was seen before and that of this one, or may have been;
    /// none if that is not known.
    #[must_use]
    pub fn written_since(&self, before: &Summary) -> Option<Vec<Range<u64>>> {
        let now = Summary::decode(self.generations.as_deref()?).ok()?;
        match now.compare(before) {
            Comparison::Newer { ranges, .. } => Some(ranges),
            _ => None,
        }
    }
}

/// A mount on the host that has the image asks which parts of it were written over, so that it can read the others by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookAtChanges {
    /// The image.
    pub image: ImageName,
    /// The mount, which has a connection.
    pub mount: MountId,
}

request!(LookAtChanges: "mount.changes", Manage, () => ChangesSeen);

/// The reply to [`LookAtChanges`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangesSeen {
    /// The digest of the image that is open, without what was written over it, or what stands for it.
    pub digest: Digest,
    /// Bytes of the units in which parts are given.
    pub unit: u64,
    /// The parts that differ from that image, or may: first unit and number of units. At most [`MAX_RUNS`].
    pub changed: Vec<(u64, u64)>,
}

impl ChangesSeen {
    /// The byte ranges that differ, or may.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.changed.iter().map(|&(first, count)| {
            let start = first.saturating_mul(self.unit);
            start..start.saturating_add(count.saturating_mul(self.unit))
        })
    }
}

/// The holder of a write lease hands it over to a mount that stands by. It has pushed and flushed all that it has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOverLease {
    /// The image.
    pub image: ImageName,
    /// The mount that holds it.
    pub mount: MountId,
    /// The number of its latest link: the site refuses if the mount has come by a later one, of another process perhaps.
    pub link: u64,
    /// Names this hand-over: the same request again has the same outcome.
    pub token: HandOverToken,
    /// The site that gets it; none for the only one that stands by.
    pub to: Option<PeerKey>,
    /// The mount there that gets it; none for the only one there that stands by.
    pub to_mount: Option<MountId>,
    /// Otherwise only checked.
    pub commit: bool,
}

request!(HandOverLease: "mount.hand-over", Read, () => String);

impl Open {
    /// Validates the values.
    ///
    /// # Errors
    /// [`Code::Protocol`] for an invalid one.
    pub fn check(&self) -> Result<(), Refusal> {
        let bad = |text: String| Err(Refusal::new(Code::Protocol, text));
        if !chunk_is_allowed(self.chunk) {
            return bad(format!(
                "a chunk is a power of two from {MIN_CHUNK} to {MAX_CHUNK} bytes, not {}",
                self.chunk
            ));
        }
        if self.note.len() > MAX_NAME {
            return bad(format!("a note has at most {MAX_NAME} bytes"));
        }
        if self
            .term
            .is_some_and(|term| !(1..=MAX_TERM).contains(&term))
        {
            return bad(format!(
                "the term of a lease is from 1 to {MAX_TERM} seconds"
            ));
        }
        Ok(())
    }
}

/// Whether this is a valid chunk size of a mount, in bytes.
#[must_use]
pub fn chunk_is_allowed(chunk: u32) -> bool {
    chunk.is_power_of_two() && (MIN_CHUNK..=MAX_CHUNK).contains(&chunk)
}

/// Checks that a device of this shape can be mounted.
///
/// # Errors
/// A one-line reason.
pub fn check_shape(shape: Shape) -> Result<(), String> {
    if !chunk_is_allowed(shape.chunk) {
        return Err(format!("chunks of {} bytes are not allowed", shape.chunk));
    }
    if shape.size == 0 {
        return Err("a device of no bytes cannot be mounted".into());
    }
    if shape.size > MAX_SIZE {
        return Err(format!(
            "a device of {} bytes is larger than can be mounted",
            shape.size
        ));
    }
    if shape.chunks() > MAX_CHUNKS {
        return Err(format!(
            "{} chunks are more than {MAX_CHUNKS}: mount it with a larger chunk",
            shape.chunks()
        ));
    }
    Ok(())
}

/// The site's reply to [`Open`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// Device size in bytes.
    pub size: u64,
    /// Chunk size in bytes, as requested.
    pub chunk: u32,
    /// The image's current state.
    pub identity: Identity,
    /// Whether that is the expected state, apart from epochs committed by this mount itself: its cache is valid.
    pub fresh: bool,
    /// Whether the mount may not write.
    pub read_only: bool,
    /// What direct requests can do.
    pub direct: DirectCapabilities,
    /// The term of the write lease in seconds, which may be shorter than the requested one; `None` for ever, and for
    /// readers.
    pub term: Option<u64>,
}

/// The [`Capabilities`] of direct requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectCapabilities {
    /// See [`Capabilities::fast_zeroes`].
    pub fast_zeroes: bool,
    /// See [`Capabilities::trim`].
    pub trim: bool,
    /// See [`Capabilities::durable`].
    pub durable: bool,
    /// See [`Capabilities::extents`].
    pub extents: bool,
}

impl From<Capabilities> for DirectCapabilities {
    fn from(of: Capabilities) -> Self {
        Self {
            fast_zeroes: of.fast_zeroes,
            trim: of.trim,
            durable: of.durable,
            extents: of.extents,
        }
    }
}

impl Opened {
    /// Device and chunk size.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape {
            size: self.size,
            chunk: self.chunk,
        }
    }
}

/// The encoding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Coding {
    /// Uncompressed.
    Plain,
    /// One zstd frame.
    Zstd,
}

/// A request of a mount. Each ID is new on its connection; every request except [`Request::Credit`] and
/// [`Request::Hurry`] is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Reads whole chunks, answered by [`Reply::Chunks`] until all have been sent.
    Read {
        /// Request ID.
        id: u64,
        /// The first chunk.
        first: u64,
        /// Number of chunks; at most [`MAX_READ`] bytes, or one chunk.
        count: u32,
        /// Whether it is a background read, which no program waits for.
        background: bool,
    },
    /// Promotes a background read to a foreground one.
    Hurry {
        /// ID of that read.
        id: u64,
    },
    /// Flow control: bytes received, and the limit of bytes in flight.
    Credit {
        /// Payload bytes of all replies received on this connection since it was opened.
        received: u64,
        /// Bytes that may be in flight on all connections of this mount before background replies are held back.
        window: u64,
    },
    /// Queries which chunks of a run are zero; answered by [`Reply::Presence`].
    Presence {
        /// Request ID.
        id: u64,
        /// The first chunk.
        first: u64,
        /// Number of chunks.
        count: u32,
    },
    /// Digests of chunks; answered by [`Reply::Digests`].
    Digests {
        /// Request ID.
        id: u64,
        /// The first chunk.
        first: u64,
        /// Number of chunks; at most [`MAX_DIGESTS`].
        count: u32,
    },
    /// Part of an epoch: writes the body at `offset`. Answered by [`Reply::Done`].
    Write {
        /// Request ID.
        id: u64,
        /// The epoch: greater than the last committed one, and the same for all parts.
        epoch: u64,
        /// Offset in bytes.
        offset: u64,
        /// Uncompressed length in bytes, at most [`MAX_DIRECT`].
        length: u32,
        /// Encoding of the body.
        coding: Coding,
    },
    /// Part of an epoch: zeros a range. Answered by [`Reply::Done`].
    Zero {
        /// Request ID.
        id: u64,
        /// The epoch.
        epoch: u64,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Commits the epoch, after all its parts were acknowledged. Answered by [`Reply::Committed`]; if the staged parts
    /// do not cover `covers` bytes, refused with [`Code::OutOfOrder`], and they stay staged.
    Commit {
        /// Request ID.
        id: u64,
        /// The epoch.
        epoch: u64,
        /// Bytes of the device that its parts cover.
        covers: u64,
    },
    /// Reads any byte range; answered by [`Reply::Bytes`].
    DirectRead {
        /// Request ID.
        id: u64,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes; at most [`MAX_DIRECT`].
        length: u32,
    },
    /// Writes the body; answered by [`Reply::Done`].
    DirectWrite {
        /// Request ID.
        id: u64,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes; at most [`MAX_DIRECT`].
        length: u32,
        /// Encoding of the body.
        coding: Coding,
    },
    /// Zeroes a range; answered by [`Reply::Done`].
    DirectZero {
        /// Request ID.
        id: u64,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// [`Zeroes::keep_allocated`](drover_core::Zeroes::keep_allocated).
        keep_allocated: bool,
        /// [`Zeroes::only_fast`](drover_core::Zeroes::only_fast).
        only_fast: bool,
    },
    /// Trims a range; answered by [`Reply::Done`].
    DirectTrim {
        /// Request ID.
        id: u64,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Makes acknowledged direct writes durable; answered by [`Reply::Done`].
    DirectFlush {
        /// Request ID.
        id: u64,
    },
    /// Queries the extents of a range; answered by [`Reply::Extents`].
    DirectExtents {
        /// Request ID.
        id: u64,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Ends the mount and returns its lease; answered by [`Reply::Done`].
    Close {
        /// Request ID.
        id: u64,
    },
    /// Queries what is staged of an epoch; answered by [`Reply::Staged`].
    Staged {
        /// Request ID.
        id: u64,
        /// The epoch.
        epoch: u64,
        /// The byte of the device to start at.
        from: u64,
    },
}

impl Request {
    /// The request's ID; none for kinds that get no reply.
    #[must_use]
    pub fn id(&self) -> Option<u64> {
        // The kinds with an ID are listed only once, below.
        self.clone().id_mut().copied()
    }

    /// The same, mutable.
    pub fn id_mut(&mut self) -> Option<&mut u64> {
        match self {
            Request::Read { id, .. }
            | Request::Presence { id, .. }
            | Request::Digests { id, .. }
            | Request::Write { id, .. }
            | Request::Zero { id, .. }
            | Request::Commit { id, .. }
            | Request::DirectRead { id, .. }
            | Request::DirectWrite { id, .. }
            | Request::DirectZero { id, .. }
            | Request::DirectTrim { id, .. }
            | Request::DirectFlush { id }
            | Request::DirectExtents { id, .. }
            | Request::Close { id }
            | Request::Staged { id, .. } => Some(id),
            Request::Hurry { .. } | Request::Credit { .. } => None,
        }
    }
}

/// A reply of the site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Some of the requested chunks, each sent once, in any order. The body is encoded as `coding` says; decoded it
    /// holds the digests of the chunks that are not zero, then their bytes.
    Chunks {
        /// Request ID.
        id: u64,
        /// The first chunk.
        first: u64,
        /// Number of chunks.
        count: u32,
        /// Bit `n % 8` of byte `n / 8` is set if chunk `first + n` is zero.
        zeros: Vec<u8>,
        /// Encoding of the body.
        coding: Coding,
        /// The `received` of the last [`Request::Credit`] when this was sent.
        echo: u64,
        /// Whether nothing else was waiting to be sent when this was.
        last: bool,
    },
    /// The zero chunks of a run.
    Presence {
        /// Request ID.
        id: u64,
        /// Runs `(first, count)`, in order.
        runs: Vec<(u64, u32)>,
        /// The chunk after the last one examined.
        end: u64,
    },
    /// Digests of chunks, starting at the first requested; all zeros for a zero chunk.
    Digests {
        /// Request ID.
        id: u64,
        /// In order; at least one, and fewer than requested if the site stopped early.
        digests: Vec<Digest>,
    },
    /// The bytes of a direct read, in the body.
    Bytes {
        /// Request ID.
        id: u64,
        /// Encoding of the body.
        coding: Coding,
    },
    /// The extents of a range.
    Extents {
        /// Request ID.
        id: u64,
        /// Runs `(length, kind)`: 0 data, 1 zero, 2 hole.
        runs: Vec<(u64, u8)>,
    },
    /// The request was executed.
    Done {
        /// Request ID.
        id: u64,
    },
    /// The epoch is committed.
    Committed {
        /// Request ID.
        id: u64,
        /// The epoch.
        epoch: u64,
    },
    /// The request failed.
    Error {
        /// Request ID; 0 refers to the connection as a whole, which ends with it.
        id: u64,
        /// The reason.
        refusal: Refusal,
    },
    /// What is staged of an epoch.
    Staged {
        /// Request ID.
        id: u64,
        /// The epoch that is staged; 0 if none. If it is not the requested one, nothing else is reported.
        epoch: u64,
        /// Runs `(offset, length)` in bytes, in order, disjoint; at most [`MAX_RUNS`].
        runs: Vec<(u64, u64)>,
        /// The runs are complete up to this byte of the device.
        end: u64,
    },
    /// Reports received body bytes, whether or not the requests were executed: so the mount measures the link and not
    /// the site's disk.
    Arrived {
        /// Body bytes of all requests received on this connection since it was opened.
        bytes: u64,
        /// When the last of them was received, in microseconds of the site's clock: this attributes delays to one
        /// direction of the round trip.
        at: u64,
    },
}

impl Reply {
    /// The ID of the request that this answers; 0 for none.
    #[must_use]
    pub fn id(&self) -> u64 {
        match *self {
            Reply::Arrived { .. } => 0,
            Reply::Chunks { id, .. }
            | Reply::Presence { id, .. }
            | Reply::Digests { id, .. }
            | Reply::Bytes { id, .. }
            | Reply::Extents { id, .. }
            | Reply::Done { id }
            | Reply::Committed { id, .. }
            | Reply::Staged { id, .. }
            | Reply::Error { id, .. } => id,
        }
    }
}

#[cfg(test)]
mod tests;
