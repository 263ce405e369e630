//! `migrate`: moves a running machine to a peer and shows the progress.

mod broken;
mod ended;
mod evacuate;
mod generations;
mod hypervisor;
mod memory_left;
mod show;
mod start_script;
mod under_way;

pub use evacuate::evacuate;
pub use hypervisor::connect;
pub use under_way::{failed, work};

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use drover_agent::error::{Error, one_line};
use drover_agent::home::Home;
use drover_agent::images::{self, HYPERVISOR_ENDS, Indexer};
use drover_agent::machines::{self, CloseMachine, RefuseMachine};
use drover_agent::mounts::of_machine::Leaving;
use drover_agent::profiles;
use drover_agent::remote::Call;
use drover_agent::signals::{Stop, stopped};
use drover_agent::site;
use drover_agent::site::find_peer;
use drover_agent::text::{bytes, clean};
use drover_core::ImageName;
use drover_migrate::protocol::Kind;
use drover_migrate::{LeftFile, MoveOptions};
use drover_net::{DEFAULT_DOMAIN, RateLimit};
use drover_store::ImageRecord;
use drover_store::machine::{Machines, Move};
use drover_teleport::SendOptions;
use tokio::sync::watch;

use crate::cli::{self, MigrateArgs};
use crate::failure::{self, usage};
use crate::out;
use generations::{Left, OfSite};
use show::Show;
use under_way::{if_there, stop_mover};

/// How often the progress is sampled.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// `drover migrate`.
///
/// # Errors
/// When the machine does not move, or what was asked for cannot be done.
pub async fn migrate(home: &Home, args: MigrateArgs) -> Result<()> {
    if args.list && args.all {
        return ended::list(home, args.json);
    }
    if args.list {
        return list(home, args.json).await;
    }
    if let Some(name) = &args.abort {
        return abort(home, name, args.json).await;
    }
    if let Some(name) = &args.broken {
        return broken::break_move(home, name, &args).await;
    }
    if let Some(name) = &args.start {
        return start_script::start(home, name, args.dry_run).await;
    }
    if let (Some(hypervisor), true) = (&args.machine, args.start_script) {
        return start_script::print(home, hypervisor).await;
    }
    let (Some(hypervisor), Some(peer)) = (&args.machine, &args.peer) else {
        return Err(usage("name a machine and a peer"));
    };
    let limit = args.limit.or(home.config.limit);
    let limit = limit.map(|rate| Arc::new(RateLimit::new(rate)));
    depart(home, hypervisor, peer, &args, limit, true).await
}

