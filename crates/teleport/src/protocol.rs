//! The messages between source, destination and teleporter.
//!
//! # Participants
//! The **source** has the image. The **destination** is the site that receives it. The **teleporter**
//! matches digests; it runs in the destination's site, or on a third machine that only the destination
//! connects to. A source communicates only with a destination.
//!
//! # Goals
//! - Only blocks that the destination lacks cross the link, compressed.
//! - No step waits for a round trip per batch: a source runs [`WINDOW_BATCHES`] ahead.
//! - Either side may crash at any time; a later session resumes.
//!
//! # Non-goals
//! Hiding from a paired peer which blocks a site has: a domain of a site is what trusts each other.
//!
//! # Course of a session
//! A session is a call of [`OpenSession`](crate::services::OpenSession); further connections join it
//! with [`JoinSession`](crate::services::JoinSession) and carry literals. The first data connection also carries BATCH
//! and END, ahead of the literals: on a separate connection they would compete with the blocks for the link. The source
//! sends its hello, its request, the first offer and the first batches in one flight.
//! Then, for one image after the other, on the control connection:
//!
//! ```text
//! source                                destination
//! OFFER Offer, LAYOUT*              ->
//!                                   <-  ACCEPT Accept | REFUSE Refusal
//! BATCH (on the first data connection)         ->
//!                                   <-  NEED runs of blocks to send      } in any order,
//!                                   <-  ACK batch complete               } pipelined
//! LITERAL (on the data connections)            ->
//! END digest of the image (1st data connection) ->
//!                                   <-  DELIVERED Delivered | REFUSE Refusal
//! GOODBYE after the last            ->
//! ```
//!
//! An offer may be preceded by LIKENESS: the destination then looks for images of its own that are probably similar, and may index
//! some of them before it accepts.
//!
//! It may be preceded by PROFILE, parts of the image's profile: the destination has what that lists sent first, and keeps it with the
//! image. Nothing that is announced, matched or proved depends on it.
//!
//! An offer of a disk that was here before may be preceded by GENERATIONS; the destination answers with HAVE ahead of
//! ACCEPT, if it has an old copy of it. The source then sends SKIPPED for these batches, without reading them, and
//! END_UNREAD at the end: it compares the digest in DELIVERED with that of the image when it has read all of it.
//!
//! Up to `FIRST_WINDOW` batches may be sent before ACCEPT; the destination
//! ignores those that an earlier session sent. After ACCEPT, batches are sent from
//! `resume_batch`. There is no order between the two connections: a batch may arrive before its offer.
//!
//! A session may be of a flock ([`SendFlock`](crate::services::SendFlock)): several sessions of it may send images at once, and
//! FLOCK_DELIVERED takes the place of DELIVERED.
//!
//! While a machine runs from the image at the destination, blocks that it waits for overtake everything: WANT asks for blocks
//! that were perhaps not announced yet, HURRY for some that NEED or WANT has asked for. They come as GIVEN on the control connection,
//! where nothing else of any size is. Blocks that are likely to be read soon, as a profile has it, are asked for by the same frames, and
//! come after those that a machine waits for.
//!
//! The byte layouts of the binary frames are in `docs/format/wire.md`.

use drover_core::{Digest, ImageName};
use serde::{Deserialize, Serialize};

use crate::stages::DestinationTimes;

/// Blocks in a batch (8 MiB of the walk), the same as in an entry of a block map; the last batch of an image may be
/// shorter.
pub const BATCH_BLOCKS: u64 = drover_store::ENTRY_BLOCKS;

/// Maximum number of batches sent before the first of them is complete at the destination.
///
/// 96 batches are 768 MiB of image: with a round trip of 100 ms that allows 7.7 GB/s of matched data, and costs the
/// destination at most 6 MiB of digests.
pub const WINDOW_BATCHES: u64 = 96;

/// Maximum number of blocks in a literal frame (1 MiB before compression).
pub const FRAME_BLOCKS: usize = 256;

