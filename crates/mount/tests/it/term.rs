//! Leases with a term: how long a writer that is gone keeps them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::{DeviceError, ImageName};
use drover_device::remote::{Link, Remote};
use drover_mount::MountError;
use drover_mount::client::{Client, Options};
use drover_mount::server::{Absences, Base, Config, Images, Room, Server};
use drover_net::{Code, Peer, PeerKey, Refusal};
use drover_store::lease::{Access, MountId};
use parking_lot::Mutex;

use crate::local_stub::LocalStub;
use crate::util::{Near, Shelf, content, memory, name, runtime};

const TERM: u64 = 30;
const PATIENCE: Duration = Duration::from_secs(60);

fn server(images: &Arc<Shelf>, state: &Path, absences: &Arc<Absences>) -> Arc<Server> {
    let config = Config {
        absences: Arc::clone(absences),
        ..Config::new(Arc::clone(images) as Arc<dyn Images>, state, 2)
    };
    Server::new(config).unwrap()
}

fn before(time: Duration) -> Instant {
    let then = Instant::now().checked_sub(time);
    then.expect("the host has run for that long")
}

fn writer(n: u8, term: Option<u64>) -> Options {
    Options {
        mount: MountId([n; 16]),
        note: format!("disk {n}"),
        term,
        ..Options::new(name("web"), Access::ReadWrite)
    }
}

struct World {
    runtime: tokio::runtime::Runtime,
    images: Arc<Shelf>,
    state: tempfile::TempDir,
    absences: Arc<Absences>,
    server: Arc<Server>,
    near: Arc<Near>,
    other: Arc<Near>,
}

impl World {
    fn new() -> World {
        let runtime = runtime();
        let inside = runtime.enter();
        let images = Shelf::with("web", memory(&content(1 << 20, 3)));
        let state = tempfile::tempdir().unwrap();
        let absences = Arc::default();
        let server = server(&images, state.path(), &absences);
        let (near, other) = (Near::new(server.clone()), Near::new(server.clone()));
        drop(inside);
        World {
            runtime,
            images,
            state,
            absences,
            server,
            near,
            other,
        }
    }

    fn open(&self, near: &Arc<Near>, options: Options) -> Result<Client, MountError> {
        let _inside = self.runtime.enter();
        let opened = Client::open(self.runtime.handle(), near.clone(), options);
        self.runtime.block_on(opened)
    }

    fn refusal(&self, options: Options) -> (Code, String) {
        match self.open(&self.other, options).err() {
            Some(MountError::Refused(refusal)) => (refusal.code, refusal.message),
            other => panic!("{other:?}"),
        }
    }

