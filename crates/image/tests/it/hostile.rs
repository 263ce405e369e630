//! Malicious images: each yields a clear error, or a layout that still covers the file exactly once.

use std::path::Path;

use drover_core::ReadAt;
use drover_image::{
    Conversion, Format, ImageError, Known, Stamp, Trust, VirtualDisk, named_files,
    open_for_sending, open_for_sending_with, parts,
};

use crate::check;
use crate::qemu::{self, Bench};

const MIB: u64 = 1 << 20;

/// A small image of each format with some data: file name and where its tables end, about.
fn small_images(b: &Bench) -> Vec<(&'static str, usize)> {
    let made = [
        ("a.qcow2", "qcow2", "cluster_size=4k", 20 << 10),
        (
            "b.qcow2",
            "qcow2",
            "cluster_size=16k,extended_l2=on",
            80 << 10,
        ),
        ("c.vmdk", "vmdk", "subformat=monolithicSparse", 24 << 10),
        ("d.vdi", "vdi", "", 2048),
        ("e.vhd", "vpc", "subformat=dynamic,force_size=on", 4096),
        ("f.vhdx", "vhdx", "block_size=1M,log_size=1M", 4 << 20),
    ];
    made.map(|(name, format, options, tables)| {
        let mut args = vec!["create", "-q", "-f", format];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        args.extend([name, "4M"]);
        qemu::img(b.dir(), &args);
        b.scribble_with(name, format, 4 * MIB, 12, 7, false);
        (name, tables)
    })
    .to_vec()
}

/// Opening must end, in an error that names the file or in a layout that is whole.
fn survives(path: &Path) -> Result<(), ImageError> {
    let as_is = open_for_sending(path, Conversion::AsIs);
    let result = match &as_is {
        Ok(out) => {
            check::whole(out, path);
            Ok(())
        }
        Err(e) => {
            let text = e.to_string();
            let name = path.file_name().unwrap().to_string_lossy();
            assert!(text.contains(&*name), "{text}");
            assert!(!text.contains('\n'), "{text}");
            assert!(!text.contains("--"), "names an option: {text}");
            Err(())
        }
    };
    if let Ok(disk) = VirtualDisk::open(path) {
        let mut buf = vec![0u8; 1 << 20];
        let n = buf.len().min(disk.len() as usize);
        // May fail, must not panic.
        let _ = disk.read_exact_at(&mut buf[..n], 0);
        for extent in disk.extents().take(1000) {
            if extent.is_err() {
                break;
            }
        }
    }
    match result {
        Ok(()) => Ok(()),
        Err(()) => {
            let opaque = open_for_sending(path, Conversion::Opaque).unwrap();
            check::whole(&opaque, path);
            Err(as_is.unwrap_err())
        }
    }
}

#[test]
fn truncated_images() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(200);
    for (name, tables) in small_images(&b) {
        let whole = std::fs::read(b.path(name)).unwrap();
        let cut = b.path("cut");
        let mut refused = 0;
        let ends = [0, 1, 100, 511, 512, 1024, 4096, 65536, tables]
            .into_iter()
            .chain((1..8).map(|i| whole.len() * i / 8))
            .chain([whole.len() - 1]);
        for end in ends.map(|e| e.min(whole.len())) {
            std::fs::write(&cut, &whole[..end]).unwrap();
            refused += usize::from(survives(&cut).is_err());
        }
        assert!(refused >= 3, "{name}: {refused}");
    }
}

#[test]
fn flipped_bytes() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(210);
    for (i, (name, tables)) in small_images(&b).into_iter().enumerate() {
        let mut rng = fastrand::Rng::with_seed(211 + i as u64);
        let mut bytes = std::fs::read(b.path(name)).unwrap();
        let path = b.path("flipped");
        // Where there is something to flip: most of a table region is zeros.
        let busy: Vec<usize> = (0..bytes.len().min(tables))
            .filter(|&at| at < 512 || bytes[at] != 0)
            .collect();
        let mut refused = 0;
        for _ in 0..30 {
            let undo: Vec<(usize, u8)> = (0..rng.usize(1..4))
                .map(|_| {
                    let at = busy[rng.usize(..busy.len())];
                    (at, bytes[at])
                })
                .collect();
            for (at, _) in &undo {
                bytes[*at] = match rng.u8(..3) {
                    0 => 0xff,
                    1 => 0,
                    _ => rng.u8(..),
                };
            }
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(survives(&path).is_err());
            for (at, was) in undo.into_iter().rev() {
                bytes[at] = was;
            }
        }
        assert!(refused > 0, "{name}");
    }
}

