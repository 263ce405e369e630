//! The disks of a machine, as `query-block` lists them.

use std::path::PathBuf;

use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Bitmap, Machine};
use crate::error::{HypervisorError, one_line};

/// A disk, or a drive with or without a medium.
#[derive(Debug, Clone, PartialEq)]
pub struct Disk {
    /// The device's name: its `id`, or what QEMU calls it.
    pub name: String,
    /// The path of the device among QEMU's objects, for [`Machine::set_disk_node`].
    pub path: Option<String>,
    /// Whether it is a drive whose medium can be changed.
    pub removable: bool,
    /// What is in it: `None` for an empty drive.
    pub medium: Option<Medium>,
}

/// What a disk's bytes are, or a block node's.
#[derive(Debug, Clone, PartialEq)]
pub struct Medium {
    /// The block node, the one that the device uses, for commands about bitmaps and exports.
    pub node: String,
    /// The node's driver: a format, as `raw` or `qcow2`, or a filter.
    pub format: String,
    /// The size that the machine sees, in bytes.
    pub size: u64,
    /// Whether the machine cannot write.
    pub read_only: bool,
    /// Where the bytes are.
    pub data: Data,
    /// The image below it, in the words of its header.
    pub backing: Option<String>,
    /// How many snapshots it contains.
    pub snapshots: usize,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Its dirty bitmaps.
    pub bitmaps: Vec<Bitmap>,
}

/// Where a disk's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// A file or block device, as QEMU was told it: perhaps relative to the directory it was started in.
    File(PathBuf),
    /// An export of an NBD server.
    Nbd(NbdAddress),
    /// Something else, in QEMU's words.
    Other(String),
}

#[derive(Deserialize)]
struct WireDisk {
    device: String,
    qdev: Option<String>,
    removable: bool,
    inserted: Option<WireMedium>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct WireMedium {
    node_name: Option<String>,
    drv: String,
    ro: bool,
    #[serde(default)]
    encrypted: bool,
    image: WireImage,
    #[serde(default)]
    dirty_bitmaps: Vec<Bitmap>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct WireImage {
    filename: String,
    virtual_size: u64,
    backing_filename: Option<String>,
    #[serde(default)]
    snapshots: Vec<Value>,
}

impl Machine {
    /// All disks and drives, in QEMU's order, empty drives and read-only disks included.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn disks(&self) -> Result<Vec<Disk>, HypervisorError> {
        let answer: Value = self.qmp.execute("query-block", json!({})).await?;
        parse_disks(answer).map_err(|reason| HypervisorError::Answer {
            socket: self.socket().to_owned(),
            command: "query-block".into(),
            reason,
        })
    }

    /// All block nodes, those that no disk uses included.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn nodes(&self) -> Result<Vec<Medium>, HypervisorError> {
        let ask = json!({"flat": true});
        let wire: Vec<WireMedium> = self.qmp.execute("query-named-block-nodes", ask).await?;
        Ok(wire.into_iter().map(WireMedium::medium).collect())
    }
}

/// The disks of an answer to `query-block`, or what is wrong with it.
///
/// # Errors
/// A text that says what is missing.
pub fn parse_disks(answer: Value) -> Result<Vec<Disk>, String> {
    let wire = Vec::<WireDisk>::deserialize(answer).map_err(|e| one_line(&e.to_string()))?;
    Ok(wire.into_iter().map(WireDisk::disk).collect())
}

impl WireDisk {
    fn disk(self) -> Disk {
        let name = match (self.device.as_str(), &self.qdev) {
            ("", Some(path)) => device_name(path),
            (device, _) => device,
        };
        Disk {
            name: one_line(name),
            path: self.qdev.as_deref().map(object_path),
            removable: self.removable,
            medium: self.inserted.map(WireMedium::medium),
        }
    }
}

/// Some devices are listed by their `id` only.
fn object_path(device: &str) -> String {
    match device.starts_with('/') {
        true => device.to_owned(),
        false => format!("/machine/peripheral/{device}"),
    }
}

/// `vd1` of `/machine/peripheral/vd1/virtio-backend`.
fn device_name(path: &str) -> &str {
    match path.strip_prefix("/machine/peripheral/") {
        Some(rest) => rest.split('/').next().unwrap_or(rest),
        None => path,
    }
}

impl WireMedium {
    fn medium(self) -> Medium {
        Medium {
            node: self.node_name.unwrap_or_default(),
            format: one_line(&self.drv),
            size: self.image.virtual_size,
            read_only: self.ro,
            data: parse_data(&self.image.filename),
            backing: self.image.backing_filename,
            snapshots: self.image.snapshots.len(),
            encrypted: self.encrypted,
            bitmaps: self.dirty_bitmaps,
        }
    }
}

/// What a file name of QEMU means: a path, a URI, or `json:` with options.
#[must_use]
pub fn parse_data(name: &str) -> Data {
    let other = || Data::Other(one_line(name));
    if let Some(options) = name.strip_prefix("json:") {
        let options = serde_json::from_str::<Value>(options).ok();
        return options
            .as_ref()
            .and_then(from_options)
            .unwrap_or_else(other);
    }
    // As QEMU does it: what is before a colon, and not in a directory, is a protocol.
    let before = name.split('/').next().unwrap_or(name);
    match (before.split_once(':'), name) {
        (_, "") => other(),
        (Some(("file", _)), _) => Data::File(PathBuf::from(&name["file:".len()..])),
        (Some(("nbd" | "nbd+unix" | "nbd+tcp", _)), _) => {
            name.parse().map_or_else(|_| other(), Data::Nbd)
        }
        (Some(_), _) => other(),
        (None, _) => Data::File(PathBuf::from(name)),
    }
}

