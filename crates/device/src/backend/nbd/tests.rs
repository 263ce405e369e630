//! The client against servers that a test plays, hostile ones among them, and against real servers.

mod hostile;
mod order;
mod servers;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;

use drover_core::nbd::{
    GREETING, OPTION, REQUEST_BYTES, Request, allocation, chunk, chunk_head, errno, info, option,
    option_reply, reply, simple_reply, transmission as t,
};
use drover_core::{DeviceError, Zeroes};

use super::*;

const SIZE: u64 = 1 << 20;
/// The second context of the servers here.
const BITMAP: &str = "qemu:dirty-bitmap:b0";
const BITMAP_ID: u32 = 9;
/// All that a server can say that it can do.
const ABLE: u16 = t::HAS_FLAGS
    | t::SEND_FLUSH
    | t::SEND_FUA
    | t::SEND_TRIM
    | t::SEND_WRITE_ZEROES
    | t::SEND_DF
    | t::SEND_FAST_ZERO;

fn address(path: &Path) -> NbdAddress {
    NbdAddress {
        socket: NbdSocket::Unix(path.into()),
        export: "web".into(),
    }
}

fn options(deadline_ms: u64) -> NbdOptions {
    NbdOptions {
        contexts: vec![BITMAP.into()],
        deadline: Duration::from_millis(deadline_ms),
        ..NbdOptions::default()
    }
}

