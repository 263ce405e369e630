//! What a running machine is made of, asked of its QEMU.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::models::{self, Kind, Model, SETTINGS};
use super::options::undescribed;
use super::{Accelerator, Behind, Device, Memory, Processors, Property, Spec, USUAL_MEMORY, Value};
use crate::command_line::{CommandLine, device_id};
use crate::error::{ErrorClass, HypervisorError, one_line};
use crate::machine::{Disk, Machine};

/// Settings of the machine as they usually are, or become.
const USUAL: [(&str, &[&str]); 11] = [
    ("acpi", &["auto"]),
    ("graphics", &["true"]),
    ("hpet", &["true"]),
    ("i8042", &["true"]),
    ("max-ram-below-4g", &["0", "3758096384", "4294967296"]),
    ("pit", &["auto", "true"]),
    ("sata", &["true"]),
    ("smbus", &["true"]),
    ("smm", &["auto"]),
    ("usb", &["false"]),
    ("vmport", &["auto", "on"]),
];

/// The property whose empty text says something: that a device has no such file.
const ROM: &str = "romfile";

/// In the place of a text that is not told; no property may have it.
const WITHHELD: &str = "(withheld)";

/// The firmware that QEMU has unless it is told another.
const USUAL_FIRMWARE: [&str; 3] = ["", "bios.bin", "bios-256k.bin"];

/// The order in which QEMU boots unless it is told another.
const USUAL_ORDER: &str = "cad";

/// Where QEMU keeps devices: those with a name, those without, and those that no `-device` made.
const NAMED: &str = "/machine/peripheral";
const UNNAMED: &str = "/machine/peripheral-anon";
const OTHERS: &str = "/machine/unattached";

/// A child of one of QEMU's objects.
#[derive(Deserialize)]
struct Child {
    name: String,
    #[serde(rename = "type")]
    kind: String,
}

/// A property of a device model.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Usual {
    name: String,
    default_value: Option<Json>,
}

/// A device that was found.
struct Found {
    path: String,
    model: String,
    id: Option<String>,
    /// The path of the bus that it is on.
    bus: String,
    place: (usize, bool, usize),
}

impl Spec {
    /// What a running machine is made of; `line` is how its QEMU was started, and `disks` the names and sizes of the disks
    /// that move. A device whose model is not on the list is in it with its model alone.
    ///
    /// # Errors
    /// [`HypervisorError::Unsupported`] when it has what no spec says; those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn read(
        machine: &Machine,
        line: &CommandLine,
        disks: Vec<(String, u64)>,
    ) -> Result<Spec, HypervisorError> {
        let reader = Reader { machine };
        if let Some(option) = undescribed(line) {
            return Err(reader.unsupported(format!("was started with {option}")));
        }
        let about = machine.description().await?;
        let firmware = reader.text("/machine", "firmware").await?;
        if !USUAL_FIRMWARE.contains(&firmware.as_str())
            || !reader.text("/machine", "pflash0").await?.is_empty()
        {
            return Err(reader.unsupported("has a firmware that is a file of its host".into()));
        }
        let (cpu, features) = processor(line);
        let order = reader.get("/machine", "boot").await?.unwrap_or_default();
        let order = order["order"].as_str().unwrap_or_default();
        Ok(Spec {
            machine: about.machine,
            settings: reader.settings().await?,
            accelerator: match about.accelerated {
                true => Accelerator::Kvm,
                false => Accelerator::Tcg,
            },
            cpu: cpu.unwrap_or(about.cpu),
            features,
            processors: reader.processors(about.cpus).await?,
            memory: reader.memory().await?,
            uuid: uuid(&about.uuid),
            boot_order: match order {
                USUAL_ORDER => String::new(),
                order => one_line(order),
            },
            kernel: !reader.text("/machine", "kernel").await?.is_empty(),
            disks: disks.iter().map(|(_, size)| *size).collect(),
            devices: reader.devices(line, &disks).await?,
        })
    }
}

struct Reader<'a> {
    machine: &'a Machine,
}

