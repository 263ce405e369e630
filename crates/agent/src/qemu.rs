//! QEMUs that drover builds for machines of other sites: what is known of such a machine, the command line, and the process
//! that looks after it.
//!
//! In the directory `qemu` of the site are, for each machine that config.toml says is built: `NAME.spec`, what the other site
//! said of it for its last move, and `NAME.last`, for the move by which it came last; `NAME.qmp`, the monitor; `NAME.console`,
//! its first console; `NAME.log`, what QEMU has said, bounded; `NAME.pid`, its process; `NAME.ended`, how it ended;
//! `NAME.start`, what the command that starts it has said.
//!
//! QEMU is started by a process of its own, [`run`], which the site starts, or a service manager does: it gives QEMU its
//! sockets as open descriptors, so that QEMU needs no directory to write to, reads what it says, and reports its end. It lives
//! as long as QEMU does, whatever becomes of the site.

use std::fs::{self, DirBuilder, File, Permissions, TryLockError};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use drover_core::ImageName;
use drover_hypervisor::CommandLine;
use drover_hypervisor::spec::{Accelerator, Built, Kernel, Spec, build};
use drover_net::{decode, encode};
use drover_storage::{Envelope, create_private, make_private_dir, open_private};
use drover_store::machine::{Decision, MachineRecord, Move, Seed, Token};
use drover_store::replica::Replica;
use nix::unistd::{Group, User};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::audit::{Event, Outcome, Record};
use crate::error::{Context, Error, Result, bail};
use crate::home::qemu::{Files, OURS};
use crate::home::{BuildConfig, Home};

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRSPC\0",
    version: 1,
    max_bytes: 1 << 20,
};

/// Upper bound on what is kept of what a QEMU says: twice this.
const MAX_LOG: u64 = 256 << 10;

/// Where QEMUs that run as another user find the sockets of their disks: the site directory is closed to them.
const SHARED: &str = "/run/drover";

/// The user and group that a QEMU runs as; none if those of this process.
///
/// # Errors
/// When it would be root's, or cannot be started as that user.
pub fn user(name: &ImageName, build: &BuildConfig) -> Result<Option<(u32, u32)>> {
    let is_root = rustix::process::geteuid().is_root();
    let Some(user) = &build.user else {
        if is_root {
            return Err(Error::refused(format!(
                "this site runs as root, and the QEMU of a peer's machine must not: name another user, which nothing else \
                 runs as, with `user` in [machines.{name}.build]"
            )));
        }
        return Ok(None);
    };
    let found = User::from_name(user).map_err(std::io::Error::from)?;
    let Some(found) = found else {
        return Err(Error::refused(format!(
            "there is no user {user:?}, which `user` in [machines.{name}.build] names"
        )));
    };
    let group = match &build.group {
        None => found.gid,
        Some(group) => match Group::from_name(group).map_err(std::io::Error::from)? {
            Some(group) => group.gid,
            None => {
                return Err(Error::refused(format!(
                    "there is no group {group:?}, which `group` in [machines.{name}.build] names"
                )));
            }
        },
    };
    if found.uid.is_root() || group.as_raw() == 0 {
        return Err(Error::refused(format!(
            "the QEMU of a peer's machine does not run as root: name another `user` in [machines.{name}.build]"
        )));
    }
    let own = rustix::process::geteuid().as_raw() == found.uid.as_raw();
    match (is_root, own && build.group.is_none()) {
        (true, _) => Ok(Some((found.uid.as_raw(), group.as_raw()))),
        (false, true) => Ok(None),
        (false, false) => Err(Error::refused(format!(
            "only root can start a QEMU as another user or group: run this site as root, or leave `user` and `group` out \
             of [machines.{name}.build]"
        ))),
    }
}

/// Where the disks of a machine are served to a QEMU of that user: in a directory that it can pass and not change.
///
/// # Errors
/// When that directory cannot be made, or is not root's.
pub fn shared_socket(site: &Path, name: &ImageName) -> Result<PathBuf> {
    // However it is spelled: a machine that runs looks for its disks there.
    let site = fs::canonicalize(site).with_context(|| format!("cannot find {}", site.display()))?;
    let hash = blake3::hash(site.as_os_str().as_encoded_bytes()).to_hex();
    let mut directory = PathBuf::from(SHARED);
    for part in ["", &hash[..16]] {
        directory.push(part);
        let cannot = || format!("cannot make {}", directory.display());
        match DirBuilder::new().mode(0o711).create(&directory) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(e).with_context(cannot);
            }
            _ => {}
        }
        let found = fs::symlink_metadata(&directory).with_context(cannot)?;
        if !found.is_dir() || found.uid() != 0 || found.mode() & 0o022 != 0 {
            bail!(
                "{} is not a directory that only root can change: remove it",
                directory.display()
            );
        }
        fs::set_permissions(&directory, Permissions::from_mode(0o711)).with_context(cannot)?;
    }
    Ok(directory.join(format!("{name}.nbd")))
}

