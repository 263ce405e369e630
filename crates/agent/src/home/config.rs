//! The configuration file `config.toml`, in which every setting is optional.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_core::ImageName;
use drover_device::backend::chunk_store::StoreAddress;
use drover_hypervisor::Place;
use drover_hypervisor::libvirt::Uri;
use drover_hypervisor::spec::{Accelerator, Card};
use drover_net::DEFAULT_DOMAIN;
use drover_store::CatalogUrl;
use drover_store::nodes::{DEFAULT_TERM, MAX_TERM, MIN_TERM};
use serde::{Deserialize, Deserializer};

use super::qemu::Files;
use crate::error::{Context, Error, Result, bail, msg};
use crate::text;

/// Upper bound on the size of the configuration file.
const MAX_BYTES: u64 = 1 << 20;

/// Default listen address.
pub const DEFAULT_LISTEN: &str = "0.0.0.0:7377";

/// Default for how long unfinished transfers are kept.
const KEEP_UNFINISHED: Duration = Duration::from_secs(7 * 24 * 3600);

/// Default permissions of delivered images.
const IMAGE_MODE: u32 = 0o600;

/// The settings of `config.toml`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The name this site announces to others; the host name by default.
    pub name: Option<String>,
    /// Listen address of `serve`.
    #[serde(default, deserialize_with = "address")]
    pub listen: Option<SocketAddr>,
    /// Addresses to put into tickets, when they differ from those the host has itself (NAT).
    #[serde(default)]
    pub advertise: Vec<String>,
    /// Directory for delivered images; relative to the home.
    pub images: Option<PathBuf>,
    /// The PostgreSQL database that has the catalog, in the place of a file in the home.
    #[serde(default, deserialize_with = "catalog")]
    pub catalog: Option<CatalogUrl>,
    /// The name of this node, where several share a site.
    #[serde(default, deserialize_with = "node")]
    pub node: Option<String>,
    /// How long the other nodes wait for this one before they take over from it, as in `"30s"`.
    #[serde(default, deserialize_with = "node_term")]
    node_term: Option<Duration>,
    /// Upper bound on the bytes per second that `send` puts on the wire, as in `"20M"`.
    #[serde(default, deserialize_with = "rate")]
    pub limit: Option<u64>,
    /// The peer used as teleporter instead of this site's own matcher.
    pub teleporter: Option<String>,
    /// Listen address for Prometheus scrapes over HTTP.
    #[serde(default, deserialize_with = "address")]
    pub metrics_listen: Option<SocketAddr>,
    /// Space to keep free on the images' file system, as in `"1GiB"`.
    #[serde(default, deserialize_with = "size")]
    pub reserve: Option<u64>,
    /// Upper bound on the data of the sequence cache, as in `"128GiB"`.
    #[serde(default, deserialize_with = "size")]
    pub sequence_data: Option<u64>,
    /// Upper bound on concurrent incoming sessions.
    pub max_sessions: Option<usize>,
    /// Permissions of delivered images, as in `"0640"`.
    #[serde(default, deserialize_with = "mode")]
    image_mode: Option<u32>,
    /// The longest that a mount without a connection keeps its write lease, as in `"24h"`.
    #[serde(default, deserialize_with = "term")]
    pub lease: Option<Duration>,
    /// How long unfinished transfers are kept, as in `"7d"`, or `"forever"`.
    #[serde(default, deserialize_with = "age")]
    keep_unfinished: Option<Age>,
    /// Whether machines that leave note in their qcow2 files which state of the disks these have.
    #[serde(default)]
    pub mark_files: bool,
    /// Machines that may be migrated to this site, by their names here.
    #[serde(default, deserialize_with = "machines")]
    pub machines: BTreeMap<String, MachineConfig>,
    /// Disks in stores that this site serves, by their names here.
    #[serde(default, deserialize_with = "disks")]
    pub disks: BTreeMap<ImageName, DiskConfig>,
}

/// A disk in a store that this site serves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskConfig {
    /// Where it is.
    pub store: StoreAddress,
    /// Nobody writes it through this site.
    #[serde(default)]
    pub read_only: bool,
}

