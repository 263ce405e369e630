//! State shared by the connections of one session at the destination.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use drover_net::{Frame, Peer, PeerKey};
use parking_lot::RwLock;
use tokio::sync::{mpsc, watch};

use super::activity::Activity;
use super::literals_in::Incoming;
use crate::flock::live::{Flock, FlockSession};
use crate::site::TransferStatus;
use crate::stages::DestinationStages;

/// State shared by the connections of one session.
pub struct SessionShared {
    pub peer: PeerKey,
    pub peer_name: String,
    /// Tells which of two sessions is newer.
    pub number: u64,
    pub current: RwLock<Option<Arc<Incoming>>>,
    pub connections: AtomicU64,
    pub progress: RwLock<Option<Progress>>,
    /// Time spent in each stage, for the current image.
    pub stages: Arc<DestinationStages>,
    /// Receives the frames of the first data connection that are not literals.
    pub frames: mpsc::Sender<Frame>,
    /// True once the session has ended, and with it its data connections.
    pub ended: watch::Sender<bool>,
    /// Becomes true when the site ends the session, as if its connection had broken.
    pub halt: watch::Sender<bool>,
    /// Tells whether anything moves.
    pub activity: Arc<Activity>,
    /// The flock whose images it sends.
    pub flock: Option<FlockSession>,
}

/// The current transfer of a session.
#[derive(Debug, Clone)]
pub struct Progress {
    pub name: String,
    pub total_blocks: u64,
    pub done_blocks: Arc<AtomicU64>,
}

impl SessionShared {
    /// State of a newly opened session, perhaps of a flock.
    pub fn new(
        peer: Peer,
        number: u64,
        frames: mpsc::Sender<Frame>,
        flock: Option<FlockSession>,
    ) -> Self {
        SessionShared {
            peer: peer.key,
            peer_name: peer.name,
            number,
            current: RwLock::default(),
            connections: AtomicU64::new(0),
            progress: RwLock::default(),
            stages: Arc::default(),
            frames,
            ended: watch::Sender::new(false),
            halt: watch::Sender::new(false),
            activity: Arc::default(),
            flock,
        }
    }

    /// The flock whose images it sends.
    pub fn flock(&self) -> Option<&Arc<Flock>> {
        self.flock.as_ref().map(|session| &session.0)
    }

    /// Whether this session belongs to `peer`.
    pub fn is_of(&self, peer: &PeerKey) -> bool {
        self.peer == *peer
    }

    /// Status of the current transfer.
    pub fn status(&self) -> Option<TransferStatus> {
        let progress = self.progress.read().clone()?;
        Some(TransferStatus {
            name: progress.name,
            peer: self.peer_name.clone(),
            done_blocks: progress
                .done_blocks
                .load(Ordering::Relaxed)
                .min(progress.total_blocks),
            total_blocks: progress.total_blocks,
        })
    }
}
