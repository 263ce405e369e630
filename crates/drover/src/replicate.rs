//! `replicate` and `failover`: copies of machines and disks at a peer, and what makes them usable there.

mod show;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use drover_agent::error::{Error, Kind};
use drover_agent::home::Home;
use drover_agent::mounts::{self, ReplicateDisk, RoundDone};
use drover_agent::profiles;
use drover_agent::replicas::{self, FailOver, now_ms, sent_key};
use drover_agent::signals::{Stop, stopped};
use drover_agent::site;
use drover_agent::site::find_peer;
use drover_agent::text::clean;
use drover_core::ImageName;
use drover_hypervisor::{Hypervisor, HypervisorError};
use drover_migrate::replica::{Disks, MachineDisks, OnSend, ReplicaOptions, Replication};
use drover_migrate::{Commands, MigrateError};
use drover_net::{Code, DEFAULT_DOMAIN, RateLimit, Refusal};
use drover_store::Peer;
use drover_store::machine::{Other, Seed};
use drover_store::replica::{Records, Sent};
use drover_teleport::SendOptions;
use serde_json::json;

use crate::cli::{self, FailoverArgs, ReplicateArgs, Replicated};
use crate::failure::{self, usage};
use crate::{migrate, out, prompt};
use show::Show;

/// `drover replicate`.
///
/// # Errors
/// When a replica cannot be sent, or has taken over.
pub async fn replicate(home: &Home, args: ReplicateArgs) -> Result<()> {
    if args.list {
        return show::list(home, args.json);
    }
    if let Some(name) = &args.forget {
        return forget(home, name, args.json).await;
    }
    let (Some(of), Some(peer)) = (&args.of_what, &args.peer) else {
        return Err(usage("name a machine or an image, and a peer"));
    };
    // Peers and machines are the site's, whatever the domain.
    let (domain, of_site) = (home, home.of_site());
    let home = of_site.as_ref().unwrap_or(home);
    if args.every.is_some_and(|every| every.is_zero()) {
        return Err(usage("--every 0s: name an interval, such as 15m"));
    }
    let peer = find_peer(&site::open_catalog(home)?, peer)?;
    if peer.addresses.is_empty() {
        bail!(
            "the address of {0} is unknown: pair again with a ticket from {0}: `drover pair --name {0}`",
            peer.name
        );
    }
    let stop = Stop::on_signals()?;
    let (machine, name) = match of {
        Replicated::Machine(hypervisor) => {
            let (machine, name) = connect(home, hypervisor).await?;
            (Some(machine), name)
        }
        Replicated::Image(image) => (None, image.clone()),
    };
    let name_there = args.rename.clone().unwrap_or_else(|| name.clone());
    let records = domain.replicas_sent();
    let key = sent_key(&name_there, &peer.key)?;
    let Some(_lock) = records.lock(&key)? else {
        return Err(failure::refused(format!(
            "{name_there} is being replicated to {} by another process",
            peer.name
        )));
    };
    let known = records.load(&key).map_err(Error::Refused)?;
    // The same machine, wherever it was before.
    let record = match &machine {
        Some(_) => home.machines().load(&name).map_err(Error::Refused)?,
        None => None,
    };
    let new = || Sent {
        seed: record.map_or_else(|| Seed(drover_net::random_id()), |record| record.seed),
        to: Other {
            key: peer.key.0,
            name: String::new(),
        },
        name_there: name_there.clone(),
        source: String::new(),
        every_seconds: None,
        moment_ms: None,
        size: 0,
        wire_bytes: 0,
        rounds: 0,
        fenced: None,
    };
    let mut sent = known.unwrap_or_else(new);
    sent.to.name.clone_from(&peer.name);
    sent.source = of.to_string();
    sent.every_seconds = args.every.map(|every| every.as_secs());
    // The other site knows it by its seed from the first round on, also if that fails.
    records.store(&key, &sent).map_err(Error::Refused)?;
    let made = match machine {
        Some(machine) => {
            let work = migrate::work(home, &name);
            let scratch = match &args.scratch {
                Some(scratch) => std::path::absolute(scratch)?.join(format!("drover-{name}")),
                None => work.clone(),
            };
            let disks = MachineDisks::new(machine, name.clone(), work, scratch);
            let options = options(home, &args, &peer, &sent)?;
            Made::Here(
                name,
                Box::new(Replication::new(Disks::Machine(disks), options)),
            )
        }
        None => Made::ByDaemon(Box::new(ReplicateDisk {
            image: name,
            domain: Some(args.of.domain.clone()).filter(|name| name != DEFAULT_DOMAIN),
            peer: peer.name.clone(),
            name_there,
            seed: sent.seed,
            every: args.every,
            pause: args.pause.clone(),
            resume: args.resume.clone(),
            limit: args.limit,
            compress: args.compress.0,
            give_up_after: args.give_up_after,
            scratch: args.scratch.clone().map(std::path::absolute).transpose()?,
        })),
    };
    let mut rounds = Rounds {
        home,
        made,
        records,
        key,
        sent,
        show: Arc::new(Show { json: args.json }),
        stop,
    };
    let ended = rounds.run(args.every).await;
    // A migration that has the lock has cleared it itself, and uses what this would end.
    if let Made::Here(machine, replication) = &mut rounds.made
        && let Ok(Some(_lock)) = home.machines().lock(machine)
    {
        replication.end().await;
    }
    ended
}

