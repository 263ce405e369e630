//! Tests of merging changes in place and into a new image: the bytes are right, whatever interrupts the merge.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{changes, unmounted};
use crate::mount::ends::write;
use crate::mount::{Mounts, can_mount, has, text, tool};
use crate::world::{Ran, until};

/// Crash points of a merge.
const PLACES: [&str; 6] = [
    "claimed", "written", "prepared", "decided", "adopted", "ended",
];

fn far(m: &Mounts, args: &[&str]) -> Ran {
    m.world.run("far", args)
}

fn merge(m: &Mounts, args: &[&str]) -> Ran {
    far(m, &[&["changes", "merge", "web.img"], args].concat())
}

/// An image sent from the near site to the far one.
fn sent(m: &Mounts, seed: u64) -> Vec<u8> {
    let path = m.world.image("web.img", seed, 900);
    m.near(&["send", text(&path), "far"]).ok();
    fs::read(path).unwrap()
}

/// Writes to `web.img` of the far site through a mount, and to its expected bytes.
fn written(m: &Mounts, bytes: &mut [u8], seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let disk = m.mount("web.img", "disk", &[]);
    for _ in 0..20 {
        let at = rng.usize(0..bytes.len() - 70_000);
        let mut data = vec![0; rng.usize(1..70_000)];
        if rng.u8(0..4) > 0 {
            rng.fill(&mut data);
        }
        write(&disk, at as u64, &data);
        bytes[at..at + data.len()].copy_from_slice(&data);
    }
    unmounted(m, &disk);
}

fn image(m: &Mounts, name: &str) -> Value {
    let list = far(m, &["images", "--json"]).ok().json();
    let found = list.into_iter().find(|i| i["name"] == name);
    found.unwrap_or_else(|| panic!("no {name}"))
}

fn file(m: &Mounts, name: &str) -> PathBuf {
    m.world.path("far/images").join(name)
}

/// The image verifies, and its file matches the catalog.
fn is_good(m: &Mounts, name: &str) {
    far(m, &["verify", name]).ok();
    let path = file(m, name);
    let digest = far(m, &["digest", "--json", text(&path)]).ok().json();
    assert_eq!(image(m, name)["digest"], digest[0]["digest"]);
}

/// Waits until no lease is held and no working files are left.
fn is_tidy(m: &Mounts) {
    until("no merge is left", || {
        let leases = far(m, &["mounts", "leases", "--json"]).ok().json();
        let left = fs::read_dir(m.world.path("far/work/merges"));
        let left = left.into_iter().flatten().flatten().count();
        left == 0 && leases.iter().all(|l| l["writer"].is_null())
    });
}

#[test]
fn changes_become_part_of_a_raw_image_with_and_without_a_site() {
    if !can_mount("changes_become_part_of_a_raw_image_with_and_without_a_site") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 91);
    let none = merge(&m, &[]).ok();
    assert!(none.err.contains("nothing to merge"), "{none:?}");
    far(&m, &["changes", "merge", "nix.img"]).fails(3, &["nix.img", "drover images"]);
    for running in [true, false] {
        let before = image(&m, "web.img");
        written(&m, &mut bytes, 92 + u64::from(running));
        let changed = changes(&m)[0]["changed_bytes"].clone();
        if !running {
            m.kill_site();
        }
        let would = merge(&m, &["--dry-run", "--json"]).ok().json();
        assert_eq!(would[0]["merged"], false);
        assert_eq!(would[0]["changed_bytes"], changed);
        assert!(
            would[0]["room_bytes"].as_u64().unwrap() > 3 << 20,
            "{would:?}"
        );
        assert!(merge(&m, &["--dry-run"]).ok().out.contains("would merge"));
        assert_eq!(image(&m, "web.img")["digest"], before["digest"]);

        let done = merge(&m, &["--json"]).ok().json();
        assert_eq!(done[0]["merged"], true, "{done:?}");
        assert_eq!(done[0]["changed_bytes"], changed);
        assert_eq!(done[0]["digest"], image(&m, "web.img")["digest"]);
        assert_ne!(done[0]["digest"], before["digest"]);
        assert!(fs::read(file(&m, "web.img")).unwrap() == bytes);
        is_good(&m, "web.img");
        is_tidy(&m);
        assert!(changes(&m).is_empty());
        assert_eq!(image(&m, "web.img")["from"], before["from"]);
        if !running {
            m.start_site();
        }
        assert!(m.far_bytes("web.img") == bytes);
        // The matcher has its blocks: none is sent again.
        let new = m.world.path("new.img");
        fs::write(&new, &bytes).unwrap();
        let name = format!("copy-{running}.img");
        let sent = m.near(&["send", text(&new), "far", "--as", &name, "--json"]);
        let sent = sent.ok().json();
        let image = &sent.last().unwrap()["images"][0];
        assert_eq!(image["sent_blocks"].as_u64(), Some(0), "{image}");
    }
}

