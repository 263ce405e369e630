//! `evacuate`: moves all machines of this host to a peer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use drover_agent::error::{Error, chain, one_line};
use drover_agent::home::Home;
use drover_agent::machines;
use drover_agent::signals::Stop;
use drover_agent::site::{self, find_peer};
use drover_agent::text::{Compress, clean, count};
use drover_core::ImageName;
use drover_hypervisor::libvirt::DomainState;
use drover_hypervisor::machine::RunState;
use drover_hypervisor::{Hypervisor, HypervisorError, Place};
use drover_migrate::MigrateError;
use drover_net::{Backoff, Code, NetError, RateLimit};
use drover_store::machine::{MachineRecord, Machines, Move, Owner};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::depart;
use super::hypervisor::place;
use crate::cli::{self, EvacuateArgs, MigrateArgs};
use crate::out;

/// How long a lost connection is tried again, and what else fails of a machine that was handed over.
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);

/// A migration that lasted longer got somewhere: what breaks it is not what broke the one before.
const STEADY: Duration = Duration::from_secs(60);

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
            machines: home.machines(),
            name: ImageName::new(&name)?,
            stop: stop.watch(),
            patience: GIVE_UP_AFTER,
        };
        let (home, peer, limit) = (home.clone(), args.peer.clone(), limit.clone());
        let (of_it, places) = (of_one(&args, &hypervisor), Arc::clone(&places));
        moves.spawn(async move {
            let once = || {
                let (home, hypervisor, peer) = (home.clone(), hypervisor.clone(), peer.clone());
                let (of_it, limit) = (of_it.clone(), limit.clone());
                async move { depart(&home, &hypervisor, &peer, &of_it, limit, false).await }
            };
            let moved = one.depart(&places, once).await;
            (moved, one)
        });
    }
    let mut failed = Vec::new();
    let mut elsewhere = BTreeMap::<String, usize>::new();
    while let Some(moved) = moves.join_next().await {
        match moved? {
            (Ok(None), _) => {}
            (Ok(Some(peer)), _) if peer == args.peer => {}
            (Ok(Some(peer)), _) => *elsewhere.entry(peer).or_default() += 1,
            (Err(e), one) => {
                failed.push(one);
                out::note(&one_line(e.as_ref()));
            }
        }
    }
    // Somebody may have broken the move of one meanwhile.
    let behind = failed.iter().filter(|one| one.is_committed()).count();
    let stay = failed.len() - behind;
    let all_of_them = count(all, "machine");
    match (stay, behind) {
        (0, 0) if args.json => out::json(&json!({"event": "evacuated", "machines": all})),
        (0, 0) => out::line(&format!("{all_of_them} moved to {}", whither(all, &args.peer, &elsewhere))),
        (_, 0) => Err(Error::msg(format!("{stay} of {all_of_them} did not move")).into()),
        (0, _) => Err(Error::msg(format!(
            "{behind} of {all_of_them} still need this host: keep it on, and run the same command again"
        ))
        .into()),
        _ => Err(Error::msg(format!(
            "{behind} of {all_of_them} still need this host, and {stay} did not move: keep it on, and run the same command again"
        ))
        .into()),
    }
}

/// Where the machines went: those that other commands have moved may be elsewhere.
fn whither(all: usize, peer: &str, elsewhere: &BTreeMap<String, usize>) -> String {
    let other: usize = elsewhere.values().sum();
    if other == 0 {
        return peer.to_owned();
    }
    let of = |(peer, number): (&String, &usize)| format!("{} ({number})", clean(peer));
    let mut sites: Vec<_> = elsewhere.iter().map(of).collect();
    if other < all {
        sites.insert(0, format!("{peer} ({})", all - other));
    }
    sites.join(", ")
}

/// One of the machines.
struct Departing {
    machines: Machines,
    name: ImageName,
    stop: watch::Receiver<bool>,
    /// How long what fails is tried again, once it was handed over.
    patience: Duration,
}

impl Departing {
    fn record(&self) -> Option<MachineRecord> {
        self.machines.load(&self.name).ok()?
    }

    /// Whether it was handed over, and perhaps not all of it is there.
    fn is_committed(&self) -> bool {
        self.record().is_some_and(|record| record.is_committed())
    }

    /// The site that it has moved to.
    fn gone_to(&self) -> Option<String> {
        let record = self.record().filter(|record| record.under_way.is_none())?;
        match record.owner {
            Owner::There(at) => Some(at.name),
            Owner::Here => None,
        }
    }

