//! VMware's vmdk: sparse files with their descriptor embedded or separate, and flat extents.

mod descriptor;
mod sparse;

use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::{Backing, Body, Container};
use crate::limits::MAX_EXTENT_FILES;
use crate::reader::Reader;
use crate::{Format, ImageError};

use descriptor::Descriptor;
use sparse::Sparse;

/// Parses a sparse extent or a text descriptor.
pub(crate) fn open(file: &Arc<dyn ReadAt>) -> Result<Container, ImageError> {
    let reader = Reader::new(Arc::clone(file), Format::Vmdk);
    let mut magic = [0u8; 64];
    let n = usize::try_from(reader.len())
        .unwrap_or(usize::MAX)
        .min(magic.len());
    reader.read(0, &mut magic[..n], "header")?;
    if is_descriptor(&magic[..n]) {
        return from_descriptor(&reader);
    }
    let sparse = Sparse::read(reader)?;
    let text = sparse.descriptor()?;
    let mut container = Container::mapped(Format::Vmdk, sparse);
    if let Some(text) = text {
        parent(&text, &mut container);
    }
    Ok(container)
}

fn from_descriptor(reader: &Reader) -> Result<Container, ImageError> {
    let text = descriptor::read(reader, 0, reader.len())?;
    if text.parts.is_empty() {
        return Err(reader.damaged("descriptor", "it lists no extents"));
    }
    if text.parts.len() > MAX_EXTENT_FILES {
        return Err(reader.damaged(
            "descriptor",
            format!("more than {MAX_EXTENT_FILES} extents"),
        ));
    }
    let mut container = Container {
        format: Format::Vmdk,
        body: Body::Parts(text.parts.clone()),
        backing: None,
        data_file: None,
        data_file_len: 0..=0,
        notes: Vec::new(),
        sealed: None,
    };
    parent(&text, &mut container);
    Ok(container)
}

fn parent(text: &Descriptor, container: &mut Container) {
    match (&text.parent_name, text.has_parent) {
        (Some(name), true) => {
            container.backing = Some(Backing {
                name: name.clone(),
                format: Some(Format::Vmdk),
                foreign: None,
            });
        }
        (None, true) => container.sealed = Some("it does not name the image behind it".into()),
        _ => {}
    }
}

/// Whether a vmdk text descriptor starts here.
pub(crate) fn is_descriptor(start: &[u8]) -> bool {
    const FIRST_LINE: &[u8] = b"# Disk DescriptorFile";
    start
        .get(..FIRST_LINE.len())
        .is_some_and(|s| s.eq_ignore_ascii_case(FIRST_LINE))
}