/// A machine that may be migrated to this site.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MachineConfig {
    /// The QMP socket of the QEMU that waits for it.
    #[serde(default)]
    pub incoming: Option<PathBuf>,
    /// The libvirt that has it, in the place of `incoming`: as `qemu:///system`.
    #[serde(default, deserialize_with = "libvirt")]
    pub libvirt: Option<Uri>,
    /// In the place of both: drover builds that QEMU, as the other site describes the machine.
    #[serde(default)]
    pub build: Option<BuildConfig>,
    /// The command that starts that QEMU, unless it runs.
    #[serde(default)]
    pub start: Vec<String>,
    /// The domain whose peers may migrate it here.
    #[serde(default = "default_domain")]
    pub domain: String,
}

/// What a machine may have whose QEMU is built here.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BuildConfig {
    /// The most memory, as in `"4GiB"`.
    #[serde(deserialize_with = "bytes")]
    pub memory: u64,
    /// The most processors.
    pub cpus: u32,
    /// What executes it. QEMU itself (`"tcg"`) is not made to confine a hostile machine.
    #[serde(default = "default_accelerator", deserialize_with = "accelerator")]
    pub accelerator: Accelerator,
    /// What its network cards are connected to, in their order.
    #[serde(default, deserialize_with = "network")]
    pub network: Vec<Card>,
    /// The user that QEMU runs as; needed where the site runs as root.
    pub user: Option<String>,
    /// The group that QEMU runs as, where that is not the user's: for `/dev/kvm`.
    pub group: Option<String>,
    /// QEMU's program.
    #[serde(default = "default_program")]
    pub program: PathBuf,
    /// The kernel that it boots, if it boots none from its disks.
    pub kernel: Option<PathBuf>,
    /// The first file system of that kernel.
    pub initrd: Option<PathBuf>,
    /// The command line of that kernel.
    #[serde(default)]
    pub append: String,
}

fn default_accelerator() -> Accelerator {
    Accelerator::Kvm
}

fn accelerator<'de, D: Deserializer<'de>>(d: D) -> Result<Accelerator, D::Error> {
    match String::deserialize(d)?.as_str() {
        "kvm" => Ok(Accelerator::Kvm),
        "tcg" => Ok(Accelerator::Tcg),
        word => Err(serde::de::Error::custom(format!(
            "{word:?} is no accelerator: use \"kvm\" or \"tcg\""
        ))),
    }
}

fn default_program() -> PathBuf {
    "/usr/bin/qemu-system-x86_64".into()
}

impl MachineConfig {
    /// Where its hypervisor is asked, by the machine's name.
    pub fn hypervisor(&self, name: &str) -> Place {
        match (&self.libvirt, &self.incoming) {
            (Some(uri), _) => Place::Libvirt(uri.clone(), name.to_owned()),
            (None, socket) => Place::Qmp(socket.clone().unwrap_or_default()),
        }
    }
}

fn default_domain() -> String {
    DEFAULT_DOMAIN.to_owned()
}

/// Settings given when a home is created.
#[derive(Debug, Clone, Default)]
pub struct Chosen {
    /// [`Config::name`].
    pub name: Option<String>,
    /// [`Config::listen`].
    pub listen: Option<SocketAddr>,
    /// [`Config::images`]; relative to the working directory.
    pub images: Option<PathBuf>,
}

impl Chosen {
    /// Whether any setting was given.
    pub fn is_any(&self) -> bool {
        self.name.is_some() || self.listen.is_some() || self.images.is_some()
    }
}

impl Config {
    /// Every setting, commented out.
    const TEMPLATE: &str = include_str!("config.template.toml");

    /// The content of a new `config.toml`: every setting, commented out unless given.
    ///
    /// # Errors
    /// When the image directory is not UTF-8.
    pub fn template(chosen: &Chosen) -> Result<String> {
        let images = chosen
            .images
            .as_ref()
            .map(std::path::absolute)
            .transpose()?;
        let images = images.map(|path| path.to_str().map(str::to_owned).ok_or(path));
        let images = images.transpose().map_err(|path| {
            let path = path.display();
            Error::usage(format!("{path}: the path of the images must be UTF-8"))
        })?;
        let chosen = [
            ("name", chosen.name.clone()),
            ("listen", chosen.listen.map(|listen| listen.to_string())),
            ("images", images),
        ];
        let mut text = String::new();
        for line in Self::TEMPLATE.lines() {
            let value = chosen.iter().find_map(|(key, value)| {
                let is_it = line.starts_with(&format!("#{key} = "));
                Some((key, value.clone().filter(|_| is_it)?))
            });
            text += &match value {
                Some((key, value)) => format!("{key} = {}\n", toml::Value::String(value)),
                None => format!("{line}\n"),
            };
        }
        Ok(text)
    }

