//! `drover migrate` with a real QEMU at both sites, and a guest that writes numbered records to its disk.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

use drover_hypervisor::machine::Node;
use drover_hypervisor::testing::{Guest, Launch, Qemu, program};
use serde_json::Value;

use crate::world::{Site, World, own_address, until, wait};

mod branches;
mod built;
mod copies;
mod faults;
mod full_disk;
mod generations;
mod libvirt;
mod links;
mod mounted;
mod pauses;
mod postcopy;
mod replicas;
mod several_disks;
mod snapshots;
mod start_script;
mod three_sites;

const SIZE: u64 = 4 << 20;

/// Sites, and what their machines boot.
struct Sites {
    world: World,
    guest: Guest,
    /// The sites by name, and where they listen.
    running: BTreeMap<&'static str, (Site, String)>,
}

impl Sites {
    /// The sites `near` and `far`, that may migrate the machine `web` to each other; none, with a SKIP, where no guest runs.
    fn new(test: &str) -> Option<Sites> {
        Self::with(test, World::new(), own_address(), &[])
    }

    /// The same, where `far` is served at this address with these options.
    fn with(test: &str, world: World, at: SocketAddr, far: &[&str]) -> Option<Sites> {
        let homes = [("near", own_address(), &[][..]), ("far", at, far)];
        Self::among(test, world, &homes)
    }

