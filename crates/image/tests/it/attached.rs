//! Data attached to qcow2 files: QEMU sees nothing wrong, whatever of it was written when the power failed.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use drover_core::ReadAt;
use drover_image::{Change, ImageError, ImageFile, VirtualDisk, attach, attached};

use crate::qemu::{self, Bench};

const MIB: u64 = 1 << 20;

fn open(path: &Path) -> Arc<dyn ReadAt> {
    Arc::new(ImageFile::open(path).unwrap())
}

fn found(path: &Path) -> Option<Vec<u8>> {
    attached(&open(path)).unwrap()
}

fn write(path: &Path, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

fn apply(path: &Path, changes: &[Change]) {
    for change in changes {
        if let Change::Write(offset, bytes) = change {
            write(path, *offset, bytes);
        }
    }
}

fn content(path: &Path) -> Vec<u8> {
    let disk = VirtualDisk::open(path).unwrap();
    let mut content = vec![0; usize::try_from(disk.len()).unwrap()];
    disk.read_exact_at(&mut content, 0).unwrap();
    content
}

fn check(b: &Bench, name: &str) {
    qemu::img(b.dir(), &["check", "-q", name]);
}

/// Attaches data. After each change, and in the middle of each, the file is whole, and has the old data, the new, or none.
fn attach_crashing(b: &Bench, name: &str, data: &[u8]) {
    let path = b.path(name);
    let (before, old) = (content(&path), found(&path));
    let changes = attach(&open(&path), data).unwrap();
    assert_eq!(changes.last(), Some(&Change::Sync));
    let mut seen_none = old.is_none();
    for change in &changes {
        if let Change::Write(offset, bytes) = change {
            // A write of eight aligned bytes is never torn.
            if bytes.len() > 8 {
                write(&path, *offset, &bytes[..bytes.len() / 2]);
                check(b, name);
                assert_eq!(found(&path), None, "torn");
            }
            write(&path, *offset, bytes);
        }
        check(b, name);
        let now = found(&path);
        seen_none |= now.is_none();
        assert!(now.is_none() || now == old || now.as_deref() == Some(data));
    }
    assert!(seen_none);
    assert_eq!(found(&path).as_deref(), Some(data));
    assert!(content(&path) == before);
}

fn random(length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    fastrand::Rng::with_seed(length as u64).fill(&mut data);
    data
}

#[test]
fn data_is_attached_found_and_dropped_when_qemu_writes() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [
        (1, "cluster_size=4096"),
        (2, "cluster_size=65536"),
        (3, "cluster_size=2M"),
        (4, "cluster_size=4096,refcount_bits=1"),
        (5, "cluster_size=4096,refcount_bits=64"),
        (6, "cluster_size=16k,extended_l2=on"),
        (7, "preallocation=metadata"),
    ] {
        let b = Bench::new(seed);
        qemu::create(b.dir(), &format!("-f qcow2 -o {options} x.qcow2 9M"));
        b.scribble("x.qcow2", "qcow2", 9 * MIB, 20, seed);
        let path = b.path("x.qcow2");
        assert_eq!(found(&path), None);
        attach_crashing(&b, "x.qcow2", &random(3000));
        // In its place, and in another.
        attach_crashing(&b, "x.qcow2", &random(2000));
        attach_crashing(&b, "x.qcow2", &random(200_000));
        // A copy has it, too; reading changes nothing.
        fs::copy(&path, b.path("copy.qcow2")).unwrap();
        qemu::img(b.dir(), &["convert", "-O", "raw", "copy.qcow2", "raw"]);
        assert!(fs::read(b.path("raw")).unwrap() == content(&path));
        assert_eq!(found(&b.path("copy.qcow2")), Some(random(200_000)));
        // QEMU uses the clusters.
        b.scribble("x.qcow2", "qcow2", 9 * MIB, 20, seed + 100);
        assert_eq!(found(&path), None, "{options}");
        check(&b, "x.qcow2");
        attach_crashing(&b, "x.qcow2", &random(5000));
    }
}

#[test]
fn data_of_another_image_or_damaged_is_not_found() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(11);
    qemu::create(b.dir(), "-f qcow2 a.qcow2 9M");
    b.scribble("a.qcow2", "qcow2", 9 * MIB, 10, 1);
    let path = b.path("a.qcow2");
    let changes = attach(&open(&path), &random(5000)).unwrap();
    apply(&path, &changes);
    assert_eq!(found(&path), Some(random(5000)));
    let places: Vec<u64> = changes
        .iter()
        .filter_map(|change| match change {
            Change::Write(offset, _) => Some(*offset),
            Change::Sync => None,
        })
        .collect();
    let [data, extension, ..] = places[..] else {
        panic!("{places:?}");
    };
    let whole = fs::read(&path).unwrap();
    for at in [data, data + 4999, extension, extension + 12, extension + 23] {
        write(&path, at, &[whole[at as usize] ^ 1]);
        assert_eq!(found(&path), None, "{at}");
        write(&path, at, &whole[at as usize..][..1]);
    }
    // One more table of the disk, written by a program that leaves the bit as it is.
    qemu::io(b.dir(), "a.qcow2", "qcow2", &["write 0 9M".into()]);
    qemu::img(b.dir(), &["snapshot", "-c", "s", "a.qcow2"]);
    qemu::io(b.dir(), "a.qcow2", "qcow2", &["write 0 1M".into()]);
    write(&path, 88, &whole[88..96]);
    assert_eq!(found(&path), None);
    // It is cut off.
    fs::write(&path, &whole[..data as usize + 100]).unwrap();
    assert_eq!(found(&path), None);
}

#[test]
fn what_can_have_none_says_why() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(12);
    let refuse = |name: &str, why: &str| {
        let refused = attach(&open(&b.path(name)), &[1]);
        let Err(ImageError::Unsupported { detail, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert!(detail.contains(why), "{detail}");
        assert!(attached(&open(&b.path(name))).is_ok_and(|found| found.is_none()));
    };
    qemu::create(b.dir(), "-f qcow2 -o compat=0.10 old.qcow2 1M");
    refuse("old.qcow2", "compat=1.1");
    qemu::create(b.dir(), "-f qcow2 -b old.qcow2 -F qcow2 over.qcow2");
    refuse("over.qcow2", "in other files");
    qemu::create(b.dir(), "-f qcow2 -o data_file=data data.qcow2 1M");
    refuse("data.qcow2", "in other files");
    qemu::create(b.dir(), "-f qcow2 -o cluster_size=512 small.qcow2 1M");
    refuse("small.qcow2", "no room");
    qemu::create(b.dir(), "-f raw disk.raw 1M");
    assert!(attach(&open(&b.path("disk.raw")), &[1]).is_err());
    assert!(attached(&open(&b.path("disk.raw"))).is_err());
}
