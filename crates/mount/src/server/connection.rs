//! A connection at the site: one task reads requests, one writes replies, and threads of the pool execute requests.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use drover_device::remote::Shape;
use drover_net::group::{self, Flow};
use drover_net::{Code, FrameReader, FrameWriter, PeerKey, Refusal, Share, Shares, until};
use drover_store::lease::{Access, MountId};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::counters::Counters;
use super::image::Image;
use super::pool::{Pool, WorkerScratch};
use super::queue::Queue;
use super::unit::{Effect, Unit};
use super::work::{Client, ReadyReply};
use crate::MountError;
use crate::protocol::{
    ConnectionKind, KEEP_ALIVE, MAX_UNIT, Reply, Request, decode_message, encode_message, kind,
};

/// A background reply is this fraction (1/n) of the window, so that a connection has several in flight.
const UNITS_OF_WINDOW: u64 = 16;

/// Minimum background reply, in bytes of the device; a chunk if that is larger.
const MIN_UNIT: u64 = 16 << 10;

/// Round-trip time from which compression is worthwhile.
const FAR: Duration = Duration::from_millis(2);

/// Requests no longer than this need not wait for room.
const SMALL: usize = 4 << 10;

/// How long the kernel may take to accept a reply before its bytes stop counting as in flight.
const KERNEL_WAIT: Duration = Duration::from_millis(3);

/// How long sending the final error of a connection may take.
const LAST_WORD: Duration = Duration::from_millis(100);

/// A request's bytes, with their share of the memory for them.
struct PayloadWithRoom {
    payload: Bytes,
    _room: Share<PeerKey>,
}

impl AsRef<[u8]> for PayloadWithRoom {
    fn as_ref(&self) -> &[u8] {
        &self.payload
    }
}

/// State shared by the connections of a link.
pub struct LinkShared {
    /// Bytes in flight. Locked after a connection's `state`, never before.
    flow: Mutex<Flow>,
    /// Wakes the writers of all connections: there is room for background replies.
    room: Notify,
    started: tokio::time::Instant,
    /// Initialisation that must complete before any connection of the link may do anything.
    pub ready: tokio::sync::OnceCell<()>,
}

impl Default for LinkShared {
    fn default() -> Self {
        Self {
            flow: Mutex::default(),
            room: Notify::new(),
            started: tokio::time::Instant::now(),
            ready: tokio::sync::OnceCell::new(),
        }
    }
}

impl LinkShared {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

/// One connection.
pub struct Connection {
    /// Its number at this site.
    pub number: u64,
    /// The mount it belongs to.
    pub key: (PeerKey, MountId),
    /// Its role.
    pub kind: ConnectionKind,
    /// The mount's link that it belongs to.
    pub link: u64,
    /// Its access rights.
    pub access: Access,
    /// Its image.
    pub image: Arc<Image>,
    /// Device and chunk size.
    pub shape: Shape,
    /// State shared with the link's other connections.
    pub shared: Arc<LinkShared>,
    /// The threads.
    pub pool: Arc<Pool>,
    /// Where what they have to wait for is waited for.
    pub runtime: tokio::runtime::Handle,
    /// The site's counters.
    pub counters: Arc<Counters>,
    /// Memory for request bodies, of the whole site.
    pub bodies: Shares<PeerKey>,
    /// Bytes that the mount has written.
    pub written: Arc<AtomicU64>,
    /// The requests.
    pub running: Running,
}

/// What a connection has to do, by default nothing.
#[derive(Default)]
pub struct Running {
    state: Mutex<ConnectionState>,
    /// Wakes the writer.
    wake: Notify,
    /// Notified when work in progress ends.
    idle: Notify,
    closed: watch::Sender<bool>,
}

#[derive(Default)]
struct ConnectionState {
    queue: Queue,
    /// Replies waiting to be sent.
    out: group::Queue<ReadyReply>,
    /// Body bytes received, and how many of them were reported to the mount.
    received: u64,
    reported: u64,
    /// When the last of them was received.
    received_at: Duration,
    /// Units queued for or running on threads.
    working: usize,
    closed: bool,
}

impl ConnectionState {
    /// Promotes a background read to a foreground one: its replies are sent at once, without credit.
    fn hurry(&mut self, id: u64) {
        self.queue.hurry(id);
        let queue = &mut self.queue;
        self.out.hurry(
            |made| made.head.id() == id,
            |made| queue.promote(made.bytes()),
        );
    }
}

impl Connection {
    /// Serves the connection until the mount ends it, the link breaks, `stop` is set or [`Connection::close`] is
    /// called.
    pub async fn serve(
        self: &Arc<Self>,
        reader: &mut FrameReader,
        writer: &mut FrameWriter,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), MountError> {
        let mut closed = self.running.closed.subscribe();
        let stopped = async {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => {}
                _ = closed.wait_for(|closed| *closed) => {}
            }
        };
        let result = tokio::select! {
            result = self.read(reader) => result,
            result = self.write(writer) => result,
            () = stopped => Ok(()),
        };
        self.close();
        self.drained().await;
        self.shared.flow.lock().gone(self.number);
        self.shared.room.notify_waiters();
        result
    }

