//! The QEMU that this site builds for a machine, as the site that it comes from describes it.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_hypervisor::Machine;
use drover_hypervisor::machine::RunState;
use drover_migrate::Site;
use drover_migrate::protocol::DescribeMachine;
use drover_net::service::Peer;
use drover_net::{Code, Refusal};
use drover_store::machine::Move;

use super::SiteMachines;
use super::start::{START_LIMIT, START_POLL, Why, is_listening};
use crate::error::{Error, failed};
use crate::home::BuildConfig;
use crate::home::qemu::Files;
use crate::qemu;

/// How long its monitor may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

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
            let is_its = record.is_some_and(|record| {
                matches!(record.under_way, Some(Move::Coming(known, from, _))
                    if known == token && from.key == peer.key.0)
            });
            if !is_its {
                let text = format!("{name} is not coming here by that move");
                return Err(Refusal::new(Code::OutOfOrder, text));
            }
            let (home, name) = (self.server.home.dir().to_owned(), name.clone());
            let stored = tokio::task::spawn_blocking(move || qemu::store(&home, &name, &spec));
            stored.await.map_err(failed)?.map_err(failed)?;
        }
        Ok(true)
    }

    /// Whether a QEMU can be built for a machine without asking where it was before.
    pub(super) fn is_described(&self, machine: &ImageName) -> bool {
        matches!(qemu::load(self.server.home.dir(), machine), Ok(Some(_)))
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
        why: Why,
    ) -> Result<(), Refusal> {
        let home = &self.server.home;
        // What is wrong is known before a process is.
        qemu::planned(home, machine, why == Why::Incoming).map_err(refused)?;
        let mut command = match self.config(machine)?.start.split_first() {
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
        command
            .envs((why == Why::Boot).then_some(("DROVER_INCOMING", "")))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        let unavailable = |text: String| Err(Refusal::new(Code::Unavailable, text));
        let files = Files::of(home.dir(), machine.as_str());
        let begun = Instant::now();
        while begun.elapsed() < START_LIMIT {
            // It listens before QEMU does.
            if answers(socket).await {
                std::thread::spawn(move || child.wait());
                return Ok(());
            }
            if let Ok(Some(status)) = child.try_wait()
                && !status.success()
            {
                return unavailable(format!(
                    "the QEMU that was built for {machine} did not start: {}",
                    files.end()
                ));
            }
            tokio::time::sleep(START_POLL).await;
        }
        std::thread::spawn(move || child.wait());
        unavailable(format!(
            "the QEMU that was built for {machine} does not answer: see {}",
            files.log().display()
        ))
    }

    /// Ends the QEMU of a machine that does not come.
    pub(super) async fn end_built(&self, machine: &ImageName) {
        let socket = Files::of(self.server.home.dir(), machine.as_str()).monitor();
        if self.build(machine).is_none() || !is_listening(&socket).await {
            return;
        }
        let end = async {
            let qemu = Machine::connect(&socket).await?;
            // One that runs is not ours to end.
            if qemu.status().await? != RunState::Running {
                qemu.quit().await?;
            }
            Ok::<_, drover_hypervisor::HypervisorError>(())
        };
        match tokio::time::timeout(ANSWER_LIMIT, end).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::warn!(%machine, "its QEMU is left: {e}"),
            Err(_) => tracing::warn!(%machine, "its QEMU is left: it does not answer"),
        }
    }
}

async fn answers(socket: &Path) -> bool {
    let connected = tokio::time::timeout(ANSWER_LIMIT, Machine::connect(socket));
    matches!(connected.await, Ok(Ok(_)))
}