/// Maximum number of blocks in a GIVEN: few, so that a more urgent one need not wait for long.
pub const GIVEN_BLOCKS: usize = 16;

/// Bytes of the layout in one `LAYOUT` frame.
pub const LAYOUT_PART_BYTES: usize = 1 << 20;

/// The largest frame with a batch; its digests and proofs take 25 KiB.
pub const MAX_BATCH_FRAME: usize = 64 << 10;

/// The largest frame either side accepts once a session is open.
pub const MAX_SESSION_FRAME: usize = 2 << 20;

/// Maximum number of images in a session.
pub const MAX_SESSION_IMAGES: u32 = 10_000;

/// Maximum number of data connections in a session.
pub const MAX_DATA_CONNECTIONS: u16 = 8;

/// Frame kinds, in addition to those of a [call](drover_net::service::kind).
pub mod kind {
    /// A [`super::Offer`].
    pub const OFFER: u8 = 0x10;
    /// A part of the offer's encoded layout.
    pub const LAYOUT: u8 = 0x11;
    /// A batch: zero map, heads, digests.
    pub const BATCH: u8 = 0x12;
    /// An [`super::End`].
    pub const END: u8 = 0x13;
    /// Literal blocks.
    pub const LITERAL: u8 = 0x14;
    /// The source ends the session.
    pub const GOODBYE: u8 = 0x15;
    /// The source gives up an image (a [`super::GiveUp`]).
    pub const GIVE_UP: u8 = 0x16;
    /// Before an offer: the generations of the disk that is offered (`drover_store::generations::Summary`).
    pub const GENERATIONS: u8 = 0x17;
    /// In place of a BATCH that the destination has (HAVE): its number, eight bytes, little-endian.
    pub const SKIPPED: u8 = 0x18;
    /// In place of END when batches were skipped: the source has not read all of the image, and does not know its digest.
    pub const END_UNREAD: u8 = 0x19;
    /// Before an offer: what is noted of the image to choose similar ones (`drover_store::Likeness`).
    pub const LIKENESS: u8 = 0x1f;
    /// An [`super::Accept`].
    pub const ACCEPT: u8 = 0x20;
    /// A refused image (a [`Refusal`](drover_net::Refusal)).
    pub const REFUSE: u8 = 0x21;
    /// Runs of blocks that the source must send.
    pub const NEED: u8 = 0x22;
    /// A batch is complete: its index, eight bytes.
    pub const ACK: u8 = 0x23;
    /// A [`super::Delivered`].
    pub const DELIVERED: u8 = 0x24;
    /// On a data connection: fraction of time for which the destination was busy with it, in thousandths (two bytes,
    /// little-endian).
    pub const BUSY: u8 = 0x26;
    /// Result of a `--dry-run` (a [`super::Estimate`]).
    pub const ESTIMATE: u8 = 0x25;
    /// Before ACCEPT, after GENERATIONS: batches that the source need not read, since the destination has them in an old
    /// copy of the disk.
    pub const HAVE: u8 = 0x27;
    /// Runs of blocks, announced or not, that the source sends ahead of everything, each of them once, in GIVEN.
    pub const WANT: u8 = 0x28;
    /// Runs of blocks that were requested by NEED: those that wait to be sent come ahead of everything, in GIVEN.
    pub const HURRY: u8 = 0x29;
    /// Blocks that were wanted, as in LITERAL, on the control connection.
    pub const GIVEN: u8 = 0x1a;
    /// Before an offer: a part of what a machine reads first of the image's disk (`drover_store::profile::Profile`), encoded.
    pub const PROFILE: u8 = 0x1b;
    /// A [`super::FlockDelivered`], in place of DELIVERED where the image is of a flock.
    pub const FLOCK_DELIVERED: u8 = 0x2c;
    /// Destination to teleporter: a `teleporter::Event`.
    pub const MATCH: u8 = 0x30;
    /// Teleporter to destination: the answer to one MATCH.
    pub const PLAN: u8 = 0x31;
}

