//! A damaged or missing lease file: changes are not hidden, no lease is granted by guessing, and there is a way out.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::{DeviceError, ImageName};
use drover_device::remote::{Change, Epoch, Remote};
use drover_mount::MountError;
use drover_mount::client::{Client, Options};
use drover_mount::protocol::{ConnectionKind, DEFAULT_CHUNK, Open};
use drover_mount::server::{Base, Images, Room, Server, lease_on_disk};
use drover_net::service::{self, IncomingCall};
use drover_net::{Code, Connection, Peer, PeerKey, Refusal};
use drover_store::lease::{Access, MountId};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::local_stub::LocalStub;
use crate::util::{Near, Shelf, Site, content, memory, name, runtime};

const SIZE: usize = 1 << 20;

struct World {
    runtime: tokio::runtime::Runtime,
    site: Site,
    near: Arc<Near>,
    model: Vec<u8>,
}

impl World {
    /// A site with an image that has changes, and its lease file, which is not open.
    fn new() -> (Self, PathBuf) {
        let runtime = runtime();
        let inside = runtime.enter();
        let mut model = content(SIZE, 41);
        let site = Site::with("web", memory(&model));
        let near = Near::new(site.server.clone());
        drop(inside);
        let mut world = Self {
            runtime,
            site,
            near,
            model: Vec::new(),
        };
        let client = world.open(Access::ReadWrite).unwrap();
        model[..4096].fill(7);
        let changes = vec![Change::Write(0, Bytes::from(vec![7; 4096]))];
        wait(|done| client.push(Epoch(1), changes, done));
        wait(|done| client.commit(Epoch(1), 4096, done));
        wait(|done| client.close(done));
        drop(client);
        world.model = model;
        world.restart();
        let lease = world.site.directory.path().join("overlays/web/lease");
        (world, lease)
    }

    fn restart(&mut self) {
        let _inside = self.runtime.enter();
        self.site.restart();
        self.near = Near::again(self.site.server.clone(), self.near.peer.clone());
    }

    fn server(&self) -> &Arc<Server> {
        &self.site.server
    }

    fn open(&self, access: Access) -> Result<Client, MountError> {
        let _inside = self.runtime.enter();
        let options = Options::new(name("web"), access);
        let client = Client::open(self.runtime.handle(), self.near.clone(), options);
        self.runtime.block_on(client)
    }

    /// Reads all as a reader does.
    fn is_shown(&self) {
        let _inside = self.runtime.enter();
        let client = self.open(Access::ReadOnly).unwrap();
        let local = LocalStub::attach(&client, true);
        local.wait_all();
        local.all_is(&self.model);
        wait(|done| client.close(done));
    }
}

fn wait(request: impl FnOnce(Box<dyn FnOnce(Result<(), DeviceError>) + Send>)) {
    let (say, hear) = std::sync::mpsc::channel();
    request(Box::new(move |result| say.send(result).unwrap()));
    let limit = std::time::Duration::from_secs(60);
    hear.recv_timeout(limit).expect("an answer").unwrap();
}

#[test]
fn without_its_file_what_was_written_is_still_shown() {
    let (mut world, lease) = World::new();
    world.is_shown();
    std::fs::remove_file(&lease).unwrap();
    world.restart();
    world.is_shown();
    let client = world.open(Access::ReadWrite).unwrap();
    assert!(client.identity().edition > 1, "as of another writer");
    assert_eq!(client.identity().epoch, 1);
}

#[test]
fn a_damaged_one_is_refused_with_the_way_out_and_hides_nothing() {
    let (mut world, lease) = World::new();
    let mut bytes = std::fs::read(&lease).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&lease, &bytes).unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let refused = world.open(access).err();
        let Some(MountError::Refused(refusal)) = &refused else {
            panic!("{refused:?}");
        };
        let said = &refusal.message;
        assert_eq!(refusal.code, Code::Corrupt, "{said}");
        for word in ["lease", "damaged", "drover mounts break"] {
            assert!(said.contains(word), "{said}");
        }
        assert!(!said.contains("remove it"), "{said}");
    }
    let on_disk = || lease_on_disk(lease.ancestors().nth(3).unwrap(), &name("web"));
    assert!(matches!(on_disk(), Err(MountError::Refused(r)) if r.code == Code::Corrupt));
    std::fs::remove_file(&lease).unwrap();
    std::fs::create_dir(&lease).unwrap();
    let unread = on_disk();
    assert!(
        matches!(unread, Err(MountError::StateFile { .. })),
        "{unread:?}"
    );
    std::fs::remove_dir(&lease).unwrap();
    std::fs::write(&lease, &bytes).unwrap();
    // It is listed as what it is.
    let listed = world.server().leases().unwrap();
    assert_eq!(listed.len(), 1);
    let problem = listed[0].problem.as_ref().expect("a problem");
    assert!(problem.contains("drover mounts break"), "{problem}");
    // The way out.
    assert!(world.server().replace_damaged_lease(&name("web")).unwrap());
    assert!(!world.server().replace_damaged_lease(&name("web")).unwrap());
    assert_eq!(
        std::fs::read(lease.with_extension("damaged")).unwrap(),
        bytes
    );
    assert_eq!(world.server().leases().unwrap(), []);
    world.is_shown();
    world.restart();
    world.is_shown();
    let client = world.open(Access::ReadWrite).unwrap();
    assert!(client.identity().edition > 1, "as of another writer");
    // While it is open, what is damaged on the disk is written anew.
    std::fs::write(&lease, b"rubbish").unwrap();
    assert!(world.server().leases().unwrap()[0].problem.is_some());
    assert!(world.server().replace_damaged_lease(&name("web")).unwrap());
    let listed = world.server().leases().unwrap();
    assert!(listed[0].problem.is_none() && listed[0].holder.is_some());
}

