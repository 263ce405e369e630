//! Guarantees with many requests in flight: a request sent after another was answered sees its effect, and each reply
//! has the bytes of its own request. NBD guarantees no more: requests in flight at the same time are executed in any
//! order, so these never overlap unless both are reads.
//!
//! fio's `randrw` with `verify` checks the same, but its `bad header rand_seed` is a fault of fio: it happens with any
//! server when fio visits a block twice (`time_based`, `loops`, `norandommap`).

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use drover_core::{BlockDevice, Cost};
use drover_device::backend::MemoryDevice;
use drover_device::local_remote::LocalRemote;
use drover_device::synced::{Sync, Synced, SyncedOptions};
use drover_device::testing::Delay;
use drover_frontend::nbd::wire::{Request, command as c, flag};
use drover_storage::HostDirectory;

use super::Served;
use super::raw::{Odd, Raw};

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
/// Requests under way.
const DEPTH: usize = 16;
/// Requests in all.
const REQUESTS: u64 = 1000;

/// How often each is run, with another seed each time: more by hand, on a busy machine.
fn seeds() -> std::ops::Range<u64> {
    let runs = std::env::var("DROVER_ORDER_RUNS").map_or(1, |runs| runs.parse().expect("a number"));
    0..runs
}

/// Bytes that say which request wrote them, and where.
fn pattern(cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let words = (offset / 8..(offset + u64::from(length)) / 8).map(|at| cookie << 32 | at);
    words.flat_map(u64::to_be_bytes).collect()
}

/// A description of the first word that differs.
fn difference(found: &[u8], expected: &[u8]) -> Option<String> {
    let words = |bytes: &[u8]| -> Vec<u64> {
        let words = bytes.as_chunks::<8>().0;
        words.iter().map(|word| u64::from_be_bytes(*word)).collect()
    };
    let tell = |word: u64| format!("request {}'s at {}", word >> 32, (word & 0xFFFF_FFFF) * 8);
    let (found, expected) = (words(found), words(expected));
    let at = (0..expected.len()).find(|at| found.get(*at) != Some(&expected[*at]))?;
    let has = found.get(at).map_or("nothing".into(), |word| tell(*word));
    Some(format!(
        "byte {}: {has}, not {}",
        at * 8,
        tell(expected[at])
    ))
}

/// Requests of 4 to 64 KiB, 16 at a time, and what the device must hold after them.
fn drive(served: &Served, seed: u64, structured: bool) -> Vec<u8> {
    let mut raw = Raw::go(&served.socket(), "", structured);
    let mut stream = raw.stream.try_clone().expect("a second handle");
    // Sending does not wait for receiving.
    let (send, sent) = mpsc::channel::<Vec<u8>>();
    let sender = std::thread::spawn(move || {
        for bytes in sent {
            stream.write_all(&bytes).expect("a server that takes it");
        }
    });
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = vec![0; SIZE as usize];
    let mut payloads: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut cookie = 0;
    while cookie < REQUESTS || !raw.asked.is_empty() {
        if cookie < REQUESTS
            && raw.asked.len() < DEPTH
            && let Some(request) = choose(&mut random, cookie + 1, &raw.asked, structured)
        {
            cookie += 1;
            let mut bytes = request.encode().to_vec();
            if request.command == c::WRITE {
                let data = pattern(cookie, request.offset, request.length);
                bytes.extend(&data);
                payloads.insert(cookie, data);
            }
            raw.asked.insert(cookie, request);
            send.send(bytes).expect("the sender");
            continue;
        }
        let answer = raw.answer();
        let request = answer.request;
        let said = format!("seed {seed}: {request:?}");
        assert_eq!(answer.error, 0, "{said}: {}", answer.message);
        let at = request.offset as usize;
        let range = &mut model[at..at + request.length as usize];
        match request.command {
            c::WRITE => range.copy_from_slice(&payloads.remove(&request.cookie).expect("its data")),
            c::WRITE_ZEROES => range.fill(0),
            c::READ => {
                if let Some(what) = difference(&answer.data, range) {
                    panic!("{said}: {what}");
                }
            }
            _ => {}
        }
    }
    drop(send);
    sender.join().expect("the sender");
    let mut now = Vec::new();
    while now.len() < model.len() {
        now.extend(raw.does(c::READ, 0, now.len() as u64, 1 << 20, &[]).data);
    }
    if let Some(what) = difference(&now, &model) {
        panic!("seed {seed}: at the end: {what}");
    }
    model
}

