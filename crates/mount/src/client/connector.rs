//! How a mount comes to its connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use drover_net::{FrameReader, FrameWriter, NetError, WireCounters};

use crate::protocol::{Code, kind};

/// A connection to the site for one lane.
pub struct Connected {
    /// From the site.
    pub reader: FrameReader,
    /// To the site.
    pub writer: FrameWriter,
    /// Bytes that cross the socket.
    pub wire: Arc<WireCounters>,
    /// How long the site took to answer the first packet, where that is known.
    pub round_trip: Option<Duration>,
}

/// Why there is no connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ConnectError {
    /// Trying again cannot help.
    pub fatal: bool,
    /// One line for a person.
    pub message: String,
    /// By which code the site refused the lane, when it was the site that did.
    pub code: Option<Code>,
}

impl ConnectError {
    /// The link may come later.
    pub fn lost(message: impl Into<String>) -> Self {
        Self {
            fatal: false,
            message: message.into(),
            code: None,
        }
    }

    /// Trying again cannot help.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self {
            fatal: true,
            ..Self::lost(message)
        }
    }
}

impl From<NetError> for ConnectError {
    /// Fatal when the connection says that trying again cannot help.
    fn from(error: NetError) -> Self {
        Self {
            fatal: !error.retryable(),
            ..Self::lost(error.to_string())
        }
    }
}

/// Makes connections to the site, each with a lane's opening message sent on it.
pub trait Connector: Send + Sync {
    /// Connects and sends the opening message, without waiting for an answer to it.
    fn connect(
        &self,
        open: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, ConnectError>> + Send + '_>>;

    /// The same, and sends `asks`, payloads of frames of [`kind::ASK`], behind the opening message. To be overridden
    /// where that saves a round trip.
    fn connect_asking(
        &self,
        open: Vec<u8>,
        asks: Vec<Vec<u8>>,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, ConnectError>> + Send + '_>> {
        Box::pin(async move {
            let mut connected = self.connect(open).await?;
            for ask in &asks {
                let sent = connected.writer.send(kind::ASK, ask).await;
                sent?;
            }
            Ok(connected)
        })
    }

    /// What a first frame means that is not of this protocol: the site may refuse before mounts come into it. None
    /// when it means nothing.
    fn refusal(&self, _kind: u8, _payload: &[u8]) -> Option<ConnectError> {
        None
    }
}
