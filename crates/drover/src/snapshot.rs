//! `snapshot`: of files, of machines, and of disks that mounts serve.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use drover_agent::error::Error;
use drover_agent::home::Home;
use drover_agent::mounts::{self, Borrowed, HoldDisk};
use drover_agent::signals::Stop;
use drover_agent::text::{bytes, clean};
use drover_agent::vaults;
use drover_core::{ImageName, ReadAt};
use drover_hypervisor::Hypervisor;
use drover_image::Outgoing;
use drover_migrate::moment::{self, Frozen, HeldDisk, MachineMoment, MachineOptions};
use drover_migrate::{Commands, Hooks};
use drover_net::DEFAULT_DOMAIN;
use drover_store::machine::Machines;
use drover_vault::{Backup, Entry, Machine, SessionId, Since, SnapshotId, Source, Vault};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::cli::{self, SnapshotArgs, SnapshotOf};
use crate::failure::{refused, usage};
use crate::vault::{Progress, json_of, open};
use crate::{migrate, out};

/// `drover snapshot`.
///
/// # Errors
/// When the source cannot be read, or the vault cannot be written.
pub fn snapshot(home: Option<&Path>, mut args: SnapshotArgs) -> Result<()> {
    if let Some(peer) = args.peer.take() {
        args.of.vault.vault = Some(peer);
    }
    let args = &args;
    let path = match &args.of_what {
        SnapshotOf::Machine(hypervisor) => return of_machine(home, hypervisor, args),
        SnapshotOf::Named(path) => path,
    };
    if args.freeze == cli::Freeze::Always {
        return Err(usage(
            "--freeze always is for machines, as qmp:/run/web.qmp: a guest agent is asked by QEMU",
        ));
    }
    match mounted(home, path, args)? {
        Some((home, image, domain)) => of_mount(&home, &image, &domain, args),
        None => of_file(home, path, args),
    }
}

/// The image that is meant, if that is one that a mount of this site serves for writing.
fn mounted(
    home: Option<&Path>,
    path: &Path,
    args: &SnapshotArgs,
) -> Result<Option<(Home, ImageName, String)>> {
    let Ok(home) = Home::existing(Home::locate(home)?) else {
        return Ok(None);
    };
    let absolute = std::path::absolute(path)?;
    if let Some((image, domain)) = mounts::shown_at(&home, &absolute)? {
        let domain = domain.unwrap_or_else(|| DEFAULT_DOMAIN.to_owned());
        return Ok(Some((home, image, domain)));
    }
    // A file goes first.
    let name = path.to_str().and_then(|name| ImageName::new(name).ok());
    Ok(name
        .filter(|_| !absolute.exists())
        .map(|image| (home, image, args.domain.domain.clone())))
}

fn of_file(home: Option<&Path>, path: &Path, args: &SnapshotArgs) -> Result<()> {
    let given = [
        (args.pause.is_some(), "--pause"),
        (args.resume.is_some(), "--resume"),
        (args.scratch.is_some(), "--scratch"),
        (args.once, "--once"),
    ];
    if let Some((_, option)) = given.iter().find(|(is_given, _)| *is_given) {
        return Err(usage(format!(
            "{option} is for what is in use: a machine, or an image that a mount of this site serves for writing"
        )));
    }
    let vault = open(home, &args.of)?;
    let path = std::path::absolute(path)?;
    let machine = named(
        args,
        &path.file_stem().unwrap_or_default().to_string_lossy(),
    )?;
    let source = Source::file(&path).map_err(Error::from)?;
    let mut made = Made::new(&vault, args, std::slice::from_ref(&machine))?;
    made.add(&source, &machine, json!({}))?;
    made.show(None)
}

/// The name of the machine in the vault.
fn named(args: &SnapshotArgs, name: &str) -> Result<Machine> {
    match &args.name {
        Some(name) => Ok(name.clone()),
        None => Machine::new(name).map_err(|e| usage(format!("{e}; name the machine with --as"))),
    }
}

fn site(home: Option<&Path>) -> Result<Home> {
    Ok(Home::existing(Home::locate(home)?)?)
}

