//! What is written to plain files, in rounds: without a guest, QEMU is told to write; and with one that moves.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use drover_hypervisor::Rounds;
use drover_hypervisor::machine::{Channel, Export, IOTHREAD_VERSION, Machine, Node};
use drover_hypervisor::rounds::{View, clear};
use drover_hypervisor::testing::{Guest, Launch, Qemu, program};

use crate::util::{Pair, copy, drive, equal, raw, wait_event, write};

const SIZE: u64 = 1 << 20;

/// A machine with two plain files as disks, as people start it.
async fn two_disks(directory: &std::path::Path) -> (Qemu, Machine, Vec<String>) {
    let mut launch = Launch::new().with("-S");
    for name in ["a.raw", "b.raw"] {
        launch = drive(launch, &raw(directory, name, SIZE));
    }
    let mut qemu = launch.start(directory, "web");
    let machine = qemu.machine().await;
    let disks = machine.disks().await.unwrap();
    let nodes = disks
        .into_iter()
        .map(|disk| disk.medium.unwrap().node)
        .collect();
    (qemu, machine, nodes)
}

async fn copy_all(views: &[View], directory: &std::path::Path) -> Vec<u64> {
    let mut copied = Vec::new();
    for (view, name) in views.iter().zip(["a.copy", "b.copy"]) {
        let count = copy(view, &directory.join(name)).await;
        assert_eq!(count, view.bytes);
        copied.push(count);
    }
    copied
}

#[tokio::test]
async fn rounds_have_what_was_written_and_what_was_not_confirmed() {
    let Some(()) = program("rounds_have_what_was_written_and_what_was_not_confirmed") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let private = path.join("private/rounds");
    let (_qemu, machine, nodes) = two_disks(path).await;
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    write(&machine, 0, 1, 1).await;
    let mut rounds = Rounds::begin(&machine, "lyon.1", &nodes, &private, 4096)
        .await
        .unwrap();
    let whole = rounds.whole().await.unwrap();
    assert_eq!(copy_all(&whole, path).await, [SIZE, SIZE]);
    equal(path, "raw", "copy");

    write(&machine, 0, 7, 2).await;
    assert_eq!(rounds.dirty().await.unwrap(), [4096, 0]);
    let first = rounds.next().await.unwrap();
    assert_eq!(copy_all(&first, path).await, [4096, 0]);
    equal(path, "raw", "copy");
    rounds.confirm().await.unwrap();

    // Nobody confirms this one, so its blocks come again.
    write(&machine, 0, 8, 3).await;
    write(&machine, 1, 3, 3).await;
    assert_eq!(rounds.next().await.unwrap()[1].bytes, 4096);
    write(&machine, 1, 4, 3).await;
    let third = rounds.next().await.unwrap();
    assert_eq!(copy_all(&third, path).await, [4096, 8192]);
    equal(path, "raw", "copy");

    // Another drover goes on: still none of it was confirmed.
    write(&machine, 0, 20, 4).await;
    drop(rounds);
    let resumed = Rounds::resume(&machine, "lyon.1", &nodes, &private, 4096)
        .await
        .unwrap();
    let mut rounds = resumed.unwrap();
    let fourth = rounds.next().await.unwrap();
    assert_eq!(copy_all(&fourth, path).await, [8192, 8192]);
    equal(path, "raw", "copy");
    rounds.confirm().await.unwrap();
    rounds.confirm().await.unwrap();
    let fifth = rounds.next().await.unwrap();
    assert_eq!(fifth.iter().map(|view| view.bytes).sum::<u64>(), 0);
    // Disks that were not all recorded cannot be gone on with.
    let less = machine
        .remove_bitmap(nodes[1], "drover-lyon.1-6", std::time::Duration::ZERO)
        .await;
    less.unwrap();
    let gone = rounds.next().await.unwrap_err().to_string();
    assert!(gone.contains("drover-lyon.1-6"), "{gone}");
    assert!(
        Rounds::resume(&machine, "lyon.1", &nodes, &private, 4096)
            .await
            .unwrap()
            .is_none()
    );

    rounds.end().await.unwrap();
    assert!(!private.exists() && machine.exports().await.unwrap().is_empty());
    for node in &nodes {
        assert_eq!(machine.bitmaps(node).await.unwrap(), []);
    }
    assert!(
        Rounds::resume(&machine, "lyon.1", &nodes, &private, 4096)
            .await
            .unwrap()
            .is_none()
    );
    clear(&machine, "lyon.1", &private).await.unwrap();
}

