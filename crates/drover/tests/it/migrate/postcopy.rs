//! Machines that run at the other site before all of their disks are there.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::links::Proxy;
use super::*;

#[test]
fn disks_do_not_follow_a_machine_of_libvirt() {
    let world = World::new();
    world.run("near", &["init"]).ok();
    world.run("far", &["init"]).ok();
    let site = world.serve("far", &[]);
    let ticket = world.run("far", &["ticket", "--can", "send,host"]).ok().out;
    let pair = ["pair", ticket.trim(), "--name", "far"];
    world.run("near", &pair).ok();
    let migrate = ["migrate", "libvirt:web", "far", "--post-copy", "at-once"];
    world.run("near", &migrate).code(2);
    drop(site);
}

/// A migration whose command waits before it sends what is left of its own accord; what the machine waits for it sends.
struct Waiting {
    moving: Moving,
    path: PathBuf,
}

impl Waiting {
    /// A machine that has written for a while, where it was, and where it runs without its disk.
    async fn of_a_machine(sites: &Sites) -> (Qemu, Qemu, Waiting) {
        let mut here = sites.start("near").await;
        let there = sites.wait_for_it("far").await;
        here.wait_said("beat", 50).await;
        let waiting = Waiting::begin(sites, &["--post-copy", "at-once"]);
        (here, there, waiting)
    }

    /// The machine runs at the other site, which lacks some of its disks.
    fn begin(sites: &Sites, options: &[&str]) -> Waiting {
        Self::begin_from(sites, "near", "far", options)
    }

    /// The same of a machine at another site.
    fn begin_from(sites: &Sites, from: &str, to: &str, options: &[&str]) -> Waiting {
        let path = sites.world.path("rest");
        let _ = fs::remove_file(&path);
        let machine = sites.hypervisor(from);
        let args = ["migrate", &machine, to, "--json"];
        let mut command = sites.world.drover(from, &[&args[..], options].concat());
        command.env("DROVER_TEST_HOLD", format!("rest:{}", path.display()));
        let mut moving = Moving::spawn(command);
        moving.until("step", "rest");
        Waiting { moving, path }
    }

    fn go_on(self) -> Moving {
        fs::write(&self.path, "").unwrap();
        self.moving
    }
}

