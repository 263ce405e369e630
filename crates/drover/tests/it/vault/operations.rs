//! Timers, and drills with a real QEMU.

use std::process::Command;

use super::*;

/// The first sector of a disk that starts: it writes a text to the serial console.
fn boot_sector(text: &str) -> Vec<u8> {
    let mut sector = vec![
        0x31, 0xc0, 0x8e, 0xd8, // ax and ds are 0
        0xbe, 0x21, 0x7c, // si is the text
        0xac, 0x84, 0xc0, 0x74, 0x12, // the next character, else the end
        0x88, 0xc4, 0xba, 0xfd, 0x03, // wait until the port is empty
        0xec, 0xa8, 0x20, 0x74, 0xfb, //
        0xba, 0xf8, 0x03, 0x88, 0xe0, 0xee, // write it
        0xeb, 0xe9, // again
        0xf4, 0xeb, 0xfd, // halt
    ];
    sector.extend_from_slice(text.as_bytes());
    sector.resize(510, 0);
    sector.extend_from_slice(&[0x55, 0xaa]);
    sector
}

#[test]
fn a_drill_restores_what_is_newest_and_starts_it() {
    let world = World::new();
    let run = |args: &[&str]| world.run("h", args);
    assert!(
        run(&["vault", "drill", "--help"])
            .ok()
            .out
            .contains("Examples:")
    );
    run(&["vault", "init", "store"]).ok();
    run(&["vault", "drill"]).fails(3, &["no snapshots"]);
    for (seed, name) in [(3, "web"), (4, "db")] {
        world.image(&format!("{name}.img"), seed, 700);
        run(&["snapshot", &format!("{name}.img")]).ok();
    }
    let image = world.path("web.img");
    let mut bytes = fs::read(&image).unwrap();
    bytes[..512].copy_from_slice(&boot_sector("hello\r\nweb login: "));
    fs::write(&image, bytes).unwrap();
    run(&["snapshot", "web.img"]).ok();
    fs::create_dir(world.path("scratch")).unwrap();
    let drill =
        |more: &[&str]| run(&[&["vault", "drill", "--dir", "scratch", "--json"], more].concat());
    let done = drill(&[]).ok().json();
    let done: Vec<_> = done
        .iter()
        .filter(|event| event["event"] == "drill")
        .collect();
    assert_eq!(done.len(), 2);
    assert!(done.iter().all(|event| event["ok"] == true), "{done:?}");
    drill(&["--sample", "1"]).ok();
    drill(&["none"]).fails(3, &["no snapshot of none"]);

    let has_qemu = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .is_ok();
    if has_qemu {
        let booted = drill(&["web", "--boot", "--memory", "128M"]).ok().json();
        assert!(booted.last().unwrap()["boot_seconds"].as_f64().unwrap() > 0.0);
        let other = [
            "web", "--boot", "--memory", "128M", "--expect", "lilo", "--wait", "3s",
        ];
        let silent = drill(&other).code(1);
        assert!(
            silent.out.contains("no \\\"lilo\\\" on the serial console"),
            "{}",
            silent.out
        );
    } else {
        println!("SKIP drills that start machines: no qemu-system-x86_64 here");
    }
    drill(&["web", "--boot", "--qemu", "/nonexistent/qemu"]).code(1);

    // One that is damaged fails, and the other is tried all the same.
    let mut containers = Vec::new();
    files(&world.path("store/containers/db"), &mut containers);
    fs::remove_file(&containers[0]).unwrap();
    let report = drill(&[]).code(1);
    let report = report.json();
    let ok = |name: &str| {
        let event = report
            .iter()
            .find(|e| e["event"] == "drill" && e["snapshot"].as_str().unwrap().starts_with(name));
        event.unwrap()["ok"].as_bool().unwrap()
    };
    assert!(!ok("db") && ok("web"));
    assert_eq!(fs::read_dir(world.path("scratch")).unwrap().count(), 0);
}

