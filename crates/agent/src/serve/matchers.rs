//! The matchers of a standalone teleporter: one per site and domain.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_net::{Code, DEFAULT_DOMAIN, PeerKey, Share, ShareLimits, Shares};
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_teleport::{LocalTeleporter, MAX_IDLE, open_teleporter};
use tokio::sync::Mutex;

use crate::error::{Context, Error, Result, msg};

/// Upper bound on open matchers, each of which has its caches (32 MiB) in memory; a site may have one in any case.
const MAX_OPEN: ShareLimits = ShareLimits {
    all: 16,
    one: 12,
    sure: 1,
};

/// Upper bound on the matchers of one site, open or not: each has a directory, of 33 MiB and its hash files.
const MAX_OF_SITE: usize = 64;

/// Opens a matcher when its site connects and closes it after the last disconnect.
pub struct Matchers {
    dir: PathBuf,
    places: Shares<PeerKey>,
    /// When a site was last refused because the others have all places.
    turned_away: parking_lot::Mutex<Option<Instant>>,
    open: Mutex<HashMap<(PeerKey, String), Opened>>,
}

struct Opened {
    matcher: LocalTeleporter,
    users: usize,
    _place: Share<PeerKey>,
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
            places: Shares::new(MAX_OPEN),
            turned_away: parking_lot::Mutex::default(),
            open: Mutex::default(),
        })
    }

    /// The matcher of a domain of the site with this key.
    ///
    /// # Errors
    /// When no domain can have this name, too many use this teleporter at once, the site has too many matchers, or the
    /// matcher's files cannot be used.
    pub async fn of(self: &Arc<Self>, key: PeerKey, domain: String) -> Result<InUse> {
        let checked = drover_store::domain::check(&domain);
        let domain = checked.map_err(|text| Error::coded(Code::Denied, text))?;
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
                let place = self.place(key.0)?;
                let (all, dir) = (Arc::clone(self), self.dir.join(name));
                let matcher = tokio::task::spawn_blocking(move || {
                    all.check_number(key.0, &dir)?;
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
                        _place: place,
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

    /// A place for a matcher of this site.
    fn place(&self, key: PeerKey) -> Result<Share<PeerKey>> {
        self.places.try_take(key, 1).ok_or_else(|| {
            let text = if self.places.taken(&key).1 >= MAX_OPEN.one {
                let most = MAX_OPEN.one;
                format!(
                    "this teleporter matches for {most} domains of your site, the most at once; try again later"
                )
            } else {
                *self.turned_away.lock() = Some(Instant::now());
                "this teleporter matches for as many sites and domains as it can; try again later"
                    .into()
            };
            Error::coded(Code::Busy, text)
        })
    }

    /// Fails if the matcher in `dir` would be one too many of its site.
    fn check_number(&self, key: PeerKey, dir: &Path) -> Result<()> {
        if dir.exists() || !self.dir.exists() {
            return Ok(());
        }
        let own = format!("for-{key}");
        let entries = std::fs::read_dir(&self.dir).context("cannot read the matchers")?;
        let names = entries.flatten().map(|entry| entry.file_name());
        let names = names.filter(|name| name.as_encoded_bytes().starts_with(own.as_bytes()));
        if names.count() < MAX_OF_SITE {
            return Ok(());
        }
        let text = format!(
            "this teleporter keeps matchers for {MAX_OF_SITE} domains of your site, the most it does; its administrator can remove those of domains that are gone"
        );
        Err(Error::coded(Code::Denied, text))
    }

    /// Whether a connection on which nothing was asked for this time is to end in favor of others.
    fn ends_idle(&self, idle: Duration, max_idle: Duration) -> bool {
        let turned_away = *self.turned_away.lock();
        idle >= max_idle && turned_away.is_some_and(|at| at.elapsed() <= max_idle)
    }
}

impl InUse {
    /// The matcher itself.
    pub fn shared(&self) -> LocalTeleporter {
        Arc::clone(&self.matcher)
    }

    /// Whether its connection, on which nothing was asked for this time, is to end in favor of others.
    pub fn ends_idle(&self, idle: Duration) -> bool {
        self.all.ends_idle(idle, MAX_IDLE)
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
        let saved = tokio::task::spawn_blocking(move || matcher.lock().persist()).await;
        open.remove(&self.key);
        saved?.map_err(|e| msg!("cannot save the matcher of {}: {e:?}", self.key.0.short()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_end_idle_only_while_others_wait() {
        let matchers = Matchers::new(PathBuf::new());
        let (one, other) = (PeerKey([1; 32]), PeerKey([2; 32]));
        let long = MAX_IDLE * 2;
        let mut taken = Vec::from_iter((0..20).filter_map(|_| matchers.place(one).ok()));
        assert_eq!(taken.len() as u64, MAX_OPEN.one);
        // It is in its own way, nobody else's.
        assert!(!matchers.ends_idle(long, MAX_IDLE));
        taken.extend((0..20).filter_map(|_| matchers.place(other).ok()));
        assert_eq!(taken.len() as u64, MAX_OPEN.all);
        assert!(matchers.ends_idle(long, MAX_IDLE));
        assert!(!matchers.ends_idle(MAX_IDLE / 2, MAX_IDLE));
        assert!(!matchers.ends_idle(long, Duration::ZERO), "long ago");
        let third = matchers.place(PeerKey([3; 32]));
        assert!(third.is_ok(), "one in any case");
    }

    #[test]
    fn a_site_has_so_many_directories() {
        let dir = tempfile::tempdir().unwrap();
        let matchers = Matchers::new(dir.path().to_owned());
        let (one, other) = (PeerKey([1; 32]), PeerKey([2; 32]));
        let of = |key: PeerKey, n: usize| dir.path().join(format!("for-{key}-in-d{n}"));
        for n in 0..MAX_OF_SITE {
            matchers.check_number(one, &of(one, n)).unwrap();
            std::fs::create_dir(of(one, n)).unwrap();
        }
        let e = matchers.check_number(one, &of(one, MAX_OF_SITE));
        assert_eq!(e.unwrap_err().code(), Some(Code::Denied));
        matchers.check_number(one, &of(one, 0)).unwrap();
        matchers.check_number(other, &of(other, 0)).unwrap();
    }
}
