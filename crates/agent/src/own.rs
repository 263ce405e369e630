//! Opens the site within a command, which does the running site's work when none runs.

use std::sync::Arc;

use drover_store::SiteCatalog;
use drover_teleport::{Site, TeleportError};

use crate::error::Result;
use crate::home::{Home, HomeLock};
use crate::join::join;
use crate::node::Node;
use crate::site;

/// The site of this home, opened by this process because none is running.
pub struct Own {
    site: Arc<Site>,
    node: Option<Arc<Node>>,
    _lock: HomeLock,
}

impl Own {
    /// Locks the home and opens its site.
    ///
    /// # Errors
    /// When another process holds the home, or its files cannot be used.
    pub async fn open(home: &Home, catalog: &Arc<SiteCatalog>) -> Result<Own> {
        let lock = home.lock()?;
        let of = home.clone();
        let node = tokio::task::spawn_blocking(move || join(&of)).await??;
        let site = site::open(home, catalog, &home.identity()?, site::supplies(home)).await?;
        let own = Own {
            site,
            node,
            _lock: lock,
        };
        crate::changes::recover_own(home, catalog, &own.site).await?;
        Ok(own)
    }

    /// The site.
    pub fn site(&self) -> &Arc<Site> {
        &self.site
    }

    /// Runs `job` and closes the site.
    ///
    /// # Errors
    /// The job's error.
    pub async fn run<T: Send + 'static>(
        self,
        job: impl FnOnce(&Arc<Site>) -> Result<T, TeleportError> + Send + 'static,
    ) -> Result<T> {
        let (site, out) = self.keep(job).await?;
        site.close().await?;
        Ok(out)
    }

    /// Runs `job` and keeps the site open; closes it when the job fails.
    ///
    /// # Errors
    /// The job's error.
    pub async fn keep<T: Send + 'static>(
        self,
        job: impl FnOnce(&Arc<Site>) -> Result<T, TeleportError> + Send + 'static,
    ) -> Result<(Own, T)> {
        let site = Arc::clone(&self.site);
        match tokio::task::spawn_blocking(move || job(&site)).await? {
            Ok(out) => Ok((self, out)),
            Err(e) => {
                self.close().await?;
                Err(e.into())
            }
        }
    }

    /// Closes the site and unlocks the home.
    ///
    /// # Errors
    /// When its files cannot be saved. A full disk is not an error: it only slows down the next start, and a notice
    /// says so.
    pub async fn close(self) -> Result<()> {
        let (site, node) = (Arc::clone(&self.site), self.node);
        let close = move || {
            let closed = site.close();
            if let Some(node) = node {
                node.leave();
            }
            closed
        };
        match tokio::task::spawn_blocking(close).await? {
            Err(e) if e.is_full() => {
                crate::notice::notice(&format!(
                    "cannot save the caches of the matcher, which will be rebuilt at the next start: {}",
                    crate::text::clean(&e.to_string())
                ));
                Ok(())
            }
            closed => Ok(closed?),
        }
    }
}
