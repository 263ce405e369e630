//! Requests byte by byte: the effect of each, and which are refused with which error.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use drover_core::{BlockDevice, Cost, DeviceError};
use drover_device::backend::MemoryDevice;
use drover_frontend::nbd::wire::{command as c, errno, flag, option, reply, transmission};
use drover_frontend::nbd::{Export, ServerOptions};

use super::Served;
use super::raw::{Odd, Raw, string};
use crate::support::noise;

#[test]
fn random_requests_of_many_clients_match_a_model() {
    for (seed, cost) in [(11, Cost::Memory), (12, Cost::Disk), (13, Cost::Network)] {
        let calls = AtomicUsize::new(0);
        let device = Odd::new(16 << 20, cost).before(move |_, _, _| {
            // Some calls take longer, so that replies come in another order.
            if calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) {
                thread::sleep(Duration::from_micros(200));
            }
            Ok(())
        });
        let served = Served::one(Arc::new(device));
        let path = served.socket();
        thread::scope(|scope| {
            for client in 0..4 {
                let path = &path;
                scope.spawn(move || one_client(path, seed * 10 + client, client % 2 == 0));
            }
        });
        assert_eq!(served.server.counts().errors, 0);
        assert_eq!(served.listening.stop(), 0, "connections were cut off");
    }
}

/// What one client has to itself.
const SHARE: u64 = 4 << 20;
/// A client has one request under way in each.
const SLOT: u64 = SHARE / 16;

fn one_client(path: &std::path::Path, seed: u64, structured: bool) {
    let mut raw = Raw::go(path, "", structured);
    let mut random = fastrand::Rng::with_seed(seed);
    let base = seed % 10 * SHARE;
    let mut model = vec![0; SHARE as usize];
    for round in 0..40 {
        let mut written = std::collections::HashMap::new();
        for slot in 0..16 {
            let start = random.u64(0..SLOT);
            let length = match random.u8(0..4) {
                0 => random.u64(0..=SLOT - start),
                _ => random.u64(0..=4096.min(SLOT - start)),
            } as u32;
            let offset = base + slot * SLOT + start;
            let fua = if random.u8(0..8) == 0 { flag::FUA } else { 0 };
            let kind = random.u8(0..12);
            let (command, flags) = match kind {
                0..4 => (c::WRITE, fua),
                4 => (c::WRITE_ZEROES, fua),
                5 => (c::WRITE_ZEROES, flag::NO_HOLE | flag::FAST_ZERO),
                6 => (c::TRIM, fua),
                7 => (c::CACHE, 0),
                8 => (c::FLUSH, 0),
                9 if structured && length > 0 => (c::BLOCK_STATUS, 0),
                10 if structured => (c::READ, flag::DF),
                _ => (c::READ, 0),
            };
            let data = match command {
                c::WRITE => noise(random.u64(..), length as usize),
                _ => Vec::new(),
            };
            let cookie = raw.ask(command, flags, offset, length, &data);
            written.insert(cookie, data);
        }
        for _ in 0..16 {
            let answer = raw.answer();
            let request = answer.request;
            let said = format!("seed {seed}, round {round}: {request:?}");
            assert_eq!(answer.error, 0, "{said}: {}", answer.message);
            if request.command == c::FLUSH {
                continue;
            }
            let at = (request.offset - base) as usize;
            let range = &mut model[at..at + request.length as usize];
            match request.command {
                c::WRITE => range.copy_from_slice(&written[&request.cookie]),
                // This device's trims read as zeros.
                c::WRITE_ZEROES | c::TRIM => range.fill(0),
                c::READ => {
                    assert!(answer.data == *range, "{said}: other bytes");
                    assert!(!request.has(flag::DF) || answer.chunks <= 1, "{said}: DF");
                }
                c::BLOCK_STATUS => {
                    let mut rest = &range[..];
                    for (length, state) in answer.runs {
                        let (run, after) = rest.split_at(length as usize);
                        assert!(
                            state == 0 || run.iter().all(|b| *b == 0),
                            "{said}: no zeros"
                        );
                        rest = after;
                    }
                }
                _ => {}
            }
        }
    }
    raw.ask(c::READ, 0, base, SHARE as u32, &[]);
    assert!(raw.answer().data == model, "seed {seed}: at the end");
    raw.ask(c::DISCONNECT, 0, 0, 0, &[]);
    assert!(raw.is_hung_up());
}

#[test]
fn what_one_connection_wrote_and_flushed_another_reads() {
    let served = Served::one(Arc::new(Odd::new(1 << 20, Cost::Disk)));
    let mut one = Raw::go(&served.socket(), "", true);
    let mut other = Raw::go(&served.socket(), "", false);
    assert_ne!(one.flags & transmission::CAN_MULTI_CONN, 0);
    for round in 0..50u64 {
        let data = noise(round, 3000);
        one.does(c::WRITE, 0, round * 17, 3000, &data);
        one.does(c::FLUSH, 0, 0, 0, &[]);
        let answer = other.does(c::READ, 0, round * 17, 3000, &[]);
        assert!(answer.data == data, "round {round}");
    }
}

