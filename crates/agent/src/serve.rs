//! The serving process: a site, or a standalone teleporter, that others connect to.
//!
//! - `admission`: connection limits; `audited`: requests that the audit log tells of.
//! - `conversation`: handles one connection, from handshake to close; `strangers`: log lines about unknown keys.
//! - `server`: state shared by all connections; `services`: the table of services, which are `changes`,
//!   `images`, `leases`, `matching`, `pairing`, `sessions`, `status` and `transfers`.
//! - `domains`: the parts of a site that do not see each other; `in_domain`: services in the domain of the
//!   caller; `owners`: their Unix sockets; `manage`: services for them.
//! - `machines`: machines that migrate to the site, and disks that move to it; `moves`: all of them.
//! - `nodes`: the site as one of several nodes.
//! - `disks`: disks in stores that cannot be used any more.
//! - `ownership`: what belongs to a caller.
//! - `expiry`: removes abandoned transfers.
//! - `look`: the status of all domains.
//! - `jobs`: long-running requests, with progress.
//! - `matchers`: the per-site state of a standalone teleporter.
//! - `recovery`: finishes merges that a crash interrupted.
//! - `trust`: the calls of peers, and the rights they were made by; `enforce`: ends what lives by a right that was taken
//!   away; `taken`: within a domain.
//! - `hints`: services for the other nodes of the site.
//! - `work`: this node's part of flocks that several nodes send.
//! - `http`: the metrics endpoint.

mod admission;
mod audited;
mod changes;
mod conversation;
mod disks;
mod domains;
mod enforce;
mod expiry;
mod flocks;
mod hints;
mod http;
mod images;
mod in_domain;
mod jobs;
mod leases;
mod look;
mod machines;
mod manage;
mod matchers;
mod matching;
mod moves;
mod nodes;
mod owners;
mod ownership;
mod pairing;
mod profiles;
mod recovery;
mod replicas;
mod server;
mod services;
mod sessions;
mod status;
mod strangers;
mod taken;
mod transfers;
mod trust;
mod vaults;
mod work;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_mount::server::Absences;
use drover_net::service::Services;
use drover_net::{DEFAULT_DOMAIN, Identity, Listener, LocalListener, PeerKey};
use drover_store::{Grant, SiteCatalog};
use sd_notify::NotifyState;
use tokio::task::JoinSet;

use crate::addresses;
use crate::disks::Disks;
use crate::error::{Context, Error, Result, one_line};
use crate::home::{CleanUp, Home, LOOK_EVERY};
use crate::join::join;
use crate::pairing::{ShownTicket, ticket_of_server};
use crate::remote::SocketPath;
use crate::signals::{Stop, stopped};
use crate::site;
use crate::text::now_unix;
use domains::{Domain, Domains};
use matchers::Matchers;
use moves::SiteMoves;
use owners::Owners;
use recovery::Recovery;
use server::{Duty, Server};
use trust::Trust;

pub use pairing::Pair;
pub use status::{GetMetrics, GetStatus};

/// How long sessions may take to save resumable state when the site stops.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Listen addresses, of which unset ones come from the configuration, and what is shown of them.
#[derive(Debug, Clone, Default)]
pub struct Listen {
    /// For peers.
    pub listen: Option<SocketAddr>,
    /// Addresses to put into tickets.
    pub advertise: Vec<String>,
    /// For metrics over HTTP.
    pub metrics_listen: Option<SocketAddr>,
    /// Whether a ticket is shown: where nobody sees it, there need not be one.
    pub ticket: bool,
}

/// A site that accepts connections.
#[derive(Debug)]
pub struct Ready {
    /// `site` or `teleporter`.
    pub duty: &'static str,
    /// Its own name.
    pub name: String,
    /// Its key.
    pub key: PeerKey,
    /// The address it listens on.
    pub listening: SocketAddr,
    /// A ticket to pair with it, if one is to be shown.
    pub ticket: Option<ShownTicket>,
}

/// Runs a site until a signal stops it. `ready` is called once, when it accepts connections.
///
/// # Errors
/// When it cannot start; after that, errors of single connections only go to the log.
pub async fn serve(home: Home, args: Listen, ready: impl FnOnce(&Ready)) -> Result<()> {
    let lock = home.lock()?;
    let (catalog, identity) = prepare(&home)?;
    let its = home.clone();
    let node = tokio::task::spawn_blocking(move || join(&its)).await??;
    home.remember_catalog()?;
    let supplies = site::supplies(&home);
    let absences = Arc::new(Absences::default());
    let (its, images) = (home.clone(), Arc::clone(&catalog));
    let begun = tokio::task::spawn_blocking(move || Disks::begin(&its, &images));
    let (stores, lost_disks) = begun.await??;
    let stores = Arc::new(stores);
    let domain = Domain::open(
        home.clone(),
        lock,
        Arc::clone(&catalog),
        &identity,
        supplies.clone(),
        Arc::clone(&absences),
        Arc::clone(&stores),
    );
    let domain = domain.await?;
    tokio::spawn(disks::refuse_lost(Arc::clone(&domain), lost_disks));
    let recovery = Recovery::begin(domain.here(identity.key()));
    let domains = Domains::new(supplies, absences);
    let duty = (Duty::Site(domain), domains, Some(recovery));
    let ended = run(home, args, identity, catalog, duty, ready).await;
    tokio::task::spawn_blocking(move || stores.close()).await?;
    if let Some(node) = node {
        tokio::task::spawn_blocking(move || node.leave()).await?;
    }
    ended
}

