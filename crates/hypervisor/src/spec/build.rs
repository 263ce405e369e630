//! The command line of a QEMU that waits for a machine, out of what is known of it.

use serde_json::{Map, Value as Json, json};

use super::models::{Kind, Takes};
use super::value::is_name;
use super::{Accelerator, Behind, Device, Property, Spec, USUAL_MEMORY, Value, find};
use crate::command_line::CommandLine;

/// What QEMU may not do, for all that a machine brings is read by it.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// What is behind a network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Card {
    /// Nothing: its cable is not plugged in.
    None,
    /// QEMU's own network, which reaches what its host reaches, the host's own services included.
    User,
    /// A tap device of this name, which is there and belongs to QEMU's user.
    Tap(String),
}

/// What the site boots from a file of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel's path.
    pub kernel: String,
    /// The path of its first file system, if it has one.
    pub initrd: Option<String>,
    /// Its command line.
    pub append: String,
}

/// What a site gives to a machine that it builds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// QEMU's program.
    pub program: String,
    /// The machine's name at this site.
    pub name: String,
    /// The most memory that it may have, in bytes.
    pub max_memory: u64,
    /// The most processors that it may have.
    pub max_cpus: u32,
    /// What is behind its network cards, in their order; the last for all others.
    pub network: Vec<Card>,
    /// What it boots, if it was booted from a kernel that was a file of its host.
    pub kernel: Option<Kernel>,
    /// Whether it is received from another QEMU, or boots from its disks.
    pub incoming: bool,
}

/// The block node of a machine's disk in a QEMU that was built.
#[must_use]
pub fn disk_node(disk: usize) -> String {
    format!("drover-disk-{disk}")
}

/// The command line of a QEMU for a machine of another site. QEMU's monitor is the socket that is its standard input, and the
/// machine's first console the one that is its standard output. It is paused, and its disks are empty.
///
/// # Errors
/// A text that says what of the machine this site does not give it, and follows its name.
pub fn build(spec: &Spec, site: &Built) -> Result<CommandLine, String> {
    spec.check()?;
    check_limits(spec, site)?;
    let mut options: Vec<(String, Option<String>)> = Vec::new();
    let mut add = |option: &str, argument: String| options.push((option.into(), Some(argument)));
    add("-name", format!("guest={}", site.name.replace(',', ",,")));
    add("-machine", machine(spec));
    let accelerator = match spec.accelerator {
        Accelerator::Tcg => "tcg",
        Accelerator::Kvm => "kvm",
    };
    add("-accel", accelerator.into());
    add("-cpu", cpu(spec));
    add("-smp", processors(spec));
    let memory = &spec.memory;
    let more = match memory.slots {
        0 => String::new(),
        slots => format!(",slots={slots},maxmem={}B", memory.max_bytes),
    };
    add("-m", format!("size={}B{more}", memory.bytes));
    if memory.name != USUAL_MEMORY {
        let object =
            json!({"qom-type": "memory-backend-ram", "id": memory.name, "size": memory.bytes});
        add("-object", object.to_string());
    }
    if let Some(uuid) = spec.uuid {
        add("-uuid", hyphenated(uuid));
    }
    if !spec.boot_order.is_empty() {
        add("-boot", format!("order={}", spec.boot_order));
    }
    if let (true, Some(kernel)) = (spec.kernel, &site.kernel) {
        add("-kernel", kernel.kernel.clone());
        if let Some(initrd) = &kernel.initrd {
            add("-initrd", initrd.clone());
        }
        add("-append", kernel.append.clone());
    }
    for (n, size) in spec.disks.iter().enumerate() {
        let below = format!("drover-empty-{n}");
        let null =
            json!({"driver": "null-co", "node-name": below, "size": size, "read-zeroes": true});
        let raw = json!({"driver": "raw", "node-name": disk_node(n), "file": below});
        add("-blockdev", null.to_string());
        add("-blockdev", raw.to_string());
    }
    let socket = |id: &str, fd: u32| format!("socket,id={id},fd={fd},server=on,wait=off");
    add("-chardev", socket("qmp", 0));
    add("-mon", "chardev=qmp,mode=control".into());
    let (mut cards, mut ports) = (0, 0);
    for device in &spec.devices {
        let mut fields = fields(device);
        match device.listed().map(|model| model.takes) {
            Some(Takes::Network) => {
                let id = format!("net{cards}");
                let network = site.network.get(cards).or(site.network.last());
                if let Some(netdev) = netdev(network, &id) {
                    add("-netdev", netdev);
                    fields.insert("netdev".into(), id.into());
                }
                cards += 1;
            }
            Some(Takes::Characters) => {
                let is_console = ports == 0 && device.model != "virtserialport";
                let id = match is_console {
                    true => "console".to_owned(),
                    false => format!("port{ports}"),
                };
                match is_console {
                    true => add("-chardev", socket(&id, 1)),
                    false => add("-chardev", format!("null,id={id}")),
                }
                fields.insert("chardev".into(), id.into());
                ports += 1;
            }
            _ => {}
        }
        add("-device", Json::Object(fields).to_string());
    }
    for (option, argument) in [
        ("-nodefaults", None),
        ("-no-user-config", None),
        ("-display", Some("none")),
        ("-S", None),
    ] {
        options.push((option.into(), argument.map(str::to_owned)));
    }
    if site.incoming {
        options.push(("-incoming".into(), Some("defer".into())));
    }
    options.push(("-sandbox".into(), Some(SANDBOX.into())));
    Ok(CommandLine {
        program: site.program.clone(),
        options,
    })
}

