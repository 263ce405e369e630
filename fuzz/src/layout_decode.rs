//! A layout from an untrusted peer. A fuzzer would not get past checksum and compression,
//! so half of the inputs are bodies that are compressed and checksummed here.

use drover_image::{Layout, LayoutLimits, layout::seal_for_fuzzing};

pub fn run(data: &[u8]) {
    let limits = LayoutLimits {
        max_ranges: 1000,
        ..LayoutLimits::default()
    };
    let decoded = match data.split_first() {
        Some((1, body)) => Layout::decode(&seal_for_fuzzing(body), limits),
        _ => Layout::decode(data, limits),
    };
    let Ok(layout) = decoded else { return };
    assert_eq!(
        Layout::decode(&layout.encode(), limits).as_ref(),
        Ok(&layout)
    );
    let mut spans: Vec<_> = layout.ranges().iter().map(|r| r.file_span()).collect();
    spans.sort_by_key(|s| s.start);
    assert!(spans.windows(2).all(|w| w[0].end <= w[1].start));
    assert!(spans.last().is_none_or(|s| s.end <= layout.file_len()));
    let mut at = 0;
    for piece in layout.pieces(0, u64::MAX).take(10_000) {
        assert_eq!(piece.walk, at);
        at += piece.len;
        assert!(
            piece
                .file
                .is_none_or(|f| f + piece.len <= layout.file_len())
        );
    }
}
