//! Compared with plain models: memory instead of files, byte by byte.

mod sharing;

use std::sync::Arc;

use drover_image::{Format, GrainRange, Outgoing, RangeKind};
use drover_index::{digest_block, image_digest};
use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::protocol::BATCH_BLOCKS;
use crate::walk::Walk;

/// Contents of a file, with some zero blocks, and a layout such as a container might have.
fn any_file(rng: &mut Rng) -> (Vec<u8>, Layout) {
    let grain = [512u32, 4096, 4096, 16384][rng.usize(0..4)];
    let slots = rng.usize(1..60);
    let tail = if rng.bool() { 0 } else { rng.usize(1..4096) };
    let file_len = slots * grain as usize + tail;
    let mut bytes = vec![0; file_len];
    let mut order: Vec<u64> = (0..slots as u64).collect();
    if rng.bool() {
        rng.shuffle(&mut order);
    }
    let (mut ranges, mut walk) = (Vec::<GrainRange>::new(), 0u64);
    let mut rest = &order[..];
    while let Some((&first, _)) = rest.split_first() {
        // As long as the slots are consecutive in one direction.
        let run = |step: i64| {
            let follows = |(i, s): (usize, &u64)| *s as i64 == first as i64 + step * i as i64;
            rest.iter()
                .enumerate()
                .take_while(|p| follows((p.0, p.1)))
                .count()
        };
        let (order, longest) = match run(-1) {
            n if n > 1 => (Order::Reverse, n),
            _ => (Order::Forward, run(1)),
        };
        let count = rng.usize(1..=longest);
        rest = &rest[count..];
        if rng.u8(0..6) == 0 {
            continue; // A hole.
        }
        match rng.u8(0..4) {
            0 => walk += rng.u64(0..8192),
            1 => {}
            _ => walk = walk.next_multiple_of(BLOCK_SIZE_U64),
        }
        let range = GrainRange {
            walk,
            file: first * u64::from(grain),
            grain,
            count: count as u64,
            order,
            kind: RangeKind::Data,
        };
        let span = range.file_span();
        for block in bytes[span.start as usize..span.end as usize].chunks_mut(4096) {
            if rng.u8(0..4) != 0 {
                rng.fill(block);
            }
        }
        walk = range.walk_end();
        ranges.push(range);
    }
    let layout = Layout::new(file_len as u64, grain, ranges).expect("a layout");
    (bytes, layout)
}

/// The walk, byte by byte.
fn plain_walk(bytes: &[u8], layout: &Layout) -> Vec<u8> {
    let mut out = vec![0; layout.walk_blocks() as usize * BLOCK_SIZE];
    for r in layout.ranges() {
        for i in 0..r.count {
            let (to, from) = (
                r.walk + i * u64::from(r.grain),
                match r.order {
                    Order::Forward => r.file + i * u64::from(r.grain),
                    Order::Reverse => r.file - i * u64::from(r.grain),
                },
            );
            let (to, from, n) = (to as usize, from as usize, r.grain as usize);
            out[to..to + n].copy_from_slice(&bytes[from..from + n]);
        }
    }
    out
}

fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut out = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut out, 0).unwrap();
    out
}

