//! Profiles: what a machine reads of an image first, recorded, shown, sent along and used.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::mount::client::Client;
use crate::mount::{Mounts, clear_all, has, text, tool};
use crate::world::{Ran, World, until};

const BLOCK: usize = 4096;

/// A home with images of its own.
struct Home(World);

impl Home {
    fn new() -> Home {
        let home = Home(World::new());
        home.run(&["init"]).ok();
        home
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.0.run("home", args)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// An image of these bytes.
    fn index(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
        self.run(&["index", text(&self.path(name))]).ok();
    }

    /// Exports an image for a machine.
    fn export(&self, target: &str, options: &[&str]) -> Client {
        let socket = self.path("s");
        let listen = format!("unix:{}", socket.display());
        let args = ["export", target, "--nbd", &listen, "--background"];
        self.run(&[&args[..], options].concat()).ok();
        Client::connect(&socket, "")
    }

    fn unmount(&self) -> Ran {
        self.run(&["unmount", text(&self.path("s"))])
    }

    /// The blocks of an image's profile in their order, how many boots read each, and how many there were.
    fn profile(&self, image: &str) -> (Vec<u64>, Vec<u64>, u64) {
        of(&self.run(&["profile", image, "--json"]).ok().json()[0])
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        clear_all(&self.path("home/mounts"));
    }
}

fn of(profile: &Value) -> (Vec<u64>, Vec<u64>, u64) {
    let (mut blocks, mut boots) = (Vec::new(), Vec::new());
    for region in profile["regions"].as_array().unwrap() {
        let number = |key: &str| region[key].as_u64().unwrap();
        let first = number("offset") / BLOCK as u64;
        for block in first..first + number("length").div_ceil(BLOCK as u64) {
            blocks.push(block);
            boots.push(number("boots"));
        }
    }
    (blocks, boots, profile["boots"].as_u64().unwrap())
}

/// A disk whose blocks all differ; those of the last quarter are zeros.
fn disk(seed: u64, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0; blocks * BLOCK];
    fastrand::Rng::with_seed(seed).fill(&mut bytes[..blocks * 3 / 4 * BLOCK]);
    bytes
}

/// Reads these blocks as a machine that starts.
fn boot(machine: &mut Client, blocks: &[u64]) {
    for block in blocks {
        machine.read(block * BLOCK as u64, BLOCK).unwrap();
    }
}