/// Applies patches to a copy of a qcow2 image and expects an error with these words.
fn patched(b: &Bench, patches: &[(usize, Vec<u8>)], words: &str) {
    let mut bytes = std::fs::read(b.path("good.qcow2")).unwrap();
    for (at, new) in patches {
        bytes[*at..at + new.len()].copy_from_slice(new);
    }
    std::fs::write(b.path("bad.qcow2"), bytes).unwrap();
    let e = survives(&b.path("bad.qcow2")).expect_err(words);
    let text = e.to_string();
    assert!(
        text.contains(words) && text.contains("bad.qcow2") && e.opaque_helps(),
        "{words:?} is not in: {text}"
    );
}

#[test]
fn qcow2_tables_that_lie() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(220);
    qemu::create(b.dir(), "-f qcow2 -o cluster_size=4k good.qcow2 8M");
    b.write("good.qcow2", "qcow2", 0, 65536);
    b.write("good.qcow2", "qcow2", 4 * MIB, 65536);
    let bytes = std::fs::read(b.path("good.qcow2")).unwrap();
    let be = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let offset = |at: usize| (be(at) & 0x00ff_ffff_ffff_fe00) as usize;
    let l1 = be(40) as usize;
    let l2 = offset(l1);
    let (first, copied) = (be(l2), 1u64 << 63);
    let word = |v: u64| v.to_be_bytes().to_vec();
    let half = |v: u32| v.to_be_bytes().to_vec();
    let refcounts = be(48) as usize;

    patched(&b, &[(l2 + 8, word(first))], "share the file's bytes");
    patched(&b, &[(l2 + 8, word(l1 as u64 | copied))], "L1 table");
    patched(&b, &[(l2 + 8, word(l2 as u64 | copied))], "L2 table");
    patched(
        &b,
        &[(l2 + 8, word((4096 * 9999) | copied))],
        "past the end",
    );
    patched(&b, &[(l2 + 8, word(first + 512))], "not aligned");
    patched(&b, &[(l2 + 8, word((1 << 62) | (1 << 50)))], "past the end");
    let second = l1 + 2 * 8;
    patched(
        &b,
        &[(second, word(l2 as u64 | copied))],
        "overlaps the L2 table",
    );
    patched(
        &b,
        &[(second, word(l1 as u64 | copied))],
        "overlaps the L1 table",
    );
    patched(
        &b,
        &[(second, word(copied | (4096 * 99_999)))],
        "past the end",
    );
    patched(
        &b,
        &[(second, word(copied | (l2 as u64 + 512)))],
        "not aligned",
    );
    patched(&b, &[(refcounts, word(l2 as u64))], "overlaps");
    patched(&b, &[(refcounts, word(4096 * 99_999))], "refcount");
    patched(&b, &[(20, half(63))], "cluster size");
    patched(&b, &[(20, half(8))], "cluster size");
    patched(&b, &[(24, word(u64::MAX))], "L1 table");
    patched(&b, &[(36, half(0))], "L1 table");
    patched(&b, &[(36, half(u32::MAX))], "L1 table");
    patched(&b, &[(40, word(!4095))], "L1 table");
    patched(&b, &[(40, word(4096 * 3 + 8))], "L1 table");
    patched(&b, &[(56, half(u32::MAX))], "refcount table");
    patched(&b, &[(60, half(u32::MAX))], "snapshot table");
    patched(&b, &[(60, half(7)), (64, word(l2 as u64))], "snapshot");
    patched(
        &b,
        &[(8, word(200)), (16, half(u32::MAX))],
        "backing file name",
    );
    patched(
        &b,
        &[(8, word(u64::MAX)), (16, half(3))],
        "backing file name",
    );
    patched(&b, &[(72, word(1 << 40))], "unknown features");
    patched(&b, &[(72, word(2))], "corrupt");
    patched(&b, &[(100, half(50))], "header length");
    patched(
        &b,
        &[(104 + 8, half(0x1234)), (104 + 12, half(u32::MAX))],
        "extension",
    );
    patched(&b, &[(4, half(9))], "version");
    patched(&b, &[(32, half(7))], "encryption");
}

