//! Tests of `drover space`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

use crate::world::{World, until};

/// Number, size and allocated space of the files below a directory.
fn below(dir: &Path) -> (u64, u64, u64) {
    let mut sum = (0, 0, 0);
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            let (files, size, disk) = below(&entry.path());
            sum = (sum.0 + files, sum.1 + size, sum.2 + disk);
        } else if kind.is_file() {
            let about = entry.metadata().unwrap();
            sum = (sum.0 + 1, sum.1 + about.len(), sum.2 + about.blocks() * 512);
        }
    }
    sum
}

fn item<'a>(space: &'a Value, kind: &str) -> &'a Value {
    let items = space["items"].as_array().unwrap();
    items.iter().find(|i| i["kind"] == kind).unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn space(world: &World, home: &str) -> Value {
    world.run(home, &["space", "--json"]).ok().json().remove(0)
}

#[test]
fn every_file_of_a_home_is_counted_once_and_as_what_it_takes() {
    let world = World::new();
    let site = world.pair();
    let path = world.image("a.img", 1, 300);
    world.run("near", &["send", "a.img", "far"]).ok();
    world
        .run("far", &["index", path.to_str().unwrap(), "--json"])
        .code(1);
    let other = world.image("b.img", 2, 100);
    world.run("far", &["index", other.to_str().unwrap()]).ok();
    let running = space(&world, "far");
    site.stop();
    // Files that a mount, a transfer and the cache leave, as far as space is concerned.
    let far = world.path("far");
    let leave = |path: &str, bytes: usize| {
        let path = far.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, vec![1; bytes]).unwrap();
    };
    leave("mounted/overlays/a.img/data", 40_000);
    leave("work/transfers/00/image.part", 50_000);
    leave("mounts/x/cache/data", 60_000);
    leave("work/sequences.data", 70_000);
    fs::hard_link(far.join("mounts/x/cache/data"), far.join("mounts/x/again")).unwrap();
    let stopped = space(&world, "far");

    let image = item(&stopped, "images");
    assert_eq!(image["files"], 1);
    assert_eq!(number(&image["size_bytes"]), 300 * 4096 + (1 << 20));
    let disk = number(&image["disk_bytes"]);
    assert!(disk < 310 * 4096, "a hole takes nothing: {disk}");
    assert_eq!(item(&running, "images")["size_bytes"], image["size_bytes"]);
    assert_eq!(stopped["indexed"]["files"], 1);
    for (kind, least) in [
        ("changes", 40_000),
        ("transfers", 50_000),
        ("mount_caches", 60_000),
        ("sequence_data", 70_000),
        ("index", 300 * 32),
        ("reserve", 8 << 20),
        ("other", 1),
    ] {
        let size = number(&item(&stopped, kind)["size_bytes"]);
        assert!(size >= least && size < least + (64 << 20), "{kind}: {size}");
    }
    assert_eq!(item(&stopped, "mount_caches")["size_bytes"], 60_000);
    // Everything is counted, exactly once. (The catalog has log files next to it while it is open.) A file system may
    // allocate blocks some time after a write.
    let mut again = Value::Null;
    until("the report matches the files", || {
        // A fragmented file takes a block more than its content.
        let reserve = far.join("reserve").metadata().unwrap();
        let mut sum = (1, reserve.len(), reserve.blocks() * 512);
        for dir in ["images", "work", "index", "mounted", "mounts"] {
            let (files, size, disk) = below(&far.join(dir));
            sum = (sum.0 + files, sum.1 + size, sum.2 + disk);
        }
        again = space(&world, "far");
        let reported = |what: &str| {
            let all = number(&again["total"][what]);
            all - number(&item(&again, "other")[what])
        };
        let cache = far.join("mounts/x/cache/data").metadata().unwrap();
        assert_eq!(reported("files"), sum.0 - 1);
        assert_eq!(reported("size_bytes"), sum.1 - cache.len());
        reported("disk_bytes") == sum.2 - cache.blocks() * 512
    });
    let all = &again["file_systems"][0];
    assert_eq!(all["holds"][0], "home");
    assert!(number(&all["size_bytes"]) > 0);
    assert!(number(&all["available_bytes"]) <= number(&all["free_bytes"]));

    let table = world.run("far", &["space"]).ok().out;
    for words in [
        "images",
        "ON DISK",
        "drover changes drop",
        "total",
        "FILE SYSTEM",
    ] {
        assert!(table.contains(words), "{words}: {table}");
    }
}

#[test]
fn images_elsewhere_are_counted_without_what_is_beside_them() {
    let world = World::new();
    let dir = world.path("images");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("not-drovers"), vec![1; 100_000]).unwrap();
    world
        .run("far", &["init", "--images", dir.to_str().unwrap()])
        .ok();
    let _site = world.pair();
    world.image("a.img", 1, 30);
    world.run("near", &["send", "a.img", "far"]).ok();
    let found = space(&world, "far");
    assert_eq!(item(&found, "images")["files"], 1);
    assert_eq!(item(&found, "images")["size_bytes"], 30 * 4096 + (1 << 20));
    assert!(number(&item(&found, "sequence_data")["files"]) >= 1);
    assert!(number(&found["total"]["size_bytes"]) < 80 << 20);
    assert_eq!(found["unreadable"], Value::Array(Vec::new()));
}
