//! The device models that a site builds for others, and what may be said of them.
//!
//! The models are those that virtual machines of servers have: what is emulated for old systems only, what passes a device of
//! the host through, and what another process serves is not listed. A property that is not listed stays as QEMU has it.

use super::value::{MAX_TEXT, Value, is_name};

/// What a property may be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// On or off.
    Switch,
    /// `on`, `off` or `auto`.
    Auto,
    /// A number up to this.
    Number(u64),
    /// A network address.
    Mac,
    /// A text that the machine sees, as a serial number.
    Text,
    /// One of these texts.
    One(&'static [&'static str]),
    /// A UUID.
    Uuid,
    /// A switch, a number or a name.
    Feature,
}

impl Kind {
    /// Whether a property may have this value.
    pub(super) fn allows(&self, value: &Value) -> bool {
        match (self, value) {
            (Kind::Switch | Kind::Feature, Value::Switch(_)) => true,
            (Kind::Auto, Value::Text(text)) => ["on", "off", "auto"].contains(&text.as_str()),
            (Kind::Number(max), Value::Number(number)) => number <= max,
            (Kind::Feature, Value::Number(_)) => true,
            (Kind::Feature, Value::Text(text)) => is_name(text),
            (Kind::Mac, Value::Text(text)) => is_mac(text),
            (Kind::Text, Value::Text(text)) => {
                let plain = |c: char| c.is_ascii_alphanumeric() || " ._:+@#-".contains(c);
                text.len() <= MAX_TEXT && text.chars().all(plain)
            }
            (Kind::One(known), Value::Text(text)) => known.contains(&text.as_str()),
            (Kind::Uuid, Value::Text(text)) => {
                let plain = |c: char| c.is_ascii_hexdigit() || c == '-';
                text.len() == 36 && text.chars().all(plain)
            }
            _ => false,
        }
    }
}

fn is_mac(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    let is_byte = |part: &&str| part.len() == 2 && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 6 && parts.iter().all(is_byte)
}

/// What the site puts behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// Nothing.
    Nothing,
    /// A disk.
    Disk,
    /// A disk, or nothing: a drive whose medium can be changed.
    Drive,
    /// A network.
    Network,
    /// A stream of characters, as a serial port's.
    Characters,
    /// Nothing, but it brings memory of its own: a machine has one such at most.
    Display,
}

/// Names and kinds.
pub(super) type Properties = &'static [(&'static str, Kind)];

/// A device model.
#[derive(Debug)]
pub(super) struct Model {
    /// QEMU's name of it.
    pub(super) name: &'static str,
    /// What is behind it.
    pub(super) takes: Takes,
    /// What may be said of it.
    pub(super) properties: &'static [Properties],
}

impl Model {
    /// All that may be said of it.
    pub(super) fn all(&self) -> Vec<(&'static str, Kind)> {
        let properties = self.properties.iter();
        properties.flat_map(|group| group.iter().copied()).collect()
    }
}

/// The model of this name.
pub(super) fn find(name: &str) -> Option<&'static Model> {
    MODELS.iter().find(|model| model.name == name)
}

/// Devices on the PCI bus that machines of the types that are built have anyway.
pub(super) const IMPLIED: [&str; 9] = [
    "i440FX",
    "PIIX3",
    "piix3-ide",
    "PIIX4_PM",
    "mch",
    "ICH9-LPC",
    "ich9-ahci",
    "ICH9-SMB",
    "piix4-usb-uhci",
];

/// Controllers that a machine has by its setting `usb`, when nobody named them.
pub(super) fn is_of_setting(model: &str) -> bool {
    model == "piix3-usb-uhci" || model.starts_with("ich9-usb-")
}

const U8: Kind = Kind::Number(u8::MAX as u64);
const U16: Kind = Kind::Number(u16::MAX as u64);
const U32: Kind = Kind::Number(u32::MAX as u64);
const SIZE: Kind = Kind::Number(1 << 40);
const ON: Kind = Kind::Switch;

/// What may be said of processors; by any name, for a processor has hundreds of features.
pub(super) const FEATURE: Kind = Kind::Feature;

/// What may be said of the machine.
pub(super) const SETTINGS: Properties = &[
    ("acpi", Kind::Auto),
    ("graphics", ON),
    ("hpet", ON),
    ("i8042", ON),
    ("max-ram-below-4g", SIZE),
    ("pit", Kind::Auto),
    ("sata", ON),
    ("smbus", ON),
    ("smm", Kind::Auto),
    ("usb", ON),
    ("vmport", Kind::Auto),
];

/// Of every PCI device.
const PCI: Properties = &[
    ("acpi-index", Kind::Number(16383)),
    ("addr", U8),
    ("multifunction", ON),
    ("rombar", U32),
    // Only that it has none: QEMU's own are found by their model.
    ("romfile", Kind::One(&[""])),
];

/// Of every virtio device.
const VIRTIO: Properties = &[
    ("any_layout", ON),
    ("ats", ON),
    ("disable-legacy", Kind::Auto),
    ("disable-modern", ON),
    ("event_idx", ON),
    ("indirect_desc", ON),
    ("ioeventfd", ON),
    ("iommu_platform", ON),
    ("notify_on_empty", ON),
    ("packed", ON),
    ("page-per-vq", ON),
    ("queue_reset", ON),
    ("vectors", U32),
];

