//! `drover move`: the disk of a program moves while the program writes numbered records to it.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use drover_core::BlockDevice;
use drover_device::backend::nbd::{NbdAddress, NbdDevice, NbdOptions, NbdSocket};
use serde_json::Value;

use crate::world::{Ran, Site, World, own_address, signal, until, wait};

mod faults;
mod names;
mod replicas;
mod snapshots;

const SLOTS: u64 = 2048;
const SLOT: u64 = 4096;
const SIZE: u64 = SLOTS * SLOT + (1 << 20);

/// Two sites, `near` and `far`, that may move disks to each other.
struct Sites {
    world: World,
    running: [(Site, SocketAddr); 2],
}

impl Sites {
    /// With the image `web.raw` at `near`.
    fn new() -> Sites {
        let world = World::new();
        let running = ["near", "far"].map(|home| {
            world.run(home, &["init"]).ok();
            let at = own_address();
            let serve = ["serve", "--listen", &at.to_string()];
            (world.process(home, &serve), at)
        });
        for (home, peer) in [("near", "far"), ("far", "near")] {
            let ticket = world.run(peer, &["ticket", "--can", "send,host"]).ok().out;
            let pair = ["pair", ticket.trim(), "--name", peer];
            world.run(home, &pair).ok();
        }
        for (home, peer) in [("near", "far"), ("far", "near")] {
            let can = ["peers", "set", peer, "--can", "send,host"];
            world.run(home, &can).ok();
        }
        let mut bytes = vec![0; SIZE as usize];
        fastrand::Rng::with_seed(8).fill(&mut bytes[(SLOTS * SLOT) as usize..]);
        fs::write(world.path("web.raw"), bytes).unwrap();
        world.run("far", &["send", "web.raw", "near"]).ok();
        Sites { world, running }
    }

    fn restart(&mut self, home: &str, variables: &[(&str, &str)]) {
        let site = &mut self.running[usize::from(home == "far")].0;
        site.signal("KILL");
        site.wait();
        self.serve_again(home, variables);
    }

    /// Starts a site that has ended.
    fn serve_again(&mut self, home: &str, variables: &[(&str, &str)]) {
        let (site, at) = &mut self.running[usize::from(home == "far")];
        let serve = ["serve", "--listen", &at.to_string()];
        *site = self.world.process_with(home, &serve, variables);
    }

    fn socket(&self, home: &str) -> PathBuf {
        self.world.path(&format!("{home}.nbd"))
    }

    fn try_export(&self, home: &str) -> Ran {
        let listen = format!("unix:{}", self.socket(home).display());
        let export = ["export", "web.raw", "--nbd", &listen, "--background"];
        self.world.run(home, &export)
    }

    /// Records what a boot from the disk reads: some of what the program does not write.
    fn record_boot(&self, home: &str) {
        let listen = format!("unix:{}", self.socket(home).display());
        let export = [
            "export",
            "web.raw",
            "--nbd",
            &listen,
            "--background",
            "--profile",
        ];
        self.world.run(home, &export).ok();
        let device = self.connect(home);
        device
            .read(SLOTS * SLOT + 40_960, &mut [0; 65_536])
            .unwrap();
        drop(device);
        until("the client has left", || {
            self.world.run(home, &["unmount", &listen]).code == Some(0)
        });
    }

    /// How many boots the profile of an image counts.
    fn boots(&self, home: &str, image: &str) -> Value {
        let profile = self.world.run(home, &["profile", image, "--json"]);
        profile.ok().json()[0]["boots"].clone()
    }

    fn connect(&self, home: &str) -> NbdDevice {
        let address = NbdAddress {
            socket: NbdSocket::Unix(self.socket(home)),
            export: "web.raw".into(),
        };
        NbdDevice::connect(&address, &NbdOptions::default()).unwrap()
    }

    /// Serves the disk to a program that writes, from this record on.
    fn program(&self, home: &str, first: u64) -> Program {
        self.try_export(home).ok();
        Program::start(self.connect(home), first)
    }

    /// The process that serves it.
    fn daemon(&self, home: &str) -> u32 {
        let mounts = self.world.run(home, &["mounts", "--json"]).ok().json();
        u32::try_from(mounts[0]["process"].as_u64().unwrap()).unwrap()
    }

    fn unmount(&self, home: &str) {
        let listen = format!("unix:{}", self.socket(home).display());
        self.world.run(home, &["unmount", &listen]).ok();
    }

    /// The state of the disk in the list of a site.
    fn state(&self, home: &str) -> Value {
        let listed = self.world.run(home, &["move", "--list", "--json"]).ok();
        listed
            .json()
            .first()
            .map_or(Value::Null, |disk| disk["state"].clone())
    }

    fn begin(&self, from: &str, to: &str, options: &[&str]) -> Moving {
        let args = [&["move", "web.raw", to, "--json"], options].concat();
        let piped = [Stdio::piped(), Stdio::piped()];
        let [out, err] = piped;
        let mut command = self.world.drover(from, &args);
        let mut process = command.stdout(out).stderr(err).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Moving { process, lines }
    }