#[test]
fn names_that_lead_out_of_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("in")).unwrap();
    std::fs::write(dir.path().join("secret"), vec![7; 1024]).unwrap();
    let path = dir.path().join("in/x.vmdk");
    for name in ["../secret", "/etc/passwd", "nbd://host/x", "a/../../secret"] {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\nRW 2 FLAT \"{name}\" 0\n"
        );
        std::fs::write(&path, text).unwrap();
        for conversion in [Conversion::Raw, Conversion::Qcow2] {
            // Trust is about what is behind an image, not about its own parts.
            let e = open_for_sending_with(&path, conversion, Trust::Anywhere).unwrap_err();
            assert!(e.to_string().contains(name), "{e}");
        }
        let e = parts(&path).unwrap_err();
        assert!(e.to_string().contains(name), "{e}");
        assert_eq!(named_files(&path).unwrap(), [name]);
        // The descriptor by itself does no harm.
        open_for_sending(&path, Conversion::AsIs).unwrap();
    }
    // A newline cannot smuggle in a second name; a quote ends the first.
    std::fs::write(
        &path,
        "# Disk DescriptorFile\nRW 2 FLAT \"a\n../secret\" 0\n",
    )
    .unwrap();
    assert!(open_for_sending(&path, Conversion::AsIs).is_err());
}

/// Files of the user that an image from elsewhere names are no parts of it.
#[test]
fn what_does_not_look_like_a_part_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
    std::fs::create_dir_all(inside.join(".ssh")).unwrap();
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(inside.join(".ssh/id_rsa"), vec![b'k'; 2602]).unwrap();
    std::fs::write(inside.join("disk.raw"), vec![7; 4096]).unwrap();
    std::fs::write(outside.join("disk.raw"), vec![7; 4096]).unwrap();
    let link = |to: &std::path::Path, name: &str| {
        std::os::unix::fs::symlink(to, inside.join(name)).unwrap();
    };
    link(&outside.join("disk.raw"), "link.raw");
    link(&outside, "way");
    link("disk.raw".as_ref(), "within.raw");
    let path = inside.join("x.vmdk");
    for (extents, fits) in [
        ("RW 8 FLAT \"disk.raw\" 0", true),
        ("RW 8 FLAT \"within.raw\" 0", true),
        ("RW 4 FLAT \"disk.raw\" 0\nRW 4 FLAT \"disk.raw\" 4", true),
        ("RW 4 FLAT \"disk.raw\" 0", false),
        ("RW 9 FLAT \"disk.raw\" 0", false),
        ("RW 8 FLAT \"disk.raw\" 1", false),
        ("RW 8 SPARSE \"disk.raw\"", false),
        ("RW 5 FLAT \".ssh/id_rsa\" 0", false),
        ("RW 6 FLAT \".ssh/id_rsa\" 0", false),
        ("RW 8 FLAT \"link.raw\" 0", false),
        ("RW 8 FLAT \"way/disk.raw\" 0", false),
    ] {
        let text = format!("# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\n{extents}\n");
        std::fs::write(&path, text).unwrap();
        let found = parts(&path);
        assert_eq!(found.is_ok(), fits, "{extents}: {found:?}");
        // Nor does a conversion read what is behind a link.
        let read = open_for_sending(&path, Conversion::Raw);
        let leads_out = extents.contains("link.raw") || extents.contains("way/");
        assert!(read.is_err() || !leads_out, "{extents}");
    }
    if !qemu::available() {
        return;
    }
    for (backing, format, fits) in [
        ("disk.raw", "raw", true),
        (".ssh/id_rsa", "raw", false),
        ("link.raw", "raw", false),
    ] {
        let _ = std::fs::remove_file(inside.join("x.qcow2"));
        qemu::create(&inside, "-f qcow2 x.qcow2 1M");
        let rebase = ["rebase", "-u", "-b", backing, "-F", format, "x.qcow2"];
        qemu::img(&inside, &rebase);
        let found = parts(&inside.join("x.qcow2"));
        assert_eq!(found.is_ok(), fits, "{backing}: {found:?}");
    }
}

