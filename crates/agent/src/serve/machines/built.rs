//! The QEMU that this site builds for a machine, as the site that it comes from describes it.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_hypervisor::machine::RunState;
use drover_hypervisor::{HypervisorError, Machine};
use drover_migrate::Site;
use drover_migrate::protocol::{DescribeMachine, Kind};
use drover_net::service::Peer;
use drover_net::{Code, Refusal};
use drover_store::machine::{MachineRecord, Move};
use drover_store::replica::Replica;

use super::SiteMachines;
use super::start::{START_LIMIT, START_POLL, is_listening, none_waits};
use crate::error::{Error, failed};
use crate::home::BuildConfig;
use crate::home::qemu::Files;
use crate::qemu::{self, Described};

/// How long its monitor may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long it may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);

fn refused(error: Error) -> Refusal {
    Refusal::new(Code::Denied, error.to_string())
}

impl SiteMachines {
    fn build(&self, machine: &ImageName) -> Option<&BuildConfig> {
        // Disks of programs have names of their own.
        let of_machines = self.kind() == Kind::Machine;
        of_machines.then(|| self.config(machine).ok()?.build.as_ref())?
    }

    /// Takes what a peer says of a machine that it brings, or only asks about: whether a QEMU is built for it here.
    ///
    /// # Errors
    /// When the machine is not expected, or what the peer says is not built.
    pub async fn described(&self, peer: &Peer, told: DescribeMachine) -> Result<bool, Refusal> {
        let name = &told.machine;
        self.allow(peer, name, &[]).await?;
        let Some(build) = self.build(name) else {
            if told.spec.is_some() && told.token.is_none() {
                self.waits(name).await?;
            }
            return Ok(false);
        };
        let Some(spec) = told.spec else {
            return Ok(true);
        };
        qemu::command_line(name, build, &spec, true).map_err(refused)?;
        qemu::user(name, build).map_err(refused)?;
        if let Some(token) = told.token {
            let record = self.machines.load(name)?;
            let record = record.filter(|record| {
                matches!(&record.under_way, Some(Move::Coming(known, from, _))
                    if *known == token && from.key == peer.key.0)
            });
            let Some(record) = record else {
                let text = format!("{name} is not coming here by that move");
                return Err(Refusal::new(Code::OutOfOrder, text));
            };
            if record.disks.len() != spec.disks.len() {
                let text = format!(
                    "{name} has {} disks, and comes with {}",
                    spec.disks.len(),
                    record.disks.len()
                );
                return Err(Refusal::new(Code::Protocol, text));
            }
            let (home, name) = (self.server.home.dir().to_owned(), name.clone());
            let described = Described {
                token,
                from: peer.key.0,
                seed: record.seed,
                spec,
            };
            let stored = move || qemu::store(&home, &name, &described, &record);
            let stored = tokio::task::spawn_blocking(stored);
            stored.await.map_err(failed)?.map_err(failed)?;
        }
        Ok(true)
    }

    /// Refuses a machine whose QEMU is to wait for it here, and does not.
    async fn waits(&self, machine: &ImageName) -> Result<(), Refusal> {
        if self.kind() == Kind::Disk {
            return Ok(());
        }
        let config = self.config(machine)?;
        match &config.incoming {
            Some(socket) if config.start.is_empty() && !is_listening(socket).await => {
                Err(none_waits(machine, socket))
            }
            _ => Ok(()),
        }
    }

    /// Whether a QEMU can be built for a machine that was here, and of which this is a replica.
    pub(super) fn is_described(&self, machine: &ImageName, replica: &Replica) -> bool {
        let described = qemu::load(self.server.home.dir(), machine);
        let record = self.machines.load(machine);
        let (Ok(Some(described)), Ok(Some(record))) = (described, record) else {
            return false;
        };
        described.has_come(&record) && described.is_of(replica)
    }

    /// Where the disks of a machine are served, and the user who may connect there besides this one.
    ///
    /// Both stay what they are while the machine is here, whatever config.toml says by then: a QEMU that runs looks for its
    /// disks there when the site has been restarted.
    pub(super) fn served_at(&self, machine: &ImageName) -> Result<(PathBuf, Option<u32>), Refusal> {
        if self.kind() == Kind::Disk {
            return Ok((self.socket(machine), None));
        }
        let home = self.server.home.dir();
        let is_there = || qemu::process(home, machine).is_some();
        let user = noted_user(&self.user_note(machine), is_there, || {
            let build = self.build(machine);
            let user = build.map(|build| qemu::user(machine, build)).transpose();
            Ok(user.map_err(refused)?.flatten().map(|(user, _)| user))
        })?;
        let socket = match user {
            Some(_) => qemu::shared_socket(home, machine).map_err(failed)?,
            None => self.socket(machine),
        };
        Ok((socket, user))
    }

    /// The file that says which user the disks of a machine are served to.
    fn user_note(&self, machine: &ImageName) -> PathBuf {
        self.machines.directory().join(format!(".{machine}.user"))
    }

