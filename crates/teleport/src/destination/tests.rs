//! Simulations of whole transfers, and protocol violations that a destination must reject.

mod sim;

use drover_core::CompactIndex;
use drover_index::Via;
use sim::{World, batch_of, digest_of, random_image};

use super::*;

/// Reports the failed seed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with DROVER_SIM_SEED={}", self.0);
        }
    }
}

/// `DROVER_SIM_SEED` runs one seed, `DROVER_SIM_SEEDS` the given number of seeds.
fn seeds() -> std::ops::Range<u64> {
    let var = |name| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match var("DROVER_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..var("DROVER_SIM_SEEDS").unwrap_or(150),
    }
}

#[test]
fn every_transfer_ends_with_the_image_whatever_happens_on_the_way() {
    let (mut crashed, mut resumed, mut invalid, mut matched, mut disproved) = (0, 0, 0, 0, 0);
    let (mut given, mut old) = (0, 0);
    for seed in seeds() {
        let _seed = Seed(seed);
        let mut world = World::new(seed);
        world.run();
        let c = world.counts;
        assert_eq!(
            c.matched_blocks + c.sent_blocks + c.zero_blocks + c.resumed_blocks,
            world.walk_blocks(),
            "{c:?}"
        );
        let m = c.matched;
        let found = m.c0 + m.c1 + m.c2 + m.anchor + m.aligned + m.repeat + m.in_place;
        // A match that was disproved counts as both found and invalid.
        assert!(found >= c.matched_blocks, "{c:?}");
        assert!(found == c.matched_blocks || world.disproved > 0, "{c:?}");
        assert!(c.sent_blocks <= world.asked + world.given);
        given += world.given;
        old += m.in_place;
        crashed += u64::from(world.sessions > 1);
        resumed += c.resumed_blocks;
        invalid += world.invalid;
        matched += c.matched_blocks;
        disproved += world.disproved;
    }
    if seeds().count() > 50 {
        assert!(
            crashed > 10 && resumed > 1000 && invalid > 1000 && matched > 1000 && disproved > 20,
            "too easy: {crashed} {resumed} {invalid} {matched} {disproved}"
        );
        assert!(given > 1000 && old > 1000, "too easy: {given} {old}");
    }
}

fn handle(d: &mut Destination, event: Event) -> Result<Vec<Action>, Violation> {
    let mut actions = Vec::new();
    d.handle(event, &mut actions).map(|()| actions)
}

fn image(batches: u64) -> Vec<u64> {
    let blocks = batches * BATCH_BLOCKS;
    (0..blocks)
        .map(|b| if b % 9 == 0 { 0 } else { b })
        .collect()
}

fn batch(image: &[u64], index: u64) -> Event {
    Event::Batch(Arc::new(batch_of(image, index)))
}

#[test]
fn batches_out_of_order_twice_or_of_the_wrong_size_are_violations() {
    let image = image(3);
    let fresh = || Destination::new(image.len() as u64);
    assert!(handle(&mut fresh(), batch(&image, 1)).is_err());
    let mut d = fresh();
    handle(&mut d, batch(&image, 0)).unwrap();
    assert!(handle(&mut d, batch(&image, 0)).is_err());
    assert!(handle(&mut d, batch(&image, 2)).is_err());
    handle(&mut d, batch(&image, 1)).unwrap();
    assert!(handle(&mut d, batch(&image[..image.len() - 1], 2)).is_err());
    handle(&mut d, batch(&image, 2)).unwrap();
    let longer = [&image[..], &[7; 5]].concat();
    assert!(handle(&mut d, batch(&longer, 3)).is_err());
    // The last batch must be as short as the image requires.
    let mut d = Destination::new(100);
    assert!(handle(&mut d, batch(&image, 0)).is_err());
    assert!(handle(&mut d, batch(&image[..99], 0)).is_err());
    handle(&mut d, batch(&image[..100], 0)).unwrap();
}

#[test]
fn an_end_before_the_last_batch_or_a_second_one_is_a_violation() {
    let image = image(2);
    let mut d = Destination::new(image.len() as u64);
    assert!(handle(&mut d, Event::End(Some(sim::WHOLE))).is_err());
    handle(&mut d, batch(&image, 0)).unwrap();
    assert!(handle(&mut d, Event::End(Some(sim::WHOLE))).is_err());
    handle(&mut d, batch(&image, 1)).unwrap();
    assert!(
        handle(&mut d, Event::End(Some(sim::WHOLE)))
            .unwrap()
            .is_empty()
    );
    assert!(handle(&mut d, Event::End(Some(digest_of(1)))).is_err());
}

#[test]
fn batches_beyond_the_window_are_a_violation() {
    let image = image(2 * WINDOW_BATCHES + 1);
    let mut d = Destination::new(image.len() as u64);
    for index in 0..2 * WINDOW_BATCHES {
        handle(&mut d, batch(&image, index)).unwrap();
    }
    assert!(handle(&mut d, batch(&image, 2 * WINDOW_BATCHES)).is_err());
}

