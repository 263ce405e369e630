//! How a QEMU was started: whether a [`Spec`](super::Spec) says all that its options make of the machine.
//!
//! Only what is listed here is: an option that nobody has thought of would be lost without a word, and the machine would
//! differ after its next boot.

use serde_json::{Map, Value as Json};

use super::models::{self, SETTINGS};
use crate::command_line::CommandLine;
use crate::error::one_line;

/// Options whose effect is asked of QEMU, or read where it is not asked.
const DESCRIBED: [&str; 34] = [
    "-append",
    "-audio",
    "-bios",
    "-blockdev",
    "-cdrom",
    "-cpu",
    "-device",
    "-drive",
    "-enable-kvm",
    "-fda",
    "-fdb",
    "-hda",
    "-hdb",
    "-hdc",
    "-hdd",
    "-initrd",
    "-kernel",
    "-netdev",
    "-no-acpi",
    "-no-hpet",
    "-nodefaults",
    "-nographic",
    "-parallel",
    "-serial",
    "-usb",
    "-uuid",
    "-vga",
    // Of one run, not of the machine.
    "-S",
    "-daemonize",
    "-incoming",
    "-loadvm",
    "-no-shutdown",
    "-only-migratable",
    "-pidfile",
];

/// Options that the machine sees nothing of.
const OF_THE_HOST: [&str; 32] = [
    "-D",
    "-add-fd",
    "-alt-grab",
    "-audiodev",
    "-chardev",
    "-chroot",
    "-ctrl-grab",
    "-d",
    "-dfilter",
    "-display",
    "-full-screen",
    "-iscsi",
    "-k",
    "-mem-path",
    "-mem-prealloc",
    "-mon",
    "-monitor",
    "-msg",
    "-name",
    "-no-quit",
    "-no-user-config",
    "-nouserconfig",
    "-qmp",
    "-qmp-pretty",
    "-run-with",
    "-runas",
    "-sandbox",
    "-sdl",
    "-spice",
    "-trace",
    "-vnc",
    "-curses",
];

/// A key that an argument may have, and the values that it may have then; any if none are listed.
type Keys = &'static [(&'static str, &'static [&'static str])];

/// Options of which it depends on the argument: what its first part is when that has no key, and its keys.
const BY_KEYS: [(&str, &str, Keys); 7] = [
    (
        "-accel",
        "accel",
        &[
            ("accel", &["tcg", "kvm"]),
            ("dirty-ring-size", &[]),
            ("kernel-irqchip", &["on"]),
            ("split-wx", &[]),
            ("tb-size", &[]),
            ("thread", &[]),
        ],
    ),
    (
        "-boot",
        "order",
        &[("order", &[]), ("menu", &["off"]), ("strict", &["off"])],
    ),
    (
        "-m",
        "size",
        &[("size", &[]), ("slots", &[]), ("maxmem", &[])],
    ),
    (
        "-overcommit",
        "",
        &[("mem-lock", &[]), ("cpu-pm", &["off"])],
    ),
    (
        "-rtc",
        "",
        &[
            ("base", &["utc"]),
            ("clock", &["host"]),
            ("driftfix", &["none"]),
        ],
    ),
    (
        "-smp",
        "cpus",
        &[
            ("cpus", &[]),
            ("maxcpus", &[]),
            ("sockets", &[]),
            ("dies", &[]),
            ("cores", &[]),
            ("threads", &[]),
            ("clusters", &["1"]),
            ("modules", &["1"]),
        ],
    ),
    (
        "-usbdevice",
        "device",
        &[("device", &["tablet", "mouse", "keyboard"])],
    ),
];

/// Keys of `-machine` besides the settings that are described.
const MACHINE: Keys = &[
    ("type", &[]),
    ("accel", &["kvm", "tcg", "kvm:tcg", "tcg:kvm"]),
    ("append", &[]),
    ("dump-guest-core", &[]),
    ("firmware", &[]),
    ("initrd", &[]),
    ("kernel", &[]),
    ("kernel-irqchip", &["on"]),
    ("mem-merge", &[]),
    ("memory-backend", &[]),
    ("suppress-vmdesc", &[]),
];

/// Objects that the machine sees nothing of but what QEMU is asked about.
const OBJECTS: [&str; 16] = [
    "authz-list",
    "authz-list-file",
    "authz-pam",
    "authz-simple",
    "iothread",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "rng-builtin",
    "rng-egd",
    "rng-random",
    "secret",
    "secret_keyring",
    "throttle-group",
    "tls-creds-psk",
    "tls-creds-x509",
];

/// The first option of a QEMU that makes something of the machine which no description says, or may.
pub(super) fn undescribed(line: &CommandLine) -> Option<String> {
    line.options.iter().find_map(|(option, argument)| {
        let text = argument.as_deref().unwrap_or_default();
        let known = |list: &[&str]| list.contains(&option.as_str());
        let odd = match option.as_str() {
            _ if known(&DESCRIBED) || known(&OF_THE_HOST) => None,
            "-M" | "-machine" => odd_part(text, "type", |key, value| {
                // As QEMU does.
                let key = key.replace('_', "-");
                SETTINGS.iter().any(|(name, _)| *name == key) || is_allowed(MACHINE, &key, value)
            }),
            "-net" | "-nic" => odd_part(text, "kind", |key, value| match key {
                "model" => value == "virtio" || models::find(value).is_some(),
                _ => true,
            }),
            "-object" => {
                let kind = object(text);
                (!OBJECTS.contains(&kind.as_str())).then_some(kind)
            }
            _ => match BY_KEYS.iter().find(|(name, ..)| name == option) {
                Some((_, first, keys)) => {
                    odd_part(text, first, |key, value| is_allowed(keys, key, value))
                }
                None => Some(String::new()),
            },
        }?;
        Some(one_line(format!("{option} {odd}").trim_end()))
    })
}