    /// The disks of a machine are closed: its next QEMU may run as another user.
    pub(super) fn forget_user(&self, machine: &ImageName) {
        let path = self.user_note(machine);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", path.display());
            }
            _ => {}
        }
    }

    /// Starts the QEMU of a machine that was described.
    pub(super) async fn start_built(
        &self,
        machine: &ImageName,
        socket: &Path,
    ) -> Result<(), Refusal> {
        let home = &self.server.home;
        // What is wrong is known before a process is.
        qemu::planned(home, machine).map_err(refused)?;
        let start = self.config(machine)?.start.split_first();
        let is_own = start.is_none();
        let mut command = match start {
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments);
                command
            }
            None => {
                let mut command = Command::new(std::env::current_exe().map_err(failed)?);
                command.arg("--home").arg(home.dir());
                command.args(["migrate", "--start", machine.as_str()]);
                command
            }
        };
        let files = Files::of(home.dir(), machine.as_str());
        let _ = std::fs::remove_file(files.start());
        let said = drover_storage::create_private(&files.start()).map_err(failed)?;
        let _ = std::fs::remove_file(files.ended());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said);
        if !is_own {
            // Ours makes a session of its own.
            command.process_group(0);
        }
        let mut child = command.spawn().map_err(failed)?;
        let mut has_ended = false;
        let unavailable = |text: String| Err(Refusal::new(Code::Unavailable, text));
        let begun = Instant::now();
        while begun.elapsed() < START_LIMIT {
            // It listens before QEMU does.
            if answers(socket).await {
                std::thread::spawn(move || child.wait());
                return Ok(());
            }
            if let Ok(Some(status)) = child.try_wait() {
                has_ended = true;
                let end = files.end();
                if is_own || !status.success() || end.is_some() {
                    let said = Some(files.start_said()).filter(|said| !said.is_empty());
                    let why = end.or(said).unwrap_or_else(|| status.to_string());
                    return unavailable(format!(
                        "the QEMU that was built for {machine} did not start: {why}"
                    ));
                }
            }
            tokio::time::sleep(START_POLL).await;
        }
        // The next attempt starts another one. What looks after it ends with it.
        let was_there = qemu::kill(home.dir(), machine);
        if !has_ended {
            let group = rustix::process::Pid::from_child(&child);
            if !is_own {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            } else if !was_there {
                let _ = child.kill();
            }
            std::thread::spawn(move || child.wait());
        }
        unavailable(format!(
            "the QEMU that was built for {machine} does not answer, and was ended: see {}",
            files.log().display()
        ))
    }

    /// Ends the QEMU of a machine that does not come, and forgets what was said of it.
    pub(super) async fn end_built(&self, machine: &ImageName, record: &MachineRecord) {
        if self.build(machine).is_none() {
            return;
        }
        let home = self.server.home.dir();
        if let Err(e) = qemu::forget(home, machine, record) {
            tracing::warn!(%machine, "{e}");
        }
        let socket = Files::of(home, machine.as_str()).monitor();
        if !is_listening(&socket).await {
            return;
        }
        let end = async {
            let qemu = Machine::connect(&socket).await?;
            // One that runs is not ours to end.
            let is_running = qemu.status().await? == RunState::Running;
            if !is_running {
                qemu.quit().await?;
            }
            Ok::<_, HypervisorError>(is_running)
        };
        match tokio::time::timeout(ANSWER_LIMIT, end).await {
            Ok(Ok(true)) => return tracing::warn!(%machine, "its QEMU is left: it runs"),
            Ok(Ok(false)) if ends(&socket).await => return,
            _ => {}
        }
        if record.may_run() {
            return tracing::warn!(%machine, "its QEMU is left: it does not answer");
        }
        // It may be what the peer has sent that keeps it from that.
        let was_there = qemu::kill(home, machine);
        if !ends(&socket).await {
            tracing::warn!(%machine, was_there, "its QEMU does not end");
        }
    }
}

/// The user whom a file names, unless no QEMU is there that runs as that user any more, or who is asked for, and named in it
/// from now on; none if that is the one of this process.
fn noted_user(
    note: &Path,
    is_there: impl FnOnce() -> bool,
    ask: impl FnOnce() -> Result<Option<u32>, Refusal>,
) -> Result<Option<u32>, Refusal> {
    const OWN: &str = "own";
    let known = match std::fs::read_to_string(note) {
        Ok(known) => known,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(failed(e)),
    };
    match (known.trim(), known.trim().parse()) {
        (OWN, _) => return Ok(None),
        (_, Ok(user)) if is_there() => return Ok(Some(user)),
        _ => {}
    }
    let user = ask()?;
    let text = user.map_or(OWN.to_owned(), |user| user.to_string());
    let mut file = drover_storage::create_private(note).map_err(failed)?;
    file.write_all(format!("{text}\n").as_bytes())
        .map_err(failed)?;
    Ok(user)
}

/// Whether nobody listens there any more, soon.
async fn ends(socket: &Path) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < END_LIMIT {
        if !is_listening(socket).await {
            return true;
        }
        tokio::time::sleep(START_POLL).await;
    }
    false
}

async fn answers(socket: &Path) -> bool {
    let connected = tokio::time::timeout(ANSWER_LIMIT, Machine::connect(socket));
    matches!(connected.await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_served_to_the_user_they_were_until_they_are_closed() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join(".web.user");
        let denied = || Err(Refusal::new(Code::Denied, "there is no user"));
        let runs = || true;
        let ended = || false;
        assert!(noted_user(&note, runs, denied).is_err());
        for user in [Some(65534), None] {
            assert_eq!(noted_user(&note, ended, || Ok(user)).unwrap(), user);
            // Whatever config.toml says by now.
            assert_eq!(noted_user(&note, runs, denied).unwrap(), user);
            assert_eq!(noted_user(&note, runs, || Ok(Some(1))).unwrap(), user);
            std::fs::remove_file(&note).unwrap();
        }
        // That QEMU has ended, and the next one is another's. Half written, and then the power went.
        for text in ["65534\n", ""] {
            std::fs::write(&note, text).unwrap();
            assert_eq!(noted_user(&note, ended, || Ok(Some(7))).unwrap(), Some(7));
            assert_eq!(noted_user(&note, runs, denied).unwrap(), Some(7));
        }
    }
}
