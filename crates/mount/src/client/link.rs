//! The link to the site: a task keeps it up, detects when it breaks, and reconnects.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use drover_core::DeviceError;
use drover_device::remote::{Chunks, Link};
use drover_net::Backoff;
use drover_store::lease::{Access, Identity};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::info;

use super::connector::{Connected, Connector};
use super::early::EarlyChunks;
use super::inner::{CLOSE_WAIT, ClientState, Inner, ReplyTo};
use super::open::{FirstLink, OpenConnection, OpeningConnections, PAUSES, attempt, next_link};
use super::scheduler::Job;
use crate::MountError;
use crate::protocol::{
    KEEP_ALIVE, Opened, Reply, Request, decode_message, device_error, encode_message, kind,
};

/// Why a link ended.
enum LinkEnd {
    /// The client was closed.
    Stopped,
    /// It broke; reconnecting may help.
    Lost(String),
    /// It ended for good.
    Gone(DeviceError),
}

/// A link that is up: its running connections, and those still being opened.
pub struct LiveLink {
    link: u64,
    joining: OpeningConnections,
    running: JoinSet<MountError>,
}

impl LiveLink {
    /// Starts a link when the front connection is open.
    fn begin(
        inner: &Arc<Inner>,
        link: u64,
        front: OpenConnection,
        joining: OpeningConnections,
        asked: Vec<Request>,
    ) -> Self {
        let mut running = JoinSet::new();
        inner.latest.store(link, Ordering::Release);
        inner.connection_up(front, asked, &mut running);
        inner.up();
        Self {
            link,
            joining,
            running,
        }
    }

    /// The first link.
    pub fn first(inner: &Arc<Inner>, first: FirstLink) -> Self {
        Self::begin(inner, first.link, first.front, first.others, first.asked)
    }
}

