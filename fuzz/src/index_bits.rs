//! Zero maps and head bits from a peer: decoded or refused, and decoded ones encode to the same bytes.

use drover_index::{ZeroMap, pack_heads, unpack_heads};

pub fn run(data: &[u8]) {
    let Some((&count, bytes)) = data.split_first() else {
        return;
    };
    let max = usize::from(count) * 64;
    if let Ok(map) = ZeroMap::from_bytes(bytes, max) {
        assert!(map.len() <= max);
        assert_eq!(ZeroMap::from_bytes(&map.to_bytes(), max), Ok(map));
    }
    if let Ok(heads) = unpack_heads(bytes, max) {
        assert_eq!(pack_heads(&heads), bytes);
    }
}
