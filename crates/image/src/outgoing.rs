//! Images to be sent, either unchanged or converted.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::{ExtentKind, ReadAt};

use crate::container::Container;
use crate::file::push_rounded;
use crate::limits::{MAX_FILE_EXTENTS, MAX_VIRTUAL_SIZE};
use crate::probe::probe;
use crate::qcow2::Created;
use crate::{Format, ImageError, ImageFile, Layout, Stamp, Trust, VirtualDisk};

/// The form in which an image is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Conversion {
    /// The file byte for byte, walked in guest order; no other file that it names.
    #[default]
    AsIs,
    /// The file byte for byte, walked in file order, without parsing it.
    Opaque,
    /// Convert to a raw image.
    Raw,
    /// Convert to a qcow2 image without a backing file.
    Qcow2,
}

/// An image ready to be sent.
pub struct Outgoing {
    /// The file that the destination will have.
    pub content: Arc<dyn ReadAt>,
    /// The order in which it is walked.
    pub layout: Layout,
    /// The format of `content`.
    pub format: Format,
    /// The virtual disk size in bytes; the file's length if sent as opaque.
    pub virtual_size: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// The files that `content` reads, each with its stamp at the time of opening.
    pub stamps: Vec<(PathBuf, Stamp)>,
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outgoing")
            .field("format", &self.format)
            .field("len", &self.content.len())
            .field("virtual_size", &self.virtual_size)
            .field("ranges", &self.layout.ranges().len())
            .field("notes", &self.notes)
            .finish_non_exhaustive()
    }
}

/// Opens the image at `path` to send it in the form `conversion`. A conversion reads also what the image names, where
/// that is in its directory ([`Trust::Beneath`]); see [`open_for_sending_with`] for the alternative, and
/// [`parts`](crate::parts()) for what that is.
///
/// # Errors
/// [`ImageError`] naming the file and what is wrong with it.
pub fn open_for_sending(path: &Path, conversion: Conversion) -> Result<Outgoing, ImageError> {
    open_for_sending_with(path, conversion, Trust::Beneath)
}

/// Like [`open_for_sending`], following names as far as `trust` permits.
///
/// # Errors
/// [`ImageError`] naming the file and what is wrong with it.
pub fn open_for_sending_with(
    path: &Path,
    conversion: Conversion,
    trust: Trust,
) -> Result<Outgoing, ImageError> {
    match conversion {
        Conversion::AsIs => as_is(path),
        Conversion::Opaque => opaque(path),
        Conversion::Raw => raw(path, trust),
        Conversion::Qcow2 => qcow2(path, trust),
    }
    .map_err(|e| e.in_file(path))
}

fn as_is(path: &Path) -> Result<Outgoing, ImageError> {
    let file = ImageFile::open(path)?;
    let present = file.data_extents()?;
    let stamps = vec![(path.to_owned(), file.stamp())];
    let content: Arc<dyn ReadAt> = Arc::new(file);
    let mut container = Container::open(&content)?;
    let layout = container.layout(content.len(), &present)?;
    let notes = std::mem::take(&mut container.notes);
    Ok(Outgoing {
        content,
        layout,
        format: container.format,
        virtual_size: container.virtual_size(),
        notes,
        stamps,
    })
}

fn opaque(path: &Path) -> Result<Outgoing, ImageError> {
    let file = ImageFile::open(path)?;
    let layout = Layout::in_file_order(file.len(), &file.data_extents()?);
    Ok(Outgoing {
        layout,
        format: probe(&file)?.format,
        virtual_size: file.len(),
        notes: Vec::new(),
        stamps: vec![(path.to_owned(), file.stamp())],
        content: Arc::new(file),
    })
}

/// The disk that a conversion reads, and its data runs.
fn disk_and_data(path: &Path, trust: Trust) -> Result<(VirtualDisk, Vec<Range<u64>>), ImageError> {
    let disk = VirtualDisk::open_with(path, trust)?;
    check_convertible(disk.len())?;
    let mut data: Vec<Range<u64>> = Vec::new();
    for extent in disk.extents() {
        let extent = extent?;
        if extent.kind != ExtentKind::Data {
            continue;
        }
        if data.len() >= MAX_FILE_EXTENTS {
            // From here on holes are not tracked: they are read as zeros.
            push_rounded(&mut data, extent.offset..disk.len(), disk.len());
            break;
        }
        push_rounded(&mut data, extent.offset..extent.end(), disk.len());
    }
    Ok((disk, data))
}

fn raw(path: &Path, trust: Trust) -> Result<Outgoing, ImageError> {
    let (disk, data) = disk_and_data(path, trust)?;
    Ok(Outgoing {
        layout: Layout::in_file_order(disk.len(), &data),
        format: Format::Raw,
        virtual_size: disk.len(),
        notes: disk.notes().to_vec(),
        stamps: disk.stamps().to_vec(),
        content: Arc::new(disk),
    })
}

/// A qcow2 file without a backing file that holds `disk`, whose data is in the runs `data` (sorted and disjoint).
/// Generated on the fly as it is read.
///
/// # Errors
/// [`ImageError::Unconvertible`] for a disk beyond [`MAX_VIRTUAL_SIZE`].
pub fn qcow2_of(disk: Arc<dyn ReadAt>, data: &[Range<u64>]) -> Result<Arc<dyn ReadAt>, ImageError> {
    check_convertible(disk.len())?;
    Ok(Arc::new(Created::new(disk, data)))
}

fn check_convertible(len: u64) -> Result<(), ImageError> {
    match len > MAX_VIRTUAL_SIZE {
        true => Err(ImageError::Unconvertible(format!(
            "a disk of {len} bytes is beyond the limit of {MAX_VIRTUAL_SIZE}"
        ))),
        false => Ok(()),
    }
}

fn qcow2(path: &Path, trust: Trust) -> Result<Outgoing, ImageError> {
    let (disk, data) = disk_and_data(path, trust)?;
    let (virtual_size, notes, stamps) = (disk.len(), disk.notes().to_vec(), disk.stamps().to_vec());
    let created = Created::new(disk, &data);
    Ok(Outgoing {
        layout: created.layout()?,
        format: Format::Qcow2,
        virtual_size,
        notes,
        stamps,
        content: Arc::new(created),
    })
}