#[test]
fn batches_of_zeros_are_complete_at_once() {
    let mut d = Destination::new(2 * BATCH_BLOCKS);
    let zeros = vec![0; 2 * BATCH_BLOCKS as usize];
    for index in 0..2 {
        let actions = handle(&mut d, batch(&zeros, index)).unwrap();
        assert!(
            matches!(actions[..], [Action::Match(_), Action::Complete(i)] if i == index),
            "{actions:?}"
        );
    }
    let actions = handle(&mut d, Event::End(Some(sim::WHOLE))).unwrap();
    assert!(matches!(actions[..], [Action::Finish(Some(sim::WHOLE))]));
    assert_eq!(d.counts().zero_blocks, 2 * BATCH_BLOCKS);
    // It finishes once.
    let late = Event::Written((0..3).collect());
    assert!(handle(&mut d, late).unwrap().is_empty());
}

#[test]
fn an_image_without_blocks_is_whole_at_its_end() {
    let mut d = Destination::new(0);
    let actions = handle(&mut d, Event::End(Some(sim::WHOLE))).unwrap();
    assert!(matches!(actions[..], [Action::Finish(Some(sim::WHOLE))]));
}

fn planned(index: u64, runs: &[(u32, From)]) -> Event {
    let runs = runs
        .iter()
        .map(|&(count, from)| Run {
            count,
            from,
            via: Via::C1,
        })
        .collect();
    Event::Planned { index, runs }
}

#[test]
fn a_plan_that_does_not_cover_its_batch_is_a_violation() {
    let image = [1, 2, 3, 4];
    for count in [0, 3, 5, u32::MAX] {
        let mut d = Destination::new(4);
        handle(&mut d, batch(&image, 0)).unwrap();
        let plan = planned(0, &[(count, From::Literal)]);
        assert!(handle(&mut d, plan).is_err(), "{count}");
    }
}

/// A worker may be copying to a block that was not requested: data for it from the source could be overwritten after
/// it was verified.
#[test]
fn blocks_that_were_not_asked_for_are_a_violation() {
    let image = [1, 2, 3, 4];
    let mut d = Destination::new(4);
    handle(&mut d, batch(&image, 0)).unwrap();
    let unasked = || Event::Written((1..3).collect());
    assert!(handle(&mut d, unasked()).is_err());
    let image_1 = From::Image {
        image: drover_index::ImageId(1),
        first: CompactIndex(0),
    };
    handle(&mut d, planned(0, &[(2, From::Literal), (2, image_1)])).unwrap();
    assert!(handle(&mut d, unasked()).is_err());
    handle(&mut d, Event::Written((0..2).collect())).unwrap();
}

