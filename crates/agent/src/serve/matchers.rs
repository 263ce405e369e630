//! The matchers of a standalone teleporter: one per site, since a site is one trust domain.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use drover_net::PeerKey;
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
    open: Mutex<HashMap<PeerKey, Opened>>,
}

struct Opened {
    matcher: LocalTeleporter,
    users: usize,
}

/// A reference to the matcher of one site.
pub struct InUse {
    all: Arc<Matchers>,
    key: PeerKey,
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

    /// The matcher of the site with this key.
    ///
    /// # Errors
    /// When too many sites use this teleporter at once, or the matcher's files cannot be used.
    pub async fn of(self: &Arc<Self>, key: PeerKey) -> Result<InUse> {
        let mut open = self.open.lock().await;
        let matcher = match open.get_mut(&key) {
            Some(opened) => {
                opened.users += 1;
                Arc::clone(&opened.matcher)
            }
            None => {
                if open.len() >= MAX_OPEN {
                    bail!("this teleporter matches for {MAX_OPEN} sites already; try again later");
                }
                let dir = self.dir.join(format!("for-{key}"));
                let matcher = tokio::task::spawn_blocking(move || {
                    std::fs::create_dir_all(&dir)?;
                    let mut repairs = Vec::new();
                    let matcher = open_teleporter(&dir, SEQUENCE_DATA_BYTES, &mut repairs)?;
                    crate::site::tell(&repairs);
                    Ok::<_, Error>(matcher)
                })
                .await??;
                open.insert(
                    key,
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
        saved.map_err(|e| msg!("cannot save the matcher of {}: {e:?}", self.key.short()))
    }
}