/// A data file is as long as its disk: any other file of whole sectors is none.
#[test]
fn a_data_file_has_the_size_of_its_disk() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(26);
    for (raw, len, fits) in [
        ("on", MIB + 512, true),
        // QEMU makes it of whole clusters.
        ("on", MIB + 65_536, true),
        ("on", MIB, false),
        ("on", MIB + 65_536 + 512, false),
        ("off", 4096, true),
        ("off", MIB + 65_536, true),
        ("off", MIB + 65_536 + 512, false),
        ("off", 2602, false),
    ] {
        let options = format!("data_file=d.raw,data_file_raw={raw}");
        let size = MIB + 512;
        qemu::create(b.dir(), &format!("-f qcow2 -o {options} x.qcow2 {size}"));
        std::fs::write(b.path("d.raw"), vec![7; len as usize]).unwrap();
        let found = parts(&b.path("x.qcow2"));
        assert_eq!(found.is_ok(), fits, "{raw} {len}: {found:?}");
    }
}

/// The images of a site: those in `in` came from elsewhere, and `base.qcow2` is the only known one.
struct Site;

impl Known for Site {
    fn is_foreign(&self, image: &Path) -> bool {
        image.parent().is_some_and(|dir| dir.ends_with("in"))
    }
    fn part(&self, path: &Path) -> Result<Option<Stamp>, String> {
        match path.ends_with("in/base.qcow2") {
            true => Ok(Stamp::of_path(path).ok()),
            false => Err("is not known".into()),
        }
    }
}

/// The rules of an image from elsewhere hold for its own names, also behind an image of the user.
#[test]
fn an_image_from_elsewhere_is_read_only_from_what_is_known() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(245);
    for dir in ["in", "own"] {
        std::fs::create_dir(b.path(dir)).unwrap();
        std::fs::write(b.path(&format!("{dir}/secret.raw")), vec![7; 4096]).unwrap();
    }
    let overlay = |image: &str, format: &str, behind: &str| {
        qemu::create(
            b.dir(),
            &format!("-u -f qcow2 -F {format} -b {behind} {image} 1M"),
        );
    };
    let open = |image: &str| VirtualDisk::open_known(&b.path(image), &Site).map(drop);
    std::os::unix::fs::symlink("../in/base.qcow2", b.path("own/link.qcow2")).unwrap();
    std::os::unix::fs::symlink("base.qcow2", b.path("in/link.qcow2")).unwrap();
    overlay("own/top.qcow2", "raw", "secret.raw");
    open("own/top.qcow2").unwrap();
    qemu::create(b.dir(), "-f qcow2 in/base.qcow2 1M");
    for (image, behind, fits) in [
        ("in/top.qcow2", "base.qcow2", true),
        ("in/top.qcow2", "link.qcow2", false),
        ("in/top.qcow2", "./base.qcow2", false),
        ("in/top.qcow2", "../in/base.qcow2", false),
        ("own/top.qcow2", "link.qcow2", true),
    ] {
        overlay(image, "qcow2", behind);
        let opened = open(image);
        assert_eq!(opened.is_ok(), fits, "{image}, {behind}: {opened:?}");
    }
    overlay("in/base.qcow2", "raw", "secret.raw");
    for image in ["in/base.qcow2", "in/top.qcow2"] {
        overlay("in/top.qcow2", "qcow2", "base.qcow2");
        let e = open(image).unwrap_err().to_string();
        assert!(
            e.contains("secret.raw") && e.contains("is not known"),
            "{e}"
        );
    }
}

