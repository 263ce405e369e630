//! Machines as other sites say them to be.

use super::build::audit;
use super::*;

fn text(name: &str, value: &str) -> Property {
    Property {
        name: name.into(),
        value: Value::Text(value.into()),
    }
}

fn number(name: &str, value: u64) -> Property {
    Property {
        name: name.into(),
        value: Value::Number(value),
    }
}

fn device(model: &str, properties: Vec<Property>) -> Device {
    Device {
        model: model.into(),
        id: None,
        bus: None,
        properties,
        behind: Behind::Usual,
    }
}

/// A machine with a disk, a network card and a console.
pub(super) fn web() -> Spec {
    let mut disk = device(
        "virtio-blk-pci",
        vec![number("addr", 16), text("serial", "web 1")],
    );
    disk.id = Some("vd0".into());
    disk.behind = Behind::Disk(0);
    Spec {
        machine: "pc-i440fx-7.2".into(),
        settings: vec![Property {
            name: "hpet".into(),
            value: Value::Switch(false),
        }],
        accelerator: Accelerator::Tcg,
        cpu: "qemu64".into(),
        features: vec![Property {
            name: "avx2".into(),
            value: Value::Switch(true),
        }],
        processors: Processors {
            present: 2,
            max: 2,
            sockets: 1,
            dies: 1,
            cores: 2,
            threads: 1,
        },
        memory: Memory {
            name: "pc.ram".into(),
            bytes: 96 << 20,
            max_bytes: 96 << 20,
            slots: 0,
        },
        uuid: Some([0xab; 16]),
        boot_order: String::new(),
        kernel: false,
        disks: vec![4 << 20],
        devices: vec![
            disk,
            device("e1000", vec![text("mac", "52:54:00:00:00:01")]),
            device("isa-serial", vec![number("index", 0)]),
        ],
    }
}

pub(super) fn site() -> Built {
    Built {
        program: "/usr/bin/qemu-system-x86_64".into(),
        name: "web".into(),
        max_memory: 128 << 20,
        max_cpus: 2,
        network: vec![Card::User],
        kernel: None,
        incoming: true,
    }
}

fn refused(change: impl FnOnce(&mut Spec)) -> String {
    let mut spec = web();
    change(&mut spec);
    build(&spec, &site()).unwrap_err()
}

