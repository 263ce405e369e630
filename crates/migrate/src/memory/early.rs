//! Memory that comes before the hypervisor that is to read it has the disks of its machine: it waits here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use drover_net::{Frame, FrameReader, NetError};

use crate::error::MigrateError;
use crate::protocol::MAX_FRAME;

/// Upper bound on such memory of all machines, in bytes as sent; each may exceed it by a frame. What is beyond it waits at the source.
const MAX_EARLY: u64 = 64 << 20;

/// How often it is looked whether there is room again.
const ROOM_POLL: Duration = Duration::from_millis(20);

/// What waits in this process.
static WAITING: AtomicU64 = AtomicU64::new(0);

/// A frame that waits.
struct Waiting(Frame);

impl Waiting {
    fn new(frame: Frame) -> Self {
        WAITING.fetch_add(frame.payload.len() as u64, Ordering::Relaxed);
        Self(frame)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(self.0.payload.len() as u64, Ordering::Relaxed);
    }
}

/// Frames in their order.
#[derive(Default)]
pub struct Early(VecDeque<Waiting>);

impl Early {
    /// Takes what comes until this is ready.
    ///
    /// # Errors
    /// When the connection ends before.
    pub async fn until<T>(
        &mut self,
        reader: &mut FrameReader,
        ready: impl Future<Output = T>,
    ) -> Result<T, MigrateError> {
        reader.set_max_frame(MAX_FRAME);
        tokio::pin!(ready);
        loop {
            let next = async {
                while WAITING.load(Ordering::Relaxed) >= MAX_EARLY {
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
            self.0.push_back(Waiting::new(frame));
        }
    }

    /// The next frame: of those that wait, then of the connection. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn next(&mut self, reader: &mut FrameReader) -> Result<Option<Frame>, NetError> {
        match self.0.pop_front() {
            Some(waiting) => Ok(Some(waiting.0.clone())),
            None => reader.next().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_net::Connection;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_comes_early_is_bounded_and_comes_first() {
        const FRAME: usize = 1 << 19;
        const MORE: u64 = 16;
        let (here, there) = Connection::pair().unwrap();
        let (_, mut writer) = here.split();
        let (mut reader, _writer) = there.split();
        writer.set_max_frame(MAX_FRAME);
        let frames = MAX_EARLY / FRAME as u64 + MORE;
        let writes = tokio::spawn(async move {
            for n in 0..frames {
                let mut payload = vec![0; FRAME];
                payload[..8].copy_from_slice(&n.to_le_bytes());
                writer.send(0x73, &payload).await.unwrap();
                writer.flush().await.unwrap();
            }
            writer
        });
        let (tell, told) = oneshot::channel();
        let full = tokio::spawn(async move {
            while WAITING.load(Ordering::Relaxed) < MAX_EARLY {
                tokio::time::sleep(ROOM_POLL).await;
            }
            // Nothing more is taken.
            tokio::time::sleep(4 * ROOM_POLL).await;
            tell.send(WAITING.load(Ordering::Relaxed)).unwrap();
        });
        let mut early = Early::default();
        let waiting = early.until(&mut reader, told).await.unwrap().unwrap();
        assert!(waiting < MAX_EARLY + FRAME as u64, "{waiting}");
        full.await.unwrap();
        for n in 0..frames {
            let frame = early.next(&mut reader).await.unwrap().unwrap();
            assert_eq!(frame.payload[..8], n.to_le_bytes());
        }
        assert_eq!(WAITING.load(Ordering::Relaxed), 0);
        drop(writes.await.unwrap());
        let ended = early.until(&mut reader, std::future::pending::<()>()).await;
        assert!(ended.is_err());
    }
}
