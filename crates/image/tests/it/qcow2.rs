//! qcow2 in all its variants.

use drover_image::{
    Conversion, Format, ImageError, RangeKind, Trust, VirtualDisk, named_files, open_for_sending,
    parts,
};

use crate::check::{self, partial, plain};
use crate::qemu::{self, Bench};

const MIB: u64 = 1 << 20;

/// Makes, scribbles on and checks a qcow2 image with these `-o` options.
fn variant(options: &str, size: u64, writes: usize, seed: u64) {
    let b = Bench::new(seed);
    qemu::create(b.dir(), &format!("-f qcow2 -o {options} x.qcow2 {size}"));
    check::image(&b, "x.qcow2", "qcow2", &plain(Format::Qcow2));
    b.scribble("x.qcow2", "qcow2", size, writes, seed);
    check::image(&b, "x.qcow2", "qcow2", &plain(Format::Qcow2));
}

#[test]
fn every_cluster_size_of_both_versions() {
    if !qemu::available() {
        return;
    }
    for (i, cluster) in [512u64, 1024, 4096, 65536, 2 * MIB].into_iter().enumerate() {
        for compat in ["0.10", "1.1"] {
            let options = format!("compat={compat},cluster_size={cluster}");
            variant(&options, 9 * MIB + 512 * 7, 40, i as u64);
        }
    }
}

#[test]
fn subclusters() {
    if !qemu::available() {
        return;
    }
    for (seed, cluster) in [(20, "16k"), (21, "64k"), (22, "2M")] {
        let options = format!("extended_l2=on,cluster_size={cluster}");
        variant(&options, 12 * MIB + 1024, 60, seed);
    }
}

#[test]
fn preallocation_and_refcount_widths() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [
        (30, "preallocation=metadata"),
        (31, "preallocation=falloc"),
        (32, "preallocation=full"),
        (33, "preallocation=metadata,extended_l2=on"),
        (34, "refcount_bits=1"),
        (35, "refcount_bits=64,lazy_refcounts=on"),
    ] {
        variant(options, 8 * MIB, 30, seed);
    }
}

#[test]
fn compressed_by_either_method() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [
        (40, "compression_type=zlib"),
        (41, "compression_type=zstd"),
        (42, "compression_type=zlib,cluster_size=4k"),
        (43, "compression_type=zstd,cluster_size=2M"),
        (44, "compression_type=zlib,extended_l2=on"),
        (45, "compat=0.10"),
    ] {
        let b = Bench::new(seed);
        qemu::create(b.dir(), "-f raw src.raw 12M");
        // What is random does not shrink and stays plain; text does.
        b.scribble_with("src.raw", "raw", 12 * MIB, 20, seed, false);
        let text: String = (0..200_000).map(|i| format!("line {i}\n")).collect();
        let mut raw = std::fs::read(b.path("src.raw")).unwrap();
        raw[3 << 20..(3 << 20) + text.len()].copy_from_slice(text.as_bytes());
        std::fs::write(b.path("src.raw"), raw).unwrap();
        check::convert(
            b.dir(),
            &["-c", "-O", "qcow2", "-o", options, "src.raw", "c.qcow2"],
        );
        let out = check::image(&b, "c.qcow2", "qcow2", &partial(Format::Qcow2));
        assert!(
            out.notes
                .iter()
                .any(|n| n.contains("compressed") && n.contains("conversion to raw or qcow2")),
            "{:?}",
            out.notes
        );
        // Written to afterwards: plain clusters between compressed ones.
        b.scribble("c.qcow2", "qcow2", 12 * MIB, 10, seed + 1);
        check::image(&b, "c.qcow2", "qcow2", &partial(Format::Qcow2));
    }
}

#[test]
fn chains_of_backing_files() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(50);
    qemu::create(b.dir(), "-f raw a.raw 5M");
    b.scribble("a.raw", "raw", 5 * MIB, 20, 51);
    for (name, behind, format, options, size) in [
        ("b.qcow2", "a.raw", "raw", "cluster_size=64k", "8M"),
        (
            "c.qcow2",
            "b.qcow2",
            "qcow2",
            "cluster_size=4k,compat=0.10",
            "7M",
        ),
        ("d.qcow2", "c.qcow2", "qcow2", "extended_l2=on", "9M"),
    ] {
        qemu::create(
            b.dir(),
            &format!("-f qcow2 -b {behind} -F {format} -o {options} {name} {size}"),
        );
        b.scribble(name, "qcow2", 5 * MIB, 20, 52);
        check::image(&b, name, "qcow2", &partial(Format::Qcow2));
        assert_eq!(named_files(&b.path(name)).unwrap(), [behind]);
    }
    let disk = VirtualDisk::open(&b.path("d.qcow2")).unwrap();
    assert_eq!(disk.stamps().len(), 4);
    // Each before the one that names it.
    let found = parts(&b.path("d.qcow2")).unwrap();
    let paths: Vec<_> = found.iter().map(|part| part.path.clone()).collect();
    let expected = ["a.raw", "b.qcow2", "c.qcow2"].map(|name| b.path(name));
    assert_eq!(paths, expected);
}

