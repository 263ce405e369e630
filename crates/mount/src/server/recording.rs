//! Recording what is written to an image, and its refusals.

use std::sync::Arc;

use drover_core::ImageName;
use drover_net::{Code, Refusal};
use drover_storage::Directory;
use drover_storage::chunk_log::ChunkLogError;
use drover_store::generations::{self, About, Generations, GenerationsError};
use drover_store::lease::Identity;

use crate::protocol::refusal_of;

/// Refuses to write an image with these contents if it is frozen, or may be, or if its file is being changed. Changes nothing.
pub fn check(
    directory: Arc<dyn Directory>,
    name: &ImageName,
    now: Identity,
) -> Result<(), Refusal> {
    if let Err(error @ GenerationsError::Busy(_)) = generations::hold(directory.as_ref()) {
        return Err(refuse(name, error));
    }
    match generations::look(directory, now.into()) {
        Ok(Some(About { frozen: true, .. })) => Err(refuse(name, GenerationsError::Frozen)),
        Ok(_) => Ok(()),
        Err(error) => Err(refuse(name, error)),
    }
}

/// Opens the generations of an image that is about to be written, whose contents were `before` until it was opened, and are
/// `now`. None if they cannot be kept, and none are on the disk.
pub fn open(
    directory: Arc<dyn Directory>,
    name: &ImageName,
    size: u64,
    before: Identity,
    now: Identity,
) -> Result<Option<Arc<Generations>>, Refusal> {
    let opened = Generations::open(Arc::clone(&directory), size, before.into());
    let begun = opened.and_then(|opened| opened.begin(now.into()).map(|()| opened));
    match begun {
        Ok(opened) => Ok(Some(Arc::new(opened))),
        // A disk that is full, for example: that must not keep the image from being used.
        Err(error @ GenerationsError::Io { .. } | error @ GenerationsError::Log(_))
            if !is_damaged(&error) =>
        {
            generations::forget(directory.as_ref()).map_err(|_| refuse(name, error))?;
            tracing::warn!(image = %name, "the generations of an image cannot be recorded");
            Ok(None)
        }
        Err(error) => Err(refuse(name, error)),
    }
}

/// Whether the map itself is what is wrong.
pub fn is_damaged(error: &GenerationsError) -> bool {
    matches!(
        error,
        GenerationsError::Log(
            ChunkLogError::NotALog { .. }
                | ChunkLogError::Version { .. }
                | ChunkLogError::Corrupt { .. }
        )
    )
}

/// The directory of an image's generations cannot be opened.
pub fn io(name: &ImageName, error: &std::io::Error) -> Refusal {
    Refusal::new(
        Code::Io,
        format!("the generations of {name} cannot be opened: {error}"),
    )
}

/// Converts an error of an image's generations to a refusal.
pub fn refuse(name: &ImageName, error: GenerationsError) -> Refusal {
    match error {
        GenerationsError::Frozen => {
            let text = format!(
                "{name} is frozen, since its machine moved to another site, or its file was marked as an old copy of a disk: move the \
                 machine back, mount {name} read-only, or, if there is no other copy that goes on, thaw this one with `drover \
                 mounts break {name}` at the site that has it"
            );
            Refusal::new(Code::Held, text)
        }
        error if is_damaged(&error) => {
            tracing::warn!(image = %name, %error, "the generations of an image are damaged");
            let text = format!(
                "the generations of {name} are damaged, so that it may be frozen: if its machine does not run at another site, \
                 `drover mounts break {name}` at the site that has it removes them"
            );
            Refusal::new(Code::Corrupt, text)
        }
        error => refusal_of(error.into()),
    }
}
