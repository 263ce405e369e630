//! What follows the images of a machine of libvirt: libvirt copies what was written meanwhile, and memory, to sockets of ours.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drover_frontend::nbd;
use drover_hypervisor::libvirt::{Domain, Performed};
use drover_hypervisor::machine::RamInfo;
use tokio::net::UnixListener;

use super::ahead::Ahead;
use super::backlog::{Backlog, Seen};
use super::beside::AbortOnDrop;
use super::domain::{self, DISKS, MEMORY, Performing, file};
use super::forward::{self, Forwarded};
use super::{Driver, MoveEvent, Step, call_over, millis};
use crate::disks::{DiskWriter, Sent};
use crate::error::MigrateError;
use crate::memory::{self, Carried};
use crate::protocol::{Ask, Kind, SendDisks, SendMemory};

/// How often the progress of memory is told.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// A socket that is removed at the end.
struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An NBD server that is stopped at the end.
struct Serving(Option<(nbd::Listening, nbd::Server)>);

impl Drop for Serving {
    fn drop(&mut self) {
        if let Some((listening, server)) = self.0.take() {
            // It waits for its connections.
            std::thread::spawn(move || {
                listening.stop();
                server.stop();
            });
        }
    }
}

impl Driver<'_> {
    /// Copies what follows the images of a machine of libvirt; at the end it is paused.
    pub(super) async fn follow_domain(&mut self, domain: &Domain) -> Result<(), MigrateError> {
        let send = self.options.send.clone();
        let [writes, for_memory] = [(); 2].map(|()| Ahead::begin(&send));
        self.order(Ask::Prepare).await?;
        self.step(Step::Disks);
        let request = SendDisks {
            kind: Kind::Machine,
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
        };
        let called = call_over(writes.made().await?, &send, &request).await?;
        let (reader, mut writer, ..) = called;
        writer.keep_little_unsent();
        let sent = Arc::new(Sent::default());
        let mut writer = DiskWriter::new(reader, writer, sent.clone());
        let (orders, queue) = forward::channel();
        let work = self.options.work.clone();
        let (nbd, memory) = (work.join(DISKS), work.join(MEMORY));
        let (disks, offers) = (&self.disks.domain, &self.disks.offers);
        let exports = disks.iter().zip(offers).enumerate();
        let exports = exports.map(|(n, (disk, offer))| nbd::Export {
            // So libvirt calls the exports of its own servers.
            name: format!("drive-{}", disk.alias.as_deref().unwrap_or_default()),
            description: String::new(),
            read_only: false,
            device: Arc::new(Forwarded {
                disk: n as u32,
                size: offer.size,
                orders: orders.clone(),
                sent: sent.clone(),
            }),
        });
        let serving = serve(exports.collect(), &nbd)?;
        let targets: Vec<_> = disks.iter().map(|disk| disk.target.clone()).collect();

        let memory_sent = Arc::new(Carried::default());
        let carried = self.carry_memory(for_memory, &memory, &memory_sent).await?;
        if let Some(pause) = self.options.max_pause {
            domain.set_max_pause(pause).await?;
        }
        domain::keep_from_starting(domain, &work).await?;
        domain.begin_migration(&targets).await?;
        self.step(Step::Memory);
        let migrating = {
            let (domain, targets, wait) = (domain.clone(), targets.clone(), self.writes_wait);
            async move {
                let performed = domain.perform_migration(&targets, &nbd, &memory, wait);
                performed.await
            }
        };
        // A link that carries nothing stops its disks then.
        self.liveness.set_paused(self.writes_wait);
        self.performing = Some(Performing::begin(migrating));
        let forwarded = forward::send(&mut writer, queue);
        tokio::pin!(forwarded);
        let performed = tokio::select! {
            performed = self.performed(domain, &targets, &sent) => performed?,
            // While it sends there are orders: it ends only with an error.
            ended = &mut forwarded => return ended.and(Err(MigrateError::Lost)),
        };
        let paused = paused_at(performed.paused_ms);
        self.set_paused(Some(paused));
        self.step(Step::Switch);
        self.report.pause.memory_ms = millis(paused);
        let flushed = Instant::now();
        let arrive = async {
            tokio::try_join!(forward::flush(&orders), self.order(Ask::Arrived))?;
            Ok::<_, MigrateError>(())
        };
        tokio::select! {
            arrived = arrive => arrived?,
            ended = &mut forwarded => return ended.and(Err(MigrateError::Lost)),
        }
        self.report.pause.disks_ms = millis(flushed);
        drop((carried, serving));
        self.report.memory_bytes = memory_sent.stream.load(Ordering::Relaxed);
        self.report.memory_wire_bytes = memory_sent.packed.load(Ordering::Relaxed);
        self.report.disk_bytes = sent.disk.load(Ordering::Relaxed);
        self.report.disk_wire_bytes = sent.packed.load(Ordering::Relaxed);
        Ok(())
    }

    /// Waits until libvirt has sent all of the machine.
    ///
    /// # Errors
    /// When it does not; [`MigrateError::TooFast`] when it does not get there, unless the machine's writes wait already.
    async fn performed(
        &mut self,
        domain: &Domain,
        disks: &[String],
        sent: &Sent,
    ) -> Result<Performed, MigrateError> {
        let (begun, mut backlog) = (Instant::now(), Backlog::default());
        // One of libvirt before 8.0 becomes ready when it writes less.
        let may_wait = !self.writes_wait && domain.can_let_writes_wait().await.unwrap_or(false);
        let mut ticks = tokio::time::interval(PROGRESS_EVERY);
        loop {
            let Some(performing) = &mut self.performing else {
                return Err(MigrateError::Stopped);
            };
            tokio::select! {
                performed = performing.performed() => return performed,
                _ = ticks.tick() => {}
            }
            if may_wait && let Ok(left) = uncopied(domain, disks).await {
                let seen = Seen {
                    at: begun.elapsed(),
                    carried: sent.disk.load(Ordering::Relaxed),
                    left,
                };
                if backlog.grows(seen) {
                    return Err(MigrateError::TooFast);
                }
            }
            if let Ok(job) = domain.job().await
                && job.memory_total > 0
            {
                (self.on_event)(MoveEvent::Memory(RamInfo {
                    transferred: job.memory_sent,
                    remaining: job.memory_left,
                    total: job.memory_total,
                    ..RamInfo::default()
                }));
            }
        }
    }

    /// Carries the memory that libvirt sends to a socket.
    async fn carry_memory(
        &self,
        connection: Ahead,
        socket: &Path,
        sent: &Arc<Carried>,
    ) -> Result<AbortOnDrop, MigrateError> {
        let request = SendMemory {
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
        };
        let connection = connection.made().await?;
        let pace = self.pace(&connection);
        let called = call_over(connection, &self.options.send, &request).await?;
        let (reader, mut writer, ..) = called;
        writer.keep_little_unsent();
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).map_err(|e| file("make", socket, e))?;
        let (socket, sent) = (Socket(socket.to_owned()), sent.clone());
        let open = Arc::new(memory::Gate::new(false));
        let carry = async move {
            let (local, _) = listener.accept().await.map_err(MigrateError::Stream)?;
            drop((listener, socket));
            let early = memory::Early::default();
            memory::carry(local, early, reader, writer, pace, sent, open).await
        };
        Ok(AbortOnDrop(tokio::spawn(carry)))
    }
}

/// Bytes of all disks that libvirt has yet to copy.
async fn uncopied(domain: &Domain, disks: &[String]) -> Result<u64, MigrateError> {
    let mut all: u64 = 0;
    for disk in disks {
        all = all.saturating_add(domain.uncopied(disk).await?.unwrap_or(0));
    }
    Ok(all)
}

fn serve(exports: Vec<nbd::Export>, socket: &Path) -> Result<Serving, MigrateError> {
    let options = nbd::ServerOptions {
        // The directory is its user's only.
        plain_unix: true,
        ..nbd::ServerOptions::default()
    };
    let failed = |e: nbd::NbdError| MigrateError::Unsupported(e.to_string());
    let server = nbd::Server::new(exports, options).map_err(failed)?;
    let listening = server.listen_unix(socket).map_err(failed)?;
    Ok(Serving(Some((listening, server))))
}

/// When that was, by the clock of this host.
fn paused_at(milliseconds: Option<u64>) -> Instant {
    let now = Instant::now();
    let since = milliseconds.and_then(|at| {
        let at = UNIX_EPOCH + Duration::from_millis(at);
        SystemTime::now().duration_since(at).ok()
    });
    now.checked_sub(since.unwrap_or_default()).unwrap_or(now)
}
