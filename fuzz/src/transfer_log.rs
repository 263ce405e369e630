//! A damaged or forged log of a transfer, inspected and resumed; and the digest of a file computed from
//! a layout and batches of a hostile source.

use std::sync::LazyLock;

use drover_image::{Layout, LayoutLimits, layout::seal_for_fuzzing};
use drover_teleport::fuzzing;

/// In memory, where it can be.
static DIR: LazyLock<std::path::PathBuf> = LazyLock::new(|| {
    let shm = std::path::PathBuf::from("/dev/shm");
    let base = if shm.is_dir() {
        shm
    } else {
        std::env::temp_dir()
    };
    base.join(format!("drover-fuzz-{}", std::process::id()))
});

/// Records `kind, length, payload`.
fn records(mut data: &[u8]) -> Vec<(u8, &[u8])> {
    let mut out = Vec::new();
    while let [kind, a, b, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*a, *b]));
        let (payload, rest) = rest.split_at(length.min(rest.len()));
        data = rest;
        out.push((*kind, payload));
    }
    out
}

fn recorded(data: &[u8]) {
    match data {
        [0, rest @ ..] => fuzzing::transfer(&DIR, None, &records(rest)),
        [1, length, rest @ ..] if !rest.is_empty() => {
            let (body, bits) = rest.split_at(usize::from(*length).min(rest.len() - 1));
            let limits = LayoutLimits {
                max_file_len: 1 << 26,
                ..LayoutLimits::default()
            };
            if let Ok(layout) = Layout::decode(&seal_for_fuzzing(body), limits) {
                fuzzing::file_digest(&layout, |i| {
                    let i = i as usize % (bits.len() * 8);
                    bits[i / 8] >> (i % 8) & 1 == 1
                });
            }
        }
        [blocks, rest @ ..] => {
            let length = u64::from(*blocks) * 33 * 4096 + 1;
            let layout = Layout::in_file_order(length, &[4096..length]);
            fuzzing::transfer(&DIR, Some(&layout), &records(rest));
        }
        [] => {}
    }
}

pub fn run(data: &[u8]) {
    recorded(data);
    let _ = std::fs::remove_dir_all(&*DIR);
}
