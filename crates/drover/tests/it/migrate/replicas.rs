//! `drover replicate` and `drover failover`: the disks of a machine at another site, as of one moment.

use super::*;

/// A replication that goes on.
struct Replicating(Moving);

impl Replicating {
    fn begin(sites: &Sites, options: &[&str]) -> Replicating {
        let hypervisor = sites.hypervisor("near");
        let args = ["replicate", &hypervisor, "far", "--as", "web", "--json"];
        let args = [&args[..], options].concat();
        let mut command = sites.world.drover("near", &args);
        let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = piped.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Replicating(Moving { process, lines })
    }

    /// Waits for the end of a round.
    fn round(&mut self) -> Value {
        self.0.until("event", "round")
    }

    /// Waits for its end; the exit code, and what it says.
    fn ends(mut self) -> (Option<i32>, String) {
        let mut err = String::new();
        let mut says = self.0.process.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut says, &mut err).unwrap();
        (wait(&mut self.0.process), err)
    }
}

impl Drop for Replicating {
    fn drop(&mut self) {
        let _ = self.0.process.kill();
        let _ = self.0.process.wait();
    }
}

fn once(sites: &Sites) -> Value {
    let mut replicating = Replicating::begin(sites, &["--once"]);
    let round = replicating.round();
    let (code, err) = replicating.ends();
    assert_eq!(code, Some(0), "{err}");
    round
}

/// What a site says of the replica.
fn listed(sites: &Sites, home: &str) -> Value {
    let args = ["replicate", "--list", "--json"];
    let listed = sites.world.run(home, &args).ok().json();
    listed.first().cloned().unwrap_or_default()
}

/// The newest record on a disk, of which all before must be there, too.
pub fn newest(disk: &[u8]) -> u64 {
    let word =
        |block: &[u8], n: usize| u64::from_le_bytes(block[n * 8..n * 8 + 8].try_into().unwrap());
    let blocks: Vec<u64> = disk
        .chunks(4096)
        .map(|block| match word(block, 0) {
            0x6472_6f76_6572_3031 => word(block, 1),
            _ => 0,
        })
        .collect();
    let last = *blocks.iter().max().unwrap();
    let count = blocks.len() as u64;
    for n in last.saturating_sub(count - 1).max(1)..=last {
        assert_eq!(blocks[(n % count) as usize], n, "of {last}");
    }
    last
}

/// An export of far, until this is dropped.
struct Export<'a>(&'a World, String);

impl Drop for Export<'_> {
    fn drop(&mut self) {
        self.0.run("far", &["unmount", &self.1]);
    }
}

/// A machine that uses an export of far, which ends with it.
struct Booted<'a> {
    qemu: Qemu,
    _export: Export<'a>,
}

impl Drop for Booted<'_> {
    fn drop(&mut self) {
        self.qemu.kill();
    }
}

