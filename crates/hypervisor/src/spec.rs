//! What a machine is made of, as another site is told it: typed, bounded, without paths, options and commands.
//!
//! [`Spec::read`] asks a running QEMU. [`build`] makes the command line of a QEMU that can receive the machine, out of device
//! models and properties that a table in this program allows. A spec comes from another site and may say anything: only
//! what passes [`Spec::check`] is built.

mod build;
mod models;
mod options;
mod read;
mod value;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

pub use self::build::{Built, Card, Kernel, audit, build, disk_node};
use self::models::{Kind, Model, Takes};
use self::value::is_name;
pub use self::value::{MAX_TEXT, Value};
use crate::error::one_line;

/// Upper bound on the devices of a machine.
pub const MAX_DEVICES: usize = 128;

/// Upper bound on what is said of one device, or of the processors.
pub const MAX_PROPERTIES: usize = 128;

/// Upper bound on disks.
pub const MAX_DISKS: usize = 32;

/// Upper bound on slots for memory.
const MAX_SLOTS: u32 = 256;

/// Upper bound on processors, whatever a site allows.
const MAX_CPUS: u32 = 4096;

/// Machine types of which a QEMU is built: these, with a version.
const MACHINES: [&str; 2] = ["pc-i440fx-", "pc-q35-"];

/// The name of a machine's memory where it was given none.
const USUAL_MEMORY: &str = "pc.ram";

/// A machine, as another site is told it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Its versioned type, as `pc-q35-7.2`.
    pub machine: String,
    /// Properties of the machine that are not as usual.
    pub settings: Vec<Property>,
    /// What executes it.
    pub accelerator: Accelerator,
    /// The model of its processors, as `qemu64`.
    pub cpu: String,
    /// Their features that are not those of the model.
    pub features: Vec<Property>,
    /// How many processors, and how they are arranged.
    pub processors: Processors,
    /// Its memory.
    pub memory: Memory,
    /// Its UUID, if it has one.
    pub uuid: Option<[u8; 16]>,
    /// In which order it tries what it can boot from, in QEMU's letters; empty: as usual.
    pub boot_order: String,
    /// Whether it was booted from a kernel that is a file of its host.
    pub kernel: bool,
    /// The sizes in bytes of its writable disks, in the order in which they move.
    pub disks: Vec<u64>,
    /// Its devices, but for those that every machine of its type has; each after the one on whose bus it is.
    pub devices: Vec<Device>,
}

/// What executes a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Accelerator {
    /// QEMU itself.
    Tcg,
    /// The kernel.
    Kvm,
}

/// The processors of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processors {
    /// Those that it has.
    pub present: u32,
    /// Those that it can have.
    pub max: u32,
    /// Sockets.
    pub sockets: u32,
    /// Dies in each socket.
    pub dies: u32,
    /// Cores in each die.
    pub cores: u32,
    /// Threads of each core.
    pub threads: u32,
}

/// The memory of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// What QEMU calls it, as `pc.ram`.
    pub name: String,
    /// How much there is, in bytes.
    pub bytes: u64,
    /// How much there can be, in bytes.
    pub max_bytes: u64,
    /// In how many slots more can be added.
    pub slots: u32,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// QEMU's name of its model, as `virtio-blk-pci`.
    pub model: String,
    /// Its name, if it has one.
    pub id: Option<String>,
    /// The bus that it is on, if not the only one.
    pub bus: Option<String>,
    /// Its properties that are not as usual.
    pub properties: Vec<Property>,
    /// What is behind it.
    pub behind: Behind,
}

/// What is behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Behind {
    /// Nothing, or what the site has for devices of its model: a network, a console.
    Usual,
    /// A disk that moves, by its place among them.
    Disk(u32),
    /// A medium that does not move, as a CD.
    Fixed,
}

/// A property.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Property {
    /// QEMU's name of it.
    pub name: String,
    /// Its value.
    pub value: Value,
}

impl Spec {
    /// Checks that a QEMU for this machine can be built at all, whatever it may cost.
    ///
    /// # Errors
    /// A text that says what of it cannot be built, and follows the machine's name.
    pub fn check(&self) -> Result<(), String> {
        let versioned = MACHINES.iter().find_map(|kind| {
            let version = self.machine.strip_prefix(kind)?;
            (!version.is_empty()).then_some(version)
        });
        if !versioned.is_some_and(is_name) {
            return Err(format!(
                "is of the type {}: only pc-i440fx and pc-q35 with their version are",
                shown(&self.machine)
            ));
        }
        check_properties(&self.settings, "the machine", |name| {
            find(&[models::SETTINGS], name)
        })?;
        // QEMU takes this one for a question.
        if !is_name(&self.cpu) || self.cpu == "help" {
            return Err(format!("has processors called {}", shown(&self.cpu)));
        }
        check_properties(&self.features, "the processors", |name| {
            is_name(name).then_some(&models::FEATURE)
        })?;
        self.processors.check()?;
        self.memory.check()?;
        let is_order = |c: char| matches!(c, 'a'..='p');
        if self.boot_order.len() > 16 || !self.boot_order.chars().all(is_order) {
            return Err(format!("has the boot order {}", shown(&self.boot_order)));
        }
        self.check_devices()
    }

