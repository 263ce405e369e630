//! What asynchronous commands run on.

use anyhow::{Context, Result};

/// Upper bound on threads for blocking work: more than the data connections of all peers of a site, each of which may
/// have one for as long as its session lasts.
const MAX_BLOCKING_THREADS: usize = 4096;

/// A runtime for what is asynchronous.
///
/// # Errors
/// When the system has no threads for it.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .build()
        .context("cannot start the async runtime")
}
