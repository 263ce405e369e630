//! `evacuate`: moves all machines of this host to a peer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use drover_agent::error::{Error, one_line};
use drover_agent::home::Home;
use drover_agent::machines;
use drover_agent::site::{self, find_peer};
use drover_agent::text::{Compress, count};
use drover_hypervisor::libvirt::DomainState;
use drover_hypervisor::machine::RunState;
use drover_hypervisor::{Hypervisor, HypervisorError, Place};
use drover_net::RateLimit;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::depart;
use super::hypervisor::place;
use crate::cli::{self, EvacuateArgs, MigrateArgs};
use crate::out;

/// How long a lost connection is tried again.
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);

/// `drover evacuate`.
///
/// # Errors
/// When a machine stays here; the others have moved.
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
    let mut moves = JoinSet::new();
    for (hypervisor, _) in found {
        let (home, places, limit) = (home.clone(), Arc::clone(&places), limit.clone());
        let args = of_one(&args, &hypervisor);
        moves.spawn(async move {
            let _place = places.acquire().await?;
            let peer = args.peer.clone().unwrap_or_default();
            depart(&home, &hypervisor, &peer, &args, limit, false).await
        });
    }
    let mut stay = 0;
    while let Some(moved) = moves.join_next().await {
        if let Err(e) = moved? {
            stay += 1;
            out::note(&one_line(e.as_ref()));
        }
    }
    match stay {
        0 if args.json => out::json(&json!({"event": "evacuated", "machines": all})),
        0 => out::line(&format!("{} moved to {}", count(all, "machine"), args.peer)),
        _ => Err(Error::msg(format!("{stay} of {} did not move", count(all, "machine"))).into()),
    }
}

/// The options of the migration of one of them.
fn of_one(args: &EvacuateArgs, hypervisor: &cli::Hypervisor) -> MigrateArgs {
    MigrateArgs {
        machine: Some(hypervisor.clone()),
        peer: Some(args.peer.clone()),
        rename: None,
        max_pause: args.max_pause,
        post_copy: cli::PostCopy::WhenNeeded,
        limit: None,
        compress: Compress(None),
        scratch: None,
        give_up_after: GIVE_UP_AFTER,
        keep_source: false,
        no_index: false,
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