/// Runs a standalone teleporter until a signal stops it.
///
/// # Errors
/// As [`serve`].
pub async fn teleporter(home: Home, args: Listen, ready: impl FnOnce(&Ready)) -> Result<()> {
    let _lock = home.lock()?;
    let (catalog, identity) = prepare(&home)?;
    let matchers = Matchers::new(home.index_dir());
    let domains = Domains::new(site::supplies(&home), Arc::default());
    let duty = (Duty::Teleporter(matchers), domains, None);
    run(home, args, identity, catalog, duty, ready).await
}

fn prepare(home: &Home) -> Result<(Arc<SiteCatalog>, Identity)> {
    // A site must be able to start on a full disk, to take cleanup requests.
    let catalog = CleanUp::of(home).run(|| site::open_catalog_to_serve(home))?;
    for misnamed in crate::pairing::misnamed(&catalog)? {
        tracing::warn!("{misnamed}");
    }
    Ok((Arc::new(catalog), home.identity()?))
}

async fn run(
    home: Home,
    args: Listen,
    identity: Identity,
    catalog: Arc<SiteCatalog>,
    (duty, domains, recovery): (Duty, Domains, Option<Recovery>),
    ready: impl FnOnce(&Ready),
) -> Result<()> {
    let stop = Stop::on_signals()?;
    raise_file_limit();
    let listener = Listener::bind(args.listen.unwrap_or(home.config.listen()), &identity).await?;
    let advertise = if args.advertise.is_empty() {
        &home.config.advertise
    } else {
        &args.advertise
    };
    let addresses = addresses::of_listener(listener.local_addr(), advertise).map_err(Error::msg)?;
    let addresses = match home.node() {
        Some(node) => nodes::addresses(&node, addresses)?,
        None => addresses,
    };
    addresses::save(&catalog, &addresses)?;
    let socket = SocketPath::of(&home.socket())?;
    let local = LocalListener::bind(socket.path())?;
    let metrics_address = args.metrics_listen.or(home.config.metrics_listen);
    let metrics_port = match metrics_address {
        Some(address) => Some(http::bind(address).await?),
        None => None,
    };

    let owners = Owners::new();
    let server = Arc::new(Server {
        name: home.name(),
        identity,
        catalog,
        duty,
        metrics: Arc::default(),
        places: admission::places(),
        strangers: strangers::StrangerLog::default(),
        trust: Trust::default(),
        domains,
        sockets: owners.sockets(),
        jobs: jobs::places(),
        replicas: Arc::default(),
        addresses,
        started_unix: now_unix(),
        stop: stop.watch(),
        home,
    });
    if let Some(port) = metrics_port {
        tokio::spawn(http::run(port, Arc::clone(&server)));
    }
    tokio::spawn(keep_reserve(Arc::clone(&server)));
    tokio::spawn(close_idle(Arc::clone(&server)));
    tokio::spawn(expiry::expire_transfers(Arc::clone(&server)));
    tokio::spawn(enforce::enforce(Arc::clone(&server)));
    tokio::spawn(nodes::follow(Arc::clone(&server)));
    let work = tokio::spawn(work::work(Arc::clone(&server)));
    let lost = nodes::lost(Arc::clone(&server));
    for name in server.home.domains()? {
        let home = server.home.domain(&name);
        // Whatever else is wrong with it, its peers reach it over the network.
        if let Err(e) = home.and_then(|home| server.sockets.listen(&home)) {
            tracing::warn!(
                domain = name,
                "cannot listen on its socket: {}",
                one_line(&e)
            );
        }
    }
    tokio::spawn(count_strangers(Arc::clone(&server)));
    announce(&server, listener.local_addr(), args.ticket, ready)?;
    let moves = matches!(server.duty, Duty::Site(_)).then(|| SiteMoves::new(&server));
    let services = Arc::new(services::of(&server, moves.as_ref()));
    if let Some(moves) = &moves {
        let moves = Arc::clone(moves);
        tokio::spawn(async move { moves.restart().await });
    }
    let accepted = accept(&server, &services, &listener, &local, owners);
    let talks = tokio::select! {
        talks = accepted => talks?,
        // At once, as if it were killed: what is under way can be resumed.
        e = lost => return Err(e),
    };
    drop((listener, local, services));
    // The panic was logged.
    let _ = work.await;
    finish(&server, talks, recovery, moves).await
}