/// A request that may be under way together with the others; none when there was no luck.
fn choose(
    random: &mut fastrand::Rng,
    cookie: u64,
    asked: &HashMap<u64, Request>,
    structured: bool,
) -> Option<Request> {
    let (command, flags) = match random.u8(0..32) {
        0 => (c::FLUSH, 0),
        1 => (c::WRITE, flag::FUA),
        2 => (c::WRITE_ZEROES, 0),
        3 if structured => (c::READ, flag::DF),
        4..18 => (c::WRITE, 0),
        _ => (c::READ, 0),
    };
    let length = random.u64(1..=16) * BLOCK;
    // Half of it in a small part, where most has been written before.
    let most = if random.bool() { SIZE } else { SIZE / 8 };
    let offset = random.u64(0..=(most - length) / 512) * 512;
    let (offset, length) = match command {
        c::FLUSH => (0, 0),
        _ => (offset, length),
    };
    let request = Request {
        flags,
        command,
        cookie,
        offset,
        length: length as u32,
    };
    let meets = |other: &Request| {
        let apart = offset + length <= other.offset
            || other.offset + u64::from(other.length) <= offset
            || length == 0
            || other.length == 0;
        let both_read = command == c::READ && other.command == c::READ;
        !(apart || both_read)
    };
    (!asked.values().any(meets)).then_some(request)
}

#[test]
fn requests_are_seen_by_those_after_them_in_memory() {
    for seed in seeds() {
        let cost = [Cost::Memory, Cost::Disk, Cost::Network][seed as usize % 3];
        for (structured, cost) in [(true, Cost::Network), (false, cost)] {
            let served = Served::one(Arc::new(Odd::new(SIZE, cost)));
            drive(&served, seed, structured);
            assert_eq!(served.listening.stop(), 0, "connections were cut off");
        }
    }
}

#[test]
fn requests_are_seen_by_those_after_them_through_a_small_cache() {
    for seed in seeds() {
        let directory = tempfile::tempdir().expect("a directory");
        let far = Arc::new(MemoryDevice::new(SIZE));
        let slow = Delay::new(Arc::clone(&far), Duration::from_micros(700), Duration::ZERO);
        let remote = LocalRemote::new(Arc::new(slow), 16 << 10, 8, None).expect("threads");
        let host = HostDirectory::open(directory.path()).expect("the directory");
        let synced = Synced::open(SyncedOptions {
            // A quarter fits: chunks are pushed, evicted and fetched again all the time.
            cache_size: Some(SIZE / 4),
            push_interval: Duration::from_millis(20),
            high_water: 256 << 10,
            give_up_after: Duration::from_secs(120),
            sync: if seed % 2 == 0 {
                Sync::Remote
            } else {
                Sync::Local
            },
            ..SyncedOptions::new(Arc::new(host), remote, b"image")
        })
        .expect("a cache");
        let served = Served::one(Arc::clone(&synced) as Arc<dyn BlockDevice>);
        let model = drive(&served, seed, seed % 3 > 0);
        assert_eq!(served.listening.stop(), 0, "connections were cut off");
        synced.close(true).expect("a close");
        let mut there = vec![0; SIZE as usize];
        far.read(0, &mut there).expect("memory");
        if let Some(what) = difference(&there, &model) {
            panic!("seed {seed}: at the device: {what}");
        }
    }
}
