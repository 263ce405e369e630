//! The guest's view: a disk assembled from all files of an image.

mod chain;
mod medium;
mod parts;
mod stored;

pub use stored::Stored;

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use drover_core::{Extent, ExtentKind, ReadAt};

use crate::limits::GRAIN_CACHE_BYTES;
use crate::mapping::{Mapping, Packed, Target};
use crate::{Format, ImageError, Stamp};

/// A file with data of the disk.
struct Medium {
    content: Arc<dyn ReadAt>,
    /// Its data runs (no holes), sorted and disjoint.
    present: Vec<Range<u64>>,
}

/// An image of a backing chain.
struct Layer {
    mapping: Box<dyn Mapping>,
    files: Vec<Medium>,
}

/// A disk as its guest sees it, assembled from its files: backing files, external data files, extents. Unallocated
/// ranges read as zeros.
pub struct VirtualDisk {
    /// The image itself first, then its backing files in order.
    layers: Vec<Layer>,
    size: u64,
    format: Format,
    notes: Vec<String>,
    stamps: Vec<(PathBuf, Stamp)>,
    /// Decompressed grains, most recently used first.
    grains: Mutex<Vec<Unpacked>>,
}

/// A decompressed grain of a layer.
type Unpacked = (usize, Packed, Arc<[u8]>);

/// The location of guest bytes, with all layers considered.
#[derive(Clone, Copy)]
enum Place {
    Data {
        layer: usize,
        file: usize,
        offset: u64,
    },
    Packed {
        layer: usize,
        packed: Packed,
    },
    Zero,
    Hole,
}

impl VirtualDisk {
    fn new(layers: Vec<Layer>, format: Format) -> Self {
        VirtualDisk {
            size: layers.first().map_or(0, |l| l.mapping.virtual_size()),
            layers,
            format,
            notes: Vec::new(),
            stamps: Vec::new(),
            grains: Mutex::new(Vec::new()),
        }
    }

    /// The format of the image itself (not of its backing files).
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Notes for the user about the files.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Every opened file, and its stamp at that time.
    #[must_use]
    pub fn stamps(&self) -> &[(PathBuf, Stamp)] {
        &self.stamps
    }

    /// The whole disk as extents, with adjacent ones of the same kind merged. Holes of the underlying file count as
    /// zero.
    #[must_use]
    pub fn extents(&self) -> Extents<'_> {
        self.extents_in(0..self.size)
    }

    /// As [`VirtualDisk::extents`], for a part of the disk only. The first and the last extent are clipped to the
    /// range; the part of the range beyond the disk is ignored.
    #[must_use]
    pub fn extents_in(&self, range: Range<u64>) -> Extents<'_> {
        Extents {
            disk: self,
            at: range.start,
            end: range.end.min(self.size),
            lookups: u64::MAX,
        }
    }

    /// The run at `guest`, which is below the size.
    fn resolve(&self, guest: u64) -> Result<(u64, Place), ImageError> {
        let mut len = self.size - guest;
        for (layer, l) in self.layers.iter().enumerate() {
            // Beyond the end of a shorter backing file the disk is zero.
            let Some(left) = l
                .mapping
                .virtual_size()
                .checked_sub(guest)
                .filter(|&n| n > 0)
            else {
                break;
            };
            let run = l.mapping.lookup(guest)?;
            len = len.min(left).min(run.len.max(1));
            match run.target {
                Target::Unallocated => {}
                Target::Zero => return Ok((len, Place::Zero)),
                Target::Packed(packed) => return Ok((len, Place::Packed { layer, packed })),
                Target::Data { file, offset } => {
                    let present = &l.files[file].present;
                    let next = present.get(present.partition_point(|r| r.end <= offset));
                    return Ok(match next {
                        Some(r) if r.start <= offset => (
                            len.min(r.end - offset),
                            Place::Data {
                                layer,
                                file,
                                offset,
                            },
                        ),
                        Some(r) => (len.min(r.start - offset), Place::Zero),
                        None => (len, Place::Zero),
                    });
                }
            }
        }
        Ok((len, Place::Hole))
    }

    fn unpacked(&self, layer: usize, packed: Packed) -> Result<Arc<[u8]>, ImageError> {
        let mut grains = self.grains.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = grains
            .iter()
            .position(|(l, p, _)| *l == layer && *p == packed)
        {
            grains[..=i].rotate_right(1);
            return Ok(Arc::clone(&grains[0].2));
        }
        drop(grains);
        let bytes: Arc<[u8]> = self.layers[layer].mapping.unpack(packed)?.into();
        let mut grains = self.grains.lock().unwrap_or_else(PoisonError::into_inner);
        grains.insert(0, (layer, packed, Arc::clone(&bytes)));
        let mut kept = 0;
        grains.retain(|(_, _, b)| {
            let first = kept == 0;
            kept += b.len();
            first || kept <= GRAIN_CACHE_BYTES
        });
        Ok(bytes)
    }

    fn read_run(&self, buf: &mut [u8], guest: u64, place: Place) -> io::Result<()> {
        match place {
            Place::Zero | Place::Hole => buf.fill(0),
            Place::Data {
                layer,
                file,
                offset,
            } => self.layers[layer].files[file]
                .content
                .read_exact_at(buf, offset)?,
            Place::Packed { layer, packed } => {
                let bytes = self.unpacked(layer, packed)?;
                let from = usize::try_from(guest - packed.guest).unwrap_or(usize::MAX);
                // The last grain may hold no more than the disk needs.
                let have = bytes.get(from..).unwrap_or_default();
                let n = have.len().min(buf.len());
                buf[..n].copy_from_slice(&have[..n]);
                buf[n..].fill(0);
            }
        }
        Ok(())
    }
}

