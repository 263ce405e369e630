//! Made by `scripts/derive-magic`; do not edit.

/// What files begin with, sorted; no entry begins with another one.
pub(super) static PREFIXES: &[&[u8]] = &[
    b"\x1f\x8b",
    b"!<arch>\n",
    b"#!/",
    b"%PDF-",
    b"(\xb5/\xfd",
    b"7z\xbc\xaf\x27\x1c",
    b"<?xml",
    b"MZ",
    b"OggS",
    b"PK\x03\x04",
    b"RIFF",
    b"SQLite format 3\0",
    b"\x7fELF",
    b"\x89PNG",
    b"\xd0\xcf\x11\xe0",
    b"\xfd7zXZ",
    b"\xff\xd8\xff",
];

/// What files have at a fixed place further in.
pub(super) static INSIDE: &[(usize, &[u8])] = &[(4, b"ftyp"), (257, b"ustar")];
