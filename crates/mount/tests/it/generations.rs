//! The generations of an image: recorded ahead of what mounts write, frozen, thawed.

use std::fs::File;
use std::sync::Arc;

use drover_core::{BlockDevice, Digest};
use drover_device::remote::{Change, Epoch, Remote};
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_mount::server::{ClaimEnd, generations_on_disk};
use drover_net::{Identity, Peer, Rights};
use drover_storage::HostDirectory;
use drover_store::generations::{
    About, CHUNK, Contents, FILE_NAME, Generation, Generations, Summary,
};
use drover_store::lease::{self, Access, MountId};
use tokio::runtime::Runtime;

use crate::push::{soon, wait};
use crate::util::{Near, Shelf, Site, memory, name, runtime};

const SIZE: usize = 5 << 20;

struct World {
    runtime: Runtime,
    shelf: Arc<Shelf>,
    site: Site,
}

impl World {
    fn new() -> Self {
        let runtime = runtime();
        let _inside = runtime.enter();
        let shelf = Shelf::with("web", memory(&[1; SIZE]));
        let site = Site::of(shelf.clone());
        Self {
            runtime,
            shelf,
            site,
        }
    }

    fn open(&self, access: Access) -> Result<Arc<Client>, String> {
        let near = Near::new(self.site.server.clone());
        let options = Options::new(name("web"), access);
        let opened = Client::open(self.runtime.handle(), near, options);
        let opened = self.runtime.block_on(opened);
        opened.map(Arc::new).map_err(|e| e.to_string())
    }

    /// Writes directly, and closes the mount.
    fn write(&self, offset: u64) {
        let device = RemoteDevice::new(self.open(Access::ReadWrite).unwrap());
        device.write(offset, &[9; 4096]).unwrap();
        device.close().unwrap();
    }

    fn restart(&mut self) {
        let _inside = self.runtime.enter();
        let former = Arc::downgrade(&self.site.server);
        self.site.idle();
        soon("the former server has ended", || former.upgrade().is_none());
        // It lets go of its images last.
        soon("its images are closed", || self.is_closed());
        self.site.restart();
    }

    fn is_closed(&self) -> bool {
        let image = self.site.directory.path().join("overlays/web");
        ["lock", "generations.lock"].iter().all(|lock| {
            let file = File::open(image.join(lock));
            file.map_or(true, |file| file.try_lock().is_ok())
        })
    }

    fn about(&self) -> Option<About> {
        let shelf = self.shelf.0.lock();
        let digest = shelf.get(&name("web")).map(|base| base.digest);
        let digest = digest.unwrap_or_default();
        generations_on_disk(self.site.directory.path(), &name("web"), digest).unwrap()
    }

    /// What the map says, of these contents, once nobody has it open.
    fn summary(&self, digest: u8, edition: u64, epoch: u64) -> Option<Summary> {
        let path = self.site.directory.path().join("overlays/web");
        let now = Contents::from(lease::Identity {
            digest: Digest([digest; 32]),
            edition,
            epoch,
        });
        let seed = self.about()?.seed;
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(path.join(FILE_NAME), copy.path().join(FILE_NAME)).unwrap();
        let copy = Arc::new(HostDirectory::open(copy.path()).unwrap());
        let opened = Generations::open(copy, SIZE as u64, now).unwrap();
        opened.summary().filter(|summary| summary.seed == seed)
    }
}

#[test]
fn what_mounts_write_is_recorded_and_believed_when_they_have_left() {
    let mut world = World::new();
    world.open(Access::ReadOnly).unwrap();
    assert_eq!(world.about(), None, "only writers have generations");
    world.restart();
    world.write(CHUNK);
    let about = world.about().unwrap();
    assert_eq!((about.generation, about.frozen), (Generation(1), false));
    // By epochs, which the same mount stages and commits.
    let client = world.open(Access::ReadWrite).unwrap();
    let next = client.committed().after(0);
    let changes = vec![
        Change::Zero(3 * CHUNK, 8192),
        Change::Write(4 * CHUNK, vec![3; 4096].into()),
    ];
    wait(|done| client.push(next, changes, done)).unwrap();
    wait(|done| client.commit(next, 12_288, done)).unwrap();
    // Killed now, it is believed of any later epoch of this writer.
    let newer = [CHUNK..2 * CHUNK, 3 * CHUNK..5 * CHUNK];
    for epoch in [next, Epoch(next.0 + 7)] {
        let killed = world.summary(7, 2, epoch.0).unwrap();
        let found = killed.newer_than(Generation(0));
        for newer in &newer {
            assert!(
                found
                    .iter()
                    .any(|f| f.start <= newer.start && f.end >= newer.end)
            );
        }
    }
    assert_eq!(world.summary(7, 1, next.0), None, "of another writer");
    client.close_now().unwrap();
    drop(client);
    world.restart();
    let closed = world.summary(7, 2, next.0).unwrap();
    assert_eq!(closed.newer_than(Generation(0)), newer);
    assert_eq!(
        world.summary(7, 2, next.0 + 1),
        None,
        "written to behind its back"
    );
    // The next writer goes on with it.
    world.write(0);
    world.restart();
    assert_eq!(world.about(), Some(about));
}

