//! The disk against a plain model, over a store that fails in every way.

use std::sync::Arc;

use drover_core::{BlockDevice, DeviceError, Zeroes};

use super::testing::{MemoryStore, StoreFault};
use super::*;
use crate::testing::contract;

mod promises;
mod writers;

const SIZE: u64 = 300_000;
const MINE: [u8; 16] = [1; 16];
const THEIRS: [u8; 16] = [2; 16];

fn new_disk(store: &dyn ChunkStore, size: u64) {
    let new = NewStore {
        size,
        chunk: 4096,
        object: None,
    };
    create(store, new).unwrap();
}

fn options(token: [u8; 16]) -> StoreOptions {
    StoreOptions::new(token, "a test")
}

fn open(store: &Arc<MemoryStore>) -> StoreDevice {
    StoreDevice::open(store.clone(), &options(MINE)).unwrap()
}

fn setting() -> Arc<MemoryStore> {
    let store = Arc::new(MemoryStore::new());
    new_disk(&*store, SIZE);
    store
}

fn content(device: &dyn BlockDevice) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0xA5; device.size() as usize];
    device.read(0, &mut bytes)?;
    Ok(bytes)
}

#[test]
fn the_contract_is_held() {
    contract(&|size| {
        let store = MemoryStore::new();
        new_disk(&store, size);
        let mut options = options(MINE);
        // So small that most is written back while it goes on.
        options.max_buffer = 64 << 10;
        Box::new(StoreDevice::open(Arc::new(store), &options).unwrap())
    });
}

#[test]
fn what_was_flushed_is_there_again_and_nothing_is_left_over() {
    let store = setting();
    let device = open(&store);
    device.write(5000, &[7; 30_000]).unwrap();
    device.flush().unwrap();
    device.write(5000, &[8; 30_000]).unwrap();
    device.close().unwrap();
    assert!(matches!(device.write(0, b"x"), Err(DeviceError::Closed)));
    // Three objects, one page, the header, the probe.
    assert_eq!(store.keys().len(), 6, "{:?}", store.keys());

    let device = open(&store);
    let read = content(&device).unwrap();
    assert!(read[5000..35_000].iter().all(|b| *b == 8) && read[..5000].iter().all(|b| *b == 0));
    device.write_zeroes(0, SIZE, Zeroes::default()).unwrap();
    device.close().unwrap();
    assert_eq!(store.keys(), ["disk", "probe"]);
}

/// Random requests, errors, lost answers, late writes and crashes: what is read is what a vector says, and what is there
/// after a crash is what a flush has left.
#[test]
fn a_disk_is_as_a_vector_says_whatever_the_store_does() {
    let mut crashes = 0;
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let store = setting();
        let mut faults = fastrand::Rng::with_seed(seed ^ 77);
        let worse = random.u8(0..4);
        let fail = move |kind: &str, _: &str| {
            let how = match faults.u8(0..3) {
                0 => StoreFault::Refused,
                1 => StoreFault::LostAnswer,
                _ if kind == "look" => StoreFault::Refused,
                _ => StoreFault::Late,
            };
            (faults.u8(0..20) < worse).then_some(how)
        };
        let mut model = vec![0u8; SIZE as usize];
        let (mut flushed, mut maybe) = (model.clone(), Vec::new());
        let mut device = open(&store);
        store.fail(fail.clone());
        for step in 0..200 {
            let said = || format!("seed {seed}, step {step}");
            let offset = random.u64(0..SIZE);
            let length = random.u64(1..=40_000.min(SIZE - offset));
            let range = offset as usize..(offset + length) as usize;
            match random.u8(0..10) {
                0..4 => {
                    let data: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
                    persist(|| device.write(offset, &data), &said());
                    model[range].copy_from_slice(&data);
                }
                4 => {
                    persist(
                        || device.write_zeroes(offset, length, Zeroes::default()),
                        &said(),
                    );
                    model[range].fill(0);
                }
                5 => {
                    let mut read = vec![0; length as usize];
                    persist(|| device.read(offset, &mut read), &said());
                    assert!(read == model[range], "{}", said());
                }
                6 | 7 => match device.flush() {
                    Ok(()) => (flushed, maybe) = (model.clone(), Vec::new()),
                    Err(error) => {
                        assert!(error.is_transient(), "{}: {error}", said());
                        maybe.push(model.clone());
                    }
                },
                8 if random.u8(0..4) == 0 => {
                    // What the process had in memory is gone, and what was on its way arrives.
                    drop(device);
                    store.heal();
                    device = open(&store);
                    let read = content(&device).unwrap_or_else(|e| panic!("{}: {e}", said()));
                    let is_known = read == flushed || maybe.contains(&read);
                    assert!(is_known, "{}: neither flushed state", said());
                    (model, flushed, maybe) = (read.clone(), read, Vec::new());
                    store.fail(fail.clone());
                    crashes += 1;
                }
                _ => {}
            }
        }
        store.heal();
        device
            .close()
            .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let device = open(&store);
        assert!(
            content(&device).unwrap() == model,
            "seed {seed}: at the end"
        );
    }
    assert!(crashes > 50, "{crashes}");
}

