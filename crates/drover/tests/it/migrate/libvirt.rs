//! Machines that libvirt manages.

use std::fs;

use drover_hypervisor::testing::{Libvirt, Qemu};

use super::faults::Held;
use super::{Moving, SIZE, Sites};
use crate::world::{World, own_address, until};

/// Two sites, each with a libvirt.
struct Managed {
    // Dropped before the directory of all.
    near: Libvirt,
    far: Libvirt,
    sites: Sites,
}

impl Managed {
    fn new(test: &str) -> Option<Managed> {
        let world = World::new();
        let near = Libvirt::start(test, &world.path("ln"))?;
        let far = Libvirt::start(test, &world.path("lf"))?;
        let homes = ["near", "far"].map(|home| (home, own_address(), &[][..]));
        let sites = Sites::expecting(test, world, &homes, |_, home| {
            let libvirt = if home == "near" { &near } else { &far };
            format!("libvirt = {:?}", libvirt.uri())
        })?;
        let managed = Managed { sites, near, far };
        let path = managed.path("web.raw");
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        managed.near.define(&managed.sites.guest, &managed.file());
        managed.define_served("far");
        Some(managed)
    }

    fn path(&self, name: &str) -> String {
        self.sites.world.path(name).display().to_string()
    }

    /// Its disk at first.
    fn file(&self) -> String {
        let path = self.path("web.raw");
        format!(
            "<disk type='file'><driver name='qemu' type='raw'/><source file='{path}'/><target dev='vda' bus='virtio'/></disk>"
        )
    }

    fn libvirt(&self, home: &str) -> &Libvirt {
        match home {
            "near" => &self.near,
            _ => &self.far,
        }
    }

    /// Defines the machine with the disk that the site serves.
    fn define_served(&self, home: &str) {
        let socket = self.path(&format!("{home}/machines/.web.nbd"));
        let disk = format!(
            "<disk type='network'><driver name='qemu' type='raw' error_policy='stop'/><source protocol='nbd' name='disk-0'>
            <host transport='unix' socket='{socket}'/></source><target dev='vda' bus='virtio'/></disk>"
        );
        self.libvirt(home).define(&self.sites.guest, &disk);
    }

    fn begin(&self, from: &str, to: &str, options: &[&str]) -> Moving {
        Moving::begin_of(&self.sites, "libvirt:web", from, to, options)
    }

    fn state(&self, home: &str) -> String {
        let state = self.libvirt(home).virsh(&["domstate", "web"]).unwrap();
        state.trim().to_owned()
    }

    /// The machine has not left: it writes on, to the disk that it had, and nothing of the migration is left.
    async fn stays(&self, console: &mut Qemu) {
        assert_eq!(self.state("near"), "running");
        assert_eq!(self.sites.state("near"), "here");
        for inactive in [false, true] {
            let disks = self.disks("near", inactive);
            assert!(disks.contains("web.raw"), "{disks}");
        }
        let work = self.sites.world.path("near/machines/.web.move");
        assert!(!work.exists());
        let beat = console.all_said("beat").last().copied().unwrap_or(0);
        console.wait_said("beat", beat + 20).await;
        assert!(console.verify().await >= beat + 20);
    }

    /// Ends the machine after a move that was killed: while it migrates, libvirt 9.0 may crash of that.
    fn switch_off(&self) {
        until("libvirt has noticed", || {
            let job = self.near.virsh(&["domjobinfo", "web"]).unwrap();
            job.contains("None")
        });
        self.near.virsh(&["destroy", "web"]).unwrap();
    }

    fn starts_with_host(&self, home: &str) -> bool {
        let told = self.libvirt(home).virsh(&["dominfo", "web"]).unwrap();
        let line = told.lines().find(|line| line.starts_with("Autostart:"));
        line.unwrap().ends_with("enable")
    }