#[test]
fn a_frozen_image_is_read_only_until_it_is_thawed() {
    let mut world = World::new();
    let web = name("web");
    world.write(CHUNK);
    let before = world.about().unwrap();
    let client = world.open(Access::ReadWrite).unwrap();
    let held = world.site.server.freeze(&web).unwrap_err().to_string();
    assert!(held.contains("mounted by nantes"), "{held}");
    client.close_now().unwrap();
    drop(client);
    world.restart();
    let about = world.site.server.freeze(&web).unwrap();
    assert_eq!((about.seed, about.frozen), (before.seed, true));
    assert_eq!(world.site.server.freeze(&web).unwrap(), about, "idempotent");
    for _ in 0..2 {
        let refused = world.open(Access::ReadWrite).err().unwrap();
        assert!(refused.contains("web is frozen"), "{refused}");
        assert!(refused.contains("drover mounts break web"), "{refused}");
        let reader = world.open(Access::ReadOnly).unwrap();
        reader.close_now().unwrap();
    }
    let leased = world.site.server.leased(&web).unwrap();
    let holder = leased.and_then(|leased| leased.holder);
    assert_eq!(holder, None, "no lease was granted");
    assert!(world.site.server.thaw(&web).unwrap());
    assert!(!world.site.server.thaw(&web).unwrap());
    world.write(0);
    let about = world.about().unwrap();
    assert_eq!((about.seed, about.generation), (before.seed, Generation(2)));
}

#[test]
fn an_image_that_was_never_written_can_be_frozen_and_one_that_is_gone_thawed() {
    let world = World::new();
    let web = name("web");
    assert!(world.site.server.freeze(&web).unwrap().frozen);
    assert!(world.open(Access::ReadWrite).is_err());
    world.shelf.0.lock().clear();
    assert!(world.site.server.thaw(&web).unwrap());
    assert_eq!(world.about(), None);
}

#[test]
fn another_image_of_that_name_is_not_frozen() {
    let mut world = World::new();
    for is_written in [false, true] {
        if is_written {
            world.write(0);
            world.restart();
        }
        assert!(world.site.server.freeze(&name("web")).unwrap().frozen);
        let digest = Digest([8 + u8::from(is_written); 32]);
        world.shelf.0.lock().get_mut(&name("web")).unwrap().digest = digest;
        assert_eq!(world.about(), None);
        world.write(0);
        world.restart();
    }
}

#[test]
fn damaged_generations_keep_writers_out_until_they_are_removed() {
    let mut world = World::new();
    let web = name("web");
    world.write(0);
    world.restart();
    let path = world
        .site
        .directory
        .path()
        .join("overlays/web")
        .join(FILE_NAME);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[70] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let refused = world.open(Access::ReadWrite).err().unwrap();
    assert!(refused.contains("drover mounts break web"), "{refused}");
    assert!(!refused.contains("overlays"), "no path is told: {refused}");
    world.open(Access::ReadOnly).unwrap().close_now().unwrap();
    assert!(world.site.server.thaw(&web).unwrap());
    world.write(0);
}

#[test]
fn changes_that_become_part_of_the_image_keep_its_generations_and_dropped_ones_do_not() {
    for (how, kept) in [
        (ClaimEnd::Merged(Digest([8; 32])), true),
        // Another image has taken the name.
        (ClaimEnd::Merged(Digest([9; 32])), false),
        (ClaimEnd::Dropped, false),
        (ClaimEnd::Kept, true),
    ] {
        let mut world = World::new();
        let web = name("web");
        world.write(CHUNK);
        world.restart();
        let seed = world.about().unwrap().seed;
        let peer = Peer {
            key: Identity::generate().key(),
            name: "the site itself".into(),
            rights: Rights::OWNER,
            domain: "default".into(),
        };
        let claim = world
            .site
            .server
            .claim(&web, peer, MountId([5; 16]), "a merge")
            .unwrap();
        if how != ClaimEnd::Kept && how != ClaimEnd::Dropped {
            let mut shelf = world.shelf.0.lock();
            shelf.get_mut(&web).unwrap().digest = Digest([8; 32]);
        }
        assert!(claim.end(how).unwrap());
        world.restart();
        world.write(3 * CHUNK);
        world.restart();
        assert_eq!(world.about().unwrap().seed == seed, kept, "{how:?}");
    }
}