fn check_limits(spec: &Spec, site: &Built) -> Result<(), String> {
    let memory = spec.memory.max_bytes;
    if memory > site.max_memory {
        return Err(format!(
            "has, or can get, {memory} bytes of memory, and `memory` there allows {}",
            site.max_memory
        ));
    }
    if spec.processors.max > site.max_cpus {
        return Err(format!(
            "has, or can get, {} processors, and `cpus` there allows {}",
            spec.processors.max, site.max_cpus
        ));
    }
    if spec.cards() > 0 && site.network.is_empty() {
        return Err(
            "has a network card, and `network` there does not say what it is connected to".into(),
        );
    }
    if site.network.len() > 1 && site.network.len() != spec.cards() {
        return Err(format!(
            "has {} network cards, and `network` there is of {}",
            spec.cards(),
            site.network.len()
        ));
    }
    if spec.cards() > 1 && matches!(site.network[..], [Card::Tap(_)]) {
        return Err(format!(
            "has {} network cards, and `network` there is one tap device",
            spec.cards()
        ));
    }
    if spec.kernel && site.kernel.is_none() {
        return Err(
            "boots a kernel that is a file of its host, and `kernel` there names none".into(),
        );
    }
    Ok(())
}

fn machine(spec: &Spec) -> String {
    let mut text = spec.machine.clone();
    for Property { name, value } in &spec.settings {
        text.push_str(&format!(",{name}={}", plain(value)));
    }
    if spec.memory.name != USUAL_MEMORY {
        text.push_str(&format!(",memory-backend={}", spec.memory.name));
    }
    text
}

fn cpu(spec: &Spec) -> String {
    let mut text = spec.cpu.clone();
    for Property { name, value } in &spec.features {
        text.push_str(&format!(",{name}={}", plain(value)));
    }
    text
}

fn processors(spec: &Spec) -> String {
    let of = &spec.processors;
    let mut text = format!(
        "cpus={},maxcpus={},sockets={}",
        of.present, of.max, of.sockets
    );
    // Machines that have none do not know the word.
    if of.dies > 1 {
        text.push_str(&format!(",dies={}", of.dies));
    }
    text.push_str(&format!(",cores={},threads={}", of.cores, of.threads));
    text
}

/// A value that has passed its check, in an option that is no JSON.
fn plain(value: &Value) -> String {
    match value {
        Value::Switch(on) => if *on { "on" } else { "off" }.to_owned(),
        Value::Number(number) => number.to_string(),
        Value::Text(text) => text.clone(),
    }
}

fn hyphenated(uuid: [u8; 16]) -> String {
    let hex: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..4, 4..6, 6..8, 8..10, 10..16];
    parts.map(|part| hex[part].concat()).join("-")
}

