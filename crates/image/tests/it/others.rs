//! raw, vmdk, vhdx, vdi and vhd created by `qemu-img`.

use drover_image::{Conversion, Format, VirtualDisk, named_files, open_for_sending, parts};

use crate::check::{self, Expect, partial, plain};
use crate::qemu::{self, Bench};

const MIB: u64 = 1 << 20;

/// Creates, scribbles and checks; `format` is QEMU's name for it.
fn made(format: &str, options: &str, size: u64, seed: u64, clear: bool, expect: &Expect) -> Bench {
    let b = Bench::new(seed);
    let size_text = size.to_string();
    let mut args = vec!["create", "-q", "-f", format];
    if !options.is_empty() {
        args.extend(["-o", options]);
    }
    args.extend(["x", &size_text]);
    qemu::img(b.dir(), &args);
    check::image(&b, "x", format, expect);
    b.scribble_with("x", format, size, 40, seed, clear);
    check::image(&b, "x", format, expect);
    b
}

#[test]
fn raw_with_and_without_holes() {
    if !qemu::available() {
        return;
    }
    made("raw", "", 9 * MIB + 512, 100, true, &plain(Format::Raw));
    made(
        "raw",
        "preallocation=full",
        5 * MIB,
        101,
        false,
        &plain(Format::Raw),
    );
}

/// A qcow2 image has whole sectors: the last, partial one of a file must not get lost.
#[test]
fn files_of_odd_sizes_become_qcow2_whole() {
    if !qemu::available() {
        return;
    }
    for len in [0usize, 1, 511, 4097, 65_536, 200_001] {
        let b = Bench::new(103);
        let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8 + 1).collect();
        std::fs::write(b.path("odd.raw"), &bytes).unwrap();
        let made = open_for_sending(&b.path("odd.raw"), Conversion::Qcow2).unwrap();
        std::fs::write(b.path("made.qcow2"), check::rebuilt(&made)).unwrap();
        qemu::img(b.dir(), &["check", "-q", "-f", "qcow2", "made.qcow2"]);
        qemu::img(
            b.dir(),
            &["convert", "-f", "qcow2", "-O", "raw", "made.qcow2", "back"],
        );
        let back = std::fs::read(b.path("back")).unwrap();
        assert_eq!(back.len(), len.next_multiple_of(512));
        assert!(back[..len] == bytes, "{len}");
        assert!(back[len..].iter().all(|b| *b == 0), "{len}");
    }
}

#[test]
fn sparse_vmdk() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [
        (110, "subformat=monolithicSparse"),
        (111, "subformat=monolithicSparse,zeroed_grain=on"),
        (112, "subformat=monolithicSparse,compat6=on"),
    ] {
        made(
            "vmdk",
            options,
            40 * MIB + 512 * 9,
            seed,
            true,
            &plain(Format::Vmdk),
        );
    }
}

#[test]
fn stream_optimized_vmdk() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(115);
    qemu::create(b.dir(), "-f raw src.raw 12M");
    b.scribble_with("src.raw", "raw", 12 * MIB, 20, 115, false);
    check::convert(
        b.dir(),
        &[
            "-O",
            "vmdk",
            "-o",
            "subformat=streamOptimized",
            "src.raw",
            "s.vmdk",
        ],
    );
    let out = check::image(&b, "s.vmdk", "vmdk", &partial(Format::Vmdk));
    assert!(
        out.notes.iter().any(|n| n.contains("compressed")),
        "{:?}",
        out.notes
    );
    assert_eq!(out.layout.data_bytes(), 0);
    assert!(
        out.layout
            .ranges()
            .windows(2)
            .all(|w| w[0].file < w[1].file)
    );
}

