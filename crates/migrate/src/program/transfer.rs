//! The bytes of a program on their way in: what its leecher does with each frame, and how it asks for what is waited for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::DeviceError;
use drover_net::{Frame, FrameReader, FrameWriter, Refusal, decode, encode};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use super::parts::Blocks;
use super::protocol::{BLOCK, Left, MAX_RUNS, MAX_STATE, MAX_WANT, Want, kind};
use super::target::{Piece, Target};
use crate::disks::{self, QUEUE, Write, Writing};
use crate::error::MigrateError;
use crate::protocol::{self, KEEP_ALIVE, MAX_FRAME};

/// How long nothing may come of the last blocks, which are on their way by the other connection.
const LAST_BLOCKS: Duration = Duration::from_secs(10);

/// Longest queue of what is waited for. Each reader asks again while it waits.
const MAX_WANTS: usize = 256;

/// How far the copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It may be written over.
    Copying,
    /// All was said: what is absent is known.
    Said,
    /// Nothing is absent, and all is flushed.
    Complete,
}

/// Records that all of a program is here.
type OnWhole = Box<dyn Fn() -> Result<(), Refusal> + Send + Sync>;

/// What arrives of a program.
pub(crate) struct Transfer {
    targets: Vec<Target>,
    pub(crate) writing: Writing,
    phase: watch::Sender<Phase>,
    state: Mutex<Vec<u8>>,
    wants: Mutex<Option<mpsc::Sender<Want>>>,
    /// Held by the connection that brings the bytes: there is one at a time.
    busy: tokio::sync::Mutex<()>,
    /// Whether the program was taken: what is absent is worth waiting for.
    taken: AtomicBool,
    /// Whether all was there and durable before it was taken.
    durable: AtomicBool,
    on_whole: OnceLock<OnWhole>,
    /// How often a connection has brought bytes.
    connections: watch::Sender<u64>,
}

impl Transfer {
    pub(crate) fn new(targets: Vec<Target>) -> Arc<Self> {
        let transfer = Arc::new(Self {
            targets,
            writing: Writing::default(),
            phase: watch::Sender::new(Phase::Copying),
            state: Mutex::default(),
            wants: Mutex::default(),
            busy: tokio::sync::Mutex::default(),
            taken: AtomicBool::new(false),
            durable: AtomicBool::new(false),
            on_whole: OnceLock::new(),
            connections: watch::Sender::new(0),
        });
        for (part, target) in transfer.targets.iter().enumerate() {
            let weak = Arc::downgrade(&transfer);
            target.arrival().on_wait(move |range| {
                let Some(transfer) = weak.upgrade() else {
                    return;
                };
                let want = Want {
                    part: part as u32,
                    offset: range.start,
                    length: (range.end - range.start).min(MAX_WANT),
                };
                if let Some(wants) = &*transfer.wants.lock() {
                    // Full, or broken: it is asked again.
                    let _ = wants.try_send(want);
                }
            });
        }
        transfer
    }

    /// Goes on with what is absent of something that was taken.
    pub(crate) fn resumed(targets: Vec<Target>) -> Arc<Self> {
        let transfer = Self::new(targets);
        transfer.phase.send_replace(Phase::Said);
        transfer.taken.store(true, Ordering::SeqCst);
        transfer
    }

    /// Whether it can be taken: what is absent, if anything, was said.
    pub(crate) fn is_said(&self) -> bool {
        self.left() == 0 || *self.phase.borrow() != Phase::Copying
    }

    /// What is absent, as frames name it.
    fn named(&self) -> Vec<Left> {
        let sizes = self.targets.iter().map(Target::size).collect();
        let mut blocks = Blocks::none_of(sizes);
        for (part, target) in self.targets.iter().enumerate() {
            for range in target.arrival().absent() {
                blocks.add(part, range);
            }
        }
        blocks.named()
    }

    /// `record` is called when the program was taken and nothing is absent any more, and all is durable; it may block. When
    /// it fails, it is called again.
    pub(crate) fn on_whole(
        &self,
        record: impl Fn() -> Result<(), Refusal> + Send + Sync + 'static,
    ) {
        let _ = self.on_whole.set(Box::new(record));
    }

