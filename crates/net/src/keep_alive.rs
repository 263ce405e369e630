//! Noticing that a peer is gone.

use std::time::Duration;

use crate::{FrameReader, FrameWriter};

/// How often an idle side pings, and after how long a silence the connection is given up.
///
/// TCP notices a dead peer late or never. So each side sends an empty ping while it has nothing
/// to say ([`FrameWriter::ping_when_idle`], or [`FrameWriter::ping`] from a loop of its own) and
/// each reader gives up after `dead_after` without a byte. Pings need no answer: both sides send
/// theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// An idle writer pings this often.
    pub ping_every: Duration,
    /// A reader that saw no byte for this long reports [`crate::NetError::TimedOut`].
    pub dead_after: Duration,
    /// A writer that could not get rid of a byte for this long does the same. Longer than
    /// `dead_after`, since a peer that is waiting for its disk does not read.
    pub stalled_after: Duration,
}

impl Default for KeepAlive {
    fn default() -> Self {
        KeepAlive {
            ping_every: Duration::from_secs(10),
            dead_after: Duration::from_secs(45),
            stalled_after: Duration::from_secs(180),
        }
    }
}

impl KeepAlive {
    /// Sets the limits on both halves; the pings remain the writer's owner's work.
    pub fn apply(&self, reader: &mut FrameReader, writer: &mut FrameWriter) {
        reader.set_idle_timeout(Some(self.dead_after));
        writer.set_stall_timeout(Some(self.stalled_after));
    }
}