#[test]
fn a_read_is_data_and_holes() {
    let served = Served::one(Arc::new(MemoryDevice::new(1 << 20)));
    let mut raw = Raw::go(&served.socket(), "", true);
    let data = noise(5, 64 << 10);
    raw.does(c::WRITE, 0, 128 << 10, 64 << 10, &data);
    let before = served.server.counts().sent_bytes;
    let answer = raw.does(c::READ, 0, 0, 1 << 20, &[]);
    assert_eq!(answer.chunks, 3);
    assert!(answer.data[128 << 10..192 << 10] == data);
    assert!(answer.data[..128 << 10].iter().all(|b| *b == 0));
    let sent = served.server.counts().sent_bytes - before;
    assert!(sent < 70 << 10, "{sent} bytes for 64 KiB of data");
    let answer = raw.does(c::READ, flag::DF, 0, 1 << 20, &[]);
    assert_eq!(answer.chunks, 1);
    assert!(answer.data[128 << 10..192 << 10] == data);
    // The status of the same, whole and one run of it.
    let answer = raw.does(c::BLOCK_STATUS, 0, 64 << 10, 512 << 10, &[]);
    assert_eq!(answer.runs, [(64 << 10, 3), (64 << 10, 0), (384 << 10, 3)]);
    let answer = raw.does(c::BLOCK_STATUS, flag::REQ_ONE, 1000, 512 << 10, &[]);
    assert_eq!(answer.runs, [((128 << 10) - 1000, 3)]);
}

#[test]
fn each_refusal_has_its_error_and_the_next_request_is_served() {
    let served = Served::one(Arc::new(MemoryDevice::new(1 << 20)));
    for structured in [false, true] {
        let mut raw = Raw::go(&served.socket(), "", structured);
        let end = 1 << 20;
        let page = vec![7; 4096];
        let cases = [
            (c::READ, 0, end, 1, errno::EINVAL),
            (c::READ, 0, u64::MAX, 4096, errno::EINVAL),
            (c::READ, 0, 0, u32::MAX, errno::EINVAL),
            (c::READ, 0, 0, (32 << 20) + 1, errno::EINVAL),
            (c::READ, flag::NO_HOLE, 0, 512, errno::EINVAL),
            (c::READ, 1 << 9, 0, 512, errno::EINVAL),
            (c::WRITE, 0, end - 1, 4096, errno::ENOSPC),
            (c::WRITE, 0, u64::MAX - 10, 4096, errno::ENOSPC),
            (c::WRITE, flag::DF, 0, 4096, errno::EINVAL),
            (c::WRITE_ZEROES, 0, 1, end as u32, errno::ENOSPC),
            (c::WRITE_ZEROES, flag::REQ_ONE, 0, 1, errno::EINVAL),
            (c::TRIM, 0, 1, end as u32, errno::EINVAL),
            (c::CACHE, 0, end, 1, errno::EINVAL),
            (c::BLOCK_STATUS, 0, end, 1, errno::EINVAL),
            (c::BLOCK_STATUS, 0, 0, 0, errno::EINVAL),
            (8, 0, 0, 0, errno::EINVAL),
            (u16::MAX, 0, 0, 4096, errno::EINVAL),
        ];
        for (command, flags, offset, length, error) in cases {
            let data: &[u8] = if command == c::WRITE { &page } else { &[] };
            let answer = raw.does(command, flags, offset, length, data);
            assert_eq!(answer.error, error, "{:?}", answer.request);
            assert_eq!(structured, !answer.message.is_empty());
        }
        // A write that is too long is read past.
        let long = vec![1; (32 << 20) + 4096];
        raw.ask(c::WRITE, 0, 0, long.len() as u32, &long);
        assert_eq!(raw.answer().error, errno::EINVAL);
        // Requests of nothing are done.
        for command in [
            c::READ,
            c::WRITE,
            c::TRIM,
            c::WRITE_ZEROES,
            c::CACHE,
            c::FLUSH,
        ] {
            let answer = raw.does(command, 0, end, 0, &[]);
            assert_eq!(answer.error, 0, "{:?}", answer.request);
            assert!(answer.data.is_empty());
        }
        let answer = raw.does(c::READ, 0, 0, 4096, &[]);
        assert!(answer.error == 0 && answer.data.iter().all(|b| *b == 0));
    }
}