/// Walks the file and returns its digest from the walk, and from its batches in another order.
fn walked_digests(rng: &mut Rng, bytes: Vec<u8>, layout: &Layout) -> (Digest, Option<Digest>) {
    let image = Outgoing {
        content: Arc::new(bytes.clone()),
        layout: layout.clone(),
        format: Format::Raw,
        virtual_size: bytes.len() as u64,
        notes: vec![],
        stamps: vec![],
    };
    let plain = plain_walk(&bytes, layout);
    let mut walk = Walk::new(&image);
    let mut batches = Vec::new();
    while let Some(batch) = walk.next_batch().unwrap() {
        let blocks = batch
            .data
            .iter()
            .map(|i| (batch.first_block() + i) as usize * BLOCK_SIZE);
        let full: Vec<_> = blocks
            .map(|at| digest_block(&plain[at..at + BLOCK_SIZE]))
            .collect();
        batches.push((Arc::new(batch), full));
    }
    rng.shuffle(&mut batches);
    let ordered = OrderedDigest::new(layout).map(|mut ordered| {
        for (batch, full) in batches {
            ordered.batch(layout, batch, full);
        }
        ordered.finish(layout)
    });
    (walk.digest().unwrap(), ordered)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn the_digest_by_the_walk_is_the_files_digest(seed in any::<u64>()) {
        let mut rng = Rng::with_seed(seed);
        let (bytes, layout) = any_file(&mut rng);
        let expected = image_digest(&bytes, []).unwrap();
        let (walked, ordered) = walked_digests(&mut rng, bytes, &layout);
        prop_assert_eq!(walked, expected);
        prop_assert!(ordered.is_none_or(|d| d == expected));
    }

    #[test]
    fn digests_in_place_are_those_of_the_walk(seed in any::<u64>(), cut in any::<bool>()) {
        let mut rng = Rng::with_seed(seed);
        let (mut bytes, layout) = any_file(&mut rng);
        let file = file_of(&bytes);
        if cut {
            // The file has become shorter: missing data counts as zeros.
            let at = rng.usize(0..bytes.len());
            file.set_len(at as u64).unwrap();
            bytes[at..].fill(0);
        }
        let plain = plain_walk(&bytes, &layout);
        let mut runs = Vec::new();
        let (mut at, mut expected) = (0, Vec::new());
        while at < layout.walk_blocks() {
            let n = rng.u64(1..=layout.walk_blocks() - at);
            if rng.bool() {
                runs.push((BlockIndex(at), n));
                let range = at as usize * BLOCK_SIZE..(at + n) as usize * BLOCK_SIZE;
                expected.extend(plain[range].chunks(BLOCK_SIZE).map(digest_block));
            }
            at += n;
        }
        let mut found = Vec::new();
        digest_in_place(&file, &layout, &runs, &mut found).unwrap();
        prop_assert!(found == expected);
    }

    #[test]
    fn what_is_written_by_the_walk_is_the_file(seed in any::<u64>()) {
        let mut rng = Rng::with_seed(seed);
        let (bytes, layout) = any_file(&mut rng);
        let plain = plain_walk(&bytes, &layout);
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        let mut at = 0;
        while at < layout.walk_blocks() {
            let n = rng.u64(1..=layout.walk_blocks() - at);
            let range = at as usize * BLOCK_SIZE..(at + n) as usize * BLOCK_SIZE;
            write_walk(&file, &layout, BlockIndex(at), &plain[range]).unwrap();
            at += n;
        }
        prop_assert!(bytes_of(&file) == bytes);
        // A single nonzero byte in padding must be rejected.
        let padding = layout.pieces(0, u64::MAX).filter(|p| p.file.is_none());
        for piece in padding.take(20) {
            let block = piece.walk / BLOCK_SIZE_U64;
            let start = block as usize * BLOCK_SIZE;
            let mut bad = plain[start..start + BLOCK_SIZE].to_vec();
            bad[(piece.walk % BLOCK_SIZE_U64) as usize] = 1;
            let e = write_walk(&file, &layout, BlockIndex(block), &bad).unwrap_err();
            prop_assert_eq!(e.kind(), io::ErrorKind::InvalidData);
        }
        prop_assert!(bytes_of(&file) == bytes);
    }

    #[test]
    fn spans_are_the_places_of_blocks(seed in any::<u64>()) {
        let mut rng = Rng::with_seed(seed);
        let (bytes, layout) = any_file(&mut rng);
        let plain = plain_walk(&bytes, &layout);
        let mut runs = Vec::new();
        let mut expected = Vec::new();
        for _ in 0..rng.usize(0..6) {
            let blocks = layout.walk_blocks();
            if blocks == 0 { break; }
            let first = rng.u64(0..blocks);
            let n = rng.u64(1..=blocks - first);
            runs.push((BlockIndex(first), n));
            expected.extend_from_slice(&plain[first as usize * BLOCK_SIZE..][..n as usize * BLOCK_SIZE]);
        }
        let mut found = Vec::new();
        for (at, len) in spans_of(&layout, &runs) {
            match at {
                Some(at) => found.extend_from_slice(&bytes[at as usize..(at + len) as usize]),
                None => found.resize(found.len() + len as usize, 0),
            }
        }
        prop_assert!(found == expected);
    }

    #[test]
    fn copies_agree_with_a_byte_by_byte_model(seed in any::<u64>()) {
        copies_like_the_model(&mut Rng::with_seed(seed), tempfile::tempfile().unwrap());
    }
}

/// Disjoint spans within `len` bytes, of `total` bytes altogether.
fn any_spans(rng: &mut Rng, len: u64, total: u64) -> Spans {
    let mut parts: Vec<(u64, u64)> = Vec::new();
    let (mut at, mut left) = (0, total);
    while at < len && left > 0 {
        let n = rng.u64(1..=9000).min(len - at).min(left);
        if rng.bool() {
            parts.push((at, n));
            left -= n;
        }
        at += n;
    }
    rng.shuffle(&mut parts);
    let mut out: Spans = Vec::new();
    for (at, n) in parts {
        if rng.u8(0..5) == 0 {
            out.push((None, rng.u64(1..5000)));
        }
        out.push((Some(at), n));
    }
    out
}

