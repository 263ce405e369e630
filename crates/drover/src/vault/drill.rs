//! `drover vault drill`: that snapshots can be restored, and machines started from them.

use std::fs;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use drover_agent::error::Error;
use drover_agent::text::{bytes, clean, count};
use drover_image::ImageFile;
use drover_vault::{Entry, SessionId, Vault};
use serde_json::json;

use super::common::{Progress, open};
use crate::cli::VaultDrillArgs;
use crate::out;

/// Of what a guest has written last, so much is kept.
const MAX_TAIL: usize = 4096;
/// Of that, so much is in an error.
const MAX_SHOWN: usize = 200;

/// The directory that snapshots are restored to; removed with this.
struct Scratch(PathBuf);

impl Scratch {
    fn new(below: Option<&Path>) -> Result<Scratch> {
        if let Some(below) = below {
            fs::create_dir_all(below)
                .with_context(|| format!("cannot create {}", below.display()))?;
        }
        let below = below.map_or_else(std::env::temp_dir, Path::to_path_buf);
        let path = below.join(format!("drover-drill-{}", SessionId::random()));
        // One that is there already is somebody else's, or leads elsewhere.
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a drill of one snapshot showed.
#[derive(Default)]
struct Shown {
    restore: Duration,
    boot: Option<Duration>,
}

/// `drover vault drill`.
///
/// # Errors
/// When a snapshot cannot be restored, or a machine does not start.
pub fn drill(home: Option<&Path>, args: &VaultDrillArgs) -> Result<()> {
    let vault = open(home, &args.of)?;
    let mut entries = chosen(&vault, args)?;
    if entries.is_empty() {
        return Err(Error::refused("there are no snapshots").into());
    }
    if let Some(sample) = args.sample {
        fastrand::shuffle(&mut entries);
        entries.truncate(usize::from(sample));
    }
    let scratch = Scratch::new(args.dir.as_deref())?;
    let mut failed = 0;
    for entry in &entries {
        let shown = one(&vault, entry, &scratch, args);
        failed += usize::from(shown.is_err());
        report(entry, &shown, args)?;
    }
    match failed {
        0 => Ok(()),
        _ => bail!("{} of {} failed", failed, count(entries.len(), "snapshot")),
    }
}

/// The newest snapshot of each machine, or of those that are named.
fn chosen(vault: &Vault, args: &VaultDrillArgs) -> Result<Vec<Entry>> {
    let (entries, damaged) = vault.snapshots(None).map_err(Error::from)?;
    for id in &damaged {
        out::note(&format!(
            "drover: the record of {} is damaged; see `drover vault check`",
            clean(&id.to_string())
        ));
    }
    let mut newest: Vec<Entry> = Vec::new();
    for entry in entries {
        if newest
            .last()
            .is_some_and(|last| last.id.machine == entry.id.machine)
        {
            newest.pop();
        }
        newest.push(entry);
    }
    if let Some(name) = args
        .names
        .iter()
        .find(|name| newest.iter().all(|e| e.id.machine != **name))
    {
        return Err(Error::refused(format!("there is no snapshot of {name}")).into());
    }
    newest.retain(|e| args.names.is_empty() || args.names.contains(&e.id.machine));
    Ok(newest)
}

fn one(vault: &Vault, entry: &Entry, scratch: &Scratch, args: &VaultDrillArgs) -> Result<Shown> {
    let path = scratch.0.join("disk");
    let began = Instant::now();
    // Nobody deletes it meanwhile.
    let hold = vault
        .hold(&entry.id, SessionId::random(), "a drill")
        .map_err(Error::from)?;
    let snapshot = vault.open_snapshot(&entry.id).map_err(Error::from)?;
    let mut progress = Progress::new(&entry.id.to_string(), args.of.json);
    let mut restore = || {
        vault.restore(&snapshot, &path, &mut |p| {
            progress.at(
                p.done_bytes,
                p.total_bytes,
                || json!({"snapshot": entry.id.to_string()}),
            );
        })
    };
    let restored = restore().map_err(Error::from);
    let took = began.elapsed();
    // Once more: what is in the file is read, and compared with the digests that the root proves.
    let again = restored.and_then(|_| restore().map_err(Error::from));
    progress.clear();
    drop(hold);
    let done = again.and_then(|again| match again.written_bytes {
        0 => Ok(()),
        n => Err(Error::msg(format!(
            "{n} bytes of the restored file are not what was written"
        ))),
    });
    let booted = done
        .map_err(anyhow::Error::from)
        .and_then(|()| match args.boot {
            true => boot(&path, args).map(Some),
            false => Ok(None),
        });
    let _ = fs::remove_file(&path);
    Ok(Shown {
        restore: took,
        boot: booted?,
    })
}

fn report(entry: &Entry, shown: &Result<Shown>, args: &VaultDrillArgs) -> Result<()> {
    let (name, size) = (entry.id.to_string(), entry.record.data_bytes);
    if args.of.json {
        let (good, error) = match shown {
            Ok(shown) => (Some(shown), None),
            Err(error) => (None, Some(error.to_string())),
        };
        return out::json(&json!({
            "event": "drill", "snapshot": name, "data_bytes": size, "ok": good.is_some(), "error": error,
            "restore_seconds": good.map(|s| s.restore.as_secs_f64()),
            "boot_seconds": good.and_then(|s| s.boot).map(|b| b.as_secs_f64()),
        }));
    }
    let name = clean(&name);
    match shown {
        Err(error) => out::line(&format!("{name}: FAILED: {}", clean(&error.to_string()))),
        Ok(shown) => {
            let booted = match shown.boot {
                Some(boot) => format!(", started in {:.1} s", boot.as_secs_f64()),
                None => String::new(),
            };
            out::line(&format!(
                "{name}: {} restored in {:.1} s and verified{booted}",
                bytes(size),
                shown.restore.as_secs_f64()
            ))
        }
    }
}

/// A QEMU; it ends with this.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The format that QEMU reads a disk as: the one that its content has, whatever is recorded. An image that names other files is
/// refused: whoever wrote it would choose what QEMU opens on this host.
fn format_of(disk: &Path) -> Result<&'static str> {
    let file = ImageFile::open(disk).context("cannot open what was restored")?;
    let parsed = drover_image::parse(Arc::new(file))
        .map_err(|error| anyhow!("restored, but not started: {error}"))?;
    if let Some(name) = parsed.companions.iter().chain(&parsed.backing).next() {
        bail!(
            "restored, but not started: the image names another file, {name:?}, and a drill opens none but its own"
        );
    }
    Ok(match parsed.format.as_str() {
        "vhd" => "vpc",
        known @ ("qcow2" | "vmdk" | "vhdx" | "vdi") => known,
        _ => "raw",
    })
}

/// Starts a machine from a disk, which it does not change, until its serial console has the text that is expected.
fn boot(disk: &Path, args: &VaultDrillArgs) -> Result<Duration> {
    let format = format_of(disk)?;
    // A comma ends a value unless it is doubled.
    let file = disk.display().to_string().replace(',', ",,");
    let drive = format!(
        "file={file},format={format},if={},snapshot=on",
        args.disk.as_str()
    );
    let began = Instant::now();
    let child = Command::new(&args.qemu)
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-monitor",
            "none",
        ])
        .args([
            "-machine",
            "accel=kvm:tcg",
            "-nic",
            "none",
            "-serial",
            "stdio",
            "-no-reboot",
        ])
        .args(["-sandbox", "on,spawn=deny,elevateprivileges=deny"])
        .args(["-m", &format!("{}M", args.memory >> 20), "-drive", &drive])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", args.qemu.display()))?;
    let mut machine = Machine(child);
    let (said, heard) = channel();
    if let Some(console) = machine.0.stdout.take() {
        listen(console, said.clone(), true);
    }
    if let Some(errors) = machine.0.stderr.take() {
        listen(errors, said, false);
    }
    wait_for(&heard, began, args)
}