    /// Reads the file at `path`; a missing file means defaults.
    ///
    /// # Errors
    /// When it cannot be read or parsed; names the line.
    pub fn load(path: &Path) -> Result<Config> {
        let cannot = || format!("cannot read {}", path.display());
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Config::default()),
            Err(e) => return Err(e).with_context(cannot),
        };
        let mut content = String::new();
        file.take(MAX_BYTES + 1)
            .read_to_string(&mut content)
            .with_context(cannot)?;
        if content.len() as u64 > MAX_BYTES {
            bail!("{} is larger than {MAX_BYTES} bytes", path.display());
        }
        let parsed = toml::from_str(&content).map(|mut config: Config| {
            // The sockets of those that are built here are drover's own.
            let home = path.parent().unwrap_or(Path::new("/"));
            for (name, machine) in &mut config.machines {
                if machine.build.is_some() {
                    machine.incoming = Some(Files::of(home, name).monitor());
                }
            }
            config
        });
        parsed.map_err(|e| {
            let line = e
                .span()
                .map_or(0, |s| content[..s.start].matches('\n').count());
            let key = content.lines().nth(line).and_then(|l| l.split_once('='));
            let key = key.map_or(String::new(), |(key, _)| format!(" ({})", key.trim()));
            msg!(
                "{}, line {}{key}: {}",
                path.display(),
                line + 1,
                e.message()
            )
        })
    }

    /// How long unfinished transfers are kept; `None` means for ever.
    pub fn keep_unfinished(&self) -> Option<Duration> {
        match self.keep_unfinished {
            None => Some(KEEP_UNFINISHED),
            Some(Age::Forever) => None,
            Some(Age::At(age)) => Some(age),
        }
    }

    /// How long the terms of this node are.
    pub fn term(&self) -> Duration {
        self.node_term.unwrap_or(DEFAULT_TERM)
    }

    /// Permissions of delivered images.
    pub fn image_mode(&self) -> u32 {
        self.image_mode.unwrap_or(IMAGE_MODE)
    }

    /// The listen address.
    pub fn listen(&self) -> SocketAddr {
        self.listen
            .unwrap_or_else(|| DEFAULT_LISTEN.parse().expect("the default is an address"))
    }
}

/// Deserializes a string with the same parser as the command line.
fn parsed<'de, T, D: Deserializer<'de>>(
    d: D,
    parse: fn(&str) -> Result<T, String>,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(d)?;
    parse(&text).map(Some).map_err(serde::de::Error::custom)
}

fn catalog<'de, D: Deserializer<'de>>(d: D) -> Result<Option<CatalogUrl>, D::Error> {
    parsed(d, |text| text.parse())
}

fn node<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    parsed(d, |text| {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        match !text.is_empty() && text.len() <= 64 && text.chars().all(good) {
            true => Ok(text.to_owned()),
            false => {
                Err("the name of a node has at most 64 letters, digits, `.`, `-` and `_`".into())
            }
        }
    })
}

fn node_term<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    parsed(d, |text| {
        let term = text::parse_duration(text)?;
        match (MIN_TERM..=MAX_TERM).contains(&term) {
            true => Ok(term),
            false => Err(format!(
                "a term lasts from {} to {} s",
                MIN_TERM.as_secs(),
                MAX_TERM.as_secs()
            )),
        }
    })
}

fn rate<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    parsed(d, text::parse_rate)
}

fn size<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    parsed(d, text::parse_size)
}

fn address<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
    parsed(d, text::parse_address)
}

fn machines<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<String, MachineConfig>, D::Error> {
    let machines = BTreeMap::<String, MachineConfig>::deserialize(d)?;
    for (name, machine) in &machines {
        ImageName::new(name.as_str()).map_err(serde::de::Error::custom)?;
        let wrong = match (&machine.incoming, &machine.libvirt) {
            _ if machine.build.is_some() => machine.wrong_build(),
            (Some(socket), None) if socket.is_absolute() => machine
                .start
                .first()
                .is_some_and(String::is_empty)
                .then_some("`start` begins with a program"),
            (None, Some(_)) => {
                (!machine.start.is_empty()).then_some("libvirt starts it: leave `start` out")
            }
            (Some(_), None) => Some("`incoming` is an absolute path"),
            _ => Some("give it either `incoming` or `libvirt`, or a table `build`"),
        };
        if let Some(wrong) = wrong {
            let text = format!("machines.{name}: {wrong}");
            return Err(serde::de::Error::custom(text));
        }
    }
    Ok(machines)
}

