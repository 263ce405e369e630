//! What libvirt's description of a machine says of its disks.

use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its name.
    pub name: String,
    /// Its UUID, as text.
    pub uuid: String,
    /// Whether QEMU executes it itself, without KVM.
    pub emulated: bool,
    /// Its memory in bytes.
    pub memory: u64,
    /// Its disks, without CD-ROMs and floppies.
    pub disks: Vec<Disk>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// What libvirt calls the device, such as `vda`.
    pub target: String,
    /// What QEMU calls it; only of a machine that runs.
    pub alias: Option<String>,
    /// Whether the machine can write it.
    pub writable: bool,
    /// Where it is.
    pub medium: Medium,
    /// The format of that.
    pub format: String,
    /// Whether the machine waits, or is paused, when the disk cannot be reached; otherwise it sees errors.
    pub waits: bool,
}

/// Where a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A file, or a block device.
    File(PathBuf),
    /// An export of an NBD server at a Unix socket.
    Nbd {
        /// The socket.
        socket: PathBuf,
        /// The export's name.
        export: String,
    },
    /// Elsewhere: the kind, as libvirt calls it.
    Other(String),
}

impl Description {
    /// Reads libvirt's XML.
    pub(super) fn parse(xml: &str) -> Result<Description, String> {
        let document = Document::parse(xml).map_err(|e| format!("its XML: {e}"))?;
        let root = document.root_element();
        let text = |name| child(root, name).and_then(|node| node.text());
        let missing = |name| format!("its XML has no {name}");
        let name = text("name").ok_or_else(|| missing("name"))?;
        let uuid = text("uuid").ok_or_else(|| missing("uuid"))?;
        let devices = child(root, "devices").ok_or_else(|| missing("devices"))?;
        Ok(Description {
            name: name.to_owned(),
            uuid: uuid.to_owned(),
            emulated: root.attribute("type") == Some("qemu"),
            // Of a machine that runs it is in KiB.
            memory: text("memory")
                .and_then(|kib| kib.trim().parse::<u64>().ok())
                .unwrap_or(0)
                .saturating_mul(1024),
            disks: children(devices, "disk").filter_map(disk).collect(),
        })
    }
}

fn disk(node: Node<'_, '_>) -> Option<Disk> {
    if !matches!(node.attribute("device"), None | Some("disk" | "lun")) {
        return None;
    }
    let target = child(node, "target")?.attribute("dev")?;
    let alias = child(node, "alias").and_then(|alias| alias.attribute("name"));
    let driver = child(node, "driver").and_then(|driver| driver.attribute("type"));
    Some(Disk {
        target: target.to_owned(),
        alias: alias.map(str::to_owned),
        writable: child(node, "readonly").is_none(),
        medium: medium(node),
        format: driver.unwrap_or("raw").to_owned(),
        waits: waits(node),
    })
}

fn waits(disk: Node<'_, '_>) -> bool {
    let driver = |name| child(disk, "driver").and_then(|driver| driver.attribute(name));
    let stops = driver("error_policy") == Some("stop")
        && matches!(driver("rerror_policy"), None | Some("stop"));
    let reconnects = child(disk, "source").and_then(|source| child(source, "reconnect"));
    stops || reconnects.is_some_and(|reconnect| reconnect.attribute("delay").is_some())
}

