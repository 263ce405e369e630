//! Images that are used while they are still being sent: `drover launch`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::JoinHandle;

use serde_json::Value;

use crate::mount::client::Client;
use crate::mount::{has, tool};
use crate::world::{Ran, Site, World, own_address, signal, until, wait};

/// Bytes of a batch of the walk.
const BATCH: usize = 8 << 20;

/// Batches of the image: more than are announced before the first are complete.
const BATCHES: usize = 12;

/// A site `far` that is sent an image by `near`, over a slow link.
struct Sent {
    world: World,
    listen: String,
    far: Option<Site>,
    send: Option<Child>,
    bytes: Vec<u8>,
}

impl Sent {
    /// Every batch begins with data; the rest is zeros.
    fn new(name: &str) -> Sent {
        let mut bytes = vec![0; BATCHES * BATCH];
        let mut random = fastrand::Rng::with_seed(1);
        for batch in bytes.chunks_mut(BATCH) {
            random.fill(&mut batch[..768 << 10]);
        }
        let mut sent = Sent {
            world: World::new(),
            listen: own_address().to_string(),
            far: None,
            send: None,
            bytes,
        };
        fs::write(sent.world.path(name), &sent.bytes).unwrap();
        sent.start_site();
        let ticket = sent.world.run("far", &["ticket"]).ok().out;
        let pair = ["pair", ticket.trim(), "--name", "far"];
        sent.world.run("near", &pair).ok();
        sent
    }

    fn start_site(&mut self) {
        let args = ["serve", "--listen", &self.listen];
        self.far = Some(self.world.process("far", &args));
    }

    /// Kills the site.
    fn kill_site(&mut self) {
        self.far = None;
    }

    /// Begins to send an image, too slowly for the test to see its end.
    fn begin(&mut self, name: &str) {
        let args = ["send", name, "far", "--limit", "200K"];
        let mut send = self.world.drover("near", &args);
        let send = send.stdout(Stdio::null()).stderr(Stdio::null());
        self.send = Some(send.spawn().unwrap());
    }

    /// Stops sending; what has come stays.
    fn stop(&mut self) {
        let mut send = self.send.take().unwrap();
        signal(send.id(), "TERM");
        wait(&mut send);
    }

    fn far(&self, args: &[&str]) -> Ran {
        self.world.run("far", args)
    }

    /// Launches an image on a socket, as soon as its transfer has begun.
    fn launch(&self, name: &str, socket: &str) -> PathBuf {
        let path = self.world.path(socket);
        let nbd = format!("unix:{}", path.display());
        let args = [
            "launch",
            name,
            "--nbd",
            &nbd,
            "--background",
            "--wait",
            "3m",
        ];
        self.far(&args).ok();
        path
    }

    /// Ends a launch as soon as its client has left.
    fn unmount(&self, socket: &Path) {
        let socket = socket.to_str().unwrap();
        until("the client has left", || {
            self.far(&["unmount", socket]).code == Some(0)
        });
    }

    fn disk(&self) -> Value {
        let mounts = self.far(&["mounts", "--json"]).ok().json();
        mounts[0]["disks"][0].clone()
    }

    fn changed(&self) -> u64 {
        let changes = self.far(&["changes", "--json"]).ok().json();
        changes[0]["changed_bytes"].as_u64().unwrap()
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some(send) = &mut self.send {
            let _ = send.kill();
            let _ = send.wait();
        }
        let mounts = self.far(&["mounts", "--json"]);
        for mount in mounts.json() {
            let name = mount["name"].as_str().unwrap_or_default();
            self.far(&["unmount", name, "--lazy", "--discard", "--yes"]);
        }
    }
}

/// Reads in a thread what is not here.
fn held(socket: &Path, name: &str, at: usize) -> JoinHandle<std::io::Result<Vec<u8>>> {
    let mut client = Client::connect(socket, name);
    client.wait_for_ever();
    std::thread::spawn(move || client.read(at as u64, 8192))
}