    /// Checks that the disk can be written at one site only, and has all records; then the next may be written there.
    fn is_at(&self, home: &str, not: &str, last: u64) {
        self.try_export(not).code(3);
        self.try_export(home).ok();
        let device = self.connect(home);
        check(&device, last);
        drop(device);
        self.unmount(home);
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (site, at) in &self.running {
                println!("the log of the site at {at}:\n{}", site.log());
            }
        }
        for home in ["near", "far"] {
            let mounts = self.world.run(home, &["mounts", "--json"]);
            for mount in mounts.out.lines() {
                let mount: Value = serde_json::from_str(mount).unwrap_or_default();
                if let Some(process) = mount["process"].as_u64().filter(|process| *process > 0) {
                    signal(process as u32, "KILL");
                }
            }
        }
    }
}

/// Every record that was acknowledged is there, or a later one in its place.
fn check(device: &dyn BlockDevice, last: u64) {
    let mut bytes = vec![0; (SLOTS * SLOT) as usize];
    device.read(0, &mut bytes).unwrap();
    for slot in 0..SLOTS.min(last + 1) {
        let at = (slot * SLOT) as usize;
        let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let newest = last - (last - slot) % SLOTS;
        assert!(
            found == newest || found == last + 1,
            "{found} in the place of {newest}"
        );
    }
    let mut tail = vec![0; 1 << 20];
    device.read(SLOTS * SLOT, &mut tail).unwrap();
    let mut written = vec![0; 1 << 20];
    fastrand::Rng::with_seed(8).fill(&mut written);
    assert!(tail == written);
}

/// Writes numbered records, each durable before the next, until its disk answers no more.
struct Program {
    last: Arc<AtomicU64>,
    end: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Program {
    fn start(device: NbdDevice, first: u64) -> Program {
        let last = Arc::new(AtomicU64::new(first));
        let end = Arc::new(AtomicBool::new(false));
        let (written, stop) = (Arc::clone(&last), Arc::clone(&end));
        let thread = std::thread::spawn(move || {
            for record in first.. {
                let mut slot = [0; SLOT as usize];
                slot[..8].copy_from_slice(&record.to_le_bytes());
                let at = record % SLOTS * SLOT;
                if stop.load(Ordering::Relaxed)
                    || device.write(at, &slot).is_err()
                    || device.flush().is_err()
                {
                    return;
                }
                written.store(record, Ordering::Release);
            }
        });
        Program { last, end, thread }
    }

    fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire)
    }

    fn goes_on(&self) {
        let last = self.last();
        until("it writes on", || self.last() > last + 20);
    }

    /// Its last record, when its disk answers no more.
    fn ended(self) -> u64 {
        until("its disk is gone", || self.thread.is_finished());
        self.thread.join().unwrap();
        self.last.load(Ordering::Acquire)
    }

    /// Its last record, when it is told to stop.
    fn stop(self) -> u64 {
        self.end.store(true, Ordering::Relaxed);
        self.ended()
    }
}

/// A move that is under way.
struct Moving {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Moving {
    /// Waits for an event, in which this field has this value.
    fn until(&mut self, field: &str, value: &str) -> Value {
        let mut seen = Vec::new();
        for line in self.lines.by_ref() {
            let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
            if event[field] == value {
                return event;
            }
            seen.push(event.to_string());
        }
        panic!("{field} is never {value}:\n{}", seen.join("\n"));
    }

    /// Waits for the end.
    fn done(mut self) -> Value {
        let done = self.until("event", "done");
        assert_eq!(wait(&mut self.process), Some(0));
        done
    }

    /// Waits for its failure. What it says of that.
    fn fails(self) -> String {
        let output = self.process.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{err}");
        err
    }
}

#[test]
fn a_disk_moves_while_it_is_written_and_comes_back_for_what_changed() {
    let sites = Sites::new();
    sites.record_boot("near");
    let program = sites.program("near", 0);
    program.goes_on();
    let estimated = sites.begin("near", "far", &["--dry-run"]).done();
    assert!(
        estimated["image_wire_bytes"].as_u64() > Some(1 << 19),
        "{estimated}"
    );
    program.goes_on();
    let pause = sites.world.path("paused");
    let touch = format!("touch {}", pause.display());
    let done = sites.begin("near", "far", &["--pause", &touch]).done();
    assert!(pause.exists());
    assert!(done["image_wire_bytes"].as_u64() > Some(1 << 20), "{done}");
    assert!(done["pause"]["total_ms"].as_u64() > Some(0), "{done}");
    let last = program.ended();
    let states = [sites.state("near"), sites.state("far")];
    assert_eq!(states, ["away", "here"]);
    sites.is_at("far", "near", last);
    assert_eq!(sites.boots("far", "web.raw"), 1);
    sites.begin("near", "far", &[]).fails();

    // There it is an image like any other, and comes back for little.
    let program = sites.program("far", last + 1);
    program.goes_on();
    until("the old copy is frozen", || {
        let images = sites.world.run("near", &["images", "--json"]).ok().json();
        images[0]["generations"]["frozen"] == true && images[0]["changed_bytes"] == 0
    });
    let back = sites.begin("far", "near", &[]).done();
    let sent = |report: &Value| report["image_wire_bytes"].as_u64().unwrap();
    assert!(sent(&back) < 1 << 20, "{back}");
    let last = program.ended();
    sites.is_at("near", "far", last);
    // And goes again.
    let program = sites.program("near", last + 1);
    program.goes_on();
    sites.begin("near", "far", &[]).done();
    sites.is_at("far", "near", program.ended());
}