#[test]
fn a_cache_of_the_old_image_is_not_taken_for_the_merged_one() {
    if !can_mount("a_cache_of_the_old_image_is_not_taken_for_the_merged_one") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = sent(&m, 88);
    let disk = m.mount("web.img", "disk", &[]);
    write(&disk, 4096, &[9; 65536]);
    bytes[4096..][..65536].fill(9);
    until("it is unmounted", || {
        m.unmount(&disk, &["--keep-cache"]).code == Some(0)
    });
    merge(&m, &[]).ok();
    // The first edition and epoch of another mount, over the new image.
    let other = m.mount("web.img", "other", &[]);
    write(&other, 1 << 20, &[8; 4096]);
    bytes[1 << 20..][..4096].fill(8);
    unmounted(&m, &other);
    let disk = m.mount("web.img", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == bytes);
    unmounted(&m, &disk);
    merge(&m, &[]).ok();
    assert!(fs::read(file(&m, "web.img")).unwrap() == bytes);
}

#[test]
fn what_a_mount_has_not_pushed_keeps_the_image_as_it_is() {
    if !can_mount("what_a_mount_has_not_pushed_keeps_the_image_as_it_is") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = sent(&m, 89);
    written(&m, &mut bytes, 90);
    let disk = m.mount("web.img", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 0, &[1; 4096]);
    bytes[..4096].fill(1);
    until("it is unmounted", || {
        m.unmount(&disk, &["--offline"]).code == Some(0)
    });
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    for action in [&["merge", "web.img"][..], &["drop", "web.img", "-y"]] {
        far(&m, &[&["changes"], action].concat())
            .fails(3, &["web.img", &name, "drover mounts break"]);
    }
    let disk = m.mount("web.img", "disk", &[]);
    m.pushed();
    assert!(fs::read(&disk).unwrap() == bytes);
    unmounted(&m, &disk);
    merge(&m, &[]).ok();
    assert!(fs::read(file(&m, "web.img")).unwrap() == bytes);
}

#[test]
fn a_merged_image_is_no_denser_than_what_was_written() {
    if !can_mount("a_merged_image_is_no_denser_than_what_was_written") {
        return;
    }
    let m = Mounts::new();
    let path = m.world.path("web.img");
    fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    m.near(&["send", text(&path), "far"]).ok();
    let disk = m.mount("web.img", "disk", &[]);
    for nth in 0..100 {
        write(&disk, nth * 600_000 / 4096 * 4096, &[7; 4096]);
    }
    unmounted(&m, &disk);
    let done = merge(&m, &["--json"]).ok().json();
    assert_eq!(done[0]["room_bytes"], 100 * 4096, "{done:?}");
    let blocks = fs::metadata(file(&m, "web.img")).unwrap().blocks();
    assert!(blocks * 512 < 200 * 4096, "{blocks}");
}

#[test]
fn a_qcow2_image_is_written_anew() {
    let test = "a_qcow2_image_is_written_anew";
    if !can_mount(test) || !has(test, &["qemu-img"]) {
        return;
    }
    let m = Mounts::new();
    let raw = m.world.image("before.raw", 93, 900);
    let (path, mut bytes) = (m.world.path("web.img"), fs::read(&raw).unwrap());
    tool(
        "qemu-img",
        &["convert", "-O", "qcow2", text(&raw), text(&path)],
    );
    m.near(&["send", text(&path), "far"]).ok();
    written(&m, &mut bytes, 94);
    merge(&m, &[]).ok();
    is_good(&m, "web.img");
    is_tidy(&m);
    assert_eq!(image(&m, "web.img")["format"], "qcow2");
    assert!(m.far_bytes("web.img") == bytes);
    let (merged, back) = (file(&m, "web.img"), m.world.path("back.raw"));
    tool("qemu-img", &["check", text(&merged)]);
    tool(
        "qemu-img",
        &["convert", "-O", "raw", text(&merged), text(&back)],
    );
    assert!(fs::read(back).unwrap() == bytes);

    // Internal snapshots would be lost.
    tool("qemu-img", &["snapshot", "-c", "before", text(&path)]);
    m.near(&["send", text(&path), "far"]).ok();
    let mut bytes = fs::read(&raw).unwrap();
    written(&m, &mut bytes, 95);
    merge(&m, &[]).fails(3, &["web.img", "internal snapshots", "--as"]);
    merge(&m, &["--as", "flat.raw", "--to", "raw", "--drop"]).ok();
    assert!(fs::read(file(&m, "flat.raw")).unwrap() == bytes);
}

