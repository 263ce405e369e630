//! Against a real server.

use drover_core::BlockDevice;

use super::super::{NewStore, StoreAddress, StoreDevice, StoreOptions, create};
use super::*;
use crate::testing::{RedisProcess, contract};

const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

fn server(options: &[&str]) -> Option<(tempfile::TempDir, RedisProcess)> {
    let dir = tempfile::tempdir().unwrap();
    let server = RedisProcess::start(dir.path(), options)?;
    Some((dir, server))
}

fn store(server: &RedisProcess, name: &str) -> Arc<dyn ChunkStore> {
    let url = format!("redis://127.0.0.1:{}/2?prefix={name}", server.port());
    url.parse::<StoreAddress>().unwrap().store().unwrap()
}

fn new(size: u64) -> NewStore {
    NewStore {
        size,
        chunk: 16 << 10,
        object: None,
    }
}

fn options() -> StoreOptions {
    StoreOptions::new([3; 16], "a test")
}

#[test]
fn the_contract_is_held_by_redis() {
    let Some((_dir, server)) = server(&[]) else {
        return;
    };
    contract(&|size| {
        let store = store(&server, &format!("of-{size}"));
        create(&*store, new(size)).unwrap();
        let mut options = options();
        options.max_buffer = 256 << 10;
        Box::new(StoreDevice::open(store, &options).unwrap())
    });
}

#[test]
fn values_are_conditional_listed_and_removed() {
    let Some((_dir, server)) = server(&[]) else {
        return;
    };
    let store = store(&server, "a");
    let other = self::store(&server, "ab");
    let value = |text: &'static str| Bytes::from_static(text.as_bytes());
    let first = store.swap("disk", None, value("one")).unwrap().unwrap();
    assert_eq!(store.swap("disk", None, value("two")).unwrap(), None);
    let second = store.swap("disk", Some(&first), value("three")).unwrap();
    assert_eq!(
        store.swap("disk", Some(&first), value("four")).unwrap(),
        None
    );
    assert_eq!(
        store.look("disk", 100).unwrap(),
        Some((value("three"), second.unwrap()))
    );
    // One that is longer than it may be.
    assert!(matches!(store.look("disk", 3), Err(DeviceError::Io(_))));
    assert_eq!(store.look("none", 100).unwrap(), None);

    let keys: Vec<_> = (0..3000).map(|n| format!("o/{n:06x}")).collect();
    let values = keys.iter().map(|key| (key.clone(), value("0123456789")));
    assert!(store.put(values.collect()).iter().all(Result::is_ok));
    let wanted = |key: &str, range| Wanted {
        key: key.into(),
        range,
    };
    let got = store.get(&[wanted("o/000002", 2..5), wanted("o/none", 0..5)]);
    assert_eq!(got[0].as_ref().unwrap().as_deref(), Some(&b"234"[..]));
    assert_eq!(got[1].as_ref().unwrap(), &None);
    let listed = |store: &Arc<dyn ChunkStore>| {
        let mut all = Vec::new();
        store
            .list("o/", &mut |key| all.push(key.to_owned()))
            .unwrap();
        all.sort();
        all.dedup();
        all
    };
    assert_eq!(listed(&store), keys);
    assert!(listed(&other).is_empty());
    store.remove(&keys[..2999]).unwrap();
    assert_eq!(listed(&store), keys[2999..]);
}

/// What was flushed is there after the server was killed, if it says so; and if it keeps all in memory, what it has lost is
/// noticed, also by a disk that is in use.
#[test]
fn a_server_that_restarts() {
    let Some((_dir, mut server)) = server(DURABLE) else {
        return;
    };
    let durable = store(&server, "vm1");
    assert_eq!(durable.promise().note, None);
    create(&*durable, new(1 << 20)).unwrap();
    let device = StoreDevice::open(durable.clone(), &options()).unwrap();
    assert!(device.capabilities().durable);
    device.write(1000, &[5; 200_000]).unwrap();
    device.flush().unwrap();
    server.kill();
    server.start_again();
    let mut read = vec![0; 200_000];
    device.read(1000, &mut read).unwrap();
    assert!(read.iter().all(|b| *b == 5));
    device.write(0, b"on").unwrap();
    device.close().unwrap();

    let Some((_dir, mut forgetful)) = self::server(&["--appendonly", "no"]) else {
        return;
    };
    let memory = store(&forgetful, "vm1");
    let note = memory.promise().note.unwrap();
    assert!(note.contains("in memory"), "{note}");
    create(&*memory, new(1 << 20)).unwrap();
    let device = StoreDevice::open(memory.clone(), &options()).unwrap();
    assert!(!device.capabilities().durable);
    device.write(1000, &[5; 200_000]).unwrap();
    device.flush().unwrap();
    forgetful.kill();
    forgetful.start_again();
    let error = device.read(1000, &mut read).unwrap_err();
    assert!(error.to_string().contains("lost"), "{error}");
    device.write(0, b"x").unwrap_err();
    device.flush().unwrap_err();
}

