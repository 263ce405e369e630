//! `drover vault schedule`: snapshots by timers of systemd.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use drover_agent::error::Error;
use drover_agent::home::Home;
use drover_agent::text::clean;
use drover_agent::vaults;
use drover_vault::Machine;
use serde_json::json;

use super::common::{machine_of, open};
use crate::cli::VaultScheduleArgs;
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
    /// The service and the timer of an image.
    fn units(&self, image: &Path, machine: &Machine) -> (String, String) {
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
        let image = image.display().to_string();
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
        service.push_str(&command(&["snapshot", &image, &called], &[]));
        if !self.keep.is_empty() {
            let mut forget = vec!["vault", "forget", "--yes"];
            forget.extend(self.keep.iter().map(String::as_str));
            service.push_str(&command(&forget, &[name]));
            service.push_str(&command(&["vault", "compact"], &[]));
        }
        service.push_str("Nice=10\nIOSchedulingClass=idle\n");
        if let Some(limit) = self.limit {
            service.push_str(&format!(
                "IOReadBandwidthMax={} {limit}\n",
                quoted(&image, false)
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
                    "--as is for one image; others get the names of their files",
                ));
            }
            Some(name) => name.clone(),
            None => machine_of(image)?,
        };
        if machines.iter().any(|(_, other)| *other == machine) {
            return Err(usage(format!(
                "two images are called {machine}; name one with --as"
            )));
        }
        machines.push((std::path::absolute(image)?, machine));
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
    let mut keep = Vec::new();
    for (option, n) in [
        ("--keep-last", args.keep_last),
        ("--keep-daily", args.keep_daily),
        ("--keep-weekly", args.keep_weekly),
        ("--keep-monthly", args.keep_monthly),
    ] {
        if n > 0 {
            keep.extend([option.to_owned(), n.to_string()]);
        }
    }
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
        keep,
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
    for (image, machine) in &machines {
        let of_plan = |path: &Option<PathBuf>| {
            path.as_deref()
                .map_or(Some(""), Path::to_str)
                .map(str::to_owned)
        };
        let text = [
            image.to_str().map(str::to_owned),
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
        if !args.remove && !image.exists() {
            return Err(Error::refused(format!("there is no {}", image.display())).into());
        }
        let (service, timer) = plan.units(image, machine);
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
