use proptest::prelude::*;

use super::*;

fn plain(bytes: &[u8]) -> Vec<Digest> {
    bytes
        .chunks(BLOCK_SIZE)
        .map(|b| Digest(*blake3::hash(b).as_bytes()))
        .collect()
}

#[test]
fn groups_of_every_size_agree_with_plain_blake3() {
    let mut rng = fastrand::Rng::with_seed(1);
    let bytes: Vec<u8> = std::iter::repeat_with(|| rng.u8(..))
        .take(70 * BLOCK_SIZE)
        .collect();
    for blocks in 0..=70 {
        let bytes = &bytes[..blocks * BLOCK_SIZE];
        let mut out = vec![Digest([7; 32])];
        digest_blocks(bytes, &mut out);
        assert_eq!(out[0], Digest([7; 32]), "appends");
        assert_eq!(out[1..], plain(bytes)[..], "{blocks} blocks");
    }
}

#[test]
fn the_published_vector_of_one_block() {
    // blake3's test_vectors.json: 4096 bytes of 0, 1, ..., 250, 0, 1, ...
    let block: Vec<u8> = (0..BLOCK_SIZE).map(|i| (i % 251) as u8).collect();
    let want = "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969";
    assert_eq!(digest_block(&block).to_string(), want);
    let mut out = Vec::new();
    digest_blocks(&block.repeat(3), &mut out);
    assert!(out.iter().all(|d| d.to_string() == want));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_bytes_agree_with_plain_blake3(seed: u64, blocks in 0usize..40, sparse: bool) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut bytes = vec![0u8; blocks * BLOCK_SIZE];
        if sparse {
            for _ in 0..blocks { let at = rng.usize(..bytes.len()); bytes[at] = rng.u8(..); }
        } else {
            rng.fill(&mut bytes);
        }
        let mut out = Vec::new();
        digest_blocks(&bytes, &mut out);
        prop_assert_eq!(out, plain(&bytes));
    }

    /// An image's digest does not depend on how zeros are passed.
    #[test]
    fn zeros_given_as_runs_or_as_digests(runs in proptest::collection::vec((any::<bool>(), 1usize..6000), 0..6), tail in 1usize..4096) {
        let blocks: usize = runs.iter().map(|r| r.1).sum();
        let len = if blocks == 0 { 0 } else { (blocks * BLOCK_SIZE - BLOCK_SIZE + tail) as u64 };
        let other = digest_block(&[1; BLOCK_SIZE]);
        let (mut a, mut b) = (ImageDigest::new(len), ImageDigest::new(len));
        for (zero, n) in runs {
            let d = if zero { *ZERO_BLOCK } else { other };
            a.blocks(&vec![d; n]);
            if zero { b.zero_blocks(n as u64) } else { b.blocks(&vec![d; n]) }
        }
        prop_assert_eq!(a.finish(), b.finish());
    }
}

/// A plain reference implementation of an image's digest.
fn reference(file: &[u8]) -> Digest {
    let mut all = b"drover image digest v1\0".to_vec();
    all.extend((file.len() as u64).to_le_bytes());
    for block in file.chunks(BLOCK_SIZE) {
        let mut padded = block.to_vec();
        padded.resize(BLOCK_SIZE, 0);
        all.extend(blake3::hash(&padded).as_bytes());
    }
    Digest(*blake3::hash(&all).as_bytes())
}

#[test]
fn an_image_is_digested_with_and_without_its_holes() {
    let mut rng = fastrand::Rng::with_seed(2);
    for len in [0, 1, 4095, 4096, 4097, 3_000_000] {
        let mut file = vec![0u8; len];
        rng.fill(&mut file);
        let (from, to) = (len / 3, len / 2);
        file[from..to].fill(0);
        let tail = len - len / 5;
        file[tail..].fill(0);
        let want = reference(&file);
        assert_eq!(image_digest(&file, []).unwrap(), want);
        let hole = |from: usize, to: usize, kind| Extent {
            offset: from as u64,
            length: (to - from) as u64,
            kind,
        };
        let extents = [
            hole(0, from, ExtentKind::Data),
            hole(from, to, ExtentKind::Zero),
            hole(tail, len + 9999, ExtentKind::Hole),
        ];
        assert_eq!(image_digest(&file, extents).unwrap(), want, "{len} bytes");
    }
}

#[test]
fn length_is_part_of_an_image() {
    let a = image_digest(&vec![0u8; 4096], []).unwrap();
    let b = image_digest(&vec![0u8; 4095], []).unwrap();
    assert_ne!(a, b);
}

#[test]
#[should_panic(expected = "every block")]
fn a_digest_with_blocks_missing_is_never_made() {
    let _ = ImageDigest::new(8192).finish();
}
