//! A machine whose disk is an image of a third site: it is not copied; the other site mounts it, too, and gets the write lease.

use std::path::PathBuf;

use drover_device::backend::nbd::{NbdAddress, NbdSocket};

use super::faults::Held;
use super::several_disks::{launch, stub};
use super::*;
use crate::mount::clear_all;
use crate::world::signal;

/// The sites, and `hub` with the machine's disk.
struct Hub {
    sites: Sites,
}

impl Drop for Hub {
    fn drop(&mut self) {
        for home in ["near", "far"] {
            clear_all(&self.sites.world.path(home).join("mounts"));
        }
    }
}

impl Hub {
    /// `peers` are those that may use the disk.
    fn new(test: &str, peers: &[&str]) -> Option<Hub> {
        let homes = ["near", "far"].map(|home| (home, own_address(), &[][..]));
        let mut sites = Sites::among(test, World::new(), &homes)?;
        let world = &sites.world;
        let disk = world.path("disk.raw");
        fs::File::create(&disk).unwrap().set_len(SIZE).unwrap();
        world.run("hub", &["init"]).ok();
        world.run("hub", &["index", disk.to_str().unwrap()]).ok();
        let address = own_address().to_string();
        let site = world.process("hub", &["serve", "--listen", &address]);
        sites.running.insert("hub", (site, address));
        let hub = Hub { sites };
        peers.iter().for_each(|peer| hub.pair(peer));
        Some(hub)
    }

    fn pair(&self, peer: &str) {
        let ticket = self.sites.world.run("hub", &["ticket"]).ok().out;
        let pair = ["pair", ticket.trim(), "--name", "hub"];
        self.sites.world.run(peer, &pair).ok();
    }

    fn socket(&self) -> PathBuf {
        self.sites.world.path("disk.sock")
    }

    /// Mounts the disk at `near`.
    fn export(&self) {
        let listen = format!("unix:{}", self.socket().display());
        let export = ["export", "hub:disk.raw", "--nbd", &listen, "--background"];
        self.sites.world.run("near", &export).ok();
    }

    /// The bytes of the mount, as a node.
    fn node(&self, name: &str) -> Node {
        Node::Nbd {
            name: name.into(),
            address: NbdAddress {
                socket: NbdSocket::Unix(self.socket()),
                export: "disk.raw".into(),
            },
            reconnect: std::time::Duration::from_secs(60),
        }
    }

    /// The machine at `near`, with that as its disk.
    async fn start(&self) -> Qemu {
        self.export();
        let launch = self.sites.launch(&[self.node("file"), raw("file")]);
        let mut machine = launch.start(&self.sites.world.path(""), "web-near");
        machine.machine().await;
        machine.wait_said("beat", 20).await;
        machine
    }