    /// Sends a refusal as the last reply, and ends the connection soon after.
    pub async fn end(&self, refusal: Refusal) {
        self.send_final_error(refusal);
        self.running.state.lock().closed = true;
        self.drained().await;
        tokio::time::sleep(LAST_WORD).await;
        self.close();
    }

    /// Ends the connection: work that has not started is dropped.
    pub fn close(&self) {
        self.running.state.lock().closed = true;
        self.running.closed.send_replace(true);
        self.running.idle.notify_waiters();
    }

    /// Waits until all work started by the closed connection has finished. Cancel safe.
    pub async fn drained(&self) {
        let is_idle = || (self.running.state.lock().working == 0).then_some(());
        until(&self.running.idle, is_idle).await;
    }

    async fn read(self: &Arc<Self>, reader: &mut FrameReader) -> Result<(), MountError> {
        while let Some(frame) = reader.next().await? {
            self.counters.received(frame.payload.len());
            let taken = if frame.kind == kind::REQUEST {
                self.take(&self.held(frame.payload).await)
            } else {
                Err(Refusal::new(
                    Code::Protocol,
                    format!("unexpected frame of kind {}", frame.kind),
                ))
            };
            if let Err(refusal) = taken {
                self.send_final_error(refusal.clone());
                tokio::time::sleep(LAST_WORD).await;
                return Err(MountError::Protocol {
                    peer: reader.peer_text().to_owned(),
                    what: refusal.message,
                });
            }
        }
        Ok(())
    }

    /// Waits for room for a request; it is returned with the last of its bytes.
    async fn held(&self, payload: Bytes) -> Bytes {
        if payload.len() <= SMALL {
            return payload;
        }
        let room = self.bodies.take(self.key.0, payload.len() as u64).await;
        Bytes::from_owner(PayloadWithRoom {
            payload,
            _room: room,
        })
    }

    /// Queues the error that ends the connection ahead of all other replies.
    fn send_final_error(&self, refusal: Refusal) {
        let made = ReadyReply {
            head: Reply::Error { id: 0, refusal },
            body: Bytes::new(),
            replies: None,
        };
        let mut state = self.running.state.lock();
        state.queue.made_unasked(made.bytes());
        state.out.push_first(made);
        drop(state);
        self.running.wake.notify_one();
    }

    fn take(self: &Arc<Self>, payload: &Bytes) -> Result<(), Refusal> {
        let message = decode_message::<Request>(payload)?;
        match message.head {
            Request::Credit { received, window } => {
                let now = self.shared.now();
                let mut flow = self.shared.flow.lock();
                flow.credit(self.number, received, window, now);
                drop(flow);
                self.shared.room.notify_waiters();
            }
            Request::Hurry { id } => {
                self.running.state.lock().hurry(id);
                self.running.wake.notify_one();
            }
            request => {
                self.counters.asked(&request);
                let mut state = self.running.state.lock();
                if !message.body.is_empty() {
                    state.received += message.body.len() as u64;
                    state.received_at = self.shared.now();
                }
                state.queue.admit(request, message.body, self.shape.chunk)?;
                if state.received > state.reported {
                    self.running.wake.notify_one();
                }
            }
        }
        self.pump();
        Ok(())
    }

    /// Submits to the pool as much work as the limits permit.
    fn pump(self: &Arc<Self>) {
        let window = self.shared.flow.lock().window();
        let unit = (window / UNITS_OF_WINDOW).clamp(MIN_UNIT, u64::from(MAX_UNIT));
        loop {
            let mut state = self.running.state.lock();
            if state.closed {
                return;
            }
            let Some((unit, front)) = state.queue.take(self.shape.chunk, unit) else {
                return;
            };
            state.working += 1;
            let connection = self.clone();
            let kind = unit.kind(front);
            let effect = Effect::of(&unit, self.shape.chunk);
            let bytes = effect.read.saturating_add(effect.written);
            let Some(arrival) = self.image.arrival(&unit, self.shape.chunk) else {
                // Under the lock: another thread must not submit the next one first, which may overlap.
                self.pool.submit(self.key, kind, bytes, move |scratch| {
                    connection.work(unit, front, scratch)
                });
                continue;
            };
            drop(state);
            // No thread waits for what is still arriving; of changes that overlap a mount has one at a time.
            self.runtime.spawn(async move {
                let mut closed = connection.running.closed.subscribe();
                tokio::select! {
                    () = arrival => {}
                    _ = closed.wait_for(|closed| *closed) => {}
                }
                let (pool, key) = (connection.pool.clone(), connection.key);
                pool.submit(key, kind, bytes, move |scratch| {
                    connection.work(unit, front, scratch)
                });
            });
        }
    }