#[test]
fn boots_are_recorded_merged_and_shown_and_forgotten() {
    let home = Home::new();
    home.index("web.raw", &disk(1, 1024));
    home.run(&["profile", "web.raw"])
        .fails(3, &["web.raw has no profile", "drover profile record"]);
    home.run(&["profile", "none.raw"])
        .fails(3, &["no image called none.raw"]);
    // The first boot, recorded from the start; it writes, and reads what it has written, and zeros.
    let mut machine = home.export("web.raw", &["--profile"]);
    boot(&mut machine, &[256, 0]);
    machine.write(5 * BLOCK as u64, &[7; 2 * BLOCK]).unwrap();
    boot(&mut machine, &[5, 1000, 17, 256]);
    drop(machine);
    home.unmount().ok();
    assert_eq!(home.profile("web.raw"), (vec![256, 0, 17], vec![1; 3], 1));
    // Others, recorded while the disk is shown already.
    let mut machine = home.export("web.raw", &[]);
    let socket = home.path("s");
    let socket = text(&socket);
    home.run(&["profile", "stop", socket])
        .fails(3, &["nothing is being recorded"]);
    for _ in 0..4 {
        boot(&mut machine, &[600]);
        home.run(&["profile", "record", socket, "--for", "10m"])
            .ok();
        home.run(&["profile", "record", socket])
            .fails(3, &["recorded already"]);
        boot(&mut machine, &[256, 18, 17]);
        let mounts = home.run(&["mounts", "--json"]).ok().json();
        assert_eq!(mounts[0]["disks"][0]["profiled"], 3, "{mounts:?}");
        let stopped = home.run(&["profile", "stop", socket, "--json"]).ok().json();
        assert_eq!(
            (&stopped[0]["blocks"], &stopped[0]["problem"]),
            (&3.into(), &Value::Null)
        );
    }
    // The end of one is told of again.
    let again = home.run(&["profile", "stop", socket]).ok().out;
    assert!(again.contains("its profile counts 5 boots"), "{again}");
    drop(machine);
    home.unmount().ok();
    // One boot in five read block 0: it goes last.
    let (mut blocks, boots, all) = home.profile("web.raw");
    assert_eq!((blocks.len(), all), (4, 5));
    assert_eq!(boots.iter().sum::<u64>(), 5 + 5 + 4 + 1);
    let lasts = home.run(&["profile", "web.raw", "--json"]).ok().json();
    let regions = lasts[0]["regions"].as_array().unwrap();
    let last: Vec<_> = regions.iter().filter(|r| r["last"] == true).collect();
    assert_eq!((last.len(), &last[0]["offset"]), (1, &0.into()));
    blocks.sort_unstable();
    assert_eq!(blocks, [0, 17, 18, 256]);
    // For people.
    let shown = home
        .run(&["profile", "web.raw", "--svg", "web.svg"])
        .ok()
        .out;
    assert!(
        shown.contains("5 boots read 16.0 KiB of 4.0 MiB"),
        "{shown}"
    );
    assert!(shown.contains("by few of them"), "{shown}");
    assert_eq!(shown.lines().count(), 17, "{shown}");
    assert!(
        fs::read_to_string(home.path("web.svg"))
            .unwrap()
            .starts_with("<svg")
    );
    home.run(&["profile", "forget", "web.raw"]).code(2);
    home.run(&["profile", "forget", "web.raw", "--yes"]).ok();
    home.run(&["profile", "web.raw"]).fails(3, &["no profile"]);
    // A recording that ends by itself.
    let mut machine = home.export("web.raw", &["--profile", "--for", "1s"]);
    boot(&mut machine, &[9]);
    until("it has ended", || {
        home.run(&["profile", "web.raw"]).code == Some(0)
    });
    boot(&mut machine, &[10]);
    drop(machine);
    home.unmount().ok();
    assert_eq!(home.profile("web.raw"), (vec![9], vec![1], 1));
    // It goes with its image.
    let shelf = home.path("home/index/profiles");
    let profiles = || {
        let names = fs::read_dir(&shelf).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".profile")).count()
    };
    assert_eq!(profiles(), 1);
    home.run(&["rm", "web.raw", "--yes"]).ok();
    assert_eq!(profiles(), 0);
}

#[test]
fn a_profile_follows_the_content_of_images() {
    let home = Home::new();
    let template = disk(2, 1024);
    home.index("template.raw", &template);
    let read: Vec<u64> = (0..100).map(|n| n * 37 % 700).collect();
    let mut machine = home.export("template.raw", &["--profile"]);
    boot(&mut machine, &read);
    drop(machine);
    home.unmount().ok();
    let (blocks, ..) = home.profile("template.raw");
    assert_eq!(blocks, read);
    let changed = |disk: &mut [u8], block: u64| disk[block as usize * BLOCK] ^= 1;
    // An image derived from it has it as far as it is the same.
    let mut derived = template.clone();
    read[..10]
        .iter()
        .for_each(|block| changed(&mut derived, *block));
    home.index("derived.raw", &derived);
    assert_eq!(home.profile("derived.raw").0, read[10..]);
    home.index("other.raw", &disk(3, 1024));
    home.run(&["profile", "other.raw"])
        .fails(3, &["no profile"]);
    // After a defragmentation it is found by content, in the same order.
    home.run(&["profile", "export", "template.raw", "t.profile"])
        .ok();
    let mut moved = disk(4, 2048);
    moved[300 * BLOCK..][..template.len() * 3 / 4]
        .copy_from_slice(&template[..template.len() * 3 / 4]);
    home.index("moved.raw", &moved);
    let there = Vec::from_iter(read.iter().map(|b| b + 300));
    assert_eq!(home.profile("moved.raw").0, there);
    // Also in another container, with holes, and if some of it is gone.
    if has("moved qcow2", &["qemu-img"]) {
        let mut holes = moved.clone();
        holes[..200 * BLOCK].fill(0);
        holes[1500 * BLOCK..1700 * BLOCK].fill(0);
        there[..30]
            .iter()
            .for_each(|block| changed(&mut holes, *block));
        fs::write(home.path("holes.raw"), &holes).unwrap();
        let [raw, qcow2] = ["holes.raw", "moved.qcow2"].map(|name| home.path(name));
        let convert = [
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            text(&raw),
            text(&qcow2),
        ];
        tool("qemu-img", &convert);
        home.run(&["rm", "moved.raw", "--yes"]).ok();
        home.run(&["index", text(&qcow2)]).ok();
        assert_eq!(home.profile("moved.qcow2").0, there[30..]);
        home.index("moved.raw", &moved);
    }
    // One of a file is looked for in all of the image.
    let imported = home
        .run(&["profile", "import", "moved.raw", "t.profile"])
        .ok()
        .out;
    assert!(
        imported.contains("a profile of 400.0 KiB, 1 boot"),
        "{imported}"
    );
    assert_eq!(home.profile("moved.raw").0, there);
    // What has less than half of it gets none.
    let mut less = disk(7, 1024);
    for block in &read[..40] {
        let at = *block as usize * BLOCK;
        let to = (*block as usize + 7) * BLOCK;
        less[to..to + BLOCK].copy_from_slice(&template[at..at + BLOCK]);
    }
    home.index("less.raw", &less);
    home.run(&["profile", "less.raw"]).fails(3, &["no profile"]);
    home.run(&["profile", "import", "other.raw", "t.profile"])
        .fails(1, &["other.raw has none of its 100 blocks", "another disk"]);
    // What has changed in an image is removed, and comes back when it is read again.
    let mut newer = template.clone();
    read[90..]
        .iter()
        .for_each(|block| changed(&mut newer, *block));
    home.index("template.raw", &newer);
    assert_eq!(home.profile("template.raw").0, read[..90]);
    let mut machine = home.export("template.raw", &["--profile"]);
    boot(&mut machine, &read);
    drop(machine);
    home.unmount().ok();
    let (blocks, boots, all) = home.profile("template.raw");
    assert_eq!((blocks.len(), all), (100, 2));
    assert_eq!(boots.iter().filter(|n| **n == 2).count(), 90);
}

