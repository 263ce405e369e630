//! Profiles that came with images, and boots of images in transit.

use std::io;
use std::path::Path;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, BlockDevice, ImageName, ReadAt};
use drover_image::Layout;
use drover_index::ImageId;
use drover_store::profile::{FirstRead, Profile, ProfileError};

use super::Site;
use crate::TeleportError;
use crate::launch::{Launch, LaunchDevice, SendsFirst, send_first};
use crate::services::PutProfileReply;
use crate::transfer::{Opening, keep_boots, kept_boots, kept_profile, open_part, transfer_key};

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
        self.put_profiles(image, old, Some(profile), None);
    }

    /// The same of what came with an image that is in `dir`; the boots of machines that ran from it meanwhile are added.
    pub(super) fn keep_profiles(&self, image: ImageId, old: Option<ImageId>, dir: &Path) {
        self.put_profiles(image, old, kept_profile(dir), kept_boots(dir));
    }

    fn put_profiles(
        &self,
        image: ImageId,
        old: Option<ImageId>,
        came: Option<Profile>,
        boots: Option<Profile>,
    ) {
        if came.is_none() && boots.is_none() {
            return;
        }
        let shelf = self.images.profiles();
        let old = old.and_then(|old| shelf.load(old).ok().flatten());
        let kept = shelf.change(image, |before| {
            let counted = |profile: &Option<Profile>| profile.as_ref().map(Profile::boots);
            let known = before.or(old);
            let profile = match counted(&known) > counted(&came) {
                true => known,
                false => came,
            };
            Ok::<_, ProfileError>(merged(profile, boots))
        });
        if let Err(e) = kept {
            tracing::warn!(error = %e, "the profile of an image is not kept");
        }
    }

    /// Adds a boot to what becomes the profile of an image in transit when it is complete; `None` when none of that name is in
    /// transit. What a machine has read and is not here any more, as after a restart until it is found again, is left out. Blocks the thread.
    ///
    /// # Errors
    /// When the files of the transfer cannot be read or written.
    pub fn add_boot(
        self: &Arc<Self>,
        name: &ImageName,
        reads: &[FirstRead],
    ) -> Result<Option<PutProfileReply>, TeleportError> {
        let Some(launch) = self.launch(name)? else {
            return Ok(None);
        };
        let device = LaunchDevice::open(&launch)?;
        let here = |read: &&FirstRead| {
            let at = read.block.saturating_mul(BLOCK_SIZE_U64);
            at < device.size() && device.has(at, BLOCK_SIZE_U64)
        };
        let here: Vec<FirstRead> = reads.iter().filter(here).copied().collect();
        let failed = TeleportError::file("read", launch.name().as_str());
        let boot = Profile::of_boot(&Content(&device), &here).map_err(failed)?;
        let _keeps = self.launches.boots.lock();
        if launch.is_delivered() {
            return Ok(None);
        }
        let dir = self.transfer_dir(launch.key());
        let blocks = boot.entries().len() as u64;
        let boots = match boot.is_empty() {
            true => kept_boots(&dir),
            false => merged(kept_boots(&dir), Some(boot)),
        };
        if let Some(boots) = boots.as_ref().filter(|_| blocks > 0) {
            keep_boots(&dir, boots)?;
        }
        let all = merged(kept_profile(&dir), boots);
        Ok(Some(PutProfileReply {
            blocks,
            pruned: 0,
            boots: all.as_ref().map_or(0, Profile::boots),
        }))
    }
}

/// A profile with the boots of another one added.
fn merged(profile: Option<Profile>, boots: Option<Profile>) -> Option<Profile> {
    match (profile, boots) {
        (Some(mut profile), Some(boots)) => {
            profile.merge(&boots);
            Some(profile)
        }
        (profile, boots) => profile.or(boots),
    }
}

/// What is here of an image in transit.
struct Content<'a>(&'a LaunchDevice);

impl ReadAt for Content<'_> {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let room = self.0.size().saturating_sub(offset);
        let length = (buffer.len() as u64).min(room) as usize;
        let read = self.0.read(offset, &mut buffer[..length]);
        read.map_err(|e| io::Error::other(e.to_string()))?;
        Ok(length)
    }
}
