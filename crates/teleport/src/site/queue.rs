//! Files that wait to be indexed, since an image is offered that is probably similar.

use std::collections::VecDeque;
use std::path::PathBuf;

use parking_lot::Mutex;
use tokio::sync::watch;

/// Files that wait to be indexed. The first one is being indexed while a thread runs.
#[derive(Debug, Default)]
pub(super) struct Queue(pub(super) Mutex<State>);

#[derive(Debug, Default)]
pub(super) struct State {
    /// Each with what tells those that wait for it.
    pub(super) waiting: VecDeque<(PathBuf, watch::Sender<bool>)>,
    /// Whether the thread runs.
    pub(super) running: bool,
}

/// Files that are being indexed for an image.
#[derive(Debug)]
pub(crate) struct BeingIndexed(pub(super) Vec<watch::Receiver<bool>>);

impl BeingIndexed {
    /// Returns when all are indexed, or cannot be.
    pub(crate) async fn wait(mut self) {
        for done in &mut self.0 {
            // The sender goes with the thread.
            let _ = done.wait_for(|done| *done).await;
        }
    }
}