    /// The states of the mounts of a site.
    fn mounts(&self, home: &str) -> Vec<String> {
        let listed = self.sites.world.run(home, &["mounts", "--json"]).ok();
        let states = listed.json().into_iter();
        states
            .map(|mount| mount["state"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Begins to migrate, and kills the command when the machine was taken and its disk was not handed over.
    fn taken(&self) {
        let sites = &self.sites;
        let path = sites.world.path("leases");
        let args = ["migrate", &sites.hypervisor("near"), "far", "--json"];
        let mut command = sites.world.drover("near", &args);
        command.env("DROVER_TEST_HOLD", format!("leases:{}", path.display()));
        let moving = Moving::spawn(command);
        let held = format!("{}.held", path.display());
        until("it was taken", || std::path::Path::new(&held).exists());
        moving.kill();
        assert_eq!(
            (sites.state("near"), sites.state("far")),
            ("committed".into(), "here".into())
        );
    }

    /// The process of the only mount of a site.
    fn process(&self, home: &str) -> u32 {
        let listed = self.sites.world.run(home, &["mounts", "--json"]).ok();
        let process = listed.json()[0]["process"].as_u64().unwrap();
        assert!(process > 1, "it has none");
        process.try_into().unwrap()
    }

    /// The guest writes on at the destination.
    async fn writes_on(&self, there: &mut Qemu) {
        let last = there.said("beat").unwrap();
        there.wait_said("beat", last + 20).await;
        assert!(there.verify().await >= last + 20);
    }

    /// Who holds the write lease, as `hub` calls it.
    fn holder(&self) -> Value {
        let leases = ["mounts", "leases", "--json"];
        let leases = self.sites.world.run("hub", &leases).ok().json();
        leases[0]["writer"]["peer"].clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disk_of_a_third_site_is_handed_over_and_back() {
    let test = "the_disk_of_a_third_site_is_handed_over_and_back";
    let Some(hub) = Hub::new(test, &["near", "far"]) else {
        return;
    };
    let sites = &hub.sites;
    let mut here = hub.start().await;
    let dry = ["migrate", &sites.hypervisor("near"), "far", "--dry-run"];
    let said = sites.world.run("near", &dry).ok().out;
    assert!(said.contains("hub:disk.raw not copied"), "{said}");
    for (from, to) in [("near", "far"), ("far", "near"), ("near", "far")] {
        let mut there = sites.wait_for_it(to).await;
        let done = Moving::begin(sites, from, to, &[]).done();
        assert_eq!(done["handed_over"], serde_json::json!(["hub:disk.raw"]));
        assert_eq!(done["image_wire_bytes"], 0, "{done}");
        assert_eq!(done["disk_wire_bytes"], 0, "{done}");
        here.ended().await;
        goes_on(&here, &mut there).await;
        assert_eq!(
            (hub.mounts(from), hub.mounts(to)),
            (vec![], vec!["up".into()])
        );
        // None of it is an image of these sites.
        let images = sites.world.run(to, &["images", "--json"]).ok().json();
        assert!(images.is_empty(), "{images:?}");
        here = there;
    }
    // The second that paired with it, on one host.
    assert_eq!(hub.holder(), "vm-2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_was_not_handed_over_before_a_crash_is_by_the_same_command() {
    let test = "a_lease_that_was_not_handed_over_before_a_crash_is_by_the_same_command";
    let Some(hub) = Hub::new(test, &["near", "far"]) else {
        return;
    };
    let mut here = hub.start().await;
    let mut there = hub.sites.wait_for_it("far").await;
    hub.taken();
    // It waits for its disk; the source has nothing to say any more.
    assert_eq!(
        (hub.mounts("near"), hub.mounts("far")),
        (vec!["up".into()], vec!["standby".into()])
    );
    here.kill();
    Moving::begin(&hub.sites, "near", "far", &[]).done();
    goes_on(&here, &mut there).await;
    assert_eq!(
        (hub.mounts("near"), hub.mounts("far")),
        (vec![], vec!["up".into()])
    );
    assert_eq!(hub.sites.state("near"), "away");
    // The process of the mount there dies; the site starts it again, and QEMU repeats nothing that it was told is written.
    for how in ["KILL", "TERM"] {
        let killed = hub.process("far");
        signal(killed, how);
        until("it is up again", || {
            hub.mounts("far") == ["up"] && hub.process("far") != killed
        });
        hub.writes_on(&mut there).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_handed_over_without_the_process_of_the_mount() {
    let test = "a_lease_is_handed_over_without_the_process_of_the_mount";
    let Some(hub) = Hub::new(test, &["near", "far"]) else {
        return;
    };
    let mut here = hub.start().await;
    let mut there = hub.sites.wait_for_it("far").await;
    // Somebody else there wants the disk, too.
    let path = hub.sites.world.path("other.sock");
    let listen = format!("unix:{}", path.display());
    let other = ["export", "hub:disk.raw", "--nbd", &listen, "--standby"];
    let mut other = hub.sites.world.drover("far", &other);
    let mut other = other.stderr(Stdio::null()).spawn().unwrap();
    until("it stands by", || hub.mounts("far") == ["standby"]);
    hub.taken();
    // With what the machine wrote last in its cache. A signal pushes that, and returns nothing.
    signal(hub.process("near"), "TERM");
    until("it has ended", || hub.mounts("near") == ["dead"]);
    here.kill();
    Moving::begin(&hub.sites, "near", "far", &[]).done();
    goes_on(&here, &mut there).await;
    assert_eq!(hub.mounts("near").len(), 0);
    other.kill().unwrap();
    other.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_cannot_be_handed_over_any_more_is_said_to_be_lost() {
    let test = "a_lease_that_cannot_be_handed_over_any_more_is_said_to_be_lost";
    for is_person in [true, false] {
        let Some(hub) = Hub::new(test, &["near", "far"]) else {
            return;
        };
        let mut here = hub.start().await;
        let mut there = hub.sites.wait_for_it("far").await;
        hub.taken();
        here.kill();
        let world = &hub.sites.world;
        match is_person {
            true => {
                let socket = hub.socket();
                world
                    .run("near", &["unmount", socket.to_str().unwrap()])
                    .ok();
            }
            // The first that paired with it.
            false => {
                let rights = ["peers", "set", "vm", "--can", "read"];
                world.run("hub", &rights).ok();
            }
        }
        let machine = hub.sites.hypervisor("near");
        let again = ["migrate", &machine, "far", "--copy-mounts"];
        let said = world
            .run("near", &again)
            .fails(1, &["export the image"])
            .err;
        assert!(said.contains("had lost"), "{said}");
        assert_eq!(hub.sites.state("near"), "away");
        // As it says. QEMU holds the requests meanwhile.
        let socket = world.path("far/machines/.web-0.mount");
        let socket = socket.to_str().unwrap();
        world.run("far", &["unmount", socket]).ok();
        let listen = format!("unix:{socket}");
        let export = ["export", "hub:disk.raw", "--nbd", &listen, "--background"];
        world.run("far", &export).ok();
        if is_person {
            goes_on(&here, &mut there).await;
        }
        there.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_disk_and_one_that_follows() {
    let test = "a_mounted_disk_and_one_that_follows";
    let Some(hub) = Hub::new(test, &["near", "far"]) else {
        return;
    };
    let sites = &hub.sites;
    let directory = sites.world.path("");
    hub.export();
    let path = sites.world.path("web-1.raw");
    fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let file = |path| Node::File {
        name: "file1".into(),
        path,
    };
    let ids = ["vd0", "vd1"];
    let mut here =
        launch(sites, [hub.node("file0"), file(path)], ids).start(&directory, "web-near");
    here.machine().await;
    here.wait_said("beat", 20).await;
    for (from, to) in [("near", "far"), ("far", "near")] {
        let waiting = launch(sites, [stub(0, SIZE), stub(1, SIZE)], ids).incoming();
        let mut there = waiting.start(&directory, &format!("web-{to}"));
        there.machine().await;
        let options = ["--post-copy", "at-once"];
        let done = Moving::begin(sites, from, to, &options).done();
        assert_eq!(done["handed_over"], serde_json::json!(["hub:disk.raw"]));
        here.ended().await;
        goes_on(&here, &mut there).await;
        assert_eq!(hub.mounts(to), ["up"]);
        let images = sites.world.run(to, &["images"]).ok().out;
        assert!(images.contains("web-0.raw"), "{images}");
        here = there;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_stays_keeps_the_lease_of_its_disk() {
    let test = "a_machine_that_stays_keeps_the_lease_of_its_disk";
    let Some(mut hub) = Hub::new(test, &["near"]) else {
        return;
    };
    let mut here = hub.start().await;
    let mut there = hub.sites.wait_for_it("far").await;
    // The other site does not know who has the disk.
    let err = Moving::begin(&hub.sites, "near", "far", &[]).fails();
    assert!(
        err.contains("drover pair") && err.contains("--copy-mounts"),
        "{err}"
    );
    hub.pair("far");
    let mut moving = Moving::begin(&hub.sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    assert_eq!(hub.mounts("far"), ["standby"]);
    hub.sites
        .world
        .run("near", &["migrate", "--abort", "web"])
        .ok();
    moving.fails();
    until("its mount there ends", || hub.mounts("far").is_empty());
    stays(&hub.sites, &mut here).await;
    there.kill();
    // It is refused when all of it is there.
    let held = Held::at(&mut hub.sites, "asked to take");
    let mut there = hub.sites.wait_for_it("far").await;
    let moving = Moving::begin(&hub.sites, "near", "far", &[]);
    held.reached();
    there.kill();
    held.go_on();
    moving.fails();
    stays(&hub.sites, &mut here).await;
    until("its mount there ends", || hub.mounts("far").is_empty());
    // A copy needs no mount there.
    let mut there = hub.sites.wait_for_it("far").await;
    let done = Moving::begin(&hub.sites, "near", "far", &["--copy-mounts"]).done();
    assert_eq!(done["handed_over"], serde_json::json!([]));
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert!(hub.mounts("far").is_empty());
}