#[test]
fn reuse_of_the_own_blocks_waits_until_they_are_verified() {
    // Blocks 4 and 5 repeat 0 and 1, and 6 repeats 5.
    let image = [1, 2, 3, 4, 1, 2, 2];
    let mut d = Destination::new(7);
    handle(&mut d, batch(&image, 0)).unwrap();
    let plan = [
        (4, From::Literal),
        (
            2,
            From::Own {
                first: CompactIndex(0),
            },
        ),
        (
            1,
            From::Own {
                first: CompactIndex(5),
            },
        ),
    ];
    let actions = handle(&mut d, planned(0, &plan)).unwrap();
    assert!(
        matches!(&actions[..], [Action::Need(n)] if n.runs.blocks().eq(0..4)),
        "{actions:?}"
    );
    let actions = handle(&mut d, Event::Written((0..1).collect())).unwrap();
    let [Action::Reuse(first)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((first.runs[0].0, first.runs[0].1.count), (4, 1));
    let actions = handle(&mut d, Event::Written((1..4).collect())).unwrap();
    let [Action::Reuse(second)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((second.runs[0].0, second.runs[0].1.count), (5, 1));
    let reused = Event::Reused {
        job: second.clone(),
        failed: vec![],
    };
    let actions = handle(&mut d, reused).unwrap();
    assert!(matches!(&actions[..], [Action::Reuse(j)] if j.runs[0].0 == 6));
    // A block that fails verification is requested.
    let reused = Event::Reused {
        job: first.clone(),
        failed: vec![4],
    };
    let actions = handle(&mut d, reused).unwrap();
    assert!(matches!(&actions[..], [Action::Need(n)] if n.runs.blocks().eq(4..5)));
    assert_eq!(d.counts().matched.invalid, 1);
}

#[test]
fn reuse_of_itself_or_of_later_blocks_is_asked_for() {
    let image = [1, 2, 3, 4];
    for first in [0, 1, 3, 4, 1 << 40].map(CompactIndex) {
        let mut d = Destination::new(4);
        handle(&mut d, batch(&image, 0)).unwrap();
        let plan = planned(0, &[(1, From::Own { first }), (3, From::Literal)]);
        let asked: u64 = handle(&mut d, plan)
            .unwrap()
            .iter()
            .map(|a| match a {
                Action::Need(n) => n.runs.count(),
                other => panic!("{other:?}"),
            })
            .sum();
        assert_eq!(asked, 4, "from {first:?}");
    }
}

#[test]
fn a_group_whose_proof_is_wrong_is_asked_for_and_then_believed_no_more() {
    let image: Vec<u64> = (1..=200).collect();
    let mut d = Destination::new(200);
    handle(&mut d, batch(&image, 0)).unwrap();
    let elsewhere = From::Sequence { first: 0 };
    let plan = planned(0, &[(10, From::Literal), (190, elsewhere)]);
    let actions = handle(&mut d, plan).unwrap();
    let [Action::Need(_), Action::Reuse(job)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(
        handle(&mut d, Event::Written((0..10).collect()))
            .unwrap()
            .is_empty()
    );
    let reused = Event::Reused {
        job: job.clone(),
        failed: vec![],
    };
    let actions = handle(&mut d, reused).unwrap();
    assert!(matches!(actions[..], [Action::Prove(0)]), "{actions:?}");
    // Blocks from the source are not requested again, and the last group is short.
    let proved = |wrong: &[u32]| Event::Proved {
        index: 0,
        wrong: wrong.to_vec(),
    };
    let actions = handle(&mut d, proved(&[0, 3])).unwrap();
    assert!(
        matches!(&actions[..], [Action::Need(n)] if n.runs.iter().eq([(10, 54), (192, 8)])),
        "{actions:?}"
    );
    assert_eq!(d.counts().matched_blocks, 190 - 62);
    let came = Event::Written((10..64).chain(192..200).collect());
    let actions = handle(&mut d, came).unwrap();
    assert!(matches!(actions[..], [Action::Prove(0)]), "{actions:?}");
    assert!(handle(&mut d, proved(&[3])).is_err());
    let actions = handle(&mut d, proved(&[])).unwrap();
    assert!(matches!(actions[..], [Action::Complete(0)]), "{actions:?}");
    assert_eq!(d.counts().sent_blocks, 72);
}

#[test]
fn batches_that_were_restored_may_come_again() {
    let image = image(3);
    let mut d = Destination::new(image.len() as u64);
    for index in 0..2 {
        let Event::Batch(batch) = batch(&image, index) else {
            unreachable!()
        };
        let none = DataBits::new(batch.digests.len() as u64);
        d.restore(batch, none).unwrap();
    }
    for index in 0..2 {
        assert!(handle(&mut d, batch(&image, index)).unwrap().is_empty());
    }
    assert!(!handle(&mut d, batch(&image, 2)).unwrap().is_empty());
    // A batch received in this session must not be sent again.
    assert!(handle(&mut d, batch(&image, 2)).is_err());
}

#[test]
fn what_is_restored_must_be_the_next_batch() {
    let image = random_image(&mut fastrand::Rng::with_seed(1), 3 * BATCH_BLOCKS as usize);
    let mut d = Destination::new(image.len() as u64);
    let some = |index| Arc::new(batch_of(&image, index));
    let none_missing = |b: &Batch| DataBits::new(b.digests.len() as u64);
    let (zero, one) = (some(0), some(1));
    assert!(d.restore(one.clone(), none_missing(&one)).is_err());
    d.restore(zero.clone(), none_missing(&zero)).unwrap();
    assert_eq!(d.next_batch(), 1);
    assert_eq!(d.open_batches(), 0);
    let mut missing = none_missing(&one);
    missing.set(0);
    d.restore(one.clone(), missing).unwrap();
    assert_eq!(d.open_batches(), 1);
    // Only missing blocks are requested.
    let plan = planned(1, &[(one.digests.len() as u32, From::Literal)]);
    let actions = handle(&mut d, plan).unwrap();
    assert!(matches!(&actions[..], [Action::Need(n)] if n.runs.count() == 1));
}

/// What a machine has read ahead of its batch must be what the batch announces: else the image has changed.
#[test]
fn a_block_that_came_ahead_and_is_announced_as_another_is_a_change() {
    let image = image(2);
    let runs = |blocks: &[u64]| -> Runs { blocks.iter().copied().collect() };
    let far = BATCH_BLOCKS + 1;
    let zero = (BATCH_BLOCKS..2 * BATCH_BLOCKS)
        .find(|b| b % 9 == 0)
        .unwrap();
    let ahead = |data: &[u64], zero: &[u64]| {
        let mut d = Destination::new(image.len() as u64);
        let (data, zero) = (runs(data), runs(zero));
        handle(&mut d, Event::Ahead { data, zero }).unwrap();
        handle(&mut d, batch(&image, 0)).unwrap();
        handle(&mut d, batch(&image, 1)).unwrap()
    };
    let changed = |actions: &[Action]| actions.iter().any(|a| matches!(a, Action::Changed(_)));
    assert!(!changed(&ahead(&[far], &[zero])));
    assert!(changed(&ahead(&[far, zero], &[zero + 9])));
    assert!(changed(&ahead(&[], &[far])));
}