#[test]
fn an_image_is_used_while_it_arrives_and_its_changes_lie_over_it() {
    let mut sent = Sent::new("big.raw");
    sent.far(&["launch", "big.raw", "disk"])
        .fails(3, &["big.raw", "drover transfers"]);
    sent.begin("big.raw");
    let socket = sent.launch("big.raw", "s");
    let mut client = Client::connect(&socket, "big.raw");
    assert_eq!(client.size, sent.bytes.len() as u64);
    let mut now = sent.bytes.clone();
    // Not announced yet, announced, zeros of either, the end.
    for at in [
        11 * BATCH,
        11 * BATCH + 700_000,
        BATCH,
        11 * BATCH + (1 << 20),
        2 << 20,
        now.len() - 5000,
    ] {
        let length = 5000;
        let read = client.read(at as u64, length).unwrap();
        assert!(read == now[at..at + length], "at {at}");
    }
    // Whole blocks, and parts of blocks that are not here.
    for (at, length) in [
        (9 * BATCH, 8192),
        (9 * BATCH + 100_000, 3000),
        (5 << 20, 4096),
        (10 * BATCH - 100, 300),
    ] {
        client.write(at as u64, &vec![7; length]).unwrap();
        now[at..at + length].fill(7);
    }
    client.zero(8 * BATCH as u64, 65_536).unwrap();
    now[8 * BATCH..][..65_536].fill(0);
    client.flush().unwrap();
    for at in [
        9 * BATCH,
        9 * BATCH + 98_304,
        5 << 20,
        10 * BATCH - 4096,
        8 * BATCH,
    ] {
        let read = client.read(at as u64, 8192).unwrap();
        assert!(read == now[at..at + 8192], "at {at}");
    }
    let disk = sent.disk();
    assert_eq!(disk["mode"], "launched", "{disk}");
    assert!(disk["local"].as_u64() < disk["size"].as_u64(), "{disk}");
    let table = sent.far(&["mounts"]).ok().out;
    assert!(table.contains("% here"), "{table}");

    // It is one machine's, and nothing that is still to come goes away.
    let other = format!("unix:{}", sent.world.path("t").display());
    sent.far(&["launch", "big.raw", "--nbd", &other])
        .fails(3, &["big.raw", "lease"]);
    sent.far(&["export", "big.raw", "--nbd", &other])
        .fails(3, &["drover launch big.raw"]);
    sent.stop();
    sent.far(&["transfers", "rm", "big.raw", "--yes"])
        .fails(3, &["drover unmount"]);
    // Nor becomes another image.
    let path = sent.world.path("big.raw");
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(&[9], 0)
        .unwrap();
    sent.world
        .run("near", &["send", "big.raw", "far"])
        .fails(3, &["big.raw", "drover unmount"]);
    fs::remove_file(&path).unwrap();
    drop(client);

    sent.unmount(&socket);
    sent.far(&["transfers", "rm", "big.raw", "--yes"]).ok();
}

#[test]
fn whatever_dies_a_machines_writes_are_there_and_the_image_arrives() {
    let mut sent = Sent::new("big.raw");
    sent.begin("big.raw");
    let socket = sent.launch("big.raw", "s");
    let mut now = sent.bytes.clone();
    let mut client = Client::connect(&socket, "big.raw");
    let ahead = 11 * BATCH + 4096;
    assert!(client.read(ahead as u64, 4096).unwrap() == now[ahead..ahead + 4096]);
    let written = 7 * BATCH + 8192;
    client.write(written as u64, &[5; 4096]).unwrap();
    client.flush().unwrap();
    now[written..][..4096].fill(5);

    // The source goes: what is not here is waited for.
    sent.stop();
    let wanted = 10 * BATCH + 4096;
    let reader = held(&socket, "big.raw", wanted);
    until("it is told that something is waited for", || {
        let trouble = sent.disk()["trouble"].clone();
        let held = |t: &str| t.contains("waiting for blocks") && t.contains("are held until");
        trouble.as_str().is_some_and(held)
    });
    assert!(client.read(ahead as u64, 4096).unwrap() == now[ahead..ahead + 4096]);

    // The site is killed, and comes back.
    sent.kill_site();
    sent.start_site();
    assert!(client.read(written as u64, 4096).unwrap() == now[written..][..4096]);
    assert!(client.read(ahead as u64, 4096).unwrap() == now[ahead..ahead + 4096]);
    client.write(0, &[6; 4096]).unwrap();
    client.flush().unwrap();
    now[..4096].fill(6);
    assert!(!reader.is_finished());

    // So is the launcher.
    let mounts = sent.far(&["mounts", "--json"]).ok().json();
    signal(mounts[0]["process"].as_u64().unwrap() as u32, "KILL");
    assert!(reader.join().unwrap().is_err(), "its connection is cut");
    drop(client);
    let socket = sent.launch("big.raw", "s");
    let mut client = Client::connect(&socket, "big.raw");
    for at in [0, written, ahead] {
        assert!(
            client.read(at as u64, 4096).unwrap() == now[at..at + 4096],
            "{at}"
        );
    }
    let reader = held(&socket, "big.raw", wanted);

    // It is sent again, and arrives while it is used.
    let report = sent
        .world
        .run("near", &["send", "big.raw", "far", "--json"])
        .ok()
        .json();
    let last = report
        .iter()
        .rev()
        .find(|e| e["event"] == "delivered")
        .unwrap();
    assert!(reader.join().unwrap().unwrap() == now[wanted..wanted + 8192]);
    let digest = sent.world.run("near", &["digest", "big.raw"]).ok().out;
    assert!(
        digest.starts_with(last["digest"].as_str().unwrap()),
        "{digest} {last}"
    );
    assert!(sent.world.delivered("far", "big.raw") == sent.bytes);
    assert!(client.read(0, 1 << 20).unwrap() == now[..1 << 20]);
    client.write(1 << 20, &[8; 4096]).unwrap();
    client.flush().unwrap();
    now[1 << 20..][..4096].fill(8);

    // Nor is it removed or sent anew while its machine runs.
    assert_ne!(sent.far(&["rm", "big.raw", "--yes"]).code, Some(0));

    // By now what nobody wrote is read from the image itself, also while the site does nothing.
    let (at, length) = (4 * BATCH, 256 << 10);
    until("the image is read from its file", || {
        let before = sent.disk()["received"].as_u64();
        assert!(client.read(at as u64, length).unwrap() == now[at..at + length]);
        sent.disk()["received"].as_u64() < before.map(|before| before + length as u64)
    });
    let site = sent.far.as_ref().unwrap();
    site.signal("STOP");
    let read = client.read(5 * BATCH as u64, length);
    site.signal("CONT");
    assert!(read.unwrap() == now[5 * BATCH..][..length]);
    assert!(client.read(0, 1 << 20).unwrap() == now[..1 << 20]);

    // The site comes back once more: it is the same image.
    sent.kill_site();
    sent.start_site();
    assert!(client.read(1 << 20, 4096).unwrap() == [8; 4096]);
    drop(client);
    sent.unmount(&socket);
    assert_eq!(sent.changed(), 3 * 4096);
    let table = sent.far(&["changes"]).ok().out;
    assert!(!table.contains("earlier"), "{table}");
    sent.far(&["changes", "merge", "big.raw"]).ok();
    assert!(sent.world.delivered("far", "big.raw") == now);
}

