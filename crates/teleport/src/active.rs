//! Which transfers are in progress: two never write one name, a newer session stops an older one of the same
//! transfer, and what is being removed is not resumed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::Refusal;
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use crate::others::{ASK_EVERY, NotHeld, Others};

/// The key of a holder that yields to any transfer.
pub const ANYBODY: &str = "";

/// The names with a transfer in progress, so that no two write the same one.
#[derive(Default)]
pub struct Active {
    names: Mutex<Names>,
    /// The other nodes of the site.
    others: Option<Arc<dyn Others>>,
    /// Numbers the sessions, so that an older one never stops a newer one.
    asked: AtomicU64,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Names {
    held: HashMap<ImageName, Holder>,
    /// Keys of transfers that are being removed.
    going: HashSet<String>,
}

#[derive(Debug)]
struct Holder {
    key: String,
    number: u64,
    stop: watch::Sender<bool>,
}

/// Why a name cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    /// Another transfer holds it.
    ByAnother,
    /// A newer session of the same transfer holds it.
    ByNewer,
    /// An older session of the same transfer has not released it yet: retry later.
    Still,
    /// It cannot be had among the nodes of the site.
    Refused(Refusal),
}

/// Holds a name until dropped.
pub struct Hold {
    active: Arc<Active>,
    name: ImageName,
    /// Whether it is held among the nodes, too.
    among: bool,
    /// Becomes true when a newer session of the same transfer wants to take over.
    pub stop: watch::Receiver<bool>,
}

/// Prevents a transfer from being resumed until dropped.
pub struct Claim {
    active: Arc<Active>,
    key: String,
}

/// The number of a holder that yields to any session.
pub const OLDEST: u64 = 0;

impl Active {
    /// None yet, at a site with other nodes.
    pub fn among(others: Option<Arc<dyn Others>>) -> Self {
        Active {
            others,
            ..Self::default()
        }
    }

    /// A session number higher than all before it.
    pub fn number(&self) -> u64 {
        let before = self.asked.fetch_add(1, Ordering::Relaxed);
        before + 1
    }

    /// Takes `name` for the transfer `key` and the session `number`. If an older session of the same transfer holds
    /// it (whose connection probably broke), or a holder with the key [`ANYBODY`], it is asked to stop and waited
    /// for, at most for `patience`.
    ///
    /// # Errors
    /// When the name is held by another.
    pub fn take(
        self: &Arc<Self>,
        name: &ImageName,
        key: &str,
        number: u64,
        patience: Duration,
    ) -> Result<Hold, Taken> {
        let deadline = Instant::now() + patience;
        let mut names = self.names.lock();
        loop {
            match names.held.get(name) {
                Some(holder) if holder.key != key && holder.key != ANYBODY => {
                    return Err(Taken::ByAnother);
                }
                Some(holder) if holder.number > number => return Err(Taken::ByNewer),
                Some(holder) => drop(holder.stop.send_replace(true)),
                None if names.going.contains(key) => {}
                None => break,
            }
            if self.freed.wait_until(&mut names, deadline).timed_out() {
                return Err(Taken::Still);
            }
        }
        let (sender, stop) = watch::channel(false);
        let holder = Holder {
            key: key.into(),
            number,
            stop: sender,
        };
        names.held.insert(name.clone(), holder);
        drop(names);
        let mut hold = Hold {
            active: self.clone(),
            name: name.clone(),
            among: false,
            stop,
        };
        // Whoever yields to anybody only reads what is here.
        let others = self.others.as_ref().filter(|_| key != ANYBODY);
        while let Some(others) = others.filter(|_| !hold.among) {
            match others.hold(name, key) {
                Ok(()) => hold.among = true,
                Err(NotHeld::Wait(_)) if Instant::now() < deadline && !*hold.stop.borrow() => {
                    std::thread::sleep(ASK_EVERY);
                }
                Err(NotHeld::Wait(_)) => return Err(Taken::Still),
                Err(NotHeld::Taken(_)) => return Err(Taken::ByAnother),
                Err(NotHeld::Refused(refusal)) => return Err(Taken::Refused(refusal)),
            }
        }
        Ok(hold)
    }

