//! What follows after the hand-over: first what a program, or a machine, waits for at its new place, then the rest.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, check_range};
use drover_net::{Backoff, Code, FrameReader, FrameWriter, NetError, decode};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::parts::Blocks;
use super::protocol::{MAX_WANT, Want, kind};
use crate::disks::{DiskWriter, Sent, next, send_ranges};
use crate::error::MigrateError;
use crate::protocol::{KEEP_ALIVE, MAX_FRAME};

/// Bytes sent before it is looked whether something is waited for.
const STEP: u64 = 256 << 10;

/// How often it is looked whether the connection is broken on which something may be waited for.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How often the progress is told.
const TELL_EVERY: Duration = Duration::from_millis(250);

/// Where what is left goes.
pub(crate) trait Link: Send + Sync + 'static {
    /// What moves, for messages.
    fn name(&self) -> String;

    /// How long a lost connection is tried anew.
    fn give_up_after(&self) -> Duration;

    /// Whether [`Link::fetches`] begins with what the other end lacks.
    fn names_what_it_lacks(&self) -> bool;

    /// Makes the connection for the rest.
    fn pages(&self) -> Calling<'_>;

    /// Makes the connection for what is waited for.
    fn fetches(&self) -> Calling<'_>;

    /// Told how far it is: bytes that are left.
    fn tell(&self, left: u64);

    /// Told of a connection that broke.
    fn broke(&self, error: &MigrateError);
}

/// A call that is being made, and stays open after its reply.
pub(crate) type Calling<'a> =
    Pin<Box<dyn Future<Output = Result<(FrameReader, FrameWriter), MigrateError>> + Send + 'a>>;

/// What is left at the seeder of something that is handed over.
pub(crate) struct Behind {
    devices: Vec<Arc<dyn BlockDevice>>,
    link: Arc<dyn Link>,
    /// All that was left when the last connection was made.
    all: Mutex<Blocks>,
    sent: Arc<Sent>,
    /// What both connections work on, and where the rest goes on.
    left: Mutex<(Blocks, (usize, u32))>,
    /// How many are waiting.
    waiting: watch::Sender<usize>,
    asked: AtomicU64,
}

