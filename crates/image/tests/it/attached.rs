//! Data attached to qcow2 files: QEMU sees nothing wrong, whatever of it was written when the power failed, and it is not believed of a
//! disk that was written since, however that was done.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use drover_core::ReadAt;
use drover_image::{
    Change, ImageError, ImageFile, MAX_ATTACHED_BYTES, VirtualDisk, attach, attached, detach,
};

use crate::qemu::{self, Bench};

const MIB: u64 = 1 << 20;
/// What records whether anything was written.
const BITMAP: &str = "since";

fn open(path: &Path) -> Arc<dyn ReadAt> {
    Arc::new(ImageFile::open(path).unwrap())
}

fn found(path: &Path) -> Option<Vec<u8>> {
    attached(&open(path), |_| Some(BITMAP.into())).unwrap()
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

/// Has QEMU record what it writes from now on, anew.
fn record(b: &Bench, name: &str) {
    qemu::try_img(b.dir(), &["bitmap", "--remove", name, BITMAP]).ok();
    qemu::img(b.dir(), &["bitmap", "--add", "-g", "64K", name, BITMAP]);
}

/// Attaches data, or removes it. After each change, and in the middle of each, the file is whole, and has the old data, the new,
/// or none.
fn change_crashing(b: &Bench, name: &str, data: Option<&[u8]>) {
    let path = b.path(name);
    let (before, old, length) = (content(&path), found(&path), path.metadata().unwrap().len());
    let changes = match data {
        Some(data) => attach(&open(&path), data).unwrap(),
        None => detach(&open(&path)).unwrap(),
    };
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
        assert!(now.is_none() || now == old || now.as_deref() == data);
    }
    assert!(seen_none);
    assert_eq!(found(&path).as_deref(), data);
    assert!(content(&path) == before);
    assert_eq!(path.metadata().unwrap().len(), length, "it has grown");
}

fn random(length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    fastrand::Rng::with_seed(length as u64).fill(&mut data);
    data
}

fn contains(path: &Path, data: &[u8]) -> bool {
    let file = fs::read(path).unwrap();
    file.windows(data.len()).any(|window| window == data)
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
        record(&b, "x.qcow2");
        change_crashing(&b, "x.qcow2", Some(&random(50)));
        // In its place.
        change_crashing(&b, "x.qcow2", Some(&random(58)));
        record(&b, "x.qcow2");
        assert_eq!(found(&path), None, "QEMU opened it for writing");
        change_crashing(&b, "x.qcow2", Some(&random(54)));
        // A copy has it, too; reading changes nothing.
        fs::copy(&path, b.path("copy.qcow2")).unwrap();
        qemu::img(b.dir(), &["convert", "-O", "raw", "copy.qcow2", "raw"]);
        assert!(fs::read(b.path("raw")).unwrap() == content(&path));
        assert_eq!(found(&b.path("copy.qcow2")), Some(random(54)));
        b.scribble("x.qcow2", "qcow2", 9 * MIB, 20, seed + 100);
        assert_eq!(found(&path), None, "{options}");
        check(&b, "x.qcow2");
        record(&b, "x.qcow2");
        change_crashing(&b, "x.qcow2", Some(&random(50)));
        change_crashing(&b, "x.qcow2", None);
        assert!(!contains(&path, &random(50)));
        assert_eq!(detach(&open(&path)).unwrap(), []);
        // Nothing is left but what QEMU has in any file.
        b.scribble("x.qcow2", "qcow2", 9 * MIB, 20, seed + 200);
        check(&b, "x.qcow2");
        assert!(!contains(&path, b"drgn"));
    }
}

#[test]
fn a_disk_that_is_grown_has_zeros_behind_its_old_end() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(15);
    qemu::create(b.dir(), "-f qcow2 x.qcow2 9M");
    qemu::io(b.dir(), "x.qcow2", "qcow2", &["write -P 7 0 9M".into()]);
    record(&b, "x.qcow2");
    change_crashing(&b, "x.qcow2", Some(&random(50)));
    let grow = ["resize", "-q", "--preallocation=metadata", "x.qcow2", "+4M"];
    qemu::img(b.dir(), &grow);
    qemu::img(b.dir(), &["convert", "-O", "raw", "x.qcow2", "raw"]);
    let raw = fs::read(b.path("raw")).unwrap();
    assert!(raw[9 << 20..].iter().all(|byte| *byte == 0));
}