#[test]
fn a_new_image_is_made_and_the_old_one_keeps_its_changes() {
    let test = "a_new_image_is_made_and_the_old_one_keeps_its_changes";
    if !can_mount(test) || !has(test, &["qemu-img"]) {
        return;
    }
    let m = Mounts::new();
    let old = sent(&m, 96);
    let mut bytes = old.clone();
    written(&m, &mut bytes, 97);
    let as_new = ["--as", "new.img"];
    merge(&m, &as_new).ok();
    merge(&m, &as_new).fails(3, &["new.img", "already"]);
    merge(&m, &["--as", "web.img"]).fails(2, &["web.img"]);
    assert!(fs::read(file(&m, "new.img")).unwrap() == bytes);
    assert!(fs::read(file(&m, "web.img")).unwrap() == old);
    is_good(&m, "new.img");
    is_good(&m, "web.img");
    assert_eq!(changes(&m).len(), 1);
    assert!(m.far_bytes("web.img") == bytes && m.far_bytes("new.img") == bytes);
    let done = merge(
        &m,
        &["--as", "two.img", "--to", "qcow2", "--drop", "--json"],
    );
    assert_eq!(done.ok().json()[0]["dropped"], true);
    assert!(changes(&m).is_empty());
    is_tidy(&m);
    is_good(&m, "two.img");
    assert!(m.far_bytes("web.img") == old && m.far_bytes("two.img") == bytes);

    // A format drover cannot write, and a file it does not own.
    let (raw, vmdk) = (m.world.path("web.img"), m.world.path("old.vmdk"));
    tool(
        "qemu-img",
        &["convert", "-O", "vmdk", text(&raw), text(&vmdk)],
    );
    m.near(&["send", text(&vmdk), "far"]).ok();
    let disk = m.mount("old.vmdk", "disk", &[]);
    write(&disk, 5000, &[1; 10_000]);
    unmounted(&m, &disk);
    let of_vmdk = ["changes", "merge", "old.vmdk"];
    far(&m, &of_vmdk).fails(3, &["vmdk", "--as NAME --to raw"]);
    let as_raw = ["--as", "old.raw", "--to", "raw"];
    far(&m, &[&of_vmdk[..], &as_raw].concat()).ok();
    let mut bytes = fs::read(&raw).unwrap();
    bytes[5000..15_000].fill(1);
    assert!(fs::read(file(&m, "old.raw")).unwrap() == bytes);
    m.raw("own.raw", 98);
    let disk = m.mount("own.raw", "disk", &[]);
    write(&disk, 0, &[1; 4096]);
    unmounted(&m, &disk);
    far(&m, &["changes", "merge", "own.raw"]).fails(3, &["own.raw", "never changes", "--as"]);
}

#[test]
fn who_has_it_mounted_or_too_little_room_is_in_the_way() {
    if !can_mount("who_has_it_mounted_or_too_little_room_is_in_the_way") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 99);
    written(&m, &mut bytes, 100);
    for options in [&[][..], &["--read-only"]] {
        let disk = m.mount("web.img", "disk", options);
        let name = m.list()[0]["name"].as_str().unwrap().to_owned();
        merge(&m, &[]).fails(3, &["web.img", &name, "unmount it there"]);
        assert!(fs::read(&disk).unwrap() == bytes);
        unmounted(&m, &disk);
    }
    m.kill_site();
    let config = m.world.path("far/config.toml");
    let before = fs::read(&config).unwrap_or_default();
    fs::write(&config, "reserve = \"9000TiB\"\n").unwrap();
    merge(&m, &[]).fails(3, &["web.img", "free some space"]);
    fs::write(&config, before).unwrap();
    is_tidy(&m);
    m.start_site();
    assert!(m.far_bytes("web.img") == bytes);
    merge(&m, &[]).ok();
    assert!(m.far_bytes("web.img") == bytes);
}

#[test]
fn a_guest_that_writes_another_formats_header_does_not_choose_the_format() {
    if !can_mount("a_guest_that_writes_another_formats_header_does_not_choose_the_format") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = sent(&m, 101);
    let path = m.world.path("forged.qcow2");
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-f", "qcow2", text(&path), "1M"])
        .output();
    if !made.is_ok_and(|out| out.status.success()) {
        return;
    }
    let header = fs::read(&path).unwrap();
    let disk = m.mount("web.img", "disk", &[]);
    write(&disk, 0, &header);
    bytes[..header.len()].copy_from_slice(&header);
    unmounted(&m, &disk);
    merge(&m, &[]).fails(3, &["web.img", "qcow2", "--as NAME --to qcow2"]);
    assert_eq!(image(&m, "web.img")["format"], "raw");
    assert!(m.far_bytes("web.img") == bytes);
    is_tidy(&m);
    merge(&m, &["--as", "safe.qcow2", "--to", "qcow2"]).ok();
    assert!(m.far_bytes("safe.qcow2") == bytes);
}

