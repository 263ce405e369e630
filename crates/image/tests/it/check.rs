//! Invariants of every image.

use std::ops::Range;
use std::path::Path;

use drover_core::{Extent, ExtentKind, ReadAt, is_zero};
use drover_image::{
    Conversion, Format, Layout, LayoutLimits, Outgoing, RangeKind, Trust, VirtualDisk,
    open_for_sending, open_for_sending_with,
};

use crate::qemu::{self, Bench};

/// What an image is expected to be.
pub struct Expect {
    pub format: Format,
    /// Whether every block of the disk is in this file, plain, so that the walk must show it.
    pub complete: bool,
}

pub fn plain(format: Format) -> Expect {
    Expect {
        format,
        complete: true,
    }
}

/// For overlays, compressed and external data.
pub fn partial(format: Format) -> Expect {
    Expect {
        format,
        complete: false,
    }
}

/// Checks the image `name`, which QEMU calls a `qemu_format`, in every way there is.
pub fn image(bench: &Bench, name: &str, qemu_format: &str, expect: &Expect) -> Outgoing {
    let path = bench.path(name);
    qemu::img(
        bench.dir(),
        &[
            "convert",
            "-f",
            qemu_format,
            "-O",
            "raw",
            name,
            "oracle.raw",
        ],
    );
    let raw = std::fs::read(bench.path("oracle.raw")).unwrap();
    let disk =
        VirtualDisk::open_with(&path, Trust::Anywhere).unwrap_or_else(|e| panic!("{name}: {e}"));
    same(&all(&disk), &raw, name);
    extents(bench, name, qemu_format, &disk, &raw);

    let out = open_for_sending(&path, Conversion::AsIs).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(out.format, expect.format, "{name}");
    assert_eq!(out.virtual_size, raw.len() as u64, "{name}");
    let file = std::fs::read(&path).unwrap();
    same(&rebuilt(&out), &file, name);
    codec(&out.layout);
    guest_order(&out, &raw, name, expect.complete);

    let opaque = open_for_sending(&path, Conversion::Opaque).unwrap();
    same(&rebuilt(&opaque), &file, name);

    let flat = open_for_sending_with(&path, Conversion::Raw, Trust::Anywhere).unwrap();
    assert_eq!(flat.format, Format::Raw);
    same(&rebuilt(&flat), &raw, name);
    guest_order(&flat, &raw, name, true);

    let made = open_for_sending_with(&path, Conversion::Qcow2, Trust::Anywhere).unwrap();
    assert_eq!(made.format, Format::Qcow2);
    std::fs::write(bench.path("made.qcow2"), rebuilt(&made)).unwrap();
    guest_order(&made, &raw, name, true);
    qemu::img(bench.dir(), &["check", "-f", "qcow2", "made.qcow2"]);
    qemu::img(
        bench.dir(),
        &[
            "compare",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "made.qcow2",
            "oracle.raw",
        ],
    );
    out
}

fn all(content: &dyn ReadAt) -> Vec<u8> {
    let mut bytes = vec![0; content.len() as usize];
    // An odd step, so that reads straddle every boundary.
    for (i, part) in bytes.chunks_mut(700_001).enumerate() {
        content.read_exact_at(part, i as u64 * 700_001).unwrap();
    }
    bytes
}

fn same(have: &[u8], want: &[u8], name: &str) {
    assert_eq!(have.len(), want.len(), "{name}: length");
    if let Some(at) = have.iter().zip(want).position(|(a, b)| a != b) {
        panic!("{name}: differs at {at:#x}");
    }
}

/// The walk as bytes.
fn walk(out: &Outgoing) -> Vec<u8> {
    let mut bytes = vec![0xee; (out.layout.walk_blocks() * 4096) as usize];
    for (i, part) in bytes.chunks_mut(1 << 20).enumerate() {
        out.layout
            .read(&*out.content, (i as u64) << 20, part)
            .unwrap();
    }
    bytes
}

/// The file as a receiver makes it, from the walk alone.
pub fn rebuilt(out: &Outgoing) -> Vec<u8> {
    let walk = walk(out);
    let mut file = vec![0; out.content.len() as usize];
    assert_eq!(out.layout.file_len(), out.content.len());
    let mut covered = 0;
    for p in out.layout.pieces(0, u64::MAX) {
        let bytes = &walk[p.walk as usize..(p.walk + p.len) as usize];
        match p.file {
            Some(at) => {
                file[at as usize..(at + p.len) as usize].copy_from_slice(bytes);
                covered += p.len;
            }
            None => assert!(is_zero(bytes)),
        }
    }
    assert_eq!(covered, out.layout.covered_bytes());
    file
}

/// The walk makes the file at `path` again, and survives being encoded.
pub fn whole(out: &Outgoing, path: &Path) {
    let name = path.display().to_string();
    same(&rebuilt(out), &std::fs::read(path).unwrap(), &name);
    codec(&out.layout);
}

fn codec(layout: &Layout) {
    let bytes = layout.encode();
    assert_eq!(
        &Layout::decode(&bytes, LayoutLimits::default()).unwrap(),
        layout
    );
}

