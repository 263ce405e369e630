//! The client as the remote of a managed device.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::MemoryDevice;
use drover_device::remote::{Change, Chunks, Epoch, Link, Remote};
use drover_mount::client::{Client, Options};
use drover_mount::server::WhyBroken;
use drover_store::lease::{Access, MountId};

use crate::local_stub::LocalStub;
use crate::util::{Near, Shelf, Site, content, memory, name, runtime, serve};

fn open(runtime: &tokio::runtime::Runtime, near: &Arc<Near>, options: Options) -> Client {
    runtime
        .block_on(Client::open(runtime.handle(), near.clone(), options))
        .unwrap()
}

fn reader() -> Options {
    Options::new(name("web"), Access::ReadOnly)
}

fn writer() -> Options {
    Options::new(name("web"), Access::ReadWrite)
}

/// Asks for a thing and waits for the answer.
fn wait(request: impl FnOnce(drover_device::remote::Done)) -> Result<(), DeviceError> {
    let (say, hear) = mpsc::channel();
    request(Box::new(move |result| say.send(result).unwrap()));
    hear.recv_timeout(Duration::from_secs(60))
        .expect("an answer")
}

#[test]
fn everything_is_pulled_and_what_is_waited_for_comes_meanwhile() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(30_000_001, 2);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    for chunk in [4096, 65_536, 4 << 20] {
        let client = open(&runtime, &near, Options { chunk, ..reader() });
        let local = LocalStub::attach(&client, true);
        let mut random = fastrand::Rng::with_seed(u64::from(chunk));
        for _ in 0..20 {
            let index = random.u64(0..local.shape.chunks());
            let got = local.get(&client, index).unwrap();
            let at = (index * u64::from(chunk)) as usize;
            assert!(got == bytes[at..at + got.len()]);
        }
        local.wait_all();
        local.all_is(&bytes);
        let received = local.received.lock();
        assert!(received.twice <= 20, "{} chunks came twice", received.twice);
        assert!(
            matches!(received.links[..], [Link::Up(1)]),
            "{:?}",
            received.links
        );
        let limit = Instant::now() + Duration::from_secs(60);
        while client.traffic().in_flight > 0 && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(5));
        }
        let traffic = client.traffic();
        let length = bytes.len() as u64;
        assert!(
            (length / 4..length * 11 / 10 + 8 * u64::from(chunk)).contains(&traffic.received),
            "chunk {chunk}: {traffic:?}"
        );
        assert_eq!(traffic.in_flight, 0);
    }
}

#[test]
fn a_link_that_is_cut_again_and_again_only_takes_longer() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(40_000_000, 3);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, reader());
    let local = LocalStub::attach(&client, true);
    for cut in 1..4u64 {
        let enough = 100 * cut as usize;
        local.wait("some chunks", |received| received.chunks.len() >= enough);
        near.cut();
        local.wait("the cut", |received| {
            received
                .links
                .iter()
                .any(|l| matches!(l, Link::Up(n) if *n > cut))
                || received.chunks.len() == 611
        });
    }
    local.wait_all();
    local.all_is(&bytes);
    assert!(local.received.lock().failed.is_empty());
}

#[test]
fn reads_wait_for_the_link_but_not_for_ever() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(2_000_000, 4);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let give_up = Duration::from_secs(3);
    let client = open(
        &runtime,
        &near,
        Options {
            give_up,
            ..reader()
        },
    );
    let local = LocalStub::attach(&client, false);
    local.get(&client, 1).unwrap();
    near.down.store(true, Ordering::Relaxed);
    near.cut();
    local.wait("down", |received| {
        matches!(received.links.last(), Some(Link::Down(_)))
    });
    let began = Instant::now();
    let error = local.get(&client, 2).unwrap_err();
    assert!(matches!(error, DeviceError::Unavailable(_)), "{error}");
    assert!(began.elapsed() >= give_up);
    near.down.store(false, Ordering::Relaxed);
    local.wait("up", |received| {
        matches!(received.links.last(), Some(Link::Up(2)))
    });
    local.get(&client, 2).unwrap();
    wait(|done| client.close(done)).unwrap();
    assert!(matches!(local.get(&client, 3), Err(DeviceError::Closed)));
}

