//! `drover snapshot` of a disk that a program uses.

use super::*;

fn snapshot(sites: &Sites) -> Value {
    let args = ["snapshot", "web.raw", "--json"];
    let made = sites.world.run("near", &args).ok().json();
    made.last().cloned().unwrap()
}

/// The newest record in the latest snapshot, of which all before must be there, too.
fn newest(sites: &Sites) -> u64 {
    let out = sites.world.path("restored.raw");
    let restore = ["restore", "web@latest", "restored.raw"];
    sites.world.run("near", &restore).ok();
    let disk = fs::read(&out).unwrap();
    fs::remove_file(out).unwrap();
    super::replicas::newest(&disk)
}

#[test]
fn a_disk_that_a_program_uses_is_kept_as_of_a_moment() {
    let sites = Sites::new();
    let world = &sites.world;
    world.run("near", &["vault", "init", "store"]).ok();
    fs::remove_file(world.path("web.raw")).unwrap();
    world
        .run("near", &["snapshot", "web.raw"])
        .fails(3, &["there is no file web.raw", "open for writing"]);
    let program = sites.program("near", 1);
    until("there is data", || program.last() > 50);
    let before = program.last();
    let first = snapshot(&sites);
    assert_eq!(first["read_bytes"].as_u64(), Some(SIZE));
    let found = newest(&sites);
    assert!(
        (before..=program.last() + 1).contains(&found),
        "{before} {found}"
    );
    let last = program.stop();
    snapshot(&sites);
    assert!(newest(&sites) >= last);
    // Nothing was written since, then one block.
    assert_eq!(snapshot(&sites)["read_bytes"], 0);
    let device = sites.connect("near");
    device.write(SLOTS * SLOT + 8192, &[7; 4096]).unwrap();
    device.flush().unwrap();
    let hook = |name: &str| format!("touch {}", world.path(name).display());
    let hooks = ["--pause", &hook("paused"), "--resume", &hook("resumed")];
    let args = [&["snapshot", "web.raw", "--json"][..], &hooks].concat();
    let made = world.run("near", &args).ok().json();
    assert_eq!(made.last().unwrap()["read_bytes"], 1 << 20);
    assert!(world.path("paused").exists() && world.path("resumed").exists());
    assert!(newest(&sites) >= last);
    // Into another vault all is read, and for the first one nothing is known then.
    world.run("near", &["vault", "init", "other"]).ok();
    let other = ["snapshot", "web.raw", "--json", "--vault", "other"];
    let made = world.run("near", &other).ok().json();
    assert_eq!(made.last().unwrap()["read_bytes"].as_u64(), Some(SIZE));
    drop(device);
    sites.unmount("near");
}
