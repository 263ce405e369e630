//! The serving process: a site, or a standalone teleporter, that others connect to.
//!
//! - `admission`: connection limits.
//! - `conversation`: handles one connection, from handshake to close.
//! - `server`: state shared by all connections; `services`: the table of services, which are `changes`,
//!   `images`, `leases`, `matching`, `pairing`, `sessions`, `status` and `transfers`.
//! - `jobs`: long-running requests, with progress.
//! - `matchers`: the per-site state of a standalone teleporter.
//! - `http`: the metrics endpoint.

mod admission;
mod changes;
mod conversation;
mod http;
mod images;
mod jobs;
mod leases;
mod matchers;
mod matching;
mod pairing;
mod server;
mod services;
mod sessions;
mod status;
mod transfers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use drover_net::{Identity, Listener, LocalListener, PeerKey, Ticket};
use drover_store::{SiteCatalog, TICKET_LIFETIME};
use drover_teleport::Site;
use sd_notify::NotifyState;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::addresses;
use crate::error::{Context, Error, Result};
use crate::home::{CleanUp, Home, HomeLock, LOOK_EVERY};
use crate::mounts::{leased_on_disk, site_server, why_held};
use crate::remote::SocketPath;
use crate::signals::{Stop, stopped};
use crate::site;
use crate::text::{clean, now_unix};
use admission::Admission;
use matchers::Matchers;
use server::{Duty, Server};

pub use pairing::Pair;
pub use status::{GetMetrics, GetStatus};

/// How long sessions may take to save resumable state when the site stops.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Interval of the check for abandoned transfers.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);

/// Upper bound on concurrent long jobs (verify, index).
const MAX_JOBS: usize = 2;

/// Listen addresses; unset ones come from the configuration.
#[derive(Debug, Clone, Default)]
pub struct Listen {
    /// For peers.
    pub listen: Option<SocketAddr>,
    /// Addresses to put into tickets.
    pub advertise: Vec<String>,
    /// For metrics over HTTP.
    pub metrics_listen: Option<SocketAddr>,
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
    /// A new ticket to pair with it.
    pub ticket: Ticket,
}

/// Runs a site until a signal stops it. `ready` is called once, when it accepts connections.
///
/// # Errors
/// When it cannot start; after that, errors of single connections only go to the log.
pub async fn serve(home: Home, args: Listen, ready: impl FnOnce(&Ready)) -> Result<()> {
    let lock = home.lock()?;
    let (catalog, identity) = prepare(&home)?;
    let site = site::open(&home, &catalog, &identity).await?;
    let devices = site_server(&home, &catalog)?;
    hold_leased(&site, &devices, &home);
    let recovery = recover_merges(&home, &identity, &site, &devices);
    let duty = Duty::Site(site, devices);
    let duty = (duty, Some(recovery));
    run(home, lock, args, identity, catalog, duty, ready).await
}

