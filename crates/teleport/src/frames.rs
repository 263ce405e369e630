//! Frames between a socket and what handles them.

use std::time::Duration;

use drover_net::{Frame, FrameReader, FrameWriter, KeepAlive, Role, read_hello};
use tokio::sync::mpsc;

use crate::TeleportError;

/// Frames between a socket and what handles them.
pub const FRAME_QUEUE: usize = 16;

/// How long an orderly end of a connection may take.
pub const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Frames from a connection, read by a task of their own so that waiting for them can be given up
/// without losing part of one. The channel ends after `Ok(None)`-like ends of the stream.
pub fn read_frames(reader: FrameReader) -> mpsc::Receiver<Result<Frame, TeleportError>> {
    read_frames_after(reader, None)
}

/// The same, but the peer's hello comes first.
pub fn read_frames_after(
    mut reader: FrameReader,
    hello: Option<Role>,
) -> mpsc::Receiver<Result<Frame, TeleportError>> {
    let (to, from) = mpsc::channel(FRAME_QUEUE);
    tokio::spawn(async move {
        if let Some(role) = hello
            && let Err(e) = read_hello(&mut reader, role).await
        {
            let _ = to.send(Err(e.into())).await;
            return;
        }
        loop {
            let next = match reader.next().await {
                Ok(Some(frame)) => Ok(frame),
                Ok(None) => return,
                Err(e) => Err(e.into()),
            };
            let last = next.is_err();
            // The receiver may go first: what still comes is then of no interest, but reading on
            // keeps the socket from being reset under what we wrote last.
            let _ = to.send(next).await;
            if last {
                return;
            }
        }
    });
    from
}

/// Writes frames to a connection until the channel is closed, then ends it in order.
pub fn write_frames(
    mut writer: FrameWriter,
) -> (
    mpsc::Sender<Frame>,
    tokio::task::JoinHandle<Result<(), TeleportError>>,
) {
    let (to, mut from) = mpsc::channel::<Frame>(FRAME_QUEUE);
    let task = tokio::spawn(async move {
        let every = KeepAlive::default().ping_every;
        loop {
            let frame = match from.try_recv() {
                Ok(frame) => frame,
                Err(mpsc::error::TryRecvError::Disconnected) => break,
                Err(mpsc::error::TryRecvError::Empty) => {
                    writer.flush().await?;
                    let next = tokio::select! {
                        frame = from.recv() => frame,
                        e = writer.ping_when_idle(every) => return Err(e.into()),
                    };
                    match next {
                        Some(frame) => frame,
                        None => break,
                    }
                }
            };
            writer.send(frame.kind, &frame.payload).await?;
        }
        writer.finish().await?;
        Ok(())
    });
    (to, task)
}

/// The bytes a frame takes before encryption.
pub fn frame_bytes(payload: usize) -> u64 {
    (drover_net::HEADER_LEN + payload) as u64
}
