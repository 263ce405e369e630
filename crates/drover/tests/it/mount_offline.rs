//! Mounts whose daemon or site is gone: no written data is lost, and there is only one writer.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::world::{Ran, Site, World, signal, until};

/// Blocks of random data in the image.
const BLOCKS: usize = 64;

/// The mounts of a test; their daemons end with the test, also after a panic.
struct Mounts<'a> {
    world: &'a World,
    home: &'a str,
}

impl Mounts<'_> {
    fn run(&self, args: &[&str]) -> Ran {
        self.world.run(self.home, args)
    }

    /// The status of the only mount.
    fn only(&self) -> Value {
        let rows = self.run(&["mounts", "--json"]).ok().json();
        assert_eq!(rows.len(), 1, "{rows:?}");
        rows.into_iter().next().unwrap()
    }

    /// Kills the daemon of the only mount, and waits until it is reported dead.
    fn kill(&self) -> Value {
        let process = self.only()["process"].as_u64().unwrap();
        assert!(process > 1);
        signal(process as u32, "KILL");
        until("the mount is dead", || self.only()["state"] == "dead");
        self.only()
    }
}

impl Drop for Mounts<'_> {
    fn drop(&mut self) {
        let Ok(listed) = self.world.drover(self.home, &["mounts", "--json"]).output() else {
            return;
        };
        for line in String::from_utf8_lossy(&listed.stdout).lines() {
            let Ok(row) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let name = row["name"].as_str().unwrap_or_default().to_owned();
            let args = ["unmount", &name, "--discard", "--lazy", "--yes"];
            let _ = self.world.drover(self.home, &args).output();
        }
    }
}

fn can_mount() -> bool {
    let can = Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("SKIP: /dev/fuse is not there");
    }
    can
}

/// A world with a site `far` that has the image `web.img`, and a home `near` that is paired with it.
fn world() -> (World, Site, Vec<u8>) {
    let world = World::new();
    let path = world.image("web.img", 7, BLOCKS);
    let far = world.pair();
    world.run("far", &["index", "web.img"]).ok();
    (world, far, fs::read(path).unwrap())
}

fn write(path: &Path, byte: u8, block: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[byte; 4096], block * 4096).unwrap();
    file.sync_all().unwrap();
}

fn leases(world: &World) -> Vec<Value> {
    world
        .run("far", &["mounts", "leases", "--json"])
        .ok()
        .json()
}

fn disk(world: &World) -> PathBuf {
    world.path("disk")
}

#[test]
fn a_dead_mount_is_pushed_before_it_is_removed() {
    if !can_mount() {
        return;
    }
    let (world, far, mut content) = world();
    let near = Mounts {
        world: &world,
        home: "near",
    };
    let mount = ["mount", "far:web.img", "disk", "--push-interval", "1h"];
    near.run(&mount).ok();
    let disk = disk(&world);
    assert!(fs::read(&disk).unwrap() == content);
    write(&disk, 0xa5, 3);
    content[3 * 4096..4 * 4096].fill(0xa5);
    // The cache map is saved every 5 s; the kernel reads ahead of the test, and would wait for the site.
    std::thread::sleep(std::time::Duration::from_secs(7));
    let dead = near.kill();
    assert_eq!(dead["disks"][0]["dirty"], 4096, "{dead}");

    // Without the site it must stay: nothing may be removed.
    let (code, _) = far.stop();
    assert_eq!(code, Some(0));
    let name = dead["name"].as_str().unwrap();
    near.run(&["unmount", name])
        .fails(1, &["nothing is lost", "try again"]);
    assert_eq!(near.only()["disks"][0]["dirty"], 4096);
    let kept = near.run(&["unmount", name, "--offline"]).ok();
    assert!(kept.err.contains("not pushed"), "{kept:?}");
    assert_eq!(near.only()["disks"][0]["dirty"], 4096);

    // The mount starts without the site, and cached data can be read.
    near.run(&mount).ok();
    // After a kill it is unknown which parts of the chunk were written: all of it is dirty.
    assert_eq!(near.only()["disks"][0]["dirty"], 65536);
    // (Chunks fetched shortly before the kill are not in the saved map, and would wait for the site.)
    let mut here = vec![0; 65536];
    File::open(&disk)
        .unwrap()
        .read_exact_at(&mut here, 0)
        .unwrap();
    assert!(here == content[..65536]);
    write(&disk, 0x5a, 9);
    content[9 * 4096..10 * 4096].fill(0x5a);
    near.kill();

    // With the site back, the data is pushed and the lease released.
    let _far = world.process("far", &["serve", "--listen", &address(&world)]);
    assert_eq!(leases(&world).len(), 1);
    near.run(&["unmount", name]).ok();
    assert!(near.run(&["mounts", "--json"]).ok().json().is_empty());
    assert!(leases(&world).is_empty());
    near.run(&["mount", "far:web.img", "disk", "--read-only"])
        .ok();
    assert!(fs::read(&disk).unwrap() == content);
    near.run(&["unmount", "disk"]).ok();
}

/// The first listen address of `far`, where it comes back.
fn address(world: &World) -> String {
    let peers = world.run("near", &["peers", "--json"]).ok().json();
    let addresses = peers[0]["addresses"].as_array().unwrap();
    let local = addresses.iter().filter_map(Value::as_str);
    let mut local = local.filter(|a| a.starts_with("127."));
    local.next().unwrap().to_owned()
}