    /// The files of its disks at a site, as they are or will be at the next start.
    fn disks(&self, home: &str, inactive: bool) -> String {
        let inactive: &[&str] = if inactive { &["--inactive"] } else { &[] };
        let listed = [&["domblklist", "web"], inactive].concat();
        self.libvirt(home).virsh(&listed).unwrap()
    }
}

#[tokio::test]
async fn a_machine_of_libvirt_moves_and_comes_back() {
    let Some(managed) = Managed::new("a_machine_of_libvirt_moves_and_comes_back") else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    let before = near.wait_said("beat", 20).await;
    let dry = ["migrate", "libvirt:web", "far", "--dry-run"];
    let said = managed.sites.world.run("near", &dry).ok().out;
    assert!(said.contains("a pause of about "), "{said}");
    assert!(
        managed.disks("near", false).contains("web.raw"),
        "untouched"
    );

    let done = managed.begin("near", "far", &[]).done();
    assert!(done["pause"]["total_ms"].as_u64().unwrap() > 0, "{done}");
    assert!(done["memory_bytes"].as_u64().unwrap() > 10 << 20, "{done}");
    assert_eq!(
        (managed.state("near"), managed.state("far")),
        ("shut off".into(), "running".into())
    );
    let mut far = managed.far.console();
    let there = far.wait_said("beat", before + 50).await;
    assert!(far.verify().await >= there);
    assert_eq!(managed.sites.state("near"), "away");
    assert_eq!(managed.sites.state("far"), "here");
    let left = managed.disks("near", true);
    assert!(
        left.contains("web.raw") && !left.contains("layer"),
        "{left}"
    );
    assert!(!managed.sites.world.path("near/machines/.web.move").exists());

    // Home, where its disk is the site's now.
    managed.define_served("near");
    managed.begin("far", "near", &[]).done();
    assert_eq!(
        (managed.state("near"), managed.state("far")),
        ("running".into(), "shut off".into())
    );
    let back = near.wait_said("beat", there + 50).await;
    assert!(near.verify().await >= back);
    assert_eq!(managed.sites.state("near"), "here");

    // Both are in the log and in the metrics.
    let world = &managed.sites.world;
    let all = ["migrate", "--list", "--all"];
    let ended = world.run("near", &[&all[..], &["--json"]].concat()).ok();
    let ended: Vec<_> = ended.json();
    let events: Vec<_> = ended.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["machine-left", "machine-arrived"]);
    let took = &ended[0]["migration"];
    assert_eq!(took["pause_ms"], done["pause"]["total_ms"]);
    assert_eq!(took["memory_bytes"], done["memory_wire_bytes"]);
    let table = world.run("near", &all).ok().out;
    assert!(
        table.contains("HAND-OVER") && table.contains("left"),
        "{table}"
    );
    let metrics = world.run("near", &["status", "--metrics"]).ok().out;
    for line in [
        "drover_migrations_total{result=\"left\"} 1",
        "drover_migrations_total{result=\"arrived\"} 1",
        "drover_migration_pause_seconds_count 1",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

/// The kernel in a machine whose memory was lost in part hangs, or is wrong.
#[tokio::test]
async fn a_machine_of_libvirt_whose_memory_would_be_lost_does_not_move() {
    let test = "a_machine_of_libvirt_whose_memory_would_be_lost_does_not_move";
    let Some(managed) = Managed::new(test) else {
        return;
    };
    let (near, world) = (&managed.near, &managed.sites.world);
    near.define_whole(&managed.sites.guest, &managed.file());
    near.virsh(&["start", "web"]).unwrap();
    let told = near.virsh(&[
        "qemu-monitor-command",
        "web",
        "{\"execute\":\"query-version\"}",
    ]);
    let told: serde_json::Value = serde_json::from_str(&told.unwrap()).unwrap();
    if told["return"]["qemu"]["major"].as_u64().unwrap() >= 9 {
        return eprintln!("SKIP {test}: a QEMU that loses nothing");
    }
    for options in [&["--dry-run"][..], &[]] {
        let migrate = [&["migrate", "libvirt:web", "far"], options].concat();
        let words = "loses what the machine writes to its memory";
        world.run("near", &migrate).fails(1, &[words]);
        assert_eq!(managed.state("near"), "running");
        assert_eq!(managed.disks("near", false), managed.disks("near", true));
    }
}

#[tokio::test]
async fn a_machine_of_libvirt_that_does_not_move_runs_on_as_it_was() {
    let Some(managed) = Managed::new("a_machine_of_libvirt_that_does_not_move_runs_on_as_it_was")
    else {
        return;
    };
    let world = &managed.sites.world;
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    managed.near.virsh(&["autostart", "web"]).unwrap();
    let untouched = || {
        assert_eq!(managed.state("near"), "running");
        assert!(managed.starts_with_host("near"));
        for inactive in [false, true] {
            let disks = managed.disks("near", inactive);
            assert!(disks.contains("web.raw"), "{disks}");
        }
        assert!(!world.path("near/machines/.web.move").exists());
    };

    // The command is killed while memory crosses, and what it began is given up.
    let slow = ["--limit", "500K"];
    let mut killed = managed.begin("near", "far", &slow);
    killed.until("event", "memory");
    killed.kill();
    assert_eq!(managed.sites.state("near"), "leaving");
    world.run("near", &["migrate", "--abort", "web"]).ok();
    untouched();

    // It is told to stop then.
    let mut aborted = managed.begin("near", "far", &slow);
    aborted.until("event", "memory");
    world.run("near", &["migrate", "--abort", "web"]).ok();
    aborted.fails();
    untouched();
    assert_eq!(managed.state("far"), "shut off");

    // The machine there runs, or has other disks.
    let own = managed.path("own.raw");
    fs::File::create(&own).unwrap().set_len(SIZE).unwrap();
    let disk =
        format!("<disk type='file'><source file='{own}'/><target dev='vda' bus='virtio'/></disk>");
    managed.far.define(&managed.sites.guest, &disk);
    let err = managed.begin("near", "far", &[]).fails();
    assert!(err.contains("must be drover's there"), "{err}");
    assert!(err.contains("machines/.web.nbd"), "{err}");
    managed.far.virsh(&["start", "web"]).unwrap();
    let err = managed.begin("near", "far", &[]).fails();
    assert!(err.contains("is not off"), "{err}");
    managed.far.virsh(&["suspend", "web"]).unwrap();
    let err = managed.begin("near", "far", &[]).fails();
    assert!(err.contains("is not off"), "{err}");
    assert_eq!(
        managed.state("far"),
        "paused",
        "another machine is not touched"
    );
    untouched();
    let beat = near.wait_said("beat", 0).await;
    near.wait_said("beat", beat + 20).await;
    near.verify().await;
    let listed = ["migrate", "--list", "--all", "--json"];
    let ended = world.run("near", &listed).ok().json();
    assert!(
        ended.iter().all(|end| end["event"] == "machine-stayed"),
        "{ended:?}"
    );
    assert_eq!(ended.len(), 4, "{ended:?}");
}

#[tokio::test]
async fn a_machine_of_libvirt_that_was_taken_runs_when_the_site_is_back() {
    let Some(mut managed) =
        Managed::new("a_machine_of_libvirt_that_was_taken_runs_when_the_site_is_back")
    else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    let before = near.wait_said("beat", 20).await;
    let crash = [("DROVER_TEST_CRASH", "taken")];
    managed.sites.restart_with("far", &crash);
    let moving = managed.begin("near", "far", &[]);
    managed.sites.site("far").wait();
    // It has arrived: libvirt keeps it, paused.
    assert_eq!(managed.state("far"), "paused");
    assert_eq!(managed.state("near"), "paused");
    managed.sites.serve_again("far", &[]);
    moving.done();
    assert_eq!(
        (managed.state("near"), managed.state("far")),
        ("shut off".into(), "running".into())
    );
    let mut far = managed.far.console();
    let there = far.wait_said("beat", before + 50).await;
    assert!(far.verify().await >= there);
    assert!(managed.disks("near", true).contains("web.raw"));
    // The same while it runs, also when libvirt is started after the site.
    managed.far.stop();
    managed.sites.restart("far");
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    managed.far.start_again();
    let there = far.all_said("beat").last().copied().unwrap_or(there);
    far.wait_said("beat", there + 100).await;
    far.verify().await;
}

#[tokio::test]
async fn a_machine_of_libvirt_runs_on_when_the_end_of_its_migration_fails() {
    let test = "a_machine_of_libvirt_runs_on_when_the_end_of_its_migration_fails";
    let Some(mut managed) = Managed::new(test) else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    // While libvirt performs it.
    let mut moving = managed.begin("near", "far", &["--limit", "500K"]);
    moving.until("event", "memory");
    managed.far.virsh(&["destroy", "web"]).unwrap();
    moving.fails();
    managed.stays(&mut near).await;
    // When all has left; and when all has arrived.
    for place in ["arriving", "asked to take"] {
        let held = Held::at(&mut managed.sites, place);
        let moving = managed.begin("near", "far", &[]);
        held.reached();
        assert_eq!(managed.state("near"), "paused", "{place}");
        managed.far.virsh(&["destroy", "web"]).unwrap();
        held.go_on();
        moving.fails();
        managed.stays(&mut near).await;
    }
    managed.sites.restart("far");
    managed.begin("near", "far", &[]).done();
}

#[tokio::test]
async fn what_a_machine_of_libvirt_wrote_during_a_failed_migration_is_kept() {
    let test = "what_a_machine_of_libvirt_wrote_during_a_failed_migration_is_kept";
    let Some(mut managed) = Managed::new(test) else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    let slow = ["--limit", "500K"];

    // The machine is switched off: what it wrote is in its layers.
    let mut moving = managed.begin("near", "far", &slow);
    moving.until("event", "memory");
    moving.kill();
    managed.switch_off();
    assert_eq!(managed.sites.state("near"), "leaving");
    let world = &managed.sites.world;
    let abort = ["migrate", "--abort", "web"];
    world.run("near", &abort).fails(1, &["virsh start web"]);
    assert!(managed.disks("near", true).contains("drover-layer"));
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    world.run("near", &abort).ok();
    managed.stays(&mut near).await;

    // libvirt cannot put the disks back.
    let mut moving = managed.begin("near", "far", &slow);
    moving.until("event", "memory");
    managed.near.stop();
    managed.near.start_again();
    moving.fails();
    assert_eq!(managed.sites.state("near"), "leaving");
    assert!(managed.disks("near", false).contains("drover-layer"));
    near.verify().await;

    // The next migration does.
    managed.begin("near", "far", &[]).done();
    let mut far = managed.far.console();
    let beat = far.wait_said("beat", 20).await;
    assert!(far.verify().await >= beat);
    assert!(managed.disks("near", true).contains("web.raw"));
}

#[tokio::test]
async fn a_machine_of_libvirt_that_is_still_coming_does_not_leave() {
    let test = "a_machine_of_libvirt_that_is_still_coming_does_not_leave";
    let Some(mut managed) = Managed::new(test) else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    let crash = [("DROVER_TEST_CRASH", "asked to take")];
    managed.sites.restart_with("far", &crash);
    let moving = managed.begin("near", "far", &[]);
    managed.sites.site("far").wait();
    assert_eq!(managed.state("far"), "paused");
    let leave = ["migrate", "libvirt:web", "near"];
    let world = &managed.sites.world;
    world
        .run("far", &leave)
        .fails(3, &["being received from near"]);
    assert_eq!(managed.state("far"), "paused");
    managed.sites.serve_again("far", &[]);
    moving.fails();
    assert_eq!(managed.state("far"), "shut off");
    managed.stays(&mut near).await;
}

#[tokio::test]
async fn a_machine_of_libvirt_that_was_handed_over_does_not_start_with_its_host() {
    let test = "a_machine_of_libvirt_that_was_handed_over_does_not_start_with_its_host";
    let Some(mut managed) = Managed::new(test) else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    managed.near.virsh(&["autostart", "web"]).unwrap();
    let before = managed.near.console().wait_said("beat", 20).await;
    managed
        .sites
        .restart_with("far", &[("DROVER_TEST_CRASH", "taken")]);
    let moving = managed.begin("near", "far", &[]);
    managed.sites.site("far").wait();
    moving.kill();
    assert_eq!(managed.sites.state("near"), "committed");
    assert!(!managed.starts_with_host("near"));
    // Somebody starts it nevertheless: it is ended as soon as the other site has answered.
    managed.near.virsh(&["destroy", "web"]).unwrap();
    managed.near.virsh(&["start", "web"]).unwrap();
    managed.sites.serve_again("far", &[]);
    managed.begin("near", "far", &[]).done();
    assert_eq!(
        (managed.state("near"), managed.state("far")),
        ("shut off".into(), "running".into())
    );
    assert!(!managed.starts_with_host("near"));
    let mut far = managed.far.console();
    let there = far.wait_said("beat", before + 50).await;
    assert!(far.verify().await >= there);
}

#[tokio::test]
async fn a_machine_of_libvirt_runs_on_when_the_directory_of_its_layers_is_full() {
    let test = "a_machine_of_libvirt_runs_on_when_the_directory_of_its_layers_is_full";
    let Some(managed) = Managed::new(test) else {
        return;
    };
    let scratch = managed.path("small");
    fs::create_dir(&scratch).unwrap();
    let options = ["-t", "tmpfs", "-o", "size=512k,mode=777", "none", &scratch];
    let mount = std::process::Command::new("mount").args(options).output();
    if !mount.is_ok_and(|mount| mount.status.success()) {
        eprintln!("SKIP {test}: no tmpfs");
        return;
    }
    let unmount = Unmount(scratch.clone());
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    let slow = ["--limit", "100K", "--scratch", &scratch];
    let err = managed.begin("near", "far", &slow).fails();
    assert!(err.contains("is full"), "{err}");
    managed.stays(&mut near).await;
    drop(unmount);
}

struct Unmount(String);

impl Drop for Unmount {
    fn drop(&mut self) {
        let mut unmount = std::process::Command::new("umount");
        unmount.args(["-l", &self.0]).status().ok();
    }
}

#[tokio::test]
async fn a_machine_that_libvirt_does_not_know_any_more_is_given_up() {
    let test = "a_machine_that_libvirt_does_not_know_any_more_is_given_up";
    let Some(managed) = Managed::new(test) else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    managed.near.console().wait_said("beat", 20).await;
    let mut moving = managed.begin("near", "far", &["--limit", "500K"]);
    moving.until("event", "memory");
    moving.kill();
    managed.switch_off();
    managed.near.virsh(&["undefine", "web"]).unwrap();
    let world = &managed.sites.world;
    world.run("near", &["migrate", "--abort", "web"]).ok();
    assert_eq!(managed.sites.state("near"), "here");
    // Nobody else has what it wrote.
    let layer = world.path("near/machines/.web.move/drover-layer-web-0.qcow2");
    assert!(layer.exists());
    world
        .run("near", &["migrate", "libvirt:web", "far"])
        .fails(1, &["has no machine called web"]);
    // One that config.toml does not name.
    let mut other = world.drover("near", &["migrate", "libvirt:db", "far"]);
    let other = other.env("LIBVIRT_DEFAULT_URI", "xen:///system").output();
    let err = String::from_utf8(other.unwrap().stderr).unwrap();
    assert!(
        err.contains("LIBVIRT_DEFAULT_URI") && err.contains("xen"),
        "{err}"
    );
}

/// A machine of libvirt as a source of snapshots: by its QEMU, through libvirt, which notices nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_libvirt_is_kept_in_a_vault() {
    let Some(managed) = Managed::new("a_machine_of_libvirt_is_kept_in_a_vault") else {
        return;
    };
    let world = &managed.sites.world;
    world.run("near", &["vault", "init", "store"]).ok();
    let snapshot = ["snapshot", "libvirt:web", "--json"];
    world.run("near", &snapshot).fails(1, &["not running"]);
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut console = managed.near.console();
    let mut read = Vec::new();
    for _ in 0..2 {
        let last = console.all_said("beat").last().copied().unwrap_or(0);
        let before = console.wait_said("beat", last + 20).await;
        let made = world.run("near", &snapshot).ok().json();
        let made = made
            .iter()
            .find(|event| event["event"] == "snapshot")
            .unwrap();
        assert_eq!(
            (&made["name"], &made["frozen"]),
            (&"web".into(), &false.into())
        );
        read.push(made["read_bytes"].as_u64().unwrap());
        let after = console.all_said("beat").last().copied().unwrap();
        world
            .run("near", &["restore", "web@latest", "restored.raw"])
            .ok();
        let disk = fs::read(world.path("restored.raw")).unwrap();
        fs::remove_file(world.path("restored.raw")).unwrap();
        let kept = super::replicas::newest(&disk);
        assert!(
            (before..=after + 1).contains(&kept),
            "{before} {kept} {after}"
        );
    }
    // The second one reads what was written since.
    assert!(read[0] == SIZE && read[1] < SIZE, "{read:?}");
    world
        .run("near", &[&snapshot[..], &["--freeze", "always"]].concat())
        .fails(2, &["domfsfreeze"]);
    // Nothing of it is left but what records, and that goes too; libvirt can do with the machine what it could.
    world
        .run("near", &[&snapshot[..], &["--once"]].concat())
        .ok();
    let ask = [
        "qemu-monitor-command",
        "web",
        "{\"execute\":\"query-named-block-nodes\"}",
    ];
    let nodes = managed.near.virsh(&ask).unwrap();
    assert!(!nodes.contains("drover-"), "{nodes}");
    managed.near.virsh(&["suspend", "web"]).unwrap();
    managed.near.virsh(&["resume", "web"]).unwrap();
    let last = console.all_said("beat").last().copied().unwrap();
    console.wait_said("beat", last + 20).await;
    assert!(console.verify().await >= last);
}