#[test]
fn a_profile_is_sent_along_and_prefetched_by() {
    let mut m = Mounts::new();
    // 64 MiB, of which a boot reads six places far behind.
    let mut bytes = vec![0; 64 << 20];
    fastrand::Rng::with_seed(5).fill(&mut bytes);
    fs::write(m.world.path("web.raw"), &bytes).unwrap();
    let path = m.world.path("web.raw");
    m.near(&["index", text(&path)]).ok();
    let socket = m.world.path("boot.sock");
    let listen = format!("unix:{}", socket.display());
    let args = [
        "export",
        "web.raw",
        "--nbd",
        &listen,
        "--background",
        "--profile",
    ];
    m.near(&args).ok();
    let places: Vec<u64> = [55, 40, 62, 33, 48, 58].map(|n| n << 20).to_vec();
    let mut machine = Client::connect(&socket, "web.raw");
    for place in &places {
        machine.read(*place, BLOCK).unwrap();
    }
    drop(machine);
    m.unmount(&socket, &[]).ok();
    let sent = m.near(&["send", text(&path), "far"]).ok();
    assert!(
        (sent.out.clone() + &sent.err).contains("its profile is sent along: 24.0 KiB, 1 boot"),
        "{sent:?}"
    );
    let recorded = places.iter().map(|place| place / BLOCK as u64);
    let recorded = Vec::from_iter(recorded);
    // It is there, also after the site was killed.
    m.kill_site();
    m.start_site();
    let shown = m.near(&["profile", "far:web.raw", "--json"]).ok().json();
    assert_eq!(of(&shown[0]), (recorded.clone(), vec![1; 6], 1));
    // What it names comes first to a mount there, over a link that carries little of the rest: the disk in its order, until
    // the profile is here.
    m.proxy.delay(std::time::Duration::from_millis(40));
    let options = ["--read-only", "--window", "128K", "--give-up-after", "4s"];
    let socket = m.export("web.raw", &options);
    until("some of it is here", || {
        m.disk()["received"].as_u64().unwrap() > 12 << 20
    });
    // A slow link is no silent one: what waits behind others on it is not taken for lost.
    let logs = fs::read_dir(m.world.path("near/mounts")).unwrap();
    let logs = logs.map(|mount| fs::read_to_string(mount.unwrap().path().join("log")).unwrap());
    logs.for_each(|log| assert!(!log.contains("did not reply"), "{log}"));
    m.proxy.cut();
    let mut machine = Client::connect(&socket, "");
    for place in &places {
        let read = machine.read(*place, BLOCK).unwrap();
        assert!(read == bytes[*place as usize..][..BLOCK], "{place}");
    }
    assert!(machine.read(38 << 20, BLOCK).is_err(), "all of it is here");
    drop(machine);
    m.proxy.heal();
    m.proxy.delay(std::time::Duration::ZERO);
    m.unmount(&socket, &[]).ok();
    // A mount of a peer's image records for the peer, which the image belongs to this site for.
    let socket = m.export(
        "web.raw",
        &["--read-only", "--profile", "--prefetch", "none"],
    );
    let mut machine = Client::connect(&socket, "");
    machine.read(1 << 20, BLOCK).unwrap();
    drop(machine);
    m.unmount(&socket, &[]).ok();
    let shown = m
        .world
        .run("far", &["profile", "web.raw", "--json"])
        .ok()
        .json();
    let (blocks, boots, all) = of(&shown[0]);
    assert_eq!((blocks.len(), boots, all), (7, vec![1; 7], 2));
    // A profile as a file, from a mount and for one.
    let file = m.world.path("boot.profile");
    let socket = m.export("web.raw", &["--read-only", "--record", text(&file)]);
    let mut machine = Client::connect(&socket, "");
    machine.read(2 << 20, BLOCK).unwrap();
    drop(machine);
    m.unmount(&socket, &[]).ok();
    m.near(&["profile", "import", "web.raw", text(&file)]).ok();
    let shown = m.near(&["profile", "web.raw", "--json"]).ok().json();
    assert_eq!(of(&shown[0]), (vec![512], vec![1], 1));
    let socket = m.export("web.raw", &["--read-only", "--prefetch", text(&file)]);
    m.unmount(&socket, &[]).ok();
}

