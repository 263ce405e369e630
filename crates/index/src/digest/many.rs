//! Hashes several blocks in parallel. `blake3` fills its vector lanes from one input, and a block has only four
//! chunks; the chunks of sixteen blocks together fill every lane.
//!
//! The `platform` module is hidden in `blake3` and may change in any release: the version is pinned, a test compares
//! with `blake3::hash`, and [`digest_group`] falls back to that where the vector unit is narrow.

use blake3::IncrementCounter;
use blake3::platform::Platform;
use drover_core::{BLOCK_SIZE, Digest};

/// Maximum number of blocks hashed together.
pub(super) const LANES: usize = 16;

const CHUNK: usize = 1024;
const CHUNKS: usize = BLOCK_SIZE / CHUNK;
const CV: usize = 32;

const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;

const IV: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// Appends the digests of one to [`LANES`] blocks.
pub(super) fn digest_group(blocks: &[[u8; BLOCK_SIZE]], out: &mut Vec<Digest>) {
    let platform = Platform::detect();
    // A single block, or no more lanes than the chunks of one block fill: no gain.
    if blocks.len() < 2 || platform.simd_degree() <= CHUNKS {
        out.extend(blocks.iter().map(|b| Digest(*blake3::hash(b).as_bytes())));
        return;
    }
    let n = blocks.len();
    // Chaining values, the four of a block side by side, so that two of them form a parent.
    let mut cvs = [[0u8; CHUNKS * CV]; LANES];
    let mut column = [0u8; LANES * CV];
    let chunks = |c: usize| {
        let mut inputs: [&[u8; CHUNK]; LANES] = [&[0; CHUNK]; LANES];
        for (to, b) in inputs.iter_mut().zip(blocks) {
            *to = &b.as_chunks().0[c];
        }
        inputs
    };
    for c in 0..CHUNKS {
        platform.hash_many(
            &chunks(c)[..n],
            &IV,
            c as u64,
            IncrementCounter::No,
            0,
            CHUNK_START,
            CHUNK_END,
            &mut column[..n * CV],
        );
        for (cv, from) in cvs.iter_mut().zip(column[..n * CV].as_chunks::<CV>().0) {
            cv[c * CV..(c + 1) * CV].copy_from_slice(from);
        }
    }
    // Four chunks: two parents, then the root.
    let mut parents = [[0u8; 2 * CV]; LANES];
    for half in 0..CHUNKS / 2 {
        join(&platform, &cvs, n, half, PARENT, &mut column);
        for (p, from) in parents.iter_mut().zip(column[..n * CV].as_chunks::<CV>().0) {
            p[half * CV..(half + 1) * CV].copy_from_slice(from);
        }
    }
    join(&platform, &parents, n, 0, PARENT | ROOT, &mut column);
    out.extend(
        column[..n * CV]
            .as_chunks::<CV>()
            .0
            .iter()
            .map(|d| Digest(*d)),
    );
}

/// Hashes chaining values number `pair`, two per lane, into one.
fn join<const N: usize>(
    platform: &Platform,
    cvs: &[[u8; N]; LANES],
    n: usize,
    pair: usize,
    flags: u8,
    out: &mut [u8; LANES * CV],
) {
    let mut inputs: [&[u8; 2 * CV]; LANES] = [&[0; 2 * CV]; LANES];
    for (to, cv) in inputs.iter_mut().zip(cvs) {
        *to = &cv.as_chunks().0[pair];
    }
    platform.hash_many(
        &inputs[..n],
        &IV,
        0,
        IncrementCounter::No,
        flags,
        0,
        0,
        &mut out[..n * CV],
    );
}