/// The machine, and its name here.
async fn connect(
    home: &Home,
    hypervisor: &cli::Hypervisor,
) -> Result<(drover_hypervisor::machine::Machine, ImageName)> {
    match migrate::connect(home, hypervisor).await? {
        (Some(Hypervisor::Qemu(machine)), name) => Ok((machine, name)),
        (Some(Hypervisor::Libvirt(_)), _) => Err(usage(
            "a machine of libvirt cannot be replicated: libvirt does not lend its QEMU's disks; name a QEMU by its QMP socket, as in qmp:/run/web.qmp",
        )),
        (None, _) => bail!("{hypervisor} runs no machine"),
    }
}

fn options(home: &Home, args: &ReplicateArgs, peer: &Peer, sent: &Sent) -> Result<ReplicaOptions> {
    let limit = args.limit.or(home.config.limit);
    Ok(ReplicaOptions {
        send: SendOptions {
            limit: limit.map(|rate| Arc::new(RateLimit::new(rate))),
            compress: args.compress.0,
            give_up_after: args.give_up_after,
            profiles: Some(profiles::by_content(home)),
            ..SendOptions::to_peer(home.identity()?, peer)
        },
        name_there: sent.name_there.clone(),
        seed: sent.seed,
        every: args.every,
        hooks: Arc::new(Commands {
            pause: args.pause.clone(),
            resume: args.resume.clone(),
        }),
        counters: Arc::default(),
        wire: Arc::default(),
    })
}

/// Who makes the rounds.
enum Made {
    /// This process, of a machine of this name.
    Here(ImageName, Box<Replication>),
    /// The mount daemon that has the disk.
    ByDaemon(Box<ReplicateDisk>),
}

/// The rounds of a replica.
struct Rounds<'a> {
    home: &'a Home,
    made: Made,
    records: Records<Sent>,
    key: ImageName,
    sent: Sent,
    show: Arc<Show>,
    stop: Stop,
}

/// Why a round is not complete.
struct Failed {
    error: anyhow::Error,
    code: Option<Code>,
    /// Whether no later round can succeed.
    is_over: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        let code = error.code();
        Failed {
            is_over: code == Some(Code::Lost),
            error: error.into(),
            code,
        }
    }
}

impl Failed {
    /// Its peer may get rights or space; a QEMU that has ended does not come back.
    fn of(error: MigrateError, peer: &str) -> Self {
        let code = error.code();
        let has_ended = matches!(
            error,
            MigrateError::Hypervisor(HypervisorError::Closed { .. }) | MigrateError::Unsupported(_)
        );
        Failed {
            is_over: has_ended || code == Some(Code::Lost),
            error: migrate::failed(error, peer),
            code,
        }
    }
}

