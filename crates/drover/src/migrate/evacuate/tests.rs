use drover_store::machine::{MachineLock, Other, Seed, Token};
use tempfile::TempDir;

use super::*;

const TOKEN: Token = Token([2; 16]);

/// A machine of which there is a record.
struct Host {
    _directory: TempDir,
    machines: Machines,
    stop: watch::Sender<bool>,
    places: Semaphore,
}

impl Host {
    fn new() -> Host {
        let directory = TempDir::new().unwrap();
        Host {
            machines: Machines::new(directory.path().to_owned()),
            _directory: directory,
            stop: watch::Sender::new(false),
            places: Semaphore::new(1),
        }
    }

    fn name() -> ImageName {
        ImageName::new("web").unwrap()
    }

    fn leaving(to: &str) -> MachineRecord {
        let to = Other {
            key: [1; 32],
            name: to.into(),
        };
        let here = MachineRecord::new(Seed([3; 16]), Vec::new());
        here.leave(TOKEN, to).unwrap()
    }

    fn store(&self, record: &MachineRecord) {
        self.machines.store(&Self::name(), record).unwrap();
    }

    fn leaves(&self, to: &str) {
        self.store(&Self::leaving(to));
    }

    fn commits(&self, to: &str) {
        self.store(&Self::leaving(to).commit(TOKEN).unwrap());
    }

    fn goes(&self, to: &str) {
        let committed = Self::leaving(to).commit(TOKEN).unwrap();
        self.store(&committed.gone(TOKEN).unwrap());
    }

    /// Another command that moves the machine.
    fn other(&self) -> MachineLock {
        let mut lock = self.machines.lock(&Self::name()).unwrap().unwrap();
        lock.sign().unwrap();
        lock
    }

    async fn depart(
        &self,
        patience: Duration,
        mut once: impl FnMut() -> Result<()>,
    ) -> Result<Option<String>> {
        let once = || std::future::ready(once());
        let one = Departing {
            machines: self.machines.clone(),
            name: Self::name(),
            stop: self.stop.subscribe(),
            patience,
        };
        one.depart(&self.places, once).await
    }
}

fn unfinished(again: bool) -> anyhow::Error {
    MigrateError::Unfinished {
        machine: "web".into(),
        peer: "lyon".into(),
        why: "its site does not run".into(),
        again,
    }
    .into()
}

fn held() -> anyhow::Error {
    Error::coded(Code::Held, "web is being migrated by another process").into()
}

#[tokio::test]
async fn what_was_handed_over_is_tried_again_until_it_has_followed() {
    let host = Host::new();
    let mut tries = 0;
    let moved = host.depart(GIVE_UP_AFTER, || {
        host.commits("lyon");
        tries += 1;
        match tries {
            1 => Err(unfinished(true)),
            2 => Err(MigrateError::Lost.into()),
            3 => {
                let peer = "lyon".into();
                Err(Error::from(NetError::Closed { peer }).into())
            }
            _ => Ok(()),
        }
    });
    assert_eq!(moved.await.unwrap(), None);
    assert_eq!(tries, 4);
}

#[tokio::test]
async fn what_no_other_attempt_mends_is_said_at_once() {
    let errors: [fn() -> anyhow::Error; 4] = [
        || unfinished(false),
        || Error::coded(Code::Held, "it is being moved to paris").into(),
        || MigrateError::Unsupported("look at both".into()).into(),
        || Error::coded(Code::Io, "cannot write the record").into(),
    ];
    for error in errors {
        let host = Host::new();
        host.commits("lyon");
        let mut tries = 0;
        let failed = host.depart(GIVE_UP_AFTER, || {
            tries += 1;
            Err(error())
        });
        assert_eq!(failed.await.unwrap_err().to_string(), error().to_string());
        assert_eq!(tries, 1);
    }
    // One that runs here was not even begun to be handed over.
    let host = Host::new();
    let failed = host.depart(GIVE_UP_AFTER, || Err(unfinished(true)));
    failed.await.unwrap_err();
}

#[tokio::test]
async fn what_may_pass_is_not_waited_for_without_end() {
    let host = Host::new();
    host.commits("lyon");
    let failed = host.depart(Duration::from_millis(300), || Err(unfinished(true)));
    failed.await.unwrap_err();
}