#[test]
fn a_mount_that_never_was_needs_the_site_and_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let (world, far, _) = world();
    let near = Mounts {
        world: &world,
        home: "near",
    };
    near.run(&["mount", "far:other.img", "disk"])
        .fails(3, &["other.img"]);
    assert!(near.run(&["mounts", "--json"]).ok().json().is_empty());
    far.stop();
    near.run(&["mount", "far:web.img", "disk"])
        .fails(1, &["cannot open web.img at far", "drover serve"]);
    assert!(near.run(&["mounts", "--json"]).ok().json().is_empty());
}

#[test]
fn own_images_obey_the_same_leases() {
    if !can_mount() {
        return;
    }
    let (world, far, content) = world();
    let near = Mounts {
        world: &world,
        home: "near",
    };
    let own = Mounts {
        world: &world,
        home: "far",
    };
    let disk = disk(&world);
    // Through the running site.
    own.run(&["mount", "web.img", "own"]).ok();
    assert_eq!(own.only()["disks"][0]["mode"], "own");
    let path = world.path("own");
    assert!(fs::read(&path).unwrap() == content);
    write(&path, 1, 5);
    assert_eq!(leases(&world)[0]["writer"]["peer"], "the site itself");
    near.run(&["mount", "far:web.img", "disk"])
        .fails(3, &["web.img"]);
    own.run(&["unmount", "own"]).ok();
    assert!(leases(&world).is_empty());
    // A peer holds the write lease: this site must be refused.
    near.run(&["mount", "far:web.img", "disk"]).ok();
    assert!(fs::read(&disk).unwrap()[5 * 4096] == 1);
    own.run(&["mount", "web.img", "own"]).fails(3, &["web.img"]);
    near.run(&["unmount", "disk"]).ok();
    // Without a running site, within the process.
    far.stop();
    own.run(&["mount", "web.img", "own"]).ok();
    assert_eq!(fs::read(&path).unwrap()[5 * 4096], 1);
    write(&path, 2, 6);
    own.run(&["unmount", "own"]).ok();
    assert!(leases(&world).is_empty());
    own.run(&["mount", "web.img", "own", "--read-only"]).ok();
    assert_eq!(fs::read(&path).unwrap()[6 * 4096], 2);
    own.run(&["unmount", "own"]).ok();
}

#[test]
fn an_own_image_of_a_domain_is_mounted() {
    if !can_mount() {
        return;
    }
    let (world, far, default) = world();
    let far_run = |args: &[&str]| world.run("far", args);
    far_run(&["domains", "add", "acme"]).ok();
    // Another image of the same name.
    fs::create_dir(world.path("acme")).unwrap();
    let image = world.image("acme/web.img", 8, BLOCKS);
    let file = format!("file:{}", image.display());
    let content = fs::read(&image).unwrap();
    let own = Mounts {
        world: &world,
        home: "far",
    };
    let path = world.path("own");
    let index = ["index", "acme/web.img", "--domain", "acme"];
    own.run(&["mount", &file, "own"]).ok();
    far_run(&index).fails(3, &["web.img", "is mounted for writing"]);
    own.run(&["unmount", "own"]).ok();
    far_run(&index).ok();
    own.run(&["mount", &file, "own"])
        .fails(3, &["`drover mount web.img --domain acme`"]);

    let mount = |options: &[&str]| own.run(&[&["mount", "web.img", "own"], options].concat());
    let acme = ["--domain", "acme"];
    mount(&["--domain", "nowhere"]).fails(3, &["no domain is called \"nowhere\""]);
    own.run(&["mount", "lyon:web.img", "own", "--domain", "acme"])
        .fails(2, &["--domain is for images of this site"]);
    mount(&[]).ok();
    assert!(fs::read(&path).unwrap() == default);
    own.run(&["unmount", "own"]).ok();
    mount(&acme).ok();
    let row = own.only();
    assert_eq!(
        (&row["disks"][0]["image"], &row["disks"][0]["mode"]),
        (&"acme/web.img".into(), &"own".into())
    );
    assert!(fs::read(&path).unwrap() == content);
    write(&path, 1, 5);
    let held = leases(&world);
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!(
        (&held[0]["domain"], &held[0]["writer"]["peer"]),
        (&"acme".into(), &"the site itself".into())
    );
    // Its process is gone: the record says where the lease is.
    own.kill();
    own.run(&["unmount", "own"]).ok();
    assert!(leases(&world).is_empty());
    let changes = |options: &[&str]| {
        let listed = far_run(&[&["changes", "--json"], options].concat());
        listed.ok().json().len()
    };
    assert_eq!((changes(&[]), changes(&acme)), (0, 1));
    // Without a running site, and as another front end.
    far.stop();
    mount(&acme).ok();
    assert_eq!(fs::read(&path).unwrap()[5 * 4096], 1);
    own.run(&["unmount", "own"]).ok();
    let socket = format!("unix:{}", world.path("own.sock").display());
    let export = ["export", "web.img", "--nbd", &socket, "--background"];
    own.run(&[&export[..], &acme].concat()).ok();
    assert_eq!(own.only()["disks"][0]["image"], "acme/web.img");
    own.run(&["unmount", world.path("own.sock").to_str().unwrap()])
        .ok();
}
