//! QEMUs that are built: what is kept of them, and of what they say.

use drover_store::machine::{Generation, Other};

use super::*;
use crate::text::clean;

fn config(more: &str) -> BuildConfig {
    let table = format!("memory = \"64M\"\ncpus = 1\n{more}");
    toml::from_str(&table).unwrap()
}

#[test]
fn no_qemu_of_a_peer_runs_as_root() {
    let name = ImageName::new("web").unwrap();
    let refused = |more: &str| user(&name, &config(more)).unwrap_err().to_string();
    assert!(refused("user = \"no-such-user\"").contains("there is no user"));
    assert!(refused("user = \"root\"").contains("does not run as root"));
    assert!(refused("user = \"nobody\"\ngroup = \"root\"").contains("does not run as root"));
    if rustix::process::geteuid().is_root() {
        assert!(refused("").contains("name another user"));
        let (user, group) = user(&name, &config("user = \"nobody\"")).unwrap().unwrap();
        assert!(user > 0 && group > 0);
    } else {
        assert_eq!(user(&name, &config("")).unwrap(), None);
        assert!(refused("user = \"nobody\"").contains("only root can start"));
    }
}

/// A machine of one device, by a move.
fn described(token: u8, seed: u8) -> Described {
    let spec = serde_json::json!({
        "machine": "pc-q35-7.2", "settings": [], "accelerator": "Tcg", "cpu": "qemu64", "features": [],
        "processors": {"present": 1, "max": 1, "sockets": 1, "dies": 1, "cores": 1, "threads": 1},
        "memory": {"name": "pc.ram", "bytes": 1 << 20, "max_bytes": 1 << 20, "slots": 0},
        "uuid": null, "boot_order": "", "kernel": false, "disks": [], "devices": []
    });
    Described {
        token: Token([token; 16]),
        from: [7; 32],
        seed: Seed([seed; 16]),
        spec: serde_json::from_value(spec).unwrap(),
    }
}

#[test]
fn what_was_said_of_a_machine_is_of_its_move() {
    let site = tempfile::tempdir().unwrap();
    let name = ImageName::new("web").unwrap();
    let from = |key: u8| Other {
        key: [key; 32],
        name: "far".into(),
    };
    let known = || load(site.path(), &name).unwrap().map(|known| known.token);
    let coming = |token: u8, key: u8| {
        let mut record = MachineRecord::foreign(Seed([1; 16]), Generation(1), from(key));
        record.under_way = Some(Move::Coming(Token([token; 16]), from(key), Generation(1)));
        record
    };
    let record = coming(1, 7);
    assert!(described(1, 1).is_coming(&record));
    assert!(!described(2, 1).is_coming(&record));
    assert!(!described(1, 2).is_coming(&record));
    assert!(!described(1, 1).is_coming(&coming(1, 8)));
    assert!(!described(1, 1).has_come(&record));

    // One that does not come leaves nothing.
    store(site.path(), &name, &described(1, 1), &record).unwrap();
    forget(site.path(), &name, &record).unwrap();
    assert_eq!(known(), None);
    forget(site.path(), &name, &record).unwrap();

    // One that came is what it was after one that did not.
    store(site.path(), &name, &described(1, 1), &record).unwrap();
    let mut here = record.take(Token([1; 16])).unwrap();
    assert!(described(1, 1).has_come(&here) && !described(1, 2).has_come(&here));
    forget(site.path(), &name, &here).unwrap();
    assert_eq!(known(), Some(Token([1; 16])));
    here.under_way = Some(Move::Coming(Token([2; 16]), from(7), Generation(3)));
    for _ in 0..2 {
        store(site.path(), &name, &described(2, 1), &here).unwrap();
        assert_eq!(known(), Some(Token([2; 16])));
    }
    forget(site.path(), &name, &here).unwrap();
    assert_eq!(known(), Some(Token([1; 16])));
}

/// A site that builds the machine `web`, with a record of it.
fn site(directory: &Path, record: &MachineRecord) -> Home {
    let home = directory.join("site");
    make_private_dir(&home).unwrap();
    let user = match rustix::process::geteuid().is_root() {
        true => "user = \"nobody\"\n",
        false => "",
    };
    let table =
        format!("[machines.web.build]\nmemory = \"64M\"\ncpus = 1\naccelerator = \"tcg\"\n{user}");
    fs::write(home.join("config.toml"), table).unwrap();
    let home = Home::create(home).unwrap();
    let name = ImageName::new("web").unwrap();
    home.machines().store(&name, record).unwrap();
    home
}

