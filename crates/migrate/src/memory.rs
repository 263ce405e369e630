//! The hypervisor's stream, carried over an authenticated connection in both directions, and compressed where that pays.

mod early;
mod window;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use drover_net::{Frame, FrameReader, FrameWriter, NetError, encode};
use drover_teleport::{Pace, Packer, Passed, Unpacker};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc};

use crate::error::MigrateError;
use crate::protocol::{MAX_FRAME, MAX_MEMORY, MemoryHead, kind};
pub use early::Early;
pub use window::{HYPERVISOR_BUFFER, behind_at};
use window::{QUEUE, Taken, Window};

/// As a power of two, the bytes of earlier stream that compression refers to.
const WINDOW_LOG: u32 = 22;

/// What has left the local socket.
#[derive(Debug, Default)]
pub struct Carried {
    /// Bytes of the stream.
    pub stream: AtomicU64,
    /// The same, as sent.
    pub packed: AtomicU64,
    /// What of it the link has not taken.
    pub window: Window,
}

/// What came from the local socket at once, and then the frame that it became.
struct Piece {
    bytes: Vec<u8>,
    taken: Taken,
}

/// Bytes of a piece that passes a [`Gate`] that is not open.
const ADMITTED_PIECE: usize = 64 << 10;

/// Memory that such a piece may stand for: a page of zeros takes 9 bytes.
const ADMITTED_MEMORY: u64 = 32 << 20;

/// Memory that the hypervisor may have sent as pages of zeros into the buffers of its socket.
pub const BUFFERED_MEMORY: u64 = 192 << 20;

/// Keeps a hypervisor's stream from coming to its end: until it is open, only what was admitted passes.
pub struct Gate {
    is_open: AtomicBool,
    admitted: Semaphore,
}

impl Gate {
    /// A gate that is closed or open.
    #[must_use]
    pub fn new(closed: bool) -> Self {
        Self {
            is_open: AtomicBool::new(!closed),
            admitted: Semaphore::new(0),
        }
    }

    /// Admits as much as cannot be the end when the hypervisor has this many bytes of memory to send.
    pub fn admit(&self, remaining: u64) {
        let pieces = remaining.saturating_sub(BUFFERED_MEMORY) / ADMITTED_MEMORY;
        let pieces = usize::try_from(pieces).unwrap_or(0);
        let admitted = self.admitted.available_permits();
        // What has become less without being sent is not admitted any more.
        self.admitted
            .forget_permits(admitted.saturating_sub(pieces));
        self.admitted.add_permits(pieces.saturating_sub(admitted));
    }

    /// Opens it.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
        self.admitted.close();
    }

    /// Waits until something may pass; how many bytes. Cancel safe.
    async fn pass(&self) -> usize {
        if self.is_open.load(Ordering::Acquire) {
            return MAX_MEMORY;
        }
        match self.admitted.acquire().await {
            Ok(admitted) => {
                admitted.forget();
                ADMITTED_PIECE
            }
            Err(_) => MAX_MEMORY,
        }
    }
}

/// Carries bytes between a local socket and the other site until both directions have ended; what has come `early` is the first.
///
/// # Errors
/// When the connection or the socket breaks.
pub async fn carry(
    local: UnixStream,
    early: Early,
    mut reader: FrameReader,
    mut writer: FrameWriter,
    pace: Pace,
    sent: Arc<Carried>,
    gate: Arc<Gate>,
) -> Result<(), MigrateError> {
    reader.set_max_frame(MAX_FRAME);
    writer.set_max_frame(MAX_FRAME);
    let (from, to) = local.into_split();
    tokio::try_join!(
        outward(from, &mut writer, pace, sent, &gate),
        inward(early, &mut reader, to)
    )?;
    Ok(())
}