const BLOCK: Properties = &[
    ("bootindex", U32),
    ("discard_granularity", U32),
    ("logical_block_size", Kind::Number(2 << 20)),
    ("min_io_size", U32),
    ("opt_io_size", U32),
    ("physical_block_size", Kind::Number(2 << 20)),
    ("serial", Kind::Text),
    ("share-rw", ON),
    ("write-cache", Kind::Auto),
];

const ERRORS: Properties = &[
    ("rerror", Kind::One(&["auto", "ignore", "stop", "report"])),
    (
        "werror",
        Kind::One(&["auto", "ignore", "stop", "report", "enospc"]),
    ),
];

const GEOMETRY: Properties = &[("cyls", U32), ("heads", U32), ("secs", U32)];

const VIRTIO_BLK: Properties = &[
    ("config-wce", ON),
    ("discard", ON),
    ("max-discard-sectors", U32),
    ("max-write-zeroes-sectors", U32),
    ("num-queues", U16),
    ("queue-size", U16),
    ("report-discard-granularity", ON),
    ("request-merging", ON),
    ("seg-max-adjust", ON),
    ("write-zeroes", ON),
];

const SCSI: Properties = &[
    ("channel", U32),
    ("device_id", Kind::Text),
    ("lun", U32),
    ("port_index", U16),
    ("port_wwn", Kind::Number(u64::MAX)),
    ("product", Kind::Text),
    ("scsi-id", U32),
    ("scsi_version", U32),
    ("vendor", Kind::Text),
    ("ver", Kind::Text),
    ("wwn", Kind::Number(u64::MAX)),
];

const SCSI_HD: Properties = &[
    ("dpofua", ON),
    ("max_io_size", SIZE),
    ("max_unmap_size", SIZE),
    ("removable", ON),
    ("rotation_rate", U16),
];

const VIRTIO_SCSI: Properties = &[
    ("cmd_per_lun", U32),
    ("hotplug", ON),
    ("max_sectors", U32),
    ("num_queues", U32),
    ("param_change", ON),
    ("seg_max_adjust", ON),
    ("virtqueue_size", U32),
];

const IDE: Properties = &[
    ("model", Kind::Text),
    ("unit", U32),
    ("ver", Kind::Text),
    ("wwn", Kind::Number(u64::MAX)),
];

const IDE_HD: Properties = &[
    (
        "bios-chs-trans",
        Kind::One(&["auto", "none", "lba", "large", "rechs"]),
    ),
    ("rotation_rate", U16),
];

const NETWORK: Properties = &[("bootindex", U32), ("mac", Kind::Mac)];

const VIRTIO_NET: Properties = &[
    ("csum", ON),
    ("ctrl_guest_offloads", ON),
    ("ctrl_mac_addr", ON),
    ("ctrl_rx", ON),
    ("ctrl_rx_extra", ON),
    ("ctrl_vlan", ON),
    ("ctrl_vq", ON),
    ("duplex", Kind::One(&["full", "half", "unknown"])),
    ("gso", ON),
    ("guest_announce", ON),
    ("guest_csum", ON),
    ("guest_ecn", ON),
    ("guest_rsc_ext", ON),
    ("guest_tso4", ON),
    ("guest_tso6", ON),
    ("guest_ufo", ON),
    ("guest_uso4", ON),
    ("guest_uso6", ON),
    ("hash", ON),
    ("host_ecn", ON),
    ("host_mtu", U16),
    ("host_tso4", ON),
    ("host_tso6", ON),
    ("host_ufo", ON),
    ("host_uso", ON),
    // More than one queue needs a network with more than one.
    ("mq", Kind::One(&[])),
    ("mrg_rxbuf", ON),
    ("rss", ON),
    ("rx_queue_size", U16),
    ("speed", U32),
    ("status", ON),
    ("tx_queue_size", U16),
];

const E1000: Properties = &[
    ("autonegotiation", ON),
    ("extra_mac_registers", ON),
    ("init-vet", ON),
    ("migrate_tso_props", ON),
    ("mitigation", ON),
];

const E1000E: Properties = &[
    ("disable_vnet_hdr", ON),
    ("init-vet", ON),
    ("migrate-timadj", ON),
    ("subsys", U16),
    ("subsys_ven", U16),
];

const BALLOON: Properties = &[
    ("deflate-on-oom", ON),
    ("free-page-hint", ON),
    ("free-page-reporting", ON),
    ("guest-stats-polling-interval", U32),
    ("page-poison", ON),
];

const RNG: Properties = &[("max-bytes", SIZE), ("period", U32)];

const SERIAL_BUS: Properties = &[("emergency-write", ON), ("max_ports", Kind::Number(511))];

const PORT: Properties = &[("name", Kind::Text), ("nr", Kind::Number(511))];