fn of_machine(
    home: Option<&Path>,
    hypervisor: &cli::Hypervisor,
    args: &SnapshotArgs,
) -> Result<()> {
    let site = site(home)?;
    let vault = open(home, &args.of)?;
    let runtime = crate::runtime::runtime()?;
    let done = runtime.block_on(begin(&site, hypervisor, args, &vault));
    let done = done.and_then(|(stop, held)| held.back_up(&runtime, &vault, args, &stop));
    runtime.shutdown_background();
    done
}

/// The disks of a machine that are held, and what is kept meanwhile.
struct HeldMachine {
    moment: MachineMoment,
    disks: Vec<HeldDisk>,
    name: ImageName,
    /// Where it is.
    place: String,
    _lock: drover_store::machine::MachineLock,
}

/// Holds the disks of a machine; signals end it in an orderly way from now on.
async fn begin(
    home: &Home,
    hypervisor: &cli::Hypervisor,
    args: &SnapshotArgs,
    vault: &Vault,
) -> Result<(watch::Receiver<bool>, HeldMachine)> {
    let (machine, name) = match migrate::connect(home, hypervisor).await? {
        (Some(Hypervisor::Qemu(machine)), name) => (machine, name),
        (Some(Hypervisor::Libvirt(domain)), name) => {
            if args.freeze == cli::Freeze::Always {
                return Err(usage(
                    "the guest agent of a machine of libvirt is libvirt's: use --pause 'virsh domfsfreeze NAME' --resume 'virsh domfsthaw NAME'",
                ));
            }
            (domain.machine().await?, name)
        }
        (None, _) => anyhow::bail!("{hypervisor} runs no machine"),
    };
    let directory = home.machines().directory().to_owned();
    let locks = Machines::new(directory.join(".snapshots"));
    let Some(lock) = locks.lock(&name)? else {
        return Err(refused(format!(
            "another process makes a snapshot of {name}: wait for its end"
        )));
    };
    let work = directory.join(format!(".{name}.vault"));
    let scratch = match &args.scratch {
        Some(scratch) => std::path::absolute(scratch)?.join(format!("drover-{name}")),
        None => work.clone(),
    };
    let options = MachineOptions {
        name: name.clone(),
        series: series(vault),
        work,
        scratch,
        freeze: match hypervisor {
            // Its agent is libvirt's.
            cli::Hypervisor::Libvirt(_) => cli::Freeze::Never.into(),
            cli::Hypervisor::Qmp(_) => args.freeze.into(),
        },
        hooks: Arc::new(Commands {
            pause: args.pause.clone(),
            resume: args.resume.clone(),
        }),
        all: args.read_all,
    };
    // Nothing comes between a freeze and its end.
    let stop = Stop::on_signals()?.watch();
    let held = MachineMoment::hold(&machine, &options).await;
    let (moment, disks) = held.map_err(|e| migrate::failed(e, ""))?;
    let held = HeldMachine {
        moment,
        disks,
        name,
        place: hypervisor.to_string(),
        _lock: lock,
    };
    Ok((stop, held))
}

