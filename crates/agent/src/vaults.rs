//! The vaults that a home knows: those created from it. Its only one is the default.

use std::path::{Path, PathBuf};

use drover_storage::{Envelope, EnvelopeError};
use drover_vault::{Vault, VaultError};

use crate::error::{Error, Result};
use crate::home::Home;

/// Most vaults of a home.
const MAX_VAULTS: usize = 64;

/// The file `vaults` of a home: paths, each with a NUL after it.
const KIND: Envelope = Envelope {
    magic: *b"DRVRVLS\0",
    version: 1,
    max_bytes: 64 << 10,
};

impl From<VaultError> for Error {
    fn from(error: VaultError) -> Error {
        match error {
            VaultError::NoVault(_)
            | VaultError::NoSnapshot { .. }
            | VaultError::Exists(_)
            | VaultError::NotEmpty(_)
            | VaultError::Held { .. }
            | VaultError::Unconditional(_) => Error::refused(error.to_string()),
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
pub fn known(home: &Home) -> Result<Vec<PathBuf>> {
    let path = record(home);
    let Some(bytes) = KIND.read(&path)? else {
        return Ok(Vec::new());
    };
    let damaged = |why: &dyn std::fmt::Display| {
        Error::msg(format!(
            "{}: {why}; remove it, and name vaults with --vault",
            path.display()
        ))
    };
    let body = KIND.open(&bytes).map_err(|e: EnvelopeError| damaged(&e))?;
    let text = std::str::from_utf8(body).map_err(|_| damaged(&"it is damaged"))?;
    Ok(text.split_terminator('\0').map(PathBuf::from).collect())
}

/// Adds a vault to those that a home knows.
///
/// # Errors
/// When the record cannot be read or written, or the path is not UTF-8.
pub fn add(home: &Home, vault: &Path) -> Result<()> {
    let mut all = known(home)?;
    if all.iter().any(|known| known == vault) {
        return Ok(());
    }
    all.push(vault.to_path_buf());
    if all.len() > MAX_VAULTS {
        return Err(Error::refused(format!(
            "a site knows {MAX_VAULTS} vaults at most"
        )));
    }
    let mut body = String::new();
    for path in &all {
        let text = path
            .to_str()
            .ok_or_else(|| Error::usage(format!("{} is not UTF-8", path.display())))?;
        body.push_str(text);
        body.push('\0');
    }
    Ok(KIND.write(&record(home), body.as_bytes())?)
}

fn record(home: &Home) -> PathBuf {
    home.dir().join("vaults")
}

/// Opens the vault at `chosen`, else the only one of the home, which is only asked for then.
///
/// # Errors
/// When there is none, or several and none was chosen; when it cannot be opened.
pub fn open(chosen: Option<&Path>, home: impl FnOnce() -> Result<Home>) -> Result<Vault> {
    Ok(Vault::open(&find(chosen, home)?)?)
}

/// The vault at `chosen`, with an absolute path, else the only one of the home, which is only asked for then.
///
/// # Errors
/// When there is none, or several and none was chosen.
pub fn find(chosen: Option<&Path>, home: impl FnOnce() -> Result<Home>) -> Result<PathBuf> {
    if let Some(path) = chosen {
        return Ok(std::path::absolute(path)?);
    }
    let known = known(&home()?)?;
    match known.as_slice() {
        [only] => Ok(only.clone()),
        [] => Err(Error::refused(
            "this site has no vault; `drover vault init DIR` creates one, --vault names another",
        )),
        several => {
            let names: Vec<_> = several.iter().map(|p| p.display().to_string()).collect();
            Err(Error::usage(format!(
                "this site has several vaults: name one with --vault: {}",
                names.join(", ")
            )))
        }
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
