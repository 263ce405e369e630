//! `drover replicate` of a disk that a program uses.

use super::*;

fn begin(sites: &Sites, options: &[&str]) -> Moving {
    let args = ["replicate", "web.raw", "far", "--as", "web", "--json"];
    let args = [&args[..], options].concat();
    let mut command = sites.world.drover("near", &args);
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = piped.spawn().unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    Moving { process, lines }
}

fn round(replicating: &mut Moving) -> Value {
    let line = replicating.lines.next().expect("another round").unwrap();
    let round: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(round["event"], "round", "{round}");
    round
}

/// The newest record on a disk, of which all before must be there, too.
pub fn newest(disk: &[u8]) -> u64 {
    let record = |slot: u64| {
        let at = (slot * SLOT) as usize;
        u64::from_le_bytes(disk[at..at + 8].try_into().unwrap())
    };
    let last = (0..SLOTS).map(record).max().unwrap();
    for n in last.saturating_sub(SLOTS - 1)..=last {
        assert_eq!(record(n % SLOTS), n, "of {last}");
    }
    last
}

#[test]
fn a_disk_of_a_program_is_replicated_and_taken_over() {
    let sites = Sites::new();
    let world = &sites.world;
    let once = ["replicate", "web.raw", "far", "--as", "web", "--once"];
    world.run("near", &once).fails(3, &["not in use here"]);
    sites.record_boot("near");
    let program = sites.program("near", 1);
    // Before, holes make one batch of all that there is.
    until("there is data everywhere", || program.last() > SLOTS + 20);
    let hook = |name: &str| format!("touch {}", world.path(name).display());
    let options = [
        "--every",
        "1s",
        "--pause",
        &hook("paused"),
        "--resume",
        &hook("resumed"),
    ];
    let mut replicating = begin(&sites, &options);
    let mut before = 0;
    for n in 1..=4 {
        before = program.last();
        let done = round(&mut replicating);
        assert_eq!(done["round"], n);
        // The end of the disk is not written.
        let unread = done["unread_bytes"].as_u64();
        assert_eq!(unread, Some(if n > 1 { 1 << 20 } else { 0 }), "{done}");
    }
    assert!(world.path("paused").exists() && world.path("resumed").exists());
    world.run("near", &once).fails(3, &["by another process"]);
    replicating.process.kill().unwrap();
    replicating.process.wait().unwrap();
    signal(sites.daemon("near"), "KILL");
    let last = program.ended();
    let done = world
        .run("far", &["failover", "web", "--yes", "--json"])
        .ok()
        .json();
    let image = done[0]["images"][0].as_str().unwrap();
    let found = newest(&world.delivered("far", image));
    assert!(
        (before.min(last)..=last + 1).contains(&found),
        "{before} {found} {last}"
    );
    assert_eq!(sites.boots("far", image), 1);
    // It is an image like any other now, which a program goes on with.
    let socket = world.path("over.nbd");
    let listen = format!("unix:{}", socket.display());
    let export = ["export", image, "--nbd", &listen, "--background"];
    world.run("far", &export).ok();
    let address = NbdAddress {
        socket: NbdSocket::Unix(socket),
        export: image.into(),
    };
    let device = NbdDevice::connect(&address, &NbdOptions::default()).unwrap();
    device
        .write(found % SLOTS * SLOT, &found.to_le_bytes())
        .unwrap();
    device.flush().unwrap();
    drop(device);
    world.run("far", &["unmount", &listen]).ok();
    // The old source is not.
    sites.try_export("near").ok();
    world.run("near", &once).fails(4, &["web was failed over"]);
    let listed = world.run("near", &["replicate", "--list", "--json"]).ok();
    assert_eq!(listed.json()[0]["state"], "fenced");
    // It may begin anew when that is forgotten, and what was failed over is not in its way.
    world.run("far", &["replicate", "--forget", "web"]).ok();
    world
        .run(
            "near",
            &["replicate", "web.raw", "far", "--as", "web-2", "--once"],
        )
        .ok();
    let listed = world.run("far", &["replicate", "--list", "--json"]).ok();
    assert_eq!(listed.json()[0]["name"], "web-2");
}