/// Descends to the driver that has the bytes.
fn from_options(options: &Value) -> Option<Data> {
    let mut at = options;
    while let Some(file) = at.get("file").filter(|file| file.is_object()) {
        at = file;
    }
    let text = |key: &str| at.get(key).and_then(Value::as_str);
    let server = |key: &str| {
        let nested = at.get("server").and_then(|server| server.get(key));
        let found = nested.or_else(|| at.get(format!("server.{key}")))?;
        found.as_str()
    };
    match text("driver")? {
        "file" | "host_device" | "host_cdrom" => Some(Data::File(PathBuf::from(text("filename")?))),
        "nbd" => {
            let socket = match server("type")? {
                "unix" => NbdSocket::Unix(PathBuf::from(server("path")?)),
                "inet" => NbdSocket::Tcp(server("host")?.to_owned(), server("port")?.parse().ok()?),
                _ => return None,
            };
            let export = text("export").unwrap_or_default().to_owned();
            Some(Data::Nbd(NbdAddress { socket, export }))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_and_exports() {
        let file = |path: &str| Data::File(PathBuf::from(path));
        let nbd = |socket, export: &str| {
            Data::Nbd(NbdAddress {
                socket,
                export: export.into(),
            })
        };
        let unix = |socket: &str, export| nbd(NbdSocket::Unix(PathBuf::from(socket)), export);
        let tcp = |host: &str, port, export| nbd(NbdSocket::Tcp(host.into(), port), export);
        let other = |text: &str| Data::Other(text.into());
        for (name, expected) in [
            ("d.raw", file("d.raw")),
            ("/var/a:b.raw", file("/var/a:b.raw")),
            ("./a:b", file("./a:b")),
            ("file:/x", file("/x")),
            (
                "nbd+unix:///ex?socket=/run/n.sock",
                unix("/run/n.sock", "ex"),
            ),
            ("nbd+unix:///?socket=/run/a%20b", unix("/run/a b", "")),
            ("nbd://lyon:10810/web%2ehd", tcp("lyon", 10810, "web.hd")),
            ("nbd://[::1]", tcp("::1", 10809, "")),
            ("nbd://[::1]:7/x", tcp("::1", 7, "x")),
            (
                r#"json:{"driver": "raw", "file": {"driver": "nbd", "export": "e", "server": {"type": "unix", "path": "/s"}}}"#,
                unix("/s", "e"),
            ),
            (
                r#"json:{"driver": "nbd", "server.type": "inet", "server.host": "h", "server.port": "9"}"#,
                tcp("h", 9, ""),
            ),
            (
                r#"json:{"driver": "qcow2", "file": {"driver": "file", "filename": "/x.qcow2"}}"#,
                file("/x.qcow2"),
            ),
            (
                r#"json:{"driver": "null-co"}"#,
                other(r#"json:{"driver": "null-co"}"#),
            ),
            ("json:{", other("json:{")),
            ("nbd:unix:/s:exportname=e", unix("/s", "e")),
            ("nbd/a:b", file("nbd/a:b")),
            ("rbd:pool/image", other("rbd:pool/image")),
            ("nbd+unix:///ex", other("nbd+unix:///ex")),
            (
                "nbd+unix:///%f?socket=/s",
                other("nbd+unix:///%f?socket=/s"),
            ),
            ("nbd://h:99999/", other("nbd://h:99999/")),
            ("", other("")),
        ] {
            assert_eq!(parse_data(name), expected, "{name}");
        }
    }

    #[test]
    fn disks_of_a_real_qemu() {
        let answer = json!([
            {
                "device": "virtio0", "locked": false, "removable": false, "type": "unknown",
                "qdev": "/machine/peripheral-anon/device[0]/virtio-backend",
                "inserted": {
                    "image": {"virtual-size": 4_194_304, "filename": "d.raw", "format": "raw"},
                    "ro": false, "node-name": "#block354", "drv": "raw", "encrypted": false, "file": "d.raw",
                    "dirty-bitmaps": [{
                        "name": "b1", "recording": true, "busy": false, "persistent": false,
                        "granularity": 4096, "count": 8192,
                    }],
                },
            },
            {"device": "", "qdev": "/machine/peripheral/cd/x", "removable": true, "type": "unknown"},
        ]);
        let disks = parse_disks(answer).unwrap();
        let medium = disks[0].medium.as_ref().unwrap();
        assert_eq!((disks[0].name.as_str(), medium.size), ("virtio0", 4 << 20));
        assert_eq!(
            (medium.node.as_str(), medium.bitmaps[0].count),
            ("#block354", 8192)
        );
        assert_eq!((disks[1].name.as_str(), &disks[1].medium), ("cd", &None));
        let path = disks[0].path.as_deref().unwrap();
        assert_eq!(path, "/machine/peripheral-anon/device[0]/virtio-backend");
        assert_eq!(object_path("sd0"), "/machine/peripheral/sd0");
        assert!(
            parse_disks(json!([{"device": 3}]))
                .unwrap_err()
                .contains("expected a string")
        );
    }
}