/// A server that is full: by default nothing is evicted, and writes fail; with eviction, what is gone is an error.
#[test]
fn a_server_that_is_full() {
    let Some((_dir, server)) = server(&["--maxmemory", "6mb"]) else {
        return;
    };
    let full = store(&server, "vm1");
    create(&*full, new(64 << 20)).unwrap();
    let device = StoreDevice::open(full, &options()).unwrap();
    let random: Vec<u8> = (0..16 << 20).map(|_| fastrand::u8(..)).collect();
    device.write(0, &random).unwrap();
    let error = device.flush().unwrap_err();
    assert!(matches!(error, DeviceError::NoSpace(_)), "{error}");
    drop(device);

    let evicting = ["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random"];
    let Some((_dir, server)) = self::server(&evicting) else {
        return;
    };
    let evicting = store(&server, "vm1");
    let note = evicting.promise().note.unwrap();
    assert!(note.contains("allkeys-random"), "{note}");
    create(&*evicting, new(64 << 20)).unwrap();
    let device = StoreDevice::open(evicting, &options()).unwrap();
    device.write(0, &random).unwrap();
    // The header may be among what is gone.
    let _ = device.flush();
    let mut read = vec![0; 64 << 10];
    let mut errors = 0;
    for at in (0..random.len()).step_by(64 << 10) {
        match device.read(at as u64, &mut read) {
            Ok(()) => assert!(read == random[at..at + (64 << 10)], "{at}"),
            Err(DeviceError::Corrupt(_)) => errors += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(errors > 50, "{errors}");
}

#[test]
fn passwords_are_read_from_files_and_never_shown() {
    let Some((dir, server)) = server(&["--requirepass", "hunter2"]) else {
        return;
    };
    let file = dir.path().join("password");
    std::fs::write(&file, "hunter2\n").unwrap();
    let url = format!("redis://127.0.0.1:{}?prefix=a", server.port());
    let refused = url.parse::<StoreAddress>().unwrap().store().err().unwrap();
    assert!(refused.to_string().contains("REDISCLI_AUTH"), "{refused}");
    let with = format!("{url}&password-file={}", file.display());
    let store = with.parse::<StoreAddress>().unwrap().store().unwrap();
    create(&*store, new(1 << 20)).unwrap();
    std::fs::write(&file, "hunter3\n").unwrap();
    let refused = with.parse::<StoreAddress>().unwrap().store().err().unwrap();
    assert!(!refused.to_string().contains("hunter"), "{refused}");
}

#[test]
fn a_host_without_a_server_is_said_soon() {
    let address: StoreAddress = "redis://127.0.0.1:1?prefix=a".parse().unwrap();
    let error = address.store().err().unwrap();
    assert!(
        error.is_transient() && error.to_string().contains("redis://127.0.0.1:1/0"),
        "{error}"
    );
}

/// What was written to a server, and what of it is on its disk.
#[derive(Default)]
struct Log {
    written: u64,
    synced: u64,
}

/// A server with the `WAITAOF` of Redis 7.2: it waits for what its own connection has written, and for nothing else.
fn waiting_server() -> (RedisServer, Arc<Mutex<Log>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let log = Arc::new(Mutex::new(Log::default()));
    let shared = log.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let log = shared.clone();
            std::thread::spawn(move || answer(stream, &log));
        }
    });
    let address = format!("redis://127.0.0.1:{port}?prefix=a").parse();
    match address.unwrap() {
        StoreAddress::Redis(server, _) => (server, log),
        other => panic!("{other}"),
    }
}

fn answer(mut stream: std::net::TcpStream, log: &Mutex<Log>) {
    use std::io::Write;
    let mut from = io::BufReader::new(stream.try_clone().unwrap());
    let mut own = 0;
    while let Ok(request) = reply::read(&mut from, 1 << 20) {
        let words: Vec<_> = request.elements().iter().map(Reply::text).collect();
        let mut log = log.lock();
        let answer = match (words.first().copied().flatten(), words.get(2)) {
            (Some("PING"), _) => "+PONG\r\n",
            (Some("CONFIG"), Some(Some("appendonly"))) => "*2\r\n$1\r\nx\r\n$3\r\nyes\r\n",
            (Some("CONFIG"), Some(Some("appendfsync"))) => "*2\r\n$1\r\nx\r\n$8\r\neverysec\r\n",
            (Some("CONFIG"), _) => "*0\r\n",
            (Some("WAITAOF"), _) => {
                log.synced = log.synced.max(own);
                "*2\r\n:1\r\n:0\r\n"
            }
            (Some(write @ ("SET" | "EVAL")), _) => {
                log.written += 1;
                own = log.written;
                match write {
                    "SET" => "+OK\r\n",
                    _ => ":1\r\n",
                }
            }
            _ => "-ERR unknown command\r\n",
        };
        drop(log);
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// Other connections' writes are waited for, too.
#[test]
fn what_any_connection_wrote_is_on_the_disk_after_it_was_settled() {
    let (server, log) = waiting_server();
    let store = RedisStore::connect(server, "a", "a test").unwrap();
    assert!(store.promise().is_durable && store.can_wait);
    store.swap("disk", None, Bytes::from_static(b"x")).unwrap();
    let header = log.lock().written;
    assert!(log.lock().synced < header);
    // The next request goes over another connection.
    let other = Connection::open(&store.server).unwrap();
    store.idle.lock().push(other);
    store.settle().unwrap();
    assert!(log.lock().synced >= header);
}

/// What is no answer of Redis, or no TLS, says nothing of what is stored.
#[test]
fn answers_of_something_else_are_no_loss() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        use std::io::Write;
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = io::Read::read(&mut stream, &mut [0; 100]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    for (scheme, is_transient) in [("redis", false), ("rediss", true)] {
        let url = format!("{scheme}://127.0.0.1:{port}?prefix=a");
        let error = url.parse::<StoreAddress>().unwrap().store().err().unwrap();
        assert!(!matches!(error, DeviceError::Corrupt(_)), "{error}");
        assert_eq!(error.is_transient(), is_transient, "{error}");
    }
}
