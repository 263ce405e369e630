//! The operating system in a file system: its name, its packages.

use super::bounded::{Bounded, Stop};
use super::ext4::Ext4;

/// Upper bound on the packages of a system.
pub const MAX_PACKAGES: usize = 50_000;

/// Upper bound on the length of a name or a version, in bytes.
const MAX_TEXT: usize = 128;

/// The largest os-release and hostname files that are read.
const MAX_RELEASE_BYTES: u64 = 64 << 10;

/// The largest list of packages that is read.
const MAX_LIST_BYTES: u64 = 24 << 20;

/// An installed package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// An operating system, as its own files describe it. Texts have no control characters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct System {
    /// Its identifier, as `debian`.
    pub id: String,
    /// Its version's identifier, as `12`; empty when it has none.
    pub version: String,
    /// Its name for people, as `Debian GNU/Linux 12 (bookworm)`.
    pub name: String,
    /// Its host name; empty when it has none.
    pub host: String,
    /// The installed packages, sorted; of dpkg and apk only.
    pub packages: Vec<Package>,
}

/// The operating system in this file system; `None` when it has none.
pub(super) fn of(disk: &mut Bounded<'_>, fs: &Ext4) -> Option<System> {
    let release = ["/etc/os-release", "/usr/lib/os-release"];
    let read = |disk: &mut Bounded<'_>, path: &str, max| fs.file(disk, path, max).ok().flatten();
    let release = release
        .iter()
        .find_map(|path| read(disk, path, MAX_RELEASE_BYTES))?;
    let mut system = parse_release(&release);
    if system.id.is_empty() && system.name.is_empty() {
        return None;
    }
    if let Some(host) = read(disk, "/etc/hostname", MAX_RELEASE_BYTES) {
        let host = String::from_utf8_lossy(&host);
        system.host = text(host.lines().next().unwrap_or_default());
    }
    system.packages = packages(disk, fs).unwrap_or_default();
    Some(system)
}

fn packages(disk: &mut Bounded<'_>, fs: &Ext4) -> Result<Vec<Package>, Stop> {
    if let Some(list) = fs.file(disk, "/var/lib/dpkg/status", MAX_LIST_BYTES)? {
        return Ok(parse_dpkg(&list));
    }
    let list = fs.file(disk, "/lib/apk/db/installed", MAX_LIST_BYTES)?;
    Ok(list.map_or_else(Vec::new, |list| parse_apk(&list)))
}

/// What is shown and compared of a text from a guest.
fn text(raw: &str) -> String {
    let clean = raw.chars().filter(|c| !c.is_control());
    let mut out = String::new();
    for c in clean {
        if out.len() + c.len_utf8() > MAX_TEXT {
            break;
        }
        out.push(c);
    }
    out.trim().into()
}

/// Parses an os-release file.
pub(super) fn parse_release(bytes: &[u8]) -> System {
    let (mut system, mut short) = (System::default(), String::new());
    for line in String::from_utf8_lossy(bytes).lines() {
        let Some((key, value)) = line.trim().split_once('=') else {
            continue;
        };
        let value = value.trim();
        let unquoted = ['"', '\''].iter().find_map(|quote| {
            let inner = value.strip_prefix(*quote)?;
            inner.strip_suffix(*quote)
        });
        let value = text(&unquoted.unwrap_or(value).replace('\\', ""));
        match key {
            "ID" => system.id = value,
            "VERSION_ID" => system.version = value,
            "PRETTY_NAME" => system.name = value,
            "NAME" => short = value,
            _ => {}
        }
    }
    if system.name.is_empty() {
        let version = system.version.clone();
        system.name = format!("{short} {version}").trim().into();
    }
    system
}

/// Parses dpkg's status file: paragraphs of fields.
pub(super) fn parse_dpkg(bytes: &[u8]) -> Vec<Package> {
    let mut found = Vec::new();
    let (mut name, mut version, mut installed) = (String::new(), String::new(), false);
    for line in bytes.split(|b| *b == b'\n').chain([&b""[..]]) {
        if line.is_empty() {
            let package = Package {
                name: std::mem::take(&mut name),
                version: std::mem::take(&mut version),
            };
            let whole = std::mem::take(&mut installed) && !package.name.is_empty();
            if whole && found.len() < MAX_PACKAGES {
                found.push(package);
            }
            continue;
        }
        let field = |key: &str| line.strip_prefix(key.as_bytes());
        let value = |value: &[u8]| text(&String::from_utf8_lossy(value));
        if let Some(rest) = field("Package:") {
            name = value(rest);
        } else if let Some(rest) = field("Version:") {
            version = value(rest);
        } else if let Some(rest) = field("Status:") {
            installed = rest.trim_ascii().ends_with(b" installed");
        }
    }
    sorted(found)
}

/// Parses apk's database: paragraphs of lines that begin with a letter and a colon.
pub(super) fn parse_apk(bytes: &[u8]) -> Vec<Package> {
    let mut found = Vec::new();
    let mut name = String::new();
    for line in bytes.split(|b| *b == b'\n') {
        let value = |value: &[u8]| text(&String::from_utf8_lossy(value));
        if let Some(rest) = line.strip_prefix(b"P:") {
            name = value(rest);
        } else if let Some(rest) = line.strip_prefix(b"V:")
            && !name.is_empty()
            && found.len() < MAX_PACKAGES
        {
            found.push(Package {
                name: std::mem::take(&mut name),
                version: value(rest),
            });
        } else if line.is_empty() {
            name.clear();
        }
    }
    sorted(found)
}

fn sorted(mut packages: Vec<Package>) -> Vec<Package> {
    packages.sort();
    packages.dedup();
    packages
}
