//! Whatever is killed, refused or given up, and whenever: the disk can be written at one site, and has every record.

use std::path::Path;

use super::*;

/// Makes the site at the destination wait at a place of the move.
struct Held(PathBuf);

impl Held {
    fn at(sites: &mut Sites, home: &str, place: &str) -> Held {
        let path = sites.world.path(&place.replace(' ', "-"));
        let variable = format!("{place}:{}", path.display());
        sites.restart(home, &[("DROVER_TEST_HOLD", &variable)]);
        Held(path)
    }

    /// Waits until it is there.
    fn reached(&self) {
        let held = format!("{}.held", self.0.display());
        until("the place is reached", || Path::new(&held).exists());
    }

    fn go_on(&self) {
        std::fs::write(&self.0, "").unwrap();
    }
}

#[test]
fn a_move_that_is_given_up_leaves_the_disk_in_use() {
    let mut sites = Sites::new();
    let program = sites.program("near", 0);
    program.goes_on();
    let resumed = sites.world.path("resumed");
    let touch = format!("touch {}", resumed.display());
    let abort = |sites: &Sites| {
        sites
            .world
            .run("near", &["move", "--abort", "web.raw"])
            .ok();
        assert_eq!(sites.state("near"), "here");
    };
    let slowly = ["--limit", "300K", "--resume", &touch];
    let mut moving = sites.begin("near", "far", &slowly);
    moving.until("step", "image");
    abort(&sites);
    assert!(moving.fails().contains("stays here: stopped"));
    program.goes_on();
    assert!(!resumed.exists(), "it was not paused");
    // Whoever asked for it goes away.
    let mut moving = sites.begin("near", "far", &slowly);
    moving.until("step", "image");
    moving.process.kill().unwrap();
    moving.process.wait().unwrap();
    until("it is given up", || sites.state("near") == "here");
    // A hook that fails.
    let failing = ["--pause", "exit 4", "--resume", &touch];
    until("the other one has ended", || {
        let err = sites.begin("near", "far", &failing).fails();
        err.contains("the program was not paused: exit 4")
    });
    assert!(resumed.exists());
    program.goes_on();
    // Frozen, and given up here.
    let held = Held::at(&mut sites, "far", "arriving");
    let moving = sites.begin("near", "far", &[]);
    held.reached();
    abort(&sites);
    assert!(moving.fails().contains("stays here"));
    held.go_on();
    program.goes_on();
    assert_eq!(sites.state("near"), "here");
    assert_ne!(sites.state("far"), "here");
    // While it is copied, by a person there.
    let mut moving = sites.begin("near", "far", &["--limit", "300K"]);
    moving.until("step", "image");
    assert_eq!(sites.state("far"), "coming");
    let aborted = sites.world.run("far", &["move", "--abort", "web.raw"]).ok();
    assert!(aborted.out.contains("does not come here"), "{aborted:?}");
    assert_ne!(sites.state("far"), "coming");
    assert!(moving.fails().contains("stays here"));
    program.goes_on();
    assert_eq!(sites.state("near"), "here");
    sites.begin("near", "far", &[]).done();
    sites.is_at("far", "near", program.ended());
}

#[test]
fn the_destination_dies_in_each_step() {
    let mut sites = Sites::new();
    let program = sites.program("near", 0);
    program.goes_on();
    let mut moving = sites.begin("near", "far", &["--limit", "300K"]);
    moving.until("step", "image");
    sites.restart("far", &[]);
    // Sending images survives that, and so does what follows.
    moving.until("step", "rounds");
    sites.world.run("near", &["move", "--abort", "web.raw"]);
    moving.process.wait().unwrap();
    let dies = |sites: &mut Sites, place| {
        sites.restart("far", &[("DROVER_TEST_CRASH", place)]);
        let moving = sites.begin("near", "far", &[]);
        sites.running[1].0.wait();
        let last = program.last();
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(program.last() <= last + 1, "it is frozen");
        sites.serve_again("far", &[]);
        moving
    };
    // What had arrived is not known to be complete: it is refused.
    let moving = dies(&mut sites, "asked to take");
    assert!(moving.fails().contains("stays here"));
    program.goes_on();
    assert_eq!(sites.state("near"), "here");
    dies(&mut sites, "taken").done();
    let last = program.ended();
    sites.is_at("far", "near", last);
    // The other way, it dies a moment later.
    let program = sites.program("far", last + 1);
    program.goes_on();
    sites.restart("near", &[("DROVER_TEST_CRASH", "running")]);
    let moving = sites.begin("far", "near", &[]);
    sites.running[0].0.wait();
    sites.serve_again("near", &[]);
    moving.done();
    sites.is_at("near", "far", program.ended());
}

#[test]
fn the_process_that_serves_the_disk_dies_in_each_step() {
    let mut sites = Sites::new();
    let mut next = 0;
    for step in ["image", "rounds"] {
        let program = sites.program("near", next);
        program.goes_on();
        let mut moving = sites.begin("near", "far", &["--limit", "500K"]);
        moving.until("step", step);
        signal(sites.daemon("near"), "KILL");
        moving.fails();
        next = program.ended() + 1;
        assert_eq!(sites.state("near"), "leaving");
        // It is here, and only here.
        sites.is_at("near", "far", next - 1);
    }
    // It is committed: only the other site can tell.
    let held = Held::at(&mut sites, "far", "asked to take");
    let program = sites.program("near", next);
    program.goes_on();
    let moving = sites.begin("near", "far", &[]);
    held.reached();
    signal(sites.daemon("near"), "KILL");
    moving.fails();
    let last = program.ended();
    assert_eq!(sites.state("near"), "committed");
    sites
        .try_export("near")
        .fails(3, &["web.raw is being handed over to far"]);
    held.go_on();
    sites.begin("near", "far", &[]).done();
    sites.is_at("far", "near", last);
}