/// The task that sends what is waited for, until its connection breaks.
pub(crate) struct Answering(JoinHandle<MigrateError>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Whether the process at the other end knows nothing of what is left, which does not change.
pub(crate) fn is_unknown(error: &MigrateError) -> bool {
    match error {
        MigrateError::Refused(refusal) | MigrateError::Net(NetError::Refused(refusal)) => {
            refusal.code == Code::OutOfOrder
        }
        _ => false,
    }
}

impl Behind {
    pub(crate) fn new(
        devices: Vec<Arc<dyn BlockDevice>>,
        link: Arc<dyn Link>,
        left: Blocks,
        sent: Arc<Sent>,
    ) -> Arc<Self> {
        Arc::new(Self {
            left: Mutex::new((left.clone(), (0, 0))),
            devices,
            link,
            all: Mutex::new(left),
            sent,
            waiting: watch::Sender::new(0),
            asked: AtomicU64::new(0),
        })
    }

    /// All that is left.
    pub(crate) fn leave(&self, left: Blocks) {
        *self.all.lock() = left;
        self.begin_anew();
    }

    /// Sends what is waited for from now on: the program may need it before it is known here that it runs there.
    pub(crate) fn start(self: &Arc<Self>, fetches: (FrameReader, FrameWriter)) -> Answering {
        let this = Arc::clone(self);
        Answering(tokio::spawn(async move { this.answer(fetches).await }))
    }

    /// Sends all of it; how many bytes were asked for. A connection that is lost, or was not made, is made anew.
    ///
    /// # Errors
    /// When no connection can be made for too long, or the process there knows nothing of it ([`is_unknown`]): then the other end
    /// lacks the rest, for good.
    pub(crate) async fn send(
        self: &Arc<Self>,
        mut connections: Result<(DiskWriter, Answering), MigrateError>,
    ) -> Result<u64, MigrateError> {
        let mut pauses = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        let mut failing: Option<Instant> = None;
        loop {
            let (error, is_made) = match connections {
                Ok((pages, answering)) => match self.send_once(pages, answering).await {
                    Ok(()) => return Ok(self.asked.load(Ordering::Relaxed)),
                    Err(e) => (e, true),
                },
                Err(e) => (e, false),
            };
            let is_late = match is_made {
                true => {
                    failing = None;
                    pauses.reset();
                    false
                }
                false => {
                    let since = *failing.get_or_insert_with(Instant::now);
                    since.elapsed() > self.link.give_up_after()
                }
            };
            // What a site cannot write now, as on a full disk, it may write later. A process that knows nothing of it has lost what
            // it had.
            let is_theirs = self.link.names_what_it_lacks() && error.code() == Some(Code::Failed);
            if !error.retryable() && !is_theirs || is_late {
                return Err(error);
            }
            tracing::info!("what is left of {}: {error}", self.link.name());
            self.link.broke(&error);
            tokio::time::sleep(pauses.next_delay()).await;
            connections = self.connect().await;
        }
    }

    /// Makes the connection anew on which what is waited for is sent, whenever it breaks. Never returns; cancel safe.
    pub(crate) async fn keep(self: &Arc<Self>, answering: &mut Answering) {
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
        loop {
            if answering.0.is_finished() {
                if let Ok(made) = self.connect_fetches().await {
                    *answering = made;
                    pauses.reset();
                    continue;
                }
                tokio::time::sleep(pauses.next_delay()).await;
            } else {
                // Awaited here it could not be awaited again.
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
    }

    /// Forgets what was sent: what was on its way may be lost; what has arrived is not written twice.
    fn begin_anew(&self) {
        *self.left.lock() = (self.all.lock().clone(), (0, 0));
        self.waiting.send_replace(0);
    }

    /// Makes both connections.
    ///
    /// # Errors
    /// When one cannot be made, or the other end says something else than what it lacks.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<(DiskWriter, Answering), MigrateError> {
        let (reader, writer) = self.link.pages().await?;
        let pages = DiskWriter::new(reader, writer, Arc::clone(&self.sent));
        Ok((pages, self.connect_fetches().await?))
    }

    /// Makes the connection on which what is waited for is sent.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub(crate) async fn connect_fetches(self: &Arc<Self>) -> Result<Answering, MigrateError> {
        let (mut reader, writer) = self.link.fetches().await?;
        if self.link.names_what_it_lacks() {
            reader.set_max_frame(MAX_FRAME);
            let sizes = self.devices.iter().map(|device| device.size()).collect();
            let mut lacks = Blocks::none_of(sizes);
            loop {
                let frame = next(&mut reader).await?;
                match frame.kind {
                    kind::LEFT if lacks.add_named(&decode(&frame.payload)?) => {}
                    kind::STATE => break,
                    _ => return Err(MigrateError::Protocol("what is left")),
                }
            }
            *self.all.lock() = lacks;
        }
        self.begin_anew();
        Ok(self.start((reader, writer)))
    }

    async fn send_once(
        &self,
        mut pages: DiskWriter,
        mut answering: Answering,
    ) -> Result<(), MigrateError> {
        let rest = async {
            self.send_rest(&mut pages).await?;
            pages.flush().await?;
            pages.flushed().await
        };
        tokio::select! {
            sent = rest => sent,
            broken = &mut answering.0 => Err(broken.unwrap_or(MigrateError::Stopped)),
        }
    }

    async fn send_rest(&self, pages: &mut DiskWriter) -> Result<(), MigrateError> {
        let mut waiting = self.waiting.subscribe();
        let mut told = Instant::now();
        loop {
            // Its sender is here.
            let _ = waiting.wait_for(|count| *count == 0).await;
            let (step, left) = {
                let mut left = self.left.lock();
                let (blocks, cursor) = &mut *left;
                (blocks.take_next(cursor, STEP), blocks.bytes())
            };
            if told.elapsed() > TELL_EVERY || step.is_none() {
                told = Instant::now();
                self.link.tell(left);
            }
            let Some((part, range)) = step else {
                return Ok(());
            };
            let device = Arc::clone(&self.devices[part]);
            pages.send(part as u32, device, vec![range]).await?;
        }
    }

    /// Sends what is asked for, until the connection breaks.
    async fn answer(&self, fetches: (FrameReader, FrameWriter)) -> MigrateError {
        let (mut reader, mut writer) = fetches;
        KEEP_ALIVE.apply(&mut reader, &mut writer);
        writer.set_max_frame(MAX_FRAME);
        loop {
            let frame = tokio::select! {
                biased;
                frame = next(&mut reader) => frame,
                broken = writer.ping_when_idle(KEEP_ALIVE.ping_every) => return broken.into(),
            };
            let sent = match frame {
                Ok(frame) if frame.kind == kind::WANT => {
                    self.waiting.send_modify(|count| *count += 1);
                    let sent = self.answer_one(&frame.payload, &mut writer).await;
                    self.waiting
                        .send_modify(|count| *count = count.saturating_sub(1));
                    sent
                }
                Ok(_) => Err(MigrateError::Protocol("what is left of a program")),
                Err(e) => Err(e),
            };
            if let Err(e) = sent {
                return e;
            }
        }
    }

    async fn answer_one(
        &self,
        payload: &[u8],
        writer: &mut FrameWriter,
    ) -> Result<(), MigrateError> {
        let bad = || MigrateError::Protocol("what is left of a program");
        let want: Want = decode(payload)?;
        let index = want.part as usize;
        let device = self.devices.get(index).ok_or_else(bad)?;
        check_range(want.offset, want.length, device.size()).map_err(|_| bad())?;
        if want.length == 0 || want.length > MAX_WANT {
            return Err(bad());
        }
        let ranges = {
            let mut left = self.left.lock();
            let (blocks, cursor) = &mut *left;
            let end = want.offset + want.length;
            // The rest goes on behind it.
            *cursor = (index, u32::try_from(end / 4096).unwrap_or(0));
            blocks.take_range(index, want.offset..end)
        };
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        self.asked.fetch_add(bytes, Ordering::Relaxed);
        let device = Arc::clone(device);
        send_ranges(writer, want.part, device, ranges, &self.sent).await?;
        Ok(writer.flush().await?)
    }
}
