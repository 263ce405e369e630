//! Profiles that came with images.

use std::path::Path;
use std::sync::Arc;

use drover_image::Layout;
use drover_index::ImageId;
use drover_store::profile::{Profile, ProfileError};

use super::Site;
use crate::TeleportError;
use crate::launch::{Launch, SendsFirst, send_first};
use crate::transfer::{Opening, open_part, transfer_key};

impl Site {
    /// Has what a profile lists sent first, of an image that is being received in `dir`. Call within a runtime; blocks for
    /// moments.
    ///
    /// # Errors
    /// When the partial file cannot be opened.
    pub(crate) fn send_first(
        &self,
        dir: &Path,
        opening: Opening,
        layout: Arc<Layout>,
        profile: Profile,
    ) -> Result<SendsFirst, TeleportError> {
        let key = transfer_key(&opening.peer, &opening.offer.name);
        // What others are bringing counts as here: it would be sent twice.
        let nothing_else =
            self.images.list().is_empty() && self.partials.is_only(ImageId(opening.image));
        let launch = Launch::new(
            opening,
            key,
            layout,
            open_part(dir)?,
            self.partials.clone(),
            self.launches.sessions.clone(),
            nothing_else,
        );
        Ok(send_first(launch, profile))
    }

    /// Makes a profile that came with an image that of the image, unless the image, or the `old` one that it replaces, has one
    /// that counts more boots.
    pub(crate) fn keep_profile(&self, image: ImageId, old: Option<ImageId>, profile: Profile) {
        let shelf = self.images.profiles();
        let old = old.and_then(|old| shelf.load(old).ok().flatten());
        let kept = shelf.change(image, |before| {
            let known = before.or(old);
            let known = known.filter(|known| known.boots() > profile.boots());
            Ok::<_, ProfileError>(Some(known.unwrap_or(profile)))
        });
        if let Err(e) = kept {
            tracing::warn!(error = %e, "the profile of an image is not kept");
        }
    }
}
