//! The hypervisor's stream, carried over an authenticated connection in both directions.

use std::sync::atomic::{AtomicU64, Ordering};

use drover_net::{FrameReader, FrameWriter, NetError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::error::MigrateError;
use crate::protocol::{MAX_FRAME, MAX_MEMORY, kind};

/// Carries bytes between a local socket and the other site until both directions have ended. `sent` counts those that
/// left the local socket.
///
/// # Errors
/// When the connection or the socket breaks.
pub async fn carry(
    local: UnixStream,
    mut reader: FrameReader,
    mut writer: FrameWriter,
    sent: &AtomicU64,
) -> Result<(), MigrateError> {
    reader.set_max_frame(MAX_FRAME);
    writer.set_max_frame(MAX_FRAME);
    let (from, to) = local.into_split();
    tokio::try_join!(outward(from, &mut writer, sent), inward(&mut reader, to))?;
    Ok(())
}

async fn outward(
    mut from: OwnedReadHalf,
    writer: &mut FrameWriter,
    sent: &AtomicU64,
) -> Result<(), MigrateError> {
    let mut buffer = vec![0; MAX_MEMORY];
    loop {
        let n = from.read(&mut buffer).await.map_err(MigrateError::Stream)?;
        if n == 0 {
            writer.send(kind::MEMORY_END, &[]).await?;
            return Ok(writer.flush().await?);
        }
        writer.send(kind::MEMORY, &buffer[..n]).await?;
        sent.fetch_add(n as u64, Ordering::Relaxed);
        // A full buffer has more behind it.
        if n < buffer.len() {
            writer.flush().await?;
        }
    }
}

async fn inward(reader: &mut FrameReader, mut to: OwnedWriteHalf) -> Result<(), MigrateError> {
    loop {
        let Some(frame) = reader.next().await? else {
            return Err(NetError::Truncated {
                peer: reader.peer_text().to_owned(),
            }
            .into());
        };
        match frame.kind {
            kind::MEMORY => {
                let written = to.write_all(&frame.payload).await;
                written.map_err(MigrateError::Stream)?;
            }
            kind::MEMORY_END => return to.shutdown().await.map_err(MigrateError::Stream),
            _ => return Err(MigrateError::Protocol("memory")),
        }
    }
}
