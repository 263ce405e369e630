//! What the site is told about the images that peers send.

use std::time::Duration;

use drover_core::ImageName;
use drover_net::{PeerKey, Refusal};

/// Something that happened to an image that a peer sends.
#[derive(Debug, Clone)]
pub struct SendEvent {
    /// The key of the peer.
    pub peer: PeerKey,
    /// Its name.
    pub peer_name: String,
    /// The other end of its connection, for messages; empty when it has none any more.
    pub from: String,
    /// The image.
    pub image: ImageName,
    /// Bytes of its file.
    pub bytes: u64,
    /// Time since it was offered.
    pub time: Duration,
    /// What happened.
    pub what: SendStep,
}

/// What can happen to an image that a peer sends.
#[derive(Debug, Clone)]
pub enum SendStep {
    /// It is accepted, and its data may follow.
    Begun,
    /// It was delivered.
    Delivered,
    /// It is complete, and waits for the other images of its flock.
    Arrived,
    /// The site had it already: it was compared with the image of that name.
    Unchanged,
    /// It was a dry run: the source was told what it would have to send.
    Estimated,
    /// It was refused.
    Refused(Refusal),
    /// It failed, or was given up by the source.
    Failed(String),
}

/// Called when something happened to an image that a peer sends, on a thread that may block.
pub type Watcher = dyn Fn(&SendEvent) + Send + Sync;
