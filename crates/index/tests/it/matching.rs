//! Matches, case by case.

use drover_core::Head;
use drover_index::testing::{Applied, Destination};
use drover_index::{
    AnchorPolicy, ImageId, IndexError, Matcher, MatcherConfig, Origin, PlanRun, Repair, Trimmed,
    Via,
};
use drover_storage::FakeDirectory;

use crate::library::{Image, block, digest, send, tiny};

fn open(config: MatcherConfig) -> (Matcher, Destination) {
    let (m, report) = Matcher::open(FakeDirectory::default(), config).unwrap();
    assert_eq!(report, Default::default());
    (m, Destination::new())
}

fn whole(m: &mut Matcher, d: &mut Destination, id: u64, image: &Image, batch: usize) -> Applied {
    let mut cursor = m.begin(ImageId(id)).unwrap();
    let a = send(m, d, &mut cursor, image, batch).unwrap();
    m.finish(cursor).unwrap();
    a
}

const BIG: [(u64, u64); 6] = [(1, 300), (2, 5), (3, 90), (4, 1), (5, 700), (6, 33)];

#[test]
fn the_same_image_again_is_all_matched_in_images_and_then_in_sequences() {
    for config in [MatcherConfig::default(), MatcherConfig::paper()] {
        for batch in [1, 100, 340, 2048] {
            let (mut m, mut d) = open(config);
            let image = Image::of(&BIG);
            let n = image.digests.len() as u64;
            assert_eq!(whole(&mut m, &mut d, 1, &image, batch).literal, n);
            let second = whole(&mut m, &mut d, 2, &image, batch);
            // The paper finds an image's very first block only if it is a head.
            assert_eq!(
                (second.reused, second.refetched),
                (n, 0),
                "batch of {batch}"
            );
            let stored = m.stats().sequence_blocks_stored;
            let third = whole(&mut m, &mut d, 3, &image, batch);
            assert_eq!((third.reused, third.refetched), (n, 0));
            let before = m.stats();
            assert_eq!(before.sequence_blocks_stored, stored, "nothing twice");
            // Images are asked first; the sequence cache has all of it when they are gone.
            for id in 1..=3 {
                m.forget(ImageId(id)).unwrap();
                d.delete(ImageId(id));
            }
            let fourth = whole(&mut m, &mut d, 4, &image, batch);
            assert_eq!((fourth.reused, fourth.refetched), (n, 0));
            let after = m.stats();
            assert!(after.via_c2 - before.via_c2 > n * 9 / 10, "{after:?}");
        }
    }
}

#[test]
fn sequences_outlive_the_images_they_came_from() {
    let (mut m, mut d) = open(MatcherConfig::default());
    let image = Image::of(&BIG);
    whole(&mut m, &mut d, 1, &image, 500);
    whole(&mut m, &mut d, 2, &image, 500);
    for id in [1, 2] {
        m.forget(ImageId(id)).unwrap();
        d.delete(ImageId(id));
    }
    assert_eq!((m.stats().c0.entries, m.stats().c1.entries), (0, 0));
    assert!(m.images().is_empty());
    let third = whole(&mut m, &mut d, 3, &image, 500);
    assert_eq!(third.reused, image.digests.len() as u64);
}

#[test]
fn an_image_that_later_ones_pushed_out_is_found_again_once_it_is_recalled() {
    for recalled in [false, true] {
        let (mut m, mut d) = open(MatcherConfig::default());
        let image = Image::of(&[(1, 900)]);
        whole(&mut m, &mut d, 1, &image, 500);
        for id in 2..42 {
            whole(&mut m, &mut d, id, &Image::of(&[(id, 30)]), 500);
        }
        if recalled {
            m.recall(ImageId(1)).unwrap();
            // One that is not there, and one that has its place.
            m.recall(ImageId(99)).unwrap();
            m.recall(ImageId(41)).unwrap();
        }
        // It keeps its place as long as one that came then.
        for id in 42..62 {
            whole(&mut m, &mut d, id, &Image::of(&[(id, 30)]), 500);
        }
        let again = whole(&mut m, &mut d, 100, &image, 500);
        let reused = if recalled { 900 } else { 0 };
        assert_eq!((again.reused, again.refetched), (reused, 0));
    }
}

