//! Any bytes as an image: if accepted, it has a layout that covers the file exactly once, and a disk
//! that can be read. The corpus has seeds of every format; the first bytes choose the parser.

use std::collections::BTreeMap;
use std::sync::Arc;

use drover_core::{ReadAt, is_zero};
use drover_image::{Change, Layout, LayoutLimits, MAX_ATTACHED_BYTES, VirtualDisk, parse};
use drover_image::{attach, attached, detach};

const SECTOR: usize = 512;

/// A file made from an input in the way that its last byte says, so that tables and data may
/// lie far apart without the input being large.
pub enum Content {
    /// The bytes, then zeros.
    Padded { bytes: Vec<u8>, len: u64 },
    /// Zeros with some sectors in them.
    Sectors {
        sectors: BTreeMap<u64, Vec<u8>>,
        len: u64,
    },
}

impl Content {
    /// `None` without a byte.
    pub fn new(data: &[u8]) -> Option<Self> {
        let (&mode, bytes) = data.split_last()?;
        if mode == 2 {
            // Each a number and its bytes.
            let record = |r: &[u8]| {
                let number = u32::from_le_bytes(r[..4].try_into().expect("four bytes"));
                (u64::from(number), r[4..].to_vec())
            };
            let sectors = bytes.chunks_exact(4 + SECTOR).map(record).collect();
            return Some(Content::Sectors {
                sectors,
                len: 16 << 20,
            });
        }
        let pad = if mode & 1 == 1 {
            (1 << 30) / (1 + u64::from(mode))
        } else {
            0
        };
        Some(Content::Padded {
            bytes: bytes.to_vec(),
            len: bytes.len() as u64 + pad,
        })
    }
}

impl ReadAt for Content {
    fn len(&self) -> u64 {
        match self {
            Content::Padded { len, .. } | Content::Sectors { len, .. } => *len,
        }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let n = left.min(buf.len());
        buf[..n].fill(0);
        match self {
            Content::Padded { bytes, .. } => {
                bytes.read_at(&mut buf[..n], offset)?;
            }
            Content::Sectors { sectors, .. } => {
                let end = offset + n as u64;
                for (&number, bytes) in sectors.range(offset / SECTOR as u64..) {
                    let at = number * SECTOR as u64;
                    if at >= end {
                        break;
                    }
                    let (from, to) = (at.max(offset), (at + SECTOR as u64).min(end));
                    buf[(from - offset) as usize..(to - offset) as usize]
                        .copy_from_slice(&bytes[(from - at) as usize..(to - at) as usize]);
                }
            }
        }
        Ok(n)
    }
}

/// A file that was changed.
struct Changed(Arc<dyn ReadAt>, Vec<(u64, Vec<u8>)>);

impl ReadAt for Changed {
    fn len(&self) -> u64 {
        let ends = self.1.iter().map(|(at, bytes)| at + bytes.len() as u64);
        ends.fold(self.0.len(), u64::max)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let n = left.min(buf.len());
        buf[..n].fill(0);
        self.0.read_at(&mut buf[..n], offset)?;
        for (at, bytes) in &self.1 {
            let (from, to) = (
                offset.max(*at),
                (offset + n as u64).min(at + bytes.len() as u64),
            );
            if from < to {
                buf[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&bytes[(from - at) as usize..(to - at) as usize]);
            }
        }
        Ok(n)
    }
}

/// What is attached to it, and what becomes of it when something is, or is removed.
fn attaching(file: &Arc<dyn ReadAt>) {
    let found = |file: &Arc<dyn ReadAt>| attached(file, |_| Some("since".into()));
    let Ok(before) = found(file) else {
        return;
    };
    assert!(before.is_none_or(|found| found.len() <= MAX_ATTACHED_BYTES));
    let changed = |changes: Vec<Change>| -> Arc<dyn ReadAt> {
        let write = |change| match change {
            Change::Write(offset, bytes) => Some((offset, bytes)),
            Change::Sync => None,
        };
        let changes = changes.into_iter().filter_map(write).collect();
        Arc::new(Changed(Arc::clone(file), changes))
    };
    if let Ok(changes) = attach(file, b"attached") {
        // Its bitmaps may be damaged, which nobody has looked at before.
        if let Ok(found) = found(&changed(changes)) {
            assert_eq!(found.as_deref(), Some(&b"attached"[..]));
        }
    }
    let changes = detach(file).expect("the same image");
    assert_eq!(found(&changed(changes)).expect("the same image"), None);
}

pub fn run(data: &[u8]) {
    let Some(content) = Content::new(data) else {
        return;
    };
    let len = content.len();
    let file = Arc::new(content);
    attaching(&(file.clone() as Arc<dyn ReadAt>));
    if let Ok(parsed) = parse(file.clone()) {
        let layout = &parsed.layout;
        assert_eq!(layout.covered_bytes(), len);
        Layout::new(len, 1, layout.ranges().to_vec()).expect("a layout is a layout");
        let again = Layout::decode(&layout.encode(), LayoutLimits::default());
        assert_eq!(again.as_ref(), Ok(layout));
        let mut first = [0u8; 5000];
        layout
            .read(&*file, 0, &mut first)
            .expect("the walk can be read");
    }
    if let Ok(disk) = VirtualDisk::from_content(file) {
        let mut buf = vec![0u8; 70_000];
        let mut at = 0;
        for extent in disk.extents().take(200) {
            let Ok(extent) = extent else { break };
            assert_eq!(extent.offset, at);
            assert!(extent.length > 0);
            at = extent.end();
            let n = extent.length.min(buf.len() as u64) as usize;
            if disk.read_exact_at(&mut buf[..n], extent.offset).is_ok() {
                let data = extent.kind == drover_core::ExtentKind::Data;
                assert!(data || is_zero(&buf[..n]));
            }
        }
        assert!(at <= disk.len());
    }
}