/// The command line of the QEMU for a machine that is such.
///
/// # Errors
/// What of it this site does not build.
pub fn command_line(
    name: &ImageName,
    config: &BuildConfig,
    spec: &Spec,
    incoming: bool,
) -> Result<CommandLine> {
    let text = |path: &PathBuf| path.display().to_string();
    let site = Built {
        program: text(&config.program),
        name: name.to_string(),
        max_memory: config.memory,
        max_cpus: config.cpus,
        network: config.network.clone(),
        kernel: config.kernel.as_ref().map(|kernel| Kernel {
            kernel: text(kernel),
            initrd: config.initrd.as_ref().map(text),
            append: config.append.clone(),
        }),
        incoming,
    };
    let built = match (spec.accelerator, config.accelerator) {
        (of, allowed) if of == allowed => build(spec, &site),
        (Accelerator::Tcg, _) => Err(
            "is executed by QEMU itself, not by KVM, and `accelerator` there is not \"tcg\"".into(),
        ),
        (Accelerator::Kvm, _) => {
            Err("is executed by KVM, and `accelerator` there is \"tcg\"".into())
        }
    };
    built.map_err(|why| {
        Error::refused(format!(
            "no QEMU is built for {name}: it {why}. If that is meant, change [machines.{name}.build] in config.toml, or give it \
             `incoming` and `start` instead (`drover migrate --start-script`)"
        ))
    })
}

/// What another site said of a machine that it brings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Described {
    /// The move.
    pub token: Token,
    /// The key of that site.
    pub from: [u8; 32],
    /// The machine's seed.
    pub seed: Seed,
    /// What it is made of.
    pub spec: Spec,
}

impl Described {
    /// Whether it is of the move that is under way.
    #[must_use]
    pub fn is_coming(&self, record: &MachineRecord) -> bool {
        let is_its = matches!(&record.under_way, Some(Move::Coming(token, from, _))
            if *token == self.token && from.key == self.from);
        is_its && record.seed == self.seed
    }

    /// Whether the machine came by that move.
    #[must_use]
    pub fn has_come(&self, record: &MachineRecord) -> bool {
        record.seed == self.seed && record.decision(self.token) == Decision::Taken
    }

    /// Whether it is of the machine of a replica: another one may have been here under its name.
    #[must_use]
    pub fn is_of(&self, replica: &Replica) -> bool {
        self.seed == replica.seed || self.from == replica.from.key
    }
}

/// Keeps what another site said of a machine.
///
/// # Errors
/// When it cannot be written.
pub fn store(
    site: &Path,
    name: &ImageName,
    described: &Described,
    record: &MachineRecord,
) -> Result<()> {
    let files = Files::of(site, name.as_str());
    let cannot = || format!("cannot write {}", files.spec().display());
    make_private_dir(files.directory()).with_context(cannot)?;
    // If this move comes to nothing, the machine is what it was.
    if let Ok(Some(old)) = load(site, name)
        && old.has_come(record)
    {
        fs::rename(files.spec(), files.last()).with_context(cannot)?;
    }
    FORMAT
        .write(&files.spec(), &encode(described))
        .with_context(cannot)
}

/// Removes what was said of a machine for a move that came to nothing.
///
/// # Errors
/// When it cannot be removed.
pub fn forget(site: &Path, name: &ImageName, record: &MachineRecord) -> Result<()> {
    let files = Files::of(site, name.as_str());
    if let Ok(Some(known)) = load(site, name)
        && known.has_come(record)
    {
        return Ok(());
    }
    let removed = fs::rename(files.last(), files.spec()).or_else(|_| fs::remove_file(files.spec()));
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", files.spec().display()))
        }
        _ => Ok(()),
    }
}

/// What another site said of a machine; `None` if nothing was.
///
/// # Errors
/// When it cannot be read.
pub fn load(site: &Path, name: &ImageName) -> Result<Option<Described>> {
    let path = Files::of(site, name.as_str()).spec();
    let cannot = || format!("cannot read {}", path.display());
    let Some(bytes) = FORMAT.read(&path).with_context(cannot)? else {
        return Ok(None);
    };
    let body = FORMAT.open(&bytes).map_err(std::io::Error::other);
    let described = decode(body.with_context(cannot)?);
    Ok(Some(
        described
            .map_err(std::io::Error::other)
            .with_context(cannot)?,
    ))
}