impl Reader<'_> {
    fn unsupported(&self, what: String) -> HypervisorError {
        HypervisorError::Unsupported {
            socket: self.machine.socket().to_owned(),
            reason: what,
        }
    }

    /// A property of one of QEMU's objects, if it has it.
    async fn get(&self, path: &str, property: &str) -> Result<Option<Json>, HypervisorError> {
        let ask = json!({"path": path, "property": property});
        match self.machine.qmp().execute("qom-get", ask).await {
            Ok(value) => Ok(Some(value)),
            Err(HypervisorError::Refused {
                class: ErrorClass::Generic | ErrorClass::DeviceNotFound,
                ..
            }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn text(&self, path: &str, property: &str) -> Result<String, HypervisorError> {
        let value = self.get(path, property).await?.unwrap_or_default();
        Ok(value.as_str().unwrap_or_default().to_owned())
    }

    async fn list(&self, path: &str) -> Result<Vec<Child>, HypervisorError> {
        let list = self.machine.qmp();
        list.execute("qom-list", json!({"path": path})).await
    }

    async fn settings(&self) -> Result<Vec<Property>, HypervisorError> {
        let mut settings = Vec::new();
        for (name, kind) in SETTINGS {
            let Some(value) = self.get("/machine", name).await? else {
                continue;
            };
            let text = match &value {
                Json::String(text) => text.clone(),
                other => other.to_string(),
            };
            let usual = USUAL.iter().find(|(known, _)| known == name);
            if !usual.is_some_and(|(_, usual)| usual.contains(&text.as_str()))
                && let Some(value) = said(kind, &value)
            {
                settings.push(Property {
                    name: (*name).to_owned(),
                    value,
                });
            }
        }
        Ok(settings)
    }

    async fn processors(&self, present: usize) -> Result<Processors, HypervisorError> {
        let of = self.get("/machine", "smp").await?.unwrap_or_default();
        let part = |name: &str| of[name].as_u64().and_then(|n| u32::try_from(n).ok());
        let found = Processors {
            present: u32::try_from(present).unwrap_or(u32::MAX),
            max: part("maxcpus").unwrap_or(0),
            sockets: part("sockets").unwrap_or(1),
            dies: part("dies").unwrap_or(1),
            cores: part("cores").unwrap_or(1),
            threads: part("threads").unwrap_or(1),
        };
        if part("cpus") != Some(found.present) {
            return Err(self.unsupported("has processors that were added while it ran".into()));
        }
        Ok(found)
    }

    async fn memory(&self) -> Result<Memory, HypervisorError> {
        let of = self.get("/machine", "memory").await?.unwrap_or_default();
        let bytes = of["size"].as_u64().unwrap_or(0);
        let backend = self.text("/machine", "memory-backend").await?;
        let name = match backend.rsplit('/').next().unwrap_or_default() {
            "" => USUAL_MEMORY,
            name => name,
        };
        Ok(Memory {
            name: one_line(name),
            bytes,
            max_bytes: of["max-size"].as_u64().unwrap_or(bytes),
            slots: of["slots"]
                .as_u64()
                .unwrap_or(0)
                .try_into()
                .unwrap_or(u32::MAX),
        })
    }

    async fn devices(
        &self,
        line: &CommandLine,
        moving: &[(String, u64)],
    ) -> Result<Vec<Device>, HypervisorError> {
        let mut found = Vec::new();
        for (place, directory) in [(0, OTHERS), (1, NAMED), (2, UNNAMED)] {
            for child in self.list(directory).await? {
                found.extend(self.find(line, place, directory, child).await?);
            }
        }
        let buses = found
            .iter()
            .map(|device| (device.path.clone(), device.bus.clone()));
        let buses: HashMap<String, String> = buses.collect();
        for device in &mut found {
            device.place.0 = depth(&buses, &device.bus, 0);
        }
        found.sort_by(|a, b| a.place.cmp(&b.place).then_with(|| a.path.cmp(&b.path)));
        let disks = self.machine.disks().await?;
        let mut usual = HashMap::new();
        let mut devices = Vec::new();
        for device in found {
            devices.push(self.device(device, &disks, moving, &mut usual).await?);
        }
        Ok(devices)
    }

    /// A child that is a device which does not belong to every machine.
    async fn find(
        &self,
        line: &CommandLine,
        place: usize,
        directory: &str,
        child: Child,
    ) -> Result<Option<Found>, HypervisorError> {
        let kind = child.kind.strip_prefix("child<");
        let Some(model) = kind.and_then(|kind| kind.strip_suffix('>')) else {
            return Ok(None);
        };
        let path = format!("{directory}/{}", child.name);
        let bus = self.text(&path, "parent_bus").await?;
        if directory == OTHERS {
            let is_implied = models::IMPLIED.contains(&model) || models::is_of_setting(model);
            let is_listed = models::find(model).is_some();
            // What is on no bus is no device, or one of the machine's own, as is what is not listed and not on the PCI bus.
            if is_implied
                || bus.is_empty()
                || !is_listed && self.get(&path, "addr").await?.is_none()
            {
                return Ok(None);
            }
        }
        let ids = line
            .options
            .iter()
            .filter(|(option, _)| option == "-device");
        let mut ids = ids.map(|(_, text)| device_id(text.as_deref().unwrap_or_default()));
        let index = child.name.trim_matches(|c: char| !c.is_ascii_digit());
        let nth = match directory {
            NAMED => ids.position(|id| id.as_ref() == Some(&child.name)),
            // As QEMU numbers them.
            UNNAMED => index.parse().ok().and_then(|n: usize| {
                let unnamed = ids.enumerate().filter(|(_, id)| id.is_none());
                unnamed.map(|(at, _)| at).nth(n)
            }),
            _ => index.parse().ok(),
        };
        Ok(Some(Found {
            path,
            model: model.to_owned(),
            id: (directory == NAMED).then_some(child.name),
            bus,
            place: (0, place > 0, nth.unwrap_or(usize::MAX)),
        }))
    }

    async fn device(
        &self,
        found: Found,
        disks: &[Disk],
        moving: &[(String, u64)],
        usual: &mut HashMap<String, HashMap<String, Option<Json>>>,
    ) -> Result<Device, HypervisorError> {
        let below = format!("{}/", found.path);
        let is_on = |disk: &&Disk| {
            let path = disk.path.as_deref().unwrap_or_default();
            path == found.path || path.starts_with(&below)
        };
        let disk = disks.iter().find(is_on);
        let behind = match disk.filter(|disk| disk.medium.is_some()) {
            None => Behind::Usual,
            Some(disk) => (0..)
                .zip(moving)
                .find(|(_, (name, _))| *name == disk.name)
                .map_or(Behind::Fixed, |(n, _)| Behind::Disk(n)),
        };
        let bus = found.bus.rsplit('/').next().unwrap_or_default();
        let mut device = Device {
            model: one_line(&found.model),
            id: found.id,
            bus: (!bus.is_empty()).then(|| bus.to_owned()),
            properties: Vec::new(),
            behind,
        };
        let Some(model) = models::find(&found.model) else {
            return Ok(device);
        };
        if !usual.contains_key(model.name) {
            usual.insert(model.name.to_owned(), self.usual(model).await?);
        }
        let usual = &usual[model.name];
        for (name, kind) in model.all() {
            let Some(default) = usual.get(name) else {
                continue;
            };
            let Some(value) = self.get(&found.path, name).await? else {
                continue;
            };
            let text = value.as_str();
            let is_rom = *name == *ROM;
            // QEMU's own, by the device's model.
            let is_own_rom =
                is_rom && text.is_some_and(|rom| !rom.is_empty() && !rom.contains('/'));
            if default.as_ref() == Some(&value) || is_own_rom {
                continue;
            }
            let is_nothing = text == Some("") && default.is_none() && !is_rom;
            if let Some(value) = said(&kind, &value).filter(|_| !is_nothing) {
                device.properties.push(Property {
                    name: name.to_owned(),
                    value,
                });
            }
        }
        Ok(device)
    }

    /// The properties of a device model, and what they are when nobody says.
    async fn usual(&self, model: &Model) -> Result<HashMap<String, Option<Json>>, HypervisorError> {
        let ask = json!({"typename": model.name});
        let qmp = self.machine.qmp();
        let known: Vec<Usual> = qmp.execute("device-list-properties", ask).await?;
        let known = known.into_iter();
        Ok(known.map(|one| (one.name, one.default_value)).collect())
    }
}

/// How many of these devices a bus is below.
fn depth(buses: &HashMap<String, String>, bus: &str, below: usize) -> usize {
    if below > buses.len() {
        return below;
    }
    let mut above = buses
        .iter()
        .filter(|(path, _)| bus.starts_with(&format!("{path}/")));
    match above.next() {
        Some((_, bus)) => depth(buses, bus, below + 1),
        None => below,
    }
}

/// A value of a property, unless it means that there is none. A text that no site takes is not told: it may be a path.
fn said(kind: &Kind, value: &Json) -> Option<Value> {
    let value = match value {
        Json::Bool(on) => Value::Switch(*on),
        Json::Number(number) => Value::Number(number.as_u64()?),
        Json::String(text) => Value::Text(text.clone()),
        _ => return None,
    };
    match value {
        Value::Text(_) if !kind.allows(&value) => Some(Value::Text(WITHHELD.into())),
        value => Some(value),
    }
}

/// The model of the processors and their features, as QEMU was told them.
fn processor(line: &CommandLine) -> (Option<String>, Vec<Property>) {
    let told = line.options.iter().rfind(|(option, _)| option == "-cpu");
    let told = told
        .and_then(|(_, text)| text.as_deref())
        .unwrap_or_default();
    let mut parts = told.split(',').filter(|part| !part.is_empty());
    let model = parts.next().map(one_line);
    let mut features: Vec<Property> = Vec::new();
    for part in parts {
        let (name, value) = match (part.strip_prefix('+'), part.strip_prefix('-')) {
            (Some(name), _) => (name, Value::Switch(true)),
            (_, Some(name)) => (name, Value::Switch(false)),
            _ => match part.split_once('=') {
                None => (part, Value::Switch(true)),
                Some((name, value)) => (name, feature(value)),
            },
        };
        features.retain(|known| known.name != name);
        features.push(Property {
            name: name.to_owned(),
            value,
        });
    }
    (model, features)
}

fn feature(text: &str) -> Value {
    let number = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    match (text, number) {
        ("on" | "yes" | "true" | "y", _) => Value::Switch(true),
        ("off" | "no" | "false" | "n", _) => Value::Switch(false),
        (_, Some(number)) => Value::Number(number),
        _ => Value::Text(text.to_owned()),
    }
}

/// A UUID as QEMU writes it; none for zeros.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    let mut uuid = [0; 16];
    for (byte, at) in uuid.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    (uuid != [0; 16]).then_some(uuid)
}
