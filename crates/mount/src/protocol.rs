//! The protocol between a mount and the site that has its image.
//!
//! # Participants
//! The **site** has an image and serves it as a device. The **mount** reads it, and writes it if it holds the image's
//! lease.
//!
//! # Goals
//! - A foreground read (one that a program waits for) takes little more than one round trip, even while the rest of the
//!   device is pulled in the background and fills the link.
//! - The pull fills the link without building a queue in it.
//! - A chunk is used only if its bytes have the digest that the site sent.
//! - The site's copy is always a state that the mounted device really had: writes take effect by whole epochs.
//! - What has arrived of an epoch is not sent again after a cut, or after a restart of the site: the mount asks
//!   ([`Request::Staged`]) and sends the rest.
//! - Either side, and the link, may go at any time; nothing that was acknowledged is lost.
//!
//! # Non-goals
//! Proving that the site's claims are those of the image's owner: a paired site is trusted with the content, as it is
//! when it sends an image.
//!
//! # Course of a mount
//! A mount is several connections to the site, each a call with an [`Open`] that names the same mount.
//! The site replies to each with [`Opened`], or refuses it. From then on the mount
//! asks ([`Request`]) and the site answers ([`Reply`]) in any order, matched by id; a request and all of its reply stay
//! on one connection. Requests may follow the open without waiting for its reply: a mount whose cache is empty asks so for the
//! chunks that it needs first.
//!
//! Background replies obey a **credit** in bytes of the link, for the mount as a whole: the mount says on each connection how
//! many bytes arrived on it and how many may be in flight in all ([`Request::Credit`]). So what is in flight is exactly
//! what the mount's [`Window`](drover_net::group::Window) allows, however well the chunks compress, and
//! everything else that was asked for waits at the site, where a foreground read overtakes it.
//!
//! The bytes are in `docs/format/mount-wire.md`.

mod message;
mod refusal;

use std::time::Duration;

use drover_core::{Digest, ImageName};
use drover_device::remote::Shape;
use drover_net::{Code, KeepAlive, Refusal, request};
use drover_store::lease::{Access, Identity, MountId};
use serde::{Deserialize, Serialize};

pub use message::{Message, Piece, decode_message, encode_message, pieces};
pub use refusal::{device_error, refusal_of};

/// The smallest chunk, in bytes.
pub const MIN_CHUNK: u32 = 4 << 10;

/// The largest chunk, in bytes.
pub const MAX_CHUNK: u32 = 4 << 20;

/// The chunk of a mount that asked for no other, in bytes.
pub const DEFAULT_CHUNK: u32 = 64 << 10;

/// The largest device, in bytes.
pub const MAX_SIZE: u64 = 1 << 56;

/// Chunks of a device at most.
pub const MAX_CHUNKS: u64 = 1 << 28;

/// The largest head of a message, in bytes.
pub const MAX_HEAD: usize = 48 << 10;

/// The largest body of a message, in bytes: a chunk and its digest, or many small ones.
pub const MAX_BODY: usize = MAX_CHUNK as usize + (64 << 10);

/// The largest frame either side accepts once a connection is open.
pub const MAX_MOUNT_FRAME: usize = 2 + MAX_HEAD + MAX_BODY;

/// Bytes of chunks in one request at most; one chunk is always allowed.
pub const MAX_READ: u32 = 1 << 20;

/// Bytes of chunks in one frame of a reply at most; one chunk is always allowed.
pub const MAX_UNIT: u32 = 256 << 10;

/// Bytes that one direct read or write covers at most.
pub const MAX_DIRECT: u32 = 1 << 20;

/// Runs in one [`Reply::Presence`], [`Reply::Extents`] or [`Reply::Staged`] at most.
pub const MAX_RUNS: usize = 2048;

/// Digests in one [`Reply::Digests`] at most.
pub const MAX_DIGESTS: u32 = 1024;

/// Connections of a mount at most.
pub const MAX_CONNECTIONS: usize = 9;

/// Requests of a connection without a reply at most.
pub const MAX_ASKED: usize = 4096;

/// Bytes of requests' bodies of a connection without a reply at most.
pub const MAX_ASKED_BYTES: usize = 32 << 20;

/// The longest name or note of a mount, in bytes.
pub const MAX_NAME: usize = 200;

/// How often an idle connection pings, and after how long a silence it is given up.
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

/// What a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ConnectionKind {
    /// Control, presence, and reads of either sort.
    Front,
    /// Reads: background ones, and foreground ones when it is the least busy.
    Back,
    /// Writes.
    Push,
}