/// How the QEMU of a machine is started.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its command line.
    pub line: CommandLine,
    /// The user and group that it runs as; none if those of this process.
    pub user: Option<(u32, u32)>,
}

/// How this site starts the QEMU of a machine: one that waits for it if it is coming, by the move for which it was described,
/// or else one that boots it.
///
/// # Errors
/// When config.toml does not say that it is built, nothing was said of it, it is at another site, or it is not allowed.
pub fn planned(home: &Home, name: &ImageName) -> Result<Plan> {
    let config = built(home, name)?;
    let known = home.machines().load(name).map_err(Error::Refused)?;
    let (Some(described), Some(record)) = (load(home.dir(), name)?, known) else {
        return Err(Error::refused(format!(
            "nothing is known of {name} yet: the site that it comes from says what it is made of when it moves here. A machine \
             of libvirt, and a site of an earlier version, say nothing: give it `incoming` and `start` in config.toml instead"
        )));
    };
    let incoming = matches!(record.under_way, Some(Move::Coming(..)));
    if !incoming && !record.may_run() {
        return Err(Error::refused(format!(
            "{name} is at another site, and is not coming here now"
        )));
    }
    let is_its = match incoming {
        true => described.is_coming(&record),
        false => described.has_come(&record),
    };
    if !is_its {
        return Err(Error::refused(format!(
            "what is known of {name} was said for another move: the site that it comes from has to say what it is made of. \
             One of an earlier version does not: give it `incoming` and `start` in config.toml instead"
        )));
    }
    Ok(Plan {
        line: command_line(name, config, &described.spec, incoming)?,
        user: user(name, config)?,
    })
}

/// The sockets of the QEMU of a machine: its monitor, and its first console.
#[must_use]
pub fn sockets(home: &Home, name: &ImageName) -> (PathBuf, PathBuf) {
    let files = Files::of(home.dir(), name.as_str());
    (files.monitor(), files.console())
}

/// The QEMU of a machine that was started last, if it has not ended.
#[must_use]
pub fn process(site: &Path, name: &ImageName) -> Option<OwnedFd> {
    let known = fs::read_to_string(Files::of(site, name.as_str()).pid()).ok()?;
    let (process, began) = known.trim().split_once(' ')?;
    let process: u32 = process.parse().ok()?;
    let pid = Pid::from_raw(process.try_into().ok()?)?;
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // Others may have got its number since.
    (beginning(process)? == began).then_some(descriptor)
}

/// Ends at once the QEMU of a machine that was started last, if it has not ended; whether it had not.
#[must_use]
pub fn kill(site: &Path, name: &ImageName) -> bool {
    process(site, name).is_some_and(|process| pidfd_send_signal(process, Signal::KILL).is_ok())
}

/// When a process began, in the clock ticks of the kernel.
fn beginning(process: u32) -> Option<String> {
    let told = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of its program may have spaces.
    let (_, fields) = told.rsplit_once(") ")?;
    fields.split(' ').nth(19).map(str::to_owned)
}

fn built<'a>(home: &'a Home, name: &ImageName) -> Result<&'a BuildConfig> {
    let config = home.config.machines.get(name.as_str());
    config
        .and_then(|config| config.build.as_ref())
        .ok_or_else(|| Error::refused(format!("config.toml has no table [machines.{name}.build]")))
}

/// Starts the QEMU of a machine, and looks after it until it ends.
///
/// # Errors
/// When it cannot be started, another process looks after it, or it ends with an error.
pub fn run(home: &Home, name: &ImageName) -> Result<()> {
    // A terminal is no way out of QEMU's user: what is typed there is read by a shell of this one.
    if rustix::process::setsid().is_err() && File::open("/dev/tty").is_ok() {
        bail!(
            "the QEMU of a peer's machine gets no terminal: start it by a service manager, or with `setsid -w drover migrate \
             --start {name}`"
        );
    }
    let files = Files::of(home.dir(), name.as_str());
    make_private_dir(files.directory())?;
    let lock = files.file("lock");
    let lock = open_private(&lock).with_context(|| format!("cannot open {}", lock.display()))?;
    let is_locked = match lock.try_lock() {
        Ok(()) => false,
        Err(TryLockError::WouldBlock) => true,
        Err(TryLockError::Error(e)) => return Err(e.into()),
    };
    // One may have lost the process that looked after it.
    if is_locked || UnixStream::connect(files.monitor()).is_ok() {
        bail!("the QEMU of {name} runs already");
    }
    let _ = fs::remove_file(files.ended());
    let mut log = Log::open(files.log())?;
    let ended = look_after(home, name, &files, &mut log);
    let (outcome, text) = match &ended {
        Ok(()) => (Outcome::Ok, "its QEMU has ended".to_owned()),
        Err(e) => (Outcome::Failed, e.to_string()),
    };
    log.write(format!("{OURS}ended: {text}\n").as_bytes());
    let told = create_private(&files.ended()).and_then(|mut file| file.write_all(text.as_bytes()));
    if let Err(e) = told {
        tracing::warn!("cannot write {}: {e}", files.ended().display());
    }
    let mut record = Record::new(Event::MachineEnded).machine(name).detail(&text);
    record.outcome = outcome;
    home.audit().write(record);
    ended
}

