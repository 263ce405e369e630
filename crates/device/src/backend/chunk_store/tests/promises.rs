//! What was acknowledged, and what is not acknowledged before it is safe.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::*;
use crate::local_remote::Committer;
use crate::remote::{Change, Epoch};

/// An epoch whose header is written but not durable is not committed, until a repeated commit has made it so.
#[test]
fn an_epoch_is_settled_before_it_is_acknowledged() {
    let store = setting();
    let device = Arc::new(open(&store));
    let epochs = Epochs::new(device.clone());
    let before = epochs.committed();
    let epoch = before.after(5);
    let change = Change::Write(0, Bytes::from_static(b"an epoch"));
    epochs.push(epoch, &[change]).unwrap();
    let settled = Arc::new(AtomicBool::new(false));
    let (mut left, done) = (3, settled.clone());
    store.fail(move |kind, _| {
        if kind != "settle" {
            return None;
        }
        left -= 1;
        done.store(left <= 0, Ordering::Release);
        (left > 0).then_some(StoreFault::Refused)
    });
    for _ in 0..2 {
        let error = epochs.commit(epoch, 8).unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert_eq!((epochs.committed(), device.epoch()), (before, before));
    }
    epochs.commit(epoch, 8).unwrap();
    assert!(settled.load(Ordering::Acquire), "it was not settled");
    assert_eq!((epochs.committed(), device.epoch()), (epoch, epoch));
    // One that was never pushed here is not acknowledged.
    assert!(epochs.commit(Epoch(epoch.0 + 9), 8).is_err());
    // Nor is what a process before this one has not made durable, when the disk is opened.
    drop(epochs);
    drop(device);
    store.fail(|kind, _| (kind == "settle").then_some(StoreFault::Refused));
    assert!(StoreDevice::open(store.clone(), &options(MINE)).is_err());
    store.heal();
    assert_eq!(open(&store).epoch(), epoch);
}

/// What was pushed and cannot be completed is in no epoch, whether or not it is committed again.
#[test]
fn an_epoch_that_is_not_complete_is_not_committed() {
    let store = setting();
    let device = Arc::new(open(&store));
    device.write(0, &[1; 16 << 10]).unwrap();
    device.flush().unwrap();
    let object = store.keys().into_iter().find(|key| key.starts_with("o/"));
    let object = object.unwrap();
    let whole = store.snapshot();
    store.change(&object, |_| None);
    let epochs = Epochs::new(device.clone());
    let before = epochs.committed();
    let epoch = before.after(5);
    let change = || Change::Write(10, Bytes::from_static(b"part"));
    for _ in 0..2 {
        epochs.push(epoch, &[change()]).unwrap();
        let error = epochs.commit(epoch, 4).unwrap_err();
        assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
        assert!(epochs.commit(epoch, 4).is_err());
        assert_eq!(epochs.committed(), before);
    }
    // The object is there again.
    let value = whole[&object].clone();
    assert!(store.put(vec![(object, value)]).iter().all(Result::is_ok));
    epochs.push(epoch, &[change()]).unwrap();
    epochs.commit(epoch, 4).unwrap();
    let mut read = [0; 16];
    device.read(0, &mut read).unwrap();
    assert_eq!(
        &read,
        b"\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01part\x01\x01"
    );
}

/// Answers that cannot be understood say nothing of what is stored: what was written waits.
#[test]
fn strange_answers_lose_nothing() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[4; 50_000]).unwrap();
    device.flush().unwrap();
    device.write(100, &[5; 40_000]).unwrap();
    for kind in ["put", "get"] {
        store.fail(move |now, _| (now == kind).then_some(StoreFault::Strange));
        for _ in 0..2 {
            device.flush().unwrap_err();
        }
    }
    store.heal();
    device.flush().unwrap();
    device.close().unwrap();
    let read = content(&open(&store)).unwrap();
    assert!(read[..100].iter().all(|b| *b == 4));
    assert!(read[100..40_100].iter().all(|b| *b == 5));
}

/// While a commit waits for the store, the last epoch is told.
#[test]
fn a_commit_under_way_is_not_waited_for() {
    let store = setting();
    let device = open(&store);
    let before = device.epoch();
    let (arrived, at) = channel();
    let (go, may_go) = channel::<()>();
    store.fail(move |kind, key| {
        if (kind, key) == ("swap", "disk") {
            let _ = arrived.send(());
            let _ = may_go.recv_timeout(Duration::from_secs(60));
        }
        None
    });
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            device.write(0, b"slow").unwrap();
            device.flush().unwrap();
            is_done.store(true, Ordering::Release);
        });
        at.recv().unwrap();
        assert_eq!(device.epoch(), before);
        assert!(!is_done.load(Ordering::Acquire), "it waited");
        go.send(()).unwrap();
    });
    assert!(device.epoch() > before);
}

/// Objects that were written without an answer are removed: those that are there by the next commit, those that come later
/// by the sweep of the next session.
#[test]
fn what_was_written_without_an_answer_does_not_stay() {
    for fault in [StoreFault::LostAnswer, StoreFault::Late] {
        let store = setting();
        let device = open(&store);
        let mut left = 3;
        store.fail(move |kind, _| {
            left -= i32::from(kind == "put");
            (kind == "put" && left >= 0).then_some(fault)
        });
        let random: Vec<u8> = (0..48 << 10).map(|_| fastrand::u8(..)).collect();
        device.write(0, &random).unwrap();
        device.flush().unwrap_err();
        while device.flush().is_err() {}
        device.close().unwrap();
        store.heal();
        if fault == StoreFault::Late {
            // As one that comes now.
            let stray = format::object_key(1, format::Version(1 << 104 | 77));
            let put = store.put(vec![(stray, Bytes::from_static(b"late"))]);
            assert!(put.iter().all(Result::is_ok));
        }
        let device = open(&store);
        let began = Instant::now();
        // Three objects, one page, the header, the probe.
        while store.keys().len() > 6 {
            assert!(began.elapsed().as_secs() < 60, "{:?}", store.keys());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(content(&device).unwrap()[..48 << 10] == random[..]);
    }
}
