//! Hostile clients. The server disconnects them, or refuses the request, and continues to serve.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::Cost;
use drover_device::backend::MemoryDevice;
use drover_frontend::nbd::ServerOptions;
use drover_frontend::nbd::wire::{self, Request, command as c, errno, option, reply};

use super::Served;
use super::raw::{Odd, Raw, string};
use crate::support::noise;

/// How long that server waits: longer than a decent client is held up on a busy machine.
const SHORT: Duration = Duration::from_secs(2);

/// A server with short timeouts.
fn impatient(size: u64) -> Served {
    let options = ServerOptions {
        handshake: SHORT,
        stall: SHORT,
        max_connections: 8,
        ..ServerOptions::default()
    };
    Served::new(vec![("", Arc::new(MemoryDevice::new(size)) as _)], options)
}

/// Whether a decent client is served.
fn is_fine(path: &Path) {
    let mut raw = Raw::go(path, "", true);
    assert_eq!(raw.does(c::READ, 0, 0, 512, &[]).data, [0; 512]);
    raw.ask(c::DISCONNECT, 0, 0, 0, &[]);
    assert!(raw.is_hung_up());
}

/// No connection remains.
fn all_are_gone(served: &Served) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while served.server.counts().open > 0 {
        assert!(Instant::now() < deadline, "{:?}", served.server.counts());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn rubbish_ends_the_conversation() {
    let served = impatient(1 << 20);
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..30 {
        let mut raw = match round % 3 {
            // Instead of an answer to the greeting, of an option, of a request.
            0 => Raw::bare(UnixStream::connect(served.socket()).unwrap()),
            1 => Raw::connect(&served.socket()),
            _ => Raw::go(&served.socket(), "", true),
        };
        let length = random.usize(28..200_000);
        // The server may have hung up before it is all sent.
        let _ = raw.stream.write_all(&noise(round, length));
        assert!(raw.is_hung_up(), "round {round}");
    }
    is_fine(&served.socket());
    all_are_gone(&served);
}

#[test]
fn options_are_limited_in_length_number_and_time() {
    let served = impatient(1 << 20);
    let path = served.socket();
    // Too long to be read, but not to be read past.
    let mut raw = Raw::connect(&path);
    let replies = raw.option(option::LIST_META_CONTEXT, &vec![1; 100 << 10]);
    assert_eq!(replies[0].0, reply::ERR_TOO_BIG);
    raw.begin("", false);
    drop(raw);
    // Much too long.
    for option in [option::GO, option::EXPORT_NAME, 77] {
        let mut raw = Raw::connect(&path);
        let mut bytes = wire::OPTION.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(u32::MAX.to_be_bytes());
        raw.stream.write_all(&bytes).unwrap();
        assert!(raw.is_hung_up());
    }
    // A flood of them.
    let mut raw = Raw::connect(&path);
    let one: Vec<u8> = [&wire::OPTION.to_be_bytes()[..], &[0; 8]].concat();
    let _ = raw.stream.write_all(&one.repeat(5000));
    assert!(raw.is_hung_up());
    // One byte at a time, for longer than a handshake may take. The server waits for sixteen bytes; after those it would
    // hang up at once, and for another reason.
    let mut raw = Raw::connect(&path);
    for byte in &[wire::OPTION.to_be_bytes()[0]; 15] {
        std::thread::sleep(SHORT / 10);
        if raw.stream.write_all(&[*byte]).is_err() {
            break;
        }
    }
    assert!(raw.is_hung_up());
    is_fine(&path);
    all_are_gone(&served);
}

#[test]
fn malformed_options_are_refused_one_by_one() {
    let served = impatient(1 << 20);
    let mut raw = Raw::connect(&served.socket());
    let long_name = [&u32::MAX.to_be_bytes()[..], b"name"].concat();
    let not_utf8 = [&2u32.to_be_bytes()[..], &[0xFF, 0xFE, 0, 0]].concat();
    let many_infos = [&string("")[..], &[0xFF, 0xFF, 0, 0]].concat();
    let left_over = [&string("")[..], &[0, 0, 9]].concat();
    let many_queries = [&string("")[..], &u32::MAX.to_be_bytes()].concat();
    let cases = [
        (option::LIST, vec![1], reply::ERR_INVALID),
        (option::STRUCTURED_REPLY, vec![1], reply::ERR_INVALID),
        (option::STARTTLS, vec![], reply::ERR_UNSUP),
        (option::GO, vec![], reply::ERR_INVALID),
        (option::GO, long_name.clone(), reply::ERR_INVALID),
        (option::INFO, not_utf8, reply::ERR_INVALID),
        (option::INFO, many_infos, reply::ERR_INVALID),
        (option::INFO, left_over, reply::ERR_INVALID),
        (
            option::INFO,
            [&string("elsewhere")[..], &[0, 0]].concat(),
            reply::ERR_UNKNOWN,
        ),
        (
            option::LIST_META_CONTEXT,
            many_queries.clone(),
            reply::ERR_INVALID,
        ),
        (option::SET_META_CONTEXT, many_queries, reply::ERR_INVALID),
        (
            option::SET_META_CONTEXT,
            [&string("")[..], &[0; 4]].concat(),
            reply::ERR_INVALID,
        ),
        (11, vec![], reply::ERR_UNSUP),
        (u32::MAX, vec![5; 300], reply::ERR_UNSUP),
    ];
    for (option, data, error) in cases {
        let replies = raw.option(option, &data);
        assert_eq!(replies.last().unwrap().0, error, "{option}: {data:?}");
    }
    raw.begin("", true);
    assert_eq!(raw.does(c::READ, 0, 0, 1, &[]).data, [0]);
}

#[test]
fn a_client_that_stops_in_the_middle_is_cut_off() {
    let served = impatient(1 << 20);
    let write = Request {
        flags: 0,
        command: c::WRITE,
        cookie: 1,
        offset: 0,
        length: 4096,
    };
    // In the middle of a header, of a payload, of the payload of a refused request.
    let refused = Request {
        offset: 1 << 30,
        ..write
    };
    for bytes in [
        write.encode()[..20].to_vec(),
        [&write.encode()[..], &[1; 100]].concat(),
        [&refused.encode()[..], &[1; 100]].concat(),
    ] {
        let mut leaves = Raw::go(&served.socket(), "", true);
        leaves.stream.write_all(&bytes).unwrap();
        drop(leaves);
        let mut stops = Raw::go(&served.socket(), "", true);
        stops.stream.write_all(&bytes).unwrap();
        assert!(stops.is_hung_up());
    }
    // Nothing of what was not wholly sent was written.
    let mut raw = Raw::go(&served.socket(), "", true);
    assert_eq!(raw.does(c::READ, 0, 0, 4096, &[]).data, [0; 4096]);
    // A client that says nothing between requests is left alone.
    std::thread::sleep(2 * SHORT);
    assert_eq!(raw.does(c::READ, 0, 0, 1, &[]).data, [0]);
    drop(raw);
    all_are_gone(&served);
}

#[test]
fn a_client_that_takes_no_replies_is_cut_off_and_takes_little_memory() {
    let options = ServerOptions {
        stall: Duration::from_millis(300),
        request_bytes: 4 << 20,
        ..ServerOptions::default()
    };
    for cost in [Cost::Memory, Cost::Network] {
        let device = Arc::new(Odd::new(8 << 20, cost));
        let served = Served::new(vec![("", device as _)], options.clone());
        let mut raw = Raw::go(&served.socket(), "", false);
        for _ in 0..200 {
            let request = Request {
                flags: 0,
                command: c::READ,
                cookie: 1,
                offset: 0,
                length: 1 << 20,
            };
            // Requests are taken no faster than replies are.
            if raw.stream.write_all(&request.encode()).is_err() {
                break;
            }
        }
        all_are_gone(&served);
        let read = served.server.counts().read_bytes;
        assert!(
            read <= 6 << 20,
            "{read} bytes were read for a client that takes none"
        );
    }
}

#[test]
fn a_client_that_sends_no_more_still_gets_its_answers() {
    let device = Arc::new(Odd::new(1 << 20, Cost::Network).before(|_, _, _| {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }));
    let served = Served::one(device);
    let mut raw = Raw::go(&served.socket(), "", true);
    for _ in 0..50 {
        raw.ask(c::WRITE, 0, 0, 3, b"abc");
    }
    raw.stream.shutdown(Shutdown::Write).unwrap();
    for _ in 0..50 {
        assert_eq!(raw.answer().error, 0);
    }
    assert!(raw.is_hung_up());
    all_are_gone(&served);
}

#[test]
fn a_write_that_is_much_too_long_ends_the_connection() {
    let served = impatient(1 << 20);
    let mut raw = Raw::go(&served.socket(), "", true);
    raw.ask(c::WRITE, 0, 0, u32::MAX, &[]);
    assert!(raw.is_hung_up());
    is_fine(&served.socket());
}

#[test]
fn there_are_only_so_many_connections() {
    let served = impatient(1 << 20);
    let mut open: Vec<Raw> = (0..8)
        .map(|_| Raw::go(&served.socket(), "", true))
        .collect();
    let mut late = Raw::bare(UnixStream::connect(served.socket()).unwrap());
    assert!(late.is_hung_up());
    assert_eq!(served.server.counts().refused, 1);
    for raw in &mut open {
        assert_eq!(raw.does(c::FLUSH, 0, 0, 0, &[]).error, 0);
    }
    open.clear();
    all_are_gone(&served);
    is_fine(&served.socket());
}

#[test]
fn a_flood_of_refused_requests_is_answered() {
    let served = Served::one(Arc::new(MemoryDevice::new(4096)));
    let mut raw = Raw::go(&served.socket(), "", true);
    for _ in 0..20 {
        for _ in 0..100 {
            raw.ask(c::READ, 0, 4096, 4096, &[]);
        }
        for _ in 0..100 {
            assert_eq!(raw.answer().error, errno::EINVAL);
        }
    }
}