/// Moves one machine; `alone` if there are no others at the same time.
async fn depart(
    home: &Home,
    hypervisor: &cli::Hypervisor,
    peer: &str,
    args: &MigrateArgs,
    limit: Option<Arc<RateLimit>>,
    alone: bool,
) -> Result<()> {
    let peer = find_peer(&site::open_catalog(home)?, peer)?;
    if peer.addresses.is_empty() {
        bail!(
            "the address of {0} is unknown: pair again with a ticket from {0}: `drover pair --name {0}`",
            peer.name
        );
    }
    if args.keep_source && matches!(hypervisor, cli::Hypervisor::Libvirt(_)) {
        return Err(usage(
            "libvirt ends a machine that has moved: --keep-source is for QEMU's own (qmp:)",
        ));
    }
    let is_libvirts = matches!(hypervisor, cli::Hypervisor::Libvirt(_));
    if is_libvirts && args.post_copy == cli::PostCopy::AtOnce {
        return Err(usage(
            "disks do not follow a machine of libvirt: --post-copy at-once is for QEMU's own (qmp:)",
        ));
    }
    let mut signals = Stop::on_signals()?.watch();
    let stop = watch::Sender::new(false);
    let (machine, name) = connect(home, hypervisor).await?;
    check_readable(home, &name).await?;
    let work = work(home, &name);
    let scratch = match &args.scratch {
        Some(scratch) => std::path::absolute(scratch)?.join(format!("drover-{name}")),
        None => work.clone(),
    };
    let send = SendOptions {
        limit,
        dry_run: args.dry_run,
        compress: args.compress.0,
        give_up_after: args.give_up_after,
        profiles: Some(profiles::by_content(home)),
        ..SendOptions::to_peer(home.identity()?, &peer)
    };
    let show = Arc::new(Show::new(args, alone, name.to_string(), peer.name.clone()));
    let options = MoveOptions {
        send,
        name_there: args.rename.clone().unwrap_or_else(|| name.clone()),
        machine: name.clone(),
        hypervisor: hypervisor.to_string(),
        work,
        scratch,
        generations: Some(Arc::new(OfSite {
            home: home.clone(),
            machine: name.clone(),
        })),
        mounts: Some(Arc::new(Leaving(home.clone()))),
        copy_mounts: args.copy_mounts,
        max_pause: args.max_pause,
        post_copy: args.post_copy.into(),
        trust_files: args.trust_files,
        keep_source: args.keep_source,
        counters: show.counters(),
        wire: show.wire(),
    };
    let events = {
        let show = Arc::clone(&show);
        Arc::new(move |event| show.event(event))
    };
    let records = home.machines();
    let dry_run = args.dry_run;
    let moving = async {
        match (dry_run, machine) {
            (true, Some(machine)) => {
                drover_migrate::estimate(&machine, options, events, stop.subscribe()).await
            }
            (_, machine) => {
                drover_migrate::migrate(machine, &records, options, events, stop.subscribe()).await
            }
        }
    };
    tokio::pin!(moving);
    let mut samples = tokio::time::interval(SAMPLE_EVERY);
    let mut is_asked = false;
    let moved = loop {
        tokio::select! {
            moved = &mut moving => break moved,
            () = stopped(&mut signals), if !*stop.borrow() => drop(stop.send_replace(true)),
            _ = samples.tick() => {
                show.sample();
                if !dry_run && !*stop.borrow() && records.is_asked_to_stop(&name) {
                    is_asked = true;
                    stop.send_replace(true);
                }
            }
        }
    };
    match moved {
        Ok(report) => {
            if !args.dry_run {
                let _alone = LEFT.lock().await;
                close(home, &name).await;
                ended::left(home, &name, &peer, &report).await;
                let marked = match args.mark_files || home.config.mark_files {
                    true => mark(home, &report.left_disks, args.keep_source, &show).await,
                    false => Vec::new(),
                };
                let files = match args.no_index {
                    false => index(home, &name, &report.left_disks, &show).await,
                    true => Vec::new(),
                };
                let left = Left { files, marked };
                generations::tell(home, &peer, &name, &report, left).await;
            }
            show.done(&report)
        }
        Err(e) => {
            show.failed();
            if !args.dry_run {
                ended::failed(home, &name, &peer, &e).await;
            }
            let error = failed(e, &peer.name);
            match is_asked && !alone {
                // Whoever has asked does not want it tried again.
                true => Err(Error::msg(one_line(error.as_ref())).into()),
                false => Err(error),
            }
        }
    }
}

/// Refuses a machine some of whose disks was lost with the site that it came from: it cannot be read.
async fn check_readable(home: &Home, name: &ImageName) -> Result<()> {
    let machines = machines::list_with_missing(home).await?;
    let known = machines
        .iter()
        .find(|machine| machine.name == name.as_str() && machine.state == "here");
    match known.and_then(|machine| machine.left_bytes) {
        Some(lost) => Err(failure::refused(format!(
            "{} of the disks of {name} was lost with the site that it came from, and cannot be read: write over it first, in the machine or through the NBD export",
            bytes(lost)
        ))),
        None => Ok(()),
    }
}

/// Held while a machine that has left is seen to: where no site runs, that takes what only one can have at a time, and the
/// machines of a host may leave at once.
static LEFT: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Notes in the qcow2 files of disks that a machine has left which state they have; returns their generations. It has moved: what
/// fails is only told.
async fn mark(
    home: &Home,
    files: &[LeftFile],
    keep_source: bool,
    show: &Show,
) -> Vec<(u32, Vec<u8>)> {
    let mut done = Vec::new();
    for left in files.iter().filter(|left| left.format == "qcow2") {
        let marked = async {
            if keep_source {
                return Err(Error::usage("QEMU stays, and has it open"));
            }
            images::mark(home, &left.path, HYPERVISOR_ENDS).await
        };
        match marked.await {
            Ok(generations) => done.push((left.disk, generations)),
            Err(e) => show.not_marked(&left.path, &one_line(&e)),
        }
    }
    done
}

/// Indexes the files of disks that a machine has left. It has moved: what fails is only told.
async fn index(
    home: &Home,
    machine: &ImageName,
    files: &[LeftFile],
    show: &Show,
) -> Vec<(u32, ImageRecord)> {
    let domain = home.config.machines.get(machine.as_str());
    let domain = domain.map_or(DEFAULT_DOMAIN, |config| &config.domain);
    let mut done = Vec::new();
    for LeftFile {
        disk, path: file, ..
    } in files
    {
        show.indexing(file);
        let indexed = async {
            let mut indexer = Indexer::new(&home.domain(domain)?)?;
            let record = indexer.index(file, false, |_, _| {}).await?;
            indexer.close().await.map(|()| record)
        };
        match indexed.await {
            Ok(record) => done.push((*disk, record)),
            Err(e) => show.not_indexed(file, &one_line(&e)),
        }
    }
    done
}