#[tokio::test]
async fn a_machine_of_libvirt_with_two_disks_and_a_seed_moves_and_comes_back() {
    let test = "a_machine_of_libvirt_with_two_disks_and_a_seed_moves_and_comes_back";
    let Some(managed) = Managed::new(test) else {
        return;
    };
    // Each site has a cloud-init seed of its own.
    let seed = |home: &str| {
        let path = managed.path(&format!("seed-{home}.iso"));
        fs::write(&path, home.repeat(2048)).unwrap();
        format!(
            "<disk type='file' device='cdrom'><driver name='qemu' type='raw'/><source file='{path}'/><target dev='hdc' bus='ide'/><readonly/></disk>"
        )
    };
    let second = managed.path("second.qcow2");
    let size = SIZE.to_string();
    let mut create = std::process::Command::new("qemu-img");
    let created = create.args(["create", "-q", "-f", "qcow2", &second, &size]);
    assert!(created.status().unwrap().success());
    let own = format!(
        "<disk type='file'><driver name='qemu' type='raw'/><source file='{}'/><target dev='vda' bus='virtio'/></disk>
        <disk type='file'><driver name='qemu' type='qcow2'/><source file='{second}'/><target dev='vdb' bus='virtio'/></disk>{}",
        managed.path("web.raw"),
        seed("near")
    );
    let guest = &managed.sites.guest;
    let both = "pace=10 dirty=4 both=1";
    managed.near.define_with(guest, &own, both);
    let served = |home: &str| {
        let socket = managed.path(&format!("{home}/machines/.web.nbd"));
        let disk = |n: usize, target: &str| {
            format!(
                "<disk type='network'><driver name='qemu' type='raw' error_policy='stop'/><source protocol='nbd' name='disk-{n}'>
                <host transport='unix' socket='{socket}'/></source><target dev='{target}' bus='virtio'/></disk>"
            )
        };
        disk(0, "vda") + &disk(1, "vdb") + &seed(home)
    };
    let libvirt = |home: &str| managed.libvirt(home);
    libvirt("far").define_with(guest, &served("far"), both);
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    let before = near.wait_said("beat", 20).await;

    managed.begin("near", "far", &[]).done();
    let mut far = managed.far.console();
    let there = far.wait_said("beat", before + 20).await;
    assert!(far.verify().await >= there);
    let disks = managed.disks("far", false);
    assert!(disks.contains("seed-far.iso"), "{disks}");
    let images = ["web-0.raw", "web-1.raw"].map(|image| {
        let path = managed.sites.world.path("far/images").join(image);
        fs::metadata(path).unwrap().len()
    });
    assert_eq!(images, [SIZE, SIZE]);

    libvirt("near").define_with(guest, &served("near"), both);
    managed.begin("far", "near", &[]).done();
    let back = near.wait_said("beat", there + 20).await;
    assert!(near.verify().await >= back);
}

