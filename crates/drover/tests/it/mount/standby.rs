//! Mounts that stand by, and write leases that are handed over to them.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use serde_json::Value;

use super::client::Client;
use super::{Mounts, text, tool};
use crate::world::{signal, until, wait};

const MIB: usize = 1 << 20;

/// The writer `near`, the other that stands by, and what is on the disk.
struct Pair {
    m: Mounts,
    bytes: Vec<u8>,
    here: PathBuf,
    there: PathBuf,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        let m = Mounts::new();
        m.pair("other");
        let mut bytes = m.raw("web.raw", seed);
        let here = m.export("web.raw", &["--push-interval", "100ms"]);
        let there = m.world.path("there.sock");
        let mut disk = Client::connect(&here, "web.raw");
        disk.write(4096, &[1; 4096]).unwrap();
        disk.flush().unwrap();
        bytes[4096..8192].fill(1);
        m.pushed();
        Pair {
            m,
            bytes,
            here,
            there,
        }
    }

    /// Writes where the disk is used now.
    fn write(&mut self, at: usize, byte: u8) {
        let mut disk = Client::connect(&self.here, "web.raw");
        disk.write(at as u64, &[byte; 4096]).unwrap();
        disk.flush().unwrap();
        self.bytes[at..at + 4096].fill(byte);
    }

    /// Begins to stand by; the command ends when it has the lease.
    fn stand_by(&self) -> Child {
        self.stand_by_with(Stdio::null())
    }

    fn stand_by_with(&self, stderr: Stdio) -> Child {
        let listen = format!("unix:{}", text(&self.there));
        let args = [
            "export",
            "far:web.raw",
            "--nbd",
            &listen,
            "--background",
            "--standby",
        ];
        let mut command = self.m.world.drover("other", &args);
        command.stdout(Stdio::null()).stderr(stderr);
        command.spawn().unwrap()
    }

    fn other(&self) -> Value {
        let mounts = self.m.world.run("other", &["mounts", "--json"]).ok().json();
        mounts.first().cloned().unwrap_or_default()
    }

    /// Waits until all of the disk is in the cache of the one that stands by.
    fn is_warm(&self) {
        until("it stands by with all of the disk", || {
            let mount = self.other();
            let disk = &mount["disks"][0];
            mount["state"] == "standby" && disk["local"] == disk["size"] && disk["size"] != 0
        });
    }

    /// Whether the mount that stood by holds the lease.
    fn is_held_there(&self) -> bool {
        let leases = self.m.world.run("far", &["mounts", "leases", "--json"]);
        let leases = leases.ok().json();
        let note = leases[0]["writer"]["note"].as_str().unwrap_or_default();
        let name = self.other()["name"].clone();
        note.contains(name.as_str().expect("the mount is known"))
    }

    /// Everything is at the other site now, and can be written there.
    fn is_there(&mut self) {
        assert!(self.m.list().is_empty(), "the mount is over");
        assert!(self.is_held_there());
        let mut disk = Client::connect(&self.there, "web.raw");
        assert!(
            disk.read(0, self.bytes.len()).unwrap() == self.bytes,
            "something old is read"
        );
        disk.write(2 * MIB as u64, &[9; 4096]).unwrap();
        disk.flush().unwrap();
        self.bytes[2 * MIB..2 * MIB + 4096].fill(9);
        drop(disk);
        self.m
            .world
            .run("other", &["unmount", text(&self.there)])
            .ok();
        assert!(self.m.far_bytes("web.raw") == self.bytes);
    }
}

#[test]
fn a_mount_that_stands_by_takes_over_with_its_cache() {
    let mut p = Pair::new(81);
    // Nothing happens where nobody stands by.
    p.m.near(&["mounts", "hand-over", text(&p.here)])
        .fails(1, &["no mount stands by", "--standby"]);
    p.write(8192, 2);
    let mut standby = p.stand_by();
    p.is_warm();
    let shown = p.m.world.run("other", &["mounts"]).ok().out;
    assert!(shown.contains("standing by"), "{shown}");
    assert!(!p.there.exists(), "no program sees the disk before");
    // It has these chunks already.
    p.write(3 * MIB + 4096, 3);
    p.write(12_288, 4);
    p.m.pushed();
    p.m.world
        .run("other", &["mounts", "hand-over", text(&p.there)])
        .fails(1, &["only stands by"]);
    let said = p.m.near(&["mounts", "hand-over", text(&p.here)]).ok().err;
    assert!(
        said.contains("its write lease was handed over to "),
        "{said}"
    );
    assert_eq!(wait(&mut standby), Some(0));
    let disk = p.other()["disks"][0].clone();
    assert!(
        disk["local"].as_u64() >= Some(2 * MIB as u64),
        "the cache is warm: {disk}"
    );
    p.is_there();
}