impl Rounds<'_> {
    async fn run(&mut self, every: Option<Duration>) -> Result<()> {
        let mut stop = self.stop.watch();
        let mut is_first = true;
        loop {
            let begun = Instant::now();
            match self.round().await {
                Ok(()) => {}
                Err(_) if *stop.borrow() => return Ok(()),
                Err(e) if is_first || every.is_none() || e.is_over => return Err(self.failed(e)),
                Err(e) => {
                    let why = clean(&failure::line(e.error.as_ref()));
                    self.show.round_failed(&self.sent, &why);
                }
            }
            is_first = false;
            let Some(every) = every else {
                return Ok(());
            };
            let next = every.saturating_sub(begun.elapsed());
            tokio::select! {
                () = tokio::time::sleep(next) => {}
                () = stopped(&mut stop) => return Ok(()),
            }
        }
    }

    async fn round(&mut self) -> Result<(), Failed> {
        let show = Arc::clone(&self.show);
        let done = match &mut self.made {
            Made::Here(machine, replication) => {
                let peer = &self.sent.to.name;
                let on_event: OnSend = Arc::new(move |event| show.event(event));
                let stop = self.stop.watch();
                let round = of_machine(self.home, machine, replication, on_event, stop);
                round.await.map_err(|e| Failed::of(e, peer))?
            }
            Made::ByDaemon(order) => {
                let mut stop = self.stop.watch();
                let round = mounts::replicate_disk(self.home, order, |event| show.told(event));
                tokio::select! {
                    done = round => done?,
                    // The daemon gives it up when nobody listens.
                    () = stopped(&mut stop) => return Err(Error::msg("stopped").into()),
                }
            }
        };
        let (before, now) = (self.sent.moment_ms, now_ms());
        self.sent.moment_ms = Some(now.saturating_sub(done.age_ms));
        self.sent.size = done.size;
        self.sent.wire_bytes = done.wire_bytes;
        self.sent.rounds += 1;
        // After a failover the other site decides whether it begins anew.
        self.sent.fenced = None;
        let stored = self.records.store(&self.key, &self.sent);
        stored.map_err(Error::Refused)?;
        let risk = before.map(|before| now.saturating_sub(before));
        self.show.round(&self.sent, &done, risk);
        Ok(())
    }

    /// What a failure means. One that is for good is recorded.
    fn failed(&mut self, failed: Failed) -> anyhow::Error {
        if failed.code != Some(Code::Lost) {
            return failed.error;
        }
        let text = failure::line(failed.error.as_ref());
        self.sent.fenced = Some(text.clone());
        if let Err(e) = self.records.store(&self.key, &self.sent) {
            tracing::warn!("{e}");
        }
        Error::of_kind(Kind::Fenced, text).into()
    }
}

/// A round of a machine.
async fn of_machine(
    home: &Home,
    machine: &ImageName,
    replication: &mut Replication,
    on_event: OnSend,
    stop: tokio::sync::watch::Receiver<bool>,
) -> Result<RoundDone, MigrateError> {
    let machines = home.machines();
    let failed = |error| MigrateError::File {
        what: "cannot lock the record of the machine".into(),
        error,
    };
    // A round and a migration need QEMU's NBD server for themselves.
    let Some(_lock) = machines.lock(machine).map_err(failed)? else {
        let text = format!("{machine} is being migrated");
        return Err(Refusal::new(Code::Busy, text).into());
    };
    let known = machines.load(machine)?;
    if known.is_some_and(|known| !known.may_run()) {
        let text = format!("{machine} has moved to another site");
        return Err(MigrateError::Unsupported(text));
    }
    Ok(replication.round(on_event, stop).await?.into())
}

async fn forget(home: &Home, name: &ImageName, json: bool) -> Result<()> {
    let was_kept = replicas::forget(home, name).await?;
    if json {
        return out::json(&json!({"event": "forgotten", "name": name.as_str(), "kept": was_kept}));
    }
    out::line(&match was_kept {
        true => format!("{name}: forgotten; its images are images like any others"),
        false => format!("{name}: forgotten here; what the peer keeps stays"),
    })
}

/// `drover failover`.
///
/// # Errors
/// When there is nothing to use, or nobody confirms that its source does not run any more.
pub async fn failover(home: &Home, args: FailoverArgs) -> Result<()> {
    let name = &args.name;
    let ask = |dry_run, force| FailOver {
        name: name.clone(),
        dry_run,
        force,
        start: !args.no_start,
    };
    let would = replicas::fail_over(home, &ask(true, false)).await?;
    if args.dry_run {
        return show::failover(name, &would, true, args.json);
    }
    if would.failed_over_ms.is_none() {
        let question = format!(
            "{} It is not stopped: there may be two {} then. Fail over?",
            show::heard(name, &would),
            if would.is_machine {
                "machines"
            } else {
                "disks that differ"
            }
        );
        prompt::confirm(&question, args.yes)?;
    }
    let done = replicas::fail_over(home, &ask(false, true)).await?;
    show::failover(name, &done, false, args.json)?;
    match done.not_started {
        None => Ok(()),
        Some(why) => bail!(
            "{name} has failed over, but was not started here: {}; the same command tries again",
            clean(&why)
        ),
    }
}