fn disks<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<ImageName, DiskConfig>, D::Error> {
    let disks = BTreeMap::<String, DiskConfig>::deserialize(d)?;
    let named = disks.into_iter().map(|(name, disk)| {
        let name = disk_name(&name).map_err(|e| serde::de::Error::custom(format!("disks.{e}")))?;
        Ok((name, disk))
    });
    named.collect()
}

/// A name that a disk can be served under: `:` separates a peer from it.
///
/// # Errors
/// A message for the user.
pub fn disk_name(name: &str) -> Result<ImageName, String> {
    match ImageName::new(name) {
        Ok(_) if name.contains(':') => Err(format!("{name}: the name of a disk has no `:`")),
        named => named.map_err(|e| format!("{name}: {e}")),
    }
}

impl MachineConfig {
    /// What is wrong with a machine that is built here.
    fn wrong_build(&self) -> Option<&'static str> {
        let build = self.build.as_ref()?;
        let is_path = |path: &PathBuf| path.is_absolute() && path.to_str().is_some();
        let kernel = [&build.kernel, &build.initrd];
        let mut paths = kernel.into_iter().flatten().chain([&build.program]);
        if self.incoming.is_some() || self.libvirt.is_some() {
            Some("with `build` it has neither `incoming` nor `libvirt`")
        } else if self.start.first().is_some_and(String::is_empty) {
            Some("`start` begins with a program")
        } else if !paths.all(is_path) {
            Some("`program`, `kernel` and `initrd` are absolute paths")
        } else if build.kernel.is_none() && (build.initrd.is_some() || !build.append.is_empty()) {
            Some("`initrd` and `append` belong to a `kernel`")
        } else if build.memory == 0 || build.cpus == 0 {
            Some("`memory` and `cpus` are more than 0")
        } else {
            None
        }
    }
}

fn bytes<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    size(d).map(Option::unwrap_or_default)
}

/// One word for all cards, or one for each.
fn network<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Card>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Words {
        One(String),
        Each(Vec<String>),
    }
    let words = match Words::deserialize(d)? {
        Words::One(word) => vec![word],
        Words::Each(words) => words,
    };
    let cards = words.iter().map(|word| {
        let is_tap = |name: &&str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            (1..16).contains(&name.len()) && name.chars().all(plain)
        };
        match (word.as_str(), word.strip_prefix("tap:").filter(is_tap)) {
            ("none", _) => Ok(Card::None),
            ("user", _) => Ok(Card::User),
            (_, Some(name)) => Ok(Card::Tap(name.to_owned())),
            _ => Err(serde::de::Error::custom(format!(
                "{word:?} is no network: use \"none\", \"user\", or \"tap:\" and the name of a tap device"
            ))),
        }
    });
    cards.collect()
}

fn libvirt<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Uri>, D::Error> {
    parsed(d, str::parse)
}

fn mode<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    parsed(d, |text| {
        // The site must read and write its images; nobody executes them, and not everybody may change them.
        let allowed = |mode: &u32| mode & 0o600 == 0o600 && mode & !0o664 == 0;
        let mode = u32::from_str_radix(text, 8).ok().filter(allowed);
        mode.ok_or_else(|| {
            format!("{text:?} is not a mode for images: use \"0600\", \"0640\", \"0660\", \"0644\" or \"0664\"")
        })
    })
}

fn term<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    parsed(d, text::parse_term)
}

fn age<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Age>, D::Error> {
    parsed(d, |text| match text {
        "forever" => Ok(Age::Forever),
        text => text::parse_duration(text).map(Age::At),
    })
}

/// A retention period.
#[derive(Debug, Clone, Copy)]
enum Age {
    At(Duration),
    Forever,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(content: &str) -> Result<Config> {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("config.toml");
        std::fs::write(&path, content).unwrap();
        Config::load(&path)
    }

