//! `drover vault schedule`: snapshots by timers of systemd.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use drover_agent::error::Error;
use drover_agent::home::Home;
use drover_agent::text::clean;
use drover_agent::{mounts, site, vaults};
use drover_core::ImageName;
use drover_store::Catalog;
use drover_vault::Machine;
use serde_json::json;

use super::common::{machine_of, open};
use crate::cli::{Hypervisor, SnapshotOf, VaultScheduleArgs};
use crate::failure::usage;
use crate::{out, prompt};

/// The first line of each unit: only units with it are removed or written over.
const MARK: &str = "# Written by drover vault schedule; removed by it with --remove.";

/// What a timer does, as absolute paths.
struct Plan {
    program: PathBuf,
    home: PathBuf,
    vault: String,
    key_file: Option<PathBuf>,
    at: String,
    /// Device or file that is read, and how fast.
    limit: Option<u64>,
    /// A file with environment variables.
    environment: Option<PathBuf>,
    keep: Vec<String>,
    is_of_user: bool,
}

/// What is backed up.
enum What {
    /// A file, by its absolute path.
    File(PathBuf),
    /// A disk that a mount of this site serves: the path of its mount, or the name of its image.
    Mounted(String),
    /// A machine.
    Machine(Hypervisor),
}

impl What {
    /// What an operand of `drover snapshot` means; none if there is nothing of that name.
    fn of(home: Option<&Path>, operand: &SnapshotOf) -> Result<Option<What>> {
        let path = match operand {
            SnapshotOf::Machine(hypervisor) => return Ok(Some(What::Machine(hypervisor.clone()))),
            SnapshotOf::Named(path) => path,
        };
        let absolute = std::path::absolute(path)?;
        let home = Home::existing(Home::locate(home)?).ok();
        let at_mount = home.as_ref().map(|home| mounts::shown_at(home, &absolute));
        let absolute_text = || absolute.to_str().map(str::to_owned);
        if let Some(shown) = at_mount
            && shown?.is_some()
        {
            return Ok(absolute_text().map(What::Mounted));
        }
        if absolute.exists() {
            return Ok(Some(What::File(absolute)));
        }
        let name = path.to_str().and_then(|name| ImageName::new(name).ok());
        let (Some(home), Some(name)) = (home, name) else {
            return Ok(None);
        };
        let image = site::look_at_catalog(&home)?.by_name(&name)?;
        Ok(image.map(|_| What::Mounted(name.to_string())))
    }

    /// As an operand of `drover snapshot`.
    fn text(&self) -> String {
        match self {
            What::File(path) => path.display().to_string(),
            What::Mounted(named) => named.clone(),
            What::Machine(hypervisor) => hypervisor.to_string(),
        }
    }
}

/// What an operand is called in the vault if nothing is said.
fn usual_name(operand: &SnapshotOf) -> Result<Machine> {
    match operand {
        SnapshotOf::Named(path) | SnapshotOf::Machine(Hypervisor::Qmp(path)) => machine_of(path),
        SnapshotOf::Machine(Hypervisor::Libvirt(name)) => machine_of(Path::new(name)),
    }
}

/// A unit of a name, without its extension.
fn unit_name(machine: &Machine) -> String {
    let mut out = String::from("drover-snapshot-");
    for byte in machine.as_str().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' => out.push(char::from(byte)),
            _ => out.push_str(&format!("\\x{byte:02x}")),
        }
    }
    out
}

/// A word of a command line or of an assignment in a unit.
fn quoted(word: &str, is_command: bool) -> String {
    let mut out = String::from("\"");
    for c in word.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '%' => out.push_str("%%"),
            '$' if is_command => out.push_str("$$"),
            _ => out.push(c),
        }
    }
    out.push('"');
    out
}