#[test]
fn a_qcow2_image_is_launched_as_the_disk_that_it_holds() {
    if !has("launch qcow2", &["qemu-img"]) {
        return;
    }
    let mut sent = Sent::new("big.raw");
    let (raw, qcow2) = (sent.world.path("big.raw"), sent.world.path("big.qcow2"));
    let [raw, path] = [&raw, &qcow2].map(|path| path.to_str().unwrap());
    tool(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", raw, path],
    );
    sent.begin("big.qcow2");
    let socket = sent.launch("big.qcow2", "s");
    let mut client = Client::connect(&socket, "big.qcow2");
    assert_eq!(client.size, sent.bytes.len() as u64);
    for at in [11 * BATCH, 700_000, 11 * BATCH - 100] {
        let read = client.read(at as u64, 70_000).unwrap();
        assert!(read == sent.bytes[at..at + 70_000], "at {at}");
    }
    client.write(11 * BATCH as u64 + 100, &[3; 100]).unwrap();
    client.flush().unwrap();
    sent.stop();
    sent.world.run("near", &["send", "big.qcow2", "far"]).ok();
    sent.bytes[11 * BATCH + 100..][..100].fill(3);
    assert!(client.read(11 * BATCH as u64, 65_536).unwrap() == sent.bytes[11 * BATCH..][..65_536]);
    assert!(sent.world.delivered("far", "big.qcow2") == fs::read(&qcow2).unwrap());
    drop(client);
    sent.unmount(&socket);

    // Complete, it is launched as it is exported.
    let socket = sent.launch("big.qcow2", "s");
    let mut client = Client::connect(&socket, "big.qcow2");
    assert!(client.read(11 * BATCH as u64, 65_536).unwrap() == sent.bytes[11 * BATCH..][..65_536]);
    drop(client);
    sent.unmount(&socket);
}

/// Where a profile begins to read, in its order, and the boots that it counts.
fn profile_of(shown: &Value) -> (Vec<u64>, u64) {
    let regions = shown["regions"].as_array().unwrap();
    let starts = regions.iter().map(|r| r["offset"].as_u64().unwrap());
    (starts.collect(), shown["boots"].as_u64().unwrap())
}

