//! Recording what is read first of the mount's disks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, Refusal};

use super::super::profiling::{self, Profiled, StartProfile, StopProfile};
use super::{Daemon, Requests};
use crate::error::failed;

impl Handler<StartProfile> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        StartProfile { seconds }: StartProfile,
        _: &mut Exchange<'_, StartProfile>,
    ) -> Result<(), Refusal> {
        match self.0.start_profile(seconds.map(Duration::from_secs)) {
            true => Ok(()),
            false => {
                let text = "it is being recorded already: `drover profile stop` ends that";
                Err(Refusal::new(Code::Held, text))
            }
        }
    }
}

impl Handler<StopProfile> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        StopProfile: StopProfile,
        _: &mut Exchange<'_, StopProfile>,
    ) -> Result<Vec<Profiled>, Refusal> {
        let daemon = Arc::clone(&self.0);
        let stopped = tokio::task::spawn_blocking(move || daemon.stop_profile()).await;
        let stopped = stopped.map_err(failed)?;
        match stopped.is_empty() {
            false => Ok(stopped),
            true => {
                let text = "nothing is being recorded: `drover profile record` begins";
                Err(Refusal::new(Code::NotFound, text))
            }
        }
    }
}

impl Daemon {
    /// Begins a recording, which ends after `limit`; false if there is one. Call within a runtime.
    fn start_profile(self: &Arc<Self>, limit: Option<Duration>) -> bool {
        let started = self.disks.iter().filter(|disk| disk.profile().start());
        if started.count() < self.disks.len() {
            return false;
        }
        self.profile_began(None, limit);
        true
    }

    /// A recording has begun, which goes to `file` and ends after `limit`. Call within a runtime.
    pub(super) fn profile_began(self: &Arc<Self>, file: Option<PathBuf>, limit: Option<Duration>) {
        let mut profiling = self.profiling.lock();
        profiling.file = file;
        profiling.last.clear();
        profiling.timer = limit.map(|limit| {
            let daemon = Arc::downgrade(self);
            let timer = tokio::spawn(async move {
                tokio::time::sleep(limit).await;
                if let Some(daemon) = daemon.upgrade() {
                    // Not aborted by its own end.
                    daemon.profiling.lock().timer = None;
                    tokio::task::spawn_blocking(move || drop(daemon.stop_profile()));
                }
            });
            timer.abort_handle()
        });
    }

    /// Ends the recording, if there is one, and keeps it; returns what the last one was. Blocks.
    pub(super) fn stop_profile(&self) -> Vec<Profiled> {
        // Held meanwhile: whoever asks next is told of it.
        let mut profiling = self.profiling.lock();
        if let Some(timer) = profiling.timer.take() {
            timer.abort();
        }
        let mut now = Vec::new();
        for disk in &self.disks {
            if let Some(recording) = disk.profile().stop() {
                let (target, device) = (disk.target(), disk.device());
                let file = profiling.file.as_deref();
                now.push(profiling::keep(
                    &self.home, target, &device, recording, file,
                ));
            }
        }
        for profiled in &now {
            match &profiled.problem {
                Some(why) => tracing::warn!("{}: no profile was recorded: {why}", profiled.image),
                None => tracing::info!("{}: {} blocks recorded", profiled.image, profiled.blocks),
            }
        }
        if !now.is_empty() {
            profiling.last = now;
        }
        profiling.last.clone()
    }

    /// Ends the recording at the end of the mount; returns what the user should know.
    pub(super) fn end_profile(&self) -> Vec<String> {
        let is_on = |disk: &super::Disk| disk.profile().progress().is_some();
        if !self.disks.iter().any(is_on) {
            return Vec::new();
        }
        let problem = |p: Profiled| {
            let why = p.problem?;
            Some(format!("no profile of {} was recorded: {why}", p.image))
        };
        self.stop_profile()
            .into_iter()
            .filter_map(problem)
            .collect()
    }
}