/// Maintains the reserve: creates it, and refills it when there is space again.
async fn keep_reserve(server: Arc<Server>) {
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            _ = looks.tick() => {}
        }
        let home = server.home.clone();
        // The panic was logged; continue with the next round.
        let _ = tokio::task::spawn_blocking(move || home.try_keep_reserve()).await;
    }
}

/// Writes how many connections of unknown keys had no log line of their own, and how many events are only counted in the
/// audit log.
async fn count_strangers(server: Arc<Server>) {
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(strangers::PERIOD / 4);
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            _ = looks.tick() => {}
        }
        let counts = server.strangers.write_counts();
        let audit = Arc::clone(server.home.audit());
        // The panic was logged; continue with the next round.
        let _ = tokio::task::spawn_blocking(move || {
            counts
                .into_iter()
                .for_each(|counted| audit.write_limited(counted));
            audit.write_counts();
        })
        .await;
    }
}

/// Closes domains that have been idle.
async fn close_idle(server: Arc<Server>) {
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            _ = looks.tick() => server.domains.tidy().await,
        }
    }
}

/// Raises the file descriptor limit to the maximum: connections and images both need descriptors.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(e) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    ) {
        tracing::debug!("cannot raise the limit of open files: {e}");
    }
}

/// Announces that the site is ready.
fn announce(
    server: &Server,
    listening: SocketAddr,
    shown: bool,
    ready: impl FnOnce(&Ready),
) -> Result<()> {
    let grant = match server.duty {
        Duty::Site(_) => Grant::default(),
        Duty::Teleporter(_) => Grant::matching(),
    };
    let (home, catalog, addresses) = (&server.home, &server.catalog, &server.addresses);
    let ticket = shown.then(|| ticket_of_server(home, catalog, addresses, &grant));
    let ticket = ticket.transpose()?;
    ready(&Ready {
        duty: server.duty.name(),
        name: server.name.clone(),
        key: server.identity.key(),
        listening,
        ticket,
    });
    let status = format!("listening on {listening}");
    notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
    Ok(())
}

/// Accepts connections until the site stops; returns the connections that are still open.
async fn accept(
    server: &Arc<Server>,
    services: &Arc<Services>,
    listener: &Listener,
    local: &LocalListener,
    mut owners: Owners,
) -> Result<JoinSet<()>> {
    let mut stop = server.stop.clone();
    let mut talks = JoinSet::new();
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return Ok(talks),
            pending = listener.accept() => {
                let pending = pending?;
                server.metrics.connections.fetch_add(1, Relaxed);
                let (server, services) = (Arc::clone(server), Arc::clone(services));
                talks.spawn(conversation::with_peer(server, services, pending));
            }
            caller = local.accept() => {
                let (server, services) = (Arc::clone(server), Arc::clone(services));
                let domain = DEFAULT_DOMAIN.to_owned();
                talks.spawn(conversation::with_owner(server, services, caller?, domain));
            }
            (caller, domain) = owners.accept() => {
                let (server, services) = (Arc::clone(server), Arc::clone(services));
                talks.spawn(conversation::with_owner(server, services, caller, domain));
            }
            // Reap finished connections.
            Some(ended) = talks.join_next() => {
                if let Err(e) = ended && e.is_panic() {
                    tracing::error!("the task of a connection panicked; the site continues");
                }
            }
        }
    }
}

/// Lets sessions save resumable state, then closes the site.
async fn finish(
    server: &Arc<Server>,
    mut talks: JoinSet<()>,
    recovery: Option<Recovery>,
    moves: Option<Arc<SiteMoves>>,
) -> Result<()> {
    notify(&[NotifyState::Stopping]);
    if let Some(recovery) = &recovery {
        recovery.cancel();
    }
    tracing::info!(
        "stopping: {} open",
        crate::text::count(talks.len(), "connection")
    );
    let all = async { while talks.join_next().await.is_some() {} };
    if tokio::time::timeout(STOP_LIMIT, all).await.is_err() {
        tracing::warn!("connections did not end within {STOP_LIMIT:?}: closing them");
        talks.shutdown().await;
    }
    if let Some(recovery) = recovery {
        recovery.end().await;
    }
    if let Some(moves) = moves {
        moves.stop().await;
    }
    server.domains.close().await;
    let counts = server.strangers.write_all_counts();
    let audit = Arc::clone(server.home.audit());
    // The panic was logged.
    let _ = tokio::task::spawn_blocking(move || {
        counts.into_iter().for_each(|counted| audit.write(counted));
        audit.write_all_counts();
    })
    .await;
    match &server.duty {
        Duty::Site(domain) => domain.close().await.context("closing the site"),
        Duty::Teleporter(_) => Ok(()),
    }
}

/// Notifies systemd, if it started this process.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        tracing::debug!("sd_notify: {e}");
    }
}
