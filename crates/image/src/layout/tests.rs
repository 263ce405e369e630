use std::ops::Range;

use drover_core::BLOCK_SIZE_U64;
use proptest::prelude::*;

use super::*;

const BLOCK: u64 = BLOCK_SIZE_U64;

/// The reference model: the file byte for each byte of the walk, or padding.
fn flat(layout: &Layout) -> Vec<Option<u64>> {
    let mut walk = Vec::new();
    for r in layout.ranges() {
        assert!(r.walk >= walk.len() as u64 && r.walk - walk.len() as u64 <= MAX_GAP);
        walk.resize(r.walk as usize, None);
        for i in 0..r.count {
            let step = i * u64::from(r.grain);
            let at = match r.order {
                Order::Forward => r.file + step,
                Order::Reverse => r.file - step,
            };
            walk.extend((at..at + u64::from(r.grain)).map(Some));
        }
    }
    walk.resize(walk.len().next_multiple_of(BLOCK as usize), None);
    walk
}

fn from_pieces(layout: &Layout, walk: u64, len: u64) -> Vec<Option<u64>> {
    let mut out = Vec::new();
    let mut at = walk;
    for p in layout.pieces(walk, len) {
        assert_eq!(p.walk, at);
        assert!(p.len > 0);
        at += p.len;
        out.extend((0..p.len).map(|i| p.file.map(|f| f + i)));
    }
    out
}

/// A test file: its holes, and its mapping from guest clusters to file clusters.
#[derive(Debug, Clone)]
struct Plan {
    file_len: u64,
    cluster: u64,
    /// Shifts the data in the file, as formats with small headers do.
    skew: u64,
    /// For each guest cluster, the file cluster.
    guest: Vec<Option<usize>>,
    /// For each block of the file, whether it is a hole.
    holes: Vec<bool>,
}

fn plan() -> impl Strategy<Value = Plan> {
    (
        prop_oneof![Just(512u64), Just(1024), Just(4096), Just(16384)],
        prop_oneof![Just(0u64), Just(512), Just(700), Just(4096)],
        1usize..40,
        any::<u64>(),
        0u64..9000,
        0..4u32,
    )
        .prop_map(|(cluster, skew, n, seed, tail, shape)| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut places: Vec<usize> = (0..n).collect();
            match shape {
                0 => {}
                1 => places.reverse(),
                2 => rng.shuffle(&mut places),
                _ => places.chunks_mut(5).for_each(|c| {
                    if rng.bool() {
                        c.reverse();
                    }
                }),
            }
            let guest = places
                .into_iter()
                .flat_map(|p| {
                    let gap = if rng.u8(..4) == 0 { rng.usize(..4) } else { 0 };
                    std::iter::repeat_n(None, gap).chain([Some(p)])
                })
                .collect();
            let file_len = skew + cluster * n as u64 + tail;
            let holes = (0..file_len.div_ceil(BLOCK))
                .map(|_| rng.u8(..8) == 0)
                .collect();
            Plan {
                file_len,
                cluster,
                skew,
                guest,
                holes,
            }
        })
}

impl Plan {
    fn present(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (i, _) in self.holes.iter().enumerate().filter(|(_, h)| !**h) {
            let run = i as u64 * BLOCK..((i as u64 + 1) * BLOCK).min(self.file_len);
            crate::file::push_rounded(&mut runs, run, self.file_len);
        }
        runs
    }

    fn build(&self) -> Layout {
        let present = self.present();
        let mut b = LayoutBuilder::new(self.file_len, &present, self.cluster as u32, 1 << 20);
        for (g, f) in self.guest.iter().enumerate() {
            if let Some(f) = f {
                b.data(
                    g as u64 * self.cluster,
                    self.skew + *f as u64 * self.cluster,
                    self.cluster,
                )
                .unwrap();
            }
        }
        b.finish(&[]).unwrap()
    }

    /// Maps a file byte to its guest byte.
    fn guest_of(&self, file: u64) -> Option<u64> {
        let within = file.checked_sub(self.skew)?;
        let f = (within / self.cluster) as usize;
        let g = self.guest.iter().position(|x| *x == Some(f))?;
        Some(g as u64 * self.cluster + within % self.cluster)
    }
}

