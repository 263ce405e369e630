use super::*;
use proptest::prelude::*;

use std::os::unix::fs::{FileExt, MetadataExt};

const OWN: ImageId = ImageId(1);

fn open(dir: &Path) -> Sequences {
    Sequences::open(dir, u64::MAX).unwrap()
}

fn store(first: u64, from: u64, count: u32) -> SequenceStore {
    SequenceStore {
        first,
        from: CompactIndex(from),
        count,
    }
}

fn any_copy(s: &Sequences) -> Option<Copy> {
    s.next_copy(0, |_| true, |_| false)
}

const COMING: ImageId = ImageId(3);

/// Complete: image 2; incoming: image 3; no others.
fn reach(image: ImageId, _: CompactIndex, _: u64) -> Reach {
    match image {
        ImageId(2) => Reach::Here,
        COMING => Reach::Coming,
        _ => Reach::Gone,
    }
}

fn place(image: u64, first: u64) -> From {
    match ImageId(image) {
        OWN => From::Own {
            first: CompactIndex(first),
        },
        image => From::Image {
            image,
            first: CompactIndex(first),
        },
    }
}

/// The rules, in order.
fn expected(brought: (u64, u64), found: Option<(u64, u64)>) -> From {
    let (a, b) = (Some(brought), found);
    let is = |c: Option<(u64, u64)>, image| c.filter(|(i, _)| *i == image);
    let order = [is(a, 1), is(a, 2), is(b, 2), is(b, 1), is(b, 3), is(a, 3)];
    let first = order.into_iter().flatten().next();
    first.map_or(From::Literal, |(i, at)| place(i, at))
}

proptest! {
    /// Compares with a plain table of the source of every slot.
    #[test]
    fn slots_are_found_where_they_were_last_put(
        adds in prop::collection::vec((0u64..6, 0u64..SEGMENT_SLOTS, 1u32..60, 1u64..5, 0u64..1000, prop::option::of((1u64..5, 0u64..1000))), 0..60),
        asks in prop::collection::vec((0u64..1600, 1u32..128), 1..20),
        dropped in prop::option::of(1u64..5),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let s = open(dir.path());
        type Places = Option<((u64, u64), Option<(u64, u64)>)>;
        let mut plain: Vec<Places> = vec![None; 4000];
        for (page, start, count, image, from, found) in adds {
            let count = count.min((SEGMENT_SLOTS - start) as u32);
            let first = page * SEGMENT_SLOTS + start;
            s.add(ImageId(image), SequenceStore { first, from: CompactIndex(from), count }, found.map(|(i, at)| (ImageId(i), CompactIndex(at))));
            for i in 0..u64::from(count) {
                plain[(first + i) as usize] = Some(((image, from + i), found.map(|(f, at)| (f, at + i))));
            }
        }
        if let Some(gone) = dropped {
            s.drop_image(ImageId(gone));
            for slot in &mut plain {
                *slot = slot.and_then(|(brought, found)| {
                    let found = found.filter(|f| f.0 != gone);
                    if brought.0 == gone { found.map(|f| (f, None)) } else { Some((brought, found)) }
                });
            }
        }
        // As after a crash.
        drop(s);
        let s = open(dir.path());
        for (first, count) in asks {
            let found = s.resolve(first, count, OWN, reach);
            let mut at = first;
            for (n, from) in found {
                for i in 0..u64::from(n) {
                    let want = match plain[at as usize] {
                        None => From::Sequence { first: at },
                        Some((brought, found)) => expected(brought, found),
                    };
                    let got = match from {
                        From::Literal => From::Literal,
                        From::Own { first } => From::Own { first: first + i },
                        From::Image { image, first } => From::Image { image, first: first + i },
                        From::Sequence { first } => From::Sequence { first: first + i },
                    };
                    prop_assert_eq!(got, want);
                    at += 1;
                }
            }
            prop_assert_eq!(at, first + u64::from(count));
        }
    }
}