#[tokio::test]
async fn one_that_another_command_moves_is_waited_for() {
    // Also before it is handed over.
    for commits in [true, false] {
        let host = Host::new();
        host.leaves("lyon");
        let other = host.other();
        let departs = host.depart(GIVE_UP_AFTER, || panic!("it has moved"));
        let moves = async {
            tokio::time::sleep(LOOK_EVERY).await;
            if commits {
                host.commits("lyon");
                tokio::time::sleep(LOOK_EVERY).await;
            }
            host.goes("lyon");
            drop(other);
        };
        let (moved, ()) = tokio::join!(departs, moves);
        assert_eq!(moved.unwrap().as_deref(), Some("lyon"));
    }
    // It gives up, or is killed: then this one does it.
    let host = Host::new();
    host.leaves("lyon");
    let other = host.other();
    let mut tries = 0;
    let departs = host.depart(GIVE_UP_AFTER, || {
        tries += 1;
        Ok(())
    });
    let gives_up = async {
        tokio::time::sleep(LOOK_EVERY).await;
        drop(other);
    };
    let (moved, ()) = tokio::join!(departs, gives_up);
    assert_eq!((moved.unwrap(), tries), (None, 1));
}

#[tokio::test]
async fn one_that_another_command_has_moved_meanwhile_did_move() {
    let host = Host::new();
    let moved = host.depart(GIVE_UP_AFTER, || {
        host.goes("lyon");
        Err(held())
    });
    assert_eq!(moved.await.unwrap().as_deref(), Some("lyon"));
    // One that is there, and does not run, is said.
    let host = Host::new();
    let failed = host.depart(GIVE_UP_AFTER, || {
        host.goes("lyon");
        Err(MigrateError::Unsupported("it does not run there".into()).into())
    });
    failed.await.unwrap_err();
    // The other command has just begun.
    let (host, mut other) = (Host::new(), None);
    host.leaves("lyon");
    let begins = host.depart(GIVE_UP_AFTER, || match other.take() {
        None => {
            other = Some(host.other());
            Err(held())
        }
        Some(_ended) => Ok(()),
    });
    let stops = async {
        tokio::time::sleep(LOOK_EVERY).await;
        host.stop.send_replace(true);
    };
    let (stopped, ()) = tokio::join!(begins, stops);
    assert!(stopped.unwrap_err().to_string().contains("not moved"));
}

#[tokio::test]
async fn one_whose_move_was_broken_in_a_pause_is_not_moved_again() {
    // Who breaks it may hold its lock when the pause ends.
    for is_held in [false, true] {
        let host = Host::new();
        host.commits("lyon");
        let mut tries = 0;
        let departs = host.depart(GIVE_UP_AFTER, || {
            tries += 1;
            Err(unfinished(true))
        });
        let breaks = async {
            tokio::task::yield_now().await;
            let breaking = host.other();
            if is_held {
                tokio::time::sleep(2 * LOOK_EVERY).await;
            }
            let committed = Host::leaving("lyon").commit(TOKEN).unwrap();
            let stays = committed.thaw(TOKEN).unwrap().stay(TOKEN).unwrap();
            host.store(&stays);
            drop(breaking);
        };
        let (failed, ()) = tokio::join!(departs, breaks);
        let said = failed.unwrap_err().to_string();
        assert!(said.contains("web stays here"), "{said}");
        assert_eq!(tries, 1);
    }
    // Another command has brought it to its end meanwhile.
    let host = Host::new();
    host.commits("lyon");
    let departs = host.depart(GIVE_UP_AFTER, || Err(unfinished(true)));
    let goes = async {
        tokio::task::yield_now().await;
        host.goes("lyon");
    };
    let (moved, ()) = tokio::join!(departs, goes);
    assert_eq!(moved.unwrap().as_deref(), Some("lyon"));
}

#[tokio::test]
async fn nothing_is_begun_once_it_was_stopped() {
    let host = Host::new();
    let place = host.places.acquire().await.unwrap();
    let departs = host.depart(GIVE_UP_AFTER, || panic!("it begins"));
    let stops = async {
        host.stop.send_replace(true);
        drop(place);
    };
    let (stopped, ()) = tokio::join!(departs, stops);
    assert!(stopped.unwrap_err().to_string().contains("not moved"));
    // One that was handed over is said to be so.
    host.commits("lyon");
    let error = host.depart(GIVE_UP_AFTER, || Ok(())).await.unwrap_err();
    assert!(error.to_string().contains("handed over to lyon"), "{error}");
}

#[test]
fn it_is_said_where_they_went() {
    let to = |sites: &[(&str, usize)]| {
        let sites = sites.iter().map(|(peer, number)| ((*peer).into(), *number));
        whither(3, "lyon", &sites.collect())
    };
    assert_eq!(to(&[]), "lyon");
    assert_eq!(to(&[("paris", 1)]), "lyon (2), paris (1)");
    assert_eq!(to(&[("paris", 3)]), "paris (3)");
}