proptest! {
    #[test]
    fn a_built_layout_keeps_its_promises(p in plan()) {
        let layout = p.build();
        let walk = flat(&layout);
        prop_assert_eq!(walk.len() as u64, layout.walk_blocks() * BLOCK);
        // Every byte outside of holes exactly once, and none in a hole.
        let mut seen: Vec<u64> = walk.iter().flatten().copied().collect();
        let data = layout.data_bytes() as usize;
        let (of_data, of_meta) = seen.split_at(data);
        prop_assert!(of_meta.is_sorted());
        prop_assert!(of_meta.iter().all(|&f| p.guest_of(f).is_none()));
        let guests: Vec<u64> = of_data.iter().map(|&f| p.guest_of(f).unwrap()).collect();
        prop_assert!(guests.is_sorted());
        seen.sort_unstable();
        let expected: Vec<u64> = p.present().into_iter().flatten().collect();
        prop_assert_eq!(seen, expected);
        // Aligned, and each block of the walk has bytes of one guest block only.
        for (block, bytes) in walk.chunks(BLOCK as usize).enumerate() {
            let mut of = None;
            for (i, f) in bytes.iter().enumerate() {
                let Some(f) = *f else { continue };
                let key = p.guest_of(f).map_or((1, f), |g| (0, g));
                prop_assert_eq!(key.1 % BLOCK, i as u64, "block {}", block);
                let this = (key.0, key.1 / BLOCK);
                prop_assert_eq!(*of.get_or_insert(this), this);
            }
        }
        prop_assert_eq!(&Layout::new(layout.file_len(), p.cluster as u32, layout.ranges().to_vec()).unwrap(), &layout);
    }

    #[test]
    fn pieces_agree_with_the_plain_walk(p in plan(), from in any::<prop::sample::Index>(), len in 0u64..20000) {
        let layout = p.build();
        let walk = flat(&layout);
        prop_assert_eq!(from_pieces(&layout, 0, u64::MAX), walk.clone());
        let from = from.index(walk.len() + 10) as u64;
        let end = (from + len).min(walk.len() as u64);
        let expected = walk.get(from as usize..end as usize).unwrap_or_default();
        prop_assert_eq!(from_pieces(&layout, from, len), expected);
    }

    #[test]
    fn encoding_is_undone_by_decoding(p in plan()) {
        let layout = p.build();
        prop_assert_eq!(Layout::decode(&layout.encode(), LayoutLimits::default()).unwrap(), layout);
    }

    #[test]
    fn what_is_decoded_from_any_bytes_keeps_the_promises(
        p in plan(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        // Modified content with a valid checksum, as a malicious peer could make it.
        let mut body = p.build().body();
        for (at, byte) in edits {
            let at = at.index(body.len());
            body[at] = byte;
        }
        if let Ok(layout) = Layout::decode(&codec::seal(&body), LayoutLimits::default())
            && layout.walk_blocks() < 1 << 12
        {
            let mut seen: Vec<u64> = flat(&layout).into_iter().flatten().collect();
            let n = seen.len();
            prop_assert_eq!(n as u64, layout.covered_bytes());
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), n);
            prop_assert!(seen.last().is_none_or(|&l| l < layout.file_len()));
        }
    }

    #[test]
    fn damage_on_the_way_is_noticed(p in plan(), at in any::<prop::sample::Index>(), bit in 0..8u32) {
        let mut bytes = p.build().encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(Layout::decode(&bytes, LayoutLimits::default()).is_err());
    }

    #[test]
    fn random_ranges_are_accepted_only_if_apart(
        file_len in 0u64..100_000,
        raw in proptest::collection::vec((0u64..9000, 0u64..100_000, 0u32..5000, 0u64..9, any::<bool>()), 0..6),
    ) {
        let mut walk = 0;
        let ranges: Vec<GrainRange> = raw.into_iter().map(|(gap, file, grain, count, reverse)| {
            let r = GrainRange {
                walk: walk + gap, file, grain, count,
                order: if reverse { Order::Reverse } else { Order::Forward },
                kind: RangeKind::Data,
            };
            walk = r.walk_end();
            r
        }).collect();
        if let Ok(layout) = Layout::new(file_len, 4096, ranges) {
            let mut seen: Vec<u64> = flat(&layout).into_iter().flatten().collect();
            let n = seen.len();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), n);
        }
    }
}

