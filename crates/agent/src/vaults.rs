//! The vaults that a home knows: those created from it. Its only one is the default, and that of its peers.

mod link;

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_storage::{Envelope, EnvelopeError};
use drover_vault::peer::{PeerObjects, PeerPatience};
use drover_vault::{Location, MAX_SECRET, Objects, Secret, Vault, VaultError};

use crate::error::{Error, Result};
use crate::home::Home;
use link::AtPeer;
pub use link::OpenVault;

/// Most vaults of a home.
const MAX_VAULTS: usize = 64;

/// The file `vaults` of a home without encrypted vaults: paths and URLs, each with a NUL after it.
const PLAIN: Envelope = Envelope {
    magic: *b"DRVRVLS\0",
    version: 1,
    max_bytes: 64 << 10,
};

/// The same with encrypted ones: after each path or URL its [`Key`].
const KINDS: Envelope = Envelope {
    version: 2,
    ..PLAIN
};

/// Whether a vault is encrypted, and where its secret is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// It is not encrypted.
    None,
    /// A passphrase, which is asked for.
    Asked,
    /// A file.
    File(PathBuf),
    /// A passphrase, which is asked for. The vault was not created from this site, but has been opened from it.
    Seen,
}

impl Key {
    fn text(&self) -> String {
        match self {
            Key::None => String::new(),
            Key::Asked => "?".into(),
            Key::Seen => "+".into(),
            Key::File(path) => path.display().to_string(),
        }
    }

    fn of_text(text: &str) -> Key {
        match text {
            "" => Key::None,
            "?" => Key::Asked,
            "+" => Key::Seen,
            path => Key::File(path.into()),
        }
    }
}

/// A vault that a home knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Where it is.
    pub location: Location,
    /// How it is opened.
    pub key: Key,
}

/// A vault as a user names it.
#[derive(Debug, Clone, Default)]
pub struct Chosen {
    /// Where it is, if that is said.
    pub location: Option<Location>,
    /// The file with its passphrase, if that is said.
    pub key_file: Option<PathBuf>,
}

impl From<VaultError> for Error {
    fn from(error: VaultError) -> Error {
        match error {
            VaultError::NoVault(_)
            | VaultError::NoSnapshot { .. }
            | VaultError::Exists(_)
            | VaultError::NotEmpty(_)
            | VaultError::Held { .. }
            | VaultError::Unconditional(_)
            | VaultError::OtherVault { .. }
            | VaultError::NotPopular(_)
            | VaultError::Encrypted(_)
            | VaultError::NotEncrypted(_)
            | VaultError::NoKeys(_)
            | VaultError::WrongKey(_)
            | VaultError::NoKey { .. }
            | VaultError::LastKey(_)
            | VaultError::KeyInUse(_)
            | VaultError::KeyChanges(_)
            | VaultError::ManyKeys { .. }
            | VaultError::LongLabel { .. }
            | VaultError::Unsupported { .. } => Error::refused(error.to_string()),
            VaultError::Ambiguous { .. } | VaultError::BadReference(_) => {
                Error::usage(error.to_string())
            }
            error => Error::msg(error),
        }
    }
}

/// The vaults that a home knows.
///
/// # Errors
/// When the record cannot be read.
pub fn known(home: &Home) -> Result<Vec<Known>> {
    known_in(home.dir())
}

/// The vaults that the home in a directory knows; none if there is no home.
fn known_in(dir: &Path) -> Result<Vec<Known>> {
    let path = record(dir);
    let Some(bytes) = PLAIN.read(&path)? else {
        return Ok(Vec::new());
    };
    let damaged = |why: &dyn std::fmt::Display| {
        Error::msg(format!(
            "{}: {why}; remove it, and name vaults with --vault",
            path.display()
        ))
    };
    let (body, is_plain) = match PLAIN.open(&bytes) {
        Err(EnvelopeError::Version) => (KINDS.open(&bytes), false),
        opened => (opened, true),
    };
    let body = body.map_err(|e| damaged(&e))?;
    let text = std::str::from_utf8(body).map_err(|_| damaged(&"it is damaged"))?;
    let mut texts = text.split_terminator('\0');
    let mut out = Vec::new();
    while let Some(location) = texts.next() {
        out.push(Known {
            location: location.to_owned().into(),
            key: match is_plain {
                true => Key::None,
                false => Key::of_text(texts.next().unwrap_or_default()),
            },
        });
    }
    Ok(out)
}

/// The vault that a site serves to its peers: its only one.
///
/// # Errors
/// When it has none, or several; when the record cannot be read.
pub fn served(home: &Home, site: &str) -> Result<Location> {
    let mut known = known(home)?;
    known.retain(|known| known.key != Key::Seen);
    match known.as_slice() {
        [only] => Ok(only.location.clone()),
        [] => Err(Error::refused(format!(
            "{site} has no vault; `drover vault init` creates one there"
        ))),
        _ => Err(Error::refused(format!(
            "{site} has several vaults, so that none is for its peers"
        ))),
    }
}

/// Adds a vault to those that a home knows.
///
/// # Errors
/// When the record cannot be read or written.
pub fn add(home: &Home, vault: &Location, key: Key) -> Result<()> {
    let mut all = known(home)?;
    all.retain(|known| known.location != *vault);
    if all.len() >= MAX_VAULTS
        && let Some(oldest) = all.iter().position(|known| known.key == Key::Seen)
    {
        all.remove(oldest);
    }
    all.push(Known {
        location: vault.clone(),
        key,
    });
    if all.len() > MAX_VAULTS {
        return Err(Error::refused(format!(
            "a site knows {MAX_VAULTS} vaults at most"
        )));
    }
    // Which earlier versions can read.
    let is_plain = all.iter().all(|known| known.key == Key::None);
    let kind = if is_plain { PLAIN } else { KINDS };
    let mut body = String::new();
    for known in &all {
        body.push_str(&known.location.to_string());
        body.push('\0');
        if !is_plain {
            body.push_str(&known.key.text());
            body.push('\0');
        }
    }
    Ok(kind.write(&record(home.dir()), body.as_bytes())?)
}

