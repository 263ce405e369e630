//! The trait through which a mount connects to its site.

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
    /// Byte counters of the socket.
    pub wire: Arc<WireCounters>,
}

/// Why there is no connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ConnectError {
    /// Whether retrying cannot help.
    pub fatal: bool,
    /// A one-line message for the user.
    pub message: String,
    /// The code of the site's refusal, if the site refused the connection.
    pub code: Option<Code>,
}

impl ConnectError {
    /// A failure that a retry may fix.
    pub fn lost(message: impl Into<String>) -> Self {
        Self {
            fatal: false,
            message: message.into(),
            code: None,
        }
    }

    /// A failure that a retry cannot fix.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self {
            fatal: true,
            ..Self::lost(message)
        }
    }
}

impl From<NetError> for ConnectError {
    /// Fatal if the network error says that retrying cannot help.
    fn from(error: NetError) -> Self {
        Self {
            fatal: !error.retryable(),
            ..Self::lost(error.to_string())
        }
    }
}

/// Connects to the site.
pub trait Connector: Send + Sync {
    /// Connects. Nothing has been sent on the connection yet.
    fn connect(&self) -> Connecting<'_>;

    /// The site has refused to open the device for now, where the last connection went to: if it has other addresses, the next one
    /// tries those first.
    fn leave(&self) -> Leaving<'_> {
        Box::pin(std::future::ready(()))
    }
}

/// A way that is left.
pub type Leaving<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// A connection in progress.
pub type Connecting<'a> =
    Pin<Box<dyn Future<Output = Result<Connection, ConnectError>> + Send + 'a>>;