/// Sends on what comes, until it ends; whether it is the console's.
fn listen(mut from: impl Read + Send + 'static, to: Sender<(bool, Vec<u8>)>, is_console: bool) {
    std::thread::spawn(move || {
        let mut part = [0; 1024];
        while let Ok(n @ 1..) = from.read(&mut part) {
            if to.send((is_console, part[..n].to_vec())).is_err() {
                return;
            }
        }
    });
}

fn wait_for(
    heard: &Receiver<(bool, Vec<u8>)>,
    began: Instant,
    args: &VaultDrillArgs,
) -> Result<Duration> {
    let (mut tail, mut errors) = (Vec::new(), Vec::new());
    let expected = args.expect.as_bytes();
    let text = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let text: Vec<&str> = text.split_whitespace().collect();
        let text = text.join(" ");
        let from = text
            .char_indices()
            .rev()
            .nth(MAX_SHOWN)
            .map_or(0, |(at, _)| at);
        text[from..].to_owned()
    };
    loop {
        match heard.recv_timeout(args.wait.saturating_sub(began.elapsed())) {
            Ok((true, part)) => {
                tail.extend_from_slice(&part);
                if tail
                    .windows(expected.len())
                    .any(|window| window == expected)
                {
                    return Ok(began.elapsed());
                }
                let surplus = tail.len().saturating_sub(MAX_TAIL.max(expected.len()));
                tail.drain(..surplus);
            }
            Ok((false, part)) => {
                errors.extend_from_slice(&part);
                errors.truncate(MAX_TAIL);
            }
            Err(RecvTimeoutError::Timeout) => bail!(
                "restored, but no {:?} on the serial console within {:?}; it ends with: {}",
                args.expect,
                args.wait,
                text(&tail)
            ),
            Err(RecvTimeoutError::Disconnected) => bail!(
                "restored, but the machine ended; it said: {} {}",
                text(&tail),
                text(&errors)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_names_another_file_is_not_started() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        assert_eq!(format_of(&path).unwrap(), "raw");
        let disk = Arc::new(ImageFile::open(&path).unwrap());
        let whole = 0..1 << 20;
        let image = drover_image::qcow2_of(disk, std::slice::from_ref(&whole)).unwrap();
        let mut bytes = vec![0; image.len() as usize];
        image.read_exact_at(&mut bytes, 0).unwrap();
        fs::write(dir.path().join("alone"), &bytes).unwrap();
        assert_eq!(format_of(&dir.path().join("alone")).unwrap(), "qcow2");
        // Where in the header the name is, and how long.
        let name = b"/etc/shadow";
        bytes[8..16].copy_from_slice(&1024u64.to_be_bytes());
        bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        bytes[1024..1024 + name.len()].copy_from_slice(name);
        fs::write(dir.path().join("over"), &bytes).unwrap();
        let error = format_of(&dir.path().join("over")).unwrap_err().to_string();
        assert!(
            error.contains("names another file, \"/etc/shadow\""),
            "{error}"
        );
    }

    #[test]
    fn a_scratch_directory_is_new_and_nobody_elses() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("a/b");
        let (one, other) = (
            Scratch::new(Some(&below)).unwrap(),
            Scratch::new(Some(&below)).unwrap(),
        );
        assert_ne!(one.0, other.0);
        assert_eq!(
            fs::metadata(&one.0).unwrap().permissions().mode() & 0o777,
            0o700
        );
        drop((one, other));
        assert_eq!(fs::read_dir(&below).unwrap().count(), 0);
    }
}