fn copies_like_the_model(rng: &mut Rng, target: File) {
    let mut from_bytes = vec![0; rng.usize(1..60_000)];
    let mut to_bytes = vec![0; rng.usize(1..60_000)];
    rng.fill(&mut from_bytes);
    rng.fill(&mut to_bytes);
    target.write_all_at(&to_bytes, 0).unwrap();
    let source = file_of(&from_bytes);
    // The source may be shorter than expected.
    let thought = from_bytes.len() as u64 + rng.u64(0..5000);
    let from = any_spans(rng, thought, 40_000);
    let to = any_spans(rng, to_bytes.len() as u64, 40_000);
    let places = |spans: &Spans| -> Vec<Option<u64>> {
        let flat = |&(at, n): &(Option<u64>, u64)| (0..n).map(move |i| at.map(|a| a + i));
        spans.iter().flat_map(flat).collect()
    };
    for (f, t) in places(&from).into_iter().zip(places(&to)) {
        if let (Some(f), Some(t)) = (f, t)
            && let Some(byte) = from_bytes.get(f as usize)
        {
            to_bytes[t as usize] = *byte;
        }
    }
    copy_spans(&source, &from, &target, &to).unwrap();
    assert!(bytes_of(&target) == to_bytes);
    assert!(bytes_of(&source) == from_bytes);
}

/// Between two file systems the bytes are copied through memory.
#[test]
fn copies_between_file_systems_agree_with_the_model() {
    use std::os::unix::fs::MetadataExt;
    let here = tempfile::tempfile().unwrap().metadata().unwrap().dev();
    let Ok(there) = tempfile::tempfile_in("/dev/shm") else {
        eprintln!("SKIP copies between file systems: no /dev/shm");
        return;
    };
    if there.metadata().unwrap().dev() == here {
        eprintln!("SKIP copies between file systems: there is only one");
        return;
    }
    for seed in 0..60 {
        let target = tempfile::tempfile_in("/dev/shm").unwrap();
        copies_like_the_model(&mut Rng::with_seed(seed), target);
    }
}

#[test]
fn digests_of_several_batches_with_holes_and_a_short_tail() {
    for (seed, tail) in [(1, 0), (2, 1), (3, 4095)] {
        let mut rng = Rng::with_seed(seed);
        let blocks = 2 * BATCH_BLOCKS as usize + 777;
        let mut bytes = vec![0; blocks * BLOCK_SIZE + tail];
        rng.fill(&mut bytes);
        let mut present = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let n = (rng.usize(1..900) * BLOCK_SIZE).min(bytes.len() - at);
            if rng.bool() {
                present.push(at as u64..(at + n) as u64);
            } else {
                bytes[at..at + n].fill(0);
            }
            at += n;
        }
        let layout = Layout::in_file_order(bytes.len() as u64, &present);
        assert!(walks_in_file_order(&layout));
        let expected = image_digest(&bytes, []).unwrap();
        let (walked, ordered) = walked_digests(&mut rng, bytes, &layout);
        assert_eq!((walked, ordered), (expected, Some(expected)));
    }
}

#[test]
fn only_walks_in_file_order_are_taken_for_such() {
    let range = |walk, file, count| GrainRange {
        walk,
        file,
        grain: 4096,
        count,
        order: Order::Forward,
        kind: RangeKind::Data,
    };
    let in_order = |ranges| walks_in_file_order(&Layout::new(50_000, 4096, ranges).unwrap());
    assert!(in_order(vec![]));
    assert!(in_order(vec![range(0, 4096, 2), range(8192, 20480, 1)]));
    assert!(!in_order(vec![range(0, 20480, 1), range(4096, 4096, 2)]));
    assert!(
        !in_order(vec![range(0, 512, 2)]),
        "between the file's blocks"
    );
    assert!(
        !in_order(vec![range(512, 4096, 2)]),
        "between the walk's blocks"
    );
    let reverse = GrainRange {
        order: Order::Reverse,
        ..range(0, 8192, 2)
    };
    assert!(!in_order(vec![reverse]));
    let short = GrainRange {
        grain: 512,
        ..range(0, 4096, 3)
    };
    assert!(!in_order(vec![short]), "ends inside a block");
}