#[test]
fn the_backing_file_of_another_image_stays_what_it_is() {
    let test = "the_backing_file_of_another_image_stays_what_it_is";
    if !can_mount(test) || !has(test, &["qemu-img"]) {
        return;
    }
    let m = Mounts::new();
    let mut bytes = sent(&m, 127);
    let top = m.world.path("top.qcow2");
    let backing = m.world.path("web.img");
    let made = [
        "create",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "web.img",
        text(&top),
    ];
    assert!(backing.exists());
    tool("qemu-img", &made);
    m.near(&["send", text(&top), "far", "--with-parts"]).ok();
    written(&m, &mut bytes, 128);
    merge(&m, &[]).fails(3, &["web.img", "backing file of top.qcow2", "--as"]);
    merge(&m, &["--as", "new.img"]).ok();
    assert!(fs::read(file(&m, "new.img")).unwrap() == bytes);
    far(&m, &["rm", "top.qcow2", "-y"]).ok();
    merge(&m, &[]).ok();
    assert!(fs::read(file(&m, "web.img")).unwrap() == bytes);
}

/// Runs a merge that dies at a crash point, while no site runs.
fn dies(m: &Mounts, place: &str, args: &[&str]) {
    let args = [&["changes", "merge", "web.img"], args].concat();
    let mut command = m.world.drover("far", &args);
    let status = command.env("DROVER_TEST_CRASH", place).output().unwrap();
    assert!(!status.status.success(), "{place}: {status:?}");
}

#[test]
fn a_merge_that_dies_anywhere_is_finished_or_never_was() {
    if !can_mount("a_merge_that_dies_anywhere_is_finished_or_never_was") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 102);
    for (nth, place) in PLACES.into_iter().enumerate() {
        let before = image(&m, "web.img");
        written(&m, &mut bytes, 103 + nth as u64);
        m.kill_site();
        dies(&m, place, &[]);
        let decided = nth >= 3;
        if nth % 2 == 0 {
            // The site finishes it in the background.
            m.start_site();
            until("the image can be mounted", || {
                let leases = far(&m, &["mounts", "leases", "--json"]).ok().json();
                leases.iter().all(|l| l["writer"].is_null())
            });
        } else {
            // So does running the command again.
            merge(&m, &[]).ok();
            assert!(changes(&m).is_empty(), "{place}");
            m.start_site();
        }
        is_tidy(&m);
        is_good(&m, "web.img");
        let merged = image(&m, "web.img")["digest"] != before["digest"];
        assert_eq!(merged, decided || nth % 2 == 1, "{place}");
        assert_eq!(changes(&m).is_empty(), merged, "{place}");
        assert!(m.far_bytes("web.img") == bytes, "{place}");
        if !merged {
            merge(&m, &[]).ok();
        }
        assert!(fs::read(file(&m, "web.img")).unwrap() == bytes, "{place}");
    }
}

#[test]
fn a_crash_between_the_new_name_and_the_catalog_is_finished() {
    if !can_mount("a_crash_between_the_new_name_and_the_catalog_is_finished") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 110);
    written(&m, &mut bytes, 111);
    m.kill_site();
    dies(&m, "decided", &[]);
    let part = m.world.path("far/work/merges/web.img/image.part");
    fs::rename(part, file(&m, "web.img")).unwrap();
    // Recovery crashes too.
    let mut again = m.world.drover("far", &["verify", "web.img"]);
    again.env("DROVER_TEST_CRASH", "recovered");
    assert!(!again.output().unwrap().status.success());
    let ran = far(&m, &["verify", "web.img"]).ok();
    assert!(
        ran.err.is_empty() || ran.err.contains("finished now"),
        "{ran:?}"
    );
    is_good(&m, "web.img");
    is_tidy(&m);
    assert!(changes(&m).is_empty());
    m.start_site();
    assert!(m.far_bytes("web.img") == bytes);
}

