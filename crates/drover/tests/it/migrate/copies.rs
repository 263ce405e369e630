//! A copy of the file that a machine has left, at a third site: as good as what the machine left there itself.

use std::path::{Path, PathBuf};

use super::*;

/// Eight batches of a walk.
const DISK: u64 = 64 << 20;

fn qemu_img(args: &[&str]) {
    let done = Command::new("qemu-img").args(args).output().unwrap();
    assert!(done.status.success(), "qemu-img {args:?}: {done:?}");
}

impl Sites {
    /// A qcow2 file for the machine's disk: what the guest writes, then what it never does.
    fn make_qcow2(&self) -> PathBuf {
        let (raw, path) = (self.world.path("content"), self.world.path("web.qcow2"));
        let mut content = vec![0; DISK as usize];
        fastrand::Rng::with_seed(14).fill(&mut content[SIZE as usize..]);
        fs::write(&raw, content).unwrap();
        let (raw, text) = (raw.to_str().unwrap(), path.to_str().unwrap());
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", raw, text]);
        path
    }

    /// The machine, from this file.
    async fn start_from(&self, path: &Path, home: &str) -> Qemu {
        let file = Node::File {
            name: "file".into(),
            path: path.to_owned(),
        };
        let disk = Node::Qcow2 {
            name: "disk".into(),
            file: "file".into(),
        };
        let launch = self.launch(&[file, disk]);
        let mut machine = launch.start(&self.world.path(""), &format!("web-{home}"));
        machine.machine().await;
        machine
    }

    async fn wait_for_qcow2(&self, home: &str) -> Qemu {
        let stub = Node::Null {
            name: "stub".into(),
            size: DISK,
        };
        let launch = self.launch(&[stub, raw("stub")]).incoming();
        let mut machine = launch.start(&self.world.path(""), &format!("web-{home}"));
        machine.machine().await;
        machine
    }

