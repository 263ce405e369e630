//! What is sent along with images: their profiles.

use std::path::PathBuf;

use drover_agent::error::one_line;
use drover_agent::home::Home;
use drover_agent::profiles;
use drover_agent::text::{bytes, count};
use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_store::Peer;
use drover_teleport::progress::SendEvent;

use super::show::Show;

/// Gives the peer the profiles of the images, of those that have one. Without them the images are as good.
pub async fn send_profiles(home: &Home, peer: &Peer, sent: &[(PathBuf, ImageName)], show: &Show) {
    for (path, name) in sent {
        let text = match profiles::send_along(home, peer, path, name).await {
            Ok(None) => continue,
            Ok(Some(put)) => format!(
                "its profile was sent along: {}, {}",
                bytes(put.blocks * BLOCK_SIZE_U64),
                count(put.boots.into(), "boot")
            ),
            Err(e) => format!("its profile was not sent along: {}", one_line(&e)),
        };
        let path = path.clone();
        show.event(SendEvent::Note { path, text });
    }
}