#[test]
fn a_damaged_profile_is_refused_and_harms_no_mount() {
    let home = Home::new();
    home.index("web.raw", &disk(6, 64));
    let mut machine = home.export("web.raw", &["--profile"]);
    boot(&mut machine, &[3, 1]);
    drop(machine);
    home.unmount().ok();
    home.run(&["profile", "export", "web.raw", "good"]).ok();
    let good = fs::read(home.path("good")).unwrap();
    let mut bad = good.clone();
    bad[60] ^= 1;
    fs::write(home.path("bad"), &bad).unwrap();
    fs::write(home.path("text"), "drover order 1\n0 65536\n").unwrap();
    for (file, why) in [("bad", "damaged"), ("text", "another kind")] {
        home.run(&["profile", "import", "web.raw", file])
            .fails(1, &[file, "profile", why]);
        let listen = format!("unix:{}", home.path("s").display());
        home.run(&[
            "export",
            "web.raw",
            "--nbd",
            &listen,
            "--background",
            "--prefetch",
            file,
        ])
        .fails(1, &[file, "profile", why]);
    }
    home.run(&["profile", "import", "web.raw", "none"])
        .fails(1, &["none", "no such file"]);
    // That of the image itself: it is said, nothing depends on it, and the next boot replaces it.
    let shelf = fs::read_dir(home.path("home/index/profiles")).unwrap();
    let mut files = shelf.map(|entry| entry.unwrap().path());
    let file = files.find(|path| path.extension().is_some()).unwrap();
    fs::write(&file, &bad).unwrap();
    home.run(&["profile", "web.raw"])
        .fails(1, &["profile", "damaged"]);
    let mut machine = home.export("web.raw", &["--profile"]);
    boot(&mut machine, &[7]);
    drop(machine);
    home.unmount().ok();
    assert_eq!(home.profile("web.raw"), (vec![7], vec![1], 1));
    // Options that cannot be.
    let listen = format!("unix:{}", home.path("s").display());
    for (options, words) in [
        (
            &["web.raw", "--for", "1m"][..],
            &["--for is for --profile"][..],
        ),
        (
            &["file:good", "--profile"],
            &["--profile cannot be used with file:"],
        ),
        (&["web.raw", "--profile", "--record", "x"], &["--record"]),
    ] {
        let args = ["export", "--nbd", &listen, "--background"];
        let ran = home.run(&[&args[..], options].concat()).code(2);
        words
            .iter()
            .for_each(|word| assert!(ran.err.contains(word), "{}", ran.err));
    }
}
