//! Runs work that may block on a disk.

use drover_net::{Code, Refusal};

/// Runs `what` on a thread that may block.
pub async fn blocking<T: Send + 'static>(
    what: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(what)
        .await
        .unwrap_or_else(|e| Err(Refusal::new(Code::Io, e.to_string())))
}
