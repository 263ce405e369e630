//! What peers may do while their connections last: a right that is taken away ends what lives by it, at once.
//!
//! Peers are changed by other processes (`drover peers`), through the catalog. A change of it is noticed within
//! [`LOOK_EVERY`]; then every call of a peer that lost its right is stopped, as if the site stopped, and the leases that
//! it holds are broken.

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use drover_net::DEFAULT_DOMAIN;

use super::server::{Duty, Server};
use super::trust::{rights_now, take_away};
use crate::error::{Result, one_line};
use crate::signals::stopped;

/// Interval of the check for changes.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Enforces changes of peers until the site stops, then stops all calls.
pub async fn enforce(server: Arc<Server>) {
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let mut seen = None;
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return server.trust.stop(),
            _ = looks.tick() => {}
        }
        let catalog = Arc::clone(&server.catalog);
        let version = tokio::task::spawn_blocking(move || catalog.version()).await;
        let Ok(Ok(version)) = version else { continue };
        if seen.replace(version) != Some(version)
            && let Err(e) = look(&server).await
        {
            tracing::warn!("{}", one_line(&e));
            // Once more.
            seen = None;
        }
    }
}

/// Stops what peers no longer have the right to.
async fn look(server: &Arc<Server>) -> Result<()> {
    for peer in server.trust.peers() {
        let (rights, domain) = rights_now(&server.catalog, peer).await?;
        let stopped = server.trust.keep(peer, rights, &domain);
        if stopped > 0 {
            tracing::info!(
                peer = peer.short(),
                "rights were taken away: ended {}",
                crate::text::count(stopped, "connection")
            );
        }
    }
    let Duty::Site(default) = &server.duty else {
        return Ok(());
    };
    let (peers, own) = (&server.catalog, server.identity.key());
    let default = (DEFAULT_DOMAIN.to_owned(), Arc::clone(default));
    for (name, domain) in iter::once(default).chain(server.domains.open()) {
        take_away(peers, own, &name, &domain.site, &domain.devices).await?;
    }
    Ok(())
}