/// Boots the machine at far from its disk; the last record that it finds.
async fn boots_at_far<'a>(sites: &'a Sites, image: &str) -> (u64, Booted<'a>) {
    let socket = sites.world.path("far.nbd");
    let at = format!("unix:{}", socket.display());
    let export = ["export", image, "--nbd", &at, "--background"];
    let exported = sites.world.run("far", &export);
    let unmounted = Export(&sites.world, at.clone());
    exported.ok();
    let nbd = format!(
        "-blockdev driver=nbd,node-name=nbd,server.type=unix,server.path={},export={image}",
        socket.display()
    );
    let launch = Launch::new().with(&nbd).node(&raw("nbd"));
    let launch = launch.disk("vd0", "disk").guest(&sites.guest, 10, 4);
    let mut booted = Booted {
        qemu: launch.start(&sites.world.path(""), "web-there"),
        _export: unmounted,
    };
    let found = booted.qemu.wait_said("start", 1).await;
    (found, booted)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_of_one_moment_and_takes_over() {
    let Some(sites) = Sites::new("a_replica_is_of_one_moment_and_takes_over") else {
        return;
    };
    let world = &sites.world;
    let mut here = sites.start("near").await;
    let before = here.wait_said("beat", 50).await;
    let round = once(&sites);
    assert_eq!(
        (round["disks"].as_u64(), round["round"].as_u64()),
        (Some(1), Some(1))
    );
    let after = here.said("beat").unwrap();
    let disk = || newest(&world.delivered("far", "web-0.a.raw"));
    assert!(
        (before..=after + 1).contains(&disk()),
        "{before} {} {after}",
        disk()
    );
    assert_eq!(left_in(&mut here).await, (0, 0));
    let (kept, sent) = (listed(&sites, "far"), listed(&sites, "near"));
    assert_eq!(
        (&kept["state"], &sent["state"]),
        (&"kept".into(), &"sent".into())
    );
    assert_eq!(kept["images"][0], "web-0.a.raw");
    assert!(kept["age_seconds"].as_u64() < Some(120), "{kept}");
    // Nobody writes it, removes it, or sends something in its place.
    let at = format!("unix:{}", world.path("no.nbd").display());
    world
        .run(
            "far",
            &["export", "web-0.a.raw", "--nbd", &at, "--background"],
        )
        .fails(3, &["a disk of the replica web", "drover failover web"]);
    world
        .run("near", &["rm", "far:web-0.a.raw", "--yes"])
        .fails(3, &["replica web"]);
    // Another round, by digests: the state before goes.
    here.wait_said("beat", after + 20).await;
    once(&sites);
    assert!(!world.path("far/images/web-0.a.raw").exists());
    assert!(newest(&world.delivered("far", "web-0.b.raw")) >= after + 20);
    // Its source was heard just now.
    let dry = world
        .run("far", &["failover", "web", "--dry-run", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&dry[0]["under_way"], &dry[0]["event"]),
        (&false.into(), &"would-fail-over".into())
    );
    world.run("far", &["failover", "web"]).fails(2, &["--yes"]);
    let last = here.said("beat").unwrap();
    let done = world.run("far", &["failover", "web", "--yes"]).ok();
    assert!(done.out.contains("web-0.b.raw"), "{}", done.out);
    let (found, mut there) = boots_at_far(&sites, "web-0.b.raw").await;
    assert!((after + 20..=last).contains(&found));
    there.qemu.wait_said("beat", found + 20).await;
    assert!(there.qemu.verify().await >= found + 20);
    // The old source is told, and does not come through.
    let (code, err) = Replicating::begin(&sites, &["--once"]).ends();
    assert_eq!(code, Some(4), "{err}");
    assert!(err.contains("web was failed over at"), "{err}");
    assert_eq!(listed(&sites, "near")["state"], "fenced");
    assert_eq!(listed(&sites, "far")["state"], "failed-over");
    assert_eq!(left_in(&mut here).await, (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_record_before_the_last_point_is_there_after_everything_was_killed() {
    let test = "every_record_before_the_last_point_is_there_after_everything_was_killed";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    // Some of the disk is not written meanwhile.
    let path = sites.world.path("web.raw");
    let mut bytes = vec![0; 32 << 20];
    fastrand::Rng::with_seed(3).fill(&mut bytes[16 << 20..]);
    fs::write(&path, bytes).unwrap();
    let name = "file".into();
    let file = Node::File { name, path };
    let launch = sites.launch(&[file, raw("file")]);
    let mut here = launch.start(&sites.world.path(""), "web-near");
    here.machine().await;
    here.wait_said("beat", 20).await;
    let mut replicating = Replicating::begin(&sites, &["--every", "1s"]);
    let mut known = 0;
    for n in 1..=4 {
        known = here.said("beat").unwrap();
        let round = replicating.round();
        assert_eq!(round["round"], n);
        assert_eq!(round["rpo_seconds"].is_null(), n == 1, "{round}");
        assert_eq!(
            round["unread_bytes"].as_u64() >= Some(8 << 20),
            n > 1,
            "{round}"
        );
    }
    let before = listed(&sites, "far");
    drop(replicating);
    here.kill();
    sites.site("near").signal("KILL");
    let done = ["failover", "web", "--yes", "--json"];
    let done = sites.world.run("far", &done).ok().json();
    assert!(before["rounds"].as_u64() >= Some(4));
    let image = done[0]["images"][0].as_str().unwrap().to_owned();
    // All that was said before the last round that was seen began.
    let (found, mut there) = boots_at_far(&sites, &image).await;
    assert!(found >= known.saturating_sub(120), "{found} {known}");
    there.qemu.wait_said("beat", found + 20).await;
    assert!(there.qemu.verify().await >= found + 20);
}

/// What is on each disk of the replica.
fn of_each(sites: &Sites) -> Vec<u64> {
    let kept = listed(sites, "far");
    let images = kept["images"].as_array().unwrap().iter();
    let delivered = |image: &Value| {
        let image = image.as_str().unwrap();
        newest(&sites.world.delivered("far", image))
    };
    images.map(delivered).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_disks_are_of_one_moment_and_half_a_round_is_none() {
    let Some(sites) = Sites::new("two_disks_are_of_one_moment_and_half_a_round_is_none") else {
        return;
    };
    let mut launch = Launch::new();
    for (n, id) in ["vd0", "vd1"].iter().enumerate() {
        let path = sites.world.path(&format!("disk-{n}.raw"));
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let (file, raw) = (format!("file{n}"), format!("disk{n}"));
        let name = file.clone();
        launch = launch.node(&Node::File { name, path });
        let name = raw.clone();
        launch = launch.node(&Node::Raw { name, file }).disk(id, &raw);
    }
    // As fast as it can.
    let launch = launch.guest(&sites.guest, 0, 0).both();
    let mut here = launch.start(&sites.world.path(""), "web-near");
    here.machine().await;
    here.wait_said("beat", 50).await;
    let mut replicating = Replicating::begin(&sites, &["--every", "1s"]);
    let of_one_moment = |disks: &[u64]| {
        assert_eq!(disks.len(), 2);
        assert!(disks[0] - disks[1] <= 1, "{disks:?}");
    };
    for _ in 0..3 {
        replicating.round();
        // A later round may remove them meanwhile.
        let args = ["replicate", "--list", "--json"];
        sites.world.run("far", &args).ok();
    }
    replicating.0.process.kill().unwrap();
    replicating.0.process.wait().unwrap();
    let before = of_each(&sites);
    of_one_moment(&before);
    // What it has left in QEMU is removed by the next one, of which there is only half.
    let mut half = Replicating::begin(&sites, &["--once", "--limit", "100K"]);
    until("a round is under way", || {
        listed(&sites, "far")["under_way"] == true
    });
    half.0.process.kill().unwrap();
    half.0.process.wait().unwrap();
    assert_eq!(of_each(&sites), before);
    // A migration is not disturbed by it, nor the next round, which also ends a pause in which the process was killed.
    once(&sites);
    let last = here.said("beat").unwrap();
    here.wait_said("beat", last + 20).await;
    assert_eq!(left_in(&mut here).await, (0, 0));
    let after = of_each(&sites);
    of_one_moment(&after);
    assert!(after[0] > before[0]);
    // A late end of a round does not come through after the failover.
    here.wait_said("beat", last + 100).await;
    let late = Replicating::begin(&sites, &["--once", "--limit", "100K"]);
    until("a round is under way", || {
        listed(&sites, "far")["under_way"] == true
    });
    sites.world.run("far", &["failover", "web", "--yes"]).ok();
    let (code, err) = late.ends();
    assert_eq!(code, Some(4), "{err}");
    assert_eq!(of_each(&sites), after);
}

/// Bad input: nobody is harmed by it, and it is said.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_replicated_is_said() {
    let Some(sites) = Sites::new("what_cannot_be_replicated_is_said") else {
        return;
    };
    let world = &sites.world;
    let near = sites.hypervisor("near");
    let replicate = |options: &[&str]| {
        let args = [&["replicate", &near, "far", "--as", "web"], options].concat();
        world.run("near", &args)
    };
    replicate(&["--once"]).fails(1, &["cannot connect to QEMU"]);
    replicate(&[]).code(2);
    replicate(&["--every", "0s"]).fails(2, &["--every"]);
    world
        .run("near", &["replicate", "libvirt:web", "far", "--once"])
        .code(1);
    world
        .run("far", &["failover", "web"])
        .fails(3, &["keeps no replica called web"]);
    world
        .run("far", &["replicate", "--forget", "web"])
        .fails(3, &["no replica is called web"]);
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let can = |rights: &str| {
        let set = ["peers", "set", "near", "--can", rights];
        world.run("far", &set).ok();
    };
    can("read");
    replicate(&["--once"]).fails(3, &["send"]);
    assert_eq!(listed(&sites, "far"), Value::Null);
    // It needs no more than that.
    can("send");
    once(&sites);
    // Another machine of that name, here without the record of this one.
    let sent = world.path("near/replicas-sent");
    fs::rename(&sent, world.path("sent")).unwrap();
    replicate(&["--once"]).fails(3, &["another machine", "--forget web"]);
    fs::remove_dir_all(&sent).unwrap();
    fs::rename(world.path("sent"), &sent).unwrap();
    // A quota that is full: the state before remains, and is usable.
    let before = listed(&sites, "far");
    let set = ["peers", "set", "near", "--quota", "1K"];
    world.run("far", &set).ok();
    replicate(&["--once"]).fails(3, &["your site may take"]);
    let after = listed(&sites, "far");
    assert_eq!(
        (&after["rounds"], &after["moment_ms"], &after["images"]),
        (&before["rounds"], &before["moment_ms"], &before["images"])
    );
    let set = ["peers", "set", "near", "--quota", "none"];
    world.run("far", &set).ok();
    assert_eq!(left_in(&mut here).await, (0, 0));
    // The machine is gone in between.
    let mut replicating = Replicating::begin(&sites, &["--every", "1s"]);
    replicating.round();
    here.kill();
    let (code, err) = replicating.ends();
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("QEMU"), "{err}");
    // A record that is damaged is said, and can be forgotten.
    fs::write(world.path("far/replicas/web"), b"junk").unwrap();
    assert_eq!(listed(&sites, "far")["state"], "damaged");
    // It is in nobody else's way.
    world.image("other.raw", 3, 10);
    world.run("near", &["send", "other.raw", "far"]).ok();
    world
        .run("far", &["failover", "web", "--yes"])
        .fails(1, &["the record of the replica web"]);
    world.run("far", &["replicate", "--forget", "web"]).ok();
}

/// The machine is started by the site, from the script that is printed for migrations.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_started_from_its_replica_and_goes_back() {
    use std::os::unix::fs::PermissionsExt;
    let test = "a_machine_is_started_from_its_replica_and_goes_back";
    let Some(mut sites) = Sites::new(test) else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let near = sites.hypervisor("near");
    let script = ["migrate", &near, "--start-script"];
    let mut script = sites.world.run("near", &script).ok().out.clone();
    for name in ["qmp", "console", "log"] {
        script = script.replace(&format!("web-near.{name}"), &format!("web-far.{name}"));
    }
    let path = sites.world.path("start-web");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    let config = sites.world.path("far").join("config.toml");
    let told = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{told}start = [{path:?}]\n")).unwrap();
    sites.restart("far");
    let known = here.said("beat").unwrap();
    once(&sites);
    here.kill();
    let done = ["failover", "web", "--yes", "--json"];
    let done = sites.world.run("far", &done).ok().json();
    assert_eq!(
        (&done[0]["starts"], &done[0]["not_started"]),
        (&true.into(), &Value::Null)
    );
    let mut there = Qemu::of_another(&sites.world.path(""), "web-far");
    let found = there.wait_said("start", known).await;
    there.wait_said("beat", found + 20).await;
    assert_eq!(sites.state("far"), "here");
    // Again, it is as it was; also after the site was killed.
    let again = ["failover", "web", "--json"];
    assert_eq!(
        sites.world.run("far", &again).ok().json()[0]["starts"],
        true
    );
    sites.restart("far");
    let last = there.said("beat").unwrap();
    there.wait_said("beat", last + 20).await;
    // It goes back as any machine does.
    let mut back = sites.wait_for_it("near").await;
    Moving::begin(&sites, "far", "near", &[]).done();
    goes_on(&there, &mut back).await;
    // It is not started here once more, however often the failover is repeated.
    for (options, code) in [(&[][..], 1), (&["--dry-run"], 0)] {
        let again = sites
            .world
            .run("far", &[&["failover", "web"], options].concat());
        let again = again.code(code);
        assert!(again.err.contains("has moved to near"), "{again:?}");
    }
    assert_eq!(sites.state("near"), "here");
    assert_ne!(sites.state("far"), "here");
}