#[test]
fn a_boot_from_an_image_in_transit_is_recorded_for_its_profile() {
    let mut sent = Sent::new("big.raw");
    sent.far(&["launch", "big.raw", "disk", "--for", "1m"])
        .fails(2, &["--for is for --profile"]);
    sent.begin("big.raw");
    let path = sent.world.path("s");
    let (socket, nbd) = (path.to_str().unwrap(), format!("unix:{}", path.display()));
    let options = ["--background", "--wait", "3m", "--profile"];
    let args = ["launch", "big.raw", "--nbd", &nbd];
    sent.far(&[&args[..], &options].concat()).ok();
    let mut machine = Client::connect(&path, "big.raw");
    let places = [11, 9, 10].map(|n| (n * BATCH) as u64 + 65_536);
    // What it writes before it reads is not the image's.
    machine.write(8 * BATCH as u64, &[7; 4096]).unwrap();
    for at in places.iter().chain([&(8 * BATCH as u64)]) {
        machine.read(*at, 4096).unwrap();
    }
    let stop = ["profile", "stop", socket, "--json"];
    let first = sent.far(&stop).ok().json();
    assert_eq!(
        (
            &first[0]["blocks"],
            &first[0]["boots"],
            &first[0]["problem"]
        ),
        (&3.into(), &1.into(), &Value::Null),
        "{first:?}"
    );
    // Another one, while nothing is sent.
    sent.stop();
    sent.far(&["profile", "record", socket]).ok();
    machine.read(places[1], 4096).unwrap();
    let second = sent.far(&stop).ok().json();
    assert_eq!(second[0]["boots"], 2, "{second:?}");
    sent.far(&["profile", "big.raw"])
        .fails(3, &["no image called big.raw"]);

    // Also after the site was killed, they become those of the image when it is complete.
    drop(machine);
    sent.unmount(&path);
    sent.kill_site();
    sent.start_site();
    sent.world.run("near", &["send", "big.raw", "far"]).ok();
    let shown = sent.far(&["profile", "big.raw", "--json"]).ok().json();
    let (mut starts, boots) = profile_of(&shown[0]);
    starts.sort_unstable();
    assert_eq!((starts, boots), (vec![places[1], places[2], places[0]], 2));
    // And one of the complete image.
    let socket = sent.world.path("t");
    let nbd = format!("unix:{}", socket.display());
    let args = ["launch", "big.raw", "--nbd", &nbd];
    sent.far(&[&args[..], &options].concat()).ok();
    let mut machine = Client::connect(&socket, "big.raw");
    machine.read(places[0], 4096).unwrap();
    drop(machine);
    sent.unmount(&socket);
    let shown = sent.far(&["profile", "big.raw", "--json"]).ok().json();
    assert_eq!(profile_of(&shown[0]).1, 3);
}

/// The partial file of the only image in transit at the far site.
fn partial(world: &World) -> Option<File> {
    let mut transfers = fs::read_dir(world.path("far/work/transfers")).ok()?;
    let dir = transfers.next()?.ok()?.path();
    File::open(dir.join("image.part")).ok()
}

#[test]
fn what_a_profile_lists_arrives_before_the_rest_also_if_nobody_runs_the_image() {
    let mut sent = Sent::new("big.raw");
    let near = |args: &[&str]| sent.world.run("near", args).ok();
    near(&["index", "big.raw"]);
    let boot = sent.world.path("boot.sock");
    let nbd = format!("unix:{}", boot.display());
    near(&[
        "export",
        "big.raw",
        "--nbd",
        &nbd,
        "--background",
        "--profile",
    ]);
    let mut machine = Client::connect(&boot, "big.raw");
    let places = [11, 9, 10].map(|n| n * BATCH + 65_536);
    let length = 131_072;
    for at in places {
        machine.read(at as u64, length).unwrap();
    }
    drop(machine);
    until("the client has left", || {
        let unmount = sent.world.run("near", &["unmount", boot.to_str().unwrap()]);
        unmount.code == Some(0)
    });

    sent.begin("big.raw");
    let has = |at: usize, length: usize| {
        let mut found = vec![0; length];
        let read = partial(&sent.world).map(|part| part.read_exact_at(&mut found, at as u64));
        matches!(read, Some(Ok(()))) && found == sent.bytes[at..at + length]
    };
    until("what the profile lists is there", || {
        places.iter().all(|at| has(*at, length))
    });
    // The rest would have come first otherwise.
    let others = (0..9).flat_map(|n| (0..12).map(move |m| n * BATCH + (m << 16)));
    let others = others.filter(|at| has(*at, 65_536)).count();
    assert!(others < 54, "{others} of 108");

    // A machine can read it although the source is gone.
    sent.stop();
    let socket = sent.launch("big.raw", "s");
    let mut client = Client::connect(&socket, "big.raw");
    for at in places {
        let read = client.read(at as u64, length).unwrap();
        assert!(read == sent.bytes[at..at + length], "at {at}");
    }
    // It is resumed with its profile, which becomes that of the image.
    let again = ["send", "big.raw", "far", "--json"];
    let report = sent.world.run("near", &again).ok();
    assert!(
        report.out.contains("its profile is sent along"),
        "{report:?}"
    );
    let shown = sent.far(&["profile", "big.raw", "--json"]).ok().json();
    assert_eq!(shown[0]["boots"], 1, "{shown:?}");
    assert!(sent.world.delivered("far", "big.raw") == sent.bytes);
    drop(client);
    sent.unmount(&socket);
}
