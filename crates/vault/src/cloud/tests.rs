//! Against a real S3 server, through a proxy that fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use drover_storage::cloud::{MAX_TRIES, Patience};
use drover_storage::testing::{Fault, Proxy, SILENCE, Server};
use parking_lot::Mutex;

use super::*;
use crate::tests::{content, disk, machine, restored};
use crate::{Checking, SnapshotId, Vault};

/// Waits little.
const HASTY: Patience = Patience {
    first: Duration::from_secs(60),
    later: Duration::from_secs(60),
    pause: Duration::from_millis(2),
    max_pause: Duration::from_millis(20),
    request: Duration::from_secs(30),
    connect: Duration::from_secs(10),
};

/// A store behind a proxy.
fn through(proxy: &Proxy, prefix: &str, patience: Patience) -> CloudObjects {
    proxy.cloud(prefix, patience, "testsecret").into()
}

struct Setting {
    server: Server,
    dir: tempfile::TempDir,
}

impl Setting {
    fn new() -> Option<Setting> {
        Some(Setting {
            server: Server::start()?,
            dir: tempfile::tempdir().unwrap(),
        })
    }

    /// Backs up a disk of these blocks.
    fn backup(&self, vault: &Vault, name: &str, blocks: &[u32], time: i64) -> Result<SnapshotId> {
        let path = self.dir.path().join(format!("{name}-{time}"));
        std::fs::write(&path, disk(blocks)).unwrap();
        let made = vault.backup_at(&path, &machine(name), "host", time, &mut |_| {});
        std::fs::remove_file(path).unwrap();
        Ok(made?.id)
    }
}

#[test]
fn objects_are_written_once_read_listed_and_removed() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let proxy = setting.server.proxy(|_, _, _| None);
    let objects = through(&proxy, "a/b", HASTY);
    let create = |key: &str, bytes: &'static [u8]| objects.create(key, Bytes::from_static(bytes));
    assert!(create("x/y=20/z", b"first").unwrap());
    assert!(!create("x/y=20/z", b"second").unwrap());
    assert!(!create("x/y=20/z", b"first").unwrap());
    assert_eq!(objects.get("x/y=20/z").unwrap().unwrap(), "first");
    assert_eq!(objects.get_range("x/y=20/z", 1..3).unwrap().unwrap(), "ir");
    assert_eq!(objects.get_range("x/y=20/z", 3..30).unwrap().unwrap(), "st");
    assert_eq!(objects.get_range("x/y=20/z", 9..30).unwrap().unwrap(), "");
    assert_eq!(objects.get("x/y").unwrap(), None);
    assert_eq!(objects.get_range("none", 0..9).unwrap(), None);
    assert!(create("x/yy", b"").unwrap());
    let listed = objects.list("x/y=20").unwrap();
    assert_eq!(
        (listed[0].key.as_str(), listed[0].size, listed.len()),
        ("x/y=20/z", 5, 1)
    );
    assert!(listed[0].modified_ms > 1_700_000_000_000);
    assert_eq!(objects.list("x").unwrap().len(), 2);
    assert_eq!(objects.list("y").unwrap(), []);
    for key in ["", "../x", "a//b", ".x", "/x"] {
        assert!(create(key, b"").is_err(), "{key}");
    }
    objects.remove("x/y=20/z").unwrap();
    objects.remove("x/y=20/z").unwrap();
    assert_eq!(objects.get("x/y=20/z").unwrap(), None);
    // Another prefix is another vault.
    assert_eq!(through(&proxy, "a/c", HASTY).list("x").unwrap(), []);
    let gone = through(&proxy, "", HASTY);
    assert_eq!(gone.list("a").unwrap().len(), 1);
}

#[test]
fn what_was_done_without_an_answer_counts_if_it_is_its_own() {
    let Some(setting) = Setting::new() else {
        return;
    };
    for fault in [Fault::LateError, Fault::Lost] {
        let prefix = format!("{fault:?}");
        let once = AtomicU32::new(0);
        let proxy = setting.server.proxy(move |_, method, _| {
            let first = method == "PUT" && once.fetch_add(1, Ordering::Relaxed) == 0;
            first.then_some(fault)
        });
        let objects = through(&proxy, &prefix, HASTY);
        assert!(objects.create("own", Bytes::from_static(b"mine")).unwrap());
        assert_eq!(objects.get("own").unwrap().unwrap(), "mine");
        assert!(!objects.create("own", Bytes::from_static(b"mine")).unwrap());

        // Somebody else's, with an answer that is lost.
        let plain = setting.server.proxy(|_, _, _| None);
        let other = through(&plain, &prefix, HASTY);
        assert!(
            other
                .create("other", Bytes::from_static(b"theirs"))
                .unwrap()
        );
        let failing = setting
            .server
            .proxy(move |n, _, _| (n == 0).then_some(fault));
        let objects = through(&failing, &prefix, HASTY);
        assert!(
            !objects
                .create("other", Bytes::from_static(b"mine"))
                .unwrap()
        );
        assert_eq!(objects.get("other").unwrap().unwrap(), "theirs");
    }
}

