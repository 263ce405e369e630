//! A single container file, parsed: its format, its mapping, and the layout that follows from it.

use std::ops::{Range, RangeInclusive};

use crate::layout::{BuildError, LayoutBuilder};
use crate::limits::{MAX_RANGES, MAX_TABLES, MAX_VIRTUAL_SIZE};
use crate::mapping::{Flat, Mapping, Target};
use crate::{Format, ImageError, Layout};

/// The backing file of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backing {
    /// As stored in the image.
    pub(crate) name: String,
    /// The format that the image declares for it, if supported here.
    pub(crate) format: Option<Format>,
    /// The declared format, if not supported.
    pub(crate) foreign: Option<String>,
}

/// One extent of a disk that consists of several files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Length in bytes of the disk.
    pub(crate) len: u64,
    pub(crate) source: PartSource,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PartSource {
    /// A container file.
    Sparse(String),
    /// Raw bytes from an offset in a file.
    Flat(String, u64),
    /// Zeros.
    Zero,
}

/// The content of a container.
pub(crate) enum Body {
    /// A mapping to the container itself (file 0), or to `data_file` (file 1).
    Mapped(Box<dyn Mapping>),
    /// A list of other files.
    Parts(Vec<Part>),
}

/// One file of an image, parsed. Only its headers have been read.
pub(crate) struct Container {
    pub(crate) format: Format,
    pub(crate) body: Body,
    pub(crate) backing: Option<Backing>,
    /// The external data file of a qcow2 image.
    pub(crate) data_file: Option<String>,
    /// How long that can be, in bytes.
    pub(crate) data_file_len: RangeInclusive<u64>,
    /// Notes for the user.
    pub(crate) notes: Vec<String>,
    /// Why the guest's data cannot be read.
    pub(crate) sealed: Option<String>,
}

impl Container {
    pub(crate) fn mapped(format: Format, mapping: impl Mapping + 'static) -> Self {
        Container {
            format,
            body: Body::Mapped(Box::new(mapping)),
            backing: None,
            data_file: None,
            data_file_len: 0..=0,
            notes: Vec::new(),
            sealed: None,
        }
    }

    /// Treats a file as a raw disk, whatever its content.
    pub(crate) fn raw(len: u64) -> Self {
        Container::mapped(
            Format::Raw,
            Flat {
                size: len,
                offset: 0,
                file: 0,
            },
        )
    }

    /// The virtual disk size in bytes.
    pub(crate) fn virtual_size(&self) -> u64 {
        match &self.body {
            Body::Mapped(m) => m.virtual_size(),
            Body::Parts(parts) => parts.iter().fold(0, |sum, p| sum.saturating_add(p.len)),
        }
    }

    /// The names of other files that the image needs.
    pub(crate) fn companions(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.data_file.as_deref().into_iter().collect();
        if let Body::Parts(parts) = &self.body {
            names.extend(parts.iter().filter_map(|p| match &p.source {
                PartSource::Sparse(name) | PartSource::Flat(name, _) => Some(name.as_str()),
                PartSource::Zero => None,
            }));
        }
        names
    }

    /// Checks that the guest's data can be read, as far as the header says.
    pub(crate) fn check_size(&self) -> Result<(), ImageError> {
        if let Some(why) = &self.sealed {
            return Err(ImageError::Unconvertible(why.clone()));
        }
        if self.virtual_size() > MAX_VIRTUAL_SIZE {
            return Err(ImageError::Unconvertible(format!(
                "a disk of {} bytes is beyond the limit of {MAX_VIRTUAL_SIZE}",
                self.virtual_size()
            )));
        }
        Ok(())
    }

    /// Checks every table, and that the guest's data can be read.
    pub(crate) fn check(
        &mut self,
        file_len: u64,
        present: &[Range<u64>],
    ) -> Result<(), ImageError> {
        self.check_size()?;
        // The notes of a layout concern sending the file itself.
        let notes = self.notes.len();
        self.layout(file_len, present)?;
        self.notes.truncate(notes);
        Ok(())
    }

    /// The file's layout in guest order. Reads and checks every table once. Falls back to file order, with a note,
    /// where guest order would be useless or too costly.
    pub(crate) fn layout(
        &mut self,
        file_len: u64,
        present: &[Range<u64>],
    ) -> Result<Layout, ImageError> {
        let size = self.virtual_size();
        let file_order = || Layout::in_file_order(file_len, present);
        let mapping = match &self.body {
            Body::Mapped(m) if self.format != Format::Raw => m,
            _ => return Ok(file_order()),
        };
        if self.sealed.is_some() {
            return Ok(file_order());
        }
        if size > MAX_VIRTUAL_SIZE {
            self.notes.push(format!(
                "a virtual disk of {size} bytes is beyond {MAX_VIRTUAL_SIZE}: sent in file order"
            ));
            return Ok(file_order());
        }
        let mut tables = Vec::new();
        mapping.tables(&mut |(span, what)| {
            if tables.len() >= MAX_TABLES {
                let detail = format!("has more than {MAX_TABLES} tables");
                return Err(ImageError::unsupported(self.format, detail));
            }
            tables.push((span.start, span.end, what));
            Ok(())
        })?;
        tables.sort_unstable();
        let damaged = |field, detail| ImageError::damaged(self.format, field, detail);
        if let Some(w) = tables.windows(2).find(|w| w[0].1 > w[1].0) {
            return Err(damaged(
                w[1].2,
                format!("at {:#x} it overlaps the {}", w[1].0, w[0].2),
            ));
        }
        let mut builder = LayoutBuilder::new(file_len, present, mapping.grain(), MAX_RANGES);
        let mut packed = 0u64;
        let built = (|| -> Result<Result<Layout, BuildError>, ImageError> {
            let mut at = 0;
            while at < size {
                let run = mapping.lookup(at)?;
                match run.target {
                    Target::Data { file: 0, offset } => {
                        if let Err(e) = builder.data(at, offset, run.len) {
                            return Ok(Err(e));
                        }
                    }
                    Target::Packed(p) => packed += p.len,
                    _ => {}
                }
                at = at.saturating_add(run.len.max(1));
            }
            Ok(builder.finish(&tables))
        })()?;
        if packed > 0 {
            self.notes.push(
                "it holds compressed data, whose blocks cannot match other images \
                 (a conversion to raw or qcow2 sends the disk uncompressed)"
                    .into(),
            );
        }
        match built {
            Ok(layout) => Ok(layout),
            Err(BuildError::TooManyRanges) => {
                self.notes.push(format!(
                    "too fragmented for guest order (over {MAX_RANGES} ranges): sent in file order"
                ));
                Ok(file_order())
            }
            Err(BuildError::Overlap(at)) => Err(damaged(
                "data",
                format!("two parts of the disk share the file's bytes at {at:#x}"),
            )),
            Err(BuildError::OverTable(at, what)) => Err(damaged(
                what,
                format!("data of the disk lies over it at {at:#x}"),
            )),
        }
    }
}