/// A device as QEMU is told it.
fn fields(device: &Device) -> Map<String, Json> {
    let mut fields = Map::new();
    fields.insert("driver".into(), device.model.clone().into());
    if let Some(id) = &device.id {
        fields.insert("id".into(), id.clone().into());
    }
    if let Some(bus) = &device.bus {
        fields.insert("bus".into(), bus.clone().into());
    }
    if let Behind::Disk(disk) = device.behind {
        fields.insert("drive".into(), disk_node(disk as usize).into());
    }
    for Property { name, value } in &device.properties {
        let value = match value {
            Value::Switch(on) => Json::from(*on),
            Value::Number(number) => Json::from(*number),
            Value::Text(text) => Json::from(text.clone()),
        };
        fields.insert(name.clone(), value);
    }
    fields
}

fn netdev(card: Option<&Card>, id: &str) -> Option<String> {
    Some(match card? {
        Card::None => return None,
        Card::User => format!("user,id={id}"),
        Card::Tap(name) => format!("tap,id={id},ifname={name},script=no,downscript=no"),
    })
}

/// The options and keys that a command line of [`build`] may have: whether all of these are among them.
///
/// # Errors
/// A text that says which is not.
pub fn audit(line: &CommandLine) -> Result<(), String> {
    let allowed = |text: &str, keys: &[&str]| {
        text.split(',').skip(1).all(|part| {
            let key = part.split('=').next().unwrap_or_default();
            keys.contains(&key)
        })
    };
    for (option, argument) in &line.options {
        let text = argument.as_deref().unwrap_or_default();
        let object = || serde_json::from_str::<Map<String, Json>>(text).unwrap_or_default();
        let only = |keys: &[&str]| {
            let object = object();
            !object.is_empty() && object.keys().all(|key| keys.contains(&key.as_str()))
        };
        let is_right = match option.as_str() {
            "-name" => text.starts_with("guest=") && text.replace(",,", "").split(',').count() == 1,
            "-machine" => {
                let settings: Vec<&str> = super::models::SETTINGS
                    .iter()
                    .map(|(name, _)| *name)
                    .collect();
                allowed(text, &[&settings[..], &["memory-backend"]].concat())
            }
            "-cpu" => text.split(',').all(|part| {
                let (name, value) = part.split_once('=').unwrap_or((part, "on"));
                is_name(name) && is_name(value)
            }),
            "-smp" => allowed(text, &["maxcpus", "sockets", "dies", "cores", "threads"]),
            "-m" => text.starts_with("size=") && allowed(text, &["slots", "maxmem"]),
            "-object" => {
                only(&["qom-type", "id", "size"]) && object()["qom-type"] == "memory-backend-ram"
            }
            "-blockdev" => {
                only(&["driver", "node-name", "size", "read-zeroes", "file"])
                    && (object()["driver"] == "null-co" || object()["driver"] == "raw")
            }
            "-device" => audit_device(&object()),
            "-chardev" => {
                text.starts_with("socket,id=") && allowed(text, &["id", "fd", "server", "wait"])
                    || text.starts_with("null,id=") && allowed(text, &["id"])
            }
            "-netdev" => {
                text.starts_with("user,id=net") && allowed(text, &["id"])
                    || text.starts_with("tap,id=net")
                        && allowed(text, &["id", "ifname", "script", "downscript"])
            }
            "-accel" => text == "tcg" || text == "kvm",
            "-uuid" => Kind::Uuid.allows(&Value::Text(text.to_owned())),
            "-boot" => text
                .strip_prefix("order=")
                .is_some_and(|order| order.chars().all(|c| c.is_ascii_lowercase())),
            "-mon" => text == "chardev=qmp,mode=control",
            "-display" => text == "none",
            "-incoming" => text == "defer",
            "-sandbox" => text == SANDBOX,
            "-nodefaults" | "-no-user-config" | "-S" => argument.is_none(),
            // The site's own.
            "-kernel" | "-initrd" | "-append" => true,
            _ => false,
        };
        let is_own = option == "-append";
        if !is_right || text.starts_with('-') && !is_own {
            return Err(format!("{option} {text}"));
        }
    }
    Ok(())
}

fn audit_device(fields: &Map<String, Json>) -> bool {
    let name = fields.get("driver").and_then(Json::as_str);
    let Some(model) = name.and_then(super::models::find) else {
        return false;
    };
    fields.iter().all(|(key, value)| {
        ["driver", "id", "bus", "drive", "netdev", "chardev"].contains(&key.as_str())
            || find(model.properties, key).is_some() && !value.is_object() && !value.is_array()
    })
}