#[test]
fn data_of_another_image_or_damaged_is_not_found() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(11);
    qemu::create(b.dir(), "-f qcow2 a.qcow2 9M");
    record(&b, "a.qcow2");
    let path = b.path("a.qcow2");
    let changes = attach(&open(&path), &random(50)).unwrap();
    apply(&path, &changes);
    assert_eq!(found(&path), Some(random(50)));
    let whole = fs::read(&path).unwrap();
    let extension = whole.windows(4).position(|window| window == b"drgn");
    let extension = extension.unwrap() as u64;
    for at in [8, 12, 16, 16 + 49, 16 + 60, 8 + 79].map(|at| extension + at) {
        write(&path, at, &[whole[at as usize] ^ 1]);
        assert_eq!(found(&path), None, "{at}");
        write(&path, at, &whole[at as usize..][..1]);
    }
    assert_eq!(found(&path), Some(random(50)));
    // One more table of the disk, by a program that knows neither the bit nor bitmaps: only that differs.
    let table = u64::from_be_bytes(whole[40..48].try_into().unwrap());
    let cluster = (whole.len() as u64).next_multiple_of(1 << 16);
    write(&path, cluster, &[0; 1 << 16]);
    write(&path, table, &(cluster | 1 << 63).to_be_bytes());
    assert_eq!(found(&path), None, "of other tables");
    write(&path, table, &[0; 8]);
    assert_eq!(found(&path), Some(random(50)));
}

#[test]
fn without_a_bitmap_that_recorded_nothing_it_is_not_believed() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(13);
    qemu::create(b.dir(), "-f qcow2 a.qcow2 9M");
    let path = b.path("a.qcow2");
    let mark = || apply(&path, &attach(&open(&path), &random(50)).unwrap());
    mark();
    assert_eq!(found(&path), None, "there is none");
    record(&b, "a.qcow2");
    mark();
    assert_eq!(found(&path), Some(random(50)));
    let other = attached(&open(&path), |_| Some("other".into()));
    assert_eq!(other.unwrap(), None, "it has another name");
    assert_eq!(attached(&open(&path), |_| None).unwrap(), None);
    let whole = fs::read(&path).unwrap();
    let name = whole
        .windows(BITMAP.len())
        .position(|window| window == BITMAP.as_bytes());
    let entry = name.unwrap() as u64 - 24;
    assert_eq!(whole[entry as usize + 15], 2, "its flags");
    let table = u64::from_be_bytes(whole[entry as usize..][..8].try_into().unwrap());
    for (at, value, what) in [
        (entry + 15, 3, "in use"),
        (entry + 15, 0, "off"),
        (entry + 16, 2, "of another type"),
        (entry + 17, 8, "of a granularity that there is not"),
        (entry + 11, 2, "of a larger disk"),
        (table + 7, 1, "all ones"),
        (table + 5, 1, "some recorded"),
        (
            95,
            0,
            "of a file that a program without bitmaps has written",
        ),
    ] {
        write(&path, at, &[value]);
        assert!(found(&path).is_none(), "{what}");
        write(&path, at, &whole[at as usize..][..1]);
    }
    assert_eq!(found(&path), Some(random(50)));
    for (at, value) in [(entry + 18, 255), (entry + 20, 255), (entry, 127)] {
        write(&path, at, &[value]);
        let damaged = attached(&open(&path), |_| Some(BITMAP.into()));
        assert!(!matches!(damaged, Ok(Some(_))), "{at}");
        write(&path, at, &whole[at as usize..][..1]);
    }
    qemu::img(b.dir(), &["bitmap", "--disable", "a.qcow2", BITMAP]);
    mark();
    assert_eq!(found(&path), None, "it does not record");
}

