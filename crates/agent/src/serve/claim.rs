//! The claim to be the only running site with a catalog: without it, another process with another home may have the one on a
//! database server.

use std::sync::Arc;
use std::time::Duration;

use drover_store::SiteCatalog;
use tokio::time::sleep;

use super::server::Server;
use crate::error::{Error, Result};
use crate::home::Home;

/// How often the claim is renewed.
const RENEW_EVERY: Duration = Duration::from_secs(2);

/// Claims the catalog.
///
/// # Errors
/// When another running site has it.
pub fn check(home: &Home, catalog: &SiteCatalog) -> Result<()> {
    match catalog.claim()? {
        true => Ok(()),
        false => Err(is_taken(home)),
    }
}

fn is_taken(home: &Home) -> Error {
    let place = match &home.config.catalog {
        Some(url) => url.to_string(),
        None => home.dir().display().to_string(),
    };
    Error::refused(format!(
        "another running site uses the catalog at {place}: stop that one first; one site serves a catalog at a time"
    ))
}

/// Returns when another running site has the catalog: it claimed that while the database was away.
pub async fn taken(server: Arc<Server>) -> Error {
    loop {
        sleep(RENEW_EVERY).await;
        let catalog = Arc::clone(&server.catalog);
        let claimed = tokio::task::spawn_blocking(move || catalog.claim()).await;
        // While the database is away, which others tell of, it is nobody's.
        if matches!(claimed, Ok(Ok(false))) {
            return is_taken(&server.home);
        }
    }
}
