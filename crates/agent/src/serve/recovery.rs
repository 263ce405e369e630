//! Finishes merges of changes that a crash interrupted, in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::changes::Here;

/// How long a merge may take to end when the site stops.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// The thread that finishes merges: their images cannot be mounted meanwhile. It is cancelled when the site stops; the next
/// start continues.
pub struct Recovery {
    stop: Arc<AtomicBool>,
    thread: tokio::task::JoinHandle<()>,
}

impl Recovery {
    /// Starts the thread.
    pub fn begin(here: Here) -> Recovery {
        let stop = Arc::new(AtomicBool::new(false));
        let cancelled = Arc::clone(&stop);
        let thread = tokio::task::spawn_blocking(move || {
            for line in crate::changes::recover(&here, &cancelled) {
                tracing::info!("{line}");
            }
        });
        Recovery { stop, thread }
    }

    /// Cancels the thread.
    pub fn cancel(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Cancels the thread and waits for it to end.
    pub async fn end(mut self) {
        self.cancel();
        if tokio::time::timeout(STOP_LIMIT, &mut self.thread)
            .await
            .is_err()
        {
            tracing::warn!("an interrupted merge did not end within {STOP_LIMIT:?}");
        }
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        self.cancel();
    }
}