/// A source offers an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The image's number in the session, from zero.
    pub slot: u32,
    /// Its name at the destination.
    pub name: ImageName,
    /// Container format, by its name in `image`.
    pub format: String,
    /// The file's length in bytes.
    pub file_bytes: u64,
    /// The size the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// Length of the walk in blocks.
    pub walk_blocks: u64,
    /// Length of the encoded layout in bytes.
    pub layout_bytes: u64,
    /// Changes when the image's files change. If it differs, the data of an earlier session is compared with the
    /// announced digests.
    pub stamp: Digest,
    /// Only report what would cross the link.
    pub dry_run: bool,
}

/// The destination accepts the image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Accept {
    /// The first batch to send; the destination has the earlier ones, except for blocks that it requests.
    pub resume_batch: u64,
    /// Blocks that an earlier session already sent.
    pub resumed_blocks: u64,
    /// Number of incomplete batches before `resume_batch`; only for progress.
    pub open_batches: u64,
}

/// The source has walked the whole image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// The digest of the file.
    pub digest: Digest,
}

/// The source stops sending an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiveUp {
    /// The announced digests are no longer valid (the image changed).
    pub discard: bool,
    /// For the destination's log.
    pub message: String,
}

/// How the matched blocks of a delivered image were found, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Matched {
    /// From a weak head in C0.
    pub c0: u64,
    /// From a strong head, or the end of an earlier match, in C1.
    pub c1: u64,
    /// From the long-term cache, in the sequence cache.
    pub c2: u64,
    /// From a block that is no head, admitted while the cache had space.
    pub anchor: u64,
    /// By continuing in the same page after a mismatch.
    pub aligned: u64,
    /// By repeating a block of the same batch.
    pub repeat: u64,
    /// By comparison: the previous image of that name had the block at the same position.
    pub in_place: u64,
    /// Reused blocks that failed verification, so that the source had to send them.
    pub invalid: u64,
}

/// The image is delivered: verified, and renamed to its final name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Delivered {
    /// The digest of the file at the destination.
    pub digest: Digest,
    /// Blocks that were reused.
    pub matched_blocks: u64,
    /// Blocks that crossed the link.
    pub sent_blocks: u64,
    /// Zero blocks of the walk.
    pub zero_blocks: u64,
    /// Blocks that an earlier session had sent.
    pub resumed_blocks: u64,
    /// Matched blocks by cache.
    pub matched: Matched,
    /// Time per stage at the destination.
    pub stages: Box<DestinationTimes>,
    /// Where the matched blocks of an image of a flock came from. Not part of DELIVERED.
    #[serde(skip)]
    pub origins: Option<Origins>,
    /// Whether the image is complete, but waits for its name until the rest of its flock has arrived. Not part of DELIVERED.
    #[serde(skip)]
    pub waits: bool,
}

/// Where the matched blocks of an image of a flock came from, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Origins {
    /// Repeated within the image.
    pub own: u64,
    /// From other images of the flock: they first came to the site with it.
    pub flock: u64,
    /// From what the site had before.
    pub site: u64,
}

/// An image of a flock is delivered, or complete.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FlockDelivered {
    /// As of any other image.
    pub delivered: Delivered,
    /// Where its matched blocks came from.
    pub origins: Origins,
    /// Whether it has no name yet: it waits for the rest of its flock.
    pub waits: bool,
}

impl From<FlockDelivered> for Delivered {
    fn from(of_flock: FlockDelivered) -> Self {
        Delivered {
            origins: Some(of_flock.origins),
            waits: of_flock.waits,
            ..of_flock.delivered
        }
    }
}

impl From<Delivered> for FlockDelivered {
    fn from(delivered: Delivered) -> Self {
        FlockDelivered {
            origins: delivered.origins.unwrap_or_default(),
            waits: delivered.waits,
            delivered,
        }
    }
}

/// Result of a dry run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Estimate {
    /// Blocks that would be reused.
    pub matched_blocks: u64,
    /// Blocks that would cross the link.
    pub sent_blocks: u64,
    /// Zero blocks.
    pub zero_blocks: u64,
}