#[test]
fn timers_are_written_shown_and_removed() {
    let world = World::new();
    let run = |args: &[&str]| world.run("h", args);
    world.image("web 100%.img", 1, 100);
    world.image("db.img", 2, 100);
    run(&["vault", "schedule", "db.img"]).fails(1, &["does not exist"]);
    run(&["vault", "init", "store"]).ok();
    let schedule = [
        "vault",
        "schedule",
        "web 100%.img",
        "db.img",
        "--unit-dir",
        "units",
    ];
    let with = |more: &[&str]| run(&[&schedule[..], more].concat());
    let shown = with(&["--io-limit", "50M", "--keep-last", "7", "--dry-run"])
        .ok()
        .out;
    assert!(
        shown.contains("IOReadBandwidthMax=") && shown.contains("OnCalendar=daily"),
        "{shown}"
    );
    assert!(
        shown.contains("\"--keep-last\" \"7\"") && shown.contains("100%%"),
        "{shown}"
    );
    assert!(!world.path("units").exists());
    with(&["--remove", "--yes"]).fails(3, &["no such schedule"]);
    let written = with(&["--io-limit", "50M", "--keep-last", "7", "--at", "Mon 03:00"]).ok();
    assert!(written.err.contains("enable --now"), "{}", written.err);
    let mut units = Vec::new();
    files(&world.path("units"), &mut units);
    assert_eq!(units.len(), 4);
    let verify = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .args(&units)
        .output();
    match verify {
        Ok(verified) => {
            let said = String::from_utf8_lossy(&verified.stderr).into_owned();
            let ours: Vec<_> = said
                .lines()
                .filter(|line| line.contains("drover-snapshot"))
                .collect();
            assert!(ours.is_empty(), "{ours:?}");
        }
        Err(_) => println!("SKIP that systemd reads the units: no systemd-analyze here"),
    }
    // What a unit runs works, as a shell splits it; systemd's own words for % and $ apart.
    let service = fs::read_to_string(world.path("units/drover-snapshot-db.service")).unwrap();
    for line in service
        .lines()
        .filter_map(|line| line.strip_prefix("ExecStart="))
    {
        let ran = Command::new("sh")
            .args(["-c", line])
            .env("DROVER_HOME", world.path("h"))
            .output()
            .unwrap();
        assert!(
            ran.status.success(),
            "{line}: {}",
            String::from_utf8_lossy(&ran.stderr)
        );
    }
    let listed = run(&["snapshots", "db", "--json"]).ok().json();
    assert_eq!(listed.len(), 1);

    // Machines and mounted images as `drover snapshot` takes them; what reads them is no process of the unit.
    let shown = |what: &str, more: &[&str]| {
        run(&[&["vault", "schedule", what, "--dry-run"], more].concat())
    };
    let machine = shown("qmp:vm.qmp", &["--keep-last", "2"]).ok().out;
    let socket = format!("\"qmp:{}\"", world.path("vm.qmp").display());
    assert!(
        machine.contains(&socket) && machine.contains("\"--disks\"") && machine.contains("--as=vm"),
        "{machine}"
    );
    shown("qmp:vm.qmp", &["--io-limit", "50M"]).fails(2, &["--io-limit"]);
    shown("disk.raw", &[]).fails(3, &["there is no"]);
    fs::create_dir(world.path("indexed")).unwrap();
    world.image("indexed/disk.raw", 5, 100);
    run(&["index", "indexed/disk.raw"]).ok();
    let image = shown("disk.raw", &["--keep-last", "2"]).ok().out;
    assert!(
        image.contains("\"disk.raw\"") && !image.contains("--disks"),
        "{image}"
    );
    shown("disk.raw", &["--io-limit", "50M"]).fails(2, &["another process"]);

    // A unit of somebody else is left.
    let own = world.path("units/drover-snapshot-db.timer");
    fs::write(&own, "[Timer]\nOnCalendar=weekly\n").unwrap();
    with(&[]).fails(1, &["was not written by drover"]);
    with(&["--remove", "--yes"]).fails(1, &["was not written by drover"]);
    fs::remove_file(&own).unwrap();
    with(&["--remove", "--dry-run"]).ok();
    with(&["--remove"]).fails(2, &["--yes"]);
    with(&["--remove", "--yes"]).ok();
    assert_eq!(count(&world.path("units")), 0);
}
