//! The messages between source, destination and teleporter.
//!
//! # Participants
//! The **source** has the image. The **destination** is the site it goes to. The **teleporter**
//! matches digests; it lives in the destination's site or, reached by the destination, alone on a
//! third machine. A source only ever talks to a destination.
//!
//! # Goals
//! - Only blocks that the destination does not have cross the link, compressed.
//! - No step waits a round trip per batch: a source runs [`WINDOW_BATCHES`] ahead.
//! - Either side may die at any time; a later session resumes.
//!
//! # Non-goals
//! Hiding from a paired peer which blocks a site has: a site is one trust domain.
//!
//! # Course of a session
//! A session is a call of [`OpenSession`](crate::services::OpenSession); further connections join it
//! with [`JoinSession`](crate::services::JoinSession) and carry literals. The first data connection also carries BATCH and END, ahead of the literals: on a connection of
//! their own they would compete with the blocks for the link. The source says hello, makes its request, offers the first image and
//! sends its first batches in one flight.
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
//! Up to [`FIRST_WINDOW`](crate::source::FIRST_WINDOW) batches may be sent before ACCEPT; of those, a
//! destination passes over what an earlier session brought. From ACCEPT on, batches are sent from
//! `resume_batch`. The two connections are not ordered: a batch may come before its offer.
//!
//! The byte layouts of the binary frames are in `docs/format/wire.md`.

use drover_core::{Digest, ImageName};
use serde::{Deserialize, Serialize};

use crate::stages::DestinationTimes;

/// Blocks in a batch (8 MiB of the walk), those of an entry of a block map; the last batch of an image may have fewer.
pub const BATCH_BLOCKS: u64 = drover_store::ENTRY_BLOCKS;

/// Batches a source may send before the first of them is complete at the destination.
///
/// 96 batches are 768 MiB of image: at 100 ms of round trip that allows 7.7 GB/s of matched image,
/// and costs the destination at most 6 MiB of digests.
pub const WINDOW_BATCHES: u64 = 96;

/// Blocks in a literal frame at most (1 MiB before compression).
pub const FRAME_BLOCKS: usize = 256;

/// Bytes of layout in one `LAYOUT` frame.
pub const LAYOUT_PART_BYTES: usize = 1 << 20;

/// The largest frame either side accepts once a session is open.
pub const MAX_SESSION_FRAME: usize = 2 << 20;

/// Images in one session at most.
pub const MAX_SESSION_IMAGES: u32 = 10_000;

/// Data connections in one session at most.
pub const MAX_DATA_CONNECTIONS: u16 = 8;

/// Frame kinds, beside those of a [call](drover_net::service::kind).
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
    /// The source gives up on an image (a [`super::GiveUp`]).
    pub const GIVE_UP: u8 = 0x16;
    /// An [`super::Accept`].
    pub const ACCEPT: u8 = 0x20;
    /// A [`Refusal`](drover_net::Refusal): of an image.
    pub const REFUSE: u8 = 0x21;
    /// Runs of blocks that the source must send.
    pub const NEED: u8 = 0x22;
    /// A batch is complete: its number, eight bytes.
    pub const ACK: u8 = 0x23;
    /// A [`super::Delivered`].
    pub const DELIVERED: u8 = 0x24;
    /// On a data connection: which share of its time the destination was busy with it, in thousandths (two
    /// bytes, little-endian).
    pub const BUSY: u8 = 0x26;
    /// What `--dry-run` found (a [`super::Estimate`]).
    pub const ESTIMATE: u8 = 0x25;
    /// Destination to teleporter: a [`teleporter::Event`](crate::teleporter::Event).
    pub const MATCH: u8 = 0x30;
    /// Teleporter to destination: the answer to one MATCH.
    pub const PLAN: u8 = 0x31;
}

/// A source offers an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The image's place in the session, from zero.
    pub slot: u32,
    /// The name it gets.
    pub name: ImageName,
    /// Container format, as `image` names it.
    pub format: String,
    /// The file's length in bytes.
    pub file_bytes: u64,
    /// The size the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// Blocks of the walk.
    pub walk_blocks: u64,
    /// Bytes the encoded layout has.
    pub layout_bytes: u64,
    /// Changes whenever the image's files do: with another one, what an earlier session brought is
    /// compared with what is announced.
    pub stamp: Digest,
    /// Only say what would cross the link.
    pub dry_run: bool,
}

/// The destination takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accept {
    /// The first batch to send; those before are at the destination, but for what it will ask for.
    pub resume_batch: u64,
    /// Blocks that an earlier session already brought.
    pub resumed_blocks: u64,
    /// Of the batches before it those that are not complete; for the progress only.
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
    /// What was announced is not true any more (the image changed).
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
    /// From the long-term cache, out of the sequence cache.
    pub c2: u64,
    /// From a block that is no head, admitted while there was room.
    pub anchor: u64,
    /// By going on in the same page after a mismatch.
    pub aligned: u64,
    /// By repeating a block of the same batch.
    pub repeat: u64,
    /// By comparing: the image of that name had the block in the same place.
    pub in_place: u64,
    /// Reuse that no longer had the right digest, so that the source had to send the block.
    pub invalid: u64,
}

/// The image is delivered: verified, and there under its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivered {
    /// The digest of the file there.
    pub digest: Digest,
    /// Blocks that were reused.
    pub matched_blocks: u64,
    /// Blocks that crossed the link.
    pub sent_blocks: u64,
    /// Blocks of the walk that are zero.
    pub zero_blocks: u64,
    /// Blocks an earlier session had brought.
    pub resumed_blocks: u64,
    /// Through which caches.
    pub matched: Matched,
    /// Where the time went there.
    pub stages: Box<DestinationTimes>,
}

/// What a dry run found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Estimate {
    /// Blocks that would be reused.
    pub matched_blocks: u64,
    /// Blocks that would cross the link.
    pub sent_blocks: u64,
    /// Zero blocks.
    pub zero_blocks: u64,
}
