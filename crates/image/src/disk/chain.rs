//! Opens an image with its backing chain.

use std::path::Path;
use std::sync::Arc;

use drover_core::ReadAt;

use super::medium::{OpenedFiles, medium};
use super::{Layer, Medium, VirtualDisk, parts};
use crate::container::{Backing, Body, Container};
use crate::follow::{Follow, Known};
use crate::limits::MAX_CHAIN_DEPTH;
use crate::{Format, ImageError, ImageFile, Trust};

impl VirtualDisk {
    /// Opens the image at `path`, following backing files in its directory only ([`Trust::Beside`]).
    ///
    /// # Errors
    /// [`ImageError`] naming the file that is damaged, unreadable or outside that directory.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        Self::open_with(path, Trust::Beside)
    }

    /// Opens the image at `path`, following backing files as far as `trust` permits.
    ///
    /// # Errors
    /// [`ImageError`] naming the file that is damaged, unreadable or not permitted.
    pub fn open_with(path: &Path, trust: Trust) -> Result<Self, ImageError> {
        chain(path, Follow::By(trust))
    }

    /// Opens the image at `path`, one of the images of `known`. Of the files that an image from elsewhere names, only
    /// those are read that are known, and in its directory or below. Their paths have no component that begins with a
    /// dot, no symbolic link is followed, and what is checked is the file that was opened.
    ///
    /// # Errors
    /// [`ImageError`] naming the file that is damaged, unreadable or not known.
    pub fn open_known(path: &Path, known: &dyn Known) -> Result<Self, ImageError> {
        chain(path, Follow::Known(known))
    }

    /// A disk in a single, self-contained file.
    ///
    /// # Errors
    /// When the file is damaged, or needs other files.
    pub fn from_content(content: Arc<dyn ReadAt>) -> Result<Self, ImageError> {
        single(content, true)
    }

    /// As [`VirtualDisk::from_content`], for a short look: only the tables on the way to what is read are read, and
    /// checked no further than that needs.
    ///
    /// # Errors
    /// When its header is damaged, or it needs other files.
    pub fn peek(content: Arc<dyn ReadAt>) -> Result<Self, ImageError> {
        single(content, false)
    }
}

fn chain(path: &Path, follow: Follow<'_>) -> Result<VirtualDisk, ImageError> {
    let mut found = OpenedFiles::default();
    let mut layers = Vec::new();
    let mut format = None;
    let mut seen: Vec<(u64, u64)> = Vec::new();
    let mut next = Some((ImageFile::open(path)?, None));
    while let Some((file, expected)) = next.take() {
        let path = file.path().to_owned();
        if layers.len() >= MAX_CHAIN_DEPTH {
            return Err(ImageError::ChainTooLong(MAX_CHAIN_DEPTH).in_file(&path));
        }
        let identity = (file.stamp().device, file.stamp().inode);
        if seen.contains(&identity) {
            return Err(ImageError::BackingLoop.in_file(&path));
        }
        seen.push(identity);
        let one = layer(file, expected, follow, &mut found).map_err(|e| e.in_file(&path))?;
        format.get_or_insert(one.format);
        layers.push(one.layer);
        if let Some(backing) = one.backing {
            if let Some(format) = backing.foreign {
                let why = format!("its backing file has the format {format:?}, which is not read");
                return Err(ImageError::Unconvertible(why).in_file(&path));
            }
            let opened = follow.backing(&path, &backing.name);
            next = Some((opened.map_err(|e| e.in_file(&path))?, backing.format));
        }
    }
    let mut disk = VirtualDisk::new(layers, format.unwrap_or(Format::Raw));
    disk.notes = found.notes;
    disk.stamps = found.stamps;
    Ok(disk)
}

fn single(content: Arc<dyn ReadAt>, whole_tables: bool) -> Result<VirtualDisk, ImageError> {
    let len = content.len();
    let whole = 0..len;
    let mut container = Container::open(&content)?;
    container.check_size()?;
    if whole_tables {
        container.check(len, std::slice::from_ref(&whole))?;
    }
    let format = container.format;
    if let Some(backing) = container.backing {
        return Err(ImageError::OutsideDirectory { name: backing.name });
    }
    if let Some(name) = container.data_file {
        return Err(ImageError::OutsideDirectory { name });
    }
    let Body::Mapped(mapping) = container.body else {
        return Err(ImageError::Unconvertible(
            "its data is in other files".into(),
        ));
    };
    let files = vec![Medium {
        content,
        present: vec![whole],
    }];
    Ok(VirtualDisk::new(vec![Layer { mapping, files }], format))
}

struct ChainLink {
    layer: Layer,
    format: Format,
    backing: Option<Backing>,
}

/// One image of the chain, without its backing file.
fn layer(
    file: ImageFile,
    expected: Option<Format>,
    follow: Follow<'_>,
    found: &mut OpenedFiles,
) -> Result<ChainLink, ImageError> {
    let path = file.path().to_owned();
    let present = file.data_extents()?;
    found.stamps.push((path.clone(), file.stamp()));
    let content: Arc<dyn ReadAt> = Arc::new(file);
    let mut container = match expected {
        // Do not probe: a guest could write another format's magic number to a raw disk.
        Some(Format::Raw) => Container::raw(content.len()),
        _ => Container::open(&content)?,
    };
    if let Some(expected) = expected.filter(|&f| f != container.format) {
        return Err(ImageError::damaged(
            expected,
            "format",
            format!(
                "the image in front of it says so, but it is {}",
                container.format
            ),
        ));
    }
    container.check(content.len(), &present)?;
    found.notes.append(&mut container.notes);
    let mut files = vec![Medium { content, present }];
    if let Some(name) = &container.data_file {
        files.push(medium(follow.part(&path, name)?, found)?);
    }
    let mapping = match container.body {
        Body::Mapped(mapping) => mapping,
        Body::Parts(list) => parts::join(&path, list, follow, &mut files, found)?,
    };
    Ok(ChainLink {
        layer: Layer { mapping, files },
        format: container.format,
        backing: container.backing,
    })
}