    fn check_devices(&self) -> Result<(), String> {
        if self.devices.len() > MAX_DEVICES || self.disks.len() > MAX_DISKS {
            return Err(format!(
                "has {} devices and {} disks: at most {MAX_DEVICES} and {MAX_DISKS} are",
                self.devices.len(),
                self.disks.len()
            ));
        }
        let mut ids = HashSet::new();
        let mut disks = HashSet::new();
        for device in &self.devices {
            let model = device.check()?;
            if let Some(id) = &device.id
                && !ids.insert(id)
            {
                return Err(format!("has two devices called {}", shown(id)));
            }
            match device.behind {
                Behind::Disk(disk) if !matches!(model.takes, Takes::Disk | Takes::Drive) => {
                    return Err(format!("has disk {disk} on a {}", model.name));
                }
                Behind::Disk(disk) if disk as usize >= self.disks.len() || !disks.insert(disk) => {
                    return Err(format!("has no disk {disk}, or has it twice"));
                }
                Behind::Usual if model.takes == Takes::Disk => {
                    return Err(format!("has a {} without a disk", model.name));
                }
                Behind::Fixed => {
                    return Err(format!(
                        "has a medium that does not move in its {}{}: eject it first",
                        model.name,
                        device.named()
                    ));
                }
                Behind::Disk(_) | Behind::Usual => {}
            }
        }
        // Their memory is not part of the machine's, which the site limits.
        if self.with(Takes::Display) > 1 {
            return Err("has several displays: one is allowed".into());
        }
        match (0..).zip(&self.disks).find(|(n, _)| !disks.contains(n)) {
            Some((n, _)) => Err(format!(
                "has disk {n} on no device of those that are listed"
            )),
            None => Ok(()),
        }
    }

    /// How many network cards it has.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.with(Takes::Network)
    }

    /// How many devices it has that take this.
    fn with(&self, takes: Takes) -> usize {
        let models = self.devices.iter().filter_map(Device::listed);
        models.filter(|model| model.takes == takes).count()
    }
}

impl Processors {
    fn check(&self) -> Result<(), String> {
        let parts = [self.sockets, self.dies, self.cores, self.threads];
        let product = parts
            .iter()
            .try_fold(1u32, |product, part| product.checked_mul(*part));
        let fits = product == Some(self.max) && (1..=self.max).contains(&self.present);
        match fits && self.max <= MAX_CPUS {
            true => Ok(()),
            false => Err(format!(
                "has {} of {} processors in an arrangement that is none",
                self.present, self.max
            )),
        }
    }
}

impl Memory {
    fn check(&self) -> Result<(), String> {
        let is_right = self.bytes > 0 && self.bytes <= self.max_bytes && self.slots <= MAX_SLOTS;
        if !is_right || !is_id(&self.name) {
            return Err(format!(
                "has {} bytes of memory, called {}, of {} in {} slots: that is none",
                self.bytes,
                shown(&self.name),
                self.max_bytes,
                self.slots
            ));
        }
        Ok(())
    }
}

impl Device {
    fn listed(&self) -> Option<&'static Model> {
        models::find(&self.model)
    }

    fn named(&self) -> String {
        self.id
            .as_ref()
            .map(|id| format!(" {}", shown(id)))
            .unwrap_or_default()
    }

    fn check(&self) -> Result<&'static Model, String> {
        let Some(model) = self.listed() else {
            return Err(format!(
                "has a device{} of the model {}, which is not on the list",
                self.named(),
                shown(&self.model)
            ));
        };
        if let Some(id) = self.id.as_ref().filter(|id| !is_id(id)) {
            return Err(format!("has a device called {}", shown(id)));
        }
        if let Some(bus) = self.bus.as_ref().filter(|bus| !is_id(bus)) {
            return Err(format!("has a device on a bus called {}", shown(bus)));
        }
        let of = format!("its {}{}", model.name, self.named());
        check_properties(&self.properties, &of, |name| find(model.properties, name))?;
        Ok(model)
    }
}

fn find(properties: &'static [models::Properties], name: &str) -> Option<&'static Kind> {
    let mut known = properties.iter().copied().flatten();
    known
        .find(|(known, _)| *known == name)
        .map(|(_, kind)| kind)
}

fn check_properties(
    properties: &[Property],
    of: &str,
    kind: impl Fn(&str) -> Option<&'static Kind>,
) -> Result<(), String> {
    if properties.len() > MAX_PROPERTIES {
        return Err(format!("says too much of {of}"));
    }
    let mut seen = HashSet::new();
    for Property { name, value } in properties {
        let Some(kind) = kind(name) else {
            return Err(format!(
                "has a property {} of {of} that is not on the list",
                shown(name)
            ));
        };
        if !kind.allows(value) || !seen.insert(name) {
            return Err(format!(
                "has the value {} of the property {name} of {of}, which is not allowed",
                value.shown()
            ));
        }
    }
    Ok(())
}

impl Value {
    fn shown(&self) -> String {
        match self {
            Value::Switch(on) => if *on { "on" } else { "off" }.to_owned(),
            Value::Number(number) => number.to_string(),
            Value::Text(text) => shown(text),
        }
    }
}

/// A text of another site, for a message.
fn shown(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_TEXT);
    format!("{:?}", one_line(&text[..end]))
}

/// Whether a text is a name that QEMU takes for a device, a bus or an object.
fn is_id(text: &str) -> bool {
    is_name(text) && text.starts_with(|c: char| c.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests;