/// Finishes merges of changes that a crash interrupted, in the background: their images cannot be mounted meanwhile.
fn recover_merges(
    home: &Home,
    identity: &Identity,
    site: &Arc<Site>,
    devices: &Arc<drover_mount::server::Server>,
) -> Recovery {
    let here = crate::changes::Here {
        site: Arc::clone(site),
        server: Arc::clone(devices),
        state: home.mounted_dir(),
        key: identity.key(),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let cancelled = Arc::clone(&stop);
    let thread = tokio::task::spawn_blocking(move || {
        for line in crate::changes::recover(&here, &cancelled) {
            tracing::info!("{line}");
        }
    });
    Recovery { stop, thread }
}

/// The thread that finishes merges. It is cancelled when the site stops; the next start continues.
struct Recovery {
    stop: Arc<AtomicBool>,
    thread: tokio::task::JoinHandle<()>,
}

impl Recovery {
    /// Cancels the thread and waits for it to end.
    async fn end(mut self) {
        self.stop.store(true, Relaxed);
        if tokio::time::timeout(STOP_LIMIT, &mut self.thread)
            .await
            .is_err()
        {
            tracing::warn!("an interrupted merge did not end within {STOP_LIMIT:?}");
        }
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// Prevents images from being replaced or removed while they are mounted, or a mount can still push to them.
fn hold_leased(site: &Arc<Site>, devices: &Arc<drover_mount::server::Server>, home: &Home) {
    let (devices, state) = (Arc::downgrade(devices), home.mounted_dir());
    site.hold_by(Arc::new(move |name| {
        // A delivery may outlive the server.
        let leased = match devices.upgrade() {
            Some(devices) => devices.leased(name),
            None => leased_on_disk(&state, name),
        };
        why_held(name, leased)
    }));
}

/// Runs a standalone teleporter until a signal stops it.
///
/// # Errors
/// As [`serve`].
pub async fn teleporter(home: Home, args: Listen, ready: impl FnOnce(&Ready)) -> Result<()> {
    let lock = home.lock()?;
    let (catalog, identity) = prepare(&home)?;
    let matchers = Matchers::new(home.index_dir());
    let duty = (Duty::Teleporter(matchers), None);
    run(home, lock, args, identity, catalog, duty, ready).await
}

fn prepare(home: &Home) -> Result<(Arc<SiteCatalog>, Identity)> {
    // A site must be able to start on a full disk, to take cleanup requests.
    let catalog = CleanUp::of(home).run(|| site::open_catalog(home))?;
    for misnamed in crate::pairing::misnamed(&catalog)? {
        tracing::warn!("{misnamed}");
    }
    Ok((Arc::new(catalog), home.identity()?))
}

async fn run(
    home: Home,
    _lock: HomeLock,
    args: Listen,
    identity: Identity,
    catalog: Arc<SiteCatalog>,
    (duty, recovery): (Duty, Option<Recovery>),
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
    addresses::save(&catalog, &addresses)?;
    let socket = SocketPath::of(&home.socket())?;
    let local = LocalListener::bind(socket.path())?;
    let metrics_address = args.metrics_listen.or(home.config.metrics_listen);
    let metrics_port = match metrics_address {
        Some(address) => Some(http::bind(address).await?),
        None => None,
    };

    let server = Arc::new(Server {
        name: home.name(),
        identity,
        catalog,
        duty,
        metrics: Arc::default(),
        admission: Admission::default(),
        jobs: Arc::new(Semaphore::new(MAX_JOBS)),
        addresses,
        started_unix: now_unix(),
        stop: stop.watch(),
        home,
    });
    if let Some(port) = metrics_port {
        tokio::spawn(http::run(port, Arc::clone(&server)));
    }
    tokio::spawn(keep_reserve(Arc::clone(&server)));
    tokio::spawn(expire_transfers(Arc::clone(&server)));
    announce(&server, listener.local_addr(), ready)?;
    let talks = accept(&server, &listener, &local).await?;
    drop((listener, local));
    finish(&server, talks, recovery).await
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

/// Removes abandoned transfers.
async fn expire_transfers(server: Arc<Server>) {
    let (Duty::Site(site, _), Some(after)) = (&server.duty, server.home.config.keep_unfinished())
    else {
        return;
    };
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(EXPIRE_EVERY);
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            _ = looks.tick() => {}
        }
        let site = Arc::clone(site);
        let expired = tokio::task::spawn_blocking(move || site.expire_transfers(after)).await;
        match expired {
            Ok(Ok(expired)) => expired.iter().for_each(|t| {
                tracing::info!(
                    image = t.name,
                    peer = t.peer,
                    "removed an unfinished transfer: nothing was received for too long"
                );
            }),
            Ok(Err(e)) => tracing::warn!("{}", clean(&e.to_string())),
            // The panic was logged; continue with the next round.
            Err(_) => {}
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
fn announce(server: &Server, listening: SocketAddr, ready: impl FnOnce(&Ready)) -> Result<()> {
    let ticket = Ticket::new(server.identity.key(), server.addresses.iter().cloned());
    server
        .catalog
        .add_ticket(&ticket.secret, now_unix(), TICKET_LIFETIME)?;
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
    listener: &Listener,
    local: &LocalListener,
) -> Result<JoinSet<()>> {
    let mut stop = server.stop.clone();
    let services = Arc::new(services::of(server));
    let mut talks = JoinSet::new();
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return Ok(talks),
            pending = listener.accept() => {
                let pending = pending?;
                server.metrics.connections.fetch_add(1, Relaxed);
                match server.admission.enter(pending.remote().ip()) {
                    Some((place, stranger)) => {
                        let (server, services) = (Arc::clone(server), Arc::clone(&services));
                        talks.spawn(conversation::with_peer(server, services, pending, place, stranger));
                    }
                    None => {
                        server.metrics.rejected_limit.fetch_add(1, Relaxed);
                        tracing::warn!(remote = %pending.remote(), "too many connections; rejected one");
                    }
                }
            }
            caller = local.accept() => {
                let (server, services) = (Arc::clone(server), Arc::clone(&services));
                talks.spawn(conversation::with_owner(server, services, caller?));
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
) -> Result<()> {
    notify(&[NotifyState::Stopping]);
    if let Some(recovery) = &recovery {
        recovery.stop.store(true, Relaxed);
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
    if let Duty::Site(site, _) = &server.duty {
        let site = Arc::clone(site);
        let closed = tokio::task::spawn_blocking(move || site.close()).await;
        match closed.context("closing the site")? {
            Err(e) if e.is_full() => {
                tracing::warn!("the matcher's caches are rebuilt at the next start: {e}");
            }
            closed => closed?,
        }
    }
    Ok(())
}

/// Notifies systemd, if it started this process.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        tracing::debug!("sd_notify: {e}");
    }
}
