//! `drover snapshot` of a running machine.

use super::replicas::newest;
use super::*;
use crate::world::signal;

const DISK: u64 = 32 << 20;

/// One site, with the vault `store`.
fn site(test: &str) -> Option<Sites> {
    let sites = Sites::among(test, World::new(), &[("near", own_address(), &[])])?;
    sites.world.run("near", &["vault", "init", "store"]).ok();
    Some(sites)
}

/// A disk of which the second half is not written; its content.
fn half_written(sites: &Sites, name: &str) -> Vec<u8> {
    let path = sites.world.path(name);
    let mut bytes = vec![0; DISK as usize];
    fastrand::Rng::with_seed(6).fill(&mut bytes[DISK as usize / 2..]);
    fs::write(path, &bytes).unwrap();
    bytes
}

fn snapshot(sites: &Sites, options: &[&str]) -> Vec<Value> {
    let hypervisor = sites.hypervisor("near");
    let args = ["snapshot", &hypervisor, "--as", "web", "--json"];
    let made = sites.world.run("near", &[&args[..], options].concat());
    let events = made.ok().json();
    let made = events
        .into_iter()
        .filter(|event| event["event"] == "snapshot");
    made.collect()
}

fn restored(sites: &Sites, snapshot: &str) -> Vec<u8> {
    let out = sites.world.path("restored.raw");
    let restore = ["restore", snapshot, "restored.raw"];
    sites.world.run("near", &restore).ok();
    let bytes = fs::read(&out).unwrap();
    fs::remove_file(out).unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_snapshot_of_a_machine_reads_what_was_written() {
    let test = "a_second_snapshot_of_a_machine_reads_what_was_written";
    let Some(sites) = site(test) else {
        return;
    };
    let world = &sites.world;
    let tail = half_written(&sites, "web.raw").split_off(DISK as usize / 2);
    let file = Node::File {
        name: "file".into(),
        path: world.path("web.raw"),
    };
    let launch = sites.launch(&[file, raw("file")]);
    let mut here = launch.start(&world.path(""), "web-near");
    here.machine().await;
    let hypervisor = sites.hypervisor("near");
    world
        .run("near", &["snapshot", &hypervisor, "--freeze", "always"])
        .fails(1, &["cannot be frozen", "no port of a guest agent"]);
    let before = here.wait_said("beat", 20).await;
    let first = snapshot(&sites, &[]);
    assert_eq!(first.len(), 1);
    assert_eq!(first[0]["read_bytes"].as_u64(), Some(DISK));
    assert_eq!(
        (&first[0]["name"], &first[0]["frozen"]),
        (&"web".into(), &false.into())
    );
    let after = here.said("beat").unwrap();
    let disk = restored(&sites, "web@latest");
    assert!((before..=after + 1).contains(&newest(&disk)));
    assert!(disk[DISK as usize / 2..] == tail);
    // What records, and what it begins from; nothing is held.
    assert_eq!(left_in(&mut here).await, (2, 0));

    for _ in 0..2 {
        let before = here.said("beat").unwrap();
        let before = here.wait_said("beat", before + 20).await;
        let next = snapshot(&sites, &[]);
        let read = next[0]["read_bytes"].as_u64().unwrap();
        assert!((1..=DISK / 4).contains(&read), "{read}");
        let disk = restored(&sites, "web@latest");
        assert!(newest(&disk) >= before);
        assert!(disk[DISK as usize / 2..] == tail);
        assert_eq!(left_in(&mut here).await, (2, 0));
    }

    // One that is stopped, or killed, while the disks are held: the machine goes on, and so does what was recorded.
    let held = world.path("held");
    let resume = format!("touch {}; exec sleep 3", held.display());
    for how in ["INT", "KILL"] {
        let args = ["snapshot", &hypervisor, "--as", "web", "--resume", &resume];
        let mut stopped = world.drover("near", &args).spawn().unwrap();
        until("the disks are held", || held.exists());
        fs::remove_file(&held).unwrap();
        signal(stopped.id(), how);
        assert!(!stopped.wait().unwrap().success());
        let is_held = left_in(&mut here).await.1 > 0;
        assert_eq!(is_held, how == "KILL");
        let last = here.said("beat").unwrap();
        let last = here.wait_said("beat", last + 20).await;
        let next = snapshot(&sites, &[]);
        let read = next[0]["read_bytes"].as_u64().unwrap();
        assert!((1..=DISK / 4).contains(&read), "{how}: {read}");
        let disk = restored(&sites, "web@latest");
        assert!(newest(&disk) >= last);
        assert!(disk[DISK as usize / 2..] == tail);
        assert_eq!(left_in(&mut here).await, (2, 0));
    }

    // All is read when that is asked for, and when the parent has gone.
    let other = snapshot(&sites, &["--read-all"]);
    assert_eq!(other[0]["read_bytes"].as_u64(), Some(DISK));
    world.run("near", &["vault", "forget", "web", "--yes"]).ok();
    world
        .run("near", &["vault", "compact", "--grace", "0s"])
        .ok();
    let anew = snapshot(&sites, &["--once"]);
    assert_eq!(anew[0]["read_bytes"].as_u64(), Some(DISK));
    assert_eq!(left_in(&mut here).await, (0, 0));
    let disk = restored(&sites, "web@latest");
    assert!(disk[DISK as usize / 2..] == tail);
    world.run("near", &["vault", "check", "--full"]).ok();
    assert!(here.verify().await > before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disks_of_a_machine_are_of_one_moment() {
    let Some(sites) = site("the_disks_of_a_machine_are_of_one_moment") else {
        return;
    };
    let directory = sites.world.path("");
    let file = |n: usize| {
        let path = sites.world.path(&format!("web-{n}.raw"));
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let name = format!("file{n}");
        Node::File { name, path }
    };
    // Each record is on the first disk before it is on the second.
    let launch = several_disks::launch(&sites, [file(0), file(1)], ["vd0", "vd1"]).both();
    let mut here = launch.start(&directory, "web-near");
    here.machine().await;
    let mut before = 0;
    for _ in 0..3 {
        before = here.wait_said("beat", before + 20).await;
        let made = snapshot(&sites, &[]);
        let names: Vec<_> = made
            .iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["web.vd0", "web.vd1"]);
        assert_eq!(made[0]["time_unix"], made[1]["time_unix"]);
        let of = |n: usize| restored(&sites, made[n]["snapshot"].as_str().unwrap());
        let (one, two) = (newest(&of(0)), newest(&of(1)));
        assert!(
            two >= before && (two == one || two + 1 == one),
            "{one}, {two}"
        );
    }
    // The machine's name means its disks, where that is said.
    let forget = |more: &[&str]| {
        let args = ["vault", "forget", "web", "--keep-last", "1", "--dry-run"];
        sites.world.run("near", &[&args, more].concat())
    };
    forget(&[]).fails(3, &["no snapshot of web"]);
    let due = forget(&["--disks"]).ok().out;
    assert!(
        due.contains("web.vd0@") && due.contains("web.vd1@"),
        "{due}"
    );
}