#[test]
fn a_backing_file_elsewhere_is_followed_only_with_trust() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(55);
    std::fs::create_dir(b.path("base")).unwrap();
    std::fs::create_dir(b.path("vm")).unwrap();
    qemu::create(b.dir(), "-f raw base/a.raw 2M");
    b.scribble("base/a.raw", "raw", 2 * MIB, 5, 56);
    qemu::create(b.dir(), "-f qcow2 -b ../base/a.raw -F raw vm/x.qcow2");
    let path = b.path("vm/x.qcow2");
    let refused = open_for_sending(&path, Conversion::Raw).unwrap_err();
    assert!(refused.to_string().contains("x.qcow2"), "{refused}");
    assert!(refused.to_string().contains("../base/a.raw"), "{refused}");
    VirtualDisk::open_with(&path, Trust::Anywhere).unwrap();
    // The file itself can be sent without looking behind it.
    open_for_sending(&path, Conversion::AsIs).unwrap();
    // A format that is not read is not guessed at either.
    qemu::img(
        b.dir(),
        &["rebase", "-u", "-b", "a.raw", "-F", "qed", "vm/x.qcow2"],
    );
    std::fs::copy(b.path("base/a.raw"), b.path("vm/a.raw")).unwrap();
    let refused = VirtualDisk::open(&path).unwrap_err();
    assert!(refused.to_string().contains("qed"), "{refused}");
    open_for_sending(&path, Conversion::AsIs).unwrap();
}

#[test]
fn backing_loops_and_endless_chains_end() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(57);
    qemu::create(b.dir(), "-f qcow2 a.qcow2 1M");
    qemu::create(b.dir(), "-f qcow2 -b a.qcow2 -F qcow2 b.qcow2");
    qemu::img(
        b.dir(),
        &["rebase", "-u", "-b", "b.qcow2", "-F", "qcow2", "a.qcow2"],
    );
    let e = VirtualDisk::open(&b.path("a.qcow2")).unwrap_err();
    assert!(e.to_string().contains("loop"), "{e}");
    let first = std::fs::read(b.path("a.qcow2")).unwrap();
    for i in 0..70 {
        // Same length of name: patched in place.
        let next = format!("n{:05}", i + 1);
        let at = first.windows(7).position(|w| w == b"b.qcow2").unwrap();
        let mut copy = first.clone();
        copy[at..at + 7].copy_from_slice(format!("{next}q").as_bytes());
        std::fs::write(b.path(&format!("n{i:05}q")), copy).unwrap();
    }
    let e = VirtualDisk::open(&b.path("n00000q")).unwrap_err();
    assert!(e.to_string().contains("longer than 64"), "{e}");
}

#[test]
fn internal_snapshots_leave_the_active_disk_as_it_is() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(60);
    qemu::create(b.dir(), "-f qcow2 -o cluster_size=4k s.qcow2 10M");
    for i in 0..3u64 {
        b.scribble("s.qcow2", "qcow2", 10 * MIB, 20, 61 + i);
        let name = format!("snapshot {i}");
        qemu::img(b.dir(), &["snapshot", "-c", &name, "s.qcow2"]);
    }
    b.scribble("s.qcow2", "qcow2", 10 * MIB, 20, 65);
    let out = check::image(&b, "s.qcow2", "qcow2", &plain(Format::Qcow2));
    let kept = out.layout.metadata_bytes();
    qemu::img(b.dir(), &["snapshot", "-d", "snapshot 1", "s.qcow2"]);
    check::image(&b, "s.qcow2", "qcow2", &plain(Format::Qcow2));
    qemu::img(b.dir(), &["snapshot", "-a", "snapshot 0", "s.qcow2"]);
    check::image(&b, "s.qcow2", "qcow2", &plain(Format::Qcow2));
    assert!(kept > MIB, "snapshots own clusters of their own");
}

#[test]
fn an_external_data_file_travels_beside() {
    if !qemu::available() {
        return;
    }
    for (seed, raw) in [(70, "on"), (71, "off")] {
        let b = Bench::new(seed);
        let options = format!("data_file=d.raw,data_file_raw={raw}");
        qemu::create(b.dir(), &format!("-f qcow2 -o {options} e.qcow2 6M"));
        b.scribble("e.qcow2", "qcow2", 6 * MIB, 30, seed);
        let out = check::image(&b, "e.qcow2", "qcow2", &partial(Format::Qcow2));
        let found = parts(&b.path("e.qcow2")).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(
            (&found[0].path, found[0].format),
            (&b.path("d.raw"), Format::Raw)
        );
        assert!(
            out.layout
                .ranges()
                .iter()
                .all(|r| r.kind == RangeKind::Metadata)
        );
        let companion = open_for_sending(&b.path("d.raw"), Conversion::AsIs).unwrap();
        assert_eq!(companion.format, Format::Raw);
    }
}

#[test]
fn encrypted_images_travel_closed() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(80);
    let made = qemu::try_img(
        b.dir(),
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "--object",
            "secret,id=s,data=abc",
            "-o",
            "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
            "l.qcow2",
            "4M",
        ],
    );
    if let Err(e) = made {
        eprintln!("SKIP: this qemu-img makes no LUKS images: {e}");
        return;
    }
    let out = open_for_sending(&b.path("l.qcow2"), Conversion::AsIs).unwrap();
    assert!(
        out.notes.iter().any(|n| n.contains("encrypted (LUKS)")),
        "{:?}",
        out.notes
    );
    assert!(
        out.layout
            .ranges()
            .windows(2)
            .all(|w| w[0].file < w[1].file)
    );
    let e = open_for_sending(&b.path("l.qcow2"), Conversion::Raw).unwrap_err();
    assert!(e.to_string().contains("encrypted"), "{e}");
    assert!(matches!(e, ImageError::In { .. }));
}