#[test]
fn the_command_line_is_of_what_is_listed() {
    let line = build(&web(), &site()).unwrap();
    audit(&line).unwrap();
    let shell = line.shell().replace(" \\\n  ", " ");
    assert_eq!(
        shell,
        "/usr/bin/qemu-system-x86_64 -name guest=web -machine pc-i440fx-7.2,hpet=off -accel tcg -cpu qemu64,avx2=on \
         -smp cpus=2,maxcpus=2,sockets=1,cores=2,threads=1 -m size=100663296B -uuid abababab-abab-abab-abab-abababababab \
         -blockdev '{\"driver\":\"null-co\",\"node-name\":\"drover-empty-0\",\"read-zeroes\":true,\"size\":4194304}' \
         -blockdev '{\"driver\":\"raw\",\"file\":\"drover-empty-0\",\"node-name\":\"drover-disk-0\"}' \
         -chardev socket,id=qmp,fd=0,server=on,wait=off -mon chardev=qmp,mode=control \
         -device '{\"addr\":16,\"drive\":\"drover-disk-0\",\"driver\":\"virtio-blk-pci\",\"id\":\"vd0\",\"serial\":\"web 1\"}' \
         -netdev user,id=net0 -device '{\"driver\":\"e1000\",\"mac\":\"52:54:00:00:00:01\",\"netdev\":\"net0\"}' \
         -chardev socket,id=console,fd=1,server=on,wait=off \
         -device '{\"chardev\":\"console\",\"driver\":\"isa-serial\",\"index\":0}' -nodefaults -no-user-config -display none \
         -S -incoming defer -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    );
}

#[test]
fn what_is_not_on_the_list_is_refused_by_its_name() {
    let why = refused(|spec| spec.devices[1].model = "vfio-pci".into());
    assert_eq!(
        why,
        "has a device of the model \"vfio-pci\", which is not on the list"
    );
    for property in [
        "drive", "netdev", "chardev", "filename", "x-y", "id", "driver",
    ] {
        let why = refused(|spec| spec.devices[0].properties.push(text(property, "x")));
        assert!(why.contains("that is not on the list"), "{why}");
        assert!(
            why.contains(property) && why.contains("virtio-blk-pci \"vd0\""),
            "{why}"
        );
    }
    let why = refused(|spec| spec.settings.push(text("kernel", "/etc/shadow")));
    assert!(why.contains("\"kernel\" of the machine"), "{why}");
}

#[test]
fn values_are_of_their_kind() {
    for (name, value) in [
        ("serial", "a,b"),
        ("serial", "a=b"),
        ("serial", "/etc/shadow"),
        ("serial", "a\nb"),
        ("serial", &"x".repeat(65)),
        ("romfile", "/etc/shadow"),
        ("romfile", "x.rom"),
        ("addr", "4.0,x=y"),
        ("disable-legacy", "on,id=x"),
        ("ioeventfd", "on"),
    ] {
        let why = refused(|spec| {
            spec.devices[0].properties = vec![text(name, value)];
        });
        assert!(why.contains("which is not allowed"), "{why}");
        assert!(why.contains(name) && !why.contains('\n'), "{why}");
    }
    let why = refused(|spec| spec.devices[0].properties = vec![number("addr", 256)]);
    assert!(why.contains("256"), "{why}");
    let why = refused(|spec| {
        spec.devices[0].properties = vec![number("addr", 8), number("addr", 16)];
    });
    assert!(why.contains("addr"), "{why}");
    for mac in [
        "52:54:00:00:00",
        "52:54:00:00:00:0g",
        "52:54:00:00:00:1,x=y",
    ] {
        let why = refused(|spec| spec.devices[1].properties = vec![text("mac", mac)]);
        assert!(why.contains("which is not allowed"), "{why}");
    }
}

#[test]
fn names_hide_no_options() {
    for bad in [
        "",
        "-x",
        "a,b=c",
        "a=b",
        "../x",
        "a b",
        "é",
        &"x".repeat(65),
    ] {
        for change in [
            |spec: &mut Spec, bad: &str| spec.machine = format!("pc-q35-{bad}"),
            |spec: &mut Spec, bad: &str| spec.machine = bad.to_owned(),
            |spec: &mut Spec, bad: &str| spec.cpu = bad.to_owned(),
            |spec: &mut Spec, bad: &str| spec.memory.name = bad.to_owned(),
            |spec: &mut Spec, bad: &str| spec.devices[0].id = Some(bad.to_owned()),
            |spec: &mut Spec, bad: &str| spec.devices[0].bus = Some(bad.to_owned()),
            |spec: &mut Spec, bad: &str| spec.features[0].name = bad.to_owned(),
            |spec: &mut Spec, bad: &str| {
                spec.features[0].value = Value::Text(bad.to_owned());
            },
        ] {
            refused(|spec| change(spec, bad));
        }
    }
    refused(|spec| spec.boot_order = "c,menu=on".into());
    refused(|spec| spec.machine = "none".into());
    refused(|spec| spec.cpu = "help".into());
    refused(|spec| spec.machine = "pc-i440fx-".into());
}

#[test]
fn a_site_has_limits() {
    let why = refused(|spec| {
        spec.memory.bytes = 1 << 40;
        spec.memory.max_bytes = 1 << 40;
    });
    assert!(
        why.contains("1099511627776") && why.contains("`memory`"),
        "{why}"
    );
    let why = refused(|spec| {
        spec.memory.max_bytes = 1 << 30;
        spec.memory.slots = 2;
    });
    assert!(why.contains("or can get, 1073741824"), "{why}");
    let why = refused(|spec| {
        spec.processors.max = 4;
        spec.processors.cores = 4;
    });
    assert!(why.contains("`cpus`"), "{why}");
    refused(|spec| spec.processors.cores = 0);
    refused(|spec| spec.processors.sockets = u32::MAX);
    refused(|spec| spec.devices = vec![device("usb-kbd", Vec::new()); MAX_DEVICES + 1]);
    refused(|spec| spec.disks = vec![1; MAX_DISKS + 1]);
    let why = refused(|spec| spec.kernel = true);
    assert!(why.contains("`kernel`"), "{why}");
}

#[test]
fn networks_are_the_sites() {
    let with = |network: Vec<Card>| build(&web(), &Built { network, ..site() });
    assert!(with(Vec::new()).unwrap_err().contains("`network`"));
    assert!(
        with(vec![Card::User, Card::User])
            .unwrap_err()
            .contains("1 network cards")
    );
    let line = with(vec![Card::None]).unwrap();
    assert!(!line.options.iter().any(|(option, _)| option == "-netdev"));
    let line = with(vec![Card::Tap("web0".into())]).unwrap();
    audit(&line).unwrap();
    let tap = "tap,id=net0,ifname=web0,script=no,downscript=no";
    assert!(
        line.options
            .iter()
            .any(|(_, text)| text.as_deref() == Some(tap))
    );
    let mut two = web();
    two.devices.push(device("e1000", Vec::new()));
    let one_tap = Built {
        network: vec![Card::Tap("web0".into())],
        ..site()
    };
    assert!(
        build(&two, &one_tap)
            .unwrap_err()
            .contains("one tap device")
    );
}

#[test]
fn the_memory_of_displays_is_no_way_around_the_limit() {
    let display = |model: &str| device(model, vec![number("vgamem_mb", 64)]);
    let mut spec = web();
    spec.devices.push(display("VGA"));
    build(&spec, &site()).unwrap();
    for model in ["VGA", "virtio-vga", "virtio-gpu-pci", "bochs-display"] {
        let mut more = spec.clone();
        more.devices.push(device(model, Vec::new()));
        let why = build(&more, &site()).unwrap_err();
        assert!(why.contains("several displays"), "{why}");
    }
    let why = refused(|spec| {
        spec.devices
            .push(device("VGA", vec![number("vgamem_mb", 65)]));
    });
    assert!(why.contains("vgamem_mb"), "{why}");
}

#[test]
fn each_disk_is_on_one_device() {
    let why = refused(|spec| spec.devices[0].behind = Behind::Disk(1));
    assert!(why.contains("no disk 1"), "{why}");
    let why = refused(|spec| spec.devices[0].behind = Behind::Usual);
    assert!(why.contains("without a disk"), "{why}");
    let why = refused(|spec| spec.disks.push(1));
    assert!(why.contains("disk 1 on no device"), "{why}");
    let why = refused(|spec| spec.devices[1].behind = Behind::Disk(0));
    assert!(why.contains("disk 0 on a e1000"), "{why}");
    let why = refused(|spec| {
        let mut cd = device("ide-cd", Vec::new());
        cd.behind = Behind::Fixed;
        spec.devices.push(cd);
    });
    assert!(why.contains("eject it"), "{why}");
    let why = refused(|spec| {
        let mut twice = spec.devices[0].clone();
        twice.behind = Behind::Usual;
        spec.devices.push(twice);
    });
    assert!(why.contains("two devices called \"vd0\""), "{why}");
}

#[test]
fn lists_have_each_name_once() {
    let mut names = HashSet::new();
    for model in models::every() {
        assert!(names.insert(model.name), "{}", model.name);
        let mut properties = HashSet::new();
        for (name, _) in model.all() {
            assert!(properties.insert(name), "{} {name}", model.name);
            assert!(is_name(name), "{name}");
        }
    }
}

fn any_text() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    prop_oneof![
        "[a-z0-9._-]{0,8}",
        "[ -~]{0,12}",
        Just("-device".to_owned()),
        Just("x,drive=y".to_owned()),
        Just("/etc/shadow".to_owned()),
        any::<String>(),
    ]
}

