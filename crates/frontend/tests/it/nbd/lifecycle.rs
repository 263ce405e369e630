//! Exports, sockets, start and shutdown.

use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_core::{BlockDevice, Cost};
use drover_device::backend::MemoryDevice;
use drover_frontend::nbd::wire::{command as c, option, reply};
use drover_frontend::nbd::{Address, Export, NbdError, Negotiated, Server, ServerOptions};

use super::Served;
use super::raw::{Odd, Raw, string};

fn memory(name: &str, size: u64) -> Export {
    Export {
        name: name.into(),
        description: String::new(),
        device: Arc::new(MemoryDevice::new(size)),
        read_only: false,
    }
}

fn server() -> Server {
    Server::new(vec![memory("", 4096)], ServerOptions::default()).unwrap()
}

#[test]
fn exports_are_found_by_name() {
    let served = Served::exports(
        vec![memory("a", 4096), memory("ü/2", 8192)],
        ServerOptions::default(),
    );
    let mut raw = Raw::connect(&served.socket());
    let listed = raw.option(option::LIST, &[]);
    assert_eq!(listed[0], (reply::SERVER, string("a")));
    assert_eq!(listed[1], (reply::SERVER, string("ü/2")));
    // No name says neither of the two.
    let nameless = [&string("")[..], &[0, 0]].concat();
    assert_eq!(raw.option(option::GO, &nameless)[0].0, reply::ERR_UNKNOWN);
    raw.begin("ü/2", true);
    assert_eq!(raw.size, 8192);
    // The way of old clients, which get zeros if they want them.
    for (flags, zeros) in [(1u32, 124), (3, 0)] {
        use std::io::Write;
        let mut raw = Raw::bare(UnixStream::connect(served.socket()).unwrap());
        raw.bytes::<18>();
        raw.stream.write_all(&flags.to_be_bytes()).unwrap();
        raw.send_option(option::EXPORT_NAME, b"a");
        let size: [u8; 8] = raw.bytes();
        assert_eq!(u64::from_be_bytes(size), 4096);
        raw.bytes::<2>();
        let mut rest = vec![1; zeros];
        raw.stream.read_exact(&mut rest).unwrap();
        assert!(rest.iter().all(|b| *b == 0));
        assert_eq!(raw.does(c::READ, 0, 0, 8, &[]).data, [0; 8]);
    }
    let mut raw = Raw::connect(&served.socket());
    raw.send_option(option::EXPORT_NAME, b"c");
    assert!(raw.is_hung_up());
    let mut raw = Raw::connect(&served.socket());
    assert_eq!(raw.option(option::ABORT, &[])[0].0, reply::ACK);
    assert!(raw.is_hung_up());
}

#[test]
fn a_context_is_for_the_export_that_it_was_agreed_on_for() {
    let served = Served::exports(
        vec![memory("a", 4096), memory("b", 8192)],
        ServerOptions::default(),
    );
    let mut raw = Raw::connect(&served.socket());
    raw.option(option::STRUCTURED_REPLY, &[]);
    let query = |query: &str| [&string("a")[..], &1u32.to_be_bytes(), &string(query)].concat();
    let all = [&string("a")[..], &0u32.to_be_bytes()].concat();
    for (option, data, count) in [
        (option::LIST_META_CONTEXT, all.clone(), 2),
        (option::LIST_META_CONTEXT, query("base:"), 2),
        (option::LIST_META_CONTEXT, query("base:allocation"), 2),
        (option::LIST_META_CONTEXT, query("qemu:dirty-bitmap:x"), 1),
        (option::SET_META_CONTEXT, all, 1),
        (option::SET_META_CONTEXT, query("base:"), 1),
        (option::SET_META_CONTEXT, query("base:allocation"), 2),
    ] {
        let replies = raw.option(option, &data);
        assert_eq!(replies.len(), count, "{option}: {data:?}");
    }
    let go = [&string("b")[..], &[0, 0]].concat();
    raw.option(option::GO, &go);
    raw.structured = true;
    assert_ne!(raw.does(c::BLOCK_STATUS, 0, 0, 4096, &[]).error, 0);
}