    /// Whether all is here, and durable as far as the targets are.
    pub(super) fn is_durable(&self) -> bool {
        self.durable.load(Ordering::SeqCst)
    }

    /// Whether the program was taken.
    #[cfg(test)]
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::SeqCst)
    }

    /// How far it is.
    pub(super) fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// The connections that have brought bytes, counted.
    pub(super) fn connections(&self) -> watch::Receiver<u64> {
        self.connections.subscribe()
    }

    /// Whether there is a connection that brings bytes.
    pub(crate) fn is_connected(&self) -> bool {
        self.busy.try_lock().is_err()
    }

    /// Bytes that are absent.
    pub(crate) fn left(&self) -> u64 {
        self.targets.iter().map(|t| t.arrival().left()).sum()
    }

    /// The program's own state, once all was said.
    pub(crate) fn take_state(&self) -> Vec<u8> {
        self.taken.store(true, Ordering::SeqCst);
        std::mem::take(&mut *self.state.lock())
    }

    /// What is absent is waited for so long, after something of it has come.
    pub(super) fn set_patience(&self, patience: Duration) {
        for target in &self.targets {
            target.arrival().set_timeout(patience);
        }
    }

    /// What is absent may come after all.
    pub(super) fn revive(&self) {
        for target in &self.targets {
            target.arrival().revive();
        }
    }

    /// What is absent will not come.
    pub(super) fn fail(&self, why: &str) {
        for target in &self.targets {
            let error = DeviceError::Io(Arc::new(std::io::Error::other(why.to_owned())));
            target.arrival().fail(error);
        }
    }

    /// Handles one frame that brings something.
    pub(crate) fn apply(&self, frame: &Frame) -> Result<(), MigrateError> {
        let bad = || MigrateError::Protocol("the bytes of a program");
        let phase = *self.phase.borrow();
        match frame.kind {
            protocol::kind::WRITE => self.write(&frame.payload, phase),
            kind::LEFT if phase == Phase::Copying => {
                let Left { part, runs } = decode(&frame.payload)?;
                let target = self.targets.get(part as usize).ok_or_else(bad)?;
                if runs.len() > MAX_RUNS {
                    return Err(bad());
                }
                let mut ranges = Vec::with_capacity(runs.len());
                for (first, count) in runs {
                    let start = u64::from(first) * BLOCK;
                    let end = start + u64::from(count) * BLOCK;
                    if count == 0 || end >= target.size().saturating_add(BLOCK) {
                        return Err(bad());
                    }
                    ranges.push(start..end.min(target.size()));
                }
                let left = target.leave(&ranges);
                left.map_err(|error| disks::failed(part, error))
            }
            kind::STATE if phase == Phase::Copying && frame.payload.len() <= MAX_STATE => {
                *self.state.lock() = frame.payload.to_vec();
                self.phase.send_replace(Phase::Said);
                Ok(())
            }
            _ => Err(bad()),
        }
    }

    /// Makes what has arrived durable, as far as the targets do. After the hand-over that is the end.
    pub(super) fn flush(&self) -> Result<(), MigrateError> {
        let is_said = *self.phase.borrow() == Phase::Said;
        let is_end = is_said && self.taken.load(Ordering::SeqCst);
        // The last blocks may come by the other connection.
        while is_end && self.left() > 0 {
            let before = self.left();
            let mut arrivals = self.targets.iter().map(Target::arrival);
            if !arrivals.all(|arrival| arrival.wait(LAST_BLOCKS)) && self.left() >= before {
                return Err(MigrateError::Protocol("what was left of a program"));
            }
        }
        for (part, target) in self.targets.iter().enumerate() {
            let flushed = target.flush();
            flushed.map_err(|e| disks::failed(part as u32, e))?;
        }
        if is_end {
            if let Some(record) = self.on_whole.get() {
                record()?;
            }
            self.phase.send_replace(Phase::Complete);
        } else if is_said && self.left() == 0 {
            self.durable.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    fn write(&self, payload: &[u8], phase: Phase) -> Result<(), MigrateError> {
        let size = |part: usize| Some(self.targets.get(part)?.size());
        let write = Write::parse(payload, size)?;
        let target = &self.targets[write.head.disk as usize];
        let piece = match &write.bytes {
            Some(bytes) => Piece::Data(write.head.offset, bytes),
            None => Piece::Zeros(write.head.offset, write.head.length),
        };
        let written = match phase {
            // It would wait for what it covers in part.
            Phase::Copying if self.left() > 0 => {
                return Err(MigrateError::Protocol("the bytes of a program"));
            }
            Phase::Copying => target.copy(&piece),
            _ => target.arrive(&piece),
        };
        written.map_err(|error| disks::failed(write.head.disk, error))
    }

    /// Takes what a seeder sends, until it hangs up. It is told what went wrong.
    pub(crate) async fn receive(
        self: Arc<Self>,
        mut reader: FrameReader,
        writer: FrameWriter,
    ) -> Result<(), MigrateError> {
        let _busy = self.busy.lock().await;
        self.connections.send_modify(|count| *count += 1);
        reader.set_max_frame(MAX_FRAME);
        let (frames, replies, write) = self.clone().start();
        disks::carry(reader, writer, frames, replies, write).await
    }

    /// A thread that handles frames.
    fn start(self: Arc<Self>) -> (mpsc::Sender<Frame>, mpsc::Receiver<()>, Handling) {
        let (frames, mut queue) = mpsc::channel::<Frame>(QUEUE);
        let (reply, replies) = mpsc::channel(1);
        let handling = tokio::task::spawn_blocking(move || {
            while let Some(frame) = queue.blocking_recv() {
                if frame.kind == protocol::kind::FLUSH {
                    // Not while others must not write: it may wait for them.
                    self.flush()?;
                    if reply.blocking_send(()).is_err() {
                        break;
                    }
                } else {
                    match self.writing.write(|| self.apply(&frame)) {
                        Some(applied) => applied?,
                        None => break,
                    }
                }
            }
            Ok(())
        });
        (frames, replies, handling)
    }

    /// As [`Self::ask`], of a seeder that is told first what is absent now.
    pub(crate) async fn name_and_ask(
        self: Arc<Self>,
        reader: FrameReader,
        mut writer: FrameWriter,
    ) -> Result<(), MigrateError> {
        writer.set_max_frame(MAX_FRAME);
        for left in self.named() {
            writer.send(kind::LEFT, &encode(&left)).await?;
        }
        writer.send(kind::STATE, &[]).await?;
        writer.flush().await?;
        self.ask(reader, writer).await
    }

    /// Asks a seeder for what is waited for, until it hangs up.
    pub(crate) async fn ask(
        self: Arc<Self>,
        mut reader: FrameReader,
        mut writer: FrameWriter,
    ) -> Result<(), MigrateError> {
        KEEP_ALIVE.apply(&mut reader, &mut writer);
        reader.set_max_frame(MAX_FRAME);
        let (wants, mut queue) = mpsc::channel(MAX_WANTS);
        *self.wants.lock() = Some(wants);
        // What was asked for by another connection may not come.
        self.revive();
        let (frames, _replies, write) = self.clone().start();
        let read = async {
            while let Some(frame) = reader.next().await? {
                if frame.kind != protocol::kind::WRITE {
                    return Err(MigrateError::Protocol("the bytes of a program"));
                }
                if frames.send(frame).await.is_err() {
                    break;
                }
            }
            Ok(())
        };
        let ask = async {
            loop {
                tokio::select! {
                    want = queue.recv() => {
                        let Some(want) = want else {
                            // Another connection has taken its place.
                            return Ok(());
                        };
                        writer.send(kind::WANT, &encode(&want)).await?;
                        writer.flush().await?;
                    }
                    broken = writer.ping_when_idle(KEEP_ALIVE.ping_every) => return Err(broken.into()),
                }
            }
        };
        let ended: Result<(), MigrateError> = tokio::select! {
            ended = read => ended,
            ended = ask => ended,
        };
        drop(frames);
        write.await.map_err(|_| MigrateError::Stopped)?.and(ended)
    }
}

type Handling = tokio::task::JoinHandle<Result<(), MigrateError>>;
