//! The trait by which a mount gets connections to its site.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use drover_net::{Code, Connection, FrameReader, FrameWriter, NetError, WireCounters};

/// A connection to the site.
pub(crate) struct Connected {
    /// From the site.
    pub reader: FrameReader,
    /// To the site.
    pub writer: FrameWriter,
    /// Bytes that cross the socket.
    pub wire: Arc<WireCounters>,
}

/// Why there is no connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ConnectError {
    /// Trying again cannot help.
    pub fatal: bool,
    /// One line for a person.
    pub message: String,
    /// By which code the site refused the connection, when it was the site that did.
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

/// Makes connections to the site.
pub trait Connector: Send + Sync {
    /// Connects. Nothing has been sent on it yet.
    fn connect(&self) -> Connecting<'_>;
}

/// A connection that is being made.
pub type Connecting<'a> =
    Pin<Box<dyn Future<Output = Result<Connection, ConnectError>> + Send + 'a>>;
