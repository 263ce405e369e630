//! What to send, where to and how.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_image::Conversion;
use drover_net::{Identity, PeerKey, RateLimit};

use crate::compress::Effort;
use crate::progress::SendEvent;

/// One image to send.
#[derive(Debug, Clone)]
pub struct SendItem {
    /// Its file here.
    pub path: PathBuf,
    /// Its name there.
    pub name: ImageName,
    /// In which form.
    pub conversion: Conversion,
}

/// Where to and how.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// Who sends.
    pub identity: Identity,
    /// To whom.
    pub peer: PeerKey,
    /// What the user calls them.
    pub peer_name: String,
    /// Where they listen; tried in order.
    pub addresses: Vec<String>,
    /// At most so fast, all connections together.
    pub limit: Option<Arc<RateLimit>>,
    /// Only find out what would cross the link.
    pub dry_run: bool,
    /// Connections for literals: a fixed number, or as many as help.
    pub connections: Option<u16>,
    /// How hard literals are compressed; by itself as suits the link and the machines.
    pub compress: Option<Effort>,
    /// How long to go on reconnecting without any progress.
    pub give_up_after: Duration,
}

/// Told of what happens during a send.
pub type OnEvent = Arc<dyn Fn(SendEvent) + Send + Sync>;
