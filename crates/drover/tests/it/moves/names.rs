//! What is known of a disk that moves says nothing of another image that has its name.

use std::fs;

use drover_core::BlockDevice;

use super::Sites;
use crate::world::until;

#[test]
fn an_image_that_gets_the_name_of_a_refused_disk_is_its_owners() {
    let mut sites = Sites::new();
    let program = sites.program("near", 0);
    program.goes_on();
    let mut moving = sites.begin("near", "far", &["--limit", "300K"]);
    moving.until("step", "image");
    sites
        .world
        .run("near", &["move", "--abort", "web.raw"])
        .ok();
    assert!(moving.fails().contains("stays here"));
    // One that has nothing to do with it, and was written.
    let own = sites.world.path("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("web.raw"), vec![1; 1 << 20]).unwrap();
    let path = own.join("web.raw").display().to_string();
    sites.world.run("far", &["index", &path]).ok();
    sites.restart("far", &[]);
    sites.try_export("far").ok();
    sites.unmount("far");
    sites.restart("far", &[]);
    let listed = sites.world.run("far", &["images", "--json"]).ok().json();
    let image = listed.iter().find(|image| image["name"] == "web.raw");
    assert_ne!(image.unwrap()["generations"]["frozen"], true, "{listed:?}");
    sites
        .world
        .run("near", &["rm", "far:web.raw", "--yes"])
        .fails(3, &["web.raw"]);
}

#[test]
fn an_image_that_gets_the_name_of_one_that_moved_away_is_another() {
    let mut sites = Sites::new();
    let program = sites.program("near", 0);
    program.goes_on();
    sites.begin("near", "far", &[]).done();
    program.ended();
    // Both forget it.
    for home in ["near", "far"] {
        until("it is removed, when its changes are merged", || {
            let removed = sites.world.run(home, &["rm", "web.raw", "--yes"]);
            removed.code == Some(0)
        });
        assert_eq!(sites.state(home), serde_json::Value::Null);
    }
    sites.world.run("far", &["send", "web.raw", "near"]).ok();
    sites.restart("near", &[]);
    sites.try_export("near").ok();
    sites.unmount("near");
}

#[test]
fn changes_of_an_image_that_was_removed_do_not_keep_its_name_from_a_disk() {
    let sites = Sites::new();
    let own = sites.world.path("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("web.raw"), vec![1; 1 << 20]).unwrap();
    let path = own.join("web.raw").display().to_string();
    sites.world.run("far", &["index", &path]).ok();
    sites.try_export("far").ok();
    let device = sites.connect("far");
    device.write(0, &[2; 4096]).unwrap();
    device.flush().unwrap();
    drop(device);
    sites.unmount("far");
    let removed = sites.world.run("far", &["rm", "web.raw", "--yes"]).ok();
    assert!(removed.out.contains("its changes"), "{removed:?}");
    let program = sites.program("near", 0);
    program.goes_on();
    sites.begin("near", "far", &[]).done();
    sites.is_at("far", "near", program.ended());
    let kept = sites.world.run("far", &["changes", "--json"]).ok().json();
    assert!(
        kept.iter().any(|changes| changes["earlier"] == true),
        "{kept:?}"
    );
}