#[test]
fn what_a_device_says_reaches_the_client() {
    let errors: [(DeviceError, u32, u32); 8] = [
        (
            DeviceError::NoSpace("the cache is full".into()),
            errno::EIO,
            errno::ENOSPC,
        ),
        (DeviceError::ReadOnly, errno::EPERM, errno::EPERM),
        (DeviceError::Closed, errno::ESHUTDOWN, errno::ESHUTDOWN),
        (
            DeviceError::Unsupported("do this".into()),
            errno::ENOTSUP,
            errno::ENOTSUP,
        ),
        (
            DeviceError::Corrupt("a chunk".into()),
            errno::EIO,
            errno::EIO,
        ),
        (
            DeviceError::Unavailable("the link is down".into()),
            errno::EIO,
            errno::EIO,
        ),
        (
            std::io::Error::other("worn out").into(),
            errno::EIO,
            errno::EIO,
        ),
        (
            DeviceError::OutOfRange {
                offset: 0,
                length: 1,
                size: 0,
            },
            errno::EINVAL,
            errno::ENOSPC,
        ),
    ];
    for cost in [Cost::Memory, Cost::Network] {
        for (error, on_read, on_write) in errors.clone() {
            let said = error.to_string();
            let on_read = match error {
                DeviceError::NoSpace(_) => errno::ENOSPC,
                _ => on_read,
            };
            let device = Odd::new(1 << 20, cost).before(move |_, _, _| Err(error.clone()));
            let served = Served::one(Arc::new(device));
            let mut raw = Raw::go(&served.socket(), "", true);
            let answer = raw.does(c::READ, 0, 0, 512, &[]);
            assert_eq!((answer.error, &answer.message), (on_read, &said));
            let answer = raw.does(c::WRITE, 0, 0, 3, b"abc");
            assert_eq!((answer.error, &answer.message), (on_write, &said));
            assert_ne!(raw.does(c::FLUSH, 0, 0, 0, &[]).error, 0);
            assert_ne!(raw.does(c::WRITE_ZEROES, 0, 0, 9, &[]).error, 0);
            assert_ne!(raw.does(c::TRIM, 0, 0, 9, &[]).error, 0);
            assert_ne!(raw.does(c::CACHE, 0, 0, 9, &[]).error, 0);
            assert_ne!(raw.does(c::BLOCK_STATUS, 0, 0, 9, &[]).error, 0);
            assert_eq!(served.server.counts().errors, 7);
        }
    }
}

#[test]
fn a_device_that_panics_or_lies_costs_one_request() {
    let device = Odd::new(1 << 20, Cost::Disk).before(|what, offset, _| match (what, offset) {
        ("read", 4096) => panic!("a fault of the device, wanted by the test"),
        _ => Ok(()),
    });
    let served = Served::one(Arc::new(device));
    let mut raw = Raw::go(&served.socket(), "", true);
    assert_eq!(raw.does(c::READ, 0, 4096, 512, &[]).error, errno::EIO);
    assert_eq!(raw.does(c::READ, 0, 0, 512, &[]).error, 0);
    drop(raw);
    assert_eq!(served.listening.stop(), 0);
}

#[test]
fn zeroes_say_whether_they_are_fast() {
    let mut slow = Odd::new(1 << 20, Cost::Memory);
    slow.can.fast_zeroes = false;
    let slow = Served::one(Arc::new(slow));
    let mut raw = Raw::go(&slow.socket(), "", true);
    raw.does(c::WRITE, 0, 0, 4, b"data");
    assert_eq!(
        raw.does(c::WRITE_ZEROES, flag::FAST_ZERO, 0, 4, &[]).error,
        errno::ENOTSUP
    );
    assert_eq!(raw.does(c::READ, 0, 0, 4, &[]).data, b"data");
    assert_eq!(raw.does(c::WRITE_ZEROES, 0, 1, 2, &[]).error, 0);
    assert_eq!(raw.does(c::READ, 0, 0, 4, &[]).data, b"d\0\0a");

    let device = Arc::new(MemoryDevice::new(1 << 20));
    let fast = Served::one(device.clone());
    let mut raw = Raw::go(&fast.socket(), "", true);
    let flags = flag::FAST_ZERO | flag::NO_HOLE;
    assert_eq!(raw.does(c::WRITE_ZEROES, flags, 0, 65536, &[]).error, 0);
    assert_eq!(device.allocated(), 65536);
    assert_eq!(raw.does(c::WRITE_ZEROES, 0, 0, 65536, &[]).error, 0);
    assert_eq!(device.allocated(), 0);
}

