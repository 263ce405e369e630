//! Who else writes: clones of this process, a second one with the same lease, stores that let two writers pass.

use std::sync::Barrier;

use super::super::format::{HEADER, MAX_HEADER};
use super::super::inner::Committed;
use super::super::sweep::read_table;
use super::*;

/// A copy of a disk in use, as one in a clone of its host is.
fn twin(store: &Arc<MemoryStore>, of: &StoreDevice) -> StoreDevice {
    let committed = of.inner.committed.lock();
    let (header, tag) = (committed.header.clone(), committed.tag.clone());
    let table = read_table(&**store, &header.id, &header.pages).unwrap();
    let copy = Committed::new(header, tag);
    let twin = StoreDevice::new(store.clone(), copy, table, false, 1 << 20).unwrap();
    twin.inner.state.lock().count = of.inner.state.lock().count;
    twin
}

/// Of a process and its clone one goes on, and the other is told; what the one has flushed stays what it is.
#[test]
fn of_two_clones_one_writes() {
    for first_flushes in [true, false] {
        let store = setting();
        let first = open(&store);
        first.write(0, &[1; 100_000]).unwrap();
        first.flush().unwrap();
        let second = twin(&store, &first);
        let (winner, loser) = match first_flushes {
            true => (&first, &second),
            false => (&second, &first),
        };
        winner.write(0, &[2; 100_000]).unwrap();
        loser.write(0, &[3; 100_000]).unwrap();
        winner.flush().unwrap();
        let error = loser.flush().unwrap_err();
        assert!(
            error.to_string().contains("a copy of this mount"),
            "{error}"
        );
        loser.read(0, &mut [0; 10]).unwrap_err();
        let is_whole = |device: &StoreDevice| {
            let read = content(device).unwrap();
            assert!(read[..100_000].iter().all(|b| *b == 2), "{}", read[0]);
        };
        is_whole(winner);
        winner.write(200_000, b"more").unwrap();
        winner.flush().unwrap();
        winner.close().unwrap();
        is_whole(&open(&store));
    }
}

/// One that only reads is told as well, when the other has removed what it reads.
#[test]
fn a_clone_that_reads_is_told() {
    let store = setting();
    let first = open(&store);
    first.write(0, &[1; 100_000]).unwrap();
    first.flush().unwrap();
    let second = twin(&store, &first);
    first.write(0, &[2; 100_000]).unwrap();
    first.close().unwrap();
    let error = second.read(0, &mut [0; 10]).unwrap_err();
    assert!(!matches!(error, DeviceError::Corrupt(_)), "{error}");
    assert!(second.trouble().is_some());
}

/// Two that have the same token and open at once: one of them can flush.
#[test]
fn of_two_with_one_token_one_writes() {
    let store = setting();
    for round in 0..40 {
        let start = Barrier::new(2);
        let opened = std::thread::scope(|scope| {
            let open = || {
                start.wait();
                StoreDevice::open(store.clone(), &options(MINE))
            };
            let threads = [scope.spawn(open), scope.spawn(open)];
            threads.map(|thread| thread.join().unwrap())
        });
        let mut flushed = 0;
        for (byte, device) in (1..).zip(&opened) {
            let Ok(device) = device else { continue };
            let written = device.write(0, &[byte; 1000]);
            flushed += usize::from(written.and_then(|()| device.flush()).is_ok());
        }
        assert_eq!(flushed, 1, "round {round}");
    }
}

#[test]
fn a_store_that_checks_and_then_writes_is_refused() {
    let new = NewStore {
        size: SIZE,
        chunk: 4096,
        object: None,
    };
    let refused = create(&MemoryStore::racy(), new).unwrap_err();
    assert!(matches!(refused, OpenError::Careless(_)), "{refused}");
}

/// A store that has lost the header of a disk is not taken for an empty one.
#[test]
fn no_disk_is_made_over_what_is_left_of_another() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[1; 100_000]).unwrap();
    device.close().unwrap();
    let whole = store.snapshot();
    let new = NewStore {
        size: SIZE,
        chunk: 4096,
        object: None,
    };
    for kept in ["o/", "t/"] {
        store.restore(whole.clone());
        for key in store.keys().iter().filter(|key| !key.starts_with(kept)) {
            store.change(key, |_| None);
        }
        let refused = create(&*store, new).unwrap_err();
        assert!(matches!(refused, OpenError::Remains(_)), "{refused}");
    }
    store.restore(whole);
    assert!(content(&open(&store)).unwrap()[..100_000] == [1; 100_000]);
}

/// Who has nothing to do learns of a broken lease, or of a lost disk, when it looks; who ends does not.
#[test]
fn an_idle_holder_that_looks_is_told() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[1; 100_000]).unwrap();
    device.check().unwrap();
    device.flush().unwrap();
    device.check().unwrap();
    break_lease(&*store).unwrap().unwrap();
    let error = device.check().unwrap_err();
    assert!(error.to_string().contains("lease was broken"), "{error}");
    assert!(device.trouble().is_some());
    device.read(0, &mut [0; 10]).unwrap_err();

    let device = open(&store);
    assert!(!device.is_resumed());
    let header = store.look(HEADER, MAX_HEADER).unwrap().unwrap();
    drop(device);
    let device = open(&store);
    assert!(device.is_resumed(), "a crash leaves the lease");
    device.close().unwrap();
    break_lease(&*store).unwrap();
    device.check().unwrap();

    let device = open(&store);
    let session = device.session();
    store.remove(&[HEADER.to_owned()]).unwrap();
    let error = device.check().unwrap_err();
    assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
    store.swap(HEADER, None, header.0).unwrap().unwrap();
    assert!(device.check().is_err(), "it stays so");
    assert_eq!(open(&store).session() + 1, session);
}
