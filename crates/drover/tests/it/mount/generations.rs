//! The generations of images that mounts write: shown, frozen, thawed.

use std::sync::Arc;

use drover_core::Digest;
use drover_storage::HostDirectory;
use drover_store::generations::{Contents, Generations};
use serde_json::Value;

use super::ends::write;
use super::{Mounts, can_mount, text};
use crate::world::until;

fn generations(m: &Mounts) -> Value {
    let images = m.world.run("far", &["images", "--json"]).ok().json();
    images[0]["generations"].clone()
}

#[test]
fn generations_are_shown_and_a_frozen_image_is_not_written_until_it_is_thawed() {
    if !can_mount("generations_are_shown_and_a_frozen_image_is_not_written_until_it_is_thawed") {
        return;
    }
    let mut m = Mounts::new();
    let path = m.world.image("web.raw", 91, 900);
    m.near(&["send", text(&path), "far"]).ok();
    let size = path.metadata().unwrap().len();
    assert_eq!(generations(&m), Value::Null);
    let disk = m.mount("web.raw", "disk", &[]);
    write(&disk, 8192, &[7; 5000]);
    until("it is unmounted", || m.unmount(&disk, &[]).code == Some(0));
    let first = generations(&m);
    assert_eq!(
        (&first["generation"], &first["frozen"]),
        (&1.into(), &false.into())
    );
    assert_eq!(first["seed"].as_str().unwrap().len(), 32);
    // A merge makes another file of the same disk.
    m.world.run("far", &["changes", "merge", "web.raw"]).ok();
    let disk = m.mount("web.raw", "disk", &[]);
    until("it is unmounted", || m.unmount(&disk, &[]).code == Some(0));
    assert_eq!(generations(&m), first);

    // As a move does it.
    m.kill_site();
    let path = m.world.path("far/mounted/overlays/web.raw");
    let directory = Arc::new(HostDirectory::open(&path).unwrap());
    let digest = m.world.run("far", &["images", "--json"]).ok().json()[0]["digest"].clone();
    let digest = digest.as_str().unwrap().parse::<Digest>().unwrap();
    let now = Contents::new(&digest.0, 0, 0);
    let map = Generations::open(directory, size, now).unwrap();
    map.freeze(now).unwrap();
    drop(map);
    m.start_site();
    assert_eq!(generations(&m)["frozen"], true);
    let disk = m.world.path("disk");
    let refused = m.near(&["mount", "far:web.raw", text(&disk)]);
    refused.fails(3, &["web.raw is frozen", "drover mounts break web.raw"]);
    let reader = m.mount("web.raw", "disk", &["--read-only"]);
    until("it is unmounted", || {
        m.unmount(&reader, &[]).code == Some(0)
    });
    m.world
        .run("far", &["mounts", "break", "web.raw"])
        .fails(2, &["--yes"]);
    let thawed = m
        .world
        .run("far", &["mounts", "break", "web.raw", "-y"])
        .ok();
    assert!(thawed.err.contains("thawed web.raw"), "{thawed:?}");
    let disk = m.mount("web.raw", "disk", &[]);
    write(&disk, 0, &[8; 5000]);
    until("it is unmounted", || m.unmount(&disk, &[]).code == Some(0));
    assert_eq!(generations(&m)["frozen"], false);
}