/// The walk's data blocks are blocks of the disk in the disk's order; all that are not zero,
/// if the file is the whole disk.
fn guest_order(out: &Outgoing, raw: &[u8], name: &str, complete: bool) {
    let end = out
        .layout
        .ranges()
        .iter()
        .filter(|r| r.kind == RangeKind::Data)
        .map(|r| r.walk_end())
        .max()
        .unwrap_or(0);
    let walk = walk(out);
    let mut disk = raw.chunks(4096).map(|b| {
        let mut block = [0u8; 4096];
        block[..b.len()].copy_from_slice(b);
        block
    });
    let mut missed = 0;
    for (i, block) in walk[..(end as usize).next_multiple_of(4096)]
        .chunks(4096)
        .enumerate()
        .filter(|(_, b)| !is_zero(b))
    {
        loop {
            let Some(next) = disk.next() else {
                if complete {
                    panic!("{name}: walk block {i} is not in the disk, or out of order");
                }
                return;
            };
            if next == block {
                break;
            }
            missed += usize::from(!is_zero(&next));
        }
    }
    missed += disk.filter(|b| !is_zero(b)).count();
    if complete {
        assert_eq!(missed, 0, "{name}: blocks of the disk are not in the walk");
    }
}

/// Our extents cover the disk; what they leave out is zeros; what they call data is data in
/// QEMU's map too. (The map may have more: QEMU does not look for holes under every cluster.)
fn extents(bench: &Bench, name: &str, format: &str, disk: &VirtualDisk, raw: &[u8]) {
    let mut at = 0;
    let mut data: Vec<Range<u64>> = Vec::new();
    let all: Vec<_> = disk.extents().map(|e| e.unwrap()).collect();
    parts(name, disk, &all);
    for e in all {
        assert_eq!(e.offset, at, "{name}");
        assert!(e.length > 0);
        at = e.end();
        if e.kind == ExtentKind::Data {
            data.push(e.offset..at);
        } else {
            let bytes = &raw[e.offset as usize..at as usize];
            assert!(is_zero(bytes), "{name}: {e:?} is not zero");
        }
    }
    assert_eq!(at, raw.len() as u64, "{name}");
    let json = qemu::img(bench.dir(), &["map", "--output=json", "-f", format, name]);
    let map: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    let mut theirs: Vec<Range<u64>> = Vec::new();
    for e in map {
        let start = e["start"].as_u64().unwrap();
        let end = start + e["length"].as_u64().unwrap();
        if e["data"] == true && e["zero"] == false {
            match theirs.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => theirs.push(start..end),
            }
        }
    }
    for r in &data {
        // Holes of a file are detected by block.
        assert!(
            theirs
                .iter()
                .any(|t| t.start <= r.start + 4096 && r.end <= t.end + 4096),
            "{name}: only we have data at {r:x?}: {theirs:x?}"
        );
    }
}

/// A part's extents are the whole's, cut off at its ends.
fn parts(name: &str, disk: &VirtualDisk, all: &[Extent]) {
    let end = all.last().map_or(0, Extent::end);
    let mut random = fastrand::Rng::with_seed(end);
    for _ in 0..50 {
        let from = random.u64(0..=end);
        let to = random.u64(from..=end + 4096);
        let part: Vec<_> = disk.extents_in(from..to).map(|e| e.unwrap()).collect();
        let expected: Vec<_> = all
            .iter()
            .filter(|e| e.offset < to && e.end() > from)
            .map(|e| Extent {
                offset: e.offset.max(from),
                length: e.end().min(to) - e.offset.max(from),
                kind: e.kind,
            })
            .collect();
        assert_eq!(part, expected, "{name}: {from}..{to}");
        let few = disk.extents_in(from..to).at_most(random.u64(0..20));
        let few: Vec<_> = few.map(|e| e.unwrap()).collect();
        // Only the last may be shorter.
        assert!(few.len() <= part.len() && few.is_empty() == part.is_empty());
        if let Some((last, before)) = few.split_last() {
            let whole = part[before.len()];
            assert_eq!(before, &part[..before.len()], "{name}: {from}..{to}");
            assert!(last.length > 0 && last.length <= whole.length);
            assert_eq!((last.offset, last.kind), (whole.offset, whole.kind));
        }
    }
}

/// Converts by QEMU alone, to make another format of the same disk.
pub fn convert(dir: &Path, args: &[&str]) {
    let mut all = vec!["convert"];
    all.extend_from_slice(args);
    qemu::img(dir, &all);
}

/// Compares parts of a disk that is too large to compare as a whole, and that nothing but they
/// is data.
pub fn windows(
    bench: &Bench,
    name: &str,
    format: &str,
    disk: &VirtualDisk,
    windows: &[Range<u64>],
) {
    for w in windows {
        let (skip, count) = (w.start >> 20, (w.end - w.start) >> 20);
        qemu::img(
            bench.dir(),
            &[
                "dd",
                "-f",
                format,
                "-O",
                "raw",
                "bs=1M",
                &format!("skip={skip}"),
                // qemu-img counts what is skipped too.
                &format!("count={}", skip + count),
                &format!("if={name}"),
                "of=window.raw",
            ],
        );
        let mut bytes = vec![0; (w.end - w.start) as usize];
        disk.read_exact_at(&mut bytes, w.start).unwrap();
        same(
            &bytes,
            &std::fs::read(bench.path("window.raw")).unwrap(),
            name,
        );
    }
    for e in disk.extents() {
        let e = e.unwrap();
        let covered = windows
            .iter()
            .any(|w| w.start <= e.offset && e.end() <= w.end);
        assert!(covered || e.kind != ExtentKind::Data, "{name}: {e:?}");
    }
}
