//! The requests that a site answers: about its images and transfers, and those that open a session. (The messages of
//! a session are in [`protocol`](crate::protocol).)

use drover_core::{Digest, ImageName};
use drover_net::request;
use serde::{Deserialize, Serialize};

use crate::transfers::Unfinished;

/// Open a session to send images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    /// How many images will be offered.
    pub images: u32,
    /// The session's number: the source chooses it at random, so that data connections need not wait for an answer to name it.
    pub session: [u8; 16],
}
request!(OpenSession: "session.open", Send, () => ());

/// Carry literals for a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinSession {
    /// Its number, from [`OpenSession`].
    pub session: [u8; 16],
}
request!(JoinSession: "session.join", Send, () => ());

/// Serve as this destination's teleporter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginMatching;
request!(BeginMatching: "matching.begin", Match, () => ());

/// List the images, some at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListImages;
request!(ListImages: "image.list", List, Vec<ImageInfo> => ());

/// Check an image against its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyImage {
    /// Which.
    pub name: ImageName,
}
request!(VerifyImage: "image.verify", List, Progress => Verified);

/// Make an image file of the site's machine a source of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexImage {
    /// Its path, absolute.
    pub path: String,
}
request!(IndexImage: "image.index", Manage, Progress => ImageName);

/// Remove an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveImage {
    /// Which.
    pub name: ImageName,
}
request!(RemoveImage: "image.remove", Manage, () => ());

/// List the transfers that are not finished, some at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListTransfers;
request!(ListTransfers: "transfer.list", List, Vec<Unfinished> => ());

/// Remove what is left of a transfer; a peer may remove its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveTransfer {
    /// Its key.
    pub key: String,
}
request!(RemoveTransfer: "transfer.remove", Cancel, () => ());

/// Progress of a long request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// The digest the catalog has.
    pub expected: Digest,
    /// The digest the file has.
    pub found: Digest,
}

/// An image at a site, for listings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInfo {
    /// Its name.
    pub name: String,
    /// Its digest (`docs/format/digests.md`).
    pub digest: Digest,
    /// The file's length in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are not holes.
    pub data_bytes: u64,
    /// The size the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// Container format.
    pub format: String,
    /// When it was delivered or indexed, in seconds since 1970.
    pub added_unix: i64,
    /// The name of the peer it came from; empty when it was indexed here.
    pub from: String,
}
