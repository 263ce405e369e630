//! Events that a source handles, and protocol violations that it must reject. Whole transfers are simulated in
//! `destination/tests.rs`.

use super::*;

const BATCHES: u64 = 3;
const BLOCKS: u64 = BATCHES * BATCH_BLOCKS - 100;
const WHOLE: Digest = Digest([7; 32]);

fn handle(s: &mut Source, event: Event) -> Result<Vec<Action>, Violation> {
    let mut actions = Vec::new();
    s.handle(event, &mut actions).map(|()| actions)
}

fn accept(resume_batch: u64) -> Event {
    Event::Accepted(Accept {
        resume_batch,
        resumed_blocks: 0,
        open_batches: 0,
    })
}

fn walked(index: u64) -> Event {
    let frame = vec![index as u8];
    Event::Walked { index, frame }
}

fn need(blocks: std::ops::Range<u64>) -> Event {
    Event::Need(Need {
        runs: blocks.collect(),
    })
}

fn delivered(digest: Digest) -> Event {
    Event::Delivered(Delivered {
        digest,
        ..Delivered::default()
    })
}

/// A source accepted at `resume`, with `batches` walked.
fn started(resume: u64, batches: u64) -> Source {
    let mut s = Source::new(BLOCKS);
    handle(&mut s, accept(resume)).unwrap();
    (0..batches).for_each(|i| drop(handle(&mut s, walked(i)).unwrap()));
    s
}

#[test]
fn one_image_from_its_offer_to_its_end() {
    let mut s = Source::new(BLOCKS);
    assert_eq!(
        handle(&mut s, accept(0)).unwrap(),
        [Action::WalkTo(BATCHES)]
    );
    for i in 0..BATCHES {
        let actions = handle(&mut s, walked(i)).unwrap();
        assert_eq!(actions, [Action::Batch(vec![i as u8])]);
    }
    let end = handle(&mut s, Event::WalkEnded(Some(WHOLE))).unwrap();
    assert_eq!(end, [Action::End(Some(WHOLE))]);
    let actions = handle(&mut s, need(5..10)).unwrap();
    assert_eq!(actions, [Action::Literals((5..10).collect())]);
    assert_eq!(s.done_blocks(), 0);
    for i in [1, 0, 2] {
        handle(&mut s, Event::Ack(i)).unwrap();
    }
    assert_eq!(s.done_blocks(), BLOCKS);
    let actions = handle(&mut s, delivered(WHOLE)).unwrap();
    assert!(matches!(actions[..], [Action::Done(_)]));
}

#[test]
fn the_window_moves_with_the_oldest_batch_that_is_not_complete() {
    let batches = 2 * WINDOW_BATCHES;
    let mut s = Source::new(batches * BATCH_BLOCKS);
    let start = handle(&mut s, accept(0)).unwrap();
    assert_eq!(start, [Action::WalkTo(FIRST_WINDOW)]);
    (0..FIRST_WINDOW).for_each(|i| drop(handle(&mut s, walked(i)).unwrap()));
    // Every acknowledgement extends the window; only the oldest moves it.
    let opened = FIRST_WINDOW + WINDOW_STEP;
    assert_eq!(
        handle(&mut s, Event::Ack(2)).unwrap(),
        [Action::WalkTo(opened)]
    );
    let opened = opened + WINDOW_STEP;
    assert_eq!(
        handle(&mut s, Event::Ack(1)).unwrap(),
        [Action::WalkTo(opened)]
    );
    let opened = opened + WINDOW_STEP;
    assert_eq!(
        handle(&mut s, Event::Ack(0)).unwrap(),
        [Action::WalkTo(3 + opened)]
    );
    assert_eq!(s.done_blocks(), 3 * BATCH_BLOCKS);
    // The window has a limit.
    (FIRST_WINDOW..WINDOW_BATCHES).for_each(|i| drop(handle(&mut s, walked(i)).unwrap()));
    (3..WINDOW_BATCHES - 1).for_each(|i| drop(handle(&mut s, Event::Ack(i)).unwrap()));
    let last = handle(&mut s, Event::Ack(WINDOW_BATCHES - 1)).unwrap();
    assert_eq!(last, [Action::WalkTo(2 * WINDOW_BATCHES)]);
}