/// Keeps the link up until the client is closed.
pub async fn keep(inner: Arc<Inner>, connector: Arc<dyn Connector>, first: Option<LiveLink>) {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut link = first.as_ref().map_or(0, |up| up.link);
    let mut ready = first;
    let mut stop = inner.stop.subscribe();
    loop {
        let ended = match ready.take() {
            Some(up) => {
                let ended = serve(&inner, up).await;
                if !inner.state.lock().scheduler.is_repeating() {
                    backoff.reset();
                }
                ended
            }
            None => {
                link = next_link(link);
                let expected = Identity {
                    epoch: inner.committed.load(Ordering::Acquire),
                    ..inner.opened.identity
                };
                let attempt = attempt(&connector, &inner.options, Some(expected), link, &[]);
                let attempt = tokio::select! {
                    attempt = attempt => attempt,
                    _ = stop.wait_for(|stop| *stop) => return,
                };
                match attempt {
                    Ok((front, joining)) => match inner.same_image(&front.opened, true) {
                        Ok(()) => {
                            ready = Some(LiveLink::begin(&inner, link, front, joining, Vec::new()));
                            continue;
                        }
                        Err(error) => {
                            inner.give_back(front).await;
                            LinkEnd::Gone(error)
                        }
                    },
                    Err(error) if error.fatal => LinkEnd::Gone(DeviceError::Io(Arc::new(
                        std::io::Error::other(error.message),
                    ))),
                    Err(error) => LinkEnd::Lost(error.message),
                }
            }
        };
        match ended {
            LinkEnd::Stopped => return,
            LinkEnd::Gone(error) => {
                info!(image = %inner.options.image, %error, "the mount has ended");
                inner.end(error);
                return;
            }
            LinkEnd::Lost(why) => inner.down(why),
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_delay()) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Runs a link until it ends.
async fn serve(inner: &Arc<Inner>, up: LiveLink) -> LinkEnd {
    let LiveLink {
        mut joining,
        mut running,
        ..
    } = up;
    let mut stop = inner.stop.subscribe();
    let mut cut = inner.cut.subscribe();
    let ups = inner.state.lock().ups;
    loop {
        tokio::select! {
            Some(joined) = joining.join_next() => match joined {
                Ok(Ok(connection)) => {
                    if let Err(error) = inner.same_image(&connection.opened, false) {
                        return LinkEnd::Gone(error);
                    }
                    inner.connection_up(connection, Vec::new(), &mut running);
                    inner.issue_soon();
                }
                Ok(Err(error)) if error.fatal => {
                    return LinkEnd::Gone(DeviceError::Io(Arc::new(std::io::Error::other(error.message))));
                }
                Ok(Err(error)) => return LinkEnd::Lost(error.message),
                Err(error) => return LinkEnd::Lost(error.to_string()),
            },
            Some(ended) = running.join_next() => {
                let why = match ended {
                    Ok(error) => error,
                    Err(error) => MountError::Unreachable(error.to_string()),
                };
                return match why {
                    MountError::Refused(refusal) if !refusal.retry => {
                        LinkEnd::Gone(device_error(refusal, 0, 0, inner.opened.size))
                    }
                    why => LinkEnd::Lost(why.to_string()),
                };
            }
            _ = cut.wait_for(|cut| *cut >= ups) => {
                return LinkEnd::Lost("the site did not reply".into());
            }
            _ = stop.wait_for(|stop| *stop) => return LinkEnd::Stopped,
        }
    }
}

impl Inner {
    /// Whether a connection opened the image that was mounted.
    fn same_image(&self, opened: &Opened, first_connection: bool) -> Result<(), DeviceError> {
        let (ours, theirs) = (&self.opened, opened);
        let image = self.options.image.as_str();
        let gone = |text: String| Err(DeviceError::Io(Arc::new(std::io::Error::other(text))));
        if ours.shape() != theirs.shape() || ours.identity.digest != theirs.identity.digest {
            return gone(format!(
                "{image} is another image at the site now; unmount it and mount it again"
            ));
        }
        let (before, now) = (ours.identity, theirs.identity);
        if self.options.access == Access::Standby {
            // What was written meanwhile is known when it takes over.
            return Ok(());
        }
        let known = self.committed.load(Ordering::Acquire);
        match self.options.access {
            Access::ReadOnly if before != now => gone(format!(
                "{image} was written by another mount meanwhile; unmount it and mount it again"
            )),
            Access::ReadWrite if before.edition != now.edition => gone(format!(
                "{image} was written by another mount meanwhile; unmount it and mount it again"
            )),
            Access::ReadWrite if first_connection && now.epoch < known => gone(format!(
                "{image} is at epoch {} at the site, which had confirmed epoch {known}: it has lost writes",
                now.epoch
            )),
            _ => {
                if first_connection {
                    self.committed.fetch_max(now.epoch, Ordering::AcqRel);
                }
                Ok(())
            }
        }
    }

    /// Returns a lease that the site granted on a different image than the mounted one: nothing of this mount can be
    /// pushed there.
    async fn give_back(&self, connection: OpenConnection) {
        if connection.opened.identity.digest == self.opened.identity.digest {
            return;
        }
        let Connected {
            mut reader,
            mut writer,
            ..
        } = connection.connected;
        let confirmed = async {
            let close = encode_message(&Request::Close { id: 1 });
            writer.send(kind::REQUEST, &close).await.ok()?;
            writer.flush().await.ok()?;
            let frame = reader.next().await.ok()??;
            let reply = decode_message::<Reply>(&frame.payload).ok()?.head;
            (reply == Reply::Done { id: 1 }).then_some(())
        };
        if let Ok(Some(())) = timeout(CLOSE_WAIT, confirmed).await {
            self.released.store(true, Ordering::Release);
        }
    }

    /// A connection is up; the requests `asked` were sent with its open.
    fn connection_up(
        self: &Arc<Self>,
        connection: OpenConnection,
        asked: Vec<Request>,
        running: &mut JoinSet<MountError>,
    ) {
        let (way, requests) = mpsc::unbounded_channel();
        let mut state = self.state.lock();
        let credit = state
            .scheduler
            .connection_up(connection.number, connection.kind);
        self.note_early_reads(&mut state, connection.number, asked);
        if state.connections.len() <= connection.number {
            state
                .connections
                .resize_with(connection.number + 1, || None);
        }
        state.connections[connection.number] = Some(way);
        state.send(connection.number, credit.into(), Bytes::new());
        state.wires.push(connection.connected.wire.clone());
        drop(state);
        let inner = self.clone();
        running.spawn(async move { inner.run_connection(connection, requests).await });
    }

    /// Records the reads that were sent with the open. The site answers those outside the device with an error, which
    /// is ignored.
    fn note_early_reads(&self, state: &mut ClientState, connection: usize, asked: Vec<Request>) {
        let deadline = self.now() + self.options.give_up;
        let mut early = Vec::new();
        for request in asked {
            let Request::Read { id, first, .. } = request else {
                continue;
            };
            state.scheduler.used(id);
            if first >= self.opened.shape().chunks() || early.contains(&first) {
                continue;
            }
            early.push(first);
            let job = Job::new(request, Bytes::new(), deadline, ReplyTo::Chunks);
            state.scheduler.sent_with_open(connection, id, job);
        }
        if !early.is_empty() {
            *self.early.lock() = EarlyChunks::new(early);
        }
    }

    fn up(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.ups += 1;
        state.link = Link::Up(state.ups);
        self.notify_link(&state);
        drop(state);
        self.issue_soon();
    }

    fn issue_soon(self: &Arc<Self>) {
        let inner = self.clone();
        // On one of our threads, because it calls the local side.
        self.completions.call(move || inner.pump());
    }

    fn down(&self, why: String) {
        let mut state = self.state.lock();
        if matches!(state.link, Link::Gone(_)) {
            return;
        }
        let was_up = matches!(state.link, Link::Up(_));
        state.link = Link::Down(why.clone());
        if was_up {
            info!(image = %self.options.image, why, "the link is down");
            self.notify_link(&state);
        }
        state.connections.clear();
        for wire in std::mem::take(&mut state.wires) {
            self.received.fetch_add(wire.received(), Ordering::Relaxed);
            self.sent.fetch_add(wire.sent(), Ordering::Relaxed);
        }
        let lost = state.scheduler.link_down();
        drop(state);
        let error = DeviceError::Unavailable(why);
        for job in lost {
            let runs: Vec<Chunks> = job.chunks().into_iter().collect();
            self.fail(job, &runs, &error);
        }
    }

    async fn run_connection(
        self: Arc<Self>,
        connection: OpenConnection,
        mut requests: mpsc::UnboundedReceiver<(Request, Bytes)>,
    ) -> MountError {
        let Connected {
            mut reader,
            mut writer,
            ..
        } = connection.connected;
        let number = connection.number;
        let write = async {
            loop {
                let next = tokio::select! {
                    next = requests.recv() => next,
                    error = writer.ping_when_idle(KEEP_ALIVE.ping_every) => return Err(error),
                };
                let Some(mut next) = next else {
                    let _ = writer.finish().await;
                    return Ok(());
                };
                loop {
                    let head = encode_message(&next.0);
                    writer
                        .send_vectored(kind::REQUEST, &[&head, &next.1])
                        .await?;
                    match requests.try_recv() {
                        Ok(more) => next = more,
                        Err(_) => break,
                    }
                }
                writer.flush().await?;
            }
        };
        let read = async {
            loop {
                let Some(frame) = reader.next().await? else {
                    return Err(MountError::Unreachable(format!(
                        "{} closed the connection",
                        reader.peer_text()
                    )));
                };
                self.take(number, frame)
                    .map_err(|refusal| match refusal.retry {
                        true => MountError::Refused(refusal.tidy()),
                        false => MountError::Protocol {
                            peer: reader.peer_text().to_owned(),
                            what: refusal.message,
                        },
                    })?;
            }
        };
        let result: Result<(), MountError> = tokio::select! {
            result = write => result.map_err(MountError::Net),
            result = read => result,
        };
        match result {
            Ok(()) => MountError::Unreachable("the link is being closed".into()),
            Err(error) => error,
        }
    }
}
