//! Removes abandoned transfers, and what is known of old flocks, of all domains.

use std::sync::Arc;
use std::time::Duration;

use drover_net::DEFAULT_DOMAIN;
use drover_teleport::FENCED;

use super::in_domain::InDomain;
use super::server::{Duty, Server};
use crate::error::{Error, Result, one_line};
use crate::home::Home;
use crate::signals::stopped;
use crate::text::now_unix;

/// Interval of the check.
const EVERY: Duration = Duration::from_secs(3600);

/// Removes abandoned transfers until the site stops.
pub async fn expire_transfers(server: Arc<Server>) {
    let (Duty::Site(_), Some(after)) = (&server.duty, server.home.config.keep_unfinished()) else {
        return;
    };
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(EVERY);
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            _ = looks.tick() => {}
        }
        let home = server.home.clone();
        let names = tokio::task::spawn_blocking(move || home.domains()).await;
        let names = names.map_err(Error::from).and_then(|names| names);
        let names = names.unwrap_or_else(|e| {
            tracing::warn!("{}", one_line(&e));
            Vec::new()
        });
        for name in std::iter::once(DEFAULT_DOMAIN.to_owned()).chain(names) {
            if let Err(e) = expire_in(&server, &name, after).await {
                tracing::warn!(domain = name, "{}", one_line(&e));
            }
        }
    }
}

/// Removes those of a domain, which is opened for that only if there are some.
async fn expire_in(server: &Arc<Server>, name: &str, after: Duration) -> Result<()> {
    let home = server.home.domain(name)?;
    if !tokio::task::spawn_blocking(move || has_expired(&home, after)).await?? {
        return Ok(());
    }
    let domain = InDomain(Arc::clone(server)).of(name).await;
    let domain = domain.map_err(Error::Refused)?;
    let expire = move || {
        domain.site.expire_flocks(after)?;
        domain.site.expire_transfers(after)
    };
    for transfer in tokio::task::spawn_blocking(expire).await?? {
        tracing::info!(
            image = transfer.name,
            peer = transfer.peer,
            "removed an unfinished transfer: nothing was received for too long"
        );
    }
    Ok(())
}

fn has_expired(home: &Home, after: Duration) -> Result<bool> {
    let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
    let oldest = now_unix().saturating_sub(after);
    let transfers = drover_teleport::unfinished(&home.work_dir())?;
    let flocks = drover_teleport::flocks(&home.flock_dirs())?;
    let nodes = std::fs::read_dir(home.work_base()).into_iter().flatten();
    let is_gone = |dir: std::fs::DirEntry| dir.path().extension().is_some_and(|e| e == FENCED);
    if home.config.catalog.is_some() && nodes.flatten().any(is_gone) {
        return Ok(true);
    }
    Ok(transfers
        .iter()
        .any(|transfer| transfer.touched_unix < oldest)
        || flocks
            .iter()
            .any(|flock| flock.record.touched_unix < oldest))
}