/// A server for one connection, played by a test.
struct Played {
    directory: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl Played {
    /// Whose connection goes to `play` as it is.
    fn raw(play: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let thread = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            drop(listener);
            play(stream);
        });
        Self {
            directory,
            thread: Some(thread),
        }
    }

    /// Whose connection goes to `play` after an honest negotiation.
    fn with(play: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        Self::offering(ABLE, [1, 4096, 1 << 25], play)
    }

    fn offering(
        flags: u16,
        sizes: [u32; 3],
        play: impl FnOnce(UnixStream) + Send + 'static,
    ) -> Self {
        Self::raw(move |mut stream| {
            stream.write_all(&negotiation(SIZE, flags, sizes)).unwrap();
            skip_options(&mut stream, 3);
            play(stream);
        })
    }

    fn address(&self) -> NbdAddress {
        address(&self.directory.path().join("s"))
    }

    fn open(&self, deadline_ms: u64) -> NbdDevice {
        NbdDevice::connect(&self.address(), &options(deadline_ms)).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Waits for the end of what it plays, and passes its panics on.
    fn end(mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    let mut out = GREETING.to_be_bytes().to_vec();
    out.extend(OPTION.to_be_bytes());
    out.extend(flags.to_be_bytes());
    out
}

/// All that an honest server says until transmission.
fn negotiation(size: u64, flags: u16, sizes: [u32; 3]) -> Vec<u8> {
    let mut out = greeting(3);
    option_reply(&mut out, option::STRUCTURED_REPLY, reply::ACK, &[]);
    for (id, name) in [(allocation::ID, allocation::NAME), (BITMAP_ID, BITMAP)] {
        let parts: [&[u8]; 2] = [&id.to_be_bytes(), name.as_bytes()];
        option_reply(
            &mut out,
            option::SET_META_CONTEXT,
            reply::META_CONTEXT,
            &parts,
        );
    }
    option_reply(&mut out, option::SET_META_CONTEXT, reply::ACK, &[]);
    let mut export = info::EXPORT.to_be_bytes().to_vec();
    export.extend(size.to_be_bytes());
    export.extend(flags.to_be_bytes());
    option_reply(&mut out, option::GO, reply::INFO, &[&export]);
    let mut block = info::BLOCK_SIZE.to_be_bytes().to_vec();
    block.extend(sizes.into_iter().flat_map(u32::to_be_bytes));
    option_reply(&mut out, option::GO, reply::INFO, &[&block]);
    option_reply(&mut out, option::GO, reply::ACK, &[]);
    out
}

/// Reads the client's flags and `count` options.
fn skip_options(stream: &mut UnixStream, count: usize) {
    stream.read_exact(&mut [0; 4]).unwrap();
    for _ in 0..count {
        let mut head = [0; 16];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes(head[12..].try_into().unwrap());
        stream.read_exact(&mut vec![0; length as usize]).unwrap();
    }
}

/// The next request, with its data.
fn request(stream: &mut UnixStream) -> (Request, Vec<u8>) {
    let mut head = [0; REQUEST_BYTES];
    stream.read_exact(&mut head).unwrap();
    let request = Request::parse(&head).unwrap();
    let mut data = vec![0; request.payload() as usize];
    stream.read_exact(&mut data).unwrap();
    (request, data)
}

/// A chunk of a structured reply.
fn chunk_of(cookie: u64, kind: u16, done: bool, parts: &[&[u8]]) -> Vec<u8> {
    let data = parts.concat();
    let mut out = chunk_head(cookie, kind, done, data.len() as u32).to_vec();
    out.extend(data);
    out
}

fn data_of(cookie: u64, offset: u64, data: &[u8], done: bool) -> Vec<u8> {
    let offset = offset.to_be_bytes();
    chunk_of(cookie, chunk::OFFSET_DATA, done, &[&offset, data])
}

fn hole_of(cookie: u64, offset: u64, length: u32, done: bool) -> Vec<u8> {
    let parts: [&[u8]; 2] = [&offset.to_be_bytes(), &length.to_be_bytes()];
    chunk_of(cookie, chunk::OFFSET_HOLE, done, &parts)
}

fn status_of(cookie: u64, id: u32, runs: &[(u32, u32)], done: bool) -> Vec<u8> {
    let mut data = id.to_be_bytes().to_vec();
    for (length, flags) in runs {
        data.extend(length.to_be_bytes());
        data.extend(flags.to_be_bytes());
    }
    chunk_of(cookie, chunk::BLOCK_STATUS, done, &[&data])
}

#[test]
fn capabilities_are_what_the_server_offers() {
    for (flags, sizes) in [
        (ABLE, [1, 4096, 1 << 25]),
        (ABLE | t::READ_ONLY, [1, 4096, 1 << 25]),
        (ABLE & !t::SEND_FAST_ZERO, [512, 4096, u32::MAX]),
        (ABLE & !t::SEND_WRITE_ZEROES, [4096, 65_536, 1 << 20]),
        (ABLE & !t::SEND_TRIM, [1, 5000, 7777]),
        (ABLE & !t::SEND_FLUSH, [512, 1 << 30, 100_000]),
        (t::HAS_FLAGS, [1, 1, 1]),
    ] {
        let has = |flag| flags & flag != 0;
        let [minimum, preferred, maximum] = sizes;
        for read_only in [false, true] {
            let played = Played::offering(flags, sizes, drop);
            let options = NbdOptions {
                read_only,
                ..options(5000)
            };
            let device = NbdDevice::connect(&played.address(), &options).unwrap();
            let read_only = read_only || has(t::READ_ONLY);
            let longest = maximum.min(32 << 20) / minimum * minimum;
            let expected = Capabilities {
                read_only,
                fast_zeroes: !read_only && has(t::SEND_FAST_ZERO),
                trim: !read_only && has(t::SEND_TRIM),
                durable: has(t::SEND_FLUSH),
                extents: true,
                alignment: minimum,
                preferred: 1 << preferred.min(longest).ilog2(),
                longest,
            };
            assert_eq!(device.capabilities(), expected, "{flags:b} {sizes:?}");
            assert_eq!(device.size(), SIZE);
            assert_eq!(device.cost(0, 1), Cost::Network);
            assert_eq!(device.write_cost(0, 1), Cost::Network);
            assert!(device.contexts().eq([allocation::NAME, BITMAP]));
            drop(device);
            played.end();
        }
    }
}

#[test]
fn what_a_server_cannot_do_is_done_without_or_refused() {
    // Neither zeroing nor trims nor flushes: zeros are written.
    let played = Played::offering(t::HAS_FLAGS, [1, 4096, 8192], |mut stream| {
        for (offset, length) in [(100, 8192), (8292, 8192), (16_484, 3616)] {
            let (request, data) = request(&mut stream);
            assert_eq!(
                (request.command, request.offset, request.length),
                (command::WRITE, offset, length)
            );
            assert!(data.iter().all(|byte| *byte == 0));
            let done = simple_reply(request.cookie, 0);
            stream.write_all(&done).unwrap();
        }
        assert_eq!(request(&mut stream).0.command, command::DISCONNECT);
    });
    let device = played.open(5000);
    device.write_zeroes(100, 20_000, Zeroes::default()).unwrap();
    device.trim(0, SIZE).unwrap();
    device.flush().unwrap();
    device.prefetch(0, SIZE).unwrap();
    let fast = Zeroes {
        only_fast: true,
        ..Zeroes::default()
    };
    let result = device.write_zeroes(0, 4096, fast);
    assert!(
        matches!(result, Err(DeviceError::Unsupported(_))),
        "{result:?}"
    );
    let result = device.read(0, &mut [0; 8193]);
    assert!(
        matches!(result, Err(DeviceError::Unaligned { .. })),
        "{result:?}"
    );
    drop(device);
    played.end();
}

#[test]
fn zeroing_and_trims_go_in_parts_with_their_flags() {
    let played = Played::with(|mut stream| {
        for (command, flags) in [
            (command::WRITE_ZEROES, 0),
            (command::WRITE_ZEROES, flag::NO_HOLE),
            (command::WRITE_ZEROES, flag::FAST_ZERO),
            (command::TRIM, 0),
            (command::FLUSH, 0),
        ] {
            let (request, _) = request(&mut stream);
            assert_eq!((request.command, request.flags), (command, flags));
            stream.write_all(&simple_reply(request.cookie, 0)).unwrap();
        }
    });
    let device = played.open(5000);
    for (keep_allocated, only_fast) in [(false, false), (true, false), (false, true)] {
        let zeroes = Zeroes {
            keep_allocated,
            only_fast,
        };
        device.write_zeroes(0, SIZE, zeroes).unwrap();
    }
    device.trim(0, SIZE).unwrap();
    device.flush().unwrap();
    // Nothing is asked for nothing.
    device.trim(0, 0).unwrap();
    device.write(SIZE, &[]).unwrap();
    device.read(SIZE, &mut []).unwrap();
    assert!(device.extents(SIZE, 0).unwrap().is_empty());
    drop(device);
    played.end();
    let long = MAX_CHANGE;
    assert!(parts(5, 2 * long + 1, long).eq([(5, long), (5 + long, long), (5 + 2 * long, 1)]));
}

#[test]
fn extents_and_dirty_ranges_are_put_together() {
    let played = Played::with(|mut stream| {
        // Runs of `base:allocation` and of the bitmap, which ends early, and again.
        type Runs = &'static [(u32, u32)];
        let answers: [(Runs, Runs); 3] = [
            (
                &[
                    (4096, 0),
                    (4096, allocation::HOLE),
                    (8192, 2),
                    (4096, 3),
                    (1 << 30, 3),
                ],
                &[(4096, 1)],
            ),
            (&[(4096, 0)], &[(8192, 0), (4096, 1), (4096, 1)]),
            (&[(4096, 0)], &[(4096, 1), (1 << 21, 0)]),
        ];
        for (all, bitmap) in answers {
            let (request, _) = request(&mut stream);
            assert_eq!(request.command, command::BLOCK_STATUS);
            let mut out = status_of(request.cookie, BITMAP_ID, bitmap, false);
            out.extend(status_of(request.cookie, allocation::ID, all, true));
            stream.write_all(&out).unwrap();
        }
    });
    let device = played.open(5000);
    let extents = device.extents(0, SIZE).unwrap();
    let kinds: Vec<_> = extents.iter().map(|e| (e.kind, e.length)).collect();
    let rest = SIZE - 16_384;
    assert_eq!(
        kinds,
        [
            (ExtentKind::Data, 8192),
            (ExtentKind::Zero, 8192),
            (ExtentKind::Hole, rest)
        ]
    );
    let dirty: Result<Vec<_>, _> = device.dirty(BITMAP, 0, SIZE).collect();
    assert!(dirty.unwrap().into_iter().eq(std::iter::once(8192..20_480)));
    let unknown = device.status("qemu:dirty-bitmap:other", 0, SIZE);
    assert!(
        matches!(unknown, Err(DeviceError::Unsupported(_))),
        "{unknown:?}"
    );
    let outside: Vec<_> = device.dirty(BITMAP, SIZE, 1).collect();
    assert!(
        matches!(outside[..], [Err(DeviceError::OutOfRange { .. })]),
        "{outside:?}"
    );
    drop(device);
    played.end();
}

#[test]
fn a_failed_request_is_not_the_end_of_the_connection() {
    let cases = [
        (errno::EIO, false),
        (errno::EINVAL, false),
        (errno::ENOMEM, true),
        (errno::ESHUTDOWN, false),
        (7777, false),
    ];
    let played = Played::with(move |mut stream| {
        for (number, _) in cases {
            let (asked, _) = request(&mut stream);
            let words = b"two\nlines";
            let parts: [&[u8]; 3] = [&number.to_be_bytes(), &9u16.to_be_bytes(), words];
            let mut out = data_of(asked.cookie, 0, &[1; 4096], false);
            out.extend(chunk_of(asked.cookie, chunk::ERROR, true, &parts));
            stream.write_all(&out).unwrap();
        }
        for number in [errno::EPERM, errno::ENOSPC, errno::ENOTSUP, 0] {
            let (asked, _) = request(&mut stream);
            let reply = simple_reply(asked.cookie, number);
            stream.write_all(&reply).unwrap();
        }
    });
    let device = played.open(5000);
    for (number, transient) in cases {
        let error = device.read(0, &mut [0; 8192]).unwrap_err();
        assert_eq!(error.is_transient(), transient, "{number}: {error}");
        let text = error.to_string();
        assert!(
            text.contains(&played.address().to_string()) && !text.contains('\n'),
            "{text}"
        );
    }
    let errors = [(); 3].map(|()| device.write(0, &[1]).unwrap_err());
    assert!(
        matches!(
            errors,
            [
                DeviceError::ReadOnly,
                DeviceError::NoSpace(_),
                DeviceError::Unsupported(_)
            ]
        ),
        "{errors:?}"
    );
    device.write(0, &[1]).unwrap();
    drop(device);
    played.end();
}
