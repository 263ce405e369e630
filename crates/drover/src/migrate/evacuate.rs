//! `evacuate`: moves all machines of this host to a peer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use drover_agent::error::{Error, one_line};
use drover_agent::home::Home;
use drover_agent::machines;
use drover_agent::site::{self, find_peer};
use drover_agent::text::{Compress, count};
use drover_hypervisor::machine::RunState;
use drover_hypervisor::{HypervisorError, Machine};
use drover_net::RateLimit;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::depart;
use crate::cli::{EvacuateArgs, Hypervisor, MigrateArgs};
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
    for (socket, _) in found {
        let (home, places, limit) = (home.clone(), Arc::clone(&places), limit.clone());
        let hypervisor = Hypervisor { socket };
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
fn of_one(args: &EvacuateArgs, hypervisor: &Hypervisor) -> MigrateArgs {
    MigrateArgs {
        machine: Some(hypervisor.clone()),
        peer: Some(args.peer.clone()),
        rename: None,
        max_pause: args.max_pause,
        limit: None,
        compress: Compress(None),
        scratch: None,
        give_up_after: GIVE_UP_AFTER,
        keep_source: false,
        no_index: false,
        dry_run: false,
        list: false,
        abort: None,
        json: args.json,
    }
}

fn list(found: &BTreeMap<PathBuf, String>, json: bool) -> Result<()> {
    for (socket, name) in found {
        let machine = Hypervisor {
            socket: socket.clone(),
        };
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

/// The machines that run here, by the sockets of their hypervisors: those that may come here, and those that have left.
async fn running(home: &Home) -> Result<BTreeMap<PathBuf, String>> {
    let expected = home.config.machines.iter();
    let mut sockets: BTreeMap<PathBuf, (String, bool)> = expected
        .map(|(name, config)| (config.incoming.clone(), (name.clone(), false)))
        .collect();
    for machine in machines::list(home)? {
        let is_here = matches!(machine.state, "here" | "leaving" | "committed");
        let hypervisor = machine.hypervisor.as_deref().map(str::parse::<Hypervisor>);
        if let (true, Some(Ok(hypervisor))) = (is_here, hypervisor) {
            let is_committed = machine.state == "committed";
            sockets.insert(hypervisor.socket, (machine.name, is_committed));
        }
    }
    let mut found = BTreeMap::new();
    for (socket, (name, is_committed)) in sockets {
        let runs = match Machine::connect(&socket).await {
            Ok(machine) => machine.status().await? == RunState::Running,
            // What was handed over must be brought to its end even so.
            Err(HypervisorError::Connect { .. }) => false,
            // It says why when it is to move.
            Err(_) => true,
        };
        if runs || is_committed {
            found.insert(socket, name);
        }
    }
    Ok(found)
}