/// QEMU opens what it reads, and then writes, anew for writing: it clears no bit.
#[test]
fn data_of_a_file_that_is_written_since_it_was_opened_for_reading_is_not_found() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(16);
    qemu::create(b.dir(), "-f qcow2 a.qcow2 16M");
    qemu::io(b.dir(), "a.qcow2", "qcow2", &["write -P 7 0 16M".into()]);
    record(&b, "a.qcow2");
    let path = b.path("a.qcow2");
    apply(&path, &attach(&open(&path), &random(50)).unwrap());
    assert_eq!(found(&path), Some(random(50)));
    // As it is while QEMU has it open, and when QEMU was killed.
    let commands = ["reopen -w", "write -P 8 6M 64k", "abort"];
    let mut killed = Command::new("qemu-io");
    killed.args(["-r", "-f", "qcow2"]).arg(&path);
    killed.args(commands.iter().flat_map(|command| ["-c", command]));
    assert!(!killed.output().unwrap().status.success());
    assert_eq!(content(&path)[6 << 20], 8);
    assert_eq!(fs::read(&path).unwrap()[88] & 4, 4, "the bit is still set");
    assert_eq!(found(&path), None);
}

/// The same of what it commits to.
#[test]
fn data_of_a_file_that_an_overlay_was_committed_to_is_not_found() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(14);
    qemu::create(b.dir(), "-f qcow2 base.qcow2 16M");
    let fill = ["write -P 7 0 16M", "discard 1M 2M"].map(String::from);
    qemu::io(b.dir(), "base.qcow2", "qcow2", &fill);
    record(&b, "base.qcow2");
    let path = b.path("base.qcow2");
    let attach = attach(&open(&path), &random(50)).unwrap();
    apply(&path, &attach);
    assert_eq!(found(&path), Some(random(50)));
    qemu::create(b.dir(), "-f qcow2 -b base.qcow2 -F qcow2 over.qcow2");
    let change = ["write -P 8 4M 1M".to_owned()];
    qemu::io(b.dir(), "over.qcow2", "qcow2", &change);
    assert_eq!(found(&path), Some(random(50)), "it was only read");
    qemu::img(b.dir(), &["commit", "-q", "over.qcow2"]);
    assert_eq!(content(&path)[4 << 20], 8);
    let header = fs::read(&path).unwrap();
    assert_eq!(header[88] & 4, 4, "the bit is still set");
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
        assert_eq!(found(&b.path(name)), None);
    };
    qemu::create(b.dir(), "-f qcow2 -o compat=0.10 old.qcow2 1M");
    refuse("old.qcow2", "compat=1.1");
    qemu::create(b.dir(), "-f qcow2 -b old.qcow2 -F qcow2 over.qcow2");
    refuse("over.qcow2", "in other files");
    qemu::create(b.dir(), "-f qcow2 -o data_file=data data.qcow2 1M");
    refuse("data.qcow2", "in other files");
    qemu::create(b.dir(), "-f qcow2 -o cluster_size=512 small.qcow2 1M");
    refuse("small.qcow2", "no room");
    qemu::create(b.dir(), "-f qcow2 saved.qcow2 1M");
    qemu::img(b.dir(), &["snapshot", "-c", "s", "saved.qcow2"]);
    refuse("saved.qcow2", "snapshot -d");
    qemu::create(b.dir(), "-f qcow2 fine.qcow2 1M");
    assert!(attach(&open(&b.path("fine.qcow2")), &[1; MAX_ATTACHED_BYTES]).is_ok());
    let too_much = attach(&open(&b.path("fine.qcow2")), &[1; MAX_ATTACHED_BYTES + 1]);
    assert!(too_much.is_err());
    qemu::create(b.dir(), "-f raw disk.raw 1M");
    assert!(attach(&open(&b.path("disk.raw")), &[1]).is_err());
    assert!(attached(&open(&b.path("disk.raw")), |_| None).is_err());
    assert!(detach(&open(&b.path("disk.raw"))).is_err());
}