#[test]
fn a_store_that_ignores_conditions_is_refused() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let proxy = setting.server.proxy(|_, _, _| Some(Fault::Careless));
    let refused = Vault::create_on(Arc::new(through(&proxy, "careless", HASTY)));
    let error = refused.unwrap_err();
    assert!(matches!(error, VaultError::Unconditional(_)), "{error}");
}

#[test]
fn errors_are_one_line_and_retries_end() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let busy = setting.server.proxy(|_, _, _| Some(Fault::Busy));
    let objects = through(&busy, "busy", HASTY);
    let error = objects.get("vault").unwrap_err();
    assert!(
        error.can_retry && error.to_string().contains("503"),
        "{error}"
    );
    assert_eq!(busy.count(), u64::from(MAX_TRIES));
    // A limit on the time as well.
    let impatient = Patience {
        first: Duration::ZERO,
        ..HASTY
    };
    let began = busy.count();
    through(&busy, "busy", impatient).get("vault").unwrap_err();
    assert_eq!(busy.count(), began + 1);

    let proxy = setting.server.proxy(|_, _, _| None);
    let wrong: CloudObjects = proxy.cloud("x", HASTY, "another").into();
    let before = proxy.count();
    let error = wrong.create("vault", Bytes::new()).unwrap_err();
    assert!(
        !error.can_retry && error.to_string().contains("credentials"),
        "{error}"
    );
    assert_eq!(proxy.count(), before + 1);
    for error in [
        error.to_string(),
        objects.list("x").unwrap_err().to_string(),
    ] {
        assert!(
            !error.contains('\n') && error.contains("s3://vaults/"),
            "{error}"
        );
    }
}

/// Many requests fail, in every way: all is there all the same.
#[test]
fn faults_at_random_lose_nothing() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let plain = setting.server.proxy(|_, _, _| None);
    for seed in 0..4 {
        let rng = Mutex::new(fastrand::Rng::with_seed(seed));
        let proxy = setting.server.proxy(move |_, method, _| {
            let mut rng = rng.lock();
            if rng.u8(..4) > 0 {
                return None;
            }
            Some(match (method, rng.u8(..4)) {
                (_, 0) => Fault::Busy,
                (_, 1) => Fault::LateError,
                ("GET", 2) => Fault::Torn,
                _ => Fault::Lost,
            })
        });
        let prefix = format!("seed-{seed}");
        let objects = Arc::new(through(&proxy, &prefix, HASTY));
        let vault = Vault::create_on(objects).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let first: Vec<u32> = (1..300).collect();
        let second: Vec<u32> = (200..700).collect();
        let run = || -> Result<()> {
            let one = setting.backup(&vault, "web", &first, 100)?;
            let two = setting.backup(&vault, "web", &second, 200)?;
            assert!(restored(&vault, &one, setting.dir.path())? == disk(&first));
            vault.forget(&[one])?;
            vault.collect(Duration::ZERO, &mut |_| {})?;
            let hold = vault.hold(&two, crate::SessionId(9), "a mount")?;
            assert!(content(&vault, &two)? == disk(&second));
            drop(hold);
            Ok(())
        };
        run().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let vault = Vault::open_on(Arc::new(through(&plain, &prefix, HASTY))).unwrap();
        let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
        assert_eq!(
            (report.snapshots, report.problems),
            (1, vec![]),
            "seed {seed}"
        );
        let (entries, _) = vault.snapshots(None).unwrap();
        assert!(content(&vault, &entries[0].id).unwrap() == disk(&second));
    }
}

/// A write whose answer is lost, whichever: the backup is made, once.
#[test]
fn an_answer_that_is_lost_at_every_write_costs_nothing() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let mut runs = 0;
    for at in 0.. {
        let fault = [Fault::Lost, Fault::LateError][at % 2];
        let writes = AtomicU32::new(0);
        let proxy = setting.server.proxy(move |_, method, _| {
            let write = method == "PUT" && writes.fetch_add(1, Ordering::Relaxed) == at as u32;
            write.then_some(fault)
        });
        let objects = Arc::new(through(&proxy, &format!("write-{at}"), HASTY));
        let blocks: Vec<u32> = (1..100).collect();
        let vault = Vault::create_on(objects).unwrap();
        let made = setting.backup(&vault, "web", &blocks, 100).unwrap();
        let (entries, damaged) = vault.snapshots(None).unwrap();
        assert_eq!((entries.len(), damaged.len()), (1, 0), "write {at}");
        assert!(
            content(&vault, &made).unwrap() == disk(&blocks),
            "write {at}"
        );
        runs += 1;
        if at > 14 {
            break;
        }
    }
    println!("{runs} runs, 0 lost");
}