/// Has the running site close the disks of a machine that has left, if it served them.
async fn close(home: &Home, name: &ImageName) {
    let close = CloseMachine {
        kind: Kind::Machine,
        name: name.clone(),
    };
    let closed = async {
        match Call::local(home).await? {
            Some(call) => call.ask(&close, |()| {}).await,
            // It does so when it starts.
            None => Ok(()),
        }
    };
    if let Err(e) = closed.await {
        tracing::warn!("the disks of the machine are still open here: {e:#}");
    }
}

async fn list(home: &Home, json: bool) -> Result<()> {
    let list = machines::list_with_missing(home).await?;
    if json {
        return list.iter().try_for_each(out::json);
    }
    if list.is_empty() {
        out::note("drover: no machine has moved to this site or from it");
        return Ok(());
    }
    let rows = list.iter().map(|machine| {
        let peer = machine.peer.as_deref().map_or_else(|| "-".into(), clean);
        let hypervisor = machine.hypervisor.as_deref();
        vec![
            clean(&machine.name),
            machine.state.into(),
            peer,
            machine.generation.to_string(),
            machine.left_bytes.map_or_else(|| "-".into(), bytes),
            machine.disks.join(", "),
            hypervisor.map_or_else(|| "-".into(), clean),
        ]
    });
    let heading = [
        "name",
        "state",
        "peer",
        "moves",
        "left",
        "disks",
        "hypervisor",
    ];
    out::line(&out::table(&heading, rows.collect(), &[3, 4]))
}

/// Has the process that moves a machine give up, or does it in its place.
async fn abort(home: &Home, name: &ImageName, json: bool) -> Result<()> {
    let records = home.machines();
    // What was handed over is not interrupted for nothing.
    if let Some(Move::Committed(_, to)) = records.load(name)?.and_then(|known| known.under_way) {
        let to = clean(&to.name);
        return Err(failure::refused(format!(
            "{name} is handed over to {to}, which may run it: migrate it to {to} again to find out, or, if {to} is lost for good, `drover migrate --break {name}`"
        )));
    }
    if !stop_mover(&records, name).await? {
        let known = machines::list(home)?.into_iter();
        if known
            .filter(|machine| machine.name == name.as_str())
            .any(|machine| machine.state == "leaving")
        {
            bail!(
                "{name} is still being given up: its disks here are written; see `drover migrate --list`"
            );
        }
        bail!(
            "{name} is being handed over, and can no longer be stopped; see `drover migrate --list`"
        );
    }
    let known = machines::list(home)?
        .into_iter()
        .find(|machine| machine.name == name.as_str());
    let Some(known) = known else {
        return Err(failure::refused(format!(
            "no machine called {name} has moved; see `drover migrate --list`"
        )));
    };
    let mut said = "stays here";
    if known.state == "arriving" {
        let peer = clean(&known.peer.unwrap_or_default());
        return Err(failure::refused(format!(
            "{name} runs here, and some of its disks is still at {peer}: run its migration at {peer} again, or, if {peer} is lost for good, `drover migrate --break {name}`"
        )));
    }
    if matches!(known.state, "coming" | "starting") {
        refuse(home, name, &records).await?;
        said = match known.state {
            "coming" => "does not come here",
            _ => "is here, and has to be started by hand",
        };
    } else if matches!(known.state, "leaving" | "committed") {
        let machine = if_there(home, known.hypervisor.as_deref()).await?;
        drover_migrate::give_up(machine, &records, name, &work(home, name))
            .await
            .map_err(|e| failed(e, ""))?;
    } else if known.state == "away" {
        let peer = known.peer.unwrap_or_default();
        return Err(failure::refused(format!(
            "{name} runs at {} already",
            clean(&peer)
        )));
    }
    if json {
        return out::json(&serde_json::json!({"event": "aborted", "machine": name.as_str()}));
    }
    out::line(&format!("{name}: {said}"))
}

/// Has the site give up a move to it, or does it in its place.
async fn refuse(home: &Home, name: &ImageName, records: &Machines) -> Result<()> {
    let ask = RefuseMachine {
        kind: Kind::Machine,
        name: name.clone(),
    };
    match Call::local(home).await? {
        Some(call) => Ok(call.ask(&ask, |()| {}).await?),
        None => drover_migrate::give_up(None, records, name, &work(home, name))
            .await
            .map_err(|e| failed(e, "")),
    }
}
