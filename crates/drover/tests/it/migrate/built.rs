//! Machines whose QEMU is built at the other site, out of what is said of them.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use drover_agent::home::Home;
use drover_agent::remote::Call;
use drover_agent::site;
use drover_core::ImageName;
use drover_hypervisor::spec::{
    Accelerator, Behind, Device, Memory, Processors, Property, Spec, Value,
};
use drover_hypervisor::testing::Qemu;
use drover_migrate::protocol::DescribeMachine;
use drover_store::machine::Token;
use rustix::process::{Pid, Signal, kill_process};

use super::{Moving, Sites, goes_on, stays};
use crate::world::until;

/// What a QEMU that runs as another user boots: the directory of a test is closed to it.
struct Boot {
    directory: tempfile::TempDir,
    /// Where the sites serve its disks to it.
    shared: Vec<PathBuf>,
}

impl Drop for Boot {
    fn drop(&mut self) {
        // They outlive their sites, and would a test that fails.
        for process in self.processes() {
            let pid = process.file_name().and_then(|pid| pid.to_str());
            if let Some(pid) = pid.and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for directory in &self.shared {
            let _ = fs::remove_dir_all(directory);
        }
    }
}

impl Boot {
    fn new(sites: &Sites) -> Boot {
        let directory = tempfile::tempdir().unwrap();
        let open = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        open(directory.path(), 0o755);
        let shared = ["near", "far"].map(|home| {
            let home = sites.world.path(home);
            let hash = blake3::hash(home.as_os_str().as_encoded_bytes()).to_hex();
            Path::new("/run/drover").join(&hash[..16])
        });
        let boot = Boot {
            directory,
            shared: shared.into(),
        };
        for (from, to) in [
            (&sites.guest.kernel, boot.path("kernel")),
            (&sites.guest.initrd, boot.path("initrd")),
        ] {
            fs::copy(from, &to).unwrap();
            open(&to, 0o644);
        }
        boot
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The table of a machine that is built; as nobody, if this is root.
    fn table(&self, more: &str) -> String {
        let user = match is_root() {
            true => "user = \"nobody\"\n",
            false => "",
        };
        format!(
            "[machines.web.build]\ncpus = 1\naccelerator = \"tcg\"\nkernel = {:?}\ninitrd = {:?}\nappend = \"console=ttyS0 quiet panic=-1\"\n{user}{more}\n",
            self.path("kernel"),
            self.path("initrd")
        )
    }

    /// The processes of QEMUs that were built to boot this.
    fn processes(&self) -> Vec<PathBuf> {
        let kernel = self.path("kernel").display().to_string();
        let processes = fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .map(|one| one.path());
        let is_it = |process: &PathBuf| {
            let line = fs::read(process.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains(&kernel) && line.contains("-incoming")
        };
        processes.filter(is_it).collect()
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Changes what a site expects, and starts it again.
fn expect(sites: &mut Sites, home: &str, table: &str) {
    let config = sites.world.path(home).join("config.toml");
    fs::write(config, table).unwrap();
    sites.restart(home);
}

/// The guest whose console is this socket, as soon as there is one: what it says is in a file, as that of other guests.
fn listen(sites: &Sites, home: &str, name: &str) -> Qemu {
    let console = sites.world.path(home).join("qemu/web.console");
    let file = |kind: &str| sites.world.path(&format!("{name}.{kind}"));
    let mut log = fs::File::create(file("log")).unwrap();
    let orders = UnixListener::bind(file("console")).unwrap();
    std::thread::spawn(move || {
        let mut guest = loop {
            if let Ok(guest) = UnixStream::connect(&console) {
                break guest;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let mut to_guest = guest.try_clone().unwrap();
        std::thread::spawn(move || {
            for mut order in orders.incoming().flatten() {
                let mut line = [0; 64];
                let read = order.read(&mut line).unwrap_or(0);
                let _ = to_guest.write_all(&line[..read]);
            }
        });
        let mut said = [0; 4096];
        while let Ok(n @ 1..) = guest.read(&mut said) {
            log.write_all(&said[..n]).unwrap();
        }
    });
    Qemu::of_another(&sites.world.path(""), name)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_is_built_for_a_machine_that_moves() {
    let Some(mut sites) = Sites::new("a_qemu_is_built_for_a_machine_that_moves") else {
        return;
    };
    let boot = Boot::new(&sites);
    expect(&mut sites, "far", &boot.table("memory = \"128M\""));
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let near = sites.hypervisor("near");
    let dry_run = ["migrate", &near, "far", "--dry-run"];
    let can = sites.world.run("near", &dry_run).ok().out;
    assert!(can.contains("far builds a QEMU for it"), "{can}");
    assert_eq!(boot.processes(), Vec::<PathBuf>::new());

    // One that is given up leaves none behind.
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    assert_eq!(boot.processes().len(), 1);
    sites.world.run("near", &["migrate", "--abort", "web"]).ok();
    moving.fails();
    until("its QEMU is gone", || boot.processes().is_empty());
    let described = sites.world.path("far").join("qemu/web.spec");
    assert!(!described.exists());
    stays(&sites, &mut here).await;

    let mut there = listen(&sites, "far", "web-far");
    let done = Moving::begin(&sites, "near", "far", &[]).done();
    assert_eq!(done["built"], true, "{done}");
    here.ended().await;
    goes_on(&here, &mut there).await;
    let processes = boot.processes();
    let status = fs::read_to_string(processes[0].join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap()
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(field("Seccomp:"), ["2"]);
    assert_eq!(field("NoNewPrivs:"), ["1"]);
    if is_root() {
        assert_eq!(field("Uid:"), ["65534"; 4]);
        assert_eq!(field("Gid:").iter().filter(|id| *id == "0").count(), 0);
        assert_eq!(field("Groups:"), Vec::<String>::new());
    }
    let planned = ["migrate", "--start", "web", "--dry-run"];
    let planned = sites.world.run("far", &planned).ok().out;
    assert!(planned.contains("-sandbox on,obsolete=deny"), "{planned}");
    assert!(planned.contains("qemu/web.qmp"), "{planned}");
    assert_eq!(planned.contains("user 65534"), is_root(), "{planned}");

    alone(&sites, &processes[0]);

    // The site is not what keeps it alive. Its disks are where they were, whoever the next QEMU is to run as.
    let table = boot.table("memory = \"128M\"").replace("nobody", "daemon");
    expect(&mut sites, "far", &table);
    let last = there.said("beat").unwrap();
    there.wait_said("beat", last + 20).await;
    assert_eq!(boot.processes(), processes);
    assert!(there.verify().await >= last + 20);

    // And back, where one is built too.
    expect(&mut sites, "near", &boot.table("memory = \"128M\""));
    let mut back = listen(&sites, "near", "web-back");
    let socket = sites.world.path("far").join("qemu/web.qmp");
    let far = format!("qmp:{}", socket.display());
    let done = Moving::begin_of(&sites, &far, "far", "near", &[]).done();
    assert_eq!(done["built"], true, "{done}");
    goes_on(&there, &mut back).await;
    until("its end is reported", || {
        let told = sites.world.run("far", &["audit", "--json"]).ok().json();
        told.iter().any(|event| event["event"] == "machine-ended")
    });
    let log = fs::read_to_string(sites.world.path("far").join("qemu/web.log")).unwrap();
    assert!(log.contains("drover: ended: its QEMU has ended"), "{log}");
    let socket = sites.world.path("near").join("qemu/web.qmp");
    let machine = drover_hypervisor::Machine::connect(&socket).await.unwrap();
    machine.quit().await.unwrap();
    until("its QEMU is gone", || boot.processes().is_empty());
}

/// A QEMU that was built has no terminal, leaves no core, and its sockets to itself.
fn alone(sites: &Sites, process: &Path) {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap();
    let stat = read(process.join("stat"));
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = fields.split(' ').collect();
    let (parent, session, terminal) = (fields[1], fields[3], fields[4]);
    assert_eq!((session, terminal), (parent, "0"));
    let limits = read(process.join("limits"));
    let core = limits.lines().find(|line| line.starts_with("Max core"));
    // Not 0: a program that is given core dumps would have it.
    assert_eq!(
        core.unwrap().split_whitespace().nth(4),
        Some("1"),
        "{core:?}"
    );
    let listening = read(PathBuf::from("/proc/net/unix"));
    let monitor = sites
        .world
        .path("far")
        .join("qemu/web.qmp")
        .display()
        .to_string();
    let of_monitor = listening.lines().filter(|line| line.ends_with(&monitor));
    let inodes: Vec<_> = of_monitor
        .filter_map(|line| line.split_whitespace().nth(6))
        .collect();
    assert!(!inodes.is_empty(), "{listening}");
    let parent = Path::new("/proc").join(parent).join("fd");
    for descriptor in fs::read_dir(parent).unwrap().flatten() {
        let open = fs::read_link(descriptor.path()).unwrap_or_default();
        let open = open.display().to_string();
        let is_it = |inode: &&str| open == format!("socket:[{inode}]");
        assert!(!inodes.iter().any(is_it), "{open}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_built_qemu_that_hangs_is_ended() {
    let Some(mut sites) = Sites::new("a_built_qemu_that_hangs_is_ended") else {
        return;
    };
    let boot = Boot::new(&sites);
    expect(&mut sites, "far", &boot.table("memory = \"128M\""));
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    let process = boot.processes().remove(0);
    let process = process.file_name().unwrap().to_str().unwrap();
    let pid = Pid::from_raw(process.parse().unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    sites.world.run("near", &["migrate", "--abort", "web"]).ok();
    moving.fails();
    until("its QEMU is gone", || boot.processes().is_empty());
    stays(&sites, &mut here).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_built_stays() {
    let Some(mut sites) = Sites::new("what_is_not_built_stays") else {
        return;
    };
    let boot = Boot::new(&sites);
    let mut here = {
        // A controller that no virtual machine of today has.
        let file = sites.world.path("web.raw");
        fs::File::create(&file)
            .unwrap()
            .set_len(super::SIZE)
            .unwrap();
        let node = drover_hypervisor::machine::Node::File {
            name: "file".into(),
            path: file,
        };
        let launch = sites
            .launch(&[node, super::raw("file")])
            .with("-device lsi53c895a,id=old");
        launch.start(&sites.world.path(""), "web-near")
    };
    here.wait_said("beat", 20).await;
    let near = sites.hypervisor("near");
    expect(&mut sites, "far", &boot.table("memory = \"128M\""));
    let way_out = "`incoming` and `start`";
    let dry_run = ["migrate", &near, "far", "--dry-run"];
    let device = "a device \"old\" of the model \"lsi53c895a\", which is not on the list";
    sites
        .world
        .run("near", &dry_run)
        .fails(3, &[device, way_out]);
    let why = Moving::begin(&sites, "near", "far", &[]).fails();
    assert!(why.contains(device), "{why}");
    stays(&sites, &mut here).await;
    here.kill();
    let mut odd = {
        let node = drover_hypervisor::machine::Node::File {
            name: "file".into(),
            path: sites.world.path("web.raw"),
        };
        let launch = sites.launch(&[node, super::raw("file")]);
        launch
            .with("-boot menu=on")
            .start(&sites.world.path(""), "web-near")
    };
    odd.machine().await;
    sites
        .world
        .run("near", &dry_run)
        .fails(1, &["was started with -boot menu=on", way_out]);
    odd.kill();

    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    expect(&mut sites, "far", &boot.table("memory = \"64M\""));
    let memory = "100671488 bytes of memory, and `memory` there allows 67108864";
    sites
        .world
        .run("near", &dry_run)
        .fails(3, &[memory, way_out]);
    let kvm = boot
        .table("memory = \"128M\"")
        .replace("accelerator = \"tcg\"\n", "");
    expect(&mut sites, "far", &kvm);
    let tcg = "executed by QEMU itself, not by KVM, and `accelerator` there is not \"tcg\"";
    sites.world.run("near", &dry_run).fails(3, &[tcg, way_out]);
    for (before, program, says) in [
        ("", "program = \"/bin/false\"", "exit status: 1"),
        ("", "program = \"/bin/true\"", "its QEMU has ended"),
        // What earlier ones came to is not told again.
        (
            "[machines.web]\nstart = [\"/bin/sh\", \"-c\", \"echo no such unit >&2; exit 5\"]\n",
            "",
            "did not start: no such unit",
        ),
    ] {
        let table = boot.table(&format!("memory = \"128M\"\n{program}"));
        expect(&mut sites, "far", &(before.to_owned() + &table));
        let why = Moving::begin(&sites, "near", "far", &[]).fails();
        assert!(why.contains("did not start") && why.contains(says), "{why}");
    }
    // A shell that reads what QEMU would type is not this user's to give.
    let start = format!(
        // As a shell that reads commands, which makes each the leader of its group.
        "exec {} --home {} migrate --start web",
        env!("CARGO_BIN_EXE_drover"),
        sites.world.path("far").display()
    );
    let typed = std::process::Command::new("script")
        .args(["-qec", &start, "/dev/null"])
        .env("SHELL", "/bin/sh")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&typed.stdout).into_owned();
    assert!(said.contains("setsid -w drover migrate"), "{said}");
    if is_root() {
        let table = boot
            .table("memory = \"128M\"")
            .replace("user = \"nobody\"\n", "");
        expect(&mut sites, "far", &table);
        let root = "this site runs as root, and the QEMU of a peer's machine must not";
        sites
            .world
            .run("near", &dry_run)
            .fails(3, &[root, "[machines.web.build]"]);
    }
    stays(&sites, &mut here).await;
}

/// A machine with nothing but a disk.
fn plain() -> Spec {
    Spec {
        machine: "pc-q35-7.2".into(),
        settings: Vec::new(),
        accelerator: Accelerator::Tcg,
        cpu: "qemu64".into(),
        features: Vec::new(),
        processors: Processors {
            present: 1,
            max: 1,
            sockets: 1,
            dies: 1,
            cores: 1,
            threads: 1,
        },
        memory: Memory {
            name: "pc.ram".into(),
            bytes: 64 << 20,
            max_bytes: 64 << 20,
            slots: 0,
        },
        uuid: None,
        boot_order: String::new(),
        kernel: false,
        disks: vec![4 << 20],
        devices: vec![Device {
            model: "virtio-blk-pci".into(),
            id: Some("vd0".into()),
            bus: None,
            properties: Vec::new(),
            behind: Behind::Disk(0),
        }],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_peer_says_of_its_machine_is_not_trusted() {
    let Some(mut sites) = Sites::new("what_a_peer_says_of_its_machine_is_not_trusted") else {
        return;
    };
    let boot = Boot::new(&sites);
    expect(&mut sites, "far", &boot.table("memory = \"128M\""));
    let home = Home::existing(sites.world.path("near")).unwrap();
    let far = site::find_peer(&site::open_catalog(&home).unwrap(), "far").unwrap();
    let ask = async |name: &str, token: Option<Token>, spec: Spec| {
        let describe = DescribeMachine {
            machine: ImageName::new(name).unwrap(),
            token,
            spec: Some(spec),
        };
        let call = Call::peer(&home.identity().unwrap(), &far).await.unwrap();
        call.ask(&describe, |()| {})
            .await
            .map_err(|e| e.to_string())
    };
    assert_eq!(ask("web", None, plain()).await, Ok(true));
    let unexpected = ask("db", None, plain()).await.unwrap_err();
    assert!(unexpected.contains("does not expect"), "{unexpected}");
    let unknown = ask("web", Some(Token([1; 16])), plain()).await.unwrap_err();
    assert!(
        unknown.contains("not coming here by that move"),
        "{unknown}"
    );
    let property = |name: &str, value: &str| Property {
        name: name.into(),
        value: Value::Text(value.into()),
    };
    let with = |property: Property| {
        let mut spec = plain();
        spec.devices[0].properties.push(property);
        spec
    };
    let mut model = plain();
    model.devices[0].model = "vhost-user-blk-pci".into();
    let mut cpu = plain();
    cpu.cpu = "-device".into();
    let mut kind = plain();
    kind.machine = "pc-q35-7.2,kernel=/etc/shadow".into();
    let mut displays = plain();
    for n in 0..2 {
        displays.devices.push(Device {
            model: "bochs-display".into(),
            id: Some(format!("display{n}")),
            bus: None,
            properties: vec![Property {
                name: "vgamem".into(),
                value: Value::Number(64 << 20),
            }],
            behind: Behind::Usual,
        });
    }
    let mut memory = plain();
    (memory.memory.bytes, memory.memory.max_bytes) = (1 << 40, 1 << 40);
    for (spec, says) in [
        (model, "vhost-user-blk-pci"),
        (cpu, "-device"),
        (kind, "kernel=/etc/shadow"),
        (memory, "1099511627776"),
        (displays, "several displays"),
        (with(property("serial", "a,drive=/etc/shadow")), "serial"),
        (with(property("serial", "/etc/shadow")), "serial"),
        (with(property("drive", "other")), "\"drive\""),
        (with(property("romfile", "/etc/shadow")), "romfile"),
    ] {
        let why = ask("web", None, spec).await.unwrap_err();
        assert!(
            why.contains("no QEMU is built for web") && why.contains(says),
            "{why}"
        );
    }
    assert!(!sites.world.path("far").join("qemu").exists());
}
