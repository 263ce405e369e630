//! The disks of a real QEMU.

use std::time::Duration;

use drover_hypervisor::machine::Node;
use drover_hypervisor::testing::{Launch, program};

use super::*;

const SIZE: u64 = 1 << 20;

/// Moves that are given up at any moment of their first steps.
const GIVEN_UP: u64 = 150;

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_runs_on_whenever_a_move_is_given_up() {
    let test = "a_machine_runs_on_whenever_a_move_is_given_up";
    if program(test).is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.raw");
    std::fs::write(&path, vec![7; SIZE as usize]).unwrap();
    let (name, file) = (
        "file".into(),
        Node::File {
            name: "disk".into(),
            path,
        },
    );
    let disk = Node::Raw {
        name,
        file: "disk".into(),
    };
    let launch = Launch::new().node(&file).node(&disk).disk("vd0", "file");
    let mut qemu = launch.start(directory.path(), "web");
    let machine = qemu.machine().await;
    let work = directory.path().join("work");
    let nodes = vec!["file".to_owned()];
    let offers = vec![DiskOffer {
        image: ImageName::new("web-0.raw").unwrap(),
        device: "vd0".into(),
        size: SIZE,
        read_only: false,
    }];
    for n in 0..GIVEN_UP {
        let (nodes, offers) = (nodes.clone(), offers.clone());
        let mut disks = Disks {
            nodes,
            offers,
            ..Disks::default()
        };
        let begun = disks.hold(&machine, &work, directory.path());
        let after = Duration::from_micros(fastrand::u64(0..30_000));
        let begun = tokio::time::timeout(after, begun).await;
        drop(begun);
        disks.clear(&machine, &work).await;
        let left = machine.exports().await;
        assert_eq!(
            left.expect("it answers"),
            Vec::<String>::new(),
            "after {n} moves"
        );
    }
}

#[test]
fn only_a_bitmap_that_has_all_that_changed_is_used() {
    let bitmap = |tag: u64| Bitmap {
        name: format!("drover-{:032x}-1-{tag:016x}", 7),
        count: 0,
        granularity: 1 << 16,
        recording: true,
        busy: false,
        persistent: true,
        inconsistent: false,
    };
    let medium = |bitmaps: &[Bitmap]| Medium {
        node: "disk".into(),
        format: "qcow2".into(),
        size: 1 << 20,
        read_only: false,
        data: Data::File("/disk".into()),
        backing: None,
        snapshots: 0,
        encrypted: false,
        bitmaps: bitmaps.to_vec(),
    };
    let others = Bitmap {
        name: "backup".into(),
        ..bitmap(1)
    };
    assert_eq!(
        recorder(&medium(&[others.clone(), bitmap(1)])),
        Some(&bitmap(1))
    );
    let over = Medium {
        backing: Some("base.qcow2".into()),
        ..medium(&[bitmap(1)])
    };
    assert_eq!(recorder(&over), None, "another backing file is no write");
    let inconsistent = Bitmap {
        inconsistent: true,
        ..bitmap(1)
    };
    let disabled = Bitmap {
        recording: false,
        ..bitmap(1)
    };
    let passing = Bitmap {
        persistent: false,
        ..bitmap(1)
    };
    for none in [
        &[][..],
        &[others],
        &[bitmap(1), bitmap(2)],
        &[inconsistent],
        &[disabled],
        &[passing],
    ] {
        assert_eq!(recorder(&medium(none)), None, "{none:?}");
    }
}