#[test]
fn a_resume_sends_no_batch_again_but_any_block() {
    let mut s = started(2, 0);
    // The destination may immediately request blocks that an earlier session left missing.
    handle(&mut s, need(0..7)).unwrap();
    assert_eq!(handle(&mut s, walked(0)).unwrap(), []);
    assert_eq!(handle(&mut s, walked(1)).unwrap(), []);
    assert_eq!(handle(&mut s, walked(2)).unwrap(), [Action::Batch(vec![2])]);
    // An earlier batch that becomes complete moves nothing.
    assert_eq!(handle(&mut s, Event::Ack(0)).unwrap(), []);
    handle(&mut s, Event::WalkEnded(Some(WHOLE))).unwrap();
    assert!(handle(&mut s, delivered(WHOLE)).is_err());
    handle(&mut s, Event::Ack(2)).unwrap();
    handle(&mut s, delivered(WHOLE)).unwrap();
}

#[test]
fn the_first_batches_do_not_wait_to_be_accepted() {
    let mut s = Source::new(BLOCKS);
    for i in 0..2 {
        let actions = handle(&mut s, walked(i)).unwrap();
        assert_eq!(actions, [Action::Batch(vec![i as u8])]);
    }
    assert!(!s.is_accepted());
    // Batches that the destination already had were sent twice; the rest are not sent again.
    let to = handle(&mut s, accept(1)).unwrap();
    assert_eq!(to, [Action::WalkTo(BATCHES)]);
    assert!(s.is_accepted());
    handle(&mut s, Event::Ack(1)).unwrap();
    assert_eq!(handle(&mut s, walked(2)).unwrap(), [Action::Batch(vec![2])]);
    // The destination must not refer to a batch before it accepts the image.
    for event in [need(0..1), Event::Ack(0), delivered(WHOLE)] {
        let mut s = Source::new(BLOCKS);
        handle(&mut s, walked(0)).unwrap();
        assert!(handle(&mut s, event).is_err());
    }
}

#[test]
fn a_resume_with_every_batch_there_needs_no_acknowledgement() {
    let mut s = started(BATCHES, BATCHES);
    handle(&mut s, Event::WalkEnded(Some(WHOLE))).unwrap();
    assert_eq!(s.done_blocks(), BLOCKS);
    handle(&mut s, delivered(WHOLE)).unwrap();
}

#[test]
fn a_batch_of_before_counts_when_it_is_complete() {
    let mut s = Source::new(BLOCKS);
    let accepted = Event::Accepted(Accept {
        resume_batch: BATCHES,
        resumed_blocks: 5,
        open_batches: 2,
    });
    handle(&mut s, accepted).unwrap();
    assert_eq!(s.done_blocks(), BATCH_BLOCKS);
    handle(&mut s, Event::Ack(1)).unwrap();
    assert_eq!(s.done_blocks(), 2 * BATCH_BLOCKS);
    handle(&mut s, Event::Ack(2)).unwrap();
    assert_eq!(s.done_blocks(), BLOCKS);
}

#[test]
fn resuming_beyond_the_image_or_twice_is_a_violation() {
    assert!(handle(&mut Source::new(BLOCKS), accept(BATCHES + 1)).is_err());
    assert!(handle(&mut started(0, 1), accept(0)).is_err());
}

#[test]
fn acknowledgements_out_of_turn_are_violations() {
    assert!(handle(&mut Source::new(BLOCKS), Event::Ack(0)).is_err());
    let mut s = started(0, 2);
    assert!(handle(&mut s, Event::Ack(2)).is_err());
    assert!(handle(&mut s, Event::Ack(u64::MAX)).is_err());
    handle(&mut s, Event::Ack(1)).unwrap();
    assert!(handle(&mut s, Event::Ack(1)).is_err());
    handle(&mut s, Event::Ack(0)).unwrap();
    assert!(handle(&mut s, Event::Ack(0)).is_err());
}

