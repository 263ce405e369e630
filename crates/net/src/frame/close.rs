//! The end of a connection.

use std::time::Duration;

use tokio::time::timeout;

use super::reader::FrameReader;
use super::writer::FrameWriter;
use crate::NetError;

/// Ends a connection so that neither side loses bytes: finishes the writer, then reads and drops
/// what still comes until the peer finishes too, both within `limit`.
///
/// Dropping a socket that has unread bytes makes the kernel reset it, and the reset overtakes
/// what was written last. A peer that must know that its last message was acted upon needs a
/// message that says so; this only keeps the pipe whole.
///
/// # Errors
/// What writing or reading reports, or [`NetError::TimedOut`].
pub async fn close(
    mut reader: FrameReader,
    mut writer: FrameWriter,
    limit: Duration,
) -> Result<(), NetError> {
    let orderly = async {
        writer.finish().await?;
        while reader.next().await?.is_some() {}
        Ok(())
    };
    match timeout(limit, orderly).await {
        Ok(result) => result,
        Err(_) => Err(NetError::TimedOut {
            peer: reader.peer_text().to_owned(),
            what: "closing the connection",
            after: limit,
        }),
    }
}