/// What tells what is recorded for this vault from that for others.
fn series(vault: &Vault) -> String {
    let id = vault.record().id;
    let id: String = id[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("v{id}")
}

impl HeldMachine {
    fn back_up(
        self,
        runtime: &Runtime,
        vault: &Vault,
        args: &SnapshotArgs,
        stop: &watch::Receiver<bool>,
    ) -> Result<()> {
        let frozen = self.moment.frozen.clone();
        let made = self.disks_into(vault, args, stop);
        let made = match made {
            Ok(made) => made,
            Err(e) => {
                runtime.block_on(self.moment.give_up());
                return Err(e);
            }
        };
        let notes: Vec<String> = made.notes();
        let ended = runtime.block_on(async {
            match args.once {
                true => {
                    self.moment.end().await;
                    Ok(())
                }
                false => self.moment.done(&notes).await,
            }
        });
        if let Err(e) = ended {
            out::note(&format!(
                "drover: the next snapshot reads all of the disks: {e}"
            ));
        }
        made.show(Some(&frozen))
    }

    fn disks_into<'a>(
        &self,
        vault: &'a Vault,
        args: &'a SnapshotArgs,
        stop: &watch::Receiver<bool>,
    ) -> Result<Made<'a>> {
        let base = named(args, self.name.as_str())?;
        let names = self.disks.iter().map(|disk| match self.disks.len() {
            1 => Ok(base.clone()),
            _ => Machine::new(format!("{base}.{}", disk.device))
                .map_err(|e| usage(format!("the disk {} of {base}: {e}", clean(&disk.device)))),
        });
        let names: Vec<Machine> = names.collect::<Result<_>>()?;
        let mut made = Made::new(vault, args, &names)?;
        let frozen = matches!(self.moment.frozen, Frozen::Yes(_));
        for (disk, machine) in self.disks.iter().zip(&names) {
            let since = disk.since.as_ref();
            let since = since.map(|(note, written)| (note.as_str(), written.as_slice()));
            let source = Source {
                image: stoppable(&disk.image, stop),
                from: format!("{} ({})", self.place, clean(&disk.device)),
                since: since_of(vault, machine, since)?,
            };
            let more = json!({"device": disk.device, "frozen": frozen});
            made.add(&source, machine, more)?;
        }
        Ok(made)
    }
}

fn of_mount(home: &Home, image: &ImageName, domain: &str, args: &SnapshotArgs) -> Result<()> {
    let stem = PathBuf::from(image.as_str());
    let machine = named(
        args,
        &stem.file_stem().unwrap_or_default().to_string_lossy(),
    )?;
    let runtime = crate::runtime::runtime()?;
    let vault = open(Some(home.dir()), &args.of)?;
    let order = HoldDisk {
        image: image.clone(),
        purpose: match args.read_all {
            // Nothing goes on from that.
            true => String::new(),
            false => series(&vault),
        },
        scratch: args.scratch.as_ref().map(std::path::absolute).transpose()?,
    };
    let hooks = Commands {
        pause: args.pause.clone(),
        resume: args.resume.clone(),
    };
    let stop = runtime.block_on(async { Ok::<_, Error>(Stop::on_signals()?.watch()) })?;
    let paused = hooks.pause(&|| false);
    let borrowed = match &paused {
        Ok(()) => runtime.block_on(mounts::borrow(home, domain, &order)),
        Err(_) => Ok(None),
    };
    // Also after a pause that failed: some of it may be.
    let resumed = hooks.resume();
    paused.and(resumed).map_err(refused)?;
    let borrowed = borrowed?;
    let Some(borrowed) = borrowed else {
        return Err(refused(format!(
            "there is no file {image}, and no mount of this site has an image of that name open for writing"
        )));
    };
    let made = of_borrowed(&borrowed, image, &machine, &vault, args, &stop)?;
    if !args.once {
        let notes = made.notes();
        let note = notes.into_iter().next().unwrap_or_default();
        if let Err(e) = runtime.block_on(borrowed.read(note)) {
            out::note(&format!(
                "drover: the next snapshot reads all of the disk: {e}"
            ));
        }
    }
    made.show(None)
}

fn of_borrowed<'a>(
    borrowed: &Borrowed,
    image: &ImageName,
    machine: &Machine,
    vault: &'a Vault,
    args: &'a SnapshotArgs,
    stop: &watch::Receiver<bool>,
) -> Result<Made<'a>> {
    let outgoing = moment::image(Arc::clone(&borrowed.device))
        .with_context(|| format!("cannot read the disk of {image}"))?;
    let since = borrowed.since.as_ref();
    let since = since.map(|(note, written)| (note.as_str(), written.as_slice()));
    let source = Source {
        image: stoppable(&outgoing, stop),
        from: image.to_string(),
        since: since_of(vault, machine, since)?,
    };
    let mut made = Made::new(vault, args, std::slice::from_ref(machine))?;
    made.add(&source, machine, json!({}))?;
    Ok(made)
}

/// What was written since the snapshot that a note means; none if it is not one of this machine.
fn since_of(
    vault: &Vault,
    machine: &Machine,
    since: Option<(&str, &[std::ops::Range<u64>])>,
) -> Result<Option<Since>> {
    let Some((note, written)) = since else {
        return Ok(None);
    };
    let Some(session) = SessionId::parse(note) else {
        return Ok(None);
    };
    let parent = vault.of_session(machine, session).map_err(Error::from)?;
    Ok(parent.map(|parent| Since {
        parent,
        written: written.to_vec(),
    }))
}