/// The request that opens a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Which mount the connection belongs to.
    pub mount: MountId,
    /// What it carries.
    pub connection: ConnectionKind,
    /// Which of the mount's links: grows each time it connects. Connections of an earlier link are dead, and what they left
    /// undone is not done any more once a later one is open.
    pub link: u64,
    /// Which image.
    pub image: ImageName,
    /// For reading, or for writing too.
    pub access: Access,
    /// The chunk, in bytes: a power of two from [`MIN_CHUNK`] to [`MAX_CHUNK`].
    pub chunk: u32,
    /// The state that the mount's cache is of, if it has one.
    pub expected: Option<Identity>,
    /// Who or what mounts it, for people; at most [`MAX_NAME`] bytes.
    pub note: String,
}

request!(Open: "mount.open", Mount, () => Opened);

impl Open {
    /// Whether its values are allowed.
    ///
    /// # Errors
    /// [`Code::Protocol`] for one that is not.
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
        Ok(())
    }
}

/// Whether a mount may have chunks of so many bytes.
#[must_use]
pub fn chunk_is_allowed(chunk: u32) -> bool {
    chunk.is_power_of_two() && (MIN_CHUNK..=MAX_CHUNK).contains(&chunk)
}

/// Checks that a device is one that can be mounted.
///
/// # Errors
/// One line that says what is wrong with it.
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
    /// Bytes of the device.
    pub size: u64,
    /// Bytes of a chunk: what was asked for.
    pub chunk: u32,
    /// The state it is in.
    pub identity: Identity,
    /// Whether that is the expected one, but for epochs of this mount's own: its cache is good.
    pub fresh: bool,
    /// Whether it takes no changes from this mount.
    pub read_only: bool,
    /// [`Capabilities`](drover_core::Capabilities) of direct requests: `fast_zeroes`, `trim`, `durable`, `extents`.
    pub can: [bool; 4],
}

impl Opened {
    /// Size and chunk.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape {
            size: self.size,
            chunk: self.chunk,
        }
    }
}

/// How a body is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Coding {
    /// As it is.
    Plain,
    /// One zstd frame.
    Zstd,
}