/// An image that may be written once: until the lease is about to be granted.
struct Once {
    shelf: Arc<Shelf>,
    asked: AtomicU64,
}

impl Images for Once {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        match self.asked.fetch_add(1, Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(Refusal::new(Code::Denied, "it is no longer shared")),
        }
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        self.shelf.open(name)
    }
}

#[test]
fn a_permission_that_goes_while_a_lease_is_granted_leaves_none() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::of(Arc::new(Once {
        shelf: Shelf::with("web", memory(&content(SIZE, 43))),
        asked: AtomicU64::new(0),
    }));
    let near = Near::new(site.server.clone());
    let options = Options::new(name("web"), Access::ReadWrite);
    let opened = runtime.block_on(Client::open(runtime.handle(), near, options));
    let Some(MountError::Refused(refusal)) = opened.err() else {
        panic!("it was opened");
    };
    assert_eq!(refusal.code, Code::Denied, "{refusal}");
    let holder = lease_on_disk(site.directory.path(), &name("web")).unwrap();
    assert_eq!(holder, None);
}

/// Takes the permission away while it is asked for the second time.
struct Hesitant {
    once: Once,
    /// Locked until the answer.
    thinking: Mutex<()>,
}

impl Images for Hesitant {
    fn allow(&self, name: &ImageName, peer: &Peer, access: Access) -> Result<(), Refusal> {
        let answer = self.once.allow(name, peer, access);
        if answer.is_err() {
            drop(self.thinking.lock());
        }
        answer
    }

    fn room(&self, peer: &PeerKey, bytes: u64) -> Result<Room, Refusal> {
        self.once.room(peer, bytes)
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        self.once.open(name)
    }
}

#[test]
fn an_opening_that_is_cancelled_leaves_no_lease_without_a_permission() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let images = Arc::new(Hesitant {
        once: Once {
            shelf: Shelf::with("web", memory(&content(SIZE, 44))),
            asked: AtomicU64::new(0),
        },
        thinking: Mutex::default(),
    });
    let site = Site::of(images.clone());
    let thinking = images.thinking.lock();
    let (server, peer) = (
        site.server.clone(),
        Near::new(site.server.clone()).peer.clone(),
    );
    let open = Open {
        mount: MountId([1; 16]),
        connection: ConnectionKind::Front,
        link: 1,
        image: name("web"),
        access: Access::ReadWrite,
        chunk: DEFAULT_CHUNK,
        expected: None,
        note: String::new(),
        term: None,
    };
    let held = || {
        lease_on_disk(site.directory.path(), &name("web"))
            .unwrap()
            .is_some()
    };
    let wait = |what: &str, is_so: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let (here, there) = Connection::pair().unwrap();
    let call = runtime.spawn(async move {
        let stop = watch::Sender::new(false).subscribe();
        let call = IncomingCall::receive(there, stop).await.unwrap();
        server.serve_connection(peer, call).await
    });
    let (_reader, mut writer) = here.split();
    runtime.block_on(async {
        service::open(&mut writer, &open).await.unwrap();
        writer.flush().await.unwrap();
    });
    wait("it is asked again", &|| {
        images.once.asked.load(Ordering::Relaxed) == 2
    });
    assert!(held());
    // As those of a peer are that lost a right.
    call.abort();
    wait("it is cancelled", &|| call.is_finished());
    drop(thinking);
    wait("the lease is returned", &|| !held());
}

#[test]
fn what_may_not_be_mounted_is_done_only_without_mounts_and_changes() {
    let (world, _) = World::new();
    let server = world.server();
    let done = |image: &str| server.while_unchanged(&name(image), || ());
    let refused = done("web").unwrap_err().to_string();
    assert!(refused.contains("changes by mounts"), "{refused}");
    // The server before this one may still be closing the image.
    while let Err(e) = server.drop_changes(&name("web")) {
        assert!(e.to_string().contains("in use"), "{e}");
        std::thread::sleep(Duration::from_millis(10));
    }
    done("web").unwrap();
    let client = world.open(Access::ReadOnly).unwrap();
    let refused = done("web").unwrap_err().to_string();
    assert!(refused.contains("mounted by nantes"), "{refused}");
    done("another").unwrap();
    drop(client);
}
