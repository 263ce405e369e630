//! The files that an image needs beside its own: what they are, and whether they look like parts of an image.
//!
//! An image says itself which files they are, and it may come from somebody else. One that names a key of the user must
//! not make the user send that key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::ReadAt;

use crate::container::{Backing, Body, Container, PartSource};
use crate::follow::Follow;
use crate::limits::MAX_CHAIN_DEPTH;
use crate::{Format, ImageError, ImageFile, Trust};

/// Flat parts of disks are whole sectors.
const SECTOR: u64 = 512;

/// A file that an image needs beside its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its path.
    pub path: PathBuf,
    /// Its length in bytes.
    pub size: u64,
    /// Its format, detected from its content.
    pub format: Format,
}

/// The names of the files that the image at `path` needs beside its own, as stored in it: extents, an external data
/// file, and its backing file or parent. Opens no other file.
///
/// # Errors
/// When the image cannot be read.
pub fn named_files(path: &Path) -> Result<Vec<String>, ImageError> {
    let file: Arc<dyn ReadAt> = Arc::new(ImageFile::open(path)?);
    let container = Container::open(&file).map_err(|e| e.in_file(path))?;
    let backing = container.backing.as_ref().map(|b| b.name.as_str());
    let mut names: Vec<String> = Vec::new();
    for name in container.companions().into_iter().chain(backing) {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// All files that the image at `path` needs beside its own, with those that its backing files need, each before the
/// file that names it.
///
/// Each must be in the directory of the file that names it or below ([`Trust::Beneath`]), and be what it is named as: an image;
/// or a flat part, of whole sectors and of the size that its image says, or a data file no longer than the disk.
///
/// # Errors
/// [`ImageError`] naming the file that is missing, damaged, or not what it is named as.
pub fn parts(path: &Path) -> Result<Vec<Part>, ImageError> {
    let mut found = Found::default();
    let mut next = Some((ImageFile::open(path)?, None));
    let mut depth = 0;
    while let Some((file, expected)) = next.take() {
        let path = file.path().to_owned();
        depth += 1;
        if depth > MAX_CHAIN_DEPTH {
            return Err(ImageError::ChainTooLong(MAX_CHAIN_DEPTH).in_file(&path));
        }
        if !found.enter(&file) {
            return Err(ImageError::BackingLoop.in_file(&path));
        }
        next = of_one(file, expected, &mut found).map_err(|e| e.in_file(&path))?;
    }
    found.parts.reverse();
    Ok(found.parts)
}

#[derive(Default)]
struct Found {
    /// Each after the file that names it.
    parts: Vec<Part>,
    /// Device and inode numbers.
    seen: Vec<(u64, u64)>,
}

impl Found {
    /// Whether the file is seen for the first time.
    fn enter(&mut self, file: &ImageFile) -> bool {
        let identity = (file.stamp().device, file.stamp().inode);
        let new = !self.seen.contains(&identity);
        self.seen.push(identity);
        new
    }

    fn add(&mut self, file: &ImageFile, format: Format) {
        self.parts.push(Part {
            path: file.path().to_owned(),
            size: file.len(),
            format,
        });
    }
}

/// Finds what one image of the chain names; returns its backing file, which was found, too, and its declared format.
fn of_one(
    file: ImageFile,
    expected: Option<Format>,
    found: &mut Found,
) -> Result<Option<(ImageFile, Option<Format>)>, ImageError> {
    let path = file.path().to_owned();
    let content: Arc<dyn ReadAt> = Arc::new(file);
    let container = match expected {
        Some(Format::Raw) => Container::raw(content.len()),
        _ => Container::open(&content)?,
    };
    let open = |name: &str| Follow::By(Trust::Beneath).part(&path, name);
    if let Some(name) = &container.data_file {
        let data = open(name)?;
        let fits = container.data_file_len.contains(&data.len());
        check(name, fits && data.len().is_multiple_of(SECTOR))?;
        found.enter(&data);
        found.add(&data, Format::Raw);
    }
    if let Body::Parts(list) = &container.body {
        // Several extents may be in one flat file.
        let mut flat: BTreeMap<&str, u64> = BTreeMap::new();
        for part in list {
            match &part.source {
                PartSource::Zero => {}
                PartSource::Flat(name, offset) => {
                    let end = flat.entry(name).or_default();
                    *end = (*end).max(offset.saturating_add(part.len));
                }
                PartSource::Sparse(name) => {
                    let extent = open(name)?;
                    let format = format_of(&extent)?;
                    check(name, format == Format::Vmdk)?;
                    if found.enter(&extent) {
                        found.add(&extent, format);
                    }
                }
            }
        }
        for (name, end) in flat {
            let extent = open(name)?;
            check(name, extent.len() == end)?;
            if found.enter(&extent) {
                found.add(&extent, Format::Raw);
            }
        }
    }
    let Some(Backing {
        name,
        format,
        foreign,
    }) = &container.backing
    else {
        return Ok(None);
    };
    if let Some(format) = foreign {
        let why = format!("its backing file has the format {format:?}, which is not read");
        return Err(ImageError::Unconvertible(why));
    }
    let backing = open(name)?;
    let detected = match format {
        Some(Format::Raw) => Format::Raw,
        _ => format_of(&backing)?,
    };
    // A disk may have grown since its backing file was made, but not shrunk.
    let sectors = backing.len() > 0 && backing.len().is_multiple_of(SECTOR);
    let fits = sectors && backing.len() <= container.virtual_size();
    check(name, detected != Format::Raw || fits)?;
    found.add(&backing, detected);
    Ok(Some((backing, *format)))
}

fn check(name: &str, fits: bool) -> Result<(), ImageError> {
    match fits {
        true => Ok(()),
        false => Err(ImageError::NotFollowed {
            name: name.into(),
            why: "is no image, nor a flat part of the size that fits".into(),
        }),
    }
}

/// The format of a file, of which only the headers are read.
fn format_of(file: &ImageFile) -> Result<Format, ImageError> {
    let probed = crate::probe::probe(file).map_err(|e| e.in_file(file.path()))?;
    match probed.foreign {
        Some(name) => Err(ImageError::Unconvertible(format!(
            "{name} is not a format that drover reads"
        ))
        .in_file(file.path())),
        None => Ok(probed.format),
    }
}