/// Snapshots of one time.
struct Made<'a> {
    vault: &'a Vault,
    args: &'a SnapshotArgs,
    time: i64,
    clock: Option<String>,
    all: Vec<(Backup, Value)>,
}

impl<'a> Made<'a> {
    fn new(vault: &'a Vault, args: &'a SnapshotArgs, machines: &[Machine]) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs() as i64);
        let (time, clock) = vault.time_for(machines, now).map_err(Error::from)?;
        Ok(Made {
            vault,
            args,
            time,
            clock,
            all: Vec::new(),
        })
    }

    /// Makes one more. If it fails, those before it go, too.
    fn add(&mut self, source: &Source, machine: &Machine, more: Value) -> Result<()> {
        let mut progress = Progress::new(machine.as_str(), self.args.of.json);
        let host = vaults::host();
        let made = self
            .vault
            .backup_source(source, machine, &host, self.time, &mut |p| {
                progress.at(
                    p.done_bytes,
                    p.total_bytes,
                    || json!({"new_bytes": p.new_bytes, "stored_bytes": p.stored_bytes}),
                );
            });
        progress.clear();
        match made {
            Ok(made) => {
                self.all.push((made, more));
                Ok(())
            }
            Err(e) => {
                let ids: Vec<SnapshotId> =
                    self.all.iter().map(|(made, _)| made.id.clone()).collect();
                if !ids.is_empty()
                    && let Err(e) = self.vault.forget(&ids)
                {
                    out::note(&format!(
                        "drover: snapshots of some of the disks are left: {e}"
                    ));
                }
                Err(Error::from(e).into())
            }
        }
    }

    /// What the states are called by which the next snapshots go on.
    fn notes(&self) -> Vec<String> {
        self.all
            .iter()
            .map(|(made, _)| made.id.session.to_string())
            .collect()
    }

    fn show(self, frozen: Option<&Frozen>) -> Result<()> {
        if let Some(note) = &self.clock {
            out::note(&format!("drover: {}", clean(note)));
        }
        for (made, more) in self.all {
            for note in &made.notes {
                out::note(&format!("drover: {}", clean(note)));
            }
            let entry = Entry {
                id: made.id,
                record: made.record,
            };
            if self.args.of.json {
                let mut event = json_of(&entry);
                event["event"] = "snapshot".into();
                event["read_bytes"] = made.read_bytes.into();
                if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
                    event.extend(more);
                }
                out::json(&event)?;
                continue;
            }
            let r = &entry.record;
            out::line(&format!(
                "{}: {} read, {} of data, {} of it new, {} stored",
                clean(&entry.id.to_string()),
                bytes(made.read_bytes),
                bytes(r.data_bytes),
                bytes(r.new_bytes),
                bytes(r.stored_bytes)
            ))?;
        }
        match frozen {
            None => {}
            Some(Frozen::Yes(count)) => out::note(&format!(
                "drover: the guest's file systems were frozen for the moment ({count} of them)"
            )),
            Some(Frozen::No(why)) => out::note(&format!(
                "drover: the guest's file systems were not frozen: {}; the disks are as after a power failure at that moment",
                clean(why)
            )),
        }
        Ok(())
    }
}

/// The same image, whose reads fail once the process is to stop.
fn stoppable(image: &Outgoing, stop: &watch::Receiver<bool>) -> Outgoing {
    Outgoing {
        content: Arc::new(Stoppable(Arc::clone(&image.content), stop.clone())),
        layout: image.layout.clone(),
        format: image.format,
        virtual_size: image.virtual_size,
        notes: image.notes.clone(),
        stamps: image.stamps.clone(),
    }
}

struct Stoppable(Arc<dyn ReadAt>, watch::Receiver<bool>);

impl ReadAt for Stoppable {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match *self.1.borrow() {
            true => Err(io::Error::other("stopped by a signal")),
            false => self.0.read_at(buffer, offset),
        }
    }
}
