//! What the commands of vaults have in common.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use drover_agent::error::Error;
use drover_agent::home::Home;
use drover_agent::vaults;
use drover_vault::{Machine, Secret, Vault};
use serde_json::{Value, json};

use crate::bar::Bar;
use crate::cli::OfVault;
use crate::failure::usage;
use crate::{out, prompt};

/// How often progress is printed as JSON.
const EVERY: Duration = Duration::from_secs(1);

/// Opens the vault that a command names.
pub fn open(home: Option<&Path>, of: &OfVault) -> Result<Vault> {
    let existing = || Home::existing(Home::locate(home)?);
    let known = vaults::find(&of.vault.chosen(), Home::locate(home), existing)?;
    let ask = || passphrase(&format!("passphrase of {}", known.location));
    let vault = known.open(existing, &mut || {
        ask().map_err(|e| Error::usage(e.to_string()))
    })?;
    if let Ok(home) = existing() {
        vaults::remember(&home, &known.location, &vault)?;
    }
    Ok(vault)
}

/// Asks for a passphrase.
fn passphrase(what: &str) -> Result<Secret> {
    let text = prompt::passphrase(what)?;
    Secret::new(text.as_bytes()).ok_or_else(|| usage("the passphrase is empty"))
}

/// Progress of a command, as a bar or as JSON events.
pub struct Progress {
    bar: Bar,
    json: bool,
    told: Instant,
}

impl Progress {
    pub fn new(label: &str, json: bool) -> Self {
        Progress::on(Bar::new(label, json), json)
    }

    pub fn on(bar: Bar, json: bool) -> Self {
        Progress {
            bar,
            json,
            told: Instant::now(),
        }
    }

    pub fn at(&mut self, done: u64, total: u64, more: impl FnOnce() -> Value) {
        self.bar.at(done, total);
        self.tell(|| {
            let mut event = json!({"event": "progress", "done_bytes": done, "total_bytes": total});
            if let (Value::Object(event), Value::Object(more)) = (&mut event, more()) {
                event.extend(more);
            }
            event
        });
    }

    /// Prints an event, if that is wanted, and due.
    pub fn tell(&mut self, event: impl FnOnce() -> Value) {
        if self.json && self.told.elapsed() >= EVERY {
            self.told = Instant::now();
            // A reader that is gone does not stop the work.
            let _ = out::json(&event());
        }
    }

    /// The bar alone, which counts something else.
    pub fn bar_at(&self, done: u64, total: u64) {
        self.bar.at(done, total);
    }

    /// It has ended.
    pub fn clear(&self) {
        self.bar.clear();
    }
}

/// What the machine of an image is called if nothing is said.
pub fn machine_of(image: &Path) -> Result<Machine> {
    let stem = image.file_stem().unwrap_or_default().to_string_lossy();
    Machine::new(stem).map_err(|e| usage(format!("{e}; name the machine with --as")))
}