    fn work(self: &Arc<Self>, unit: Unit, front: bool, scratch: &mut WorkerScratch) {
        let (closed, queued) = {
            let state = self.running.state.lock();
            (state.closed, state.out.has_background())
        };
        let effect = Effect::of(&unit, self.shape.chunk);
        let changes = unit.changes();
        let made = (!closed).then(|| {
            let far = self.shared.flow.lock().round_trip() > Some(FAR);
            let client = Client {
                image: &self.image,
                key: self.key,
                link: self.link,
                shape: self.shape,
                access: self.access,
                // A reply that waits for the link anyway can be compressed meanwhile.
                pack: far || (queued && !front),
            };
            client.work(unit, scratch)
        });
        if let Some(made) = &made {
            self.counters.made(effect, made);
            if !matches!(made.head, Reply::Error { .. }) {
                self.written.fetch_add(effect.written, Relaxed);
            }
        }
        let mut state = self.running.state.lock();
        state.queue.worked(effect.weight(), front);
        if changes {
            state.queue.changed();
        }
        // Even when the mount has gone: otherwise the next epoch would wait for the copy.
        let committed = matches!(&made, Some(made) if matches!(made.head, Reply::Committed { .. }));
        if let Some(made) = made.filter(|_| !state.closed) {
            let urgent = !front && state.queue.is_urgent(made.head.id());
            if urgent {
                state.queue.promote(0);
            }
            let front = front || urgent;
            let bytes = made.bytes();
            state.queue.made(bytes, front);
            if !state.queue.is_pending(made.head.id()) {
                state.queue.left(bytes, front, made.head.id(), made.replies);
            } else {
                state.out.push(made, front);
            }
        }
        drop(state);
        self.running.wake.notify_one();
        if committed {
            self.image.settle_aside();
        }
        let mut state = self.running.state.lock();
        state.working -= 1;
        let idle = state.working == 0;
        drop(state);
        if idle {
            self.running.idle.notify_waiters();
        }
        self.pump();
    }

    async fn write(self: &Arc<Self>, writer: &mut FrameWriter) -> Result<(), MountError> {
        writer.keep_little_unsent();
        let mut flushed = true;
        loop {
            let room = self.shared.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            if let Some((head, body)) = self.next_out() {
                let length = head.len() as u64 + body.len() as u64;
                let parts: [&[u8]; 2] = [&head, &body];
                // Short replies are batched; after a long one, nothing is selected until it has been passed to the
                // kernel.
                let long = length > SMALL as u64 * 4;
                let mut sending = pin!(async {
                    writer.send_vectored(kind::REPLY, &parts).await?;
                    match long {
                        true => writer.flush().await,
                        false => Ok(()),
                    }
                });
                match timeout(KERNEL_WAIT, &mut sending).await {
                    Ok(sent) => sent?,
                    Err(_) => {
                        // Bytes that TCP does not accept on this connection must not block the others.
                        let back = self.shared.flow.lock().unsent(self.number, length);
                        self.shared.room.notify_waiters();
                        sending.await?;
                        let now = self.shared.now();
                        self.shared.flow.lock().sent(self.number, back, now);
                    }
                }
                flushed = long;
                self.pump();
                continue;
            }
            if !flushed {
                writer.flush().await?;
                flushed = true;
                continue;
            }
            tokio::select! {
                () = self.running.wake.notified() => {}
                () = room => {}
                error = writer.ping_when_idle(KEEP_ALIVE.ping_every) => return Err(error.into()),
            }
        }
    }

    /// The next reply that may be sent: its encoded head and its body.
    fn next_out(&self) -> Option<(Vec<u8>, Bytes)> {
        let mut state = self.running.state.lock();
        let mut flow = self.shared.flow.lock();
        if state.received > state.reported {
            state.reported = state.received;
            let head = encode_message(&Reply::Arrived {
                bytes: state.received,
                at: u64::try_from(state.received_at.as_micros()).unwrap_or(u64::MAX),
            });
            flow.sent(self.number, head.len() as u64, self.shared.now());
            self.counters.left(head.len() as u64);
            return Some((head, Bytes::new()));
        }
        let (mut made, front) = state.out.pop(|made| flow.allows(made.bytes()))?;
        let bytes = made.bytes();
        let nothing_waits = state.out.is_empty();
        if let Reply::Chunks { echo, last, .. } = &mut made.head {
            *echo = flow.echo(self.number);
            *last = nothing_waits;
        }
        let head = encode_message(&made.head);
        let length = head.len() as u64 + made.body.len() as u64;
        flow.sent(self.number, length, self.shared.now());
        self.counters.left(length);
        state.queue.left(bytes, front, made.head.id(), made.replies);
        Some((head, made.body))
    }
}