/// A request of a mount. Every id is new on its connection; but for [`Request::Credit`] and [`Request::Hurry`] each is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Whole chunks, answered by [`Reply::Chunks`] until all are there.
    Read {
        /// Of the request.
        id: u64,
        /// The first chunk.
        first: u64,
        /// How many; [`MAX_READ`] bytes at most, or one.
        count: u32,
        /// Whether it is a background read, that no program waits for.
        background: bool,
    },
    /// A background read becomes a foreground one.
    Hurry {
        /// Of that read.
        id: u64,
    },
    /// Flow control: what has arrived, and how much may be in flight.
    Credit {
        /// Payload bytes of all replies that arrived on this connection, since it was opened.
        received: u64,
        /// Bytes that may be in flight on all connections of this mount before a background reply is held back.
        window: u64,
    },
    /// Which chunks of a run hold zeros only; answered by [`Reply::Presence`].
    Presence {
        /// Of the request.
        id: u64,
        /// The first chunk.
        first: u64,
        /// How many.
        count: u32,
    },
    /// Digests of chunks; answered by [`Reply::Digests`].
    Digests {
        /// Of the request.
        id: u64,
        /// The first chunk.
        first: u64,
        /// How many; [`MAX_DIGESTS`] at most.
        count: u32,
    },
    /// A part of an epoch: the body, at `offset`. Answered by [`Reply::Done`].
    Write {
        /// Of the request.
        id: u64,
        /// The epoch: greater than the last committed one, and the same for all parts.
        epoch: u64,
        /// Where, in bytes.
        offset: u64,
        /// Bytes of the device, [`MAX_DIRECT`] at most.
        length: u32,
        /// How the body is packed.
        coding: Coding,
    },
    /// A part of an epoch: zeros. Answered by [`Reply::Done`].
    Zero {
        /// Of the request.
        id: u64,
        /// Which epoch.
        epoch: u64,
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Commits the epoch, after all its parts were acknowledged. Answered by [`Reply::Committed`]; when other than `covers`
    /// bytes are staged, by [`Code::OutOfOrder`], and they stay staged.
    Commit {
        /// Of the request.
        id: u64,
        /// Which epoch.
        epoch: u64,
        /// Bytes of the device that its parts cover.
        covers: u64,
    },
    /// Bytes of any range; answered by [`Reply::Bytes`].
    DirectRead {
        /// Of the request.
        id: u64,
        /// Where.
        offset: u64,
        /// How many; [`MAX_DIRECT`] at most.
        length: u32,
    },
    /// Writes the body; answered by [`Reply::Done`].
    DirectWrite {
        /// Of the request.
        id: u64,
        /// Where.
        offset: u64,
        /// How many bytes; [`MAX_DIRECT`] at most.
        length: u32,
        /// How the body is packed.
        coding: Coding,
    },
    /// Zeroes a range; answered by [`Reply::Done`].
    DirectZero {
        /// Of the request.
        id: u64,
        /// Where.
        offset: u64,
        /// How many bytes.
        length: u64,
        /// [`Zeroes::keep_allocated`](drover_core::Zeroes::keep_allocated).
        keep_allocated: bool,
        /// [`Zeroes::only_fast`](drover_core::Zeroes::only_fast).
        only_fast: bool,
    },
    /// Trims a range; answered by [`Reply::Done`].
    DirectTrim {
        /// Of the request.
        id: u64,
        /// Where.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Makes the direct writes that were acknowledged durable; answered by [`Reply::Done`].
    DirectFlush {
        /// Of the request.
        id: u64,
    },
    /// What a range holds; answered by [`Reply::Extents`].
    DirectExtents {
        /// Of the request.
        id: u64,
        /// Where.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// The mount ends and gives its lease back; answered by [`Reply::Done`].
    Close {
        /// Of the request.
        id: u64,
    },
    /// What is staged of an epoch; answered by [`Reply::Staged`].
    Staged {
        /// Of the request.
        id: u64,
        /// Which epoch.
        epoch: u64,
        /// From which byte of the device on.
        from: u64,
    },
}

impl Request {
    /// The request's id; none for what gets no reply.
    #[must_use]
    pub fn id(&self) -> Option<u64> {
        // The kinds that have an id are named once, below.
        self.clone().id_mut().copied()
    }

    /// The same, to be changed.
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
    /// Some of the chunks that were asked for, each once, in any order. The body is packed as `coding` says; unpacked it holds the digests of
    /// the chunks that are not zero, then their bytes.
    Chunks {
        /// Of the request.
        id: u64,
        /// The first.
        first: u64,
        /// How many.
        count: u32,
        /// Bit `n % 8` of byte `n / 8` is set when chunk `first + n` holds zeros only.
        zeros: Vec<u8>,
        /// How the body is packed.
        coding: Coding,
        /// What [`Request::Credit`] last said had arrived when this left.
        echo: u64,
        /// Whether nothing else was waiting to leave when this left.
        last: bool,
    },
    /// Chunks that hold zeros only.
    Presence {
        /// Of the request.
        id: u64,
        /// Runs `(first, count)`, in order.
        runs: Vec<(u64, u32)>,
        /// The chunk after the last one that was looked at.
        end: u64,
    },
    /// Digests of chunks, all zeros for a chunk of zeros, from the first asked for.
    Digests {
        /// Of the request.
        id: u64,
        /// In order; fewer than asked for when the site stopped early, at least one.
        digests: Vec<Digest>,
    },
    /// Bytes of a direct read, in the body.
    Bytes {
        /// Of the request.
        id: u64,
        /// How the body is packed.
        coding: Coding,
    },
    /// What a range holds.
    Extents {
        /// Of the request.
        id: u64,
        /// Runs `(length, kind)`: 0 data, 1 zero, 2 hole.
        runs: Vec<(u64, u8)>,
    },
    /// The request was carried out.
    Done {
        /// Of the request.
        id: u64,
    },
    /// The epoch is committed.
    Committed {
        /// Of the request.
        id: u64,
        /// Which.
        epoch: u64,
    },
    /// The request failed.
    Error {
        /// Of the request; 0 is the connection as a whole, which ends with it.
        id: u64,
        /// Why not.
        refusal: Refusal,
    },
    /// What is staged of an epoch.
    Staged {
        /// Of the request.
        id: u64,
        /// The epoch that is staged; 0 when there is none. Nothing else is
        /// reported unless it is the epoch that was asked about.
        epoch: u64,
        /// Runs `(offset, length)` in bytes, in order, apart; [`MAX_RUNS`] at most.
        runs: Vec<(u64, u64)>,
        /// The runs are complete up to this byte of the device.
        end: u64,
    },
    /// What has arrived, whether or not it has been carried out: so the mount measures the link and not the site's disk.
    Arrived {
        /// Bytes of the bodies of all requests that arrived on this connection, since it was opened.
        bytes: u64,
        /// When the last of them did, in microseconds of a clock of the site: it tells in which direction the round trip
        /// lost its time.
        at: u64,
    },
}

impl Reply {
    /// The id of the request that this is a reply to; 0 for none.
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