#[test]
fn exports_that_cannot_be_served_are_refused() {
    let mut odd = Odd::new(4096 + 512, Cost::Memory);
    odd.can.alignment = 4096;
    let mut coarse = Odd::new(1 << 20, Cost::Memory);
    coarse.can.alignment = 1 << 20;
    let device = |device: Odd| Export {
        name: "odd".into(),
        description: String::new(),
        device: Arc::new(device),
        read_only: false,
    };
    let cases = [
        (
            vec![memory("a", 1), memory("a", 2)],
            "another export has this name",
        ),
        (vec![memory("a\0b", 1)], "NUL"),
        (vec![memory(&"x".repeat(5000), 1)], "4096"),
        (vec![device(odd)], "not a multiple"),
        (vec![device(coarse)], "aligned to 1048576"),
    ];
    for (exports, expected) in cases {
        let Err(error) = Server::new(exports, ServerOptions::default()) else {
            panic!("{expected}: it was taken");
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_socket_file_is_private_and_goes_with_its_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listening = server().listen_unix(&path).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    Raw::go(&path, "", true);
    // A live one is not pushed aside.
    let error = server().listen_unix(&path).map(drop).unwrap_err();
    assert!(matches!(error, NbdError::InUse(_)), "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()));
    assert_eq!(listening.stop(), 0);
    assert!(!path.exists());
    assert_eq!(listening.stop(), 0);
    // A dead one is.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let again = server().listen_unix(&path).unwrap();
    Raw::go(&path, "", true);
    // A file that came in its place is not removed.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "somebody's").unwrap();
    drop(again);
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
    let error = server().listen_unix(&path).map(drop).unwrap_err();
    assert!(error.to_string().contains("not a socket"), "{error}");
    let error = server().listen_unix(Path::new("/nowhere/at/all")).map(drop);
    assert!(matches!(error, Err(NbdError::Bind { .. })));
}

#[test]
fn only_one_of_many_servers_gets_a_stale_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    for _ in 0..10 {
        drop(UnixListener::bind(&path).unwrap());
        let taken: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| server().listen_unix(&path)))
                .collect();
            threads
                .into_iter()
                .filter_map(|t| t.join().unwrap().ok())
                .collect()
        });
        assert_eq!(taken.len(), 1);
        Raw::go(&path, "", true);
    }
}

#[test]
fn tcp_beyond_this_machine_needs_proven_clients() {
    let error = server()
        .listen_tcp("0.0.0.0:0".parse().unwrap())
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, NbdError::Open(_)), "{error}");
    let listening = server().listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let &Address::Tcp(address) = listening.local_addr() else {
        panic!("{} is not TCP", listening.local_addr());
    };
    let mut client = TcpStream::connect(address).unwrap();
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    drop(listening);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn stopping_answers_what_is_under_way() {
    let device = Odd::new(1 << 20, Cost::Network).before(|_, _, _| {
        std::thread::sleep(Duration::from_millis(100));
        Ok(())
    });
    let device = Arc::new(device);
    let served = Served::one(device.clone());
    let mut raw = Raw::go(&served.socket(), "", true);
    let mut idle = Raw::go(&served.socket(), "", true);
    for round in 0..20 {
        raw.ask(c::WRITE, 0, round, 1, &[9]);
    }
    while served.server.counts().requests < 20 {
        std::thread::yield_now();
    }
    assert_eq!(served.listening.stop(), 0);
    for _ in 0..20 {
        assert_eq!(raw.answer().error, 0);
    }
    assert!(raw.is_hung_up() && idle.is_hung_up());
    let mut written = [0; 20];
    device.inner.read(0, &mut written).unwrap();
    assert_eq!(written, [9; 20]);
    assert!(UnixStream::connect(served.socket()).is_err());
}

#[test]
fn a_device_that_never_answers_does_not_stop_the_stop() {
    let over = Arc::new(AtomicBool::new(false));
    let inner = Arc::clone(&over);
    let device = Odd::new(1 << 20, Cost::Network).before(move |_, _, _| {
        while !inner.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    });
    let options = ServerOptions {
        drain: Duration::from_millis(200),
        ..ServerOptions::default()
    };
    let served = Served::new(vec![("", Arc::new(device) as _)], options);
    let mut raw = Raw::go(&served.socket(), "", true);
    raw.ask(c::READ, 0, 0, 512, &[]);
    while served.server.counts().requests == 0 {
        std::thread::yield_now();
    }
    // It returns although the device does not.
    assert_eq!(served.listening.stop(), 1);
    assert!(raw.is_hung_up());
    over.store(true, Ordering::Relaxed);
}

#[test]
fn a_connection_that_is_open_is_served() {
    let server = server();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = server.serve_stream(theirs).unwrap();
    let mut raw = Raw::bare(ours);
    raw.bytes::<18>();
    std::io::Write::write_all(&mut raw.stream, &3u32.to_be_bytes()).unwrap();
    raw.begin("", true);
    assert_eq!(raw.does(c::READ, 0, 0, 8, &[]).data, [0; 8]);
    assert!(connection.is_open());
    raw.ask(c::DISCONNECT, 0, 0, 0, &[]);
    assert!(connection.wait(Duration::from_secs(60)));
    assert!(raw.is_hung_up());

    // As the kernel's client: requests at once.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = server
        .serve_transmission(theirs, "", Negotiated::default())
        .unwrap();
    let mut raw = Raw::bare(ours);
    assert_eq!(raw.does(c::WRITE, 0, 4, 3, b"abc").error, 0);
    assert_eq!(raw.does(c::READ, 0, 3, 5, &[]).data, b"\0abc\0");
    assert_ne!(raw.does(c::BLOCK_STATUS, 0, 0, 8, &[]).error, 0);
    assert!(connection.stop(Duration::from_secs(60)));
    assert!(raw.is_hung_up() && !connection.is_open());
    let (_, theirs) = UnixStream::pair().unwrap();
    let error = server.serve_transmission(theirs, "other", Negotiated::default());
    assert!(matches!(error.map(drop), Err(NbdError::Export { .. })));
    let facts = server.facts("").unwrap();
    assert_eq!(
        (facts.size, facts.minimum, facts.read_only),
        (4096, 1, false)
    );
}