#[test]
fn a_disk_is_not_moved_and_replicated_at_once() {
    let sites = Sites::new();
    let world = &sites.world;
    let program = sites.program("near", 0);
    program.goes_on();
    let (paused, go) = (world.path("paused"), world.path("go"));
    let pause = format!(
        "touch {}; until [ -e {} ]; do sleep 0.05; done",
        paused.display(),
        go.display()
    );
    let mut replicating = begin(&sites, &["--once", "--pause", &pause]);
    until("a round is under way", || paused.exists());
    world
        .run("near", &["move", "web.raw", "far"])
        .fails(3, &["web.raw is being replicated"]);
    fs::write(&go, "").unwrap();
    round(&mut replicating);
    assert_eq!(wait(&mut replicating.process), Some(0));
    let mut moving = sites.begin("near", "far", &["--limit", "300K"]);
    moving.until("step", "image");
    world
        .run(
            "near",
            &["replicate", "web.raw", "far", "--as", "web", "--once"],
        )
        .fails(3, &["web.raw is being moved"]);
    world.run("near", &["move", "--abort", "web.raw"]).ok();
    moving.fails();
    // Neither is in the way of the other afterwards.
    let mut replicating = begin(&sites, &["--once"]);
    round(&mut replicating);
    assert_eq!(wait(&mut replicating.process), Some(0));
    sites.begin("near", "far", &[]).done();
    sites.is_at("far", "near", program.ended());
}

/// Also if the site that has it is killed at the worst moment.
#[test]
fn a_source_cannot_remove_what_took_over() {
    let mut sites = Sites::new();
    // The worst that it can be allowed.
    let set = ["peers", "set", "near", "--can", "send,host,admin"];
    sites.world.run("far", &set).ok();
    let program = sites.program("near", 0);
    program.goes_on();
    // A round is complete, and its source does not hear of it before the failover.
    sites.restart("far", &[("DROVER_TEST_CRASH", "replica-completed")]);
    let replicating = begin(&sites, &["--once"]);
    sites.running[1].0.wait();
    let its = sites.running[1].1;
    sites.running[1].1 = own_address();
    sites.serve_again("far", &[("DROVER_TEST_CRASH", "replica-failed-over")]);
    let world = &sites.world;
    let failover = ["failover", "web", "--yes", "--json"];
    assert_ne!(world.run("far", &failover).code, Some(0));
    sites.running[1].0.wait();
    // It has happened.
    sites.running[1].1 = its;
    sites.serve_again("far", &[]);
    assert!(replicating.fails().contains("web was failed over"));
    let world = &sites.world;
    let image = "web-0.a.raw";
    let done = world.run("far", &failover).ok().json();
    assert_eq!(done[0]["images"][0], image);
    newest(&world.delivered("far", image));
    // It is not its source's any more.
    let set = ["peers", "set", "near", "--can", "send,host"];
    world.run("far", &set).ok();
    let remove = ["rm", &format!("far:{image}"), "--yes"];
    world.run("near", &remove).fails(3, &[image]);
    newest(&world.delivered("far", image));
    program.stop();
    sites.unmount("near");
}

#[test]
fn what_a_later_command_says_holds_for_a_disk() {
    let sites = Sites::new();
    let world = &sites.world;
    let program = sites.program("near", 0);
    until("there is data everywhere", || program.last() > SLOTS);
    let wire_bytes = |options: &[&str]| {
        let mut replicating = begin(&sites, &[&["--once"], options].concat());
        let done = round(&mut replicating);
        assert_eq!(wait(&mut replicating.process), Some(0));
        done["wire_bytes"].as_u64().unwrap()
    };
    // Its records are nothing but zeros and a number.
    let packed = wire_bytes(&["--compress", "15"]);
    assert!(packed < SLOTS * SLOT / 4, "{packed}");
    let scratch = world.path("scratch");
    wire_bytes(&["--scratch", scratch.to_str().unwrap()]);
    assert!(scratch.exists());
    program.stop();
    sites.unmount("near");
}
