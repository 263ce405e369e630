//! The profile of an image that is offered: what it lists comes first, and it is kept with the image.

use drover_store::profile::{MAX_BYTES, Profile};

use super::control::{Session, stopped};
use crate::TeleportError;
use crate::launch::SendsFirst;
use crate::protocol::Offer;
use crate::transfer::{Transfer, keep_profile};

impl Session {
    /// A part of the profile of the image that is offered next.
    pub(super) fn profile_part(&mut self, part: &[u8]) -> Result<(), TeleportError> {
        if part.is_empty() || self.profile_parts.len() + part.len() > MAX_BYTES {
            let text = "a profile is too long, or a part of it empty";
            return Err(TeleportError::Protocol(text.into()));
        }
        self.profile_parts.extend_from_slice(part);
        Ok(())
    }

    /// Decodes the profile of the image that is offered, if one came.
    pub(super) async fn decode_profile(&mut self, offer: &Offer) -> Result<(), TeleportError> {
        let parts = std::mem::take(&mut self.profile_parts);
        if parts.is_empty() {
            self.profile = None;
            return Ok(());
        }
        let decoded = tokio::task::spawn_blocking(move || Profile::decode(&parts));
        let refused =
            |why: &dyn std::fmt::Display| TeleportError::Protocol(format!("its profile: {why}"));
        let profile = decoded.await.map_err(|_| stopped())?;
        let profile = profile.map_err(|e| refused(&e))?;
        if profile.disk_bytes() != offer.virtual_bytes {
            return Err(refused(&"it is of a disk of another size"));
        }
        self.profile = Some(profile);
        Ok(())
    }

    /// Keeps the profile with a transfer, and has what it lists sent first until the result is dropped.
    pub(super) async fn follow_profile(&mut self, transfer: &Transfer) -> Option<SendsFirst> {
        let (site, profile) = (self.site.clone(), self.profile.take());
        let (dir, opening) = (transfer.dir.clone(), transfer.opening.clone());
        let layout = transfer.layout.clone();
        let begun = tokio::task::spawn_blocking(move || {
            // It is a hint: without it the image is as good.
            let failed = |e: TeleportError| {
                tracing::warn!(error = %e, "the profile of an image is not used");
            };
            keep_profile(&dir, profile.as_ref()).map_err(failed).ok()?;
            let first = site.send_first(&dir, opening, layout, profile?);
            first.map_err(failed).ok()
        });
        begun.await.ok().flatten()
    }

    /// Gives the profile to the image of that name, which is the one that was offered.
    pub(super) async fn profile_of_same(&mut self, offer: &Offer) {
        let Some(profile) = self.profile.take() else {
            return;
        };
        let (site, name) = (self.site.clone(), offer.name.clone());
        let kept = tokio::task::spawn_blocking(move || {
            if let Some(image) = site.images.by_name(&name) {
                site.keep_profile(image.id, None, profile);
            }
        });
        // A panic was logged.
        let _ = kept.await;
    }
}
