//! Entry points for fuzzers into private code. Only built for fuzzing, without checksum verification.

use drover_image::Layout;

use crate::imagemap;

/// Parses a map file; what is accepted must round-trip.
pub fn image_map(bytes: &[u8]) {
    if let Some((record, map)) = imagemap::parse(bytes) {
        assert_eq!(map.blocks.walk_blocks(), map.layout.walk_blocks());
        let again = imagemap::parse(&map.encode(&record));
        assert_eq!(again, Some((record, map)));
    }
}

/// Parses the block map inside a map file.
pub fn block_map(layout: &Layout, bytes: &[u8]) {
    let parts = [
        drover_net::encode(&imagemap::about_for_fuzzing()),
        layout.encode(),
        zstd::bulk::compress(bytes, 1).unwrap_or_default(),
    ];
    let mut file = b"DRVRMAP\0\x02\0\0\0".to_vec();
    for part in &parts {
        file.extend((part.len() as u64).to_le_bytes());
        file.extend(part);
    }
    file.extend((bytes.len() as u64).to_le_bytes());
    file.extend([0; 4]);
    image_map(&file);
}

/// Parses the journal records of pending stores in the sequence cache.
pub fn pending_journal(bytes: &[u8]) {
    crate::sequences::replay_for_fuzzing(bytes);
}
