//! Flocks of a site: those that it receives, those that it sends, and what a file says of one.

mod file;
mod sent;
mod units;

use drover_teleport::services::ListFlocks;
use drover_teleport::{FlockInfo, MAX_FLOCKS, flocks};

use crate::error::{Context, Result};
use crate::home::Home;
use crate::remote::Call;

pub use file::{FileImage, FlockFile};
pub use sent::{Sending, SentFlock, Source, beginning, path_text, sent, stamps};
pub use units::{JobOrder, UnitSaid, decode_item, encode_item, is_in};

/// The flocks that peers send to this site, or the ones at a peer, those that changed last first.
///
/// # Errors
/// When the site cannot be reached, or its records cannot be read.
pub async fn received(home: &Home, peer: Option<&str>) -> Result<Vec<FlockInfo>> {
    let Some(call) = Call::at(home, peer).await? else {
        let dirs = home.flock_dirs();
        return Ok(tokio::task::spawn_blocking(move || flocks(&dirs)).await??);
    };
    let list = call.list(&ListFlocks, MAX_FLOCKS).await?;
    list.with_context(|| format!("more than {MAX_FLOCKS} flocks are listed"))
}