fn look_after(home: &Home, name: &ImageName, files: &Files, log: &mut Log) -> Result<()> {
    let Plan { line, user } = planned(home, name)?;
    log.write(format!("{OURS}{}\n", line.shell().replace(" \\\n ", "")).as_bytes());
    let monitor = Socket::bind(files.monitor())?;
    let console = Socket::bind(files.console())?;
    // The memory of a machine has no place in a file. Less than this, and the program that is given core dumps has it still.
    let none = rustix::process::Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    rustix::process::setrlimit(rustix::process::Resource::Core, none)
        .map_err(std::io::Error::from)?;
    let mut command = Command::new(&line.program);
    for (option, argument) in &line.options {
        command.arg(option).args(argument);
    }
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .current_dir("/")
        .stdin(Stdio::from(monitor.descriptor()?))
        .stdout(Stdio::from(console.descriptor()?))
        .stderr(Stdio::piped());
    if let Some((user, group)) = user {
        command.uid(user).gid(group);
    }
    let child = command.spawn();
    let mut child = child.with_context(|| format!("cannot start {}", line.program))?;
    // Who connects when QEMU has ended is told so.
    drop(command);
    let (monitor, console) = (monitor.forget(), console.forget());
    let began = beginning(child.id()).unwrap_or_default();
    if let Err(e) = fs::write(files.pid(), format!("{} {began}\n", child.id())) {
        // Nobody could end it.
        let _ = child.kill();
        let _ = child.wait();
        return Err(e).with_context(|| format!("cannot write {}", files.pid().display()));
    }
    let mut said = child.stderr.take().context("QEMU has no stderr")?;
    let mut buffer = [0; 4096];
    // Everything below it holds the pipe has ended too.
    while let Ok(n @ 1..) = said.read(&mut buffer) {
        log.write(&buffer[..n]);
    }
    let status = child.wait()?;
    for file in [monitor, console, files.pid()] {
        let _ = fs::remove_file(file);
    }
    match status.success() {
        true => Ok(()),
        false => {
            let mut text = format!("the QEMU of {name} ended with {status}");
            let said = files.last_said();
            if !said.is_empty() {
                text += &format!(": {said}");
            }
            Err(Error::refused(text))
        }
    }
}

/// A listening socket of this user alone.
struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    /// Replaces what an earlier one has left: the lock is held.
    fn bind(path: PathBuf) -> Result<Socket> {
        let cannot = || format!("cannot listen at {}", path.display());
        match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).with_context(cannot);
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).with_context(cannot)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600)).with_context(cannot)?;
        Ok(Socket { path, listener })
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// It is QEMU's from now on.
    fn forget(self) -> PathBuf {
        self.path
    }
}

/// What a QEMU says, the last of it.
struct Log {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Log {
    fn open(path: PathBuf) -> Result<Log> {
        let cannot = || format!("cannot open {}", path.display());
        let file = File::options()
            .append(true)
            .open(&path)
            .or_else(|_| create_private(&path));
        let file = file.with_context(cannot)?;
        let bytes = file.metadata().with_context(cannot)?.len();
        Ok(Log { path, file, bytes })
    }

    /// A log that cannot be written costs no machine.
    fn write(&mut self, bytes: &[u8]) {
        if self.bytes + bytes.len() as u64 > MAX_LOG {
            let _ = fs::rename(&self.path, self.path.with_extension("log.old"));
            if let Ok(file) = create_private(&self.path) {
                (self.file, self.bytes) = (file, 0);
            }
        }
        if self.bytes + bytes.len() as u64 <= MAX_LOG && self.file.write_all(bytes).is_ok() {
            self.bytes += bytes.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests;
