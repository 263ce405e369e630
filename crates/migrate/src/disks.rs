//! What is written to disks after their images were sent: read at the seeder, packed, carried, and written at the leecher.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError, is_zero};
use drover_net::{Code, Frame, FrameReader, FrameWriter, NetError, Refusal, encode};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::error::MigrateError;
use crate::protocol::{Coding, MAX_FRAME, MAX_WHY, MAX_WRITE, WriteHead, kind};

/// Frames between the thread that reads and the socket, or the socket and the thread that writes.
pub(crate) const QUEUE: usize = 4;

/// How long the frames of a seeder are taken that does not know yet that the disk failed.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// Level of compression: what a link of 1 Gbit/s does not wait for.
const LEVEL: i32 = 1;

/// What the seeder has sent of its disks.
#[derive(Debug, Default)]
pub struct Sent {
    /// Bytes of disks.
    pub disk: AtomicU64,
    /// The same, packed.
    pub packed: AtomicU64,
}

/// The connection on which the seeder sends what was written.
pub struct DiskWriter {
    reader: FrameReader,
    writer: FrameWriter,
    sent: Arc<Sent>,
    /// How often it was asked to flush, and has not answered.
    flushing: u32,
}

impl DiskWriter {
    /// Uses an open connection, after the reply.
    #[must_use]
    pub fn new(reader: FrameReader, mut writer: FrameWriter, sent: Arc<Sent>) -> Self {
        writer.set_max_frame(MAX_FRAME);
        Self {
            reader,
            writer,
            sent,
            flushing: 0,
        }
    }

    /// Sends what is in these ranges of a disk now.
    ///
    /// # Errors
    /// When the disk cannot be read, or the connection breaks.
    pub async fn send(
        &mut self,
        disk: u32,
        device: Arc<dyn BlockDevice>,
        ranges: Vec<Range<u64>>,
    ) -> Result<(), MigrateError> {
        send_ranges(&mut self.writer, disk, device, ranges, &self.sent).await
    }

    /// Sends another frame, and lets nothing wait to be sent.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(crate) async fn say(&mut self, kind: u8, payload: &[u8]) -> Result<(), MigrateError> {
        self.writer.send(kind, payload).await?;
        Ok(self.writer.flush().await?)
    }

    /// Sends what [`pack_write`] has packed.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn send_packed(&mut self, payload: &[u8]) -> Result<(), MigrateError> {
        self.sent
            .packed
            .fetch_add(payload.len() as u64, Ordering::Relaxed);
        Ok(self.writer.send(kind::WRITE, payload).await?)
    }

    /// Asks the leecher to make all that was sent durable; [`Self::flushed`] has to follow.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn flush(&mut self) -> Result<(), MigrateError> {
        self.writer.send(kind::FLUSH, &[]).await?;
        self.flushing += 1;
        Ok(self.writer.flush().await?)
    }

    /// Returns when all that was sent before [`Self::flush`] is durable at the leecher. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks, or the leecher could not write.
    pub async fn flushed(&mut self) -> Result<(), MigrateError> {
        while self.flushing > 0 {
            let frame = next(&mut self.reader).await?;
            match frame.kind {
                kind::FLUSHED => self.flushing -= 1,
                kind::FAILED => {
                    let why = String::from_utf8_lossy(&frame.payload);
                    let end = why.floor_char_boundary(MAX_WHY);
                    let text = format!("the other site: {}", &why[..end]);
                    return Err(Refusal::new(Code::Failed, text).into());
                }
                _ => return Err(MigrateError::Protocol("disks")),
            }
        }
        Ok(())
    }
}

/// Sends what is in these ranges of a disk now. Not flushed.
///
/// # Errors
/// When the disk cannot be read, or the connection breaks.
pub(crate) async fn send_ranges(
    writer: &mut FrameWriter,
    disk: u32,
    device: Arc<dyn BlockDevice>,
    ranges: Vec<Range<u64>>,
    sent: &Arc<Sent>,
) -> Result<(), MigrateError> {
    let (frames, mut queue) = mpsc::channel(QUEUE);
    let sent = sent.clone();
    let read = tokio::task::spawn_blocking(move || pack(disk, &*device, ranges, &frames, &sent));
    while let Some(payload) = queue.recv().await {
        let payload: Vec<u8> = payload;
        writer.send(kind::WRITE, &payload).await?;
    }
    let read = read.await.map_err(|_| MigrateError::Stopped)?;
    read.map_err(|error| failed(disk, error))
}

