//! Layouts of real images: how small they are, and that containers walk alike.

use std::io;
use std::sync::Arc;

use drover_core::ReadAt;
use drover_image::{Conversion, Layout, LayoutLimits, Order, RangeKind, open_for_sending, parse};

use crate::qemu::{self, Bench};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 65536;

/// Writes whole clusters in this order through QEMU, in one call.
fn in_order(b: &Bench, clusters: impl Iterator<Item = u64>) -> drover_image::Layout {
    qemu::create(b.dir(), "-f qcow2 x.qcow2 1G");
    let commands: Vec<String> = clusters
        .map(|c| format!("write -q -P 1 {} {CLUSTER}", c * CLUSTER))
        .collect();
    qemu::io(b.dir(), "x.qcow2", "qcow2", &commands);
    open_for_sending(&b.path("x.qcow2"), Conversion::AsIs)
        .unwrap()
        .layout
}

fn report(name: &str, layout: &drover_image::Layout) {
    eprintln!(
        "{name}: {} ranges, {} bytes encoded, {:.1} times smaller than its grain table",
        layout.ranges().len(),
        layout.encode().len(),
        layout.compression_ratio()
    );
}

#[test]
fn grain_tables_shrink() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(300);
    let n = 600u64;
    let forward = in_order(&b, 0..n);
    report("sequential", &forward);
    assert!(forward.compression_ratio() > 50.0);

    // L2 tables and refcount blocks lie between data that was written backwards too.
    let reverse = in_order(&b, (0..n).rev());
    report("reverse", &reverse);
    assert!(reverse.compression_ratio() > 50.0);
    assert!(
        reverse
            .ranges()
            .iter()
            .any(|r| r.order == Order::Reverse && r.count > 400)
    );

    let mut rng = fastrand::Rng::with_seed(301);
    let mut files: Vec<u64> = (0..n).step_by(50).collect();
    rng.shuffle(&mut files);
    let chunks = in_order(&b, files.into_iter().flat_map(|f| f..f + 50));
    report("files of 3 MiB in random order", &chunks);
    assert!(chunks.compression_ratio() > 25.0);

    let mut all: Vec<u64> = (0..n).collect();
    rng.shuffle(&mut all);
    let random = in_order(&b, all.into_iter());
    report("random clusters", &random);
    assert!(random.compression_ratio() > 2.0);
}

#[test]
fn every_container_of_one_disk_walks_the_same_blocks() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(310);
    qemu::create(b.dir(), "-f raw x.raw 24M");
    b.scribble_with("x.raw", "raw", 24 * MIB, 30, 310, false);
    let mut walks = Vec::new();
    for (name, format, options) in [
        ("x.raw", "raw", ""),
        ("x.qcow2", "qcow2", ""),
        ("s.qcow2", "qcow2", "cluster_size=512"),
        ("x.vmdk", "vmdk", ""),
        ("x.vhdx", "vhdx", ""),
        ("x.vdi", "vdi", ""),
        ("x.vhd", "vpc", "force_size=on"),
    ] {
        if format != "raw" {
            let mut args = vec!["convert", "-O", format];
            if !options.is_empty() {
                args.extend(["-o", options]);
            }
            args.extend(["x.raw", name]);
            qemu::img(b.dir(), &args);
        }
        let out = open_for_sending(&b.path(name), Conversion::AsIs).unwrap();
        let data = out
            .layout
            .ranges()
            .iter()
            .filter(|r| r.kind == RangeKind::Data)
            .map(|r| r.walk_end())
            .max()
            .unwrap();
        let mut walk = vec![0; data.next_multiple_of(4096) as usize];
        out.layout.read(&*out.content, 0, &mut walk).unwrap();
        let blocks: Vec<Vec<u8>> = walk
            .chunks(4096)
            .filter(|c| !drover_core::is_zero(c))
            .map(<[u8]>::to_vec)
            .collect();
        walks.push((name, blocks));
    }
    let (_, first) = &walks[0];
    assert!(first.len() > 500);
    for (name, blocks) in &walks {
        assert!(blocks == first, "{name}: {} blocks", blocks.len());
    }
}

/// A vdi of tiny blocks that lie in the file in the order of a permutation; all else is zeros.
struct Shuffled {
    tables: Vec<u8>,
    len: u64,
}

impl Shuffled {
    fn new(blocks: u32) -> Self {
        let mut tables = vec![0u8; 512 + 4 * blocks as usize];
        let mut put = |at: usize, v: u32| tables[at..at + 4].copy_from_slice(&v.to_le_bytes());
        let data = (512 + 4 * blocks).next_multiple_of(4096);
        put(0x40, 0xbeda_107f);
        put(0x44, 0x0001_0001);
        put(0x4c, 1);
        put(0x154, 512);
        put(0x158, data);
        put(0x170, blocks * 512);
        put(0x178, 512);
        put(0x180, blocks);
        let mut order: Vec<u32> = (0..blocks).collect();
        fastrand::Rng::with_seed(5).shuffle(&mut order);
        for (i, n) in order.into_iter().enumerate() {
            put(512 + 4 * i, n);
        }
        Shuffled {
            tables,
            len: u64::from(data) + 512 * u64::from(blocks),
        }
    }
}

impl ReadAt for Shuffled {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let n = buf.len().min((self.len - offset) as usize);
        buf[..n].fill(0);
        self.tables.read_at(&mut buf[..n], offset)?;
        Ok(n)
    }
}

#[test]
fn the_worst_fragmentation_stays_within_bounds() {
    // About as many ranges as are allowed, none longer than a sector.
    let parsed = parse(Arc::new(Shuffled::new(1_000_000))).unwrap();
    let ranges = parsed.layout.ranges().len();
    assert!(ranges > 990_000, "{ranges}");
    let bytes = parsed.layout.encode();
    assert!(bytes.len() < 6 << 20, "{}", bytes.len());
    assert_eq!(
        Layout::decode(&bytes, LayoutLimits::default()).unwrap(),
        parsed.layout
    );
    // Beyond, the file's own order will do.
    let parsed = parse(Arc::new(Shuffled::new(1_100_000))).unwrap();
    assert_eq!(parsed.layout.ranges().len(), 1);
    assert!(parsed.layout.is_identity());
    assert!(
        parsed.notes.iter().any(|n| n.contains("fragmented")),
        "{:?}",
        parsed.notes
    );
}

#[test]
fn a_luks_volume_is_raw_bytes_with_a_note() {
    let mut bytes = vec![9u8; 8192];
    bytes[..6].copy_from_slice(b"LUKS\xba\xbe");
    let parsed = parse(Arc::new(bytes)).unwrap();
    assert_eq!(parsed.format, drover_image::Format::Raw);
    assert!(parsed.layout.is_identity());
    assert!(parsed.notes[0].contains("LUKS"), "{:?}", parsed.notes);
}
