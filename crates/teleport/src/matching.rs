//! How a destination reaches its teleporter: in the same process, or over a connection.

mod link;
mod remote;
mod wire;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use drover_index::{ImageId, Matcher, MatcherConfig, MatcherStats};
use drover_storage::HostDirectory;
use drover_store::sequences::segments_of;
use parking_lot::Mutex;

use crate::TeleportError;
use crate::teleporter::{Answer, Event, Teleporter};

pub(crate) use link::wrong_answer;
pub use link::{Link, LocalTeleporter, handle};
#[cfg(any(fuzzing, feature = "testing"))]
pub use remote::connect;
pub use remote::{RemoteTeleporter, serve_teleporter};
#[cfg(any(fuzzing, feature = "testing"))]
pub use wire::{decode_answer, decode_event, encode_answer, encode_event};

/// Location of a site's teleporter.
#[derive(Debug, Clone)]
pub enum Matching {
    /// In this process.
    Local(LocalTeleporter),
    /// On another machine.
    Remote(RemoteTeleporter),
}

impl Matching {
    /// The matcher's statistics, if it is local.
    #[must_use]
    pub fn stats(&self) -> Option<MatcherStats> {
        match self {
            Matching::Local(t) => Some(t.lock().stats()),
            Matching::Remote(_) => None,
        }
    }

    /// Sends the teleporter one event and waits for the answer. For rare events outside a transfer.
    ///
    /// # Errors
    /// When the teleporter fails or cannot be reached.
    pub fn tell(&self, event: Event) -> Result<Answer, TeleportError> {
        self.link()?.ask(event)
    }

    /// The images for which the teleporter has complete hash files.
    ///
    /// # Errors
    /// When the teleporter fails or cannot be reached.
    pub fn images(&self) -> Result<Vec<ImageId>, TeleportError> {
        match self.tell(Event::List)? {
            Answer::Images(images) => Ok(images),
            _ => Err(wrong_answer()),
        }
    }

    /// Opens a link for one transfer. Blocks until it is connected; call it from a blocking thread of a tokio
    /// runtime.
    ///
    /// # Errors
    /// When the teleporter cannot be reached.
    pub fn link(&self) -> Result<Link, TeleportError> {
        match self {
            Matching::Local(t) => Ok(Link::Local(t.clone(), VecDeque::new())),
            Matching::Remote(r) => {
                let runtime = tokio::runtime::Handle::current();
                runtime.block_on(remote::connect(r)).map(Link::Remote)
            }
        }
    }
}

/// Opens the matcher in `dir`, with a sequence cache of the given size in bytes.
///
/// # Errors
/// When its files cannot be used.
pub fn open_teleporter(
    dir: &Path,
    sequence_data_bytes: u64,
    repairs: &mut Vec<String>,
) -> Result<LocalTeleporter, TeleportError> {
    let storage = HostDirectory::open_or_create(dir).map_err(TeleportError::file("open", dir))?;
    let config = MatcherConfig {
        sequence_limit: segments_of(sequence_data_bytes) as u32,
        ..MatcherConfig::default()
    };
    let (matcher, report) = Matcher::open(storage, config)?;
    if report.converted {
        tracing::info!(dir = %dir.display(), "the index was converted from an earlier version");
    }
    repairs.extend(report.repairs.iter().map(ToString::to_string));
    Ok(Arc::new(Mutex::new(Teleporter::new(matcher))))
}