/// Repeats what fails for now.
fn persist(mut act: impl FnMut() -> Result<(), DeviceError>, said: &str) {
    for _ in 0..1000 {
        match act() {
            Ok(()) => return,
            Err(error) => assert!(error.is_transient(), "{said}: {error}"),
        }
    }
    panic!("{said}: it keeps failing");
}

/// After a crash, what nothing names any more is removed.
#[test]
fn what_a_crash_leaves_is_swept() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[1; 100_000]).unwrap();
    device.flush().unwrap();
    let named = store.keys().len();
    store.fail(|kind, key| (kind == "swap" && key == "disk").then_some(StoreFault::Refused));
    device.write(0, &[2; 100_000]).unwrap();
    device.flush().unwrap_err();
    drop(device);
    assert!(store.keys().len() > named);
    store.heal();
    let device = open(&store);
    let began = std::time::Instant::now();
    while store.keys().len() > named && began.elapsed().as_secs() < 60 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(store.keys().len(), named);
    assert!(content(&device).unwrap()[..100_000].iter().all(|b| *b == 1));
}

/// What becomes of a value.
type Change = Box<dyn Fn(Vec<u8>) -> Option<Vec<u8>>>;

#[test]
fn values_that_are_lost_mangled_or_old_are_errors_and_never_zeros() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[1; 100_000]).unwrap();
    device.close().unwrap();
    let whole = store.snapshot();
    let object = |n| {
        let keys = store.keys();
        let key = keys
            .iter()
            .find(|key| key.starts_with(&format!("o/{n:06x}")));
        key.unwrap().clone()
    };
    let (first, second) = (object(0), object(1));
    let is_damaged = |device: &StoreDevice| {
        let error = device.read(10, &mut [0; 10]).unwrap_err();
        assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
        // The others are as they were.
        let mut read = [0; 10];
        device.read(40_000, &mut read).unwrap();
        assert_eq!(read, [1; 10]);
    };
    let swapped = whole[&second].to_vec();
    let changes: [(&str, Change); 6] = [
        ("lost", Box::new(|_| None)),
        ("empty", Box::new(|_| Some(Vec::new()))),
        ("cut", Box::new(|v| Some(v[..v.len() / 8].to_vec()))),
        ("longer", Box::new(|v| Some([v, vec![0; 1 << 20]].concat()))),
        (
            "mangled",
            Box::new(|mut v| {
                v[100] ^= 1;
                Some(v)
            }),
        ),
        ("another", Box::new(move |_| Some(swapped.clone()))),
    ];
    for (what, change) in changes {
        store.restore(whole.clone());
        store.change(&first, change);
        let device = open(&store);
        if what == "longer" {
            // The range that is asked for is what was written.
            assert!(content(&device).unwrap()[..100_000].iter().all(|b| *b == 1));
            continue;
        }
        is_damaged(&device);
        // A write to a part of it cannot be kept, and every flush says so, although it keeps all else.
        device.write(20, b"more").unwrap();
        let error = device.flush().unwrap_err();
        assert!(matches!(error, DeviceError::Corrupt(_)), "{what}: {error}");
        is_damaged(&device);
        // One to all of it can.
        device.write(0, &[5; 16 << 10]).unwrap();
        device.write(60_000, b"kept").unwrap();
        for result in [device.flush(), device.flush(), device.close()] {
            assert!(matches!(result, Err(DeviceError::Corrupt(_))), "{what}");
        }
        // The lease is given back nevertheless, and the disk is whole again.
        device.close().unwrap();
        let device = open(&store);
        device.flush().unwrap();
        let read = content(&device).unwrap();
        assert!(read[..16 << 10].iter().all(|b| *b == 5) && &read[60_000..60_004] == b"kept");
    }
    // A page of the table, or the header.
    store.restore(whole.clone());
    let page = store
        .keys()
        .into_iter()
        .find(|k| k.starts_with("t/"))
        .unwrap();
    store.change(&page, |_| None);
    let refused = StoreDevice::open(store.clone(), &options(MINE))
        .err()
        .unwrap();
    assert!(matches!(refused, OpenError::Lost { .. }), "{refused}");
    for (bytes, wanted) in [
        (&b"something else"[..], "is not a disk"),
        (b"DRVRSTO\0\x09\0\0\0 from the future", "newer version"),
        (b"DRVRSTO\0\x01\0\0\0 cut", "is damaged"),
    ] {
        store.restore(whole.clone());
        store.change("disk", |_| Some(bytes.to_vec()));
        let refused = StoreDevice::open(store.clone(), &options(MINE))
            .err()
            .unwrap();
        assert!(refused.to_string().contains(wanted), "{refused}");
        let again = create(
            &*store,
            NewStore {
                size: 1,
                chunk: 4096,
                object: None,
            },
        )
        .unwrap_err();
        assert!(again.to_string().contains(wanted), "{again}");
    }
    store.restore(std::collections::BTreeMap::new());
    let refused = StoreDevice::open(store, &options(MINE)).err().unwrap();
    assert!(matches!(refused, OpenError::Absent(_)), "{refused}");
}