    /// Moves it by `once`; the site that another command has moved it to. One that was handed over is not left before all of it
    /// has followed: without this host it would wait for that.
    async fn depart<F: Future<Output = Result<()>>>(
        &self,
        places: &Semaphore,
        mut once: impl FnMut() -> F,
    ) -> Result<Option<String>> {
        let mut pauses = Backoff::default();
        let mut failing: Option<Instant> = None;
        let mut was_committed = false;
        loop {
            let has_waited = self.wait_for_others().await?;
            let place = places.acquire().await?;
            if (has_waited || was_committed)
                && let Some(peer) = self.gone_to()
            {
                return Ok(Some(peer));
            }
            // By somebody: it is not moved once more.
            if was_committed && !self.is_committed() {
                let text = format!("{} stays here: its move was ended meanwhile", self.name);
                return Err(Error::msg(text).into());
            }
            if *self.stop.borrow() {
                return Err(self.stopped());
            }
            let begun = Instant::now();
            let moved = once().await;
            // Others need not wait for what is broken.
            drop(place);
            let Err(error) = moved else { return Ok(None) };
            if code_of(&error) == Some(Code::Held) {
                // Another command was faster.
                if let Some(peer) = self.gone_to() {
                    return Ok(Some(peer));
                }
                if self.machines.mover(&self.name)?.is_some() {
                    continue;
                }
            }
            if begun.elapsed() > STEADY {
                failing = None;
            }
            let since = *failing.get_or_insert(begun);
            let may_help = may_pass(&error) && since.elapsed() < self.patience;
            if !self.is_committed() || *self.stop.borrow() || !may_help {
                return Err(error);
            }
            out::note(&one_line(error.as_ref()));
            self.pause(pauses.next_delay()).await?;
            was_committed = true;
        }
    }

    /// Waits as long as another command moves it; whether one did.
    async fn wait_for_others(&self) -> Result<bool> {
        let mut is_told = false;
        while self.machines.mover(&self.name)?.is_some() {
            if !std::mem::replace(&mut is_told, true) {
                let what = match self.is_committed() {
                    true => "another command copies what is left of its disks",
                    false => "another command moves it",
                };
                out::note(&format!("{}: {what}", self.name));
            }
            self.pause(LOOK_EVERY).await?;
        }
        Ok(is_told)
    }

    async fn pause(&self, pause: Duration) -> Result<()> {
        let mut stop = self.stop.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            Ok(_) = stop.wait_for(|stop| *stop) => Err(self.stopped()),
        }
    }

    fn stopped(&self) -> anyhow::Error {
        let under_way = self.record().and_then(|record| record.under_way);
        let text = match under_way {
            Some(Move::Committed(_, to)) => format!(
                "{} was handed over to {}, and some of its disks may still be here",
                self.name,
                clean(&to.name)
            ),
            _ => format!("{} was not moved: stopped", self.name),
        };
        Error::msg(text).into()
    }
}

fn code_of(error: &anyhow::Error) -> Option<Code> {
    error.downcast_ref::<Error>().and_then(Error::code)
}

/// Whether a machine that was handed over may be brought to its end by trying again, without a change by anybody.
fn may_pass(error: &anyhow::Error) -> bool {
    chain(error.as_ref()).any(|cause| {
        let of_net = |e: &NetError| e.retryable();
        cause.downcast_ref().is_some_and(of_net)
            || match (cause.downcast_ref(), cause.downcast_ref()) {
                (Some(Error::Net(e)), _) => e.retryable(),
                // Its QEMU has ended: the disks are read without it.
                (_, Some(MigrateError::Hypervisor(_) | MigrateError::Nbd(_))) => true,
                (_, Some(e)) => e.retryable(),
                (_, None) => false,
            }
    })
}

/// The options of the migration of one of them.
fn of_one(args: &EvacuateArgs, hypervisor: &cli::Hypervisor) -> MigrateArgs {
    MigrateArgs {
        taken: false,
        start: None,
        machine: Some(hypervisor.clone()),
        peer: Some(args.peer.clone()),
        rename: None,
        max_pause: args.max_pause,
        post_copy: cli::PostCopy::WhenNeeded,
        copy_mounts: false,
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
        broken: None,
        yes: false,
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

#[cfg(test)]
mod tests;