#[test]
fn a_vhdx_log_that_was_not_replayed_is_refused() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(230);
    qemu::create(b.dir(), "-f vhdx -o log_size=1M x.vhdx 4M");
    b.write("x.vhdx", "vhdx", 0, 65536);
    let good = std::fs::read(b.path("x.vhdx")).unwrap();
    open_for_sending(&b.path("x.vhdx"), Conversion::AsIs).unwrap();
    let mut bad = good.clone();
    let log = u64::from_le_bytes(good[65536 + 72..65536 + 80].try_into().unwrap()) as usize;
    for header in [65536, 131_072] {
        bad[header + 48..header + 64].fill(0x5a);
        bad[header + 4..header + 8].fill(0);
        let crc = crc_fast::checksum(
            crc_fast::CrcAlgorithm::Crc32Iscsi,
            &bad[header..header + 4096],
        ) as u32;
        bad[header + 4..header + 8].copy_from_slice(&crc.to_le_bytes());
    }
    // Named, but empty: nothing to replay.
    bad[log..log + 4096].fill(0);
    bad[log + 4096..log + (1 << 20)].fill(0);
    std::fs::write(b.path("x.vhdx"), &bad).unwrap();
    open_for_sending(&b.path("x.vhdx"), Conversion::AsIs).unwrap();
    bad[log + 8192..log + 8196].copy_from_slice(b"loge");
    bad[log + 8192 + 32..log + 8192 + 48].fill(0x5a);
    std::fs::write(b.path("x.vhdx"), &bad).unwrap();
    let e = survives(&b.path("x.vhdx")).unwrap_err();
    assert!(
        e.to_string().contains("log must be replayed") && e.opaque_helps(),
        "{e}"
    );
    // One header of two is enough; none is not.
    let mut bad = good;
    bad[65536] = 0;
    std::fs::write(b.path("x.vhdx"), &bad).unwrap();
    open_for_sending(&b.path("x.vhdx"), Conversion::AsIs).unwrap();
    bad[131_072] = 0;
    std::fs::write(b.path("x.vhdx"), &bad).unwrap();
    let e = survives(&b.path("x.vhdx")).unwrap_err().to_string();
    assert!(e.contains("header"), "{e}");
}

#[test]
fn a_raw_disk_with_another_format_inside_stays_raw_where_the_image_says_so() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(240);
    let mut disk = vec![0u8; 1 << 20];
    let end = disk.len() - 512;
    disk[end..end + 8].copy_from_slice(b"conectix");
    std::fs::write(b.path("disk"), &disk).unwrap();
    let out = open_for_sending(&b.path("disk"), Conversion::AsIs).unwrap();
    assert_eq!(out.format, Format::Raw, "a cookie is no footer");

    // What a guest can do to the raw disk behind an overlay.
    let mut header = vec![0u8; 512];
    header[..4].copy_from_slice(b"QFI\xfb");
    disk[..512].copy_from_slice(&header);
    std::fs::write(b.path("disk"), &disk).unwrap();
    qemu::create(b.dir(), "-f qcow2 -b disk -F raw over.qcow2 1M");
    let disk_view = VirtualDisk::open(&b.path("over.qcow2")).unwrap();
    let mut bytes = vec![0u8; disk.len()];
    disk_view.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == disk);
}

#[test]
fn enormous_disks_travel_in_file_order_and_are_not_converted() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(250);
    qemu::create(b.dir(), "-f qcow2 -o cluster_size=2M x.qcow2 20T");
    let out = open_for_sending(&b.path("x.qcow2"), Conversion::AsIs).unwrap();
    assert!(
        out.notes.iter().any(|n| n.contains("file order")),
        "{:?}",
        out.notes
    );
    let e = open_for_sending(&b.path("x.qcow2"), Conversion::Raw).unwrap_err();
    assert!(e.to_string().contains("limit"), "{e}");
    qemu::create(b.dir(), "-f qcow2 y.qcow2 16T");
    b.write("y.qcow2", "qcow2", 15 << 40, 65536);
    let out = open_for_sending(&b.path("y.qcow2"), Conversion::AsIs).unwrap();
    assert!(out.notes.is_empty(), "{:?}", out.notes);
    let out = open_for_sending(&b.path("y.qcow2"), Conversion::Qcow2).unwrap();
    assert!(out.content.len() < 1 << 20);
}