#[test]
fn fua_flushes_after_and_only_where_something_changed() {
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let device = Odd::new(1 << 20, Cost::Memory).before(move |what, _, _| {
        log.lock().push(what);
        Ok(())
    });
    let served = Served::one(Arc::new(device));
    let mut raw = Raw::go(&served.socket(), "", true);
    for (command, data) in [
        (c::WRITE, &b"x"[..]),
        (c::TRIM, b""),
        (c::WRITE_ZEROES, b""),
        (c::READ, b""),
    ] {
        assert_eq!(raw.does(command, flag::FUA, 0, 1, data).error, 0);
    }
    let expected = ["write", "flush", "trim", "flush", "zeroes", "flush", "read"];
    assert_eq!(*seen.lock(), expected);
}

#[test]
fn the_devices_own_limits_are_kept() {
    let mut device = Odd::new(1 << 20, Cost::Memory).before(|_, offset, length| {
        let fits = offset % 512 == 0 && length % 512 == 0 && length <= 8192;
        if fits {
            Ok(())
        } else {
            Err(DeviceError::Corrupt(format!("{length} at {offset}")))
        }
    });
    device.can.alignment = 512;
    device.can.longest = 8200;
    device.can.extents = false;
    let served = Served::one(Arc::new(device));
    let mut raw = Raw::connect(&served.socket());
    // Who only asks has to ask for the block size too.
    let mut data = string("");
    data.extend([0, 0]);
    let replies = raw.option(option::INFO, &data);
    assert_eq!(replies.last().unwrap().0, reply::ERR_BLOCK_SIZE_REQD);
    data = string("");
    data.extend([0, 1, 0, 3]);
    let replies = raw.option(option::INFO, &data);
    assert_eq!(replies[1].1, [0, 3, 0, 0, 2, 0, 0, 1, 0, 0, 2, 0, 0, 0]);
    raw.begin("", true);
    let data = noise(3, 100 << 10);
    assert_eq!(raw.does(c::WRITE, 0, 512, 100 << 10, &data).error, 0);
    assert!(raw.does(c::READ, 0, 512, 100 << 10, &[]).data == data);
    for command in [c::READ, c::TRIM, c::WRITE_ZEROES, c::BLOCK_STATUS, c::CACHE] {
        let answer = raw.does(command, 0, 512, 100, &[]);
        assert_eq!(answer.error, errno::EINVAL, "{:?}", answer.request);
    }
    assert_eq!(
        raw.does(c::WRITE, 0, 1, 512, &data[..512]).error,
        errno::EINVAL
    );
}

#[test]
fn a_read_only_export_is_not_written() {
    let device = Arc::new(MemoryDevice::from_bytes(b"as it was"));
    let export = Export {
        name: "a".into(),
        description: String::new(),
        device: device.clone(),
        read_only: true,
    };
    let served = Served::exports(vec![export], ServerOptions::default());
    let mut raw = Raw::go(&served.socket(), "a", true);
    use transmission as t;
    assert_ne!(raw.flags & t::READ_ONLY, 0);
    assert_eq!(
        raw.flags & (t::SEND_TRIM | t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO),
        0
    );
    assert_eq!(raw.does(c::WRITE, 0, 0, 3, b"xyz").error, errno::EPERM);
    assert_eq!(raw.does(c::TRIM, 0, 0, 3, &[]).error, errno::EPERM);
    assert_eq!(raw.does(c::WRITE_ZEROES, 0, 0, 3, &[]).error, errno::EPERM);
    assert_eq!(raw.does(c::FLUSH, 0, 0, 0, &[]).error, 0);
    assert_eq!(raw.does(c::READ, 0, 0, 9, &[]).data, b"as it was");
    let mut now = [0; 9];
    device.read(0, &mut now).unwrap();
    assert_eq!(&now, b"as it was");
}

#[test]
fn a_slow_request_does_not_hold_up_others() {
    let gate = Arc::new((parking_lot::Mutex::new(false), parking_lot::Condvar::new()));
    let inner = Arc::clone(&gate);
    let device = Odd::new(1 << 20, Cost::Network).before(move |what, offset, _| {
        if what == "read" && offset == 0 {
            let mut open = inner.0.lock();
            while !*open {
                assert!(
                    !inner
                        .1
                        .wait_for(&mut open, Duration::from_secs(60))
                        .timed_out()
                );
            }
        }
        Ok(())
    });
    let served = Served::one(Arc::new(device));
    let mut raw = Raw::go(&served.socket(), "", false);
    let slow: Vec<u64> = (0..30).map(|_| raw.ask(c::READ, 0, 0, 512, &[])).collect();
    for round in 1..20 {
        let quick = raw.ask(c::READ, 0, round * 512, 512, &[]);
        assert_eq!(raw.answer().request.cookie, quick);
    }
    *gate.0.lock() = true;
    gate.1.notify_all();
    let mut answered: Vec<u64> = slow.iter().map(|_| raw.answer().request.cookie).collect();
    answered.sort_unstable();
    assert_eq!(answered, slow);
}
