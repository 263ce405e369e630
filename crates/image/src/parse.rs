//! Parses one file without opening any other.

use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::Container;
use crate::{Format, ImageError, Layout};

/// The content of a single image file.
#[derive(Debug)]
pub struct Parsed {
    /// Detected from the content.
    pub format: Format,
    /// The virtual disk size in bytes.
    pub virtual_size: u64,
    /// The walk of the file, assumed to have no holes.
    pub layout: Layout,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// The name of the backing file, as stored in the image, unchecked.
    pub backing: Option<String>,
    /// The names of other files of the image, as stored in the image, unchecked.
    pub companions: Vec<String>,
}

/// Parses `file` and checks every table that its layout depends on. Opens no other file.
///
/// # Errors
/// [`ImageError`] when the file is damaged, unreadable or needs an unsupported feature.
pub fn parse(file: Arc<dyn ReadAt>) -> Result<Parsed, ImageError> {
    let len = file.len();
    let whole = 0..len;
    let mut container = Container::open(&file)?;
    let layout = container.layout(len, std::slice::from_ref(&whole))?;
    Ok(Parsed {
        format: container.format,
        virtual_size: container.virtual_size(),
        layout,
        backing: container.backing.as_ref().map(|b| b.name.clone()),
        companions: container
            .companions()
            .into_iter()
            .map(str::to_owned)
            .collect(),
        notes: container.notes,
    })
}
