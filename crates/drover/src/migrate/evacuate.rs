//! `evacuate`: moves all machines of this host to a peer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use drover_agent::error::{Error, one_line};
use drover_agent::home::Home;
use drover_agent::machines;
use drover_agent::signals::Stop;
use drover_agent::site::{self, find_peer};
use drover_agent::text::{Compress, count};
use drover_core::ImageName;
use drover_hypervisor::libvirt::DomainState;
use drover_hypervisor::machine::RunState;
use drover_hypervisor::{Hypervisor, HypervisorError, Place};
use drover_net::{Backoff, RateLimit};
use drover_store::machine::{MachineRecord, Owner};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::depart;
use super::hypervisor::place;
use crate::cli::{self, EvacuateArgs, MigrateArgs};
use crate::out;

/// How long a lost connection is tried again.
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);

/// How often it is looked whether another command has brought a migration to its end.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// `drover evacuate`. Ends when nothing follows any of the machines any more.
///
/// # Errors
/// When a machine stays here, or is not all there when this was stopped; the others have moved.
pub async fn evacuate(home: &Home, args: EvacuateArgs) -> Result<()> {
    find_peer(&site::open_catalog(home)?, &args.peer)?;
    let found = running(home).await?;
    if args.dry_run {
        return list(&found, args.json);
    }
    let limit = args.limit.or(home.config.limit);
    let limit = limit.map(|rate| Arc::new(RateLimit::new(rate)));
    let places = Arc::new(Semaphore::new(args.parallel.into()));
    let all = found.len();
    let stop = Stop::on_signals()?;
    let mut moves = JoinSet::new();
    for (hypervisor, name) in found {
        let one = Departing {
            home: home.clone(),
            args: of_one(&args, &hypervisor),
            hypervisor,
            name: ImageName::new(&name)?,
            peer: args.peer.clone(),
            limit: limit.clone(),
            stop: stop.watch(),
        };
        let places = Arc::clone(&places);
        moves.spawn(async move {
            let moved = one.depart(&places).await;
            (moved, one.is_committed())
        });
    }
    let (mut stay, mut behind) = (0, 0);
    while let Some(moved) = moves.join_next().await {
        let (moved, is_committed) = moved?;
        if let Err(e) = moved {
            match is_committed {
                true => behind += 1,
                false => stay += 1,
            }
            out::note(&one_line(e.as_ref()));
        }
    }
    let (all_of_them, peer) = (count(all, "machine"), &args.peer);
    match (stay, behind) {
        (0, 0) if args.json => out::json(&json!({"event": "evacuated", "machines": all})),
        (0, 0) => out::line(&format!("{all_of_them} moved to {peer}")),
        (_, 0) => Err(Error::msg(format!("{stay} of {all_of_them} did not move")).into()),
        _ => Err(Error::msg(format!(
            "{behind} of {all_of_them} still need this host, and {stay} did not move: keep it on, and run the same command again"
        ))
        .into()),
    }
}

/// One of the machines.
struct Departing {
    home: Home,
    hypervisor: cli::Hypervisor,
    name: ImageName,
    peer: String,
    args: MigrateArgs,
    limit: Option<Arc<RateLimit>>,
    stop: watch::Receiver<bool>,
}

impl Departing {
    fn record(&self) -> Option<MachineRecord> {
        self.home.machines().load(&self.name).ok()?
    }

    /// Whether it was handed over, and perhaps not all of it is there.
    fn is_committed(&self) -> bool {
        self.record().is_some_and(|record| record.is_committed())
    }

    /// Moves it. One that was handed over is not left before all of it has followed: without this host it would wait for that.
    async fn depart(&self, places: &Semaphore) -> Result<()> {
        let mut pauses = Backoff::default();
        loop {
            if self.is_committed() && self.wait_for_others().await? {
                return Ok(());
            }
            let place = places.acquire().await?;
            let limit = self.limit.clone();
            let moved = depart(
                &self.home,
                &self.hypervisor,
                &self.peer,
                &self.args,
                limit,
                false,
            );
            let moved = moved.await;
            // Others need not wait for what is broken.
            drop(place);
            let Err(error) = moved else { return Ok(()) };
            if !self.is_committed() || *self.stop.borrow() {
                return Err(error);
            }
            out::note(&one_line(error.as_ref()));
            self.pause(pauses.next_delay()).await?;
        }
    }