fn is_allowed(keys: Keys, key: &str, value: &str) -> bool {
    let mut known = keys.iter().filter(|(name, _)| *name == key);
    known.any(|(_, values)| values.is_empty() || values.contains(&value))
}

/// The first part of an argument that is not allowed. Values with commas, which are doubled in them, have odd parts.
fn odd_part(text: &str, first: &str, allows: impl Fn(&str, &str) -> bool) -> Option<String> {
    let parts = text.split(',').enumerate();
    let mut odd = parts.filter(|(n, part)| match (part.split_once('='), n) {
        (Some((key, value)), _) => !allows(key, value),
        (None, 0) if !first.is_empty() => !part.is_empty() && !allows(first, part),
        (None, _) => !allows(part, "on"),
    });
    odd.next().map(|(_, part)| part.to_owned())
}

/// The type of an object, in either of the forms in which QEMU is told of one.
fn object(text: &str) -> String {
    if let Ok(object) = serde_json::from_str::<Map<String, Json>>(text) {
        let kind = object.get("qom-type").and_then(Json::as_str);
        return kind.unwrap_or_default().to_owned();
    }
    let first = text.split(',').next().unwrap_or_default();
    first.strip_prefix("qom-type=").unwrap_or(first).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::{site, web};
    use crate::spec::{Property, Value, build};

    fn says(line: &str) -> Option<String> {
        let words = line.split_whitespace().map(String::from);
        undescribed(&CommandLine::parse(words.collect()).unwrap())
    }

    #[test]
    fn what_is_described_or_harmless_is_allowed() {
        for line in [
            "qemu-kvm -name web,debug-threads=on -M pc-q35-7.2,accel=kvm,usb=off,smm=on,kernel_irqchip=on -m 2G",
            "qemu-kvm -machine type=pc,memory-backend=mem,mem-merge=off,vmport=off -m size=1G,slots=2,maxmem=4G \
             -object memory-backend-memfd,id=mem,size=1G,share=on -smp 4,sockets=2,cores=2 -cpu host,+vmx",
            "qemu-system-x86_64 -accel tcg,thread=multi,tb-size=64 -boot cd -rtc base=utc,clock=host -overcommit mem-lock=on",
            "qemu-system-x86_64 -accel kvm -accel tcg -boot order=c,menu=off -nic user,model=virtio,mac=52:54:00:00:00:01",
            "qemu-system-x86_64 -hda a.raw -net nic,model=e1000 -net user -usbdevice tablet -nographic -S -incoming defer",
            "qemu-system-x86_64 -object {\"qom-type\":\"rng-random\",\"id\":\"r\",\"filename\":\"/dev/urandom\"} \
             -object secret,id=s,file=/x -object qom-type=throttle-group,id=t -display gtk,gl=on -vnc :1 -sandbox on",
        ] {
            assert_eq!(says(line), None);
        }
    }

    #[test]
    fn what_would_be_lost_is_named() {
        for (line, odd) in [
            ("-boot order=c,menu=on", "-boot menu=on"),
            ("-boot once=d", "-boot once=d"),
            ("-boot strict=on", "-boot strict=on"),
            ("-boot c,splash=/x.jpg", "-boot splash=/x.jpg"),
            ("-rtc base=localtime", "-rtc base=localtime"),
            ("-rtc base=utc,driftfix=slew", "-rtc driftfix=slew"),
            ("-M pc,nvdimm=on", "-M nvdimm=on"),
            ("-machine pc,x-oem-id=ACME", "-machine x-oem-id=ACME"),
            (
                "-machine pc,kernel_irqchip=split",
                "-machine kernel_irqchip=split",
            ),
            ("-machine pc,pcspk-audiodev=a", "-machine pcspk-audiodev=a"),
            ("-machine pc,append=a,,b=c", "-machine "),
            (
                "-accel kvm,kernel-irqchip=split",
                "-accel kernel-irqchip=split",
            ),
            ("-accel xen", "-accel xen"),
            ("-machine pc,accel=xen:tcg", "-machine accel=xen:tcg"),
            ("-overcommit cpu-pm=on", "-overcommit cpu-pm=on"),
            ("-smp 4,clusters=2", "-smp clusters=2"),
            ("-net nic,model=ne2k_isa", "-net model=ne2k_isa"),
            ("-usbdevice braille", "-usbdevice braille"),
            (
                "-object tls-cipher-suites,id=t",
                "-object tls-cipher-suites",
            ),
            ("-object {\"qom-type\":\"sev-guest\"}", "-object sev-guest"),
        ] {
            let said = says(&format!("qemu-kvm -m 1G {line}"));
            assert_eq!(said.as_deref(), Some(odd.trim_end()), "{line}");
        }
        for option in [
            "-action",
            "-fw_cfg",
            "-global",
            "-icount",
            "-L",
            "-no-fd-bootchk",
            "-no-reboot",
            "-numa",
            "-pflash",
            "-readconfig",
            "-set",
            "-smbios",
            "-snapshot",
            "-tpmdev",
            "-watchdog",
            "-watchdog-action",
            // Of a later QEMU.
            "-unheard-of",
        ] {
            assert_eq!(
                says(&format!("qemu-kvm {option} x")).as_deref(),
                Some(option)
            );
        }
    }

    /// A machine that was built can be described again when it moves on.
    #[test]
    fn what_is_built_is_described() {
        let mut spec = web();
        spec.boot_order = "nc".into();
        spec.memory.name = "mem0".into();
        spec.settings = vec![Property {
            name: "usb".into(),
            value: Value::Switch(true),
        }];
        assert_eq!(undescribed(&build(&spec, &site()).unwrap()), None);
    }
}
