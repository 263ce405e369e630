//! Disks as of one moment, while the machine writes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_hypervisor::machine::{Action, Machine, RunState};
use drover_hypervisor::rounds::{View, clear};
use drover_hypervisor::testing::{Guest, Launch, Qemu, program};
use drover_hypervisor::{HypervisorError, Rounds};

use crate::util::{copy, drive, equal, raw, try_copy, wait_event, write};

const SIZE: u64 = 1 << 20;

/// A machine with two plain files as disks, as people start it.
struct Web {
    dir: tempfile::TempDir,
    _qemu: Qemu,
    machine: Machine,
    nodes: Vec<String>,
}

impl Web {
    async fn start(arguments: &str) -> Web {
        let dir = tempfile::tempdir().unwrap();
        let mut launch = Launch::new().with(arguments);
        for name in ["a.raw", "b.raw"] {
            launch = drive(launch, &raw(dir.path(), name, SIZE));
        }
        let mut qemu = launch.start(dir.path(), "web");
        let machine = qemu.machine().await;
        let nodes = used(&machine).await;
        Web {
            dir,
            _qemu: qemu,
            machine,
            nodes,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn begin(&self, granularity: u32, scratch: &Path) -> Result<Rounds, HypervisorError> {
        let (directory, nodes) = (self.path("rounds"), self.nodes.iter().map(String::as_str));
        let nodes: Vec<&str> = nodes.collect();
        let machine = &self.machine;
        Rounds::begin_held(machine, "web", &nodes, &directory, granularity, scratch).await
    }

    async fn resume(&self, disks: [usize; 2]) -> Rounds {
        let nodes = disks.map(|disk| self.nodes[disk].as_str());
        let directory = self.path("rounds");
        let resumed = Rounds::resume(&self.machine, "web", &nodes, &directory, 4096).await;
        resumed.unwrap().unwrap()
    }

    async fn clear(&self) {
        let directory = self.path("rounds");
        clear(&self.machine, "web", &directory).await.unwrap();
    }

    /// Nothing is left in QEMU.
    async fn is_as_before(&self) {
        assert_eq!(used(&self.machine).await, self.nodes);
        for medium in self.machine.nodes().await.unwrap() {
            assert_eq!(medium.bitmaps, []);
            assert!(!medium.node.starts_with("drover"), "{}", medium.node);
        }
        assert!(self.machine.exports().await.unwrap().is_empty());
        assert!(!self.path("rounds").exists());
    }
}

/// The nodes that the disks use.
async fn used(machine: &Machine) -> Vec<String> {
    let disks = machine.disks().await.unwrap();
    disks
        .into_iter()
        .map(|disk| disk.medium.unwrap().node)
        .collect()
}

/// Copies both disks.
async fn copy_both(views: &[View], directory: &Path) {
    for (view, name) in views.iter().zip(["a.copy", "b.copy"]) {
        copy(view, &directory.join(name)).await;
    }
}

#[tokio::test]
async fn what_is_held_does_not_change() {
    let Some(()) = program("what_is_held_does_not_change") else {
        return;
    };
    let web = Web::start("-S").await;
    let (path, machine) = (web.dir.path(), &web.machine);
    write(machine, 0, 1, 1).await;
    write(machine, 1, 2, 1).await;
    let scratch = web.path("scratch");
    let mut rounds = web.begin(4096, &scratch).await.unwrap();
    // No file has a name.
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
    for name in ["a", "b"] {
        let [disk, then] = ["raw", "then"].map(|kind| path.join(format!("{name}.{kind}")));
        fs::copy(disk, then).unwrap();
    }
    write(machine, 0, 1, 2).await;
    write(machine, 0, 9, 2).await;
    write(machine, 1, 2, 2).await;
    assert_eq!(rounds.dirty().await.unwrap(), [8192, 4096]);
    let held = rounds.held().await.unwrap().unwrap();
    copy_both(&held, path).await;
    equal(path, "then", "copy");
    // A round goes meanwhile, and is not of the same moment.
    let round = rounds.next().await.unwrap();
    let bytes: Vec<u64> = round.iter().map(|view| view.bytes).collect();
    assert_eq!(bytes, [8192, 4096]);

    // Another drover goes on: with the rounds, and with what is held.
    drop(rounds);
    write(machine, 0, 1, 3).await;
    let rounds = web.resume([0, 1]).await;
    assert_eq!(rounds.held().await.unwrap().unwrap(), held);
    copy_both(&held, path).await;
    equal(path, "then", "copy");
    // In another order it would be another disk's.
    drop(rounds);
    assert_eq!(web.resume([1, 0]).await.held().await.unwrap(), None);
    let mut rounds = web.resume([0, 1]).await;
    assert_eq!(rounds.held().await.unwrap(), None);
    assert_eq!(used(machine).await, web.nodes);

    write(machine, 1, 5, 4).await;
    copy_both(&rounds.next().await.unwrap(), path).await;
    rounds.confirm().await.unwrap();
    equal(path, "raw", "copy");
    rounds.end().await.unwrap();
    web.is_as_before().await;

    // Released, and ended by somebody else.
    let mut rounds = web.begin(4096, &scratch).await.unwrap();
    rounds.release_held().await.unwrap();
    rounds.release_held().await.unwrap();
    assert_eq!(rounds.held().await.unwrap(), None);
    write(machine, 1, 6, 5).await;
    assert_eq!(rounds.next().await.unwrap()[1].bytes, 4096);
    for _ in 0..2 {
        drop(web.begin(4096, &scratch).await.unwrap());
    }
    web.clear().await;
    web.is_as_before().await;
    machine.quit().await.unwrap();
}

#[tokio::test]
async fn one_state_after_another_is_held_and_what_differs_is_known() {
    let test = "one_state_after_another_is_held_and_what_differs_is_known";
    let Some(()) = program(test) else { return };
    let web = Web::start("").await;
    let (path, machine) = (web.dir.path(), &web.machine);
    let scratch = web.path("scratch");
    let mut rounds = web.begin(4096, &scratch).await.unwrap();
    for n in 2..5 {
        write(machine, 0, n, 1).await;
        write(machine, 1, 2 * n, 1).await;
        let dirty = rounds.hold_next(&scratch).await.unwrap();
        assert_eq!(machine.status().await.unwrap(), RunState::Running);
        for name in ["a", "b"] {
            let [disk, then] = ["raw", "then"].map(|kind| path.join(format!("{name}.{kind}")));
            fs::copy(disk, then).unwrap();
        }
        // That is in the next one.
        write(machine, 0, n, 9).await;
        let bytes: Vec<u64> = dirty.iter().map(|view| view.bytes).collect();
        assert_eq!(bytes, [if n > 2 { 8192 } else { 4096 }, 4096]);
        copy_both(&rounds.held().await.unwrap().unwrap(), path).await;
        equal(path, "then", "copy");
        if n > 2 {
            // Or at once: the next one ends what this one holds.
            rounds.rest().await.unwrap();
            assert_eq!(used(machine).await, web.nodes);
            assert!(machine.exports().await.unwrap().is_empty());
        }
    }
    rounds.end().await.unwrap();
    web.is_as_before().await;
    machine.quit().await.unwrap();
}

#[tokio::test]
async fn a_full_scratch_ends_what_is_held_and_spares_the_machine() {
    let test = "a_full_scratch_ends_what_is_held_and_spares_the_machine";
    let Some(()) = program(test) else { return };
    let web = Web::start("").await;
    let (path, machine) = (web.dir.path(), &web.machine);
    let scratch = web.path("scratch");
    fs::create_dir(&scratch).unwrap();
    let Some(_small) = Small::mount(test, &scratch) else {
        return;
    };
    for block in 0..256 {
        write(machine, 0, block, 1).await;
    }
    let mut rounds = web.begin(4096, &scratch).await.unwrap();
    let held = rounds.held().await.unwrap().unwrap();
    write(machine, 0, 3, 2).await;
    try_copy(&held[0], &web.path("a.copy")).await.unwrap();
    // Each costs 64 KiB of the 256 that there are.
    for block in 0..256 {
        write(machine, 0, block, 2).await;
    }
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    assert!(fs::read(web.path("a.raw")).unwrap() == [2; SIZE as usize]);
    let ended = try_copy(&held[0], &web.path("a.copy")).await.unwrap_err();
    assert!(ended.contains("Permission denied"), "{ended}");
    // The other disk is still held: it has a filter of its own.
    try_copy(&held[1], &web.path("b.copy")).await.unwrap();
    rounds.release_held().await.unwrap();
    write(machine, 0, 4, 3).await;
    copy_both(&rounds.whole().await.unwrap(), path).await;
    copy_both(&rounds.next().await.unwrap(), path).await;
    equal(path, "raw", "copy");
    // What it had is free again.
    fs::write(scratch.join("file"), vec![1; 200 << 10]).unwrap();
    rounds.end().await.unwrap();
    web.is_as_before().await;
}

/// A file system of 256 KiB.
struct Small(PathBuf);

impl Small {
    fn mount(test: &str, at: &Path) -> Option<Small> {
        let options = ["-t", "tmpfs", "-o", "size=256k,mode=700", "drover-test"];
        let ran = std::process::Command::new("mount")
            .args(options)
            .arg(at)
            .output();
        match ran {
            Ok(done) if done.status.success() => Some(Small(at.to_owned())),
            _ => {
                eprintln!("SKIP {test}: cannot mount a tmpfs");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // QEMU has its files open yet.
        let unmount = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .status();
        assert!(unmount.unwrap().success());
    }
}

#[tokio::test]
async fn a_pause_for_several_disks_ends_also_without_us() {
    let Some(()) = program("a_pause_for_several_disks_ends_also_without_us") else {
        return;
    };
    let web = Web::start("").await;
    let machine = &web.machine;
    let mut events = machine.events();
    let scratch = web.path("scratch");
    // Also when nobody waits for it any more.
    let begin = web.begin(4096, &scratch);
    tokio::select! {
        begun = begin => drop(begun.unwrap()),
        () = wait_event(&mut events, "STOP") => {}
    }
    // What is under way ends first.
    web.clear().await;
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    web.is_as_before().await;

    // As by a drover that died in the middle.
    let mark = Action::AddMark {
        node: &web.nodes[0],
        name: "drover-web-paused",
    };
    machine.transaction(&[mark]).await.unwrap();
    machine.stop().await.unwrap();
    web.clear().await;
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    web.is_as_before().await;
    // By its user.
    machine.stop().await.unwrap();
    web.clear().await;
    let rounds = web.begin(4096, &scratch).await.unwrap();
    assert_eq!(machine.status().await.unwrap(), RunState::Paused);
    rounds.end().await.unwrap();
    // One that cannot begin leaves the machine running, and nothing.
    machine.cont().await.unwrap();
    let refused = web.begin(5000, &scratch).await.unwrap_err().to_string();
    assert!(refused.contains("power of 2"), "{refused}");
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    let file = web.path("file");
    fs::write(&file, "").unwrap();
    let refused = web.begin(4096, &file).await.unwrap_err().to_string();
    assert!(refused.starts_with(file.to_str().unwrap()), "{refused}");
    web.is_as_before().await;
}

#[tokio::test]
async fn a_writing_guest_is_copied_as_of_one_moment() {
    let test = "a_writing_guest_is_copied_as_of_one_moment";
    let Some(()) = program(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let Some(guest) = Guest::build(test, path) else {
        return;
    };
    let mut launch = Launch::new();
    for name in ["a.raw", "b.raw"] {
        launch = drive(launch, &raw(path, name, SIZE));
    }
    let mut qemu = launch.guest(&guest, 2, 0).start(path, "web");
    let machine = qemu.machine().await;
    let nodes = used(&machine).await;
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    qemu.wait_said("beat", 300).await;

    let (directory, scratch) = (path.join("rounds"), path.join("scratch"));
    let begin = Rounds::begin_held(&machine, "web", &nodes, &directory, 4096, &scratch);
    let before = qemu.said("beat").unwrap();
    let mut rounds = begin.await.unwrap();
    let after = qemu.said("beat").unwrap();
    let held = rounds.held().await.unwrap().unwrap();
    // All of the disk is overwritten between the two.
    copy_both(&held, path).await;
    qemu.wait_said("beat", after + 300).await;
    copy(&held[0], &path.join("again")).await;
    let copied = fs::read(path.join("a.copy")).unwrap();
    assert!(copied == fs::read(path.join("again")).unwrap());
    // A record of this moment in each block, none newer: the last one said may not have been said yet.
    let number = |block: &[u8]| u64::from_le_bytes(block[8..16].try_into().unwrap());
    let numbers: Vec<u64> = copied.chunks(4096).map(number).collect();
    let last = *numbers.iter().max().unwrap();
    assert!(
        (before..=after + 1).contains(&last),
        "{before} {last} {after}"
    );
    for (block, number) in numbers.iter().enumerate() {
        let age = (last % 256 + 256 - block as u64) % 256;
        assert_eq!(*number, last - age, "block {block}");
    }

    // From there by rounds to what it has at last.
    rounds.release_held().await.unwrap();
    copy_both(&rounds.next().await.unwrap(), path).await;
    rounds.confirm().await.unwrap();
    let said = qemu.said("beat").unwrap();
    qemu.wait_said("beat", said + 20).await;
    machine.stop().await.unwrap();
    copy_both(&rounds.next().await.unwrap(), path).await;
    equal(path, "raw", "copy");
    rounds.end().await.unwrap();
    machine.cont().await.unwrap();
    assert!(qemu.verify().await > said);

    // Again and again, with a guest that writes.
    for _ in 0..20 {
        let begin = Rounds::begin_held(&machine, "web", &nodes, &directory, 4096, &scratch);
        let rounds = begin.await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        rounds.end().await.unwrap();
    }
    let said = qemu.said("beat").unwrap();
    qemu.wait_said("beat", said + 20).await;
    qemu.verify().await;
}