async fn outward(
    from: OwnedReadHalf,
    writer: &mut FrameWriter,
    pace: Pace,
    sent: Arc<Carried>,
    gate: &Gate,
) -> Result<(), MigrateError> {
    let (pieces, queue) = mpsc::channel(QUEUE);
    let (frames, mut packed) = mpsc::channel(QUEUE);
    let counted = Arc::clone(&sent);
    tokio::task::spawn_blocking(move || pack(queue, &frames, pace, &counted));
    let write = async {
        while let Some(frame) = packed.recv().await {
            let frame: Piece = frame;
            writer.send(kind::MEMORY, &frame.bytes).await?;
            // Each by itself: how long a piece waits here is what the window goes by.
            writer.flush().await?;
            sent.window.passed(&frame.taken);
        }
        writer.send(kind::MEMORY_END, &[]).await?;
        Ok(writer.flush().await?)
    };
    tokio::try_join!(read(from, pieces, gate, &sent.window), write)?;
    Ok(())
}

/// Reads the socket to its end, in pieces as large as what is there and may wait here.
async fn read(
    mut from: OwnedReadHalf,
    pieces: mpsc::Sender<Piece>,
    gate: &Gate,
    window: &Window,
) -> Result<(), MigrateError> {
    loop {
        let admitted = gate.pass().await;
        let (room, blocked) = window.room().await;
        let mut bytes = vec![0; admitted.min(room)];
        let mut length = from.read(&mut bytes).await.map_err(MigrateError::Stream)?;
        if length == 0 {
            return Ok(());
        }
        while length < bytes.len() {
            match from.try_read(&mut bytes[length..]) {
                // At its end, or empty: the next turn tells.
                Ok(0) | Err(_) => break,
                Ok(n) => length += n,
            }
        }
        bytes.truncate(length);
        let taken = window.take(length, blocked);
        if pieces.send(Piece { bytes, taken }).await.is_err() {
            return Ok(());
        }
    }
}

fn pack(
    mut pieces: mpsc::Receiver<Piece>,
    frames: &mpsc::Sender<Piece>,
    mut pace: Pace,
    sent: &Carried,
) {
    let mut packer = Packer::new(WINDOW_LOG);
    let mut free = Instant::now();
    while let Some(Piece { bytes, taken }) = pieces.blocking_recv() {
        let start = Instant::now();
        let mut packed = Vec::with_capacity(bytes.len() / 2 + 64);
        let Ok(packing) = packer.pack(&bytes, pace.effort(), &mut packed) else {
            // Without memory for it; the connection ends, which is reported.
            return;
        };
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut frame = encode(&MemoryHead { length, packing });
        frame.extend_from_slice(&packed);
        let busy = start.elapsed();
        sent.stream.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        sent.packed.fetch_add(frame.len() as u64, Ordering::Relaxed);
        // It had nothing to do since the link had not taken what was before.
        let (idle, blocked) = (start - free, taken.blocked);
        let frame = Piece {
            bytes: frame,
            taken,
        };
        if frames.blocking_send(frame).is_err() {
            return;
        }
        let passed = Passed {
            idle: idle.saturating_sub(blocked),
            pack: busy,
            waited: start.elapsed() - busy + idle.min(blocked),
            bytes: length as usize,
            packed: packed.len(),
            ..Passed::default()
        };
        pace.note(&passed, 0.0);
        free = Instant::now();
    }
}

