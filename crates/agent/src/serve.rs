//! A site, or a lone teleporter: the process that others connect to.
//!
//! - [`admission`]: how many may be here at once.
//! - [`conversation`]: one connection, from its first byte to its last.
//! - [`server`]: what all conversations share; [`services`]: what is done for whoever calls, put together of [`changes`], [`images`], [`leases`], [`matching`],
//!   [`pairing`], [`sessions`], [`status`] and [`transfers`].
//! - [`jobs`]: long work for a caller, with progress.
//! - [`matchers`]: what a lone teleporter keeps for each site.
//! - [`http`]: metrics by HTTP.

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
use crate::signals::{Stop, told};
use crate::site;
use crate::text::{clean, now_unix};
use admission::Admission;
use matchers::Matchers;
use server::{Duty, Server};

pub use pairing::Pair;
pub use status::{GetMetrics, GetStatus};

/// How long sessions may take to leave things resumable when the site stops.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// How often a site looks for transfers to which nothing comes any more.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);

/// Long jobs (verify, index) at once.
const MAX_JOBS: usize = 2;

/// Where a site listens; what is not said is as the configuration says.
#[derive(Debug, Clone, Default)]
pub struct Listen {
    /// Where peers connect.
    pub listen: Option<SocketAddr>,
    /// The addresses for tickets.
    pub advertise: Vec<String>,
    /// Where metrics can be fetched by HTTP.
    pub metrics_listen: Option<SocketAddr>,
}

/// A site that takes connections.
#[derive(Debug)]
pub struct Ready {
    /// `site` or `teleporter`.
    pub duty: &'static str,
    /// What it calls itself.
    pub name: String,
    /// Its key.
    pub key: PeerKey,
    /// Where it listens.
    pub listening: SocketAddr,
    /// A fresh ticket to pair with it.
    pub ticket: Ticket,
}

/// Runs a site until it is told to stop. `ready` hears once that it takes connections.
///
/// # Errors
/// When it cannot start; once it runs, errors of single conversations go to the log.
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

/// Finishes merges of changes that a crash interrupted, beside all else: mounts are kept away from their images meanwhile.
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
    let told = Arc::clone(&stop);
    let thread = tokio::task::spawn_blocking(move || {
        for line in crate::changes::recover(&here, &told) {
            tracing::info!("{line}");
        }
    });
    Recovery { stop, thread }
}

/// The thread that finishes merges. It ends with the site, at a place from which the next start goes on.
struct Recovery {
    stop: Arc<AtomicBool>,
    thread: tokio::task::JoinHandle<()>,
}

impl Recovery {
    /// Waits until it does nothing more.
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

/// Keeps images from being replaced or removed while somebody has them mounted, or may still push to them.
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

/// Runs a lone teleporter until it is told to stop.
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
    // A site must be able to start to be told to clear up.
    let catalog = CleanUp::of(home).run(|| site::open_catalog(home))?;
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

/// Makes the reserve, and makes it whole again when there is room again.
async fn keep_reserve(server: Arc<Server>) {
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            () = told(&mut stop) => return,
            _ = looks.tick() => {}
        }
        let home = server.home.clone();
        // A panic in there was logged; the next look comes.
        let _ = tokio::task::spawn_blocking(move || home.try_keep_reserve()).await;
    }
}

/// Removes what is left of transfers to which nothing comes any more.
async fn expire_transfers(server: Arc<Server>) {
    let (Duty::Site(site, _), Some(after)) = (&server.duty, server.home.config.keep_unfinished())
    else {
        return;
    };
    let mut stop = server.stop.clone();
    let mut looks = tokio::time::interval(EXPIRE_EVERY);
    loop {
        tokio::select! {
            () = told(&mut stop) => return,
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
            // A panic in there was logged; the next look comes.
            Err(_) => {}
        }
    }
}

/// Takes as many file descriptors as the system allows: connections and images both need them.
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

/// Says that the site is ready.
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

/// Takes connections until the site is to stop; returns the conversations that are still going on.
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
            () = told(&mut stop) => return Ok(talks),
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
                        tracing::warn!(remote = %pending.remote(), "too many connections; turned one away");
                    }
                }
            }
            caller = local.accept() => {
                let (server, services) = (Arc::clone(server), Arc::clone(&services));
                talks.spawn(conversation::with_owner(server, services, caller?));
            }
            // Ended conversations are let go of as they end.
            Some(ended) = talks.join_next() => {
                if let Err(e) = ended && e.is_panic() {
                    tracing::error!("a conversation panicked; the site goes on");
                }
            }
        }
    }
}

/// Lets sessions leave their transfers resumable, then closes the site.
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
        "stopping; {} open",
        crate::text::count(talks.len(), "conversation")
    );
    let all = async { while talks.join_next().await.is_some() {} };
    if tokio::time::timeout(STOP_LIMIT, all).await.is_err() {
        tracing::warn!("conversations did not end within {STOP_LIMIT:?}; cutting them");
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
                tracing::warn!("the matcher's caches are made anew at the next start: {e}");
            }
            closed => closed?,
        }
    }
    Ok(())
}

/// Tells systemd, when it is there to be told.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        tracing::debug!("sd_notify: {e}");
    }
}
