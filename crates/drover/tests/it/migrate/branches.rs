//! Two machines of one origin: the old copy that a machine has left is run, or written, while the machine goes on elsewhere.

use super::*;

impl Sites {
    /// A machine of this name from the file that `web` has left.
    async fn start_branch(&self, name: &str) -> Qemu {
        let path = self.world.path("web.raw");
        let file = Node::File {
            name: "file".into(),
            path,
        };
        let launch = self.launch(&[file, raw("file")]);
        let mut branch = launch.start(&self.world.path(""), &format!("{name}-near"));
        branch.machine().await;
        branch
    }
}

/// The machine writes on, and has all that it wrote.
async fn is_whole(machine: &mut Qemu) {
    let last = machine.said("beat").unwrap();
    machine.wait_said("beat", last + 5).await;
    assert!(machine.verify().await > last);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_old_copy_of_a_machine_is_run_beside_it() {
    let test = "the_old_copy_of_a_machine_is_run_beside_it";
    let Some(sites) = Sites::of_two_machines(test) else {
        return;
    };
    let (_, mut there) = sites.moved().await;

    // Somebody starts it from its old disk: it is not the machine, and neither takes the other's place.
    let mut branch = sites.start_branch("web").await;
    branch.wait_said("beat", 30).await;
    let (near, far) = (sites.hypervisor("near"), sites.hypervisor("far"));
    let migrate = |from: &str, machine: &str, to: &str| {
        let args = ["migrate", machine, to];
        sites.world.run(from, &args)
    };
    migrate("near", &near, "far").fails(3, &["it runs at far"]);
    migrate("far", &far, "near").fails(1, &["web stays here"]);
    is_whole(&mut branch).await;
    is_whole(&mut there).await;
    assert_eq!(sites.state("far"), "here");
    branch.kill();

    // As a machine of its own it moves like any other, and runs beside the first.
    let mut branch = sites.start_branch("db").await;
    branch.wait_said("beat", 40).await;
    let mut beside = sites.wait_for_one("db", "far").await;
    let db = format!("qmp:{}", sites.world.path("db-near.qmp").display());
    Moving::begin_of(&sites, &db, "near", "far", &[]).done();
    branch.ended().await;
    goes_on(&branch, &mut beside).await;
    is_whole(&mut there).await;

    // The first comes home, where the old copy is not what it left.
    let mut back = sites.wait_for_it("near").await;
    Moving::begin(&sites, "far", "near", &[]).done();
    there.ended().await;
    goes_on(&there, &mut back).await;
    is_whole(&mut beside).await;
    let state = |home: &str, name: &str| {
        let listed = sites.world.run(home, &["migrate", "--list", "--json"]).ok();
        let machines = listed.json();
        let machine = machines.iter().find(|machine| machine["name"] == name);
        machine.unwrap()["state"].clone()
    };
    assert_eq!(state("near", "web"), "here");
    assert_eq!(state("far", "web"), "away");
    assert_eq!(state("far", "db"), "here");
    assert_eq!(state("near", "db"), "away");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_copy_that_was_thawed_and_written_does_not_get_into_the_machine() {
    let test = "an_old_copy_that_was_thawed_and_written_does_not_get_into_the_machine";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    let (_here, mut there) = sites.moved().await;
    let mut home = sites.wait_for_it("near").await;
    Moving::begin(&sites, "far", "near", &[]).done();
    there.ended().await;
    goes_on(&there, &mut home).await;

    // What it left at far is frozen; somebody breaks that, and writes to it.
    let far = |args: &[&str]| sites.world.run("far", args);
    until("what it wrote is part of its image", || {
        far(&["changes", "--json"]).ok().json().is_empty()
    });
    let socket = sites.world.path("copy.sock");
    let address = format!("unix:{}", socket.display());
    let export = ["export", "web-0.raw", "--nbd", &address, "--background"];
    far(&export).fails(3, &["web-0.raw", "old copy"]);
    far(&["mounts", "break", "web-0.raw", "--yes"]).ok();
    far(&export).ok();
    let uri = format!("nbd+unix:///web-0.raw?socket={}", socket.display());
    let mut io = Command::new("qemu-io");
    let written = io
        .args(["-f", "raw", "-c", "write -P 7 0 4M", &uri])
        .output();
    let written = written.unwrap();
    assert!(written.status.success(), "{written:?}");
    far(&["unmount", &address]).ok();

    // The machine comes with all of its own, and takes none of that; it is kept for whoever wrote it.
    let mut there = sites.wait_for_it("far").await;
    Moving::begin(&sites, "near", "far", &[]).done();
    home.ended().await;
    goes_on(&home, &mut there).await;
    is_whole(&mut there).await;
    let kept = far(&["changes", "--json"]).ok().json();
    let earlier = kept.iter().filter(|changes| changes["earlier"] == true);
    assert_eq!(earlier.count(), 1, "{kept:?}");
}