#[test]
fn a_qemu_is_started_for_the_move_under_way_or_for_what_has_come() {
    let directory = tempfile::tempdir().unwrap();
    let name = ImageName::new("web").unwrap();
    let from = Other {
        key: [7; 32],
        name: "far".into(),
    };
    let token = Token([1; 16]);
    let mut record = MachineRecord::foreign(Seed([1; 16]), Generation(1), from.clone());
    record.under_way = Some(Move::Coming(token, from.clone(), Generation(1)));
    let home = site(directory.path(), &record);
    let refused = || planned(&home, &name).unwrap_err().to_string();
    let waits = || {
        let options = planned(&home, &name).unwrap().line.options;
        options.iter().any(|(option, _)| option == "-incoming")
    };
    assert!(refused().contains("nothing is known of web"));

    // Of an earlier move, whosever, or of another site.
    let of_another = Described {
        from: [8; 32],
        ..described(1, 1)
    };
    for other in [described(2, 1), described(1, 2), of_another] {
        store(home.dir(), &name, &other, &record).unwrap();
        assert!(refused().contains("was said for another move"));
    }
    store(home.dir(), &name, &described(1, 1), &record).unwrap();
    assert!(waits());

    // It has come, and is booted if it is started again.
    let mut here = record.take(token).unwrap();
    here = here.started(token).unwrap();
    home.machines().store(&name, &here).unwrap();
    assert!(!waits());

    // What `--dry-run` asks says what the start would.
    let mut wrong = home.clone();
    let web = wrong.config.machines.get_mut("web").unwrap();
    web.build.as_mut().unwrap().user = Some("no-such-user".into());
    let why = planned(&wrong, &name).unwrap_err().to_string();
    assert!(why.contains("there is no user"), "{why}");
    let leaving = here.leave(Token([3; 16]), from).unwrap();
    let committed = leaving.commit(Token([3; 16])).unwrap();
    home.machines().store(&name, &committed).unwrap();
    assert!(refused().contains("is at another site"));
    let gone = committed.gone(Token([3; 16])).unwrap();
    home.machines().store(&name, &gone).unwrap();
    assert!(refused().contains("is at another site"));
}

#[test]
fn a_replica_boots_only_in_hardware_of_its_own_machine() {
    let of = |seed: u8, key: u8| Replica {
        seed: Seed([seed; 16]),
        from: Other {
            key: [key; 32],
            name: "far".into(),
        },
        is_machine: true,
        every_seconds: None,
        point: None,
        under_way: None,
        left: Vec::new(),
        heard_ms: 0,
        rounds: 0,
        failed_over_ms: None,
        booted: false,
    };
    assert!(described(1, 1).is_of(&of(1, 7)));
    // It was at another site meanwhile; or is another one now, of the same site.
    assert!(described(1, 1).is_of(&of(1, 8)));
    assert!(described(1, 1).is_of(&of(2, 7)));
    // Another site has brought a machine of that name, and fetched it.
    assert!(!described(1, 1).is_of(&of(2, 8)));
}

#[test]
fn only_the_qemu_that_was_started_is_killed() {
    let site = tempfile::tempdir().unwrap();
    let name = ImageName::new("web").unwrap();
    let files = Files::of(site.path(), "web");
    make_private_dir(files.directory()).unwrap();
    assert!(!kill(site.path(), &name));
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let began = beginning(child.id()).unwrap();
    // Another process that has got its number.
    let note = |began: &str| fs::write(files.pid(), format!("{} {began}\n", child.id()));
    note(&format!("{began}0")).unwrap();
    assert!(!kill(site.path(), &name));
    note(&began).unwrap();
    assert!(child.try_wait().unwrap().is_none());
    assert!(process(site.path(), &name).is_some());
    assert!(kill(site.path(), &name));
    assert!(!child.wait().unwrap().success());
    assert!(!kill(site.path(), &name));
}

#[test]
fn what_a_qemu_says_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::of(directory.path(), "web");
    make_private_dir(files.directory()).unwrap();
    let mut log = Log::open(files.log()).unwrap();
    log.write(b"drover: qemu-kvm -S\n");
    for n in 0..20_000 {
        log.write(format!("a line of a QEMU that says much, {n}\n").as_bytes());
    }
    let bytes = |path: PathBuf| fs::metadata(path).unwrap().len();
    assert!(bytes(files.log()) <= MAX_LOG);
    assert!(bytes(files.file("log.old")) <= MAX_LOG);
    assert!(files.last_said().ends_with("19999"));
    // Whatever it says, it has not ended.
    log.write(b"drover: ended: it was killed\n");
    assert_eq!(files.end(), None);
    fs::write(files.ended(), "it was\n killed").unwrap();
    assert_eq!(files.end().unwrap(), clean("it was\n killed"));
    drop(log);
    // One that says nothing does not repeat an earlier one.
    let mut log = Log::open(files.log()).unwrap();
    log.write(b"drover: qemu-kvm -S\n");
    assert_eq!(files.last_said(), "");
}