/// A store that restarts without what it had, or with what it had earlier, while the disk is in use.
#[test]
fn a_store_that_forgets_is_noticed() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[1; 100_000]).unwrap();
    device.flush().unwrap();
    let earlier = store.snapshot();
    device.write(0, &[2; 100_000]).unwrap();
    device.flush().unwrap();
    let is_replaced = |key: &String| !["disk", "probe"].contains(&key.as_str());
    let replaced: Vec<_> = earlier.keys().filter(|key| is_replaced(key)).collect();
    let began = std::time::Instant::now();
    while store.keys().iter().any(|key| replaced.contains(&key)) {
        assert!(began.elapsed().as_secs() < 60, "what was replaced stays");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }

    // What is named is not there.
    store.restore(earlier);
    let error = device.read(0, &mut [0; 100]).unwrap_err();
    assert!(error.to_string().contains("earlier state"), "{error}");
    for result in [
        device.flush(),
        device.write(0, b"x"),
        device.read(0, &mut [0]),
    ] {
        let error = result.unwrap_err();
        assert!(error.to_string().contains("earlier state"), "{error}");
    }
    assert!(device.trouble().is_some());
    drop(device);

    let device = open(&store);
    device.write(0, &[3; 100]).unwrap();
    store.restore(std::collections::BTreeMap::new());
    let error = device.flush().unwrap_err();
    assert!(error.to_string().contains("lost"), "{error}");
    assert!(device.write(0, b"x").is_err());
}

#[test]
fn only_one_can_write() {
    let store = setting();
    let device = open(&store);
    device.write(0, b"first").unwrap();
    device.flush().unwrap();
    let theirs = StoreOptions {
        holder: "web on lyon".into(),
        ..options(THEIRS)
    };
    let refused = StoreDevice::open(store.clone(), &theirs).err().unwrap();
    assert!(refused.to_string().contains("a test has held"), "{refused}");
    let read_only = StoreOptions {
        read_only: true,
        ..theirs.clone()
    };
    assert!(StoreDevice::open(store.clone(), &read_only).is_err());

    assert_eq!(holder(&*store).unwrap().unwrap().text, "a test");
    assert_eq!(break_lease(&*store).unwrap().unwrap().text, "a test");
    assert!(break_lease(&*store).unwrap().is_none());
    let reader = StoreDevice::open(store.clone(), &read_only).unwrap();
    let second = StoreDevice::open(store.clone(), &theirs).unwrap();
    second.write(0, b"2nd!!").unwrap();
    second.flush().unwrap();
    // The first does not damage it, and is told.
    device.write(0, b"again").unwrap();
    let error = device.flush().unwrap_err();
    assert!(
        error.to_string().contains("web on lyon holds it now"),
        "{error}"
    );
    assert!(device.close().is_err());
    drop(device);
    second.close().unwrap();
    // Nor does one who only reads see a mixture.
    let error = reader.read(0, &mut [0; 5]).unwrap_err();
    assert!(matches!(error, DeviceError::Io(_)), "{error}");
    let reader = StoreDevice::open(store.clone(), &read_only).unwrap();
    let mut read = [0; 5];
    reader.read(0, &mut read).unwrap();
    assert_eq!(&read, b"2nd!!");
    assert!(matches!(reader.write(0, b"x"), Err(DeviceError::ReadOnly)));
    reader.close().unwrap();
    // Who comes again after a crash has its own lease.
    drop(StoreDevice::open(store.clone(), &theirs).unwrap());
    assert!(StoreDevice::open(store.clone(), &options(MINE)).is_err());
    StoreDevice::open(store, &theirs).unwrap().close().unwrap();
}