#[test]
fn the_copy_that_is_left_is_frozen_though_nobody_waits_for_the_move() {
    let mut sites = Sites::new();
    let held = Held::at(&mut sites, "far", "asked to take");
    let program = sites.program("near", 0);
    program.goes_on();
    let mut moving = sites.begin("near", "far", &[]);
    held.reached();
    moving.process.kill().unwrap();
    moving.process.wait().unwrap();
    held.go_on();
    let last = program.ended();
    until("the old copy is frozen", || {
        let images = sites.world.run("near", &["images", "--json"]).ok().json();
        images[0]["generations"]["frozen"] == true && images[0]["changed_bytes"] == 0
    });
    assert_eq!(sites.state("near"), "away");
    sites.is_at("far", "near", last);
}

#[test]
fn a_disk_that_was_refused_after_its_daemon_died_is_here() {
    let mut sites = Sites::new();
    let held = Held::at(&mut sites, "far", "asked to take");
    let program = sites.program("near", 0);
    program.goes_on();
    let moving = sites.begin("near", "far", &[]);
    held.reached();
    signal(sites.daemon("near"), "KILL");
    moving.fails();
    let last = program.ended();
    sites.restart("far", &[]);
    sites.restart("near", &[]);
    let resumed = sites.world.path("resumed");
    let touch = format!("touch {}", resumed.display());
    let asked = sites.begin("near", "far", &["--resume", &touch]);
    assert!(asked.fails().contains("stays here"));
    assert!(resumed.exists());
    sites.is_at("near", "far", last);
}

#[test]
fn the_site_at_the_source_is_restarted_while_its_disk_moves() {
    let mut sites = Sites::new();
    let program = sites.program("near", 0);
    program.goes_on();
    let mut moving = sites.begin("near", "far", &["--limit", "300K"]);
    moving.until("step", "image");
    let near = &mut sites.running[0].0;
    near.signal("TERM");
    near.wait();
    sites.serve_again("near", &[]);
    moving.until("step", "rounds");
    moving.done();
    sites.is_at("far", "near", program.ended());
}

#[test]
fn a_lost_link_is_waited_for_while_requests_wait() {
    let mut sites = Sites::new();
    let held = Held::at(&mut sites, "far", "asked to take");
    let program = sites.program("near", 0);
    program.goes_on();
    let moving = sites.begin("near", "far", &[]);
    held.reached();
    let far = &mut sites.running[1].0;
    far.signal("KILL");
    far.wait();
    // Asking does not end with whoever asked for it, and it cannot be given up.
    let refused = sites.world.run("near", &["move", "--abort", "web.raw"]);
    refused.fails(3, &["web.raw"]);
    assert!(!program.thread.is_finished(), "its requests wait");
    sites.serve_again("far", &[]);
    assert!(moving.fails().contains("stays here"));
    program.goes_on();
    let last = program.stop();
    sites.unmount("near");
    sites.is_at("near", "far", last);
}

#[test]
fn what_cannot_move_is_said() {
    let sites = Sites::new();
    let world = &sites.world;
    let moves = |args: &[&str]| world.run("near", &[&["move"], args].concat());
    moves(&["web.raw", "far"]).fails(3, &["web.raw is not in use here"]);
    moves(&["no.raw", "far"]).fails(3, &["no.raw"]);
    moves(&["--abort", "web.raw"]).fails(3, &["web.raw is not being moved"]);
    let program = sites.program("near", 0);
    program.goes_on();
    moves(&["web.raw", "nice"]).fails(3, &["no peer is called"]);
    // Without the right.
    let can = |can: &str| {
        world
            .run("far", &["peers", "set", "near", "--can", can])
            .ok()
    };
    can("send");
    moves(&["web.raw", "far"]).fails(3, &["host"]);
    can("send,host");
    // Two at a time.
    let mut moving = sites.begin("near", "far", &["--limit", "300K"]);
    moving.until("step", "image");
    moves(&["web.raw", "far"]).fails(3, &["web.raw is being moved already"]);
    let listen = format!("unix:{}", sites.socket("near").display());
    world
        .run("near", &["unmount", &listen])
        .fails(3, &["its disk is being moved"]);
    moves(&["--abort", "web.raw"]).ok();
    moving.fails();
    // No room there.
    world
        .run("far", &["peers", "set", "near", "--quota", "1M"])
        .ok();
    moves(&["web.raw", "far"]).fails(3, &["stays here"]);
    world
        .run("far", &["peers", "set", "near", "--quota", "none"])
        .ok();
    // Another image of that name, which is theirs.
    world.image("other.raw", 3, 10);
    world.run("far", &["index", "other.raw"]).ok();
    moves(&["web.raw", "far", "--as", "other.raw"])
        .fails(3, &["has another image called other.raw"]);
    program.goes_on();
    let last = program.stop();
    sites.unmount("near");
    sites.is_at("near", "far", last);
}