#[test]
fn trimming_keeps_what_the_images_that_are_left_use() {
    let (mut m, mut d) = open(MatcherConfig::default());
    let (gone, left) = (Image::of(&[(1, 2000)]), Image::of(&[(2, 2000)]));
    for (id, image) in [(1, &gone), (2, &gone), (3, &left), (4, &left)] {
        whole(&mut m, &mut d, id, image, 500);
    }
    let all = m.sequence_segments();
    assert!(all >= 10, "{all}");
    let mut none = m.begin_trim(all, all);
    assert_eq!(m.trim(&mut none), Trimmed::Done);
    for id in [1, 2] {
        m.forget(ImageId(id)).unwrap();
        d.delete(ImageId(id));
    }
    let mut trim = m.begin_trim(all / 2, all);
    let mut freed = Vec::new();
    loop {
        match m.trim(&mut trim) {
            Trimmed::Looked => {}
            Trimmed::Freed(some) => freed.extend(some),
            Trimmed::Done => break,
        }
    }
    assert_eq!(freed.len() as u32, all - all / 2);
    assert_eq!(m.sequence_segments(), all / 2);
    for id in [3, 4] {
        m.forget(ImageId(id)).unwrap();
        d.delete(ImageId(id));
    }
    let again = whole(&mut m, &mut d, 5, &left, 500);
    assert!(again.reused > 1900, "{again:?}");
    let again = whole(&mut m, &mut d, 6, &gone, 500);
    assert!(again.reused < 100, "{again:?}");
    // To nothing.
    let mut trim = m.begin_trim(0, 0);
    while m.trim(&mut trim) != Trimmed::Done {}
    assert_eq!(m.sequence_segments(), 0);
}

#[test]
fn a_match_in_the_middle_is_extended_both_ways() {
    // No anchors, so only the head of file 2 is found; the blocks before it are no heads here.
    let config = MatcherConfig {
        anchors: AnchorPolicy::Off,
        aligned: false,
        ..MatcherConfig::default()
    };
    let (mut m, mut d) = open(config);
    whole(&mut m, &mut d, 1, &Image::of(&[(1, 300), (2, 40)]), 512);
    let mut second = Image::default();
    second.file(9, 0, 10).file(1, 50, 300).file(2, 0, 40);
    let a = whole(&mut m, &mut d, 2, &second, 512);
    assert_eq!((a.literal, a.reused), (10, 290));
    assert_eq!(m.stats().backward, 250);

    let (mut m, mut d) = open(MatcherConfig {
        backward: false,
        ..config
    });
    whole(&mut m, &mut d, 1, &Image::of(&[(1, 300), (2, 40)]), 512);
    assert_eq!(whole(&mut m, &mut d, 2, &second, 512).reused, 40);
}

#[test]
fn after_a_mismatch_the_page_in_memory_goes_on_being_used() {
    let config = MatcherConfig {
        anchors: AnchorPolicy::Off,
        backward: false,
        ..MatcherConfig::default()
    };
    let (mut m, mut d) = open(config);
    whole(&mut m, &mut d, 1, &Image::of(&[(1, 100)]), 512);
    let mut patched = Image::of(&[(1, 100)]);
    for i in [10, 11, 50, 90] {
        patched.digests[i] = digest(i as u64);
    }
    // And blocks left out: not aligned, but in the same page.
    patched.digests.drain(60..70);
    patched.heads.drain(60..70);
    let reads = m.stats().pages_read;
    let a = whole(&mut m, &mut d, 2, &patched, 512);
    assert_eq!((a.literal, a.reused), (4, 86));
    assert!(m.stats().via_aligned > 70);
    assert!(m.stats().pages_read - reads <= 1);
}

#[test]
fn repeats_inside_a_batch_and_an_image() {
    let (mut m, mut d) = open(MatcherConfig::default());
    let mut image = Image::default();
    for _ in 0..100 {
        image.file(7, 3, 4);
    }
    image.file(8, 0, 20).file(8, 0, 20);
    let mut cursor = m.begin(ImageId(1)).unwrap();
    let plan = m.batch(&mut cursor, &image.digests, &image.heads).unwrap();
    let a = d.apply(ImageId(1), &image.digests, &plan).unwrap();
    assert_eq!((a.literal, a.reused, a.refetched), (21, 119, 0));
    // A run never reads what it makes, so a run of equal blocks doubles.
    assert!(plan.runs.len() < 15, "{plan:?}");
    let again = send(&mut m, &mut d, &mut cursor, &image, 64).unwrap();
    assert_eq!((again.literal, again.refetched), (0, 0));
}