const GRAPHICS: Properties = &[
    ("edid", ON),
    ("max_outputs", Kind::Number(16)),
    ("refresh_rate", U32),
    ("xmax", U32),
    ("xres", U32),
    ("ymax", U32),
    ("yres", U32),
];

const VIDEO: Properties = &[
    ("big-endian-framebuffer", ON),
    ("global-vmstate", ON),
    ("mmio", ON),
    ("qemu-extended-regs", ON),
    ("vgamem", SMALL),
    ("vgamem_mb", Kind::Number(64)),
];

/// Of memory that a display brings: not to become a way around a limit.
const SMALL: Kind = Kind::Number(64 << 20);

const MAX_HOSTMEM: Properties = &[("max_hostmem", Kind::Number(256 << 20))];

const ISA_PORT: Properties = &[("index", U8), ("iobase", U16), ("irq", Kind::Number(15))];

const FLOPPY: Properties = &[
    (
        "drive-type",
        Kind::One(&["144", "288", "120", "none", "auto"]),
    ),
    ("unit", Kind::Number(1)),
];

const BRIDGE: Properties = &[("chassis_nr", U8), ("msi", Kind::Auto), ("shpc", ON)];

const ROOT_PORT: Properties = &[
    ("chassis", U8),
    ("hotplug", ON),
    ("port", U8),
    ("slot", U16),
];

const XHCI: Properties = &[
    ("intrs", Kind::Number(16)),
    ("msi", Kind::Auto),
    ("msix", Kind::Auto),
    ("p2", Kind::Number(15)),
    ("p3", Kind::Number(15)),
    ("slots", Kind::Number(64)),
    ("streams", ON),
];

const UHCI: Properties = &[("firstport", Kind::Number(15)), ("masterbus", Kind::Text)];

const USB: Properties = &[
    ("msos-desc", ON),
    ("port", Kind::Text),
    ("serial", Kind::Text),
    ("usb_version", Kind::Number(3)),
];

const INPUT: Properties = &[("serial", Kind::Text), ("wheel-axis", ON)];

const WATCHDOG: Properties = &[];

const ISA_IOPORT: Properties = &[("events", U8), ("ioport", U16)];

const VMGENID: Properties = &[("guid", Kind::Uuid)];

macro_rules! models {
    ($($name:literal $takes:ident [$($group:ident)*];)*) => {
        &[$(Model { name: $name, takes: Takes::$takes, properties: &[$($group),*] }),*]
    };
}

const MODELS: &[Model] = models! {
    "virtio-blk-pci" Disk [PCI VIRTIO BLOCK ERRORS GEOMETRY VIRTIO_BLK];
    "virtio-scsi-pci" Nothing [PCI VIRTIO VIRTIO_SCSI];
    "scsi-hd" Disk [BLOCK ERRORS GEOMETRY SCSI SCSI_HD];
    "scsi-cd" Drive [BLOCK ERRORS SCSI];
    "ide-hd" Disk [BLOCK ERRORS GEOMETRY IDE IDE_HD];
    "ide-cd" Drive [BLOCK ERRORS IDE];
    "ich9-ahci" Nothing [PCI];
    "floppy" Drive [FLOPPY];
    "virtio-net-pci" Network [PCI VIRTIO NETWORK VIRTIO_NET];
    "e1000" Network [PCI NETWORK E1000];
    "e1000e" Network [PCI NETWORK E1000E];
    "virtio-balloon-pci" Nothing [PCI VIRTIO BALLOON];
    "virtio-rng-pci" Nothing [PCI VIRTIO RNG];
    "virtio-serial-pci" Nothing [PCI VIRTIO SERIAL_BUS];
    "virtconsole" Characters [PORT];
    "virtserialport" Characters [PORT];
    "virtio-keyboard-pci" Nothing [PCI VIRTIO INPUT];
    "virtio-mouse-pci" Nothing [PCI VIRTIO INPUT];
    "virtio-tablet-pci" Nothing [PCI VIRTIO INPUT];
    "virtio-vga" Display [PCI VIRTIO GRAPHICS VIDEO MAX_HOSTMEM];
    "virtio-gpu-pci" Display [PCI VIRTIO GRAPHICS MAX_HOSTMEM];
    "VGA" Display [PCI GRAPHICS VIDEO];
    "bochs-display" Display [PCI GRAPHICS VIDEO];
    "isa-serial" Characters [ISA_PORT];
    "isa-parallel" Characters [ISA_PORT];
    "pcie-root-port" Nothing [PCI ROOT_PORT];
    "pcie-pci-bridge" Nothing [PCI BRIDGE];
    "pci-bridge" Nothing [PCI BRIDGE];
    "qemu-xhci" Nothing [PCI XHCI];
    "piix3-usb-uhci" Nothing [PCI UHCI];
    "usb-tablet" Nothing [USB];
    "usb-mouse" Nothing [USB];
    "usb-kbd" Nothing [USB];
    "i6300esb" Nothing [PCI WATCHDOG];
    "pvpanic" Nothing [ISA_IOPORT];
    "vmgenid" Nothing [VMGENID];
};

/// All of them.
#[cfg(test)]
pub(super) fn every() -> &'static [Model] {
    MODELS
}
