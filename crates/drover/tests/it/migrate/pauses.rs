//! How long a machine is paused.

use super::*;

/// What QEMU has sent, and the link has not taken, makes the pause longer than QEMU reckons: a second, when 2.3 MB wait.
#[tokio::test(flavor = "multi_thread")]
async fn memory_that_does_not_compress_waits_for_a_slow_link_in_qemu() {
    let test = "memory_that_does_not_compress_waits_for_a_slow_link_in_qemu";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    let start = |home: &str, disk: &[Node], incoming: bool| {
        let launch = sites.launch(disk).noise(8);
        let launch = if incoming { launch.incoming() } else { launch };
        launch.start(&sites.world.path(""), &format!("web-{home}"))
    };
    let path = sites.world.path("web.raw");
    fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let file = Node::File {
        name: "file".into(),
        path,
    };
    let mut here = start("near", &[file, raw("file")], false);
    here.machine().await;
    let stub = Node::Null {
        name: "stub".into(),
        size: SIZE,
    };
    let mut there = start("far", &[stub, raw("stub")], true);
    there.machine().await;
    here.wait_said("beat", 20).await;
    let slow = ["--limit", "2M", "--max-pause", "100ms"];
    let near = sites.hypervisor("near");
    let dry = [&["migrate", &near, "far", "--dry-run", "--json"], &slow[..]].concat();
    let dry = sites.world.run("near", &dry).ok().json();
    // What is behind QEMU's back at this limit, and the switch, come on top of what QEMU is told.
    let expected = dry.last().unwrap()["expected"]["pause_ms"].as_u64();
    assert!((70..700).contains(&expected.unwrap()), "{dry:?}");
    let done = Moving::begin(&sites, "near", "far", &slow).done();
    let memory = done["pause"]["memory_ms"].as_u64().unwrap();
    assert!(memory < 600, "{done}");
    assert!(done["memory_wire_bytes"].as_u64() > Some(8 << 20), "{done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
}
