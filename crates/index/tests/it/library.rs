//! Images composed of files, for tests.

use drover_core::{Digest, Head};
use drover_index::testing::{Applied, Destination};
use drover_index::{Cursor, Layout, Matcher, MatcherConfig, Result};

/// An image as it is presented to the matcher.
#[derive(Debug, Clone, Default)]
pub struct Image {
    pub digests: Vec<Digest>,
    pub heads: Vec<Head>,
}

pub fn digest(n: u64) -> Digest {
    // Like a BLAKE3, every bit counts.
    let mut out = [0; 32];
    let mut z = n;
    for w in out.chunks_exact_mut(8) {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut m = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        m = (m ^ (m >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        w.copy_from_slice(&(m ^ (m >> 31)).to_le_bytes());
    }
    Digest(out)
}

/// Block `i` of file `f`.
pub fn block(f: u64, i: u64) -> Digest {
    digest(f << 24 | i)
}

impl Image {
    /// Appends blocks `from..to` of file `f`; its first block is a strong or a weak head.
    pub fn file(&mut self, f: u64, from: u64, to: u64) -> &mut Self {
        for i in from..to {
            self.digests.push(block(f, i));
            self.heads.push(match (i, f % 3) {
                (0, 0) => Head::Strong,
                (0, _) => Head::Weak,
                _ => Head::No,
            });
        }
        self
    }

    pub fn of(files: &[(u64, u64)]) -> Self {
        let mut image = Image::default();
        for &(f, len) in files {
            image.file(f, 0, len);
        }
        image
    }
}

/// Sends an image in batches of `batch` blocks and carries the plans out.
pub fn send(
    matcher: &mut Matcher,
    destination: &mut Destination,
    cursor: &mut Cursor,
    image: &Image,
    batch: usize,
) -> Result<Applied> {
    let mut sum = Applied::default();
    for (d, h) in image.digests.chunks(batch).zip(image.heads.chunks(batch)) {
        let plan = matcher.batch(cursor, d, h)?;
        let a = destination
            .apply(cursor.image(), d, &plan)
            .expect("a plan keeps its rules");
        sum.literal += a.literal;
        sum.reused += a.reused;
        sum.refetched += a.refetched;
    }
    Ok(sum)
}

/// Caches so small that everything is pushed out all the time.
pub fn tiny() -> MatcherConfig {
    MatcherConfig {
        c0_bytes: 3 << 10,
        c1_bytes: 1 << 10,
        c2_bytes: 1 << 10,
        recent_layout: Layout {
            fingerprint_bits: 8,
            file_bits: 2,
            address_bits: 22,
        },
        sequence_limit: 6,
        cached_pages: 8,
        ..MatcherConfig::default()
    }
}
