//! The link to the site: kept up, watched, made again.

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
use super::early::Early;
use super::inner::{CLOSE_WAIT, Inner, Reply, State};
use super::open::{First, Joining, OpenConnection, PAUSES, attempt, next_link};
use super::scheduler::Job;
use crate::MountError;
use crate::protocol::{
    Answer, Ask, KEEP_ALIVE, Opened, decode_message, device_error, encode_message, kind,
};

/// Why a link ended.
enum Ended {
    /// Nobody wants it any more.
    Stopped,
    /// It may come back.
    Lost(String),
    /// It will not.
    Gone(DeviceError),
}

/// A link that is up: connections that run, and connections that are still being opened.
pub struct Up {
    link: u64,
    joining: Joining,
    running: JoinSet<MountError>,
}

impl Up {
    /// The front connection is open: that is the link.
    fn begin(
        inner: &Arc<Inner>,
        link: u64,
        front: OpenConnection,
        joining: Joining,
        asked: Vec<Ask>,
    ) -> Self {
        let mut running = JoinSet::new();
        inner.connection_up(front, asked, &mut running);
        inner.up();
        Self {
            link,
            joining,
            running,
        }
    }

    /// The first link.
    pub fn first(inner: &Arc<Inner>, first: First) -> Self {
        Self::begin(inner, first.link, first.front, first.others, first.asked)
    }
}

/// Keeps the link up until the client is closed.
pub async fn keep(inner: Arc<Inner>, connector: Arc<dyn Connector>, first: Option<Up>) {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut link = first.as_ref().map_or(0, |up| up.link);
    let mut ready = first;
    let mut stop = inner.stop.subscribe();
    loop {
        let ended = match ready.take() {
            Some(up) => {
                let ended = serve(&inner, up).await;
                backoff.reset();
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
                            ready = Some(Up::begin(&inner, link, front, joining, Vec::new()));
                            continue;
                        }
                        Err(error) => {
                            inner.give_back(front).await;
                            Ended::Gone(error)
                        }
                    },
                    Err(error) if error.fatal => Ended::Gone(DeviceError::Io(Arc::new(
                        std::io::Error::other(error.message),
                    ))),
                    Err(error) => Ended::Lost(error.message),
                }
            }
        };
        match ended {
            Ended::Stopped => return,
            Ended::Gone(error) => {
                info!(image = %inner.options.image, %error, "the mount has ended");
                inner.end(error);
                return;
            }
            Ended::Lost(why) => inner.down(why),
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_delay()) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Runs a link until it ends.
async fn serve(inner: &Arc<Inner>, up: Up) -> Ended {
    let Up {
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
                        return Ended::Gone(error);
                    }
                    inner.connection_up(connection, Vec::new(), &mut running);
                    inner.issue_soon();
                }
                Ok(Err(error)) if error.fatal => {
                    return Ended::Gone(DeviceError::Io(Arc::new(std::io::Error::other(error.message))));
                }
                Ok(Err(error)) => return Ended::Lost(error.message),
                Err(error) => return Ended::Lost(error.to_string()),
            },
            Some(ended) = running.join_next() => {
                let why = match ended {
                    Ok(error) => error,
                    Err(error) => MountError::Unreachable(error.to_string()),
                };
                return match why {
                    MountError::Refused(refusal) if !refusal.retry => {
                        Ended::Gone(device_error(refusal, 0, 0, inner.opened.size))
                    }
                    why => Ended::Lost(why.to_string()),
                };
            }
            _ = cut.wait_for(|cut| *cut >= ups) => {
                return Ended::Lost("the site gave no answer".into());
            }
            _ = stop.wait_for(|stop| *stop) => return Ended::Stopped,
        }
    }
}

impl Inner {
    /// Whether what a connection opened is what was mounted.
    fn same_image(&self, opened: &Opened, first_connection: bool) -> Result<(), DeviceError> {
        let (ours, theirs) = (&self.opened, opened);
        let image = self.options.image.as_str();
        let gone = |text: String| Err(DeviceError::Io(Arc::new(std::io::Error::other(text))));
        if ours.shape() != theirs.shape() || ours.identity.digest != theirs.identity.digest {
            return gone(format!(
                "{image} is another image at the site now; unmount it and mount it anew"
            ));
        }
        let (before, now) = (ours.identity, theirs.identity);
        let known = self.committed.load(Ordering::Acquire);
        match self.options.access {
            Access::ReadOnly if before != now => gone(format!(
                "{image} was written by another mount meanwhile; unmount it and mount it anew"
            )),
            Access::ReadWrite if before.edition != now.edition => gone(format!(
                "{image} was written by another mount meanwhile; unmount it and mount it anew"
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

    /// Gives back what the site granted over another image than the one that was mounted: nothing of this mount can be
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
        let told = async {
            let close = encode_message(&Ask::Close { id: 1 });
            writer.send(kind::ASK, &close).await.ok()?;
            writer.flush().await.ok()?;
            let frame = reader.next().await.ok()??;
            let answer = decode_message::<Answer>(&frame.payload).ok()?.head;
            (answer == Answer::Done { id: 1 }).then_some(())
        };
        if let Ok(Some(())) = timeout(CLOSE_WAIT, told).await {
            self.released.store(true, Ordering::Release);
        }
    }

    /// A connection is up, on which `asked` was sent with its open.
    fn connection_up(
        self: &Arc<Self>,
        connection: OpenConnection,
        asked: Vec<Ask>,
        running: &mut JoinSet<MountError>,
    ) {
        let (way, asks) = mpsc::unbounded_channel();
        let mut state = self.state.lock();
        let credit = state
            .scheduler
            .connection_up(connection.number, connection.kind);
        self.note_early(&mut state, connection.number, asked);
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
        running.spawn(async move { inner.run_connection(connection, asks).await });
    }

    /// Writes down what was asked with the open. What lies outside the device is answered with an error that nobody hears.
    fn note_early(&self, state: &mut State, connection: usize, asked: Vec<Ask>) {
        let deadline = self.now() + self.options.give_up;
        let mut early = Vec::new();
        for ask in asked {
            let Ask::Read { id, first, .. } = ask else {
                continue;
            };
            state.scheduler.used(id);
            if first >= self.opened.shape().chunks() || early.contains(&first) {
                continue;
            }
            early.push(first);
            let job = Job {
                ask,
                body: Bytes::new(),
                deadline,
                again: false,
                to: Reply::Chunks,
            };
            state.scheduler.was_asked(connection, id, job);
        }
        if !early.is_empty() {
            *self.early.lock() = Early::new(early);
        }
    }

    fn up(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.ups += 1;
        state.link = Link::Up(state.ups);
        self.tell_link(&state);
        drop(state);
        self.issue_soon();
    }

    fn issue_soon(self: &Arc<Self>) {
        let inner = self.clone();
        // By a thread of ours: it calls the near side.
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
            self.tell_link(&state);
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
        mut asks: mpsc::UnboundedReceiver<(Ask, Bytes)>,
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
                    next = asks.recv() => next,
                    error = writer.ping_when_idle(KEEP_ALIVE.ping_every) => return Err(error),
                };
                let Some(mut next) = next else {
                    let _ = writer.finish().await;
                    return Ok(());
                };
                loop {
                    let head = encode_message(&next.0);
                    writer.send_vectored(kind::ASK, &[&head, &next.1]).await?;
                    match asks.try_recv() {
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
                    .map_err(|refusal| MountError::Protocol {
                        peer: reader.peer_text().to_owned(),
                        what: refusal.message,
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