/// Remembers that a vault is encrypted, which was opened: from now on no other one is taken for it.
///
/// # Errors
/// When the record cannot be read or written.
pub fn remember(home: &Home, location: &Location, vault: &Vault) -> Result<()> {
    if !vault.record().is_encrypted {
        return Ok(());
    }
    match known(home)?
        .iter()
        .find(|known| known.location == *location)
    {
        Some(known) if known.key != Key::None => Ok(()),
        Some(_) => add(home, location, Key::Asked),
        None => add(home, location, Key::Seen),
    }
}

fn record(dir: &Path) -> PathBuf {
    dir.join("vaults")
}

/// The vault that was chosen, with an absolute path, else the only one of the home, which is in `dir`; and how it is
/// opened.
///
/// # Errors
/// When there is none, or several and none was chosen; when the record cannot be read.
pub fn find(
    chosen: &Chosen,
    dir: Result<PathBuf>,
    home: impl FnOnce() -> Result<Home>,
) -> Result<Known> {
    let key_file = |known: Known| -> Result<Known> {
        Ok(match &chosen.key_file {
            Some(path) => Known {
                key: Key::File(std::path::absolute(path)?),
                ..known
            },
            None => known,
        })
    };
    if let Some(location) = &chosen.location {
        let location = location.clone().absolute()?;
        // Who names a vault needs no home. But what a home knows counts: else another vault could be put in its place.
        let all = match dir {
            Ok(dir) => known_in(&dir)?,
            Err(_) => Vec::new(),
        };
        let found = all.into_iter().find(|known| known.location == location);
        return key_file(found.unwrap_or(Known {
            location,
            key: Key::None,
        }));
    }
    let mut known = known(&home()?)?;
    known.retain(|known| known.key != Key::Seen);
    match known.as_slice() {
        [only] => key_file(only.clone()),
        [] => Err(Error::refused(
            "this site has no vault; `drover vault init VAULT` creates one, --vault names another",
        )),
        several => {
            let names: Vec<_> = several.iter().map(|k| k.location.to_string()).collect();
            Err(Error::usage(format!(
                "this site has several vaults: name one with --vault: {}",
                names.join(", ")
            )))
        }
    }
}

impl Known {
    /// Opens it; `home` knows the peers. If it is encrypted and its secret is in no file, `ask` is asked for it.
    ///
    /// # Errors
    /// When it cannot be opened, or is not encrypted although it should be.
    pub fn open(
        &self,
        home: impl FnOnce() -> Result<Home>,
        ask: &mut dyn FnMut() -> Result<Secret>,
    ) -> Result<Vault> {
        let mut failed = None;
        let objects: Arc<dyn Objects> = match &self.location {
            Location::Peer(name) => {
                let peer = Box::new(AtPeer::new(&home()?, name)?);
                Arc::new(PeerObjects::new(peer, PeerPatience::default()))
            }
            other => other.objects()?,
        };
        let opened = Vault::open_with(objects, &mut || {
            let secret = match &self.key {
                Key::File(path) => read_key(path),
                Key::None | Key::Asked | Key::Seen => ask(),
            };
            secret.map_err(|error| {
                failed = Some(error);
                VaultError::Encrypted(self.location.to_string())
            })
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let vault = opened?;
        // Else whoever can write to the store could have the next snapshot written in the clear.
        match self.key != Key::None && !vault.record().is_encrypted {
            true => Err(VaultError::NotEncrypted(vault.place()).into()),
            false => Ok(vault),
        }
    }

    /// The file with the secret.
    #[must_use]
    pub fn key_file(&self) -> Option<&Path> {
        match &self.key {
            Key::File(path) => Some(path),
            Key::None | Key::Asked | Key::Seen => None,
        }
    }
}

/// A secret from a key file.
///
/// # Errors
/// When it cannot be read, is empty or too long.
pub fn read_key(path: &Path) -> Result<Secret> {
    let failed = |why: &dyn std::fmt::Display| {
        Error::refused(format!(
            "cannot read the key file {}: {why}",
            path.display()
        ))
    };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|e| failed(&e))?;
    file.take(MAX_SECRET as u64 + 2)
        .read_to_end(&mut bytes)
        .map_err(|e| failed(&e))?;
    Secret::new(&bytes).ok_or_else(|| failed(&"it is empty, or longer than 64 KiB"))
}

/// The secret in a key file, which is created with a random one if it does not exist; whether it was.
///
/// # Errors
/// When it cannot be read or written.
pub fn read_or_create_key(path: &Path) -> Result<(Secret, bool)> {
    let mut random = [0; 32];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(io::Error::from)?;
    let mut options = fs::File::options();
    let created = options.write(true).create_new(true).mode(0o600).open(path);
    match created {
        Ok(mut file) => {
            let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
            file.write_all(format!("{text}\n").as_bytes())?;
            file.sync_all()?;
            drover_storage::sync_parent(path)?;
            Ok((read_key(path)?, true))
        }
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok((read_key(path)?, false)),
        Err(e) => Err(Error::refused(format!(
            "cannot create the key file {}: {e}",
            path.display()
        ))),
    }
}

/// The name of this host, as it is recorded in snapshots.
#[must_use]
pub fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