/// A write has the more time the longer it is.
#[test]
fn slow_links() {
    let Some(setting) = Setting::new() else {
        return;
    };
    // Four times as long as a request may take, for something of 1 MiB.
    let proxy = setting
        .server
        .proxy(|_, method, _| (method == "PUT").then_some(Fault::Slow));
    let patience = Patience {
        request: SILENCE / 4,
        first: Duration::ZERO,
        later: Duration::ZERO,
        ..HASTY
    };
    let objects = through(&proxy, "slow", patience);
    assert!(objects.create("long", vec![7; 1 << 20].into()).unwrap());
    let error = objects.create("short", Bytes::new()).unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
}

/// A minute of 503, in fast motion: by default the pauses are long enough for more than a minute.
#[test]
fn a_store_that_is_busy_for_a_minute_is_waited_for() {
    let normal = Patience::default();
    let mut pause = normal.pause;
    let mut waited = Duration::ZERO;
    for _ in 1..MAX_TRIES {
        waited += pause;
        pause = (pause * 2).min(normal.max_pause);
    }
    assert!(waited > Duration::from_secs(60) && normal.later > Duration::from_secs(60));

    let Some(setting) = Setting::new() else {
        return;
    };
    // All but the last try of whatever is asked for in the middle of a backup.
    let proxy = setting.server.proxy(|n, _, _| {
        (20..20 + u64::from(MAX_TRIES) - 1)
            .contains(&n)
            .then_some(Fault::Busy)
    });
    let vault = Vault::create_on(Arc::new(through(&proxy, "minute", HASTY))).unwrap();
    let blocks: Vec<u32> = (1..300).collect();
    let made = setting.backup(&vault, "web", &blocks, 100).unwrap();
    assert!(proxy.count() > 20 + u64::from(MAX_TRIES));
    assert!(content(&vault, &made).unwrap() == disk(&blocks));
}

/// How many requests it takes to learn that there is no object, if the first one is not answered.
fn after_silence(patience: Patience) -> Option<u64> {
    let setting = Setting::new()?;
    let proxy = setting
        .server
        .proxy(|n, _, _| (n == 0).then_some(Fault::Silent));
    let objects = through(&proxy, "silent", patience);
    assert_eq!(objects.get("none").unwrap(), None);
    Some(proxy.count())
}

/// The time that is given to errors begins with the first one: here the connection ends after twice as long.
#[test]
fn an_answer_that_took_long_to_fail_is_asked_for_again() {
    let requests = after_silence(Patience {
        first: SILENCE / 2,
        ..HASTY
    });
    assert!(requests.is_none_or(|n| n == 2), "{requests:?}");
}

/// A removal that is refused is an error, also of a server that answers bulk removals with 200.
#[test]
fn each_object_is_removed_by_itself() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let methods = Arc::new(Mutex::new(Vec::new()));
    let seen = methods.clone();
    let proxy = setting.server.proxy(move |_, method, _| {
        seen.lock().push(method.to_owned());
        None
    });
    let objects = through(&proxy, "one", HASTY);
    objects.create("x", Bytes::new()).unwrap();
    objects.remove("x").unwrap();
    assert_eq!(*methods.lock(), ["PUT", "DELETE"]);
}

#[test]
fn a_server_that_does_not_answer_is_asked_again() {
    let requests = after_silence(Patience {
        request: SILENCE / 6,
        ..HASTY
    });
    assert!(requests.is_none_or(|n| n >= 2), "{requests:?}");
}

/// A store that says it has written a container, and has not: the backup notices, and stores it again.
#[test]
fn a_container_that_was_not_written_although_it_was_said_is_written_again() {
    let Some(setting) = Setting::new() else {
        return;
    };
    let lies = AtomicU32::new(0);
    let proxy = setting.server.proxy(move |_, method, path| {
        let lie = method == "PUT"
            && path.contains("/containers/")
            && lies.fetch_add(1, Ordering::Relaxed) == 0;
        lie.then_some(Fault::Lie)
    });
    let vault = Vault::create_on(Arc::new(through(&proxy, "lies", HASTY))).unwrap();
    let blocks: Vec<u32> = (1..300).collect();
    let made = setting.backup(&vault, "web", &blocks, 100).unwrap();
    assert!(content(&vault, &made).unwrap() == disk(&blocks));
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!((report.snapshots, report.problems), (1, vec![]));
}