/// A holder that is alive flushes while its lease is broken: what it flushed is there, and whole.
#[test]
fn a_lease_is_broken_between_two_flushes_and_never_within_one() {
    let store = setting();
    let device = open(&store);
    let flushed = std::sync::atomic::AtomicU8::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=250 {
                device.write(0, &[round; 100_000]).unwrap_or(());
                if device.flush().is_err() {
                    return;
                }
                flushed.store(round, std::sync::atomic::Ordering::Release);
            }
        });
        while flushed.load(std::sync::atomic::Ordering::Acquire) < 3 {
            std::thread::yield_now();
        }
        // With many flushes in between, it may have to be tried more often.
        while break_lease(&*store).is_err() {}
    });
    let flushed = flushed.into_inner();
    drop(device);
    let theirs = StoreDevice::open(store.clone(), &options(THEIRS)).unwrap();
    let read = content(&theirs).unwrap();
    assert!(read[0] >= flushed, "{} of {flushed}", read[0]);
    assert!(read[..100_000].iter().all(|b| *b == read[0]));
}

#[test]
fn a_store_that_ignores_conditions_is_refused() {
    let store = MemoryStore::careless();
    let new = NewStore {
        size: SIZE,
        chunk: 4096,
        object: None,
    };
    let refused = create(&store, new).unwrap_err();
    assert!(matches!(refused, OpenError::Careless(_)), "{refused}");
    // Nor is a disk opened that was there before the store became so.
    let good = setting();
    store.restore(good.snapshot());
    let refused = StoreDevice::open(Arc::new(store), &options(MINE))
        .err()
        .unwrap();
    assert!(matches!(refused, OpenError::Careless(_)), "{refused}");
}

/// A header that a store has made up, with numbers at their limits.
#[test]
fn numbers_at_their_limits_are_no_bugs() {
    let store = setting();
    let device = open(&store);
    device.write(0, &[1; 100]).unwrap();
    device.close().unwrap();
    let change = |change: fn(&mut format::Header)| {
        store.change("disk", |bytes| {
            let mut header = format::Header::decode(&bytes).unwrap();
            change(&mut header);
            Some(header.encode().to_vec())
        });
    };
    change(|header| (header.commits, header.epoch) = (u64::MAX, u64::MAX));
    let device = open(&store);
    device.write(0, &[2; 100]).unwrap();
    device.flush().unwrap();
    device.write(0, &[3; 100]).unwrap();
    device.close().unwrap();
    let mut read = [0; 100];
    open(&store).read(0, &mut read).unwrap();
    assert_eq!(read, [3; 100]);
    change(|header| header.session = format::MAX_SESSIONS - 1);
    let refused = StoreDevice::open(store.clone(), &options(MINE))
        .err()
        .unwrap();
    assert!(matches!(refused, OpenError::WornOut(_)), "{refused}");
    change(|header| header.pages[0] = format::Version(u128::MAX));
    break_lease(&*store).unwrap();
    let mut read_only = options(MINE);
    read_only.read_only = true;
    let refused = StoreDevice::open(store, &read_only).err().unwrap();
    assert!(matches!(refused, OpenError::Lost { .. }), "{refused}");
}

