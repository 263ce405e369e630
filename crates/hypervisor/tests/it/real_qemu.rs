//! QEMU without a guest: commands and their answers, descriptors, a migration of a machine that has booted nothing.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use drover_hypervisor::machine::{
    Action, Data, Export, Machine, MigrationParameters, MigrationStatus, Node, RunState,
    TCG_VERSION, Yank,
};
use drover_hypervisor::qmp::Command;
use drover_hypervisor::testing::{Launch, PATIENCE, program};
use drover_hypervisor::{ErrorClass, HypervisorError};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::util::{Pair, connect, raw, wait_event};

fn file_node(name: &str, path: PathBuf) -> Node {
    Node::File {
        name: name.into(),
        path,
    }
}

#[tokio::test]
async fn a_machine_is_described_and_driven() {
    let Some(()) = program("a_machine_is_described_and_driven") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let image = raw(dir.path(), "d.raw", 1 << 20);
    let disk = Node::Raw {
        name: "disk".into(),
        file: "bytes".into(),
    };
    let launch = Launch::new()
        .node(&file_node("bytes", image.clone()))
        .node(&disk)
        .disk("vd0", "disk")
        .with("-device ide-cd,id=cd -smp 2 -S");
    let mut qemu = launch.start(dir.path(), "web");
    let machine = qemu.machine().await;

    let description = machine.description().await.unwrap();
    assert_eq!(description.name.as_deref(), Some("web"));
    assert_eq!(
        (description.machine.as_str(), description.cpu.as_str()),
        ("pc-i440fx-7.2", "qemu64")
    );
    assert_eq!((description.cpus, description.accelerated), (2, false));

    let disks = machine.disks().await.unwrap();
    assert_eq!((disks[0].name.as_str(), disks[0].removable), ("vd0", false));
    let medium = disks[0].medium.as_ref().unwrap();
    assert_eq!(
        (medium.node.as_str(), medium.format.as_str(), medium.size),
        ("disk", "raw", 1 << 20)
    );
    assert_eq!(medium.data, Data::File(image));
    assert!(disks[1].name == "cd" && disks[1].removable && disks[1].medium.is_none());

    assert_eq!(machine.status().await.unwrap(), RunState::Prelaunch);
    let mut events = machine.events();
    machine.cont().await.unwrap();
    wait_event(&mut events, "RESUME").await;
    assert_eq!(machine.status().await.unwrap(), RunState::Running);
    machine.stop().await.unwrap();
    wait_event(&mut events, "STOP").await;
    assert_eq!(machine.status().await.unwrap(), RunState::Paused);

    let refused = machine
        .qmp()
        .order("no-such-command", json!({}))
        .await
        .unwrap_err();
    assert_eq!(refused.class(), Some(&ErrorClass::CommandNotFound));
    // QEMU serves one at a time, and says nothing to the next.
    let second = Machine::connect(qemu.socket()).await.unwrap_err();
    assert!(
        second
            .to_string()
            .contains("another program is connected to it"),
        "{second}"
    );

    machine.quit().await.unwrap();
    qemu.ended().await;
    assert!(matches!(
        machine.status().await,
        Err(HypervisorError::Closed { .. })
    ));
    let gone = Machine::connect(qemu.socket())
        .await
        .unwrap_err()
        .to_string();
    assert!(gone.starts_with("cannot connect to QEMU at "), "{gone}");
}

#[tokio::test]
async fn what_blocks_a_migration_is_said() {
    let test = "what_blocks_a_migration_is_said";
    let Some(()) = program(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("d.vdi");
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "vdi"])
        .arg(&image)
        .arg("1M")
        .status();
    if made.is_err() {
        return eprintln!("SKIP {test}: no qemu-img (qemu-utils)");
    }
    let launch = Launch::new().with(&format!(
        "-drive file={},format=vdi,if=virtio -S",
        image.display()
    ));
    let mut qemu = launch.start(dir.path(), "web");
    let blocked = qemu
        .machine()
        .await
        .check_migratable()
        .await
        .unwrap_err()
        .to_string();
    assert!(
        blocked.contains("is not possible: The vdi format used by node"),
        "{blocked}"
    );

    // Each block of memory counts for itself.
    let parts = "-object memory-backend-ram,id=m0,size=96M -object memory-backend-ram,id=m1,size=8K \
                 -numa node,memdev=m0 -numa node,memdev=m1 -S";
    for (name, arguments) in [("whole", "-m 96 -S"), ("parts", parts)] {
        let mut qemu = Launch::new().with(arguments).start(dir.path(), name);
        let machine = qemu.machine().await;
        let lossy = machine.check_migratable().await.map_err(|e| e.to_string());
        if machine.version() < TCG_VERSION {
            let lossy = lossy.unwrap_err();
            assert!(lossy.contains("loses what the machine writes to its memory"));
        } else {
            lossy.unwrap();
        }
    }
}