    /// Waits as long as another command works on it; whether it is at the other site then.
    async fn wait_for_others(&self) -> Result<bool> {
        let mut is_told = false;
        while self.home.machines().mover(&self.name)?.is_some() {
            if !std::mem::replace(&mut is_told, true) {
                out::note(&format!(
                    "{}: another command copies what is left of its disks",
                    self.name
                ));
            }
            self.pause(LOOK_EVERY).await?;
        }
        let record = self.record();
        Ok(is_told && record.is_some_and(|record| record.owner != Owner::Here))
    }

    async fn pause(&self, pause: Duration) -> Result<()> {
        let mut stop = self.stop.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            Ok(_) = stop.wait_for(|stop| *stop) => Err(Error::msg(format!(
                "{} runs at {}, and some of its disks is still here", self.name, self.peer
            ))
            .into()),
        }
    }
}

/// The options of the migration of one of them.
fn of_one(args: &EvacuateArgs, hypervisor: &cli::Hypervisor) -> MigrateArgs {
    MigrateArgs {
        start: None,
        machine: Some(hypervisor.clone()),
        peer: Some(args.peer.clone()),
        rename: None,
        max_pause: args.max_pause,
        post_copy: cli::PostCopy::WhenNeeded,
        trust_files: false,
        limit: None,
        compress: Compress(None),
        scratch: None,
        give_up_after: GIVE_UP_AFTER,
        keep_source: false,
        no_index: false,
        mark_files: false,
        dry_run: false,
        list: false,
        all: false,
        start_script: false,
        abort: None,
        json: args.json,
    }
}

fn list(found: &BTreeMap<cli::Hypervisor, String>, json: bool) -> Result<()> {
    for (machine, name) in found {
        match json {
            true => out::json(&json!({"machine": name, "hypervisor": machine.to_string()}))?,
            false => out::line(&format!("{name}  {machine}"))?,
        }
    }
    if found.is_empty() && !json {
        out::note("drover: no machine runs here that config.toml names or that has moved before");
    }
    Ok(())
}

/// The machines that run here, by their hypervisors: those that may come here, and those that have left.
async fn running(home: &Home) -> Result<BTreeMap<cli::Hypervisor, String>> {
    let expected = home.config.machines.iter();
    let mut known: BTreeMap<cli::Hypervisor, (String, bool)> = expected
        .map(|(name, config)| {
            let hypervisor = match config.hypervisor(name) {
                Place::Qmp(socket) => cli::Hypervisor::Qmp(socket),
                Place::Libvirt(_, name) => cli::Hypervisor::Libvirt(name),
            };
            (hypervisor, (name.clone(), false))
        })
        .collect();
    for machine in machines::list(home)? {
        let is_here = matches!(machine.state, "here" | "leaving" | "committed");
        let hypervisor = machine.hypervisor.as_deref();
        let hypervisor = hypervisor.map(str::parse::<cli::Hypervisor>);
        if let (true, Some(Ok(hypervisor))) = (is_here, hypervisor) {
            let is_committed = machine.state == "committed";
            known.insert(hypervisor, (machine.name, is_committed));
        }
    }
    let mut found = BTreeMap::new();
    for (hypervisor, (name, is_committed)) in known {
        let runs = match Hypervisor::connect(&place(home, &hypervisor)?).await {
            Ok(Hypervisor::Qemu(machine)) => machine.status().await? == RunState::Running,
            Ok(Hypervisor::Libvirt(domain)) => domain.state().await? == DomainState::Running,
            // What was handed over must be brought to its end even so.
            Err(
                HypervisorError::Connect { .. }
                | HypervisorError::NoLibvirt { .. }
                | HypervisorError::NoMachine { .. },
            ) => false,
            // It says why when it is to move.
            Err(_) => true,
        };
        if runs || is_committed {
            found.insert(hypervisor, name);
        }
    }
    Ok(found)
}