fn medium(disk: Node<'_, '_>) -> Medium {
    let kind = disk.attribute("type").unwrap_or_default();
    let other = || Medium::Other(kind.to_owned());
    let Some(source) = child(disk, "source") else {
        return other();
    };
    // What the machine sees is not what is there.
    let changed = ["encryption", "slices"];
    let changed = changed.map(|name| child(disk, name).or_else(|| child(source, name)));
    if let Some(how) = changed.into_iter().flatten().next() {
        return Medium::Other(format!("{kind} with {}", how.tag_name().name()));
    }
    match kind {
        "file" | "block" => {
            let path = source.attribute("file").or(source.attribute("dev"));
            path.map_or_else(other, |path| Medium::File(path.into()))
        }
        "network" => {
            let socket = child(source, "host").and_then(|host| host.attribute("socket"));
            match (source.attribute("protocol"), socket) {
                (Some("nbd"), Some(socket)) => Medium::Nbd {
                    socket: socket.into(),
                    export: source.attribute("name").unwrap_or_default().to_owned(),
                },
                (protocol, _) => Medium::Other(protocol.unwrap_or(kind).to_owned()),
            }
        }
        _ => other(),
    }
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn children<'a, 'i>(node: Node<'a, 'i>, name: &str) -> impl Iterator<Item = Node<'a, 'i>> {
    node.children()
        .filter(move |child| child.has_tag_name(name))
}

/// The request for layers over these disks of a machine, and over no others.
pub(super) fn snapshot(of: &Description, layers: &[(String, PathBuf)]) -> String {
    let disks: String = of
        .disks
        .iter()
        .map(|disk| {
            let layer = layers.iter().find(|(target, _)| *target == disk.target);
            let target = escaped(&disk.target);
            match layer {
                Some((_, file)) => format!(
                    "<disk name='{target}' snapshot='external'><driver type='qcow2'/><source file='{}'/></disk>",
                    path(file)
                ),
                None => format!("<disk name='{target}' snapshot='no'/>"),
            }
        })
        .collect();
    format!("<domainsnapshot><disks>{disks}</disks></domainsnapshot>")
}

/// A path as text in an attribute.
fn path(path: &Path) -> String {
    escaped(&path.to_string_lossy())
}

/// Text in XML.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<domain type='qemu' id='1'><name>web</name><uuid>6695eb01-f6a4-8304-79aa-97f2502e1930</uuid>
      <memory unit='KiB'>99328</memory><devices>
      <disk type='file' device='disk'><driver name='qemu' type='qcow2' error_policy='stop'/><source file='/d/web.qcow2' index='1'/>
        <backingStore type='file' index='2'><format type='raw'/><source file='/d/base.raw'/><backingStore/></backingStore>
        <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
      <disk type='network' device='disk'><driver name='qemu' type='raw'/>
        <source protocol='nbd' name='disk-1' tls='no'><host transport='unix' socket='/s/.web.nbd'/></source>
        <target dev='vdb' bus='virtio'/></disk>
      <disk type='block' device='disk'><source dev='/dev/vg/seed'/><target dev='vdc'/><readonly/></disk>
      <disk type='network'><source protocol='rbd' name='pool/x'/><target dev='vdd'/></disk>
      <disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk></devices></domain>";

    #[test]
    fn disks_are_found() {
        let found = Description::parse(XML).unwrap();
        assert_eq!(found.memory, 97 << 20);
        assert!(found.emulated);
        let accelerated = XML.replace("type='qemu' id", "type='kvm' id");
        assert!(!Description::parse(&accelerated).unwrap().emulated);
        let media: Vec<_> = found.disks.iter().map(|disk| disk.medium.clone()).collect();
        let nbd = Medium::Nbd {
            socket: "/s/.web.nbd".into(),
            export: "disk-1".into(),
        };
        let file = |path: &str| Medium::File(path.into());
        let expected = [
            file("/d/web.qcow2"),
            nbd,
            file("/dev/vg/seed"),
            Medium::Other("rbd".into()),
        ];
        assert_eq!(media, expected);
        let writable: Vec<_> = found.disks.iter().map(|disk| disk.writable).collect();
        assert_eq!(writable, [true, true, false, true]);
        let waits: Vec<_> = found.disks.iter().map(|disk| disk.waits).collect();
        assert_eq!(waits, [true, false, false, false]);
        assert_eq!(found.disks[0].alias.as_deref(), Some("virtio-disk0"));
        assert_eq!(
            (
                found.disks[0].format.as_str(),
                found.disks[3].format.as_str()
            ),
            ("qcow2", "raw")
        );
    }

    #[test]
    fn a_disk_that_libvirt_encrypts_or_cuts_is_no_plain_file() {
        let file = "<source file='/d/web.qcow2' index='1'/>";
        for (what, disk) in [
            (
                "file with encryption",
                format!("{file}<encryption format='luks'/>"),
            ),
            (
                "file with encryption",
                "<source file='/d'><encryption format='luks'/></source>".into(),
            ),
            (
                "file with slices",
                "<source file='/d'><slices><slice type='storage' offset='1' size='2'/></slices></source>".into(),
            ),
        ] {
            let found = Description::parse(&XML.replace(file, &disk)).unwrap();
            assert_eq!(found.disks[0].medium, Medium::Other(what.into()));
        }
    }

    #[test]
    fn what_is_no_machine_is_an_error() {
        for bad in ["", "<domain", "<domain><name>x</name></domain>"] {
            assert!(Description::parse(bad).is_err(), "{bad}");
        }
        let entities = "<!DOCTYPE d [<!ENTITY a 'b'>]><domain><name>&a;</name></domain>";
        assert!(Description::parse(entities).is_err());
    }

    #[test]
    fn a_layer_is_put_over_what_is_named() {
        let found = Description::parse(XML).unwrap();
        let xml = snapshot(&found, &[("vda".into(), "/o/a'b&c".into())]);
        assert!(xml.contains("<source file='/o/a&apos;b&amp;c'/>"), "{xml}");
        assert_eq!(xml.matches("snapshot='no'").count(), 3, "{xml}");
        assert!(Document::parse(&xml).is_ok());
    }
}
