//! The QEMU that this site builds for a machine, as the site that it comes from describes it.

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

use super::SiteMachines;
use super::start::{START_LIMIT, START_POLL, is_listening};
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
    pub(super) fn build(&self, machine: &ImageName) -> Option<&BuildConfig> {
        self.config(machine).ok()?.build.as_ref()
    }

    /// Takes what a peer says of a machine that it brings, or only asks about: whether a QEMU is built for it here.
    ///
    /// # Errors
    /// When the machine is not expected, or what the peer says is not built.
    pub async fn described(&self, peer: &Peer, told: DescribeMachine) -> Result<bool, Refusal> {
        let name = &told.machine;
        self.allow(peer, name, &[]).await?;
        let Some(build) = self.build(name) else {
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

    /// Whether a QEMU can be built for a machine that was here.
    pub(super) fn is_described(&self, machine: &ImageName) -> bool {
        let described = qemu::load(self.server.home.dir(), machine);
        let record = self.machines.load(machine);
        let (Ok(Some(described)), Ok(Some(record))) = (described, record) else {
            return false;
        };
        described.has_come(&record)
    }

    /// Where the disks of a machine are served, and the user who may connect there besides this one.
    pub(super) fn served_at(&self, machine: &ImageName) -> Result<(PathBuf, Option<u32>), Refusal> {
        let other = match self.build(machine) {
            Some(build) => qemu::user(machine, build).map_err(refused)?,
            None => None,
        };
        match other {
            Some((user, _)) => {
                let socket = qemu::shared_socket(self.server.home.dir(), machine);
                Ok((socket.map_err(failed)?, Some(user)))
            }
            None => Ok((self.socket(machine), None)),
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
        let before = files.bytes();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said)
            .process_group(0);
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
                let end = files.end_since(before);
                if is_own || !status.success() || end.is_some() {
                    let said = Some(files.start_said()).filter(|said| !said.is_empty());
                    let why = said.or(end).unwrap_or_else(|| status.to_string());
                    return unavailable(format!(
                        "the QEMU that was built for {machine} did not start: {why}"
                    ));
                }
            }
            tokio::time::sleep(START_POLL).await;
        }
        // The next attempt starts another one.
        let _ = qemu::kill(home.dir(), machine);
        if !has_ended {
            let group = rustix::process::Pid::from_child(&child);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            std::thread::spawn(move || child.wait());
        }
        unavailable(format!(
            "the QEMU that was built for {machine} does not answer, and was ended: see {}",
            files.log().display()
        ))
    }

    /// Ends the QEMU of a machine that does not come, and forgets what was said of it.
    pub(super) async fn end_built(&self, machine: &ImageName, record: &MachineRecord) {
        if self.kind() != Kind::Machine || self.build(machine).is_none() {
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
