//! Flocks of a site: those that it receives, those that it sends, and what a file says of one.

mod file;
mod sent;

use drover_teleport::services::ListFlocks;
use drover_teleport::{FlockInfo, MAX_FLOCKS, flocks};

use crate::error::{Context, Result};
use crate::home::Home;
use crate::remote::Call;

pub use file::{FileImage, FlockFile};
pub use sent::{Sending, SentFlock, Source, beginning, path_text, sent, stamps};

/// The flocks that peers send to this site, or the ones at a peer, those that changed last first.
///
/// # Errors
/// When the site cannot be reached, or its records cannot be read.
pub async fn received(home: &Home, peer: Option<&str>) -> Result<Vec<FlockInfo>> {
    let Some(call) = Call::at(home, peer).await? else {
        let work = home.work_dir();
        return Ok(tokio::task::spawn_blocking(move || flocks(&work)).await??);
    };
    let list = call.list(&ListFlocks, MAX_FLOCKS).await?;
    list.with_context(|| format!("more than {MAX_FLOCKS} flocks are listed"))
}