impl ReadAt for VirtualDisk {
    fn len(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        let left = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let want = left.min(buf.len());
        while done < want {
            let guest = offset + done as u64;
            let (len, place) = self.resolve(guest)?;
            let n = usize::try_from(len).unwrap_or(usize::MAX).min(want - done);
            self.read_run(&mut buf[done..done + n], guest, place)?;
            done += n;
        }
        Ok(want)
    }
}

impl std::fmt::Debug for VirtualDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualDisk")
            .field("format", &self.format)
            .field("size", &self.size)
            .field("layers", &self.layers.len())
            .finish_non_exhaustive()
    }
}

/// The iterator that [`VirtualDisk::extents`] and [`VirtualDisk::extents_in`] return. Ends after an error.
#[derive(Debug)]
pub struct Extents<'a> {
    disk: &'a VirtualDisk,
    at: u64,
    /// At most the disk's size.
    end: u64,
    /// Lookups that are left.
    lookups: u64,
}

impl Extents<'_> {
    /// Ends early, so that it makes about this many lookups in tables at most (at least one); each file of a chain has
    /// its own. What the next lookups would add to the last extent is missing from it.
    #[must_use]
    pub fn at_most(mut self, lookups: u64) -> Self {
        self.lookups = lookups.max(1);
        self
    }
}

impl Iterator for Extents<'_> {
    type Item = Result<Extent, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        let offset = self.at;
        let mut kind = None;
        while self.at < self.end && self.lookups > 0 {
            self.lookups = self.lookups.saturating_sub(self.disk.layers.len() as u64);
            let (len, place) = match self.disk.resolve(self.at) {
                Ok(run) => run,
                Err(e) => {
                    self.at = self.end;
                    return Some(Err(e));
                }
            };
            let this = match place {
                Place::Data { .. } | Place::Packed { .. } => ExtentKind::Data,
                Place::Zero => ExtentKind::Zero,
                Place::Hole => ExtentKind::Hole,
            };
            if *kind.get_or_insert(this) != this {
                break;
            }
            self.at += len.min(self.end - self.at);
        }
        kind.map(|kind| {
            Ok(Extent {
                offset,
                length: self.at - offset,
                kind,
            })
        })
    }
}
