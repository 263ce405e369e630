//! Memory that comes before the hypervisor that is to read it has the disks of its machine: it waits here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use drover_net::{Frame, FrameReader, NetError};

use crate::error::MigrateError;
use crate::protocol::{MAX_FRAME, kind};

/// Upper bound on such memory of all machines, and of one of them, in bytes as sent; each may exceed it by a frame. What is beyond it
/// waits at the source.
const MAX_EARLY: u64 = 64 << 20;
const MAX_EARLY_EACH: u64 = 32 << 20;

/// What a frame takes besides its bytes: a small one keeps a buffer of the connection.
const FRAME: u64 = 16 << 10;

/// How often it is looked whether there is room again.
const ROOM_POLL: Duration = Duration::from_millis(20);

/// What waits in this process.
static WAITING: AtomicU64 = AtomicU64::new(0);

/// A frame that waits.
struct Waiting(Frame);

impl Waiting {
    fn new(frame: Frame) -> Self {
        WAITING.fetch_add(Self::takes(&frame), Ordering::Relaxed);
        Self(frame)
    }

    fn takes(frame: &Frame) -> u64 {
        frame.payload.len() as u64 + FRAME
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(Self::takes(&self.0), Ordering::Relaxed);
    }
}

/// Frames in their order.
#[derive(Default)]
pub struct Early {
    frames: VecDeque<Waiting>,
    /// What they take.
    bytes: u64,
}

impl Early {
    /// Takes what comes until this is ready.
    ///
    /// # Errors
    /// When the connection ends before, or brings something else.
    pub async fn until<T>(
        &mut self,
        reader: &mut FrameReader,
        ready: impl Future<Output = T>,
    ) -> Result<T, MigrateError> {
        reader.set_max_frame(MAX_FRAME);
        tokio::pin!(ready);
        loop {
            let next = async {
                while WAITING.load(Ordering::Relaxed) >= MAX_EARLY || self.bytes >= MAX_EARLY_EACH {
                    tokio::time::sleep(ROOM_POLL).await;
                }
                reader.next().await
            };
            let frame = tokio::select! {
                biased;
                ready = &mut ready => return Ok(ready),
                frame = next => frame?,
            };
            let Some(frame) = frame else {
                let peer = reader.peer_text().to_owned();
                return Err(NetError::Truncated { peer }.into());
            };
            // Its end does not come before the disks.
            if frame.kind != kind::MEMORY || frame.payload.is_empty() {
                return Err(MigrateError::Protocol("memory"));
            }
            self.bytes += Waiting::takes(&frame);
            self.frames.push_back(Waiting::new(frame));
        }
    }

    /// The next frame: of those that wait, then of the connection. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn next(&mut self, reader: &mut FrameReader) -> Result<Option<Frame>, NetError> {
        match self.frames.pop_front() {
            Some(waiting) => Ok(Some(waiting.0.clone())),
            None => reader.next().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_net::{Connection, FrameWriter};
    use tokio::sync::{Mutex, oneshot};

    use super::*;

    /// Tests that count what waits in this process.
    static ALONE: Mutex<()> = Mutex::const_new(());

    /// What of endless frames of this size waits when no more is taken, and that they come in their order.
    async fn most_of(size: usize) -> u64 {
        let (here, there) = Connection::pair().unwrap();
        let (_reader, mut writer) = here.split();
        let (mut reader, _writer) = there.split();
        writer.set_max_frame(MAX_FRAME);
        let writes = tokio::spawn(async move {
            for n in 0_u64.. {
                let mut payload = vec![0; size];
                payload[..8].copy_from_slice(&n.to_le_bytes());
                if send(&mut writer, kind::MEMORY, &payload).await.is_err() {
                    return;
                }
            }
        });
        let (tell, told) = oneshot::channel();
        tokio::spawn(async move {
            let mut before = None;
            loop {
                tokio::time::sleep(5 * ROOM_POLL).await;
                let now = WAITING.load(Ordering::Relaxed);
                if now > 0 && before.replace(now) == Some(now) {
                    break;
                }
            }
            tell.send(()).unwrap();
        });
        let mut early = Early::default();
        early.until(&mut reader, told).await.unwrap().unwrap();
        let waiting = WAITING.load(Ordering::Relaxed);
        for n in 0..early.frames.len() as u64 + 2 {
            let frame = early.next(&mut reader).await.unwrap().unwrap();
            assert_eq!(frame.payload[..8], n.to_le_bytes());
        }
        assert_eq!(WAITING.load(Ordering::Relaxed), 0);
        writes.abort();
        waiting
    }

    async fn send(writer: &mut FrameWriter, kind: u8, payload: &[u8]) -> Result<(), NetError> {
        writer.send(kind, payload).await?;
        writer.flush().await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_comes_early_is_bounded_also_in_small_frames() {
        let _alone = ALONE.lock().await;
        for size in [8, 1025, 1 << 19] {
            let most = most_of(size).await;
            let bound = MAX_EARLY_EACH + size as u64 + FRAME;
            assert!(most >= MAX_EARLY_EACH && most < bound, "{size}: {most}");
        }
    }

    #[tokio::test]
    async fn what_is_no_memory_is_refused() {
        let _alone = ALONE.lock().await;
        for (of, payload) in [
            (kind::MEMORY, ""),
            (kind::MEMORY_END, ""),
            (kind::WRITE, "x"),
        ] {
            let (here, there) = Connection::pair().unwrap();
            let (_reader, mut writer) = here.split();
            let (mut reader, _writer) = there.split();
            send(&mut writer, of, payload.as_bytes()).await.unwrap();
            let never = std::future::pending::<()>();
            let refused = Early::default().until(&mut reader, never).await;
            assert!(matches!(refused, Err(MigrateError::Protocol(_))), "{of}");
            drop(writer);
        }
    }
}
