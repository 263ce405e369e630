//! Session counters.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;

use drover_net::Right;
use drover_net::service::{BoxError, IncomingCall, Peer, Service, ServiceFuture};

use super::server::Server;
use crate::error::{Context, Error};

/// Wraps a service so that its calls are counted as sessions.
pub struct Counted<S>(pub Arc<Server>, pub S);

impl<S: Service> Service for Counted<S> {
    fn id(&self) -> &'static str {
        self.1.id()
    }

    fn right(&self) -> Right {
        self.1.right()
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        let what = format!("session of {}", peer.name);
        Box::pin(counted(&self.0, what, self.1.serve(peer, call)))
    }
}

/// Counts a session while it is open, and its outcome.
pub async fn counted(
    server: &Server,
    what: String,
    session: impl Future<Output = Result<(), BoxError>>,
) -> Result<(), BoxError> {
    let metrics = &server.metrics;
    let open = Open::count(&metrics.sessions_open);
    let ended = session.await;
    drop(open);
    let counter = match ended {
        Ok(()) => &metrics.sessions_done,
        Err(_) => &metrics.sessions_failed,
    };
    counter.fetch_add(1, Relaxed);
    Ok(ended.map_err(Error::msg).context(what)?)
}

/// Guard that keeps a gauge incremented while it lives.
pub struct Open<'a>(&'a AtomicI64);

impl<'a> Open<'a> {
    /// Increments the gauge.
    pub fn count(gauge: &'a AtomicI64) -> Self {
        gauge.fetch_add(1, Relaxed);
        Open(gauge)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