#[tokio::test]
async fn rounds_that_cannot_begin_leave_nothing() {
    let Some(()) = program("rounds_that_cannot_begin_leave_nothing") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let private = dir.path().join("rounds");
    let (_qemu, machine, nodes) = two_disks(dir.path()).await;
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    for (name, nodes, granularity, reason) in [
        ("a b", vec![nodes[0]], 4096, "cannot call bitmaps \"a b\""),
        (
            "web",
            vec![nodes[0], "other"],
            4096,
            "has no disk on block node other",
        ),
        ("web", nodes.clone(), 5000, "power of 2"),
    ] {
        let begun = Rounds::begin(&machine, name, &nodes, &private, granularity).await;
        let error = begun.unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    // Somebody's own server stays.
    let listener = UnixListener::bind(dir.path().join("other.sock")).unwrap();
    machine.start_nbd_server(listener).await.unwrap();
    let busy = Rounds::begin(&machine, "web", &nodes, &private, 4096)
        .await
        .unwrap_err();
    assert!(
        busy.to_string().contains("NBD server already running"),
        "{busy}"
    );
    assert!(!private.exists());
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::write(open.join("somebody's"), "file").unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    let shared = Rounds::begin(&machine, "web", &nodes, &open, 4096)
        .await
        .unwrap_err();
    assert!(
        shared
            .to_string()
            .contains("other users can enter this directory"),
        "{shared}"
    );
    for node in &nodes {
        assert_eq!(machine.bitmaps(node).await.unwrap(), []);
    }
    machine.stop_nbd_server().await.unwrap();
    // One that nobody ended gives way to the next of its name.
    for _ in 0..2 {
        let mut rounds = Rounds::begin(&machine, "web", &nodes, &private, 4096)
            .await
            .unwrap();
        rounds.next().await.unwrap();
    }
    // Another program that exports by the same server keeps it.
    let other = Export {
        id: "backup",
        node: nodes[0],
        writable: false,
        bitmaps: &[],
    };
    machine.add_export(&other).await.unwrap();
    clear(&machine, "web", &private).await.unwrap();
    assert_eq!(machine.bitmaps(nodes[0]).await.unwrap(), []);
    assert_eq!(machine.exports().await.unwrap(), ["backup"]);
}

#[tokio::test]
async fn a_machine_with_iothreads_is_not_read_by_a_qemu_that_dies_of_it() {
    let test = "a_machine_with_iothreads_is_not_read_by_a_qemu_that_dies_of_it";
    let Some(()) = program(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let image = raw(dir.path(), "a.raw", SIZE);
    let bytes = Node::File {
        name: "disk".into(),
        path: image,
    };
    let threads = "-object iothread,id=io0 -device virtio-blk-pci,drive=disk,iothread=io0 -S";
    let mut qemu = Launch::new()
        .node(&bytes)
        .with(threads)
        .start(dir.path(), "web");
    let machine = qemu.machine().await;
    let private = dir.path().join("rounds");
    let begun = Rounds::begin(&machine, "web", &["disk"], &private, 4096).await;
    if machine.version() < IOTHREAD_VERSION {
        let refused = begun.unwrap_err().to_string();
        assert!(refused.contains("can abort it"), "{refused}");
        assert_eq!(machine.bitmaps("disk").await.unwrap(), []);
    } else {
        let rounds = begun.unwrap();
        copy(&rounds.whole().await.unwrap()[0], &dir.path().join("copy")).await;
        rounds.end().await.unwrap();
    }
    let scratch = dir.path().join("scratch");
    let held = Rounds::begin_held(&machine, "web", &["disk"], &private, 4096, &scratch).await;
    let refused = held.unwrap_err().to_string();
    assert!(refused.contains("has iothreads, with which"), "{refused}");
    assert!(!private.exists() && !scratch.exists() && qemu.running());
}

#[tokio::test]
async fn a_writing_guest_moves_from_a_plain_file() {
    let test = "a_writing_guest_moves_from_a_plain_file";
    let Some(()) = program(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let Some(guest) = Guest::build(test, path) else {
        return;
    };
    let old = raw(path, "a.raw", SIZE);
    let new = raw(path, "a.copy", SIZE);
    let mut here = drive(Launch::new(), &old)
        .guest(&guest, 10, 4)
        .start(path, "here");
    let bytes = Node::File {
        name: "bytes".into(),
        path: new.clone(),
    };
    let disk = Node::Raw {
        name: "disk".into(),
        file: "bytes".into(),
    };
    let there = Launch::new()
        .node(&bytes)
        .node(&disk)
        .disk("vd0", "disk")
        .guest(&guest, 10, 4);
    let mut there = there.incoming().start(path, "there");
    let mut pair = Pair::new(here.machine().await, there.machine().await).await;
    let node = pair.source.disks().await.unwrap()[0]
        .medium
        .clone()
        .unwrap()
        .node;
    here.wait_said("beat", 20).await;

    let source = pair.source.clone();
    let private = path.join("rounds");
    let mut rounds = Rounds::begin(&source, "there", &[&node], &private, 4096)
        .await
        .unwrap();
    copy(&rounds.whole().await.unwrap()[0], &new).await;
    let before = here.said("beat").unwrap();
    here.wait_said("beat", before + 20).await;
    for _ in 0..2 {
        copy(&rounds.next().await.unwrap()[0], &new).await;
        rounds.confirm().await.unwrap();
    }
    let channel = Channel::Unix(path.join("memory.sock"));
    pair.begin(&channel, &channel).await;
    // It writes no more: the last round.
    let last = rounds.next().await.unwrap();
    assert!(copy(&last[0], &new).await < SIZE / 2);
    pair.switch().await;
    assert!(fs::read(&old).unwrap() == fs::read(&new).unwrap());
    // What was its disk can still be read.
    let again = path.join("again");
    copy(&rounds.whole().await.unwrap()[0], &again).await;
    assert!(fs::read(&old).unwrap() == fs::read(&again).unwrap());

    let last = here.said("beat").unwrap();
    pair.destination.cont().await.unwrap();
    wait_event(&mut pair.destination_events, "RESUME").await;
    there.wait_said("beat", last + 10).await;
    assert!(there.verify().await > last);
    rounds.end().await.unwrap();
    pair.source.quit().await.unwrap();
}