#[test]
fn several_images_in_transit_match_each_other() {
    let (mut m, mut d) = open(MatcherConfig::default());
    let image = Image::of(&BIG);
    let mut a = m.begin(ImageId(1)).unwrap();
    let mut b = m.begin(ImageId(2)).unwrap();
    assert!(matches!(
        m.begin(ImageId(1)),
        Err(IndexError::Busy(ImageId(1)))
    ));
    let (mut literal, mut reused) = (0, 0);
    for (ds, hs) in image.digests.chunks(100).zip(image.heads.chunks(100)) {
        for c in [&mut a, &mut b] {
            let plan = m.batch(c, ds, hs).unwrap();
            let got = d.apply(c.image(), ds, &plan).unwrap();
            assert_eq!(got.refetched, 0);
            literal += got.literal;
            reused += got.reused;
        }
    }
    assert_eq!(
        (literal, reused),
        (image.digests.len() as u64, image.digests.len() as u64)
    );
    m.abort(a);
    assert_eq!(m.images().len(), 1);
    let more = Image::of(&[(50, 40)]);
    send(&mut m, &mut d, &mut b, &more, 64).unwrap();
    m.finish(b).unwrap();
}

#[test]
fn recorded_blocks_are_found_and_known_ones_take_no_room() {
    let (mut m, mut d) = open(MatcherConfig::default());
    let image = Image::of(&BIG);
    for id in [1, 2] {
        let mut c = m.begin(ImageId(id)).unwrap();
        d.begin(ImageId(id));
        m.record(&mut c, &image.digests, &image.heads).unwrap();
        let plan = drover_index::Plan {
            runs: vec![PlanRun {
                count: image.digests.len() as u32,
                origin: Origin::Literal,
                via: Via::Literal,
            }],
            stores: vec![],
        };
        d.apply(ImageId(id), &image.digests, &plan).unwrap();
        assert_eq!(c.blocks(), image.digests.len() as u64);
        m.finish(c).unwrap();
    }
    let s = m.stats();
    assert_eq!(s.c0.entries + s.c1.entries, image.digests.len() as u64);
    assert_eq!(s.blocks, 0, "recording is not asking");
    assert_eq!(whole(&mut m, &mut d, 3, &image, 300).literal, 0);
}

#[test]
fn another_image_takes_over_what_a_forgotten_one_was_known_for() {
    let (mut m, mut d) = open(MatcherConfig {
        min_sequence: u32::MAX,
        ..MatcherConfig::default()
    });
    let image = Image::of(&BIG);
    whole(&mut m, &mut d, 1, &image, 300);
    whole(&mut m, &mut d, 2, &image, 300);
    m.forget(ImageId(1)).unwrap();
    d.delete(ImageId(1));
    m.reindex(ImageId(2)).unwrap();
    let entries = m.stats().c0.entries + m.stats().c1.entries;
    m.reindex(ImageId(2)).unwrap();
    assert_eq!(
        m.stats().c0.entries + m.stats().c1.entries,
        entries,
        "nothing twice"
    );
    let a = whole(&mut m, &mut d, 3, &image, 300);
    assert_eq!((a.literal, a.refetched), (0, 0));
    assert!(matches!(
        m.reindex(ImageId(77)),
        Err(IndexError::Unknown(_))
    ));
}

#[test]
fn the_ring_of_recent_images() {
    let (mut m, mut d) = open(tiny());
    for id in 0..6 {
        whole(&mut m, &mut d, id, &Image::of(&[(100 + id, 20)]), 64);
    }
    let images = m.images();
    assert_eq!(images.len(), 6);
    let recent: Vec<u64> = images
        .iter()
        .filter(|i| i.recent)
        .map(|i| i.image.0)
        .collect();
    assert_eq!(recent, [2, 3, 4, 5]);
    // An old image comes back when there is room.
    m.reindex(ImageId(0)).unwrap();
    assert!(!m.images()[0].recent);
    m.forget(ImageId(3)).unwrap();
    m.reindex(ImageId(0)).unwrap();
    assert!(m.images()[0].recent);
    m.forget(ImageId(2)).unwrap();
    let a = whole(&mut m, &mut d, 9, &Image::of(&[(100, 20)]), 64);
    assert_eq!(a.reused, 20);
    // Images that are open are never pushed out.
    let cursors: Vec<_> = (20..24).map(|i| m.begin(ImageId(i)).unwrap()).collect();
    assert!(matches!(
        m.begin(ImageId(30)),
        Err(IndexError::TooManyOpen(4))
    ));
    cursors.into_iter().for_each(|c| m.abort(c));
    m.begin(ImageId(30)).unwrap();
}