async fn inward(
    mut early: Early,
    reader: &mut FrameReader,
    mut to: OwnedWriteHalf,
) -> Result<(), MigrateError> {
    let (frames, queue) = mpsc::channel(QUEUE);
    let (pieces, mut unpacked) = mpsc::channel(QUEUE);
    let unpacking = tokio::task::spawn_blocking(move || unpack(queue, &pieces));
    let read = async {
        loop {
            let Some(frame) = early.next(reader).await? else {
                let peer = reader.peer_text().to_owned();
                return Err(NetError::Truncated { peer }.into());
            };
            match frame.kind {
                // The thread says why it has ended.
                kind::MEMORY if frames.send(frame).await.is_err() => break,
                kind::MEMORY => {}
                kind::MEMORY_END => break,
                _ => return Err(MigrateError::Protocol("memory")),
            }
        }
        drop(frames);
        unpacking.await.map_err(|_| MigrateError::Stopped)?
    };
    let write = async {
        while let Some(piece) = unpacked.recv().await {
            let piece: Vec<u8> = piece;
            let written = to.write_all(&piece).await;
            written.map_err(MigrateError::Stream)?;
        }
        to.shutdown().await.map_err(MigrateError::Stream)
    };
    tokio::try_join!(read, write)?;
    Ok(())
}

