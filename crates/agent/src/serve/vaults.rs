//! The vault of this site, for the peers that may back up into it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_net::service::{BoxError, IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, DEFAULT_DOMAIN, MAX_FRAME, PeerKey, Refusal, Right, ShareLimits, Shares};
use drover_vault::peer::{self, Frame, Guard, Own, Serving, Task};
use drover_vault::{Location, SnapshotId};
use parking_lot::Mutex;

use super::audited::write;
use super::in_domain::InDomain;
use super::server::Server;
use crate::audit::{Audit, Event, Record};
use crate::error::{Error, Result, for_peer, refusal_of};
use crate::quota::Quotas;
use crate::signals::stopped;
use crate::vaults::{OpenVault, served};

/// How long a peer may say nothing: it reads and compresses between what it asks for.
const IDLE_LIMIT: Duration = Duration::from_secs(600);
/// How long the next part of an object may take.
const PART_LIMIT: Duration = Duration::from_secs(60);
/// How long a peer may take nothing.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Memory for objects that are being written, and for lists, in MiB.
const ROOM: ShareLimits = ShareLimits {
    all: 256,
    one: 64,
    sure: 32,
};
/// What a list is taken to have of that.
const LIST_ROOM: u64 = 32;

/// Serves the vault of a site.
pub struct Vaults {
    server: Arc<Server>,
    /// What each peer may take back. Only of peers that may back up.
    own: Mutex<HashMap<PeerKey, Arc<Own>>>,
    room: Shares<PeerKey>,
}

/// A vault, for one peer.
struct Opened {
    guard: Guard,
    /// The directory that it is in, if it is in one of this site, and what may be written there.
    on_disk: Option<(PathBuf, Arc<Quotas>)>,
}

impl Vaults {
    pub fn new(server: &Arc<Server>) -> Self {
        Vaults {
            server: Arc::clone(server),
            own: Mutex::default(),
            room: Shares::new(ROOM),
        }
    }

    /// The vault, as a peer may use it.
    async fn open(&self, peer: &Peer) -> Result<Opened, Refusal> {
        if peer.domain != DEFAULT_DOMAIN {
            let text = format!("the domain {} has no vault", peer.domain);
            return Err(Refusal::new(Code::Denied, text));
        }
        let domain = InDomain(Arc::clone(&self.server))
            .of(DEFAULT_DOMAIN)
            .await?;
        let own = Arc::clone(self.own.lock().entry(peer.key).or_default());
        let (server, key, is_admin) = (
            Arc::clone(&self.server),
            peer.key,
            peer.rights.has(Right::Admin),
        );
        let quotas = Arc::clone(&domain.quotas);
        let opened = tokio::task::spawn_blocking(move || {
            let location = served(&server.home, &server.name)?;
            let guard = Guard::new(location.objects()?, key.to_string(), is_admin, own)?;
            Ok::<_, Error>(Opened {
                guard,
                on_disk: match location {
                    Location::Directory(dir) => Some((dir, quotas)),
                    Location::Store(_) | Location::Peer(_) => None,
                },
            })
        });
        let opened: Result<Opened> = opened.await.map_err(crate::error::failed)?;
        opened.map_err(|e| for_peer(refusal_of(e)))
    }

    async fn talk(
        &self,
        peer: &Peer,
        mut call: IncomingCall,
        opened: Opened,
    ) -> Result<(), BoxError> {
        call.reader.set_max_frame(MAX_FRAME);
        call.writer.set_stall_timeout(Some(STALL_LIMIT));
        call.accept::<OpenVault>(&()).await?;
        call.writer.flush().await?;
        let opened = Arc::new(opened);
        let (mut serving, mut room, mut stop) = (Serving::default(), None, call.stop.clone());
        loop {
            call.reader.set_idle_timeout(Some(match serving.missing() {
                0 => IDLE_LIMIT,
                _ => PART_LIMIT,
            }));
            let frame = tokio::select! {
                biased;
                () = stopped(&mut stop) => return Ok(()),
                frame = call.reader.next() => frame?,
            };
            let Some(frame) = frame else {
                return Ok(());
            };
            let Some(task) = serving.frame(frame.kind, &frame.payload)? else {
                if room.is_none() {
                    let amount = serving.missing().div_ceil(1 << 20) as u64;
                    room = Some(self.room.take(peer.key, amount).await);
                }
                continue;
            };
            // Until all of it was sent, however slowly that is taken.
            let _listing = match &task {
                Task::List(_) => Some(self.room.take(peer.key, LIST_ROOM).await),
                _ => None,
            };
            let made = snapshot_of(&task);
            let its = Arc::clone(&opened);
            let answer = tokio::task::spawn_blocking(move || its.run(task)).await?;
            drop(room.take());
            if let Some(key) = made.filter(|_| peer::says_created(&answer)) {
                let mut record = Record::new(Event::BackedUp).by(peer);
                // Names in an encrypted vault mean nothing here.
                if let Some(id) = SnapshotId::of_key(&key).filter(|_| !opened.guard.is_encrypted())
                {
                    record = record.detail(id.to_string());
                }
                let record = record.from(call.reader.peer_text());
                write(self.server.home.audit(), record, Audit::write).await;
            }
            for (kind, payload) in &answer {
                call.writer.send(*kind, payload).await?;
            }
            call.writer.flush().await?;
        }
    }
}

/// The key of the snapshot that a task makes, if it does.
fn snapshot_of(task: &Task) -> Option<String> {
    match task {
        Task::Create(key, _) if key.starts_with("snapshots/") => Some(key.clone()),
        _ => None,
    }
}

impl Opened {
    fn run(&self, task: Task) -> Vec<Frame> {
        let Task::Create(_, bytes) = &task else {
            return task.run(&self.guard);
        };
        // Of the disk that the vault is on. It counts for no quota: that is of images.
        let on_disk = self.on_disk.as_ref();
        match on_disk.map(|(dir, quotas)| quotas.take_in(dir, bytes.len() as u64)) {
            Some(Err(refusal)) => vec![peer::refused(&refusal.message)],
            // What is taken is kept until it is on the disk.
            _kept => task.run(&self.guard),
        }
    }
}

impl Service for Vaults {
    fn id(&self) -> &'static str {
        OpenVault::SERVICE
    }

    fn right(&self) -> Right {
        OpenVault::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let _: OpenVault = call.request()?;
            match self.open(&peer).await {
                Ok(opened) => self.talk(&peer, call, opened).await,
                Err(refusal) => {
                    let record = Record::refused(OpenVault::SERVICE, &refusal, None).by(&peer);
                    let record = record.from(call.reader.peer_text());
                    write(self.server.home.audit(), record, Audit::write_limited).await;
                    Ok(call.refuse(&refusal).await?)
                }
            }
        })
    }
}
