//! Machines with several disks.

use super::*;

/// Two disks and a CD-ROM, whose nodes are on these.
pub(super) fn launch(sites: &Sites, disks: [Node; 2], ids: [&str; 2]) -> Launch {
    let path = sites.world.path("cd.iso");
    if !path.exists() {
        fs::write(&path, [7; 4096]).unwrap();
    }
    let mut launch = Launch::new().with(&format!(
        "-blockdev driver=file,node-name=iso,read-only=on,filename={} -blockdev driver=raw,node-name=cd,read-only=on,file=iso",
        path.display()
    ));
    for (n, (node, id)) in disks.iter().zip(ids).enumerate() {
        let (file, raw) = (format!("file{n}"), format!("disk{n}"));
        launch = launch.node(node).node(&Node::Raw {
            name: raw.clone(),
            file,
        });
        // The same slots everywhere, whatever the order here.
        let slot = if id == "vd0" { 5 } else { 6 };
        launch = launch.with(&format!(
            "-device virtio-blk-pci,drive={raw},id={id},addr={slot},cyls=16,heads=16,secs=63"
        ));
    }
    launch
        .with("-device ide-cd,drive=cd,id=cd0")
        .guest(&sites.guest, 10, 4)
        .booted()
}

pub(super) fn stub(n: usize, size: u64) -> Node {
    Node::Null {
        name: format!("file{n}"),
        size,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_disks_and_a_cdrom() {
    let Some(sites) = Sites::new("two_disks_and_a_cdrom") else {
        return;
    };
    let directory = sites.world.path("");
    let file = |n: usize| {
        let path = sites.world.path(&format!("web-{n}.raw"));
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let name = format!("file{n}");
        Node::File { name, path }
    };
    let mut here = launch(&sites, [file(0), file(1)], ["vd0", "vd1"]).start(&directory, "web-near");
    here.machine().await;
    here.wait_said("beat", 20).await;
    let wait_for = |disks: [Node; 2], ids| {
        let launch = launch(&sites, disks, ids).incoming();
        launch.start(&directory, "web-far")
    };
    let wrong = [(
        wait_for([stub(0, SIZE), stub(1, SIZE / 2)], ["vd0", "vd1"]),
        "bytes there",
    )];
    for (mut there, text) in wrong {
        there.machine().await;
        let err = Moving::begin(&sites, "near", "far", &[]).fails();
        assert!(err.contains(text) && err.contains("vd1"), "{err}");
        stays(&sites, &mut here).await;
    }
    let mut there = wait_for([stub(0, SIZE), stub(1, SIZE)], ["vd0", "data"]);
    there.machine().await;
    let err = Moving::begin(&sites, "near", "far", &[]).fails();
    assert!(
        err.contains("no disk called vd1") && err.contains("the same id"),
        "{err}"
    );
    drop(there);
    // In another order: each gets its own.
    let mut there = wait_for([stub(0, SIZE), stub(1, SIZE)], ["vd1", "vd0"]);
    there.machine().await;
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
    let listed = sites.world.run("far", &["migrate", "--list"]).ok();
    assert!(
        listed.out.contains("web-0.raw, web-1.raw"),
        "{}",
        listed.out
    );
}