#[test]
fn what_is_absent_is_known_before_it_is_asked_for() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let device = MemoryDevice::new(1 << 30);
    for at in [0, 500 << 20, (1 << 30) - 4096] {
        device.write(at, &[1; 4096]).unwrap();
    }
    let site = Site::with("web", Arc::new(device));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, reader());
    let _local = LocalStub::attach(&client, false);
    let (say, hear) = mpsc::channel();
    let all = Chunks {
        first: 0,
        count: 16_384,
    };
    client.presence(all, Box::new(move |runs| say.send(runs).unwrap()));
    let runs = hear.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    let run = |first, count| Chunks { first, count };
    assert_eq!(runs, [run(1, 7999), run(8001, 8382)]);
}

#[test]
fn an_epoch_counts_as_a_whole_and_over_cuts() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut bytes = content(3_000_000, 5);
    let mut site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let mount = MountId::random();
    let client = open(&runtime, &near, Options { mount, ..writer() });
    assert_eq!(client.committed(), Epoch(0));
    let local = LocalStub::attach(&client, false);
    let epoch = |n: u64| {
        let data = Bytes::from(content(489 * 4096, 100 + n));
        let changes = vec![
            Change::Write(4096, data.clone()),
            Change::Zero(2_400_256, 8192),
        ];
        (data, changes)
    };
    // One that is cut before it is committed is nothing.
    let (_, changes) = epoch(7);
    wait(|done| client.push(Epoch(1), changes, done)).unwrap();
    near.cut();
    local.wait("up", |received| {
        matches!(received.links.last(), Some(Link::Up(2)))
    });
    assert_eq!(client.committed(), Epoch(0));
    for n in 1..4 {
        let (data, changes) = epoch(n);
        wait(|done| client.push(Epoch(n), changes, done)).unwrap();
        let covers = data.len() as u64 + 8192;
        wait(|done| client.commit(Epoch(n), covers, done)).unwrap();
        assert_eq!(client.committed(), Epoch(n));
        bytes[4096..4096 + data.len()].copy_from_slice(&data);
        bytes[2_400_256..2_408_448].fill(0);
    }
    // One that counts already.
    let skipped = wait(|done| client.push(Epoch(2), epoch(9).1, done));
    assert!(skipped.is_err());
    // The site's program starts anew; the lease and the epochs are there.
    drop(client);
    site.restart();
    let near = Near::again(site.server.clone(), near.peer.clone());
    let identity = |client: &Client| client.identity();
    let client = open(&runtime, &near, Options { mount, ..writer() });
    assert_eq!((identity(&client).epoch, identity(&client).edition), (3, 1));
    let local = LocalStub::attach(&client, true);
    local.wait_all();
    local.all_is(&bytes);
    wait(|done| client.close(done)).unwrap();
}

