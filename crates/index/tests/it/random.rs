//! Random libraries and calls: every plan is correct, and few matches are missed.

use drover_core::Digest;
use drover_index::testing::{Applied, Destination, ExactDedup};
use drover_index::{ImageId, Matcher, MatcherConfig};
use drover_storage::FakeDirectory;

use crate::library::{Image, send, tiny};

/// An image of the same world: files that other images have too, in similar order, some patched,
/// some cut, some only here.
fn image(rng: &mut fastrand::Rng, files: u64) -> Image {
    let mut image = Image::default();
    let mut f = rng.u64(..20);
    while f < files {
        let len = 1 + (f * 7919 % 97) * (f % 5) / 2;
        match rng.u32(..20) {
            0 => image.file(rng.u64(1 << 20..1 << 30), 0, len),
            1 => image.file(f, 0, len / 2),
            2 => image.file(f, len / 2, len),
            3 => {
                let cut = rng.u64(..=len);
                image
                    .file(f, 0, cut)
                    .file(1 << 30 | rng.u64(..1 << 30), 1, 2)
                    .file(f, cut, len)
            }
            4 => image.file(rng.u64(..files), 0, len),
            _ => image.file(f, 0, len),
        };
        f += rng.u64(1..4);
    }
    image
}

fn ids(d: &[Digest]) -> impl Iterator<Item = &Digest> {
    d.iter()
}

#[test]
fn plans_are_right_whatever_is_called() {
    for seed in 0..30 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let config = MatcherConfig {
            min_sequence: rng.u32(1..4),
            backward: rng.bool(),
            aligned: rng.bool(),
            sequence_limit: rng.u32(1..12),
            ..if seed % 2 == 0 {
                tiny()
            } else {
                MatcherConfig::paper()
            }
        };
        let storage = FakeDirectory::default();
        let (mut m, _) = Matcher::open(storage.clone(), config).unwrap();
        let mut d = Destination::new();
        let mut total = Applied::default();
        let mut next = 0;
        for _ in 0..40 {
            match rng.u32(..10) {
                0 => m.persist().unwrap(),
                1 => {
                    if rng.bool() {
                        m.persist().unwrap();
                    }
                    drop(m);
                    let report;
                    (m, report) = Matcher::open(storage.clone(), config).unwrap();
                    let harmless = |r: &drover_index::Repair| {
                        matches!(r, drover_index::Repair::SequencesRebuilt)
                    };
                    assert!(
                        report.repairs.iter().all(harmless),
                        "seed {seed}: {report:?}"
                    );
                }
                2 => {
                    if let Some(i) = rng.choice(m.images()) {
                        m.forget(i.image).unwrap();
                        d.delete(i.image);
                    }
                }
                3 => {
                    if let Some(i) = rng.choice(m.images()) {
                        m.reindex(i.image).unwrap();
                    }
                }
                _ => {
                    next += 1;
                    let image = image(&mut rng, 200);
                    let mut c = m.begin(ImageId(next)).unwrap();
                    let a = send(&mut m, &mut d, &mut c, &image, rng.usize(1..700)).unwrap();
                    assert_eq!(a.refetched, 0, "seed {seed}");
                    total.reused += a.reused;
                    total.literal += a.literal;
                    if rng.u32(..8) == 0 {
                        m.abort(c);
                        d.delete(ImageId(next));
                    } else {
                        m.finish(c).unwrap();
                    }
                }
            }
        }
        assert!(total.reused > total.literal / 2, "seed {seed}: {total:?}");
        let s = m.stats();
        assert!(s.c2.entries <= s.c2.capacity);
    }
}

#[test]
fn nearly_everything_that_an_exact_deduplicator_finds() {
    let mut rng = fastrand::Rng::with_seed(99);
    let (mut m, _) = Matcher::open(FakeDirectory::default(), MatcherConfig::default()).unwrap();
    let mut d = Destination::new();
    let mut exact = ExactDedup::new();
    let (mut ours, mut best) = (0, 0);
    for id in 0..12 {
        let image = image(&mut rng, 2000);
        best += ids(&image.digests).filter(|d| exact.seen(d)).count() as u64;
        let mut c = m.begin(ImageId(id)).unwrap();
        ours += send(&mut m, &mut d, &mut c, &image, 2048).unwrap().reused;
        m.finish(c).unwrap();
    }
    let share = ours as f64 / best as f64;
    eprintln!("{ours} of {best} blocks: {share:.4}");
    assert!(share >= 0.98, "{share}");
}