#[tokio::test]
async fn a_machine_of_libvirt_that_writes_faster_than_the_link_carries_moves() {
    let test = "a_machine_of_libvirt_that_writes_faster_than_the_link_carries_moves";
    let Some(managed) = Managed::new(test) else {
        return;
    };
    let guest = &managed.sites.guest;
    managed
        .near
        .define_with(guest, &managed.file(), "pace=0 dirty=0");
    managed.near.virsh(&["start", "web"]).unwrap();
    let mut near = managed.near.console();
    let begun = near.wait_said("beat", 100).await;
    let writing = std::time::Instant::now();
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let records = near.all_said("beat").last().copied().unwrap() - begun;
    let rate = records as f64 * 4096.0 / writing.elapsed().as_secs_f64();
    let limit = format!("{}", (rate * 0.75) as u64);
    let mut moving = managed.begin("near", "far", &["--limit", &limit]);
    let told = moving.until("event", "reconnecting").to_string();
    assert!(told.contains("its writes wait for the link"), "{told}");
    let done = moving.done();
    println!("{rate} bytes/s written, limit {limit}: {done}");
    let mut far = managed.far.console();
    let there = far.wait_said("beat", 20).await;
    assert!(far.verify().await >= there);
    assert_eq!(managed.sites.state("near"), "away");
    // It writes as fast as ever.
    let far_begun = far.all_said("beat").last().copied().unwrap();
    far.wait_said("beat", far_begun + records / 4).await;
}