#[test]
fn a_file_without_holes_is_its_own_walk() {
    let layout = Layout::in_file_order(10_000, std::slice::from_ref(&(0..10_000)));
    assert!(layout.is_identity());
    assert_eq!(layout.walk_blocks(), 3);
    assert_eq!(layout.ranges().len(), 1);
    assert!(Layout::in_file_order(0, &[]).is_identity());
    let holes = Layout::in_file_order(1 << 20, &[0..4096, 8192..12288]);
    assert!(!holes.is_identity());
    assert_eq!(holes.walk_blocks(), 2);
    assert_eq!(from_pieces(&holes, 4096, 1), vec![Some(8192)]);
}

#[test]
fn runs_backwards_are_one_range() {
    let len = 1u64 << 20;
    let whole = 0..len;
    let mut b = LayoutBuilder::new(len, std::slice::from_ref(&whole), 65536, 1 << 20);
    for i in 0..16 {
        b.data(i * 65536, len - (i + 1) * 65536, 65536).unwrap();
    }
    let layout = b.finish(&[]).unwrap();
    assert_eq!(
        layout.ranges(),
        [GrainRange {
            walk: 0,
            file: len - 65536,
            grain: 65536,
            count: 16,
            order: Order::Reverse,
            kind: RangeKind::Data,
        }]
    );
}

#[test]
fn sharing_bytes_and_too_many_ranges_are_refused() {
    let whole = 0..1u64 << 20;
    let present = std::slice::from_ref(&whole);
    let mut b = LayoutBuilder::new(1 << 20, present, 4096, 1 << 20);
    b.data(0, 0, 8192).unwrap();
    b.data(1 << 20, 4096, 4096).unwrap();
    assert_eq!(b.finish(&[]), Err(BuildError::Overlap(4096)));
    let mut b = LayoutBuilder::new(1 << 20, present, 4096, 1 << 20);
    b.data(0, 0, 8192).unwrap();
    assert_eq!(
        b.finish(&[(4096, 5000, "table")]),
        Err(BuildError::OverTable(4096, "table"))
    );
    let mut b = LayoutBuilder::new(1 << 20, present, 4096, 3);
    let filled = (0..4).try_for_each(|i| b.data(i * 4096, 40960 + 8192 * i, 4096));
    assert_eq!(filled, Err(BuildError::TooManyRanges));
}

#[test]
fn a_decoder_stays_within_its_limits() {
    let whole = 0..1u64 << 20;
    let layout = Layout::in_file_order(1 << 20, &[0..4096, 8192..12288, 20480..24576]);
    let bytes = layout.encode();
    let limits = LayoutLimits::default();
    for tight in [
        LayoutLimits {
            max_encoded: bytes.len() - 1,
            ..limits
        },
        LayoutLimits {
            max_ranges: 2,
            ..limits
        },
        LayoutLimits {
            max_file_len: (1 << 20) - 1,
            ..limits
        },
    ] {
        assert!(matches!(
            Layout::decode(&bytes, tight),
            Err(LayoutError::TooLarge(_))
        ));
    }
    // A decompression bomb: megabytes of zeros that claim to be ranges.
    let bomb = codec::seal(&vec![0; 30 << 20]);
    assert!(bomb.len() < 10_000);
    assert!(Layout::decode(&bomb, limits).is_err());
    let mut later = Layout::in_file_order(1 << 20, std::slice::from_ref(&whole)).encode();
    later[4] = 2;
    assert_eq!(Layout::decode(&later, limits), Err(LayoutError::Version(2)));
}

/// A few bytes may describe a million ranges: what decoding them takes is known from the header.
#[test]
fn the_memory_that_a_layout_takes_is_known_before_it_is_decoded() {
    let limits = LayoutLimits::default();
    let runs: Vec<Range<u64>> = (0..1 << 20).map(|i| i * BLOCK..i * BLOCK + 1).collect();
    let bytes = Layout::in_file_order(BLOCK << 20, &runs).encode();
    assert!(bytes.len() < 1000, "{}", bytes.len());
    let needed = Layout::decoding_bytes(&bytes, limits).unwrap();
    let layout = Layout::decode(&bytes, limits).unwrap();
    let least = size_of_val(layout.ranges());
    assert!(needed > least as u64 && needed < 100 << 20, "{needed}");
    let largest = codec::seal(&vec![0; limits.max_ranges * 36 + 60]);
    let needed = Layout::decoding_bytes(&largest, limits).unwrap();
    assert!(needed < 160 << 20, "{needed}");
    let larger = codec::seal(&vec![0; limits.max_ranges * 36 + 61]);
    assert!(Layout::decoding_bytes(&larger, limits).is_err());
}