#[test]
fn asking_for_what_was_not_announced_is_a_violation() {
    assert!(handle(&mut Source::new(BLOCKS), need(0..1)).is_err());
    let mut s = started(0, 1);
    handle(&mut s, need(BATCH_BLOCKS - 1..BATCH_BLOCKS)).unwrap();
    assert!(handle(&mut s, need(BATCH_BLOCKS - 1..BATCH_BLOCKS + 1)).is_err());
    let mut s = started(0, BATCHES);
    handle(&mut s, need(BLOCKS - 1..BLOCKS)).unwrap();
    assert!(handle(&mut s, need(BLOCKS - 1..BLOCKS + 1)).is_err());
}

#[test]
fn blocks_are_given_that_the_image_has_whoever_waits_for_them() {
    let want = |waited, blocks: std::ops::Range<u64>| Want {
        waited,
        runs: blocks.collect(),
    };
    for waited in [false, true] {
        // Announced or not.
        let mut s = started(0, 1);
        let last = want(waited, BLOCKS - 1..BLOCKS);
        let actions = handle(&mut s, Event::Want(last.clone())).unwrap();
        assert_eq!(actions, [Action::Give(last.clone())]);
        let actions = handle(&mut s, Event::Hurry(last.clone())).unwrap();
        assert_eq!(actions, [Action::GiveQueued(last.clone())]);
        let outside = want(waited, BLOCKS - 1..BLOCKS + 1);
        assert!(handle(&mut s, Event::Want(outside)).is_err());
        let mut offered = Source::new(BLOCKS);
        assert!(handle(&mut offered, Event::Want(last)).is_err());
        // Not for ever, either.
        let mut s = started(0, 1);
        let all = || Event::Want(want(waited, 0..BATCH_BLOCKS));
        let rounds = (0..1000).take_while(|_| handle(&mut s, all()).is_ok());
        assert!(rounds.count() as u64 * BATCH_BLOCKS <= MAX_ASKS_PER_BLOCK * BLOCKS);
    }
}

#[test]
fn what_goes_ahead_of_others_is_bounded_by_what_was_requested() {
    let mut s = started(0, BATCHES);
    let hurry = |blocks: std::ops::Range<u64>| {
        Event::Hurry(Want {
            waited: true,
            runs: blocks.collect(),
        })
    };
    assert_eq!(handle(&mut s, hurry(0..1)).unwrap(), []);
    handle(&mut s, need(0..10)).unwrap();
    let obeyed = (0..1000).filter(|_| !handle(&mut s, hurry(0..3)).unwrap().is_empty());
    let obeyed = obeyed.count() as u64 * 3;
    assert!((10 * 3..=10 * MAX_HURRIES_PER_ASK).contains(&obeyed));
    // What is requested later goes ahead again.
    handle(&mut s, need(20..30)).unwrap();
    assert_eq!(handle(&mut s, hurry(20..30)).unwrap().len(), 1);
}

#[test]
fn asking_for_ever_is_a_violation() {
    let mut s = started(0, BATCHES);
    let rounds = (0..1000).take_while(|_| handle(&mut s, need(0..BATCH_BLOCKS)).is_ok());
    let asked = rounds.count() as u64 * BATCH_BLOCKS;
    assert!(asked <= MAX_ASKS_PER_BLOCK * BLOCKS);
    assert!(asked >= 2 * BLOCKS);
}

#[test]
fn claims_of_a_delivery_that_cannot_be_are_violations() {
    let mut s = started(0, BATCHES);
    assert!(handle(&mut s, delivered(WHOLE)).is_err());
    handle(&mut s, Event::WalkEnded(Some(WHOLE))).unwrap();
    assert!(handle(&mut s, delivered(WHOLE)).is_err());
    (0..BATCHES).for_each(|i| drop(handle(&mut s, Event::Ack(i)).unwrap()));
    assert!(handle(&mut s, delivered(Digest([8; 32]))).is_err());
    handle(&mut s, delivered(WHOLE)).unwrap();
    assert!(handle(&mut s, delivered(WHOLE)).is_err());
}