#[test]
fn what_was_written_over_a_replaced_image_is_set_aside_and_not_shown() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(300_000, 11)));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer());
    let changes = vec![Change::Write(0, Bytes::from(vec![1; 4096]))];
    wait(|done| client.push(Epoch(1), changes, done)).unwrap();
    wait(|done| client.commit(Epoch(1), 4096, done)).unwrap();
    wait(|done| client.close(done)).unwrap();
    drop(client);
    // Another image gets the name.
    let bytes = content(300_000, 12);
    let shelf = Shelf::with("web", memory(&bytes));
    shelf.0.lock().get_mut(&name("web")).unwrap().digest = drover_core::Digest([8; 32]);
    let state = site.directory.path().to_owned();
    drop(site.server);
    let near = Near::again(serve(shelf, &state), near.peer.clone());
    let client = open(&runtime, &near, writer());
    let local = LocalStub::attach(&client, true);
    local.wait_all();
    local.all_is(&bytes);
    wait(|done| client.close(done)).unwrap();
    let received = std::fs::read_dir(state.join("overlays")).unwrap();
    let names: Vec<_> = received.map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn two_writers_are_one_too_many() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(500_000, 6)));
    let near = Near::new(site.server.clone());
    let other = Near::new(site.server.clone());
    let note = "disk of a guest".to_owned();
    let client = open(&runtime, &near, Options { note, ..writer() });
    let local = LocalStub::attach(&client, false);
    let refused = |options| {
        let opened = Client::open(runtime.handle(), other.clone(), options);
        runtime.block_on(opened).err().expect("refused").to_string()
    };
    for text in [refused(writer()), refused(reader())] {
        assert!(
            text.starts_with(
                "nantes (disk of a guest) holds the write lease of web, taken a moment ago: "
            ),
            "{text}"
        );
    }
    let leases = site.server.leases().unwrap();
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0].holder.as_ref().unwrap().peer, near.peer.key.0);
    // The owner takes it away.
    let web = name("web");
    let broken = site.server.break_lease(&web, WhyBroken::ByUser);
    assert!(runtime.block_on(broken).unwrap().is_some());
    local.wait("gone", |received| {
        matches!(received.links.last(), Some(Link::Gone(_)))
    });
    let error = wait(|done| client.commit(Epoch(1), 4096, done)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the write lease of web was revoked"),
        "{error}"
    );
    let client = open(&runtime, &other, writer());
    wait(|done| client.close(done)).unwrap();
    let client = open(&runtime, &other, reader());
    assert!(client.read_only());
    let refused = wait(|done| client.commit(Epoch(1), 4096, done)).unwrap_err();
    assert!(matches!(refused, DeviceError::ReadOnly), "{refused}");
}

#[test]
fn a_mount_whose_image_was_replaced_ends() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(500_000, 8)));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, reader());
    let local = LocalStub::attach(&client, false);
    local.get(&client, 0).unwrap();
    let other = Site::with("web", memory(&content(600_000, 8)));
    near.now(other.server.clone());
    near.cut();
    local.wait("gone", |received| {
        matches!(received.links.last(), Some(Link::Gone(_)))
    });
    let error = local.get(&client, 1).unwrap_err().to_string();
    assert!(error.contains("another image at the site now"), "{error}");
}

/// Throws away what comes first and asks for it again, as a full cache does.
struct Forgetful {
    client: std::sync::OnceLock<std::sync::Weak<Client>>,
    came: std::sync::Mutex<mpsc::Sender<u64>>,
    again: std::sync::atomic::AtomicBool,
}

impl drover_device::remote::Local for Forgetful {
    fn arrived(&self, chunks: Vec<drover_device::remote::Fetched>) {
        for chunk in chunks {
            if !self.again.swap(true, Ordering::AcqRel)
                && let Some(client) = self.client.get().and_then(std::sync::Weak::upgrade)
            {
                client.fetch(Chunks {
                    first: chunk.index,
                    count: 1,
                });
            }
            let _ = self.came.lock().unwrap().send(chunk.index);
        }
    }

    fn failed(&self, _: Chunks, _: DeviceError) {}

    fn next(&self, _: u64) -> Option<Chunks> {
        None
    }

    fn link(&self, _: Link) {}
}

#[test]
fn a_chunk_that_is_asked_for_again_while_it_is_handed_out_comes_again() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(2_000_000, 9)));
    let near = Near::new(site.server.clone());
    let client = Arc::new(open(&runtime, &near, reader()));
    let (say, hear) = mpsc::channel();
    let local = Arc::new(Forgetful {
        client: std::sync::OnceLock::from(Arc::downgrade(&client)),
        came: std::sync::Mutex::new(say),
        again: std::sync::atomic::AtomicBool::new(false),
    });
    let weak = Arc::downgrade(&local);
    client.attach(weak);
    client.fetch(Chunks { first: 3, count: 1 });
    for _ in 0..2 {
        let came = hear.recv_timeout(Duration::from_secs(60));
        assert_eq!(came, Ok(3), "a fetch without an answer");
    }
}