/// Blocks of an image that will not be completed are copied from where they were found.
#[test]
fn what_is_copied_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    let store = store(5, 10, 7);
    s.add(COMING, store, Some((ImageId(2), CompactIndex(90))));
    let whole = |i| i == ImageId(2);
    assert_eq!(s.next_copy(0, whole, |i| i == COMING), None);
    let copy = s.next_copy(0, whole, |_| false).unwrap();
    assert_eq!(
        (copy.image, copy.from, copy.count),
        (ImageId(2), CompactIndex(90), 7)
    );
    let copy = s.next_copy(0, |_| true, |_| true).unwrap();
    assert_eq!((copy.image, copy.from), (COMING, CompactIndex(10)));
    // Reassigned meanwhile.
    s.add(
        COMING,
        SequenceStore {
            from: CompactIndex(11),
            ..store
        },
        None,
    );
    assert_eq!(s.copy(copy, || Copied::Made), Copied::Never);
    assert_eq!(s.pending(), 1);
    let copy = s.next_copy(0, |_| true, |_| false).unwrap();
    assert_eq!(s.copy(copy, || Copied::Made), Copied::Made);
    assert_eq!(s.pending(), 0);
}

#[test]
fn a_copy_that_failed_stays_pending_and_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    s.add(ImageId(2), store(5, 10, 7), None);
    let copy = any_copy(&s).unwrap();
    assert_eq!(s.copy(copy, || Copied::Later), Copied::Later);
    let image = ImageId(2);
    assert_eq!(
        s.resolve(5, 7, OWN, reach),
        [(
            7,
            From::Image {
                image,
                first: CompactIndex(10)
            }
        )]
    );
    assert_eq!(any_copy(&s), Some(copy));
    assert_eq!(s.copy(copy, || Copied::Made), Copied::Made);
    assert_eq!(
        s.resolve(5, 7, OWN, reach),
        [(7, From::Sequence { first: 5 })]
    );
    // Blocks that will never exist are not waited for.
    s.add(ImageId(2), store(5, 10, 7), None);
    s.copy(any_copy(&s).unwrap(), || Copied::Never);
    assert_eq!(s.pending(), 0);
}

/// A store that was pending once must not be copied over a later one.
#[test]
fn a_crash_brings_nothing_back_that_was_copied() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    s.add(ImageId(2), store(5, 10, 7), None);
    drop(s);
    let s = open(dir.path());
    assert_eq!(s.pending(), 1);
    s.copy(any_copy(&s).unwrap(), || Copied::Made);
    s.add(ImageId(4), store(5, 90, 7), None);
    s.copy(any_copy(&s).unwrap(), || Copied::Made);
    drop(s);
    assert_eq!(open(dir.path()).pending(), 0);
}

#[test]
fn a_truncated_or_damaged_journal_yields_the_records_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sequences.pending");
    let s = open(dir.path());
    let mut counts = vec![0];
    for i in 0..5 {
        s.add(
            ImageId(2),
            store(i * 10, i, 3),
            Some((ImageId(7), CompactIndex(i))),
        );
        counts.push(s.pending());
    }
    s.free(&[0]);
    counts.push(s.pending());
    drop(s);
    let whole = std::fs::read(&path).unwrap();
    assert_eq!((whole.len() - 16) % 56, 0);
    for cut in 0..=whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let records = cut.saturating_sub(16) / 56;
        let s = open(dir.path());
        assert_eq!(s.pending(), counts[records], "cut at {cut}");
        // Journaling continues from there.
        s.add(ImageId(2), store(1000, 0, 1), None);
        drop(s);
        assert_eq!(open(dir.path()).pending(), counts[records] + 1);
    }
    for at in (0..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&path, &bytes).unwrap();
        let records = at.saturating_sub(16) / 56;
        assert_eq!(open(dir.path()).pending(), counts[records], "{at} changed");
    }
    // The packed table of an old version.
    std::fs::write(&path, [1, 0, 5, 5, 5, 5]).unwrap();
    assert_eq!(open(dir.path()).pending(), 0);
}