fn unpack(
    mut frames: mpsc::Receiver<Frame>,
    pieces: &mpsc::Sender<Vec<u8>>,
) -> Result<(), MigrateError> {
    let mut unpacker = Unpacker::default();
    while let Some(frame) = frames.blocking_recv() {
        let bad = || MigrateError::Protocol("memory");
        let (head, packed) =
            postcard::take_from_bytes::<MemoryHead>(&frame.payload).map_err(|_| bad())?;
        let length = head.length as usize;
        if length > MAX_MEMORY {
            return Err(bad());
        }
        let mut piece = vec![0; length];
        let unpacked = unpacker.unpack(head.packing, packed, &mut piece);
        unpacked.map_err(|_| bad())?;
        if pieces.blocking_send(piece).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use drover_teleport::{Effort, Packing};

    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_gate_lets_pass_what_cannot_be_the_end() {
        let gate = Gate::new(true);
        gate.admit(BUFFERED_MEMORY + 9 * ADMITTED_MEMORY);
        gate.admit(BUFFERED_MEMORY + ADMITTED_MEMORY - 1);
        let waits = tokio::time::timeout(Duration::from_millis(20), gate.pass());
        assert!(waits.await.is_err());
        // What was admitted and has not passed counts.
        for _ in 0..2 {
            gate.admit(BUFFERED_MEMORY + 2 * ADMITTED_MEMORY);
        }
        assert_eq!(gate.pass().await, ADMITTED_PIECE);
        assert_eq!(gate.pass().await, ADMITTED_PIECE);
        {
            let waits = gate.pass();
            tokio::pin!(waits);
            let waited = tokio::time::timeout(Duration::from_millis(20), &mut waits);
            assert!(waited.await.is_err());
            gate.open();
            assert_eq!(waits.await, MAX_MEMORY);
        }
        assert_eq!(gate.pass().await, MAX_MEMORY);
    }

    /// A stream of pages, some of which repeat, some of which are noise.
    fn stream(seed: u64, length: usize) -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut stream = vec![0; length];
        for page in stream.chunks_mut(4096) {
            match rng.u8(..3) {
                0 => {}
                1 => page.fill(rng.u8(..)),
                _ => rng.fill(page),
            }
        }
        stream
    }

    #[test]
    fn a_stream_passes_at_every_effort() {
        let efforts = [Effort::None, Effort::Lz4, Effort::Zstd(1), Effort::Zstd(9)];
        for (seed, effort) in efforts.into_iter().enumerate() {
            let stream = stream(seed as u64, 3 << 20);
            let (pieces, queue) = mpsc::channel(64);
            let window = Window::default();
            let mut rng = fastrand::Rng::with_seed(seed as u64);
            let mut left = &stream[..];
            while !left.is_empty() {
                let (piece, rest) = left.split_at(rng.usize(1..=MAX_MEMORY).min(left.len()));
                let (bytes, taken) = (piece.to_vec(), window.take(piece.len(), Duration::ZERO));
                pieces.blocking_send(Piece { bytes, taken }).unwrap();
                left = rest;
            }
            drop(pieces);
            let (frames, mut packed) = mpsc::channel(64);
            let sent = Carried::default();
            pack(queue, &frames, Pace::fixed(effort), &sent);
            drop(frames);
            assert_eq!(sent.stream.into_inner(), stream.len() as u64);
            let is_smaller = sent.packed.into_inner() < stream.len() as u64 / 2;
            assert_eq!(is_smaller, effort != Effort::None);
            let (frames, queue) = mpsc::channel(64);
            let (pieces, mut unpacked) = mpsc::channel(64);
            while let Some(Piece { bytes, .. }) = packed.blocking_recv() {
                let payload = bytes.into();
                let kind = kind::MEMORY;
                frames.blocking_send(Frame { kind, payload }).unwrap();
            }
            drop(frames);
            unpack(queue, &pieces).unwrap();
            drop(pieces);
            let mut found = Vec::new();
            while let Some(piece) = unpacked.blocking_recv() {
                found.extend(piece);
            }
            assert!(found == stream);
        }
    }

    /// Noise that is sent all the time over a limited link: all of it arrives, and at no time much of it is behind the sender's back.
    #[tokio::test(flavor = "multi_thread")]
    async fn little_waits_for_a_slow_link() {
        let (here, there) = UnixStream::pair().unwrap();
        let connection = |io| drover_net::Connection::from_unix(io, "far").split();
        let ((reader, mut writer), (mut far_reader, far_writer)) =
            (connection(here), connection(there));
        let limit = Arc::new(drover_net::RateLimit::new(2 << 20));
        writer.set_rate(Some(limit));
        let (mut hypervisor, ours) = UnixStream::pair().unwrap();
        let sent = Arc::new(Carried::default());
        let open = Arc::new(Gate::new(false));
        let pace = Pace::fixed(Effort::Lz4);
        let carried = tokio::spawn(carry(
            ours,
            Early::default(),
            reader,
            writer,
            pace,
            sent.clone(),
            open,
        ));
        let mut noise = vec![0; 3 << 20];
        fastrand::Rng::with_seed(7).fill(&mut noise);
        let (mut behind, mut most) = (Duration::ZERO, 0);
        let writes = async {
            for (n, piece) in noise.chunks(16 << 10).enumerate() {
                hypervisor.write_all(piece).await.unwrap();
                if n > 96 {
                    most = most.max(sent.window.held());
                    behind = behind.max(sent.window.behind());
                }
            }
            hypervisor
        };
        let reads = async {
            far_reader.set_max_frame(MAX_FRAME);
            let mut bytes = 0;
            while bytes < noise.len() {
                let frame = far_reader.next().await.unwrap().unwrap();
                let (head, _) = postcard::take_from_bytes::<MemoryHead>(&frame.payload).unwrap();
                bytes += head.length as usize;
            }
        };
        let (hypervisor, ()) = tokio::join!(writes, reads);
        // A second's worth was here before there was a window.
        assert!(most <= 128 << 10, "{most}");
        assert!(behind > Duration::from_millis(20), "{behind:?}");
        drop((hypervisor, far_writer));
        carried.abort();
    }

    #[test]
    fn a_piece_that_is_too_long_or_damaged_is_refused() {
        let refused = |length, packing, body: &[u8]| {
            let mut payload = encode(&MemoryHead { length, packing });
            payload.extend_from_slice(body);
            let (frames, queue) = mpsc::channel(1);
            let (pieces, _kept) = mpsc::channel(1);
            let (kind, payload) = (kind::MEMORY, payload.into());
            frames.blocking_send(Frame { kind, payload }).unwrap();
            drop(frames);
            unpack(queue, &pieces).is_err()
        };
        assert!(refused(u32::MAX, Packing::Plain, &[]));
        assert!(refused(2, Packing::Plain, &[1]));
        assert!(refused(4096, Packing::Lz4, &[1, 2, 3]));
        assert!(refused(4096, Packing::ZstdMore, &[1, 2, 3]));
        assert!(!refused(1, Packing::Plain, &[1]));
    }
}
