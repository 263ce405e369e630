//! A guest that writes numbered records moves, and none is missing or there twice.

use std::time::Duration;

use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_hypervisor::machine::{Channel, Node, RunState};
use drover_hypervisor::testing::{Guest, Launch, program};

use crate::util::{Pair, raw, serve_raw, wait_event};

const SIZE: u64 = 4 << 20;

#[tokio::test]
async fn a_writing_guest_moves_with_its_disk() {
    let test = "a_writing_guest_moves_with_its_disk";
    let Some(()) = program(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let Some(guest) = Guest::build(test, dir.path()) else {
        return;
    };
    let socket = dir.path().join("nbd.sock");
    let image = raw(dir.path(), "d.raw", SIZE);
    let Some(_server) = serve_raw(test, &image, &socket) else {
        return;
    };
    let export = |name: &str| Node::Nbd {
        name: name.into(),
        address: NbdAddress {
            socket: NbdSocket::Unix(socket.clone()),
            export: "disk".into(),
        },
        reconnect: Duration::ZERO,
    };
    let disk = |file: &str| Node::Raw {
        name: "disk".into(),
        file: file.into(),
    };
    let stub = Node::Null {
        name: "stub".into(),
        size: SIZE,
    };
    let guest = |launch: Launch| launch.disk("vd0", "disk").guest(&guest, 10, 4);
    let mut here =
        guest(Launch::new().node(&export("nbd0")).node(&disk("nbd0"))).start(dir.path(), "here");
    let mut there = guest(Launch::new().node(&stub).node(&disk("stub")))
        .incoming()
        .start(dir.path(), "there");

    let mut pair = Pair::new(here.machine().await, there.machine().await).await;
    here.wait_said("beat", 20).await;
    let channel = Channel::Unix(dir.path().join("memory.sock"));
    pair.begin(&channel, &channel).await;
    // Here a raw disk is final: the destination's stub becomes the disk.
    pair.destination.add_node(&export("nbd0")).await.unwrap();
    pair.destination.reopen_node(&disk("nbd0")).await.unwrap();
    pair.switch().await;
    assert_eq!(pair.destination.status().await.unwrap(), RunState::Paused);
    let last = here.said("beat").unwrap();
    pair.destination.cont().await.unwrap();
    wait_event(&mut pair.destination_events, "RESUME").await;
    pair.source.quit().await.unwrap();
    here.ended().await;

    there.wait_said("beat", last + 20).await;
    let beats = there.all_said("beat");
    // The line of one record may have been torn between the two.
    assert!(
        beats[0] == last + 1 || beats[0] == last + 2,
        "{last}, then {}",
        beats[0]
    );
    assert!(
        beats.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "{beats:?}"
    );
    assert_eq!(here.said("beat"), Some(last));
    let whole = there.verify().await;
    assert!(whole >= last + 20, "{whole} after {last}");
    pair.destination.delete_node("stub").await.unwrap();
}