#[test]
fn the_journal_stays_small() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    for i in 0..40_000 {
        s.add(ImageId(2), store(i % 100, i, 1), None);
    }
    drop(s);
    let size = dir.path().join("sequences.pending").metadata().unwrap();
    assert!(size.len() < 20_000 * 56, "{}", size.len());
    assert_eq!(open(dir.path()).pending(), 100);
}

#[test]
fn a_limit_holds_also_when_it_is_lowered() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    s.data()
        .write_all_at(&[1; 4096], 3 * SEGMENT_BYTES)
        .unwrap();
    s.add(ImageId(2), store(312, 0, 28), None);
    s.add(ImageId(2), store(700, 0, 28), None);
    drop(s);
    let s = Sequences::open(dir.path(), 2 * SEGMENT_BYTES + 5).unwrap();
    assert_eq!(s.data().metadata().unwrap().len(), 2 * SEGMENT_BYTES);
    assert_eq!(s.pending(), 1);
    s.add(ImageId(2), store(680, 0, 28), None);
    s.add(ImageId(2), store(670, 0, 28), None);
    assert_eq!(s.pending(), 1, "beyond the limit");
    let halves = [(80, From::Sequence { first: 600 }), (20, From::Literal)];
    assert_eq!(s.resolve(600, 100, OWN, reach), halves);
    assert_eq!(s.resolve(700, 10, OWN, reach), [(10, From::Literal)]);
    drop(s);
    assert_eq!(open(dir.path()).pending(), 1, "for good");
}

#[test]
fn freed_segments_go_back_to_the_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    let segment = vec![7; SEGMENT_BYTES as usize];
    for no in 0..6 {
        s.data().write_all_at(&segment, no * SEGMENT_BYTES).unwrap();
    }
    s.data().sync_all().unwrap();
    let used = || s.data().metadata().unwrap().blocks() * 512;
    let before = used();
    s.add(ImageId(2), store(350, 0, 28), None);
    s.add(ImageId(2), store(700, 0, 28), None);
    s.free(&[1, 3, 4]);
    assert_eq!(s.pending(), 1);
    assert!(before - used() >= 3 * SEGMENT_BYTES, "{before}, {}", used());
    for no in 0..6 {
        let mut found = vec![1; SEGMENT_BYTES as usize];
        s.data()
            .read_exact_at(&mut found, no * SEGMENT_BYTES)
            .unwrap();
        let want = if [1, 3, 4].contains(&no) { 0 } else { 7 };
        assert!(found.iter().all(|b| *b == want), "segment {no}");
    }
}

/// Freed segments contain no partial copy and occupy no untracked space.
#[test]
fn slots_that_are_being_copied_are_freed_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    s.add(ImageId(2), store(0, 0, SEGMENT_SLOTS as u32), None);
    let copy = any_copy(&s).unwrap();
    std::thread::scope(|scope| {
        let copied = s.copy(copy, || {
            scope.spawn(|| s.free(&[0]));
            while s.pending() > 0 {
                std::thread::yield_now();
            }
            let segment = vec![7; SEGMENT_BYTES as usize];
            s.data().write_all_at(&segment, 0).unwrap();
            Copied::Made
        });
        assert_eq!(copied, Copied::Made);
    });
    let mut found = vec![1; SEGMENT_BYTES as usize];
    s.data().read_exact_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|b| *b == 0));
}

/// With the disk full everything continues, and once there is space the journal is complete again.
#[test]
fn a_journal_that_cannot_be_written_is_written_later() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    s.add(ImageId(2), store(0, 0, 9), None);
    // A directory with the name of the new file, and the old one gone.
    let blocked = dir.path().join("sequences.pending.new");
    std::fs::create_dir_all(blocked.join("x")).unwrap();
    s.pending.lock().journal.fail();
    s.add(ImageId(2), store(200, 0, 9), None);
    s.settle();
    assert!(!dir.path().join("sequences.pending").exists());
    assert_eq!(s.pending(), 2);
    std::fs::remove_dir_all(&blocked).unwrap();
    s.settle();
    s.add(ImageId(2), store(400, 0, 9), None);
    drop(s);
    assert_eq!(open(dir.path()).pending(), 3);
}

