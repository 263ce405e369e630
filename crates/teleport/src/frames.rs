//! Tasks that move frames between a socket and the code that handles them.

use std::time::Duration;

use drover_net::{Frame, FrameReader, FrameWriter, KeepAlive, Role, read_hello};
use tokio::sync::{mpsc, watch};

use crate::TeleportError;

/// Frames queued between a socket and their handler.
pub const FRAME_QUEUE: usize = 16;

/// Timeout for the orderly shutdown of a connection.
pub const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Reads a connection's frames in a separate task, so that waiting for one can be canceled without losing part of it.
/// The channel closes at the end of the stream.
pub fn read_frames(reader: FrameReader) -> mpsc::Receiver<Result<Frame, TeleportError>> {
    read_frames_after(reader, None)
}

/// Like [`read_frames`], but first reads the peer's hello.
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
            let next = tokio::select! {
                next = reader.next() => next,
                () = to.closed() => break,
            };
            let next = match next {
                Ok(Some(frame)) => Ok(frame),
                Ok(None) => return,
                Err(e) => Err(e.into()),
            };
            let last = next.is_err();
            let gone = to.send(next).await.is_err();
            if last {
                return;
            }
            if gone {
                break;
            }
        }
        drain(&mut reader).await;
    });
    from
}

/// Reads and discards until the peer hangs up, within [`CLOSE_LIMIT`]: so the socket is not reset before the peer has our
/// last writes.
pub async fn drain(reader: &mut FrameReader) {
    let end = async { while let Ok(Some(_)) = reader.next().await {} };
    let _ = tokio::time::timeout(CLOSE_LIMIT, end).await;
}

/// Writes frames to a connection until the channel is closed, then shuts it down in order.
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

/// Returns once the flag is true. Cancel safe.
pub async fn wait_true(mut flag: watch::Receiver<bool>) {
    if flag.wait_for(|s| *s).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The size of a frame before encryption, in bytes.
pub fn frame_bytes(payload: usize) -> u64 {
    (drover_net::HEADER_LEN + payload) as u64
}
