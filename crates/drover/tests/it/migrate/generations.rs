//! A machine that comes back: what did not change is not read, but taken from the copy that it left.

use std::os::unix::fs::FileExt;

use super::*;

/// Eight batches of a walk.
const DISK: u64 = 64 << 20;

/// More than is kept back until the disks are compared.
const MEMORY: &str = "-m 524296k";

impl Sites {
    /// The machine with a larger disk: what the guest writes, then what it never does.
    async fn start_large(&self, memory: &str) -> Qemu {
        let path = self.world.path("web.raw");
        let disk = fs::File::create(&path).unwrap();
        disk.set_len(DISK).unwrap();
        disk.write_all_at(&rest(), SIZE).unwrap();
        let file = Node::File {
            name: "file".into(),
            path,
        };
        let launch = self.launch(&[file, raw("file")]).with(memory);
        let mut machine = launch.start(&self.world.path(""), "web-near");
        machine.machine().await;
        machine
    }

    async fn wait_for_large(&self, home: &str, memory: &str) -> Qemu {
        let name = "stub".into();
        let stub = Node::Null { name, size: DISK };
        let launch = self.launch(&[stub, raw("stub")]).with(memory).incoming();
        let mut machine = launch.start(&self.world.path(""), &format!("web-{home}"));
        machine.machine().await;
        machine
    }
}

/// The part of a disk that the guest does not write.
fn rest() -> Vec<u8> {
    let mut rest = vec![0; (DISK - SIZE) as usize];
    fastrand::Rng::with_seed(14).fill(&mut rest);
    rest
}

/// What a site has of that part in its image.
fn rest_at(sites: &Sites, home: &str) -> Vec<u8> {
    let path = sites.world.path(home).join("images/web-0.raw");
    fs::read(path).unwrap().split_off(SIZE as usize)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_did_not_change_is_not_read_on_the_way_back() {
    let Some(sites) = Sites::new("what_did_not_change_is_not_read_on_the_way_back") else {
        return;
    };
    let mut here = sites.start_large(MEMORY).await;
    here.wait_said("beat", 50).await;
    let hops = [("near", "far"), ("far", "near"), ("near", "far")];
    for (hop, (from, to)) in hops.into_iter().enumerate() {
        let mut there = sites.wait_for_large(to, MEMORY).await;
        let done = Moving::begin(&sites, from, to, &[]).done();
        here.ended().await;
        goes_on(&here, &mut there).await;
        let unread = done["unread_bytes"].as_u64().unwrap();
        match hop {
            0 => assert_eq!(unread, 0, "{done}"),
            // All batches but that which the guest writes.
            _ => assert!(unread >= 48 << 20, "{done}"),
        }
        assert!(rest_at(&sites, to) == rest());
        // What the machine wrote there is part of its image.
        until("the changes are merged", || {
            let changes = sites.world.run(from, &["changes", "--json"]).ok().json();
            changes.is_empty()
        });
        here = there;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_copy_that_was_changed_is_compared_by_digests() {
    let Some(sites) = Sites::new("an_old_copy_that_was_changed_is_compared_by_digests") else {
        return;
    };
    let mut here = sites.start_large("").await;
    here.wait_said("beat", 20).await;
    let mut there = sites.wait_for_large("far", "").await;
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
    // As no program but one that hides it would.
    let path = sites.world.path("web.raw");
    let old = fs::OpenOptions::new().write(true).open(path).unwrap();
    let modified = old.metadata().unwrap().modified().unwrap();
    old.write_all_at(b"changed", 32 << 20).unwrap();
    old.set_modified(modified).unwrap();
    let mut back = sites.wait_for_large("near", "").await;
    let mut moving = Moving::begin(&sites, "far", "near", &["--give-up-after", "1s"]);
    let again = moving.until("event", "reconnecting");
    let why = again["message"].as_str().unwrap();
    assert!(why.contains("old copy of web-0.raw"), "{why}");
    // As one that has read memory ends.
    back.kill();
    let why = moving.fails();
    assert!(why.contains("near has an old copy of web-0.raw"), "{why}");
    assert!(why.contains("run again"), "{why}");
    // The next command knows of it.
    let mut back = sites.wait_for_large("near", "").await;
    let mut moving = Moving::begin(&sites, "far", "near", &[]);
    let mut events = moving.lines.by_ref().map(|line| line.unwrap());
    assert!(events.all(|event| !event.contains("old copy of")));
    assert_eq!(wait(&mut moving.process), Some(0));
    let forgotten = sites.world.path("far/machines/.web.compare");
    assert!(!forgotten.exists(), "it has moved");
    there.ended().await;
    goes_on(&there, &mut back).await;
    assert!(rest_at(&sites, "near") == rest());
}
