//! Taking one file apart without opening any other.

use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::Container;
use crate::{Format, ImageError, Layout};

/// What one file says, whatever holds its bytes.
#[derive(Debug)]
pub struct Parsed {
    /// Told by the content.
    pub format: Format,
    /// Bytes in the disk that the guest sees.
    pub virtual_size: u64,
    /// The walk of the file, taken to have no holes.
    pub layout: Layout,
    /// What a person should know.
    pub notes: Vec<String>,
    /// The name of the file behind this one, as the image has it: not checked.
    pub backing: Option<String>,
    /// The names of the files that belong to the image, as the image has them: not checked.
    pub companions: Vec<String>,
}

/// Takes `file` apart and checks every table that its layout depends on. Opens nothing else.
///
/// # Errors
/// [`ImageError`] when the file is damaged, unreadable or needs what is not understood.
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