proptest::proptest! {
    /// Whatever is said, what is built has only options that it may have.
    #[test]
    fn no_description_adds_an_option(
        texts in proptest::collection::vec(any_text(), 12),
        number in proptest::prelude::any::<u64>(),
        model in 0usize..64,
        property in 0usize..64,
        which in 0usize..8,
    ) {
        let mut spec = web();
        let model = models::every().get(model).map_or(texts[0].clone(), |model| model.name.to_owned());
        let known = models::find(&model).map(Model::all).unwrap_or_default();
        let name = known.get(property).map_or(texts[1].clone(), |(name, _)| (*name).to_owned());
        let value = match which % 3 {
            0 => Value::Switch(true),
            1 => Value::Number(number),
            _ => Value::Text(texts[2].clone()),
        };
        let mut more = device(&model, vec![Property { name, value }]);
        more.id = Some(texts[3].clone());
        spec.devices.push(more);
        match which {
            0 => spec.machine = format!("pc-q35-{}", texts[4]),
            1 => spec.cpu = texts[5].clone(),
            2 => spec.features[0] = text(&texts[6], &texts[7]),
            3 => spec.settings.push(text(&texts[8], &texts[9])),
            4 => spec.memory.name = texts[10].clone(),
            5 => spec.boot_order = texts[11].clone(),
            _ => {}
        }
        for spec in [&spec, &web()] {
            if let Ok(line) = build(spec, &site()) {
                audit(&line).unwrap();
            }
        }
    }
}
