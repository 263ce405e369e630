//! Made by `scripts/derive-magic` from Debian systems (bookworm, trixie) and a list of
//! well-known types; do not edit.

/// What files begin with, sorted; no entry begins with another one.
pub(super) static PREFIXES: &[&[u8]] = &[
    b"\x00\x00\x01\x00\x01\x00", // icon
    b"\x00\x00\x01\xba",         // MPEG program stream
    b"\x00\x01\x00\x00\x00",     // TrueType
    b"\x00\x01\x18\x05",
    b"\x00\x01 \x02",
    b"\x002\x00\x02",
    b"\x00asm", // WebAssembly
    b"\x01B\x00\x12",
    b"\x01C\x00\x12",
    b"\x01D\x00\x12",
    b"\x01R\x00\x12",
    b"\x01S\x00\x12",
    b"\x01k\x00\x12",
    b"\x01l\x00\x12",
    b"\x01m\x00\x12",
    b"\x01n\x00\x12",
    b"\x01o\x00\x12",
    b"\x01p\x00\x12",
    b"\x01q\x00\x12",
    b"\x01\x8f\x00\x12",
    b"\x01\x90\x00\x12",
    b"\x01\x92\x00\x12",
    b"\x01\x93\x00\x12",
    b"\x01\x94\x00\x12",
    b"\x01\x95\x00\x12",
    b"\x02\xc7\x00\x12",
    b"\x03\x19\x00\x12",
    b"\x03\x1c\x00\x12",
    b"\x03U\x00\x12",
    b"\x04\x22M\x18", // lz4
    b"\x0a# T",
    b"\x0apac",
    b"\x0aset",
    b"\x1aE\xdf\xa3", // Matroska, WebM
    b"\x1f\x8b\x08",  // gzip
    b"\x1f\x9d",      // compress
    b"!<ar",
    b"\x22 La",
    b"\x22 Ma",
    b"\x22 Me",
    b"\x22 Na",
    b"\x22 Th",
    b"\x22 Vi",
    b"\x22\x22\x22\x0a",
    b"\x22\x22\x22 ",
    b"\x22\x22\x22A",
    b"\x22\x22\x22C",
    b"\x22\x22\x22H",
    b"\x22\x22\x22I",
    b"\x22\x22\x22P",
    b"\x22\x22\x22R",
    b"\x22\x22\x22S",
    b"\x22\x22\x22T",
    b"\x22\x22\x22U",
    b"\x22---",
    b"#\x0a# ",
    b"#  X",
    b"# !!",
    b"# $I",
    b"# -*",
    b"# /e",
    b"# <!",
    b"# <n",
    b"# Au",
    b"# CA",
    b"# Co",
    b"# De",
    b"# Di",
    b"# En",
    b"# Ge",
    b"# IO",
    b"# Ne",
    b"# Se",
    b"# Th",
    b"# Tr",
    b"# co",
    b"# cr",
    b"# fr",
    b"# ma",
    b"# vi",
    b"#! /", // script
    b"#!/",  // script
    b"##\x0a#",
    b"### ",
    b"#--\x0a",
    b"#fro",
    b"#ifn",
    b"#inc",
    b"$Id:",
    b"% $I",
    b"% /v",
    b"% @p",
    b"% Co",
    b"% Pu",
    b"% Re",
    b"% TH",
    b"% Th",
    b"% co",
    b"% ec",
    b"% ex",
    b"% tc",
    b"% te",
    b"% tx",
    b"% ut",
    b"%!\x0a%",
    b"%!PS", // PostScript
    b"%%\x0a%",
    b"%% c",
    b"%% f",
    b"%%% ",
    b"%PDF",
    b"%a{a",
    b"(\xb5/\xfd", // zstd
    b"*if_",
    b"*os_",
    b"*pi_",
    b"*usr",
    b"+{\x0a ",
    b"-- t",
    b"-----BEGIN ", // PEM
    b"-sup",
    b".. c",
    b".\x5c\x22 ",
    b"/*\x0a ",
    b"/*  ",
    b"/* -",
    b"/* @",
    b"/* C",
    b"/* D",
    b"/* E",
    b"/* F",
    b"/* G",
    b"/* M",
    b"/* O",
    b"/* R",
    b"/* S",
    b"/* T",
    b"/* X",
    b"/* s",
    b"/* t",
    b"/.\x0a/",
    b"// -",
    b"// <",
    b"// A",
    b"// C",
    b"// D",
    b"// F",
    b"// I",
    b"// L",
    b"// M",
    b"// R",
    b"// S",
    b"// T",
    b"// V",
    b"// c",
    b"// s",
    b"/etc",
    b"0&\xb2u\x8ef\xcf\x11", // Windows media
    b"000a",
    b"070701",          // cpio
    b"070707",          // cpio
    b"7z\xbc\xaf'\x1c", // 7z
    b"8BPS",            // Photoshop
    b"; co",
    b";;; ",
    b";ELC",
    b"<!DO",
    b"<!doctype", // HTML
    b"<%- ",
    b"<<< ",  // vdi
    b"<?php", // PHP
    b"<?xm",
    b"<LAN",
    b"<PRO",
    b"<htm",
    b"<svg", // SVG
    b"=hea",
    b"ANDR",
    b"ARROW1", // Arrow
    b"AUTO",
    b"BZh", // bzip2
    b"CMAK",
    b"CMP0",
    b"CMak",
    b"COMP",
    b"COPY",
    b"CPAC",
    b"CPac",
    b"CTES",
    b"CUDA",
    b"CXX_",
    b"Copy",
    b"DCM\x01",     // compressed Windows component
    b"DCN\x01",     // compressed Windows component
    b"DCS\x01",     // compressed Windows component
    b"ElfFile\x00", // Windows event log
    b"FLV\x01",     // Flash video
    b"Form",
    b"GIF87a", // GIF
    b"GIF89a", // GIF
    b"GIT ",
    b"GNU ",
    b"Git ",
    b"ID3",     // mp3
    b"II*\x00", // TIFF
    b"IMPO",
    b"INTE",
    b"ITSF",                          // compiled help
    b"KDMV",                          // vmdk
    b"L\x00\x00\x00\x01\x14\x02\x00", // shortcut
    b"LINK",
    b"LUKS\xba\xbe", // LUKS
    b"LZIP\x01",     // lzip
    b"MAM\x04",      // prefetch
    b"MM\x00*",      // TIFF
    b"MSCF",         // cabinet
    b"MSVC",
    b"MSWIM\x00\x00\x00",     // WIM image
    b"MZ",                    // DOS and Windows executables
    b"Microsoft C/C++ MSF 7", // program database
    b"OBJC",
    b"OTTO", // OpenType
    b"OggS", // Ogg
    b"P4\x0a#",
    b"P4\x0a2",
    b"PA30",       // Windows delta
    b"PAR1",       // Parquet
    b"PK\x03\x04", // zip, jar, office documents, apk
    b"PK\x05\x06", // empty zip
    b"PROJ",
    b"Plea",
    b"QFI\xfb", // qcow2
    b"RIFF",    // wav, avi, webp
    b"RULE",
    b"Rar!\x1a\x07", // rar
    b"SKIP",
    b"SQLite format 3\x00", // SQLite
    b"Star",
    b"TZif", // time zone
    b"Temp",
    b"This",
    b"VS_D",
    b"VS_S",
    b"Visu",
    b"XCOD",
    b"Xcur",
    b"[\x0a  ",
    b"[Uni",
    b"\x5cinp",
    b"]\x00\x00\x80\x00", // lzma
    b"__al",
    b"add_",
    b"auto",
    b"bund",
    b"cmak",
    b"comm",
    b"conectix", // vhd
    b"ctes",
    b"dex\x0a", // Android bytecode
    b"diff",
    b"esca",
    b"fLaC", // FLAC
    b"hsqs", // squashfs
    b"impo",
    b"incl",
    b"let ",
    b"libX",
    b"liba",
    b"libb",
    b"libc",
    b"libf",
    b"libg",
    b"libm",
    b"libp",
    b"libs",
    b"libu",
    b"modu",
    b"pack",
    b"php8",
    b"r\x22\x22\x22",
    b"regf", // registry hive
    b"requ",
    b"set(",
    b"ttcf", // font collection
    b"use ",
    b"vhdxfile", // vhdx
    b"vim9",
    b"wOF2",                    // web font
    b"wOFF",                    // web font
    b"xar!",                    // xar, macOS package
    b"{\x5crtf",                // rich text
    b"\x7fELF",                 // ELF
    b"\x89HDF\x0d\x0a\x1a\x0a", // HDF5
    b"\x89LZO\x00",             // lzop
    b"\x89PNG",
    b"\x95\x04\x12\xde", // gettext catalog, big-endian
    b"\x99\x02\x0d\x04",
    b"\xca\xfe\xba\xbe", // Java class, Mach-O fat
    b"\xce\xfa\xed\xfe", // Mach-O, little-endian
    b"\xcf\x9aW\x13",
    b"\xcf\xfa\xed\xfe",                 // Mach-O 64, little-endian
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", // OLE: old Office, msi
    b"\xde\x12\x04\x95",                 // gettext catalog
    b"\xed\xab\xee\xdb",                 // rpm
    b"\xef\xbb\xbf<?xml",                // XML with a byte order mark
    b"\xf7Y\x1fM",
    b"\xfd7zXZ\x00",     // xz
    b"\xfe\xed\xfa\xce", // Mach-O
    b"\xfe\xed\xfa\xcf", // Mach-O 64
    b"\xff\xd8\xff",     // JPEG
    b"\xff\xfb\x90",     // mp3
];

/// What files have at a fixed place further in.
pub(super) static INSIDE: &[(usize, &[u8])] = &[
    (4, b"ftyp"),    // mp4, mov, heic
    (257, b"ustar"), // tar
];