#[test]
fn sizes_that_cannot_be() {
    let store = MemoryStore::new();
    for (size, chunk, object) in [
        (1 << 60, 65536, None),
        (1 << 20, 4096, Some(2048)),
        (1 << 20, 3000, None),
        (1 << 20, 4096, Some(8 << 20)),
    ] {
        let refused = create(
            &store,
            NewStore {
                size,
                chunk,
                object,
            },
        )
        .unwrap_err();
        assert!(matches!(refused, OpenError::Shape { .. }), "{refused}");
    }
    new_disk(&store, SIZE);
    let again = create(
        &store,
        NewStore {
            size: 1,
            chunk: 4096,
            object: None,
        },
    );
    assert!(matches!(again, Err(OpenError::Exists(_))));
}

/// Credentials that expire: writes wait in memory, and go on when there are new ones.
#[test]
fn nothing_is_lost_while_the_store_refuses() {
    let store = setting();
    let device = open(&store);
    store.fail(|_, _| Some(StoreFault::Denied));
    device.write(0, &[4; 50_000]).unwrap();
    for _ in 0..3 {
        let error = device.flush().unwrap_err();
        assert!(error.to_string().contains("403"), "{error}");
    }
    store.heal();
    device.flush().unwrap();
    device.close().unwrap();
    assert!(
        content(&open(&store)).unwrap()[..50_000]
            .iter()
            .all(|b| *b == 4)
    );
}

/// Several threads write the same objects: each sees its own bytes, and none is lost.
#[test]
fn writes_to_the_same_object_do_not_undo_each_other() {
    let store = setting();
    let mut options = options(MINE);
    options.max_buffer = 1;
    let device = StoreDevice::open(store.clone(), &options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let device = &device;
            scope.spawn(move || {
                for round in 1..30u8 {
                    for place in 0..10 {
                        let offset = place * 30_000 + thread * 100;
                        let value = [round ^ thread as u8; 100];
                        device.write(offset, &value).unwrap();
                        let mut read = [0; 100];
                        device.read(offset, &mut read).unwrap();
                        assert_eq!(read, value, "thread {thread}");
                    }
                    if round % 8 == 0 {
                        device.flush().unwrap();
                    }
                }
            });
        }
    });
    device.close().unwrap();
    let read = content(&open(&store)).unwrap();
    for thread in 0..8usize {
        for place in 0..10 {
            let offset = place * 30_000 + thread * 100;
            assert!(
                read[offset..offset + 100]
                    .iter()
                    .all(|b| *b == 29 ^ thread as u8)
            );
        }
    }
}

/// What a managed device pushes is there as a whole or not at all, also after a crash.
#[test]
fn epochs_are_atomic() {
    use bytes::Bytes;

    use crate::local_remote::Committer;
    use crate::remote::{Change, Epoch};

    let store = setting();
    let device = Arc::new(open(&store));
    let epochs = Epochs::new(device.clone());
    let first = Epoch(0).after(5);
    let write = |offset, byte| Change::Write(offset, Bytes::from(vec![byte; 8192]));
    epochs
        .push(first, &[write(0, 1), write(100_000, 1)])
        .unwrap();
    epochs.commit(first, 16384).unwrap();
    assert_eq!(epochs.committed(), first);
    // One that is given up leaves nothing.
    epochs
        .push(first.after(1), &[write(0, 2), Change::Zero(100_000, 8192)])
        .unwrap();
    let second = first.after(2).after(3);
    epochs.push(second, &[write(50_000, 3)]).unwrap();
    epochs.commit(second, 8192).unwrap();
    epochs.commit(second, 8192).unwrap();
    // Nor does one that a crash cuts off.
    epochs.push(second.after(4), &[write(0, 9)]).unwrap();
    drop(epochs);
    drop(device);
    let device = Arc::new(open(&store));
    let read = content(&*device).unwrap();
    for (offset, byte) in [(0, 1), (100_000, 1), (50_000, 3), (200_000, 0)] {
        assert!(
            read[offset..offset + 8192].iter().all(|b| *b == byte),
            "{offset}"
        );
    }
    let epochs = Epochs::new(device.clone());
    assert_eq!(epochs.committed(), second);
    // Somebody writes past the cache: it is told by the epoch.
    device.write(0, b"x").unwrap();
    device.flush().unwrap();
    assert!(epochs.committed() > second);
}
