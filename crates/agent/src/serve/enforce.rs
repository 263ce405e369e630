//! What peers may do while their connections last: a right that is taken away ends what lives by it, at once.
//!
//! Peers are changed by other processes (`drover peers`), and by those that pair, through the catalog. A change of it is
//! noticed within [`LOOK_EVERY`]; then every call of a peer that lost its right is stopped, as if the site stopped, and
//! what it has in a domain is taken away (`taken`). What fails is tried again, and keeps nothing else.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::server::{Duty, Server};
use super::trust::rights_now;
use crate::error::{Result, one_line};
use crate::signals::stopped;

/// Interval of the check for changes.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Limit of the time after which what failed is tried again; it doubles with each failure.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Enforces changes of peers until the site stops, then stops all calls.
pub async fn enforce(server: Arc<Server>) {
    let mut stop = server.stop.clone();
    tokio::select! {
        () = stopped(&mut stop) => {}
        () = watch(&server) => {}
    }
    server.trust.stop();
}

async fn watch(server: &Arc<Server>) {
    let mut seen = None;
    let mut retry = Retry::default();
    loop {
        let version = version(server).await;
        let changed = match &version {
            Ok(version) => seen.replace(*version) != Some(*version),
            // As if it had: what cannot be read may have changed.
            Err(_) => retry.at.is_none(),
        };
        if changed || retry.is_due(Instant::now()) {
            let done = look(server).await.and(version.map(drop));
            if let Err(e) = &done {
                tracing::warn!("cannot enforce the rights of peers: {}", one_line(e));
            }
            retry.note(done.is_ok(), Instant::now());
        }
        sleep(LOOK_EVERY).await;
    }
}

async fn version(server: &Arc<Server>) -> Result<(i64, u64)> {
    let catalog = Arc::clone(&server.catalog);
    Ok(tokio::task::spawn_blocking(move || catalog.version()).await??)
}

/// When to try again what failed.
#[derive(Default)]
struct Retry {
    after: Duration,
    at: Option<Instant>,
}

impl Retry {
    fn is_due(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| at <= now)
    }

    fn note(&mut self, succeeded: bool, now: Instant) {
        if succeeded {
            return *self = Retry::default();
        }
        self.after = (self.after * 2).clamp(LOOK_EVERY, MAX_RETRY);
        self.at = Some(now + self.after);
    }
}

/// Stops what peers no longer have the right to. What fails keeps nothing else; the first error is returned.
async fn look(server: &Arc<Server>) -> Result<()> {
    let mut done = Ok(());
    for peer in server.trust.peers() {
        let checked = async {
            let (rights, domain) = rights_now(&server.catalog, peer).await?;
            let stopped = server.trust.keep(peer, rights, &domain);
            if stopped > 0 {
                tracing::info!(
                    peer = peer.short(),
                    "rights were taken away: ended {}",
                    crate::text::count(stopped, "connection")
                );
            }
            Ok(())
        };
        done = done.and(checked.await);
    }
    let Duty::Site(default) = &server.duty else {
        return done;
    };
    let open = server.domains.open().into_iter().map(|(_, domain)| domain);
    for domain in std::iter::once(Arc::clone(default)).chain(open) {
        let key = server.identity.key();
        done = done.and(domain.take_away(&server.catalog, key).await);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_tried_again_later_and_later() {
        let (start, mut retry) = (Instant::now(), Retry::default());
        assert!(!retry.is_due(start));
        let mut waits = Vec::new();
        for _ in 0..12 {
            retry.note(false, start);
            assert!(!retry.is_due(start));
            waits.push(retry.after);
        }
        assert_eq!(waits[..3], [1, 2, 4].map(|n| n * LOOK_EVERY));
        assert_eq!(waits[11], MAX_RETRY);
        assert!(retry.is_due(start + MAX_RETRY));
        retry.note(true, start);
        assert!(!retry.is_due(start + MAX_RETRY));
    }
}