/// A step of the random test.
#[derive(Debug, Clone)]
enum Step {
    Add(u64, u32, u64, u64, Option<(u64, u64)>),
    Drop(u64),
    Free(u32),
    /// The first possible copy from a slot on, and its outcome.
    Copy(u64, Copied),
    Crash,
    Settle,
}

fn any_step() -> impl Strategy<Value = Step> {
    let add = (
        0u64..6,
        0u64..SEGMENT_SLOTS,
        1u32..60,
        1u64..5,
        0u64..1000,
        prop::option::of((1u64..5, 0u64..1000)),
    );
    let add = add.prop_map(|(page, start, count, image, from, found)| {
        Step::Add(
            page * SEGMENT_SLOTS + start,
            count.min((SEGMENT_SLOTS - start) as u32),
            image,
            from,
            found,
        )
    });
    let copied = prop_oneof![
        4 => Just(Copied::Made),
        1 => Just(Copied::Later),
        1 => Just(Copied::Never)
    ];
    prop_oneof![
        6 => add,
        1 => (1u64..5).prop_map(Step::Drop),
        1 => (0u32..6).prop_map(Step::Free),
        4 => (0u64..6 * SEGMENT_SLOTS, copied).prop_map(|(at, copied)| Step::Copy(at, copied)),
        1 => Just(Step::Crash),
        1 => Just(Step::Settle),
    ]
}

proptest! {
    /// Compares with a plain table of slots: after any steps and a crash at any time, the pending stores are the same.
    #[test]
    fn a_crash_at_any_moment_keeps_what_is_pending(steps in prop::collection::vec(any_step(), 0..80)) {
        type Place = Option<((u64, u64), Option<(u64, u64)>)>;
        let dir = tempfile::tempdir().unwrap();
        let mut s = open(dir.path());
        let mut plain: Vec<Place> = vec![None; 6 * SEGMENT_SLOTS as usize];
        for step in steps {
            match step {
                Step::Add(first, count, image, from, found) => {
                    s.add(ImageId(image), store(first, from, count), found.map(|(i, at)| (ImageId(i), CompactIndex(at))));
                    for i in 0..u64::from(count) {
                        plain[(first + i) as usize] = Some(((image, from + i), found.map(|(f, at)| (f, at + i))));
                    }
                }
                Step::Drop(gone) => {
                    s.drop_image(ImageId(gone));
                    for slot in &mut plain {
                        *slot = slot.and_then(|(brought, found)| {
                            let found = found.filter(|f| f.0 != gone);
                            if brought.0 == gone { found.map(|f| (f, None)) } else { Some((brought, found)) }
                        });
                    }
                }
                Step::Free(no) => {
                    s.free(&[no]);
                    plain[no as usize * SEGMENT_SLOTS as usize..][..SEGMENT_SLOTS as usize].fill(None);
                }
                Step::Copy(at, how) => {
                    if let Some(copy) = s.next_copy(at, |_| true, |_| false) {
                        prop_assert!(copy.first >= at);
                        prop_assert_eq!(s.copy(copy, || how), how);
                        if how != Copied::Later {
                            plain[copy.first as usize..][..copy.count as usize].fill(None);
                        }
                    }
                }
                Step::Crash => {
                    drop(s);
                    s = open(dir.path());
                }
                Step::Settle => s.settle(),
            }
            let kept = s.pending.lock();
            kept.table.check();
            let mut found: Vec<Place> = vec![None; plain.len()];
            for (first, p) in kept.table.iter() {
                for i in 0..u64::from(p.count) {
                    found[(first + i) as usize] = Some(((p.image, p.from.0 + i), p.found.map(|(f, at)| (f, at.0 + i))));
                }
            }
            prop_assert_eq!(&found, &plain);
        }
    }
}