    /// The same for these sites: their names, addresses, and options of `serve`.
    fn among(
        test: &str,
        world: World,
        homes: &[(&'static str, SocketAddr, &[&str])],
    ) -> Option<Sites> {
        Self::expecting(test, world, homes, |world, home| {
            let incoming = world.path(&format!("web-{home}.qmp"));
            format!("incoming = {incoming:?}")
        })
    }

    /// The sites `near` and `far`, for the machines `web` and `db`.
    fn of_two_machines(test: &str) -> Option<Sites> {
        let homes = ["near", "far"].map(|home| (home, own_address(), &[][..]));
        let says = |world: &World, home: &str| {
            let [web, db] = ["web", "db"].map(|name| world.path(&format!("{name}-{home}.qmp")));
            format!("incoming = {web:?}\n[machines.db]\nincoming = {db:?}")
        };
        Self::expecting(test, World::new(), &homes, says)
    }

    /// The same, where the table of the machine at each says this.
    fn expecting(
        test: &str,
        world: World,
        homes: &[(&'static str, SocketAddr, &[&str])],
        says: impl Fn(&World, &str) -> String,
    ) -> Option<Sites> {
        program(test)?;
        let guest = Guest::build(test, world.path("").as_path())?;
        let mut running = BTreeMap::new();
        for &(home, address, options) in homes {
            world.run(home, &["init"]).ok();
            let table = format!("[machines.web]\n{}\n", says(&world, home));
            fs::write(world.path(home).join("config.toml"), table).unwrap();
            let address = address.to_string();
            let serve = [&["serve", "--listen", &address], options].concat();
            running.insert(home, (world.process(home, &serve), address));
        }
        let names = || homes.iter().map(|(home, ..)| *home);
        let pairs = names().flat_map(|home| names().map(move |peer| (home, peer)));
        let pairs: Vec<_> = pairs.filter(|(home, peer)| home != peer).collect();
        for (home, peer) in &pairs {
            let ticket = world.run(peer, &["ticket", "--can", "send,host"]).ok().out;
            let pair = ["pair", ticket.trim(), "--name", peer];
            world.run(home, &pair).ok();
        }
        for (home, peer) in &pairs {
            let can = ["peers", "set", peer, "--can", "send,host"];
            world.run(home, &can).ok();
        }
        Some(Sites {
            world,
            guest,
            running,
        })
    }

    /// Kills a site, and starts it again.
    fn restart(&mut self, home: &str) {
        self.restart_with(home, &[]);
    }

    /// The same with environment variables.
    fn restart_with(&mut self, home: &str, variables: &[(&str, &str)]) {
        let site = self.site(home);
        site.signal("KILL");
        site.wait();
        self.serve_again(home, variables);
    }

    fn site(&mut self, home: &str) -> &mut Site {
        &mut self.running.get_mut(home).unwrap().0
    }

    /// Starts a site that has ended.
    fn serve_again(&mut self, home: &str, variables: &[(&str, &str)]) {
        let (site, address) = self.running.get_mut(home).unwrap();
        let serve = ["serve", "--listen", address];
        *site = self.world.process_with(home, &serve, variables);
    }

    /// The state of the machine in the list of a site.
    fn state(&self, home: &str) -> Value {
        let listed = self.world.run(home, &["migrate", "--list", "--json"]).ok();
        listed.json()[0]["state"].clone()
    }

    fn launch(&self, disk: &[Node]) -> Launch {
        let launch = disk.iter().fold(Launch::new(), Launch::node);
        let launch = launch.disk("vd0", "disk").guest(&self.guest, 10, 4);
        launch.booted()
    }

    /// The machine, with a raw file as its disk.
    async fn start(&self, home: &str) -> Qemu {
        self.start_one("web", home).await
    }

    /// A machine of this name.
    async fn start_one(&self, name: &str, home: &str) -> Qemu {
        let path = self.world.path(&format!("{name}.raw"));
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let file = Node::File {
            name: "file".into(),
            path,
        };
        let mut machine = self
            .launch(&[file, raw("file")])
            .start(&self.world.path(""), &format!("{name}-{home}"));
        machine.machine().await;
        machine
    }

    /// A QEMU that waits for it.
    async fn wait_for_it(&self, home: &str) -> Qemu {
        self.wait_for_one("web", home).await
    }

    /// A machine that has moved, with all that it wrote: where it was, and where it runs.
    async fn moved(&self) -> (Qemu, Qemu) {
        let mut here = self.start("near").await;
        let mut there = self.wait_for_it("far").await;
        here.wait_said("beat", 20).await;
        Moving::begin(self, "near", "far", &[]).done();
        here.ended().await;
        goes_on(&here, &mut there).await;
        (here, there)
    }

    async fn wait_for_one(&self, name: &str, home: &str) -> Qemu {
        let stub = Node::Null {
            name: "stub".into(),
            size: SIZE,
        };
        let launch = self.launch(&[stub, raw("stub")]).incoming();
        let mut machine = launch.start(&self.world.path(""), &format!("{name}-{home}"));
        machine.machine().await;
        machine
    }

    fn hypervisor(&self, home: &str) -> String {
        let socket = self.world.path(&format!("web-{home}.qmp"));
        format!("qmp:{}", socket.display())
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (home, (site, _)) in &self.running {
                println!("the log of {home}:\n{}", site.log());
            }
        }
    }
}

fn raw(file: &str) -> Node {
    Node::Raw {
        name: "disk".into(),
        file: file.into(),
    }
}

/// A migration that is under way.
struct Moving {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Moving {
    fn begin(sites: &Sites, from: &str, to: &str, options: &[&str]) -> Moving {
        Self::begin_of(sites, &sites.hypervisor(from), from, to, options)
    }

    /// The same of this machine.
    fn begin_of(sites: &Sites, machine: &str, from: &str, to: &str, options: &[&str]) -> Moving {
        let args = [&["migrate", machine, to, "--json"], options].concat();
        Self::spawn(sites.world.drover(from, &args))
    }

    fn spawn(mut command: Command) -> Moving {
        let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = piped.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Moving { process, lines }
    }

    /// Waits for an event, in which this field has this value.
    fn until(&mut self, field: &str, value: &str) -> Value {
        let mut seen = Vec::new();
        for line in self.lines.by_ref() {
            let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
            if event[field] == value {
                return event;
            }
            seen.push(event);
        }
        let seen: String = seen.iter().map(|event| format!("{event}\n")).collect();
        panic!("{field} is never {value}:\n{seen}");
    }

    /// Waits for the end.
    fn done(mut self) -> Value {
        let done = self.until("event", "done");
        assert_eq!(wait(&mut self.process), Some(0));
        done
    }

    /// Waits for its end; whether it was at this step since.
    fn was_at(&mut self, step: &str) -> bool {
        let lines = self.lines.by_ref().map(|line| line.unwrap());
        let events = lines.map(|line| serde_json::from_str::<Value>(&line).unwrap());
        // All of them are read: it waits for who reads them.
        events.filter(|event| event["step"] == step).count() > 0
    }

    /// Waits for its failure: the machine stays. What it says of that.
    fn fails(self) -> String {
        let output = self.process.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{err}");
        assert!(err.contains("stays here"), "{err}");
        err
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_machines_of_a_host_move() {
    let Some(sites) = Sites::new("all_machines_of_a_host_move") else {
        return;
    };
    let evacuate = |options: &[&str]| {
        let args = [&["evacuate", "far"], options].concat();
        sites.world.run("near", &args).ok().out
    };
    assert_eq!(evacuate(&["--dry-run"]), "");
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 20).await;
    assert!(evacuate(&["--dry-run"]).starts_with("web  qmp:"));
    assert!(evacuate(&[]).ends_with("1 machine moved to far\n"));
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert_eq!(evacuate(&["--dry-run"]), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_machines_of_a_host_without_a_site_move_at_once() {
    let test = "two_machines_of_a_host_without_a_site_move_at_once";
    let Some(mut sites) = Sites::of_two_machines(test) else {
        return;
    };
    let site = sites.site("near");
    site.signal("KILL");
    site.wait();
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for name in ["web", "db"] {
        here.push(sites.start_one(name, "near").await);
        there.push(sites.wait_for_one(name, "far").await);
    }
    for machine in &mut here {
        machine.wait_said("beat", 20).await;
    }
    let moved = sites.world.run("near", &["evacuate", "far"]).ok();
    assert!(
        moved.out.ends_with("2 machines moved to far\n"),
        "{moved:?}"
    );
    for (here, there) in here.iter_mut().zip(&mut there) {
        here.ended().await;
        goes_on(here, there).await;
    }
    // What both left is known for the way back.
    let images = sites.world.run("near", &["images", "--json"]).ok().json();
    assert_eq!(images.len(), 2, "{images:?}\n{}", moved.err);
    for image in &images {
        assert_eq!(
            image["generations"]["frozen"], true,
            "{images:?}\n{}",
            moved.err
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_machine_of_an_evacuation_is_given_up() {
    let test = "one_machine_of_an_evacuation_is_given_up";
    let Some(sites) = Sites::of_two_machines(test) else {
        return;
    };
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for name in ["web", "db"] {
        here.push(sites.start_one(name, "near").await);
        there.push(sites.wait_for_one(name, "far").await);
    }
    for machine in &mut here {
        machine.wait_said("beat", 20).await;
    }
    let mut evacuate = sites
        .world
        .drover("near", &["evacuate", "far", "--limit", "8M", "--json"]);
    let piped = evacuate.stdout(Stdio::piped()).stderr(Stdio::piped());
    let evacuate = piped.spawn().unwrap();
    let both_come = || {
        let listed = sites
            .world
            .run("far", &["migrate", "--list", "--json"])
            .ok();
        let machines = listed.json();
        let comes = |name: &str| {
            let is_it = |machine: &Value| machine["name"] == name && machine["state"] == "coming";
            machines.iter().any(is_it)
        };
        comes("db") && comes("web")
    };
    until("both are on their way", both_come);
    sites.world.run("near", &["migrate", "--abort", "web"]).ok();
    let ended = evacuate.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success(), "{said}");
    assert!(said.contains("1 of 2 machines did not move"), "{said}");
    here[1].ended().await;
    goes_on(&here[1], &mut there[1]).await;
    let last = here[0].said("beat").unwrap();
    here[0].wait_said("beat", last + 20).await;
    assert!(here[0].verify().await >= last + 20);
    assert_eq!(left_in(&mut here[0]).await, (0, 0));
}

/// Waits until the guest at the destination has written on, and checks all of its records.
async fn goes_on(here: &Qemu, there: &mut Qemu) {
    let last = here.said("beat").unwrap();
    there.wait_said("beat", last + 20).await;
    let beats = there.all_said("beat");
    // The line of one record may have been torn between the two.
    assert!(
        beats[0] == last + 1 || beats[0] == last + 2,
        "{last}, then {}",
        beats[0]
    );
    assert!(there.verify().await >= last + 20);
    assert_eq!(here.said("beat"), Some(last), "it runs once");
}

/// The machine has not left: it writes on, and nothing of the migration is left in its hypervisor.
async fn stays(sites: &Sites, here: &mut Qemu) {
    let last = here.said("beat").unwrap();
    here.wait_said("beat", last + 20).await;
    assert!(here.verify().await >= last + 20);
    assert_eq!(left_in(here).await, (0, 0));
    assert_eq!(sites.state("near"), "here");
}

/// What drover has made in a hypervisor: bitmaps, exports, block nodes.
async fn left_in(qemu: &mut Qemu) -> (usize, usize) {
    let machine = qemu.machine().await;
    let disks = machine.disks().await.unwrap();
    let bitmaps = disks
        .iter()
        .filter_map(|disk| disk.medium.as_ref())
        .map(|medium| medium.bitmaps.len());
    (bitmaps.sum(), machine.exports().await.unwrap().len())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_moves_and_comes_back() {
    let Some(sites) = Sites::new("a_machine_moves_and_comes_back") else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 50).await;
    for (from, to) in [("near", "far"), ("far", "near"), ("near", "far")] {
        let mut there = sites.wait_for_it(to).await;
        let done = Moving::begin(&sites, from, to, &[]).done();
        let pause = &done["pause"];
        let part = |name: &str| pause[name].as_u64().unwrap();
        let parts = part("disks_ms") + part("memory_ms") + part("hand_over_ms");
        assert_eq!(parts, part("total_ms"));
        assert!(done["memory_bytes"].as_u64() > Some(1 << 20), "{done}");
        here.ended().await;
        goes_on(&here, &mut there).await;
        let listed = |home: &str| {
            sites
                .world
                .run(home, &["migrate", "--list", "--json"])
                .ok()
                .json()
        };
        let state = |home: &str| listed(home)[0]["state"].clone();
        assert_eq!((state(from), state(to)), ("away".into(), "here".into()));
        let events = |home: &str| {
            let told = sites.world.run(home, &["audit", "--json"]).ok().json();
            let last = told
                .iter()
                .rfind(|event| event["machine"] == "web")
                .unwrap();
            last["event"].clone()
        };
        assert_eq!(events(from), "machine-left");
        // Whoever sent the images may not remove them while the machine is there.
        let image = format!("{to}:web-0.raw");
        sites
            .world
            .run(from, &["rm", &image, "--yes"])
            .fails(3, &["web-0.raw"]);
        assert_eq!(events(to), "machine-arrived");
        let indexed = sites.world.run("near", &["images", "--json"]).ok().json();
        assert!(
            indexed.iter().any(|image| image["name"] == "web.raw"),
            "{indexed:?}"
        );
        here = there;
    }
    // What it has left near is an old copy, though it was here twice.
    until("the copy that it left is frozen", || {
        let images = sites.world.run("near", &["images", "--json"]).ok().json();
        let left = images.iter().find(|image| image["name"] == "web-0.raw");
        left.unwrap()["generations"]["frozen"] == true
    });
    // What the machine wrote there is part of its image now.
    until("the changes are merged", || {
        let changes = sites.world.run("near", &["changes", "--json"]).ok().json();
        changes.is_empty()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_is_aborted_leaves_the_machine_running_and_nothing_behind() {
    let test = "a_migration_that_is_aborted_leaves_the_machine_running_and_nothing_behind";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    for (step, killed) in [
        ("images", false),
        ("disks", false),
        ("memory", false),
        ("memory", true),
    ] {
        let last = here.wait_said("beat", 20).await;
        let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
        moving.until("step", step);
        let mut is_read = step == "memory";
        if killed {
            // It can be told how long it takes.
            while !moving.until("event", "memory")["left_seconds"].is_u64() {}
            moving.kill();
            let left = sites.world.run("near", &["migrate", "--list"]).ok();
            assert!(left.out.contains("leaving"), "{}", left.out);
            sites.world.run("near", &["migrate", "--abort", "web"]).ok();
        } else {
            sites.world.run("near", &["migrate", "--abort", "web"]).ok();
            // It goes on until it is told.
            is_read |= moving.was_at("memory");
            assert_eq!(wait(&mut moving.process), Some(1));
        }
        assert_eq!(left_in(&mut here).await, (0, 0), "{step}");
        here.wait_said("beat", last + 20).await;
        assert!(here.verify().await >= last + 20);
        let listed = sites.world.run("near", &["migrate", "--list"]).ok();
        assert!(listed.out.contains("here"), "{}", listed.out);
        if is_read {
            // It had begun to read the memory of that one. Any other waits for the next.
            there.kill();
            there = sites.wait_for_it("far").await;
        }
    }
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_continues_after_a_crash_of_either_side() {
    let Some(mut sites) = Sites::new("a_migration_continues_after_a_crash_of_either_side") else {
        return;
    };
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 20).await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    moving.kill();
    there.kill();
    there = sites.wait_for_it("far").await;
    // The same command continues; then the other site is lost, and comes back.
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "30M"]);
    moving.until("step", "memory");
    sites.restart("far");
    there.kill();
    there = sites.wait_for_it("far").await;
    moving.until("event", "reconnecting");
    moving.done();
    here.ended().await;
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_two_machines_write_stays() {
    let Some(sites) = Sites::new("a_disk_that_two_machines_write_stays") else {
        return;
    };
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 1).await;
    let near = sites.hypervisor("near");
    let disk = sites.world.path("web.raw");
    // QEMU keeps a second one out, unless it is told not to.
    let blockdev = format!(
        "driver=file,node-name=disk,locking=off,filename={}",
        disk.display()
    );
    let mut second = Command::new("qemu-system-x86_64")
        .args(["-machine", "none", "-nodefaults", "-display", "none"])
        .args(["-blockdev", &blockdev])
        .spawn()
        .unwrap();
    let second_is = format!("{} (qemu-system-x86)", second.id());
    for option in [&["--dry-run"][..], &[]] {
        until("the second machine has the disk", || {
            let args = [&["migrate", &near, "far"], option].concat();
            let ran = sites.world.run("near", &args);
            let said = ran.code == Some(1) && ran.err.contains(&second_is);
            assert!(said || option == ["--dry-run"], "{}", ran.err);
            said && ran.err.contains("web.raw, is open for writing")
        });
    }
    assert_eq!(left_in(&mut here).await, (0, 0));
    let last = here.said("beat").unwrap();
    here.wait_said("beat", last + 20).await;
    second.kill().unwrap();
    second.wait().unwrap();
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_are_apart_change_nothing() {
    let test = "clocks_that_are_apart_change_nothing";
    let Some(library) = fake_time() else {
        println!("SKIP {test}: no libfaketime (Debian: faketime)");
        return;
    };
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    // An hour ahead, and then back while the machine is there.
    let clock = |offset| {
        [
            ("LD_PRELOAD", library.as_str()),
            ("FAKETIME", offset),
            ("DONT_FAKE_MONOTONIC", "1"),
        ]
    };
    sites.restart_with("far", &clock("+1h"));
    let mut there = sites.wait_for_it("far").await;
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
    // It is indeed an hour ahead.
    let hour = |home, event| {
        let told = sites.world.run(home, &["audit", "--json"]).ok().json();
        let last = told.iter().rfind(|line| line["event"] == event).unwrap();
        last["time"].as_str().unwrap()[..13].to_owned()
    };
    assert_ne!(hour("far", "machine-arrived"), hour("near", "machine-left"));

    sites.restart_with("far", &clock("-1h"));
    let mut here = sites.wait_for_it("near").await;
    let done = Moving::begin(&sites, "far", "near", &[]).done();
    there.ended().await;
    goes_on(&there, &mut here).await;
    // What it knows of the copy that it left is believed all the same.
    assert!(done["image_wire_bytes"].as_u64() < Some(SIZE / 8), "{done}");
    assert_eq!(
        (sites.state("near"), sites.state("far")),
        ("here".into(), "away".into())
    );
}

/// The library that gives programs another clock.
pub fn fake_time() -> Option<String> {
    let libraries = fs::read_dir("/usr/lib").unwrap().flatten();
    let found = libraries.map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
    let found = found.into_iter().find(|path| path.exists())?;
    Some(found.display().to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_move_is_said() {
    let Some(sites) = Sites::new("what_cannot_move_is_said") else {
        return;
    };
    let world = &sites.world;
    let near = sites.hypervisor("near");
    world
        .run("near", &["migrate", &near, "far"])
        .fails(1, &["cannot connect to QEMU", "web-near.qmp"]);
    world.run("near", &["migrate", "web", "far"]).code(2);
    world
        .run("near", &["migrate", "--abort", "web"])
        .fails(3, &["no machine called web"]);
    let mut here = sites.start("near").await;
    here.wait_said("beat", 1).await;
    world
        .run("near", &["migrate", &near, "nowhere"])
        .fails(3, &["no peer is called"]);
    world
        .run("near", &["migrate", &near, "far", "--as", "db"])
        .fails(3, &["does not expect a machine called db", "[machines.db]"]);
    world
        .run("near", &["migrate", &near, "far"])
        .fails(1, &["stays here", "no QEMU waits", "-incoming defer"]);
    world
        .run("near", &["evacuate", "far"])
        .fails(1, &["1 of 1 machine did not move"]);
    let dry = world
        .run("near", &["migrate", &near, "far", "--dry-run", "--json"])
        .ok()
        .json();
    let done = dry.last().unwrap();
    assert_eq!(done["dry_run"], true);
    let note = done["notes"][0].as_str().unwrap();
    assert!(note.contains("no QEMU waits"), "{done}");
    let expected = &done["expected"];
    assert!(expected["image_wire_bytes"].as_u64() > Some(0), "{done}");
    // 30 ms that are aimed at, 20 for the switch.
    assert!(expected["pause_ms"].as_u64() >= Some(50), "{done}");
    // Nothing limits it: it was measured.
    assert_eq!(expected["measured"], true, "{done}");
    let rate = expected["bytes_per_second"].as_f64().unwrap();
    let least = done["memory_bytes"].as_f64().unwrap() / rate;
    assert!(expected["seconds"].as_f64() > Some(least), "{done}");
    let limited = ["migrate", &near, "far", "--dry-run", "--limit", "1M"];
    let said = world.run("near", &limited).ok().out;
    // 96 MiB of memory.
    let (_, seconds) = said.split_once("at most ").unwrap();
    let seconds = seconds.split(' ').next().unwrap().parse::<u64>().unwrap();
    assert!((96..150).contains(&seconds), "{said}");
    assert!(said.contains("a pause of about "), "{said}");
    world
        .run("far", &["peers", "set", "near", "--can", "send"])
        .ok();
    world
        .run("near", &["migrate", &near, "far"])
        .fails(3, &["host"]);
    assert_eq!(left_in(&mut here).await, (0, 0));
    let last = here.said("beat").unwrap();
    here.wait_said("beat", last + 10).await;
}