    /// What a site knows of the generations of an image.
    fn generations(&self, home: &str, name: &str) -> Value {
        let images = self.world.run(home, &["images", "--json"]).ok().json();
        let image = images.iter().find(|image| image["name"] == name);
        image.unwrap()["generations"].clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_the_file_that_was_left_is_an_old_copy_elsewhere() {
    let test = "a_copy_of_the_file_that_was_left_is_an_old_copy_elsewhere";
    let homes = ["near", "far", "third"].map(|home| (home, own_address(), &[][..]));
    let Some(sites) = Sites::among(test, World::new(), &homes) else {
        return;
    };
    let left = sites.make_qcow2();
    let mut here = sites.start_from(&left, "near").await;
    here.wait_said("beat", 20).await;
    let mut there = sites.wait_for_qcow2("far").await;
    let done = Moving::begin(&sites, "near", "far", &["--mark-files"]).done();
    assert_eq!(done["unread_bytes"], 0, "{done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
    qemu_img(&["check", "-q", left.to_str().unwrap()]);
    let known = sites.generations("near", "web.qcow2");
    assert_eq!(known["frozen"], true, "{known}");

    // Two copies of it, of which QEMU writes to one.
    let copies = sites.world.path("copies");
    fs::create_dir(&copies).unwrap();
    let (copy, written) = (copies.join("web.qcow2"), copies.join("written.qcow2"));
    fs::copy(&left, &copy).unwrap();
    fs::copy(&left, &written).unwrap();
    let written = written.to_str().unwrap();
    let write = ["-f", "qcow2", "-c", "write 32M 4k", written];
    let done = Command::new("qemu-io").args(write).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    qemu_img(&["check", "-q", written]);
    sites
        .world
        .run("third", &["index", "--now", copies.to_str().unwrap()])
        .ok();
    assert_eq!(sites.generations("third", "web.qcow2"), known);
    assert_eq!(
        sites.generations("third", "written.qcow2"),
        Value::Null,
        "it is not believed"
    );

    let mut third = sites.wait_for_qcow2("third").await;
    let done = Moving::begin(&sites, "far", "third", &[]).done();
    // All batches but that which the guest writes.
    let unread = done["unread_bytes"].as_u64().unwrap();
    assert!(unread >= 48 << 20, "{done}");
    there.ended().await;
    goes_on(&there, &mut third).await;
    let image = fs::read(sites.world.path("third").join("images/web-0.raw")).unwrap();
    let content = fs::read(sites.world.path("content")).unwrap();
    assert!(image[SIZE as usize..] == content[SIZE as usize..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_qemu_has_recorded_since_a_file_was_marked_is_all_that_is_sent() {
    let test = "what_qemu_has_recorded_since_a_file_was_marked_is_all_that_is_sent";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    // The machine is off.
    let path = sites.make_qcow2();
    let text = path.to_str().unwrap();
    sites.world.run("near", &["index", "--mark", text]).ok();
    sites.world.run("near", &["index", "--mark", text]).ok();
    qemu_img(&["check", "-q", text]);
    let copies = sites.world.path("copies");
    fs::create_dir(&copies).unwrap();
    let copy = copies.join("web.qcow2");
    fs::copy(&path, &copy).unwrap();
    sites
        .world
        .run("far", &["index", copy.to_str().unwrap()])
        .ok();
    let known = sites.generations("near", "web.qcow2");
    assert_eq!(sites.generations("far", "web.qcow2"), known);

    // It is started by hand, twice, and moves to where the copy is.
    let mut earlier = sites.start_from(&path, "near").await;
    earlier.wait_said("beat", 5).await;
    quit(&mut earlier).await;
    let mut here = sites.start_from(&path, "near").await;
    here.wait_said("beat", 20).await;
    let mut there = sites.wait_for_qcow2("far").await;
    let done = Moving::begin(&sites, "near", "far", &[]).done();
    let unread = done["unread_bytes"].as_u64().unwrap();
    assert!(unread >= 48 << 20, "{done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
    let image = fs::read(sites.world.path("far").join("images/web-0.raw")).unwrap();
    let content = fs::read(sites.world.path("content")).unwrap();
    assert!(image[SIZE as usize..] == content[SIZE as usize..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_qemu_that_was_killed_has_recorded_is_not_used_but_removed() {
    let test = "what_a_qemu_that_was_killed_has_recorded_is_not_used_but_removed";
    let Some(sites) = Sites::new(test) else {
        return;
    };
    let path = sites.make_qcow2();
    let text = path.to_str().unwrap();
    sites.world.run("near", &["index", "--mark", text]).ok();
    let copy = sites.world.path("copy.qcow2");
    fs::copy(&path, &copy).unwrap();
    sites
        .world
        .run("far", &["index", copy.to_str().unwrap()])
        .ok();
    let mut killed = sites.start_from(&path, "near").await;
    killed.kill();
    let mut here = sites.start_from(&path, "near").await;
    assert_eq!(bitmaps(&mut here).await, 1);
    here.wait_said("beat", 20).await;
    let mut there = sites.wait_for_qcow2("far").await;
    let done = Moving::begin(&sites, "near", "far", &["--keep-source"]).done();
    assert_eq!(done["unread_bytes"], 0, "{done}");
    assert_eq!(bitmaps(&mut here).await, 0);
    goes_on(&here, &mut there).await;
}

/// How many bitmaps its disk has that are kept in the file.
async fn bitmaps(qemu: &mut Qemu) -> usize {
    let machine = qemu.machine().await;
    let disks = machine.disks().await.unwrap();
    let medium = disks.iter().find_map(|disk| disk.medium.as_ref());
    let bitmaps = medium.unwrap().bitmaps.iter();
    bitmaps.filter(|bitmap| bitmap.persistent).count()
}

/// Ends it as a person does.
async fn quit(qemu: &mut Qemu) {
    qemu.machine().await.quit().await.unwrap();
    qemu.ended().await;
}