#[test]
fn whoever_is_killed_around_a_hand_over_there_is_one_writer() {
    let mut p = Pair::new(82);
    let mut standby = p.stand_by();
    p.is_warm();
    // What stands by is killed, and begins again.
    signal(p.other()["process"].as_u64().unwrap() as u32, "KILL");
    wait(&mut standby);
    p.write(MIB, 5);
    p.m.pushed();
    let mut standby = p.stand_by();
    p.is_warm();
    // The site that has the image is killed.
    p.m.kill_site();
    p.m.start_site();
    p.write(MIB + 4096, 6);
    // It has to know again that there is one that stands by.
    until("it can be handed over", || {
        // As it looks where nothing of it is served any more.
        let process = p.other()["process"].as_u64().unwrap() as u32;
        signal(process, "STOP");
        let handed = p.m.near(&["mounts", "hand-over", text(&p.here)]);
        let is_done = handed.code == Some(0);
        if is_done {
            // The one that has the lease now does not know it yet: it and the site are killed.
            signal(process, "KILL");
        } else {
            signal(process, "CONT");
        }
        is_done
    });
    p.m.kill_site();
    wait(&mut standby);
    p.m.start_site();
    assert!(p.is_held_there());
    // The former writer cannot come back.
    let listen = format!("unix:{}", text(&p.here));
    p.m.near(&["export", "far:web.raw", "--nbd", &listen, "--background"])
        .fails(3, &["holds the write lease"]);
    let mut standby = p.stand_by();
    assert_eq!(wait(&mut standby), Some(0));
    p.is_there();
}

#[test]
fn a_writer_that_is_killed_after_the_hand_over_learns_of_it() {
    let mut p = Pair::new(83);
    let mut standby = p.stand_by();
    p.is_warm();
    // What its process leaves behind if it is killed before it learns of the hand-over.
    let name = p.m.list()[0]["name"].as_str().unwrap().to_owned();
    let place = p.m.world.path("near/mounts").join(&name);
    let kept = p.m.world.path("kept");
    tool("cp", &["-a", text(&place), text(&kept)]);
    p.m.near(&["mounts", "hand-over", text(&p.here)]).ok();
    assert_eq!(wait(&mut standby), Some(0));
    assert!(!place.exists(), "nothing of it was left");
    tool("cp", &["-a", text(&kept), text(&place)]);
    let record = place.join("record.json");
    let mut begun: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    begun["handing_over"] = true.into();
    fs::write(&record, begun.to_string()).unwrap();
    let listen = format!("unix:{}", text(&p.here));
    let again = ["export", "far:web.raw", "--nbd", &listen, "--background"];
    // Nothing is written to its cache before the site was asked.
    p.m.kill_site();
    p.m.near(&again).fails(1, &["was being handed over"]);
    p.m.start_site();
    p.m.near(&again).fails(
        3,
        &["was handed over to", "unmount this one with --discard"],
    );
    p.m.near(&["unmount", text(&p.here), "--discard", "-y"])
        .ok();
    p.is_there();
}

#[test]
fn one_that_stood_by_in_vain_leaves_nothing() {
    let mut p = Pair::new(84);
    let ticket = p.m.world.run("far", &["ticket", "--can", "read"]).ok().out;
    p.m.world
        .run("a", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    let listen = format!("unix:{}", text(&p.there));
    // Without the right to write nothing begins.
    p.m.world
        .run(
            "a",
            &[
                "export",
                "far:web.raw",
                "--nbd",
                &listen,
                "--background",
                "--standby",
            ],
        )
        .fails(3, &["write"]);
    let mut standby = p.stand_by();
    p.is_warm();
    p.m.world.run("other", &["unmount", text(&p.there)]).ok();
    assert_ne!(wait(&mut standby), Some(0));
    assert_eq!(p.other(), Value::default());
    p.m.near(&["mounts", "hand-over", text(&p.here)])
        .fails(1, &["no mount stands by"]);
    p.write(0, 7);
    p.m.unmount(&p.here, &[]).ok();
    assert!(p.m.far_bytes("web.raw") == p.bytes);
    // Where nobody writes, it says that it waits in vain.
    let none = "no mount has far:web.raw open for writing";
    let standby = p.stand_by_with(Stdio::piped());
    until("it is listed with the reason", || {
        let trouble = &p.other()["disks"][0]["trouble"];
        trouble.as_str().is_some_and(|text| text.contains(none))
    });
    p.m.world.run("other", &["unmount", text(&p.there)]).ok();
    let said = standby.wait_with_output().unwrap().stderr;
    let said = String::from_utf8_lossy(&said);
    assert_eq!(said.matches(none).count(), 1, "{said}");
}