    /// Whether a transfer with that key is in progress.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.names.lock().held.values().any(|h| h.key == key)
    }

    /// The keys of the transfers in progress.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        let names = self.names.lock();
        names.held.values().map(|h| h.key.clone()).collect()
    }

    /// Claims the transfer `key` so that it cannot be resumed; `None` while it is in progress or claimed.
    pub fn claim(self: &Arc<Self>, key: &str) -> Option<Claim> {
        let mut names = self.names.lock();
        let free = !names.held.values().any(|h| h.key == key) && names.going.insert(key.into());
        drop(names);
        free.then(|| Claim {
            active: self.clone(),
            key: key.into(),
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.active.names.lock().going.remove(&self.key);
        self.active.freed.notify_all();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(others) = self.active.others.as_ref().filter(|_| self.among) {
            others.free(&self.name);
        }
        self.active.names.lock().held.remove(&self.name);
        self.active.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_held_by_one_transfer_and_handed_over_to_a_newer_session_of_it() {
        let active = Arc::new(Active::default());
        let name = ImageName::new("a.raw").unwrap();
        let patience = Duration::from_millis(50);
        let first = active
            .take(&name, "one", active.number(), patience)
            .unwrap();
        assert!(
            active.take(&name, "two", active.number(), patience).err() == Some(Taken::ByAnother)
        );
        // The holder does not release it in time: it is asked to stop, but not overridden.
        assert!(active.take(&name, "one", active.number(), patience).err() == Some(Taken::Still));
        assert!(*first.stop.borrow());
        let waiting = {
            let (active, name) = (active.clone(), name.clone());
            std::thread::spawn(move || {
                active
                    .take(&name, "one", active.number(), patience * 200)
                    .is_ok()
            })
        };
        std::thread::sleep(patience);
        drop(first);
        assert!(waiting.join().unwrap());
        assert!(active.take(&name, "two", active.number(), patience).is_ok());
    }

    /// Two sessions wait for one that does not release the name: the newer gets it, whichever wakes first.
    #[test]
    fn an_older_session_that_waits_does_not_stop_a_newer_one() {
        let active = Arc::new(Active::default());
        let name = ImageName::new("a.raw").unwrap();
        let patience = Duration::from_secs(60);
        for _ in 0..20 {
            let first = active
                .take(&name, "one", active.number(), patience)
                .unwrap();
            let asked = || active.asked.load(Ordering::Relaxed);
            let wait = || {
                let (active, name, before) = (active.clone(), name.clone(), asked());
                let waiting = std::thread::spawn(move || {
                    active.take(&name, "one", active.number(), patience)
                });
                while asked() == before {
                    std::thread::yield_now();
                }
                waiting
            };
            let (older, newer) = (wait(), wait());
            drop(first);
            // The older one may have held it for a while, and releases it as soon as it is asked.
            if let Ok(hold) = older.join().unwrap() {
                drop(hold);
            }
            let newer = newer.join().unwrap().unwrap();
            assert!(!*newer.stop.borrow());
        }
    }

    /// A session may ask late: after a comparison, or for the second of its images.
    #[test]
    fn a_session_that_began_earlier_does_not_stop_a_newer_one_when_it_asks_later() {
        let active = Arc::new(Active::default());
        let name = ImageName::new("a.raw").unwrap();
        let patience = Duration::from_secs(60);
        let (older, newer) = (active.number(), active.number());
        let looked = active.take(&name, ANYBODY, OLDEST, patience).unwrap();
        let short = Duration::from_millis(10);
        let early = active.take(&name, "one", older, short);
        assert_eq!(early.err(), Some(Taken::Still));
        assert!(*looked.stop.borrow());
        drop(looked);
        let hold = active.take(&name, "one", newer, patience).unwrap();
        let late = active.take(&name, "one", older, patience);
        assert_eq!(late.err(), Some(Taken::ByNewer));
        assert!(!*hold.stop.borrow());
    }

    /// A resume waits until a removal has ended, and a removal never begins while the transfer is in use.
    #[test]
    fn what_is_being_removed_is_taken_up_afterwards() {
        let active = Arc::new(Active::default());
        let name = ImageName::new("a.raw").unwrap();
        let patience = Duration::from_secs(60);
        let hold = active
            .take(&name, "one", active.number(), patience)
            .unwrap();
        assert!(active.has("one") && active.claim("one").is_none());
        // Another peer's transfer for the same name.
        let claim = active.claim("two").unwrap();
        assert!(active.claim("two").is_none());
        drop((hold, claim));
        let claim = active.claim("one").unwrap();
        let short = Duration::from_millis(10);
        assert_eq!(
            active.take(&name, "one", active.number(), short).err(),
            Some(Taken::Still)
        );
        let waiting = {
            let (active, name) = (active.clone(), name.clone());
            std::thread::spawn(move || active.take(&name, "one", active.number(), patience).is_ok())
        };
        drop(claim);
        assert!(waiting.join().unwrap());
    }
}