impl Plan {
    /// The service and the timer of what is backed up.
    fn units(&self, what: &What, machine: &Machine) -> (String, String) {
        let command = |words: &[&str], operands: &[&str]| {
            let program = self.program.display().to_string();
            let mut all: Vec<String> = vec![quoted(&program, true)];
            all.extend(words.iter().map(|word| quoted(word, true)));
            all.extend(["--vault", &self.vault].map(|word| quoted(word, true)));
            if let Some(file) = &self.key_file {
                all.extend(
                    ["--key-file", &file.display().to_string()].map(|word| quoted(word, true)),
                );
            }
            if !operands.is_empty() {
                // A machine may be called like an option.
                all.push("--".to_owned());
                all.extend(operands.iter().map(|word| quoted(word, true)));
            }
            format!("ExecStart={}\n", all.join(" "))
        };
        let name = machine.as_str();
        let about = quoted(name, false);
        let mut service = format!(
            "{MARK}\n\n[Unit]\nDescription=Drover: a snapshot of {}\n\n[Service]\nType=oneshot\nEnvironment={}\n",
            about.trim_matches('"'),
            quoted(&format!("DROVER_HOME={}", self.home.display()), false)
        );
        if let Some(file) = &self.environment {
            let file = file.display().to_string().replace('%', "%%");
            service.push_str(&format!("EnvironmentFile={file}\n"));
        }
        let called = format!("--as={name}");
        service.push_str(&command(&["snapshot", &what.text(), &called], &[]));
        if !self.keep.is_empty() {
            let mut forget = vec!["vault", "forget", "--yes"];
            forget.extend(self.keep.iter().map(String::as_str));
            if matches!(what, What::Machine(_)) {
                forget.push("--disks");
            }
            service.push_str(&command(&forget, &[name]));
            service.push_str(&command(&["vault", "compact"], &[]));
        }
        service.push_str("Nice=10\nIOSchedulingClass=idle\n");
        if let Some(limit) = self.limit {
            service.push_str(&format!(
                "IOReadBandwidthMax={} {limit}\n",
                quoted(&what.text(), false)
            ));
        }
        let timer = format!(
            "{MARK}\n\n[Unit]\nDescription=Drover: snapshots of {}, {}\n\n[Timer]\nOnCalendar={}\nPersistent=true\nRandomizedDelaySec=10min\n\n[Install]\nWantedBy=timers.target\n",
            about.trim_matches('"'),
            self.at.replace('%', "%%"),
            self.at.replace('%', "%%"),
        );
        (service, timer)
    }

    fn systemctl(&self) -> &'static str {
        match self.is_of_user {
            true => "systemctl --user",
            false => "systemctl",
        }
    }
}

/// Where units are, and whether they are a user's.
fn directory(given: Option<&Path>) -> Result<(PathBuf, bool)> {
    let is_of_user = !rustix::process::geteuid().is_root();
    if let Some(directory) = given {
        return Ok((std::path::absolute(directory)?, is_of_user));
    }
    if !is_of_user {
        return Ok(("/etc/systemd/system".into(), false));
    }
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".config"));
    let Some(config) = config.or_else(home) else {
        return Err(usage(
            "HOME is not set: name the directory of units with --unit-dir",
        ));
    };
    Ok((config.join("systemd/user"), true))
}