    /// Cuts the first peer off, until the site has seen it.
    fn vanish(&self) {
        self.near.down.store(true, Ordering::Relaxed);
        self.near.cut();
        let began = Instant::now();
        while !self.connected().is_empty() {
            assert!(began.elapsed() < PATIENCE, "it is still connected");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn connected(&self) -> Vec<String> {
        let leased = self.server.leased(&name("web")).unwrap();
        leased.map(|leased| leased.connected).unwrap_or_default()
    }

    /// The site's program starts anew; this one has been running for a while.
    fn restart(&mut self, running: Duration) {
        let _inside = self.runtime.enter();
        self.absences = Arc::new(Absences::new(before(running)));
        self.server = server(&self.images, self.state.path(), &self.absences);
        self.near.now(self.server.clone());
        self.other.now(self.server.clone());
    }

    fn key(&self, n: u8) -> (PeerKey, MountId) {
        (self.near.peer.key, MountId([n; 16]))
    }
}

fn close(client: &Client) {
    let (say, hear) = std::sync::mpsc::channel::<Result<(), DeviceError>>();
    client.close(Box::new(move |result| say.send(result).unwrap()));
    hear.recv_timeout(PATIENCE).expect("an answer").unwrap();
}

#[test]
fn a_writer_that_is_gone_for_longer_than_its_term_loses_its_lease_to_another() {
    let world = World::new();
    let client = world.open(&world.near, writer(1, Some(TERM))).unwrap();
    assert_eq!(client.opened().term, Some(TERM));
    let local = LocalStub::attach(&client, false);
    // While it is connected, nothing is counted.
    world
        .absences
        .left(world.key(1), before(Duration::from_secs(TERM)));
    assert_eq!(world.refusal(writer(2, None)).0, Code::Held);
    world.vanish();
    let (code, text) = world.refusal(writer(2, None));
    assert_eq!(code, Code::Held);
    assert!(text.contains("out of contact for 30s"), "{text}");
    // It comes back in time.
    world.near.down.store(false, Ordering::Relaxed);
    local.wait("up", |received| {
        matches!(received.links.last(), Some(Link::Up(_)))
    });
    world.vanish();
    assert_eq!(world.refusal(writer(2, None)).0, Code::Held);
    world
        .absences
        .left(world.key(1), before(Duration::from_secs(TERM)));
    let taken = world.open(&world.other, writer(2, None)).unwrap();
    assert_eq!(taken.opened().term, None);
    // It is told what became of its lease.
    world.near.down.store(false, Ordering::Relaxed);
    local.wait("gone", |received| {
        matches!(received.links.last(), Some(Link::Gone(_)))
    });
    let error = world
        .open(&world.near, writer(1, Some(TERM)))
        .err()
        .unwrap();
    let text = error.to_string();
    for words in [
        "the write lease of web ended at",
        "when nantes (disk 2) took it",
        "term, 30s",
        "stays in this mount's cache",
    ] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    taken.close_now().unwrap();
}

#[test]
fn a_reader_is_let_in_when_the_term_of_the_writer_is_over() {
    let world = World::new();
    let client = world.open(&world.near, writer(1, Some(TERM))).unwrap();
    world.vanish();
    let reader = || Options::new(name("web"), Access::ReadOnly);
    assert_eq!(world.refusal(reader()).0, Code::Held);
    world
        .absences
        .left(world.key(1), before(Duration::from_secs(TERM)));
    let reader = world.open(&world.other, reader()).unwrap();
    assert_eq!(reader.opened().term, None);
    drop(client);
    close(&reader);
}

#[test]
fn the_term_survives_a_restart_from_which_on_it_counts() {
    let mut world = World::new();
    let client = world.open(&world.near, writer(1, Some(TERM))).unwrap();
    world.vanish();
    world.restart(Duration::ZERO);
    assert_eq!(world.refusal(writer(2, None)).0, Code::Held);
    world.restart(Duration::from_secs(TERM));
    let taken = world.open(&world.other, writer(2, None)).unwrap();
    close(&taken);
    drop(client);
    // Without a term it is for ever.
    world.near.down.store(false, Ordering::Relaxed);
    let client = world.open(&world.near, writer(3, None)).unwrap();
    world.vanish();
    world.restart(Duration::from_secs(TERM));
    assert_eq!(world.refusal(writer(2, None)).0, Code::Held);
    drop(client);
}

#[test]
fn a_site_may_grant_a_shorter_term_than_a_mount_asks_for() {
    let world = World::new();
    let _inside = world.runtime.enter();
    let config = Config {
        max_term: Some(Duration::from_secs(60)),
        ..Config::new(world.images.clone(), world.state.path(), 2)
    };
    let near = Near::new(Server::new(config).unwrap());
    for (n, asked, granted) in [(1, None, 60), (2, Some(3600), 60), (3, Some(5), 5)] {
        let client = world.open(&near, writer(n, asked)).unwrap();
        assert_eq!(client.opened().term, Some(granted));
        close(&client);
    }
    let reader = Options {
        term: Some(5),
        ..Options::new(name("web"), Access::ReadOnly)
    };
    let client = world.open(&near, reader).unwrap();
    assert_eq!(client.opened().term, None);
    close(&client);
}

/// A shelf at which one call, after a mount was admitted, takes long.
struct Slow {
    shelf: Arc<Shelf>,
    key: PeerKey,
    /// How many calls of that peer are left until then; none when it is 0.
    left: AtomicU64,
    go: Mutex<()>,
}

impl Images for Slow {
    fn allow(&self, _: &ImageName, peer: &Peer, _: Access) -> Result<(), Refusal> {
        let left = |n: u64| n.checked_sub(1).filter(|_| peer.key == self.key);
        let was = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
        if was == Ok(1) {
            drop(self.go.lock());
        }
        Ok(())
    }

    fn room(&self, peer: &PeerKey, bytes: u64) -> Result<Room, Refusal> {
        self.shelf.room(peer, bytes)
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        self.shelf.open(name)
    }
}

#[test]
fn a_writer_that_is_just_coming_back_keeps_its_lease() {
    let mut world = World::new();
    let images = Arc::new(Slow {
        shelf: world.images.clone(),
        key: world.near.peer.key,
        left: AtomicU64::new(0),
        go: Mutex::default(),
    });
    let inside = world.runtime.enter();
    let config = Config {
        absences: Arc::clone(&world.absences),
        ..Config::new(images.clone(), world.state.path(), 2)
    };
    world.server = Server::new(config).unwrap();
    drop(inside);
    world.near = Near::again(world.server.clone(), world.near.peer.clone());
    world.other.now(world.server.clone());
    let options = Options {
        back_connections: 0,
        ..writer(1, Some(TERM))
    };
    let client = world.open(&world.near, options).unwrap();
    let local = LocalStub::attach(&client, false);
    world.vanish();
    world
        .absences
        .left(world.key(1), before(Duration::from_secs(TERM)));
    // It is admitted, and joins later.
    let going = images.go.lock();
    images.left.store(3, Ordering::SeqCst);
    world.near.down.store(false, Ordering::Relaxed);
    let began = Instant::now();
    while images.left.load(Ordering::SeqCst) > 0 {
        assert!(began.elapsed() < PATIENCE, "it does not come back");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(world.refusal(writer(2, None)).0, Code::Held);
    drop(going);
    local.wait("up", |received| {
        matches!(received.links.last(), Some(Link::Up(_)))
    });
    close(&client);
}