fn states(sites: &Sites) -> (Value, Value) {
    (sites.state("near"), sites.state("far"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_runs_before_its_disk_is_there_whatever_dies() {
    let test = "a_machine_runs_before_its_disk_is_there_whatever_dies";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let (mut here, mut there, waiting) = Waiting::of_a_machine(&sites).await;
    // It reads the record before each that it writes: the first of them is not there.
    let last = here.said("beat").unwrap();
    there.wait_said("beat", last + 5).await;
    assert_eq!(states(&sites), ("committed".into(), "arriving".into()));
    let listed = |sites: &Sites| {
        let listed = sites
            .world
            .run("far", &["migrate", "--list", "--json"])
            .ok();
        listed.json()[0]["left_bytes"].as_u64()
    };
    assert!(listed(&sites) > Some(0));
    let abort = ["migrate", "--abort", "web"];
    sites
        .world
        .run("near", &abort)
        .fails(3, &["handed over to far"]);
    sites.world.run("far", &abort).fails(3, &["still at near"]);
    let onward = sites.hypervisor("far");
    sites
        .world
        .run("far", &["migrate", &onward, "near"])
        .fails(3, &["not all of it has come from near"]);
    // What is there, and what it has written since, is not lost with the site.
    sites.restart("far");
    assert_eq!(states(&sites), ("committed".into(), "arriving".into()));
    let done = waiting.go_on().done();
    assert!(done["left_bytes"].as_u64() > Some(0), "{done}");
    assert!(done["asked_bytes"].as_u64() <= done["left_bytes"].as_u64());
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert_eq!(states(&sites), ("away".into(), "here".into()));
    assert_eq!(listed(&sites), None);
    sites.restart("far");
    there.verify().await;
}

/// The machine, with a qcow2 image as its disk.
async fn start_qcow2(sites: &Sites, path: &Path) -> Qemu {
    let size = SIZE.to_string();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]);
    let created = create.arg(path).arg(size).status().unwrap();
    assert!(created.success());
    let file = Node::File {
        name: "file".into(),
        path: path.into(),
    };
    let image = Node::Qcow2 {
        name: "disk".into(),
        file: "file".into(),
    };
    let launch = sites.launch(&[file, image]);
    let mut machine = launch.start(&sites.world.path(""), "web-near");
    machine.machine().await;
    machine
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_waits_for_the_same_command_also_when_qemu_has_ended() {
    let test = "what_is_left_waits_for_the_same_command_also_when_qemu_has_ended";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let qcow2 = sites.world.path("web.qcow2");
    let image = sites.world.path("image");
    symlink(&image, &qcow2).unwrap();
    for qemu_dies in [true, false] {
        // The files are read in the format that QEMU knew.
        let mut here = match qemu_dies {
            true => start_qcow2(&sites, &qcow2).await,
            false => sites.start("near").await,
        };
        let mut there = sites.wait_for_it("far").await;
        here.wait_said("beat", 50).await;
        let waiting = Waiting::begin(&sites, &["--post-copy", "at-once"]);
        let last = here.said("beat").unwrap();
        there.wait_said("beat", last + 1).await;
        waiting.moving.kill();
        if qemu_dies {
            here.kill();
        }
        assert_eq!(states(&sites), ("committed".into(), "arriving".into()));
        // It runs there, as that site says: nobody breaks that, by mistake or not.
        let broken = ["migrate", "--break", "web", "--yes", "--taken"];
        sites
            .world
            .run("near", &broken)
            .fails(3, &["far answers, and has taken web"]);
        // Where it does not answer, this site remembers.
        let site = sites.site("far");
        site.signal("KILL");
        site.wait();
        sites
            .world
            .run("near", &broken[..4])
            .fails(3, &["has taken web", "--taken"]);
        sites.serve_again("far", &[]);
        if qemu_dies {
            // Another file is not what the machine lacks, and is not read.
            let other = sites.world.path("other");
            fs::copy(&image, &other).unwrap();
            fs::remove_file(&qcow2).unwrap();
            symlink(&other, &qcow2).unwrap();
            let machine = sites.hypervisor("near");
            let refused = ["was written, or replaced, since", "--trust-files"];
            let again = ["migrate", &machine, "far"];
            sites.world.run("near", &again).fails(1, &refused);
            fs::remove_file(&qcow2).unwrap();
            symlink(&image, &qcow2).unwrap();
        }
        let done = Moving::begin(&sites, "near", "far", &[]).done();
        assert_eq!(done["left_bytes"], 0, "of an earlier process: {done}");
        if !qemu_dies {
            here.ended().await;
        }
        goes_on(&here, &mut there).await;
        assert_eq!(states(&sites), ("away".into(), "here".into()));
        // And back, as ever.
        let mut home = sites.wait_for_it("near").await;
        Moving::begin(&sites, "far", "near", &[]).done();
        there.ended().await;
        goes_on(&there, &mut home).await;
        home.kill();
        let gone = ["migrate", "--list"];
        sites.world.run("near", &gone).ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_site_that_serves_the_disks_dies_while_they_follow() {
    let test = "the_site_that_serves_the_disks_dies_while_they_follow";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let (_first, mut far) = sites.moved().await;

    // From now on the disk is an image of the site, with what the machine has written since.
    let mut near = sites.wait_for_it("near").await;
    let at_once = ["--post-copy", "at-once"];
    let waiting = Waiting::begin_from(&sites, "far", "near", &at_once);
    let last = far.said("beat").unwrap();
    sites.restart("far");
    near.wait_said("beat", last + 5).await;
    assert_eq!(states(&sites), ("arriving".into(), "committed".into()));
    let done = waiting.go_on().done();
    assert!(done["left_bytes"].as_u64() > Some(0), "{done}");
    far.ended().await;
    goes_on(&far, &mut near).await;
    assert_eq!(states(&sites), ("here".into(), "away".into()));

    // The same when the QEMU here and the command have died as well.
    let mut far = sites.wait_for_it("far").await;
    let waiting = Waiting::begin(&sites, &at_once);
    waiting.moving.kill();
    near.kill();
    sites.restart("near");
    Moving::begin(&sites, "near", "far", &[]).done();
    goes_on(&near, &mut far).await;
    assert_eq!(states(&sites), ("away".into(), "here".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_evacuated_when_nothing_follows_any_more() {
    let test = "a_host_is_evacuated_when_nothing_follows_any_more";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    let (mut here, mut there, waiting) = Waiting::of_a_machine(&sites).await;
    let mut evacuate = sites.world.drover("near", &["evacuate", "far"]);
    let piped = evacuate.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut evacuate = piped.spawn().unwrap();
    let mut told = BufReader::new(evacuate.stderr.take().unwrap()).lines();
    let line = told.next().unwrap().unwrap();
    assert!(line.contains("web: another command copies"), "{line}");
    assert_eq!(evacuate.try_wait().unwrap(), None);
    assert_eq!(states(&sites), ("committed".into(), "arriving".into()));
    // What the other command does not do any more, this one does.
    waiting.moving.kill();
    let ended = evacuate.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stdout).unwrap();
    assert!(said.ends_with("1 machine moved to far\n"), "{said}");
    assert_eq!(states(&sites), ("away".into(), "here".into()));
    here.ended().await;
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_destination_dies_as_soon_as_it_has_taken_a_machine_in_part() {
    let test = "the_destination_dies_as_soon_as_it_has_taken_a_machine_in_part";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 50).await;
    sites.restart_with("far", &[("DROVER_TEST_CRASH", "taken")]);
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--post-copy", "at-once"]);
    moving.until("step", "switch");
    sites.site("far").wait();
    assert_eq!(states(&sites), ("committed".into(), "arriving".into()));
    sites.serve_again("far", &[]);
    let done = moving.done();
    assert!(done["left_bytes"].as_u64() > Some(0), "{done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert_eq!(states(&sites), ("away".into(), "here".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_while_disks_follow() {
    let test = "a_link_that_is_cut_while_disks_follow";
    let address = own_address();
    let proxy = Proxy::to(address);
    let options = ["--advertise", proxy.address.as_str()];
    let Some(sites) = Sites::with(test, World::new(), address, &options) else {
        return;
    };
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 50).await;
    let options = ["--post-copy", "at-once", "--limit", "3M"];
    let mut moving = Moving::begin(&sites, "near", "far", &options);
    moving.until("step", "rest");
    proxy.cut();
    moving.until("event", "reconnecting");
    moving.until("event", "left");
    proxy.cut();
    let done = moving.done();
    assert!(done["left_bytes"].as_u64() > Some(0), "{done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert_eq!(states(&sites), ("away".into(), "here".into()));
}

/// Bytes of the disk of a machine that writes as fast as it can.
const LARGE: u64 = 2 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_writes_faster_than_the_link_carries_moves_with_a_short_pause() {
    let test = "a_machine_that_writes_faster_than_the_link_carries_moves_with_a_short_pause";
    let Some(done) = writes_faster_than_the_link(test, &[]).await else {
        return;
    };
    let left = done["left_bytes"].as_u64().unwrap();
    assert!(left > 0, "{done}");
    let pause = done["pause"]["total_ms"].as_u64().unwrap();
    assert!(pause < 5000, "{done}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_writes_faster_than_the_link_carries_moves_in_one_piece_if_it_has_to() {
    let test = "a_machine_that_writes_faster_than_the_link_carries_moves_in_one_piece_if_it_has_to";
    let Some(done) = writes_faster_than_the_link(test, &["--post-copy", "never"]).await else {
        return;
    };
    assert_eq!(done["left_bytes"], 0, "{done}");
}

/// A machine that writes more to its disk in a second than the limit lets through moves with these options: what the
/// command says at its end.
async fn writes_faster_than_the_link(test: &str, options: &[&str]) -> Option<Value> {
    let sites = Sites::new(test)?;
    let launch = |disk: Node| {
        let launch = Launch::new().node(&disk).node(&raw("file"));
        let launch = launch.disk("vd0", "disk").guest(&sites.guest, 0, 0);
        launch.booted()
    };
    let path = sites.world.path("web.raw");
    fs::File::create(&path).unwrap().set_len(LARGE).unwrap();
    let name = || "file".to_owned();
    let file = Node::File { name: name(), path };
    let stub = Node::Null {
        name: name(),
        size: LARGE,
    };
    let mut here = launch(file).start(&sites.world.path(""), "web-near");
    here.machine().await;
    let there = launch(stub).incoming();
    let mut there = there.start(&sites.world.path(""), "web-far");
    there.machine().await;
    let begun = here.wait_said("beat", 100).await;
    let writing = Instant::now();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let records = here.said("beat").unwrap() - begun;
    let rate = records as f64 * 4096.0 / writing.elapsed().as_secs_f64();
    let limit = format!("{}", (rate * 0.5) as u64);
    let options = [&["--limit", &limit], options].concat();
    let done = Moving::begin(&sites, "near", "far", &options).done();
    println!("{rate} bytes/s written; {done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert_eq!(states(&sites), ("away".into(), "here".into()));
    Some(done)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_that_ends_a_move_marks_and_indexes_what_is_left() {
    let test = "the_command_that_ends_a_move_marks_and_indexes_what_is_left";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    let path = sites.world.path("web.qcow2");
    let text = path.to_str().unwrap();
    let mut here = start_qcow2(&sites, &path).await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 20).await;
    let waiting = Waiting::begin(&sites, &["--post-copy", "at-once"]);
    let last = here.said("beat").unwrap();
    there.wait_said("beat", last + 1).await;
    waiting.moving.kill();
    here.kill();
    // What follows is read from the file as it is.
    let mark = ["index", "--mark", text];
    let refused = ["cannot change", "what the machine web lacks"];
    sites.world.run("near", &mark).fails(3, &refused);
    Moving::begin(&sites, "near", "far", &["--mark-files"]).done();
    goes_on(&here, &mut there).await;
    let images = sites.world.run("near", &["images", "--json"]).ok().json();
    let left = images.iter().find(|image| image["name"] == "web.qcow2");
    assert_eq!(left.unwrap()["generations"]["frozen"], true, "{images:?}");
    let info = Command::new("qemu-img").args(["info", text]).output();
    let info = String::from_utf8(info.unwrap().stdout).unwrap();
    assert!(info.contains("name: drover-"), "{info}");
}

/// What the site at the destination serves of the disk is read or written by qemu-io: its output.
fn disk(sites: &Sites, command: &str) -> String {
    let socket = sites.world.path("far/machines/.web.nbd");
    let at = format!("nbd+unix:///disk-0?socket={}", socket.display());
    let mut io = Command::new("qemu-io");
    let done = io.args(["-f", "raw", "-c", command, &at]).output().unwrap();
    String::from_utf8(done.stdout).unwrap() + &String::from_utf8(done.stderr).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_gives_up_what_a_lost_source_still_has() {
    let test = "a_person_gives_up_what_a_lost_source_still_has";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let (mut here, mut there, waiting) = Waiting::of_a_machine(&sites).await;
    let last = here.said("beat").unwrap();
    there.wait_said("beat", last + 1).await;
    let given_up = ["migrate", "--break", "web", "--yes", "--json"];
    let far = |sites: &Sites, args: &[&str]| sites.world.run("far", args);
    far(&sites, &given_up).fails(3, &["near is not lost", "sends what is left of web"]);

    // The host of the source burns down.
    waiting.moving.kill();
    here.kill();
    let site = sites.site("near");
    site.signal("KILL");
    site.wait();
    far(&sites, &["migrate", "--abort", "web"]).fails(3, &["still at near", "--break web"]);
    far(&sites, &["migrate", "--break", "web"]).fails(2, &["--yes"]);
    assert_eq!(sites.state("far"), "arriving");
    // A site that dies within the break, as by kill -9, has not broken anything: what is missing is waited for again.
    for place in ["given up", "lost"] {
        sites.restart_with("far", &[("DROVER_TEST_CRASH", place)]);
        until("it dies in the break", || {
            let run = far(&sites, &given_up);
            !run.err.contains("near is not lost")
        });
        sites.site("far").wait();
        sites.serve_again("far", &[]);
        assert_eq!(sites.state("far"), "arriving", "{place}");
        let told = far(&sites, &["migrate", "--list", "--json"]).ok().json();
        assert!(told[0]["left_bytes"].as_u64() > Some(0), "{told:?}");
        let is_marked = fs::read_dir(sites.world.path("far/machines")).unwrap();
        let mut is_marked = is_marked.map(|entry| entry.unwrap().path().join("lost"));
        assert!(!is_marked.any(|mark| mark.exists()), "{place}");
    }
    let mut said = None;
    until("the connection has ended", || {
        let run = far(&sites, &given_up);
        let is_over = !run.err.contains("near is not lost");
        said = is_over.then_some(run);
        is_over
    });
    let said = said.unwrap().ok().json();
    let lost = said[0]["lost_bytes"].as_u64();
    assert!(lost > Some(0), "{said:?}");
    assert_eq!(
        (&said[0]["event"], &said[0]["runs"]),
        (&"given-up".into(), &true.into())
    );
    far(&sites, &given_up).fails(3, &["nothing to break"]);
    let listed = |sites: &Sites| far(sites, &["migrate", "--list", "--json"]).ok().json();
    let is_lost = |machine: &Value| machine["left_bytes"].as_u64() > Some(0);
    for _ in 0..2 {
        let machines = listed(&sites);
        assert_eq!(machines[0]["state"], "here");
        assert!(is_lost(&machines[0]), "{machines:?}");
        // Nobody waits for it, and nobody takes zeros for it.
        let read = disk(&sites, &format!("read 0 {SIZE}"));
        assert!(read.contains("Input/output error"), "{read}");
        sites.restart("far");
    }
    let onward = sites.hypervisor("far");
    far(&sites, &["migrate", &onward, "near"])
        .fails(3, &["was lost with the site", "cannot be read"]);
    there.kill();

    // What is written over is there, as on any disk.
    let written = disk(&sites, &format!("write -z 0 {SIZE}"));
    assert!(written.contains("wrote"), "{written}");
    let read = disk(&sites, &format!("read -P 0 0 {SIZE}"));
    assert!(read.contains("read 4194304/4194304"), "{read}");
    assert_eq!(listed(&sites)[0]["left_bytes"], Value::Null);

    // The source is back after all: it is told, and keeps what it has as an old copy.
    sites.serve_again("near", &[]);
    let machine = sites.hypervisor("near");
    let again = ["migrate", &machine, "far"];
    let told = ["web is at far", "gave up what had not arrived"];
    sites.world.run("near", &again).fails(1, &told);
    assert_eq!(states(&sites), ("away".into(), "here".into()));
}