    #[test]
    fn the_template_says_nothing_and_is_all_true() {
        let config = load(Config::TEMPLATE).unwrap();
        assert_eq!(config.listen().to_string(), DEFAULT_LISTEN);
        assert!(config.name.is_none() && config.limit.is_none());
        assert_eq!(config.keep_unfinished(), Some(KEEP_UNFINISHED));
        // Each setting that is commented out must exist.
        let live: String = Config::TEMPLATE
            .lines()
            .map(|l| match l.strip_prefix('#') {
                Some(rest) if rest.contains(" = ") && !rest.starts_with(' ') => format!("{rest}\n"),
                _ => "\n".into(),
            })
            .collect();
        let config = load(&live).unwrap();
        assert_eq!(config.limit, Some(20_000_000));
        assert_eq!(config.reserve, Some(1 << 30));
        assert_eq!(config.sequence_data, Some(32 << 30));
        let month = Duration::from_secs(30 * 24 * 3600);
        assert_eq!(config.keep_unfinished(), Some(month));
        assert_eq!(config.image_mode(), 0o640);
        assert_eq!(config.lease, Some(Duration::from_secs(24 * 3600)));
        assert!(config.teleporter.is_some() && config.metrics_listen.is_some());
        assert!(
            config.max_sessions.is_some()
                && config.images.is_some()
                && !config.advertise.is_empty()
        );
    }