#[tokio::test]
async fn bitmaps_and_exports_come_and_go() {
    let Some(()) = program("bitmaps_and_exports_come_and_go") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let image = raw(dir.path(), "d.raw", 1 << 20);
    let launch = Launch::new()
        .node(&file_node("disk", image))
        .disk("vd0", "disk")
        .with("-S");
    let mut qemu = launch.start(dir.path(), "web");
    let machine = qemu.machine().await;
    let add = |name| Action::AddBitmap {
        node: "disk",
        name,
        granularity: 4096,
    };
    let disable = Action::DisableBitmap {
        node: "disk",
        name: "b1",
    };
    machine.transaction(&[add("b1")]).await.unwrap();
    // All or nothing.
    let twice = machine
        .transaction(&[add("b2"), disable.clone(), add("b1")])
        .await
        .unwrap_err();
    assert!(twice.to_string().contains("already exists"), "{twice}");
    assert_eq!(machine.bitmaps("disk").await.unwrap().len(), 1);
    machine.transaction(&[add("b2"), disable]).await.unwrap();

    let listen = |name: &str| UnixListener::bind(dir.path().join(name)).unwrap();
    machine
        .start_nbd_server(listen("first.sock"))
        .await
        .unwrap();
    let second = machine
        .start_nbd_server(listen("second.sock"))
        .await
        .unwrap_err();
    assert!(second.to_string().contains("already running"), "{second}");
    let export = Export {
        id: "round",
        node: "disk",
        writable: false,
        bitmaps: &["b1"],
    };
    machine.add_export(&export).await.unwrap();
    assert_eq!(machine.exports().await.unwrap(), ["round"]);
    let busy = machine
        .remove_bitmap("disk", "b1", Duration::ZERO)
        .await
        .unwrap_err();
    assert!(busy.to_string().contains("in use"), "{busy}");
    machine.delete_export("round").await.unwrap();
    for name in ["b1", "b2"] {
        machine.remove_bitmap("disk", name, PATIENCE).await.unwrap();
    }
    assert_eq!(machine.bitmaps("disk").await.unwrap(), []);
    machine.stop_nbd_server().await.unwrap();
}

#[tokio::test]
async fn a_source_that_hangs_is_freed_out_of_band_and_migrates_again() {
    let Some(()) = program("a_source_that_hangs_is_freed_out_of_band_and_migrates_again") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    // Most of the memory is sent while it is paused, which is more than sockets buffer.
    let launch = Launch::with_memory(512);
    let mut qemu = launch.start(dir.path(), "source");
    let source = qemu.machine().await;
    let parameters = MigrationParameters {
        max_bandwidth: Some(1 << 20),
        downtime_limit: Some(2_000_000),
        ..Default::default()
    };
    source.set_parameters(&parameters).await.unwrap();
    assert_eq!(
        source.parameters().await.unwrap().max_bandwidth,
        Some(1 << 20)
    );

    let mut first = launch.clone().incoming().start(dir.path(), "first");
    let mut pair = Pair::new(source.clone(), first.machine().await).await;
    let (gate, open) = watch::channel(true);
    let channel = connect(&source, &pair.destination, &open).await;
    pair.begin(&channel, &channel).await;
    assert_eq!(
        pair.destination.status().await.unwrap(),
        RunState::InMigrate
    );
    // The link becomes a black hole, just before the switch.
    gate.send_replace(false);
    source.continue_migration().await.unwrap();
    let device = MigrationStatus::Device;
    source
        .wait_migration(&mut pair.source_events, &device, PATIENCE)
        .await
        .unwrap();
    let hangs = loop {
        let ask = Command::new("query-status").timeout(Duration::from_millis(500));
        match source.qmp().run::<Value>(ask).await {
            // Not yet, for a moment.
            Ok(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(e) => break e.to_string(),
        }
    };
    let said = "has not answered query-status within 500ms: it hangs or is busy";
    assert!(hangs.ends_with(said), "{hangs}");
    source.yank(&[Yank::Migration]).await.unwrap();
    wait_event(&mut pair.source_events, "RESUME").await;
    assert_eq!(source.status().await.unwrap(), RunState::Running);
    first.kill();

    let mut second = launch.incoming().start(dir.path(), "second");
    let mut pair = Pair::new(source, second.machine().await).await;
    let (_gate, open) = watch::channel(true);
    let channel = connect(&pair.source, &pair.destination, &open).await;
    pair.begin(&channel, &channel).await;
    pair.switch().await;
    pair.destination.cont().await.unwrap();
    wait_event(&mut pair.destination_events, "RESUME").await;
    assert_eq!(pair.source.status().await.unwrap(), RunState::PostMigrate);
    let info = pair.source.migration().await.unwrap();
    assert!(
        info.ram.unwrap().transferred > 0 && info.downtime_ms.is_some(),
        "{info:?}"
    );
}
