//! Power failures at any moment: the index opens again, and no plan contains a false claim.

use drover_core::Digest;
use drover_index::testing::Destination;
use drover_index::{ImageId, Matcher, MatcherConfig, Plan, Repair};
use drover_storage::FakeDirectory;

use crate::library::{Image, send, tiny};

/// Images that share files, sent by a story in which everything happens that writes.
fn images() -> Vec<Image> {
    (0..6u64)
        .map(|i| {
            let mut image = Image::default();
            for f in 0..40 {
                if (f + i) % 5 != 0 {
                    image.file(f, 0, 3 + f % 17);
                }
            }
            image.file(1000 + i, 0, 150);
            image
        })
        .collect()
}

fn config() -> MatcherConfig {
    MatcherConfig {
        sequence_limit: 5,
        ..tiny()
    }
}

/// Runs the story until the power fails or it ends. What the destination holds outlives it.
fn story(
    storage: &FakeDirectory,
    d: &mut Destination,
) -> Result<Vec<ImageId>, drover_index::IndexError> {
    let images = images();
    let (mut m, _) = Matcher::open(storage.clone(), config())?;
    let mut finished = Vec::new();
    for (id, image) in images.iter().enumerate() {
        let id = ImageId(id as u64);
        let mut c = m.begin(id)?;
        send(&mut m, d, &mut c, image, 200)?;
        m.finish(c)?;
        finished.push(id);
        match id.0 {
            1 | 4 => m.persist()?,
            2 => {
                m.forget(ImageId(0))?;
                finished.retain(|i| i.0 != 0);
            }
            3 => m.reindex(ImageId(2))?,
            _ => {}
        }
    }
    Ok(finished)
}

#[test]
fn at_every_write_of_a_story() {
    let dry = FakeDirectory::default();
    story(&dry, &mut Destination::new()).unwrap();
    let changes = dry.steps();
    let step = (changes / 150).max(1);
    let mut reports = (0, 0, 0);
    for at in (0..changes).step_by(step as usize) {
        let storage = FakeDirectory::default();
        storage.cut_power_at(at);
        let mut d = Destination::new();
        assert!(story(&storage, &mut d).is_err(), "the power fails at {at}");
        for seed in 0..3 {
            let after = storage.after_crash(at * 3 + seed);
            let (mut m, report) = Matcher::open(after.clone(), config())
                .unwrap_or_else(|e| panic!("cut at {at}, seed {seed}: {e}"));
            reports.0 += report.interrupted.len();
            reports.1 += report.repairs.len();
            reports.2 += usize::from(report.from_snapshot);
            check_plans(&mut m, &d, &format!("cut at {at}, seed {seed}"));
            // And once more, in order this time.
            m.persist().unwrap();
            drop(m);
            let (_, report) = Matcher::open(after, config()).unwrap();
            assert!(
                report.from_snapshot && report.repairs.is_empty(),
                "{report:?}"
            );
            assert!(
                report.interrupted.is_empty() && report.reindexed.is_empty(),
                "{report:?}"
            );
        }
    }
    eprintln!("{changes} changes; interrupted, repairs, snapshots: {reports:?}");
    assert!(reports.0 > 0 && reports.1 > 0 && reports.2 > 0);
}

/// What the index says after the crash is what its hash files say: an image's blocks are those the
/// destination was given under that id, whenever the image is claimed to be complete.
fn check_plans(m: &mut Matcher, d: &Destination, what: &str) {
    let mut d = d.clone();
    for (i, image) in images().iter().enumerate() {
        let id = ImageId(100 + i as u64);
        let mut c = m.begin(id).unwrap();
        for (ds, hs) in image.digests.chunks(200).zip(image.heads.chunks(200)) {
            let plan = m.batch(&mut c, ds, hs).unwrap();
            check_images(&plan, ds, &d, id, what);
            // Sequences the destination never wrote are refetched; the rules hold all the same.
            d.apply(id, ds, &plan)
                .unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        m.finish(c).unwrap();
    }
}

fn check_images(plan: &Plan, digests: &[Digest], d: &Destination, own: ImageId, what: &str) {
    let mut at = 0;
    for run in &plan.runs {
        if let drover_index::Origin::Image { image, first } = run.origin
            && image != own
        {
            for k in 0..run.count as usize {
                let held = d.image(image).get(first.0 as usize + k);
                assert_eq!(held, Some(&digests[at + k]), "{what}: {run:?}");
            }
        }
        at += run.count as usize;
    }
}

#[test]
fn what_was_finished_is_there_after_a_crash() {
    let storage = FakeDirectory::default();
    let finished = story(&storage, &mut Destination::new()).unwrap();
    for seed in 0..20 {
        let (m, report) = Matcher::open(storage.after_crash(seed), config()).unwrap();
        let there: Vec<ImageId> = m.images().iter().map(|i| i.image).collect();
        assert_eq!(there, finished, "seed {seed}");
        assert!(report.from_snapshot);
        let only_sequences = |r: &Repair| {
            matches!(
                r,
                Repair::SequencesRebuilt | Repair::SequencePage(_) | Repair::Sequences
            )
        };
        assert!(report.repairs.iter().all(only_sequences), "{report:?}");
    }
}

#[test]
fn an_interrupted_image_starts_anew() {
    let storage = FakeDirectory::default();
    let (mut m, _) = Matcher::open(storage.clone(), config()).unwrap();
    let image = Image::of(&[(3, 400)]);
    let mut c = m.begin(ImageId(7)).unwrap();
    m.record(&mut c, &image.digests, &image.heads).unwrap();
    m.persist().unwrap();
    drop(m);
    let (mut m, report) = Matcher::open(storage, config()).unwrap();
    assert_eq!(report.interrupted, [ImageId(7)]);
    assert!(report.repairs.is_empty() && report.images.is_empty());
    assert_eq!(m.stats().c0.entries + m.stats().c1.entries, 0);
    let mut c = m.begin(ImageId(7)).unwrap();
    // Replayed from the destination's log, then matched on.
    m.record(&mut c, &image.digests[..100], &image.heads[..100])
        .unwrap();
    let plan = m
        .batch(&mut c, &image.digests[..100], &image.heads[..100])
        .unwrap();
    assert_eq!(plan.runs.iter().map(|r| r.count).sum::<u32>(), 100);
    assert!(
        plan.runs
            .iter()
            .all(|r| r.origin != drover_index::Origin::Literal),
        "{plan:?}"
    );
}