    #[test]
    fn mistakes_name_the_file_and_the_line() {
        let e = load("name = \"a\"\nlisen = \"0.0.0.0:1\"\n")
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("config.toml, line 2") && e.contains("lisen"),
            "{e}"
        );
        for (line, says) in [
            ("limit = \"fast\"", "line 1 (limit): \"fast\" is not a rate"),
            ("limit = 5", "line 1 (limit): invalid type"),
            (
                "\nlisten = \"foo\"",
                "line 2 (listen): \"foo\" is not an address",
            ),
            ("metrics-listen = \":1\"", "(metrics-listen): "),
            ("keep-unfinished = \"soon\"", "is not a duration"),
            (
                "image-mode = \"0777\"",
                "(image-mode): \"0777\" is not a mode for images",
            ),
            ("lease = \"0s\"", "(lease): \"0s\" is not a term of leases"),
            ("lease = \"soon\"", "is not a duration"),
            ("image-mode = \"0666\"", "is not a mode"),
            ("image-mode = \"0440\"", "is not a mode"),
            ("image-mode = \"04600\"", "is not a mode"),
            ("image-mode = 640", "invalid type"),
        ] {
            let e = load(line).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        }
        for (table, says) in [
            (
                "[machines.web]\nincoming = \"web.qmp\"",
                "machines.web: `incoming` is an absolute path",
            ),
            ("[machines.\"../web\"]\nincoming = \"/web.qmp\"", "line 1"),
            (
                "[machines.web]\nstart = [\"true\"]",
                "either `incoming` or `libvirt`",
            ),
            (
                "[machines.web]\nincoming = \"/w\"\nstart = [\"\"]",
                "`start` begins with a program",
            ),
        ] {
            let e = load(table).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        }
        let forever = load("keep-unfinished = \"forever\"").unwrap();
        assert_eq!(forever.keep_unfinished(), None);
        let hours = load("keep-unfinished = \"36h\"").unwrap();
        assert_eq!(
            hours.keep_unfinished(),
            Some(Duration::from_secs(36 * 3600))
        );
        assert!(load("\u{0}").is_err());
    }

    #[test]
    fn machines_are_tables() {
        let config = load(
            "[machines.web]\nincoming = \"/run/web.qmp\"\n[machines.db]\nincoming = \"/run/db.qmp\"\nstart = [\"start\", \"db\"]\ndomain = \"acme\"\n",
        )
        .unwrap();
        let web = &config.machines["web"];
        assert_eq!((web.start.len(), web.domain.as_str()), (0, DEFAULT_DOMAIN));
        let db = &config.machines["db"];
        assert_eq!((db.start.len(), db.domain.as_str()), (2, "acme"));
        assert_eq!(db.hypervisor("db"), Place::Qmp("/run/db.qmp".into()));
        let config = load("[machines.web]\nlibvirt = \"qemu:///system\"\n").unwrap();
        let uri: Uri = "qemu:///system".parse().unwrap();
        let web = config.machines["web"].hypervisor("web");
        assert_eq!(web, Place::Libvirt(uri, "web".into()));
        for (table, says) in [
            ("", "either `incoming` or `libvirt`"),
            (
                "incoming = \"/w\"\nlibvirt = \"qemu:///system\"",
                "either `incoming` or `libvirt`",
            ),
            (
                "libvirt = \"qemu+ssh://host/system\"",
                "only the libvirt of this host",
            ),
            (
                "libvirt = \"qemu:///system\"\nstart = [\"x\"]",
                "leave `start` out",
            ),
        ] {
            let e = load(&format!("[machines.web]\n{table}\n"))
                .unwrap_err()
                .to_string();
            assert!(e.contains(says), "{e}");
        }
    }

    #[test]
    fn machines_are_built_within_limits() {
        let config = load(
            "[machines.web.build]\nmemory = \"4GiB\"\ncpus = 2\nnetwork = [\"tap:web0\", \"none\"]\nuser = \"q\"\n",
        )
        .unwrap();
        let web = &config.machines["web"];
        let build = web.build.as_ref().unwrap();
        assert_eq!((build.memory, build.cpus), (4 << 30, 2));
        assert_eq!(build.network, [Card::Tap("web0".into()), Card::None]);
        assert_eq!(build.accelerator, Accelerator::Kvm);
        let Place::Qmp(socket) = web.hypervisor("web") else {
            panic!("it is QEMU's");
        };
        assert!(socket.is_absolute() && socket.ends_with("qemu/web.qmp"));
        for (more, says) in [
            ("network = \"bridge\"", "\"bridge\" is no network"),
            ("network = \"tap:a,b\"", "is no network"),
            ("network = \"tap:\"", "is no network"),
            ("accelerator = \"any\"", "\"any\" is no accelerator"),
            ("kernel = \"k\"", "absolute paths"),
            ("append = \"quiet\"", "belong to a `kernel`"),
            ("disk = \"/x\"", "unknown field"),
        ] {
            let table = format!("[machines.web.build]\nmemory = \"4G\"\ncpus = 2\n{more}\n");
            let e = load(&table).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        }
        let none = load("[machines.web.build]\ncpus = 2\n").unwrap_err();
        assert!(none.to_string().contains("memory"), "{none}");
        let two =
            "[machines.web]\nincoming = \"/w\"\n[machines.web.build]\nmemory = \"4G\"\ncpus = 2\n";
        let two = load(two).unwrap_err().to_string();
        assert!(two.contains("neither `incoming` nor `libvirt`"), "{two}");
    }

    #[test]
    fn disks_in_stores_are_tables() {
        let config = load(
            "[disks.big]\nstore = \"s3://bucket/big\"\n[disks.\"base.raw\"]\nstore = \"redis://lyon/3?prefix=base\"\nread-only = true\n",
        )
        .unwrap();
        let shown = |name: &str| {
            let disk = &config.disks[&ImageName::new(name).unwrap()];
            (disk.store.to_string(), disk.read_only)
        };
        assert_eq!(shown("big"), ("s3://bucket/big".into(), false));
        assert!(shown("base.raw").1);
        for (table, says) in [
            ("[disks.big]", "missing field `store`"),
            ("[disks.big]\nstore = \"s3://bucket\"", "names no bucket"),
            ("[disks.big]\nstore = \"/dev/sda\"", "not the URL of a disk"),
            (
                "[disks.big]\nstore = \"redis://:secret@lyon\"",
                "seen by other users",
            ),
            ("[disks.\"../x\"]\nstore = \"s3://b/x\"", "disks.../x"),
            ("[disks.\"a:b\"]\nstore = \"s3://b/x\"", "has no `:`"),
        ] {
            let e = load(table).unwrap_err().to_string();
            assert!(e.contains(says) && !e.contains("secret"), "{e}");
        }
    }

    #[test]
    fn no_file_is_the_default() {
        let config = Config::load(Path::new("/nonexistent/config.toml")).unwrap();
        assert_eq!(config.listen().port(), 7377);
    }

    #[test]
    fn the_template_enables_what_was_chosen() {
        let chosen = Chosen {
            name: Some("lyon".into()),
            images: Some("/srv/\"odd\"".into()),
            listen: Some("127.0.0.1:9".parse().unwrap()),
        };
        let config = load(&Config::template(&chosen).unwrap()).unwrap();
        assert_eq!(config.name.as_deref(), Some("lyon"));
        assert_eq!(config.images, Some("/srv/\"odd\"".into()));
        assert_eq!(config.listen().port(), 9);
        assert!(config.limit.is_none());
        assert_eq!(config.image_mode(), 0o600);
    }
}