/// Whether a unit may be written over or removed.
fn is_ours(path: &Path) -> Result<bool> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.starts_with(MARK)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// `drover vault schedule`.
///
/// # Errors
/// When an image or the vault does not exist, or units cannot be written.
pub fn schedule(home: Option<&Path>, args: &VaultScheduleArgs) -> Result<()> {
    let (directory, is_of_user) = directory(args.unit_dir.as_deref())?;
    let mut machines = Vec::new();
    for image in &args.images {
        let machine = match &args.name {
            Some(_) if args.images.len() > 1 => {
                return Err(usage(
                    "--as is for one image or machine; several get the names of their files or sockets",
                ));
            }
            Some(name) => name.clone(),
            None => usual_name(image)?,
        };
        if machines.iter().any(|(_, other)| *other == machine) {
            return Err(usage(format!(
                "two of them are called {machine}; name one with --as"
            )));
        }
        let what = match What::of(home, image)? {
            Some(what) => what,
            None => {
                let SnapshotOf::Named(path) = image else {
                    continue;
                };
                let path = std::path::absolute(path)?;
                if !args.remove {
                    return Err(Error::refused(format!(
                        "there is no {}",
                        clean(&path.display().to_string())
                    ))
                    .into());
                }
                What::File(path)
            }
        };
        if args.io_limit.is_some() && !matches!(what, What::File(_)) && !args.remove {
            return Err(usage(format!(
                "--io-limit is for image files: the disks of {machine} are read by another process"
            )));
        }
        machines.push((what, machine));
    }
    let existing = || Home::existing(Home::locate(home)?);
    let known = vaults::find(&args.of.vault.chosen(), Home::locate(home), existing)?;
    if known.key != vaults::Key::None && known.key_file().is_none() && !args.remove {
        return Err(Error::refused(
            "a timer cannot ask for the passphrase of the vault: name a file with it by --key-file",
        )
        .into());
    }
    let program = std::env::current_exe().context("cannot find the drover program")?;
    let plan = Plan {
        program,
        home: std::path::absolute(Home::locate(home)?)?,
        vault: known.location.to_string(),
        key_file: known.key_file().map(Path::to_path_buf),
        at: args.at.clone(),
        limit: args.io_limit,
        environment: args
            .environment
            .as_deref()
            .map(std::path::absolute)
            .transpose()?,
        keep: args.keep.words(),
        is_of_user,
    };
    if plan.at.trim().is_empty() || plan.at.chars().any(char::is_control) {
        return Err(usage(
            "--at is a time of systemd, such as daily, hourly or \"Mon 03:00\"",
        ));
    }
    // It would make the next line of the unit part of this one.
    let ends_in_backslash = |text: &str| text.ends_with('\\');
    let environment = plan.environment.as_deref().and_then(Path::to_str);
    if ends_in_backslash(&plan.at) || environment.is_some_and(ends_in_backslash) {
        return Err(usage("--at and --environment cannot end in a backslash"));
    }
    let mut files = Vec::new();
    for (what, machine) in &machines {
        let of_plan = |path: &Option<PathBuf>| {
            path.as_deref()
                .map_or(Some(""), Path::to_str)
                .map(str::to_owned)
        };
        let text = [
            match what {
                What::File(path) | What::Machine(Hypervisor::Qmp(path)) => {
                    path.to_str().map(str::to_owned)
                }
                What::Mounted(_) | What::Machine(_) => Some(what.text()),
            },
            Some(plan.vault.clone()),
            plan.home.to_str().map(str::to_owned),
            of_plan(&plan.key_file),
            of_plan(&plan.environment),
        ];
        if text
            .iter()
            .any(|t| t.as_ref().is_none_or(|t| t.chars().any(char::is_control)))
        {
            return Err(usage(
                "a path with line breaks, or one that is not UTF-8, cannot be in a unit",
            ));
        }
        let (service, timer) = plan.units(what, machine);
        let name = unit_name(machine);
        files.push((directory.join(format!("{name}.service")), service));
        files.push((directory.join(format!("{name}.timer")), timer));
    }
    if args.remove {
        return remove(&plan, &files, args);
    }
    if args.dry_run {
        for (path, text) in &files {
            match args.of.json {
                true => out::json(
                    &json!({"event": "unit", "path": path, "text": text, "dry_run": true}),
                )?,
                false => out::line(&format!("# {}\n{text}", clean(&path.display().to_string())))?,
            }
        }
        return Ok(());
    }
    // The vault is there, and opens without a question.
    open(home, &args.of)?;
    for (path, _) in &files {
        if !is_ours(path)? {
            bail!(
                "{} was not written by drover; it is left as it is",
                path.display()
            );
        }
    }
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    for (path, text) in &files {
        drover_storage::atomic_replace(path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
        if args.of.json {
            out::json(&json!({"event": "unit", "path": path, "text": text, "dry_run": false}))?;
        } else {
            out::line(&clean(&path.display().to_string()))?;
        }
    }
    let timers: Vec<String> = machines
        .iter()
        .map(|(_, m)| format!("'{}.timer'", unit_name(m)))
        .collect();
    let systemctl = plan.systemctl();
    out::note(&format!(
        "drover: start the timers with: {systemctl} daemon-reload && {systemctl} enable --now {}",
        timers.join(" ")
    ));
    Ok(())
}

fn remove(plan: &Plan, files: &[(PathBuf, String)], args: &VaultScheduleArgs) -> Result<()> {
    let mut there = Vec::new();
    for (path, _) in files {
        if !is_ours(path)? {
            bail!(
                "{} was not written by drover; it is left as it is",
                path.display()
            );
        }
        if path.exists() {
            there.push(path);
        }
    }
    if there.is_empty() {
        return Err(Error::refused("there is no such schedule").into());
    }
    if !args.dry_run {
        prompt::confirm(&format!("Remove {} units?", there.len()), args.yes)?;
    }
    for path in there {
        if !args.dry_run {
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        match args.of.json {
            true => out::json(&json!({"event": "removed", "path": path, "dry_run": args.dry_run}))?,
            false => out::line(&clean(&path.display().to_string()))?,
        }
    }
    if !args.dry_run {
        let systemctl = plan.systemctl();
        out::note(&format!(
            "drover: have systemd forget them with: {systemctl} daemon-reload"
        ));
    }
    Ok(())
}
