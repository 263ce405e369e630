//! Whatever is killed, and whenever: exactly one QEMU runs the machine, and nothing that it wrote is lost.

use std::path::{Path, PathBuf};

use super::*;

/// Makes the site at the destination wait at a place of the migration.
pub struct Held(PathBuf);

impl Held {
    pub fn at(sites: &mut Sites, place: &str) -> Held {
        let path = sites.world.path(&place.replace(' ', "-"));
        let variable = format!("{place}:{}", path.display());
        sites.restart_with("far", &[("DROVER_TEST_HOLD", &variable)]);
        Held(path)
    }

    /// Waits until it is there.
    pub fn reached(&self) {
        let held = format!("{}.held", self.0.display());
        until("the place is reached", || Path::new(&held).exists());
    }

    pub fn go_on(&self) {
        fs::write(&self.0, "").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_qemu_at_the_destination_dies_in_each_step() {
    let Some(mut sites) = Sites::new("the_qemu_at_the_destination_dies_in_each_step") else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    for step in ["disks", "memory"] {
        let mut there = sites.wait_for_it("far").await;
        let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
        moving.until("step", step);
        there.kill();
        moving.fails();
        stays(&sites, &mut here).await;
    }
    for place in ["arriving", "asked to take"] {
        let held = Held::at(&mut sites, place);
        let mut there = sites.wait_for_it("far").await;
        let moving = Moving::begin(&sites, "near", "far", &[]);
        held.reached();
        let last = here.said("beat").unwrap();
        there.kill();
        held.go_on();
        moving.fails();
        assert_eq!(there.said("beat"), None, "{place}");
        assert!(here.wait_said("beat", last + 5).await > last);
        stays(&sites, &mut here).await;
    }
    // And it can still move.
    let mut there = sites.wait_for_it("far").await;
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_qemu_at_the_source_dies_in_each_step() {
    let Some(mut sites) = Sites::new("the_qemu_at_the_source_dies_in_each_step") else {
        return;
    };
    for step in ["disks", "memory"] {
        let mut here = sites.start("near").await;
        let mut there = sites.wait_for_it("far").await;
        here.wait_said("beat", 5).await;
        let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
        moving.until("step", step);
        here.kill();
        let err = moving.fails();
        assert!(err.contains("its QEMU has ended"), "{err}");
        assert_eq!(sites.state("near"), "here");
        assert_eq!(there.said("beat"), None, "{step}");
        there.kill();
    }
    // All of it has arrived: it is lost for none.
    let held = Held::at(&mut sites, "asked to take");
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 20).await;
    let moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    here.kill();
    held.go_on();
    moving.done();
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_destination_dies_between_the_commitment_and_the_answer() {
    let test = "the_destination_dies_between_the_commitment_and_the_answer";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    for place in ["asked to take", "taken", "running"] {
        let (from, to) = match place {
            "running" => ("far", "near"),
            _ => ("near", "far"),
        };
        sites.restart_with(to, &[("DROVER_TEST_CRASH", place)]);
        let mut there = sites.wait_for_it(to).await;
        let mut moving = Moving::begin(&sites, from, to, &[]);
        moving.until("step", "switch");
        sites.site(to).wait();
        sites.serve_again(to, &[]);
        if place == "asked to take" {
            // Nobody knows whether all of it is there: it is not taken.
            moving.fails();
            there.ended().await;
            assert_eq!(there.said("beat"), None);
            stays(&sites, &mut here).await;
            continue;
        }
        moving.done();
        here.ended().await;
        goes_on(&here, &mut there).await;
        assert_eq!(
            (sites.state(from), sites.state(to)),
            ("away".into(), "here".into())
        );
        // A crash of the site that serves the disk takes nothing from the machine.
        sites.restart(to);
        let said = there.said("beat").unwrap();
        there.wait_said("beat", said + 20).await;
        there.verify().await;
        here = there;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_command_goes_on_after_the_commitment() {
    let Some(mut sites) = Sites::new("the_same_command_goes_on_after_the_commitment") else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let held = Held::at(&mut sites, "asked to take");
    let mut there = sites.wait_for_it("far").await;
    let moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    let second = sites.hypervisor("near");
    let world = &sites.world;
    world
        .run("near", &["migrate", &second, "far"])
        .fails(3, &["another process"]);
    moving.kill();
    assert_eq!(sites.state("near"), "committed");
    world
        .run("near", &["migrate", "--abort", "web"])
        .fails(3, &["handed over to far"]);
    // Not the same: another name there would be another move, another QEMU another machine.
    world
        .run("near", &["migrate", &second, "far", "--as", "db"])
        .fails(3, &["as web"]);
    let other = Launch::new().start(&world.path(""), "web");
    until("it listens", || other.socket().exists());
    let other_machine = format!("qmp:{}", other.socket().display());
    world
        .run("near", &["migrate", &other_machine, "far"])
        .code(2);
    // It lives, and is taking the machine.
    let broken = world.run("near", &["migrate", "--break", "web", "--yes"]);
    broken.fails(3, &["far answers, and may have web", "its answer took"]);
    assert_eq!(sites.state("near"), "committed");
    held.go_on();
    until("it was taken", || sites.state("far") == "here");
    world
        .run("near", &["migrate", "--break", "web", "--yes"])
        .fails(3, &["far answers, and has taken web"]);
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
    assert_eq!(sites.state("near"), "away");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_breaks_a_move_to_a_site_that_is_lost() {
    let Some(mut sites) = Sites::new("a_person_breaks_a_move_to_a_site_that_is_lost") else {
        return;
    };
    let crash = [("DROVER_TEST_CRASH", "asked to take")];
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    sites
        .world
        .run("near", &["migrate", "--break", "web", "--yes"])
        .fails(3, &["no machine called web"]);
    sites.restart_with("far", &crash);
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &[]);
    moving.until("event", "reconnecting");
    sites.site("far").wait();
    assert_eq!(sites.state("near"), "committed");
    let last = here.said("beat").unwrap();
    let near = |args: &[&str]| sites.world.run("near", args);
    near(&["migrate", "--abort", "web"]).fails(3, &["migrate --break web"]);
    near(&["peers", "forget", "far", "--yes"]).fails(3, &["web was handed over", "--break web"]);
    near(&["migrate", "--break", "web"]).fails(2, &["--yes"]);
    assert_eq!(sites.state("near"), "committed");
    // It also ends the command that asks for the decision.
    let broken = near(&["migrate", "--break", "web", "--yes"]).ok().out;
    assert_eq!(broken, "web: runs here\n");
    assert_ne!(wait(&mut moving.process), Some(0));
    here.wait_said("beat", last + 5).await;
    stays(&sites, &mut here).await;
    near(&["migrate", "--break", "web", "--yes"]).fails(3, &["nothing to break"]);

    // The site is back after all: it has not taken the machine, which can move there as before.
    sites.serve_again("far", &crash);
    assert_eq!(there.said("beat"), None);
    there.kill();
    // A site that is back when it is asked once more refuses the machine for good.
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &[]);
    moving.until("event", "reconnecting");
    sites.site("far").wait();
    moving.kill();
    sites.serve_again("far", &crash);
    let near = |args: &[&str]| sites.world.run("near", args).ok();
    near(&["migrate", "--break", "web", "--yes"]);
    assert_eq!(
        (sites.state("near"), sites.state("far")),
        ("here".into(), "away".into())
    );
    stays(&sites, &mut here).await;
    there.ended().await;
    assert_eq!(there.said("beat"), None);
    let _there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &[]);
    moving.until("event", "reconnecting");
    sites.site("far").wait();
    moving.kill();
    here.kill();
    let near = |args: &[&str]| sites.world.run("near", args).ok();
    let broken = near(&["migrate", "--break", "web", "--yes", "--json"]).json();
    assert_eq!(
        (&broken[0]["event"], &broken[0]["runs"]),
        (&"broken".into(), &false.into())
    );
    assert_eq!(sites.state("near"), "here");
    let told = near(&["audit", "--json"]).json();
    let last = told.iter().rfind(|event| event["machine"] == "web");
    assert_eq!(last.unwrap()["event"], "machine-stayed");
    near(&["peers", "forget", "far", "--yes"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_at_the_destination_gives_up_a_machine_that_does_not_come() {
    let test = "a_person_at_the_destination_gives_up_a_machine_that_does_not_come";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 5).await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    assert_eq!(sites.state("far"), "coming");
    let aborted = sites.world.run("far", &["migrate", "--abort", "web"]).ok();
    assert!(
        aborted.out.contains("does not come here"),
        "{}",
        aborted.out
    );
    moving.fails();
    there.ended().await;
    stays(&sites, &mut here).await;
    assert_eq!(sites.state("far"), "away");
    // The same after a restart, of a source that does not come back.
    there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("event", "memory");
    moving.kill();
    sites.restart("far");
    assert_eq!(sites.state("far"), "coming");
    sites.world.run("far", &["migrate", "--abort", "web"]).ok();
    there.ended().await;
    let changes = sites.world.run("far", &["changes", "--json"]).ok().json();
    assert!(changes.is_empty(), "{changes:?}");
    sites.world.run("near", &["migrate", "--abort", "web"]).ok();
    stays(&sites, &mut here).await;
}
