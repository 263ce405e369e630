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

/// Parses a log of known files.
pub fn known_files(bytes: &[u8]) {
    crate::known::replay_for_fuzzing(bytes);
}

/// Parses the journal records of pending stores in the sequence cache.
pub fn pending_journal(bytes: &[u8]) {
    crate::sequences::replay_for_fuzzing(bytes);
}

/// Parses a profile without its checksum; what is accepted must round-trip, and be usable.
pub fn profile(bytes: &[u8]) {
    use crate::profile::{Profile, Search, parse};
    if let Ok(profile) = parse(bytes) {
        let again = Profile::decode(&profile.encode());
        assert!(again.is_ok_and(|again| again == profile));
        let half = profile.disk_bytes() / 2;
        assert!(
            profile
                .order(half)
                .iter()
                .all(|r| r.start < r.end && r.end <= half)
        );
        let mut search = Search::new(&profile);
        for entry in profile.entries().iter().take(64) {
            search.see(entry.block / 2, &entry.digest);
        }
        let found = search.finish(half);
        assert!(found.entries().len() <= profile.entries().len());
        let mut merged = profile.clone();
        merged.merge(&found);
        assert!(Profile::decode(&merged.encode()).is_ok_and(|again| again == merged));
    }
}
