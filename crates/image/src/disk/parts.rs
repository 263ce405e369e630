//! A disk that consists of several files, one after the other, as in vmdk descriptors.

use std::path::Path;

use super::Medium;
use super::medium::{OpenedFiles, medium};
use crate::container::{Body, Container, Part, PartSource};
use crate::follow::Follow;
use crate::limits::MAX_EXTENT_FILES;
use crate::mapping::{Flat, Mapping, Packed, Run, TableSpan, Target};
use crate::{Format, ImageError};

struct Piece {
    start: u64,
    len: u64,
    /// `None` reads as zeros.
    mapping: Option<Box<dyn Mapping>>,
    /// Added to the file numbers of this piece.
    file: usize,
}

struct Row {
    pieces: Vec<Piece>,
    size: u64,
}

/// Opens every part, relative to the descriptor at `path`, and combines them into one mapping.
pub(super) fn join(
    path: &Path,
    parts: Vec<Part>,
    follow: Follow<'_>,
    files: &mut Vec<Medium>,
    found: &mut OpenedFiles,
) -> Result<Box<dyn Mapping>, ImageError> {
    if parts.len() > MAX_EXTENT_FILES {
        return Err(ImageError::unsupported(
            Format::Vmdk,
            format!("has more than {MAX_EXTENT_FILES} extents"),
        ));
    }
    let mut pieces = Vec::with_capacity(parts.len());
    let mut start = 0u64;
    for part in parts {
        let file = files.len();
        let mapping: Option<Box<dyn Mapping>> = match part.source {
            PartSource::Zero => None,
            PartSource::Flat(name, offset) => {
                files.push(medium(follow.part(path, &name)?, found)?);
                Some(Box::new(Flat {
                    size: part.len,
                    offset,
                    file: 0,
                }))
            }
            PartSource::Sparse(name) => {
                let file = follow.part(path, &name)?;
                let at = file.path().to_owned();
                let one = medium(file, found)?;
                let mapping = sparse(&one, found).map_err(|e| e.in_file(&at))?;
                files.push(one);
                Some(mapping)
            }
        };
        pieces.push(Piece {
            start,
            len: part.len,
            mapping,
            file,
        });
        start = start.checked_add(part.len).ok_or_else(|| {
            ImageError::damaged(Format::Vmdk, "extent list", "its sizes add up past 2^64")
        })?;
    }
    Ok(Box::new(Row {
        pieces,
        size: start,
    }))
}

fn sparse(medium: &Medium, found: &mut OpenedFiles) -> Result<Box<dyn Mapping>, ImageError> {
    let mut container = Container::open(&medium.content)?;
    container.check(medium.content.len(), &medium.present)?;
    found.notes.append(&mut container.notes);
    match container.body {
        Body::Mapped(mapping) if container.format == Format::Vmdk => Ok(mapping),
        _ => Err(ImageError::damaged(
            Format::Vmdk,
            "extent list",
            "a sparse extent is not a sparse vmdk file",
        )),
    }
}

impl Row {
    fn piece(&self, guest: u64) -> Option<&Piece> {
        let i = self.pieces.partition_point(|p| p.start + p.len <= guest);
        self.pieces.get(i)
    }
}

impl Mapping for Row {
    fn virtual_size(&self) -> u64 {
        self.size
    }

    fn grain(&self) -> u32 {
        4096
    }

    fn lookup(&self, guest: u64) -> Result<Run, ImageError> {
        let empty = |len, target| Ok(Run { len, target });
        let Some(p) = self.piece(guest) else {
            return empty(1, Target::Zero);
        };
        let (within, left) = (guest - p.start, p.start + p.len - guest);
        let Some(mapping) = &p.mapping else {
            return empty(left, Target::Zero);
        };
        if within >= mapping.virtual_size() {
            return empty(left, Target::Zero);
        }
        let run = mapping.lookup(within)?;
        let target = match run.target {
            Target::Data { file, offset } => Target::Data {
                file: file + p.file,
                offset,
            },
            Target::Packed(packed) => Target::Packed(Packed {
                file: packed.file + p.file,
                guest: packed.guest + p.start,
                ..packed
            }),
            other => other,
        };
        Ok(Run {
            len: run.len.min(left),
            target,
        })
    }

    fn tables(
        &self,
        _: &mut dyn FnMut(TableSpan) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        // Each part was checked when opened.
        Ok(())
    }

    fn unpack(&self, packed: Packed) -> Result<Vec<u8>, ImageError> {
        let part = self
            .piece(packed.guest)
            .and_then(|p| Some((p, p.mapping.as_ref()?)));
        let Some((p, mapping)) = part else {
            return Ok(Vec::new());
        };
        mapping.unpack(Packed {
            file: 0,
            guest: packed.guest - p.start,
            ..packed
        })
    }
}