#[test]
fn vmdk_of_several_files() {
    if !qemu::available() {
        return;
    }
    // 2 GiB and a little, so that there are two extents; nearly all of it holes.
    let size = (2048 + 30) * MIB;
    for (seed, sub, names) in [
        (
            120,
            "twoGbMaxExtentSparse",
            ["x-s001.vmdk", "x-s002.vmdk"].as_slice(),
        ),
        (121, "twoGbMaxExtentFlat", &["x-f001.vmdk", "x-f002.vmdk"]),
        (122, "monolithicFlat", &["x-flat.vmdk"]),
    ] {
        let b = Bench::new(seed);
        let options = format!("subformat={sub}");
        qemu::create(b.dir(), &format!("-f vmdk -o {options} x.vmdk {size}"));
        b.scribble_with("x.vmdk", "vmdk", 20 * MIB, 20, seed, true);
        // Across the border between two extents.
        b.write("x.vmdk", "vmdk", 2048 * MIB - 200_704, 401_408);
        let out = open_for_sending(&b.path("x.vmdk"), Conversion::AsIs).unwrap();
        assert_eq!(out.virtual_size, size);
        assert_eq!(named_files(&b.path("x.vmdk")).unwrap(), names);
        let mut found: Vec<_> = parts(&b.path("x.vmdk")).unwrap();
        found.sort_by(|a, b| a.path.cmp(&b.path));
        let paths: Vec<_> = found.into_iter().map(|part| part.path).collect();
        let expected: Vec<_> = names.iter().map(|n| b.path(n)).collect();
        assert_eq!(paths, expected);
        let disk = VirtualDisk::open(&b.path("x.vmdk")).unwrap();
        check::windows(
            &b,
            "x.vmdk",
            "vmdk",
            &disk,
            &[0..20 * MIB, 2047 * MIB..2049 * MIB],
        );
        // Each sparse extent is a vmdk on its own.
        for name in names {
            let part = open_for_sending(&b.path(name), Conversion::AsIs).unwrap();
            let sparse = sub == "twoGbMaxExtentSparse";
            let format = if sparse { Format::Vmdk } else { Format::Raw };
            assert_eq!(part.format, format, "{name}");
        }
    }
}

#[test]
fn vmdk_on_a_parent() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(125);
    qemu::create(b.dir(), "-f vmdk p.vmdk 6M");
    b.scribble_with("p.vmdk", "vmdk", 6 * MIB, 20, 125, false);
    qemu::create(b.dir(), "-f vmdk -b p.vmdk -F vmdk c.vmdk");
    b.scribble_with("c.vmdk", "vmdk", 6 * MIB, 10, 126, false);
    check::image(&b, "c.vmdk", "vmdk", &partial(Format::Vmdk));
    assert_eq!(named_files(&b.path("c.vmdk")).unwrap(), ["p.vmdk"]);
}

#[test]
fn vhdx_dynamic_and_fixed() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [
        (130, "subformat=dynamic"),
        (131, "subformat=dynamic,block_size=1M"),
        (132, "subformat=fixed"),
        (133, "subformat=dynamic,block_state_zero=off"),
    ] {
        made("vhdx", options, 34 * MIB, seed, false, &plain(Format::Vhdx));
    }
}

#[test]
fn vdi_dynamic_and_fixed() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [(140, ""), (141, "static=on")] {
        made(
            "vdi",
            options,
            9 * MIB + 512 * 3,
            seed,
            false,
            &plain(Format::Vdi),
        );
    }
}

#[test]
fn vhd_dynamic_and_fixed() {
    if !qemu::available() {
        return;
    }
    for (seed, options) in [
        (150, "subformat=dynamic"),
        (151, "subformat=dynamic,force_size=on"),
        (152, "subformat=fixed"),
        (153, "subformat=fixed,force_size=on"),
    ] {
        made("vpc", options, 13 * MIB, seed, false, &plain(Format::Vhd));
    }
}

#[test]
fn foreign_containers_travel_as_raw_bytes_and_are_not_converted() {
    if !qemu::available() {
        return;
    }
    let b = Bench::new(160);
    for format in ["qcow", "qed", "parallels"] {
        qemu::create(b.dir(), &format!("-f {format} {format} 2M"));
        let out = open_for_sending(&b.path(format), Conversion::AsIs).unwrap();
        assert_eq!(out.format, Format::Raw);
        assert!(
            out.notes.iter().any(|n| n.contains(format)),
            "{:?}",
            out.notes
        );
        assert!(open_for_sending(&b.path(format), Conversion::Raw).is_err());
    }
}