#[tokio::test]
async fn a_person_breaks_the_move_of_a_machine_of_libvirt() {
    let test = "a_person_breaks_the_move_of_a_machine_of_libvirt";
    let Some(mut managed) = Managed::new(test) else {
        return;
    };
    managed.near.virsh(&["start", "web"]).unwrap();
    managed.near.virsh(&["autostart", "web"]).unwrap();
    let mut near = managed.near.console();
    near.wait_said("beat", 20).await;
    let crash = [("DROVER_TEST_CRASH", "asked to take")];
    managed.sites.restart_with("far", &crash);
    let mut moving = managed.begin("near", "far", &[]);
    moving.until("event", "reconnecting");
    managed.sites.site("far").wait();
    assert_eq!(managed.sites.state("near"), "committed");
    assert_eq!(managed.state("near"), "paused");
    let broken = ["migrate", "--break", "web", "--yes"];
    let said = managed.sites.world.run("near", &broken).ok().out;
    assert_eq!(said, "web: runs here\n");
    assert!(managed.starts_with_host("near"));
    managed.stays(&mut near).await;
    // With what it wrote before and since it moves as ever.
    managed.far.virsh(&["destroy", "web"]).ok();
    managed.sites.serve_again("far", &[]);
    managed.begin("near", "far", &[]).done();
    let mut far = managed.far.console();
    let there = far.wait_said("beat", 20).await;
    assert!(far.verify().await >= there);
}