#[test]
fn a_site_that_is_stopped_while_it_finishes_a_merge_goes_on_at_the_next_start() {
    if !can_mount("a_site_that_is_stopped_while_it_finishes_a_merge_goes_on_at_the_next_start") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 130);
    written(&m, &mut bytes, 131);
    m.kill_site();
    dies(&m, "decided", &[]);
    for _ in 0..2 {
        let place = [("DROVER_TEST_HOLD", "recovering")];
        let args = ["serve", "--listen", "127.0.0.1:0"];
        let site = m.world.process_with("far", &args, &place);
        until("it is at the merge", || {
            site.log().contains("held at recovering")
        });
        fs::write(&site.log, "").unwrap();
        let log = site.log.clone();
        let (code, _) = site.stop();
        assert_eq!(code, Some(0));
        let log = fs::read_to_string(log).unwrap();
        assert!(log.contains("finished at the next start"), "{log}");
        assert!(m.world.path("far/work/merges/web.img/merge").exists());
    }
    m.start_site();
    until("the merge is finished", || changes(&m).is_empty());
    is_tidy(&m);
    is_good(&m, "web.img");
    assert!(fs::read(file(&m, "web.img")).unwrap() == bytes);
}

#[test]
fn dropping_after_an_interrupted_merge_needs_no_other_command() {
    if !can_mount("dropping_after_an_interrupted_merge_needs_no_other_command") {
        return;
    }
    let mut m = Mounts::new();
    let old = sent(&m, 125);
    written(&m, &mut old.clone(), 126);
    m.kill_site();
    dies(&m, "written", &[]);
    far(&m, &["changes", "drop", "web.img", "-y"]).ok();
    is_tidy(&m);
    is_good(&m, "web.img");
    m.start_site();
    assert!(m.far_bytes("web.img") == old);
}

#[test]
fn what_was_written_after_a_broken_claim_is_not_lost() {
    if !can_mount("what_was_written_after_a_broken_claim_is_not_lost") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 112);
    written(&m, &mut bytes, 113);
    m.kill_site();
    dies(&m, "decided", &[]);
    // As if another mount had broken the lease and written before recovery: a local mount needs no running site.
    far(&m, &["mounts", "break", "web.img", "-y"]).ok();
    let path = m.world.path("own");
    far(&m, &["mount", "web.img", text(&path)]).ok();
    write(&path, 77_777, &[7; 5000]);
    bytes[77_777..82_777].fill(7);
    far(&m, &["unmount", text(&path)]).ok();
    m.start_site();
    is_tidy(&m);
    is_good(&m, "web.img");
    assert!(m.far_bytes("web.img") == bytes);
    merge(&m, &[]).ok();
    assert!(fs::read(file(&m, "web.img")).unwrap() == bytes);
}

#[test]
fn a_site_that_is_killed_while_it_merges_loses_nothing() {
    if !can_mount("a_site_that_is_killed_while_it_merges_loses_nothing") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = sent(&m, 114);
    for seed in 0..6 {
        written(&m, &mut bytes, 115 + seed);
        let mut merging = m
            .world
            .drover("far", &["changes", "merge", "web.img", "--json"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let pause = fastrand::Rng::with_seed(seed).u64(0..400);
        std::thread::sleep(std::time::Duration::from_millis(pause));
        m.kill_site();
        crate::world::wait(&mut merging);
        m.start_site();
        is_tidy(&m);
        is_good(&m, "web.img");
        assert!(m.far_bytes("web.img") == bytes, "seed {seed}");
    }
}

#[test]
fn a_merge_that_is_stopped_leaves_the_image_as_it_was() {
    if !can_mount("a_merge_that_is_stopped_leaves_the_image_as_it_was") {
        return;
    }
    let mut m = Mounts::new();
    let path = m.world.image("web.img", 121, 24_000);
    m.near(&["send", text(&path), "far"]).ok();
    let mut bytes = fs::read(path).unwrap();
    for (running, signal) in [(true, "INT"), (false, "TERM")] {
        written(&m, &mut bytes, 122);
        if !running {
            m.kill_site();
        }
        let mut merging = m
            .world
            .drover("far", &["changes", "merge", "web.img"])
            .spawn()
            .unwrap();
        let part: &Path = &m.world.path("far/work/merges/web.img/image.part");
        until("it is being written", || {
            part.exists() || merging.try_wait().unwrap().is_some()
        });
        crate::world::signal(merging.id(), signal);
        let code = crate::world::wait(&mut merging);
        if !running {
            m.start_site();
        }
        is_tidy(&m);
        is_good(&m, "web.img");
        // It may have finished before the signal, or the site may not have noticed it yet.
        if !running {
            assert_eq!(changes(&m).is_empty(), code == Some(0), "{code:?}");
        }
        assert!(m.far_bytes("web.img") == bytes);
    }
}