fn pack(
    disk: u32,
    device: &dyn BlockDevice,
    ranges: Vec<Range<u64>>,
    frames: &mpsc::Sender<Vec<u8>>,
    sent: &Sent,
) -> Result<(), DeviceError> {
    let mut buffer = vec![0; MAX_WRITE];
    for range in ranges {
        for offset in range.clone().step_by(MAX_WRITE) {
            let length = (range.end - offset).min(MAX_WRITE as u64);
            let bytes = &mut buffer[..length as usize];
            device.read(offset, bytes)?;
            let payload = pack_write(disk, offset, bytes);
            sent.disk.fetch_add(length, Ordering::Relaxed);
            sent.packed
                .fetch_add(payload.len() as u64, Ordering::Relaxed);
            if frames.blocking_send(payload).is_err() {
                // The connection is gone, which is reported.
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Packs a write of at most [`MAX_WRITE`] bytes.
#[must_use]
pub fn pack_write(disk: u32, offset: u64, bytes: &[u8]) -> Vec<u8> {
    if is_zero(bytes) {
        return pack_zeros(disk, offset, bytes.len() as u64);
    }
    let packed = zstd::bulk::compress(bytes, LEVEL).ok();
    let packed = packed.filter(|packed| packed.len() < bytes.len());
    let (coding, body) = match &packed {
        Some(packed) => (Coding::Zstd, &packed[..]),
        None => (Coding::Plain, bytes),
    };
    let head = WriteHead {
        disk,
        offset,
        length: bytes.len() as u64,
        coding,
    };
    let mut payload = encode(&head);
    payload.extend_from_slice(body);
    payload
}

/// Packs a write of any number of zeros.
#[must_use]
pub fn pack_zeros(disk: u32, offset: u64, length: u64) -> Vec<u8> {
    encode(&WriteHead {
        disk,
        offset,
        length,
        coding: Coding::Zeros,
    })
}

/// The next frame of a conversation that is not over.
pub(crate) async fn next(reader: &mut FrameReader) -> Result<Frame, MigrateError> {
    let frame = reader.next().await?;
    frame.ok_or_else(|| {
        let peer = reader.peer_text().to_owned();
        NetError::Truncated { peer }.into()
    })
}

/// Whether the other site may still write to the disks of a machine that comes.
#[derive(Clone, Debug, Default)]
pub struct Writing(Arc<Gate>);

#[derive(Debug, Default)]
struct Gate {
    ended: watch::Sender<bool>,
    /// Held while something is written.
    busy: Mutex<()>,
}

impl Writing {
    /// From when this returns nothing more is written.
    pub async fn end(&self) {
        self.0.ended.send_replace(true);
        let gate = Arc::clone(&self.0);
        // It cannot panic.
        let _ = tokio::task::spawn_blocking(move || drop(gate.busy.lock())).await;
    }

    /// Waits until it has ended.
    pub async fn ended(&self) {
        let mut ended = self.0.ended.subscribe();
        // The sender is here.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Writes, unless it has ended.
    pub(crate) fn write<T>(&self, what: impl FnOnce() -> T) -> Option<T> {
        let _busy = self.0.busy.lock();
        let is_open = !*self.0.ended.borrow();
        is_open.then(what)
    }
}

/// Hands a seeder's frames to the thread `write`, until it hangs up. It is told of each flush, and of what went wrong.
///
/// # Errors
/// That of the thread, or a broken connection.
pub(crate) async fn carry(
    mut reader: FrameReader,
    mut writer: FrameWriter,
    frames: mpsc::Sender<Frame>,
    mut flushed: mpsc::Receiver<()>,
    write: JoinHandle<Result<(), MigrateError>>,
) -> Result<(), MigrateError> {
    let carry = async {
        loop {
            tokio::select! {
                biased;
                Some(()) = flushed.recv() => {
                    writer.send(kind::FLUSHED, &[]).await?;
                    writer.flush().await?;
                }
                frame = reader.next() => {
                    let Some(frame) = frame? else {
                        return Ok(());
                    };
                    // The thread has ended with an error.
                    if frames.send(frame).await.is_err() {
                        return Ok(());
                    }
                }
            }
        }
    };
    let carried: Result<(), MigrateError> = carry.await;
    drop(frames);
    let written = write.await.map_err(|_| MigrateError::Stopped)?;
    if let Err(e) = &written {
        let mut why = e.to_string();
        why.truncate(why.floor_char_boundary(MAX_WHY));
        writer.send(kind::FAILED, why.as_bytes()).await?;
        writer.flush().await?;
        // It reads that when it has sent its round: until then its frames are taken, and dropped.
        let drained = async { while let Ok(Some(_)) = reader.next().await {} };
        tokio::time::timeout(DRAIN_LIMIT, drained).await.ok();
    }
    written.and(carried)
}

pub(crate) fn failed(disk: u32, error: DeviceError) -> MigrateError {
    MigrateError::Disk {
        disk: disk.to_string(),
        error,
    }
}

/// A frame that brings bytes of a disk.
pub(crate) struct Write<'a> {
    /// Where they go: a disk that there is, and inside of it.
    pub(crate) head: WriteHead,
    /// They; none for zeros.
    pub(crate) bytes: Option<Cow<'a, [u8]>>,
}

impl<'a> Write<'a> {
    /// Reads and unpacks a frame. `size` says how large a disk is, if there is one of that number.
    ///
    /// # Errors
    /// When that is not what it claims to be.
    pub(crate) fn parse(
        payload: &'a [u8],
        size: impl FnOnce(usize) -> Option<u64>,
    ) -> Result<Self, MigrateError> {
        let bad = || MigrateError::Protocol("a write to a disk");
        let (head, body) = postcard::take_from_bytes::<WriteHead>(payload).map_err(|_| bad())?;
        let size = usize::try_from(head.disk).ok().and_then(size);
        let end = head.offset.checked_add(head.length);
        if end.is_none_or(|end| size.is_none_or(|size| end > size)) {
            return Err(bad());
        }
        let bytes = match head.coding {
            Coding::Zeros => None,
            _ if head.length > MAX_WRITE as u64 => return Err(bad()),
            Coding::Plain => Some(Cow::Borrowed(body)),
            Coding::Zstd => {
                let bytes = zstd::bulk::decompress(body, head.length as usize);
                Some(Cow::Owned(bytes.map_err(|_| bad())?))
            }
        };
        let is_whole = |bytes: &Cow<'_, [u8]>| bytes.len() as u64 == head.length;
        match bytes.as_ref().is_none_or(is_whole) {
            true => Ok(Self { head, bytes }),
            false => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use drover_device::backend::MemoryDevice;

    use super::*;
    use crate::program::Target;
    use crate::program::transfer::Transfer;

    /// Handles a frame as the leecher of a machine does.
    fn apply(disk: &Arc<dyn BlockDevice>, payload: &Bytes) -> Result<(), MigrateError> {
        let (target, _) = Target::device(Arc::clone(disk));
        let payload = payload.clone();
        let kind = kind::WRITE;
        Transfer::new(vec![target]).apply(&Frame { kind, payload })
    }

    fn frame(disk: u32, offset: u64, length: u64, coding: Coding, body: &[u8]) -> Bytes {
        let head = WriteHead {
            disk,
            offset,
            length,
            coding,
        };
        [&encode(&head)[..], body].concat().into()
    }

    #[test]
    fn what_was_written_arrives_and_nothing_else() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut content = vec![0u8; 4 << 20];
        rng.fill(&mut content[1 << 20..(2 << 20) + 777]);
        content[3 << 20..].fill(7);
        let from = MemoryDevice::from_bytes(&content);
        let to: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::from_bytes(&vec![9; 4 << 20]));
        let (frames, mut queue) = mpsc::channel(64);
        let ranges = vec![0..4096, (1 << 20) - 512..4 << 20];
        let sent = Sent::default();
        pack(0, &from, ranges, &frames, &sent).unwrap();
        drop(frames);
        while let Some(payload) = queue.blocking_recv() {
            apply(&to, &payload.into()).unwrap();
        }
        let mut expected = vec![9u8; 4 << 20];
        expected[..4096].copy_from_slice(&content[..4096]);
        expected[(1 << 20) - 512..].copy_from_slice(&content[(1 << 20) - 512..]);
        let mut found = vec![0; 4 << 20];
        to.read(0, &mut found).unwrap();
        assert!(found == expected);
        assert_eq!(sent.disk.into_inner(), (3 << 20) + 512 + 4096);
        assert!(sent.packed.into_inner() < 5 << 18);
    }

    #[tokio::test]
    async fn nothing_is_written_after_the_end() {
        let disk: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::from_bytes(&[0; 8192]));
        let writing = Writing::default();
        let (begun, begins) = std::sync::mpsc::channel();
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let thread = {
            let writing = writing.clone();
            let disk = disk.clone();
            std::thread::spawn(move || {
                let slow = writing.write(|| {
                    begun.send(()).unwrap();
                    goes.recv().unwrap();
                    disk.write(0, &[1]).unwrap();
                });
                let late = writing.write(|| disk.write(1, &[1]));
                (slow.is_some(), late.is_some())
            })
        };
        begins.recv().unwrap();
        let end = writing.end();
        tokio::pin!(end);
        let waited = tokio::time::timeout(Duration::from_millis(50), &mut end);
        assert!(waited.await.is_err(), "it waits for what is being written");
        go.send(()).unwrap();
        end.await;
        writing.ended().await;
        assert_eq!(thread.join().unwrap(), (true, false));
        let mut found = [0; 2];
        disk.read(0, &mut found).unwrap();
        assert_eq!(found, [1, 0]);
    }

    #[test]
    fn hostile_writes_are_refused() {
        let disk: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::from_bytes(&[0; 8192]));
        let refused = |payload: Bytes| apply(&disk, &payload).is_err();
        assert!(refused(Bytes::new()));
        assert!(refused(frame(1, 0, 1, Coding::Plain, &[1])));
        assert!(refused(frame(0, 8192, 1, Coding::Plain, &[1])));
        assert!(refused(frame(0, u64::MAX, 2, Coding::Zeros, &[])));
        assert!(refused(frame(0, 0, 2, Coding::Plain, &[1])));
        assert!(refused(frame(0, 0, 2, Coding::Zstd, &[1, 2, 3])));
        let bomb = zstd::bulk::compress(&vec![0; 4 << 20], 1).unwrap();
        assert!(refused(frame(0, 0, 4096, Coding::Zstd, &bomb)));
        assert!(!refused(frame(0, 0, 8192, Coding::Zeros, &[])));
    }
}