#[test]
fn a_full_disk_refuses_a_batch_and_takes_it_later() {
    let storage = FakeDirectory::default();
    let (mut m, _) = Matcher::open(storage.clone(), MatcherConfig::default()).unwrap();
    let mut d = Destination::new();
    let image = Image::of(&BIG);
    whole(&mut m, &mut d, 1, &image, 300);
    let mut c = m.begin(ImageId(2)).unwrap();
    storage.set_capacity(Some(1));
    let (ds, hs) = (&image.digests[..400], &image.heads[..400]);
    let e = m.batch(&mut c, ds, hs).unwrap_err();
    assert!(e.retry_can_help(), "{e}");
    assert_eq!(c.blocks(), 0);
    storage.set_capacity(None);
    let a = send(&mut m, &mut d, &mut c, &image, 400).unwrap();
    assert_eq!((a.literal, a.refetched), (0, 0));
    m.finish(c).unwrap();
    assert!(m.take_repairs().is_empty());

    // If only the sequences do not fit, the transfer continues without them.
    let fresh = Image::of(&[(70, 60)]);
    whole(&mut m, &mut d, 3, &fresh, 60);
    let mut c = m.begin(ImageId(4)).unwrap();
    storage.set_capacity(Some(1));
    let plan = m.batch(&mut c, &fresh.digests, &fresh.heads).unwrap();
    assert!(plan.stores.is_empty());
    assert_eq!(m.take_repairs(), [Repair::SequencesNotWritten]);
    assert_eq!(
        d.apply(ImageId(4), &fresh.digests, &plan).unwrap().reused,
        60
    );
    storage.set_capacity(None);
    m.finish(c).unwrap();
    assert_eq!(whole(&mut m, &mut d, 5, &fresh, 60).refetched, 0);
}

#[test]
fn rules_of_the_interface() {
    let (mut m, _) = open(MatcherConfig::default());
    let mut c = m.begin(ImageId(1)).unwrap();
    assert!(matches!(
        m.batch(&mut c, &[block(1, 1)], &[]),
        Err(IndexError::BadBatch(_))
    ));
    let many = vec![block(1, 1); 4097];
    assert!(matches!(
        m.batch(&mut c, &many, &vec![Head::No; 4097]),
        Err(IndexError::BadBatch(_))
    ));
    assert_eq!(m.batch(&mut c, &[], &[]).unwrap(), Default::default());
    m.record(&mut c, &many, &vec![Head::No; 4097]).unwrap();
    m.forget(ImageId(1)).unwrap();
    assert!(matches!(
        m.batch(&mut c, &[block(1, 1)], &[Head::No]),
        Err(IndexError::BadBatch(_))
    ));
    assert!(m.finish(c).is_err());
    m.forget(ImageId(1234)).unwrap();

    for bad in [
        MatcherConfig {
            cached_pages: 0,
            ..MatcherConfig::default()
        },
        MatcherConfig {
            sequence_limit: 0,
            ..MatcherConfig::default()
        },
        MatcherConfig {
            sequence_limit: u32::MAX,
            ..MatcherConfig::default()
        },
        MatcherConfig {
            recent_layout: drover_index::Layout {
                fingerprint_bits: 9,
                ..drover_index::Layout::RECENT
            },
            ..MatcherConfig::default()
        },
    ] {
        assert!(matches!(
            Matcher::open(FakeDirectory::default(), bad),
            Err(IndexError::Config(_))
        ));
    }
}

#[test]
fn other_layouts_work_too() {
    use drover_index::Layout;
    let config = MatcherConfig {
        recent_layout: Layout {
            fingerprint_bits: 12,
            file_bits: 4,
            address_bits: 16,
        },
        sequence_layout: Layout {
            fingerprint_bits: 12,
            file_bits: 0,
            address_bits: 20,
        },
        c0_bytes: 5 << 20,
        c1_bytes: 3 << 20,
        c2_bytes: 1 << 20,
        ..MatcherConfig::default()
    };
    let (mut m, mut d) = open(config);
    let image = Image::of(&BIG);
    whole(&mut m, &mut d, 1, &image, 300);
    assert_eq!(whole(&mut m, &mut d, 2, &image, 300).literal, 0);
}

#[test]
fn memory_is_what_is_configured() {
    let (m, _) = open(MatcherConfig::default());
    let s = m.stats();
    assert_eq!(s.c0.bytes, 12 << 20);
    assert_eq!(s.c1.bytes, 4 << 20);
    assert_eq!(s.c2.bytes, 16 << 20);
    assert_eq!(s.c0.capacity + s.c1.capacity + s.c2.capacity, 8 << 20);
    assert!(s.memory < 34 << 20, "{}", s.memory);
}
