//! The matchers of a standalone teleporter: one per site and domain.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use drover_net::{DEFAULT_DOMAIN, PeerKey};
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_teleport::LocalTeleporter;
use drover_teleport::open_teleporter;
use tokio::sync::Mutex;

use crate::error::{Error, Result, bail, msg};

/// Upper bound on open matchers; each has its caches in memory.
const MAX_OPEN: usize = 8;

/// Opens a matcher when its site connects and closes it after the last disconnect.
pub struct Matchers {
    dir: PathBuf,
    open: Mutex<HashMap<(PeerKey, String), Opened>>,
}

struct Opened {
    matcher: LocalTeleporter,
    users: usize,
}

/// A reference to the matcher of one domain of a site.
pub struct InUse {
    all: Arc<Matchers>,
    key: (PeerKey, String),
    matcher: LocalTeleporter,
}

impl Matchers {
    /// Matchers that keep their files under `dir`.
    pub fn new(dir: PathBuf) -> Arc<Matchers> {
        Arc::new(Matchers {
            dir,
            open: Mutex::default(),
        })
    }

    /// The matcher of a domain of the site with this key.
    ///
    /// # Errors
    /// When no domain can have this name, too many use this teleporter at once, or the matcher's files cannot be used.
    pub async fn of(self: &Arc<Self>, key: PeerKey, domain: String) -> Result<InUse> {
        drover_store::domain::check(&domain).map_err(Error::usage)?;
        let name = match domain.as_str() {
            DEFAULT_DOMAIN => format!("for-{key}"),
            domain => format!("for-{key}-in-{domain}"),
        };
        let key = (key, domain);
        let mut open = self.open.lock().await;
        let matcher = match open.get_mut(&key) {
            Some(opened) => {
                opened.users += 1;
                Arc::clone(&opened.matcher)
            }
            None => {
                if open.len() >= MAX_OPEN {
                    bail!(
                        "this teleporter matches for {MAX_OPEN} sites and domains already; try again later"
                    );
                }
                let dir = self.dir.join(name);
                let matcher = tokio::task::spawn_blocking(move || {
                    drover_storage::make_private_dir(&dir)?;
                    let mut repairs = Vec::new();
                    let matcher = open_teleporter(&dir, SEQUENCE_DATA_BYTES, &mut repairs)?;
                    crate::site::tell(&repairs);
                    Ok::<_, Error>(matcher)
                })
                .await??;
                open.insert(
                    key.clone(),
                    Opened {
                        matcher: Arc::clone(&matcher),
                        users: 1,
                    },
                );
                matcher
            }
        };
        Ok(InUse {
            all: Arc::clone(self),
            key,
            matcher,
        })
    }
}

impl InUse {
    /// The matcher itself.
    pub fn shared(&self) -> LocalTeleporter {
        Arc::clone(&self.matcher)
    }

    /// Releases the reference; releasing the last one saves the matcher and frees its memory.
    ///
    /// # Errors
    /// When it cannot be saved.
    pub async fn done(self) -> Result<()> {
        let mut open = self.all.open.lock().await;
        if let Some(opened) = open.get_mut(&self.key) {
            opened.users -= 1;
            if opened.users > 0 {
                return Ok(());
            }
        }
        // Keep the map locked, so that the matcher is not reopened before it is saved.
        let matcher = Arc::clone(&self.matcher);
        let saved = tokio::task::spawn_blocking(move || matcher.lock().persist()).await?;
        open.remove(&self.key);
        saved.map_err(|e| msg!("cannot save the matcher of {}: {e:?}", self.key.0.short()))
    }
}
