//! Closed overlays: summaries and discarding.

use super::*;

fn directory(fake: &FakeDirectory) -> Arc<dyn Directory> {
    Arc::new(fake.clone())
}

/// An overlay with plain changes, epochs, and one that is sealed and not copied.
fn used() -> (FakeDirectory, Vec<u8>, Vec<u8>) {
    let fake = FakeDirectory::default();
    let base = image(32 * BLOCK + 100);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.stage(Epoch(1), &[write(0, 3, 2 * BLOCK)]).unwrap();
    overlay.commit(Epoch(1)).unwrap();
    overlay
        .stage(Epoch(2), &[write(8 * BLOCK, 4, BLOCK)])
        .unwrap();
    overlay.seal(Epoch(2), BLOCK).unwrap();
    let now = everything(&overlay);
    let killed = fake.after_kill();
    (killed, base, now)
}

#[test]
fn changes_are_summarized_with_and_without_opening_it() {
    let fake = FakeDirectory::default();
    assert_eq!(summary(&directory(&fake)).unwrap(), None);
    let base = image(32 * BLOCK + 100);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.write(BLOCK + 5, &[1; 100]).unwrap();
    overlay
        .write_zeroes(4 * BLOCK, 2 * BLOCK, Zeroes::default())
        .unwrap();
    overlay.write(32 * BLOCK, &[9; 100]).unwrap();
    overlay.flush().unwrap();
    overlay
        .stage(Epoch(2), &[write(20 * BLOCK, 7, BLOCK)])
        .unwrap();
    overlay.seal(Epoch(2), BLOCK).unwrap();
    let expected = [
        (BLOCK..2 * BLOCK, false),
        (4 * BLOCK..6 * BLOCK, true),
        (20 * BLOCK..21 * BLOCK, false),
        (32 * BLOCK..32 * BLOCK + 100, false),
    ];
    assert_eq!(overlay.changes_in(0..u64::MAX), expected);
    assert_eq!(
        overlay.changes_in(5 * BLOCK..21 * BLOCK)[0].0.start,
        5 * BLOCK
    );
    assert_eq!(overlay.changes_in(40 * BLOCK..50 * BLOCK), []);
    for _ in 0..2 {
        let found = summary(&directory(&fake)).unwrap().unwrap();
        assert_eq!(found.changed, 4 * BLOCK + BLOCK);
        overlay.settle().unwrap();
    }
    let found = summary(&directory(&fake)).unwrap().unwrap();
    assert_eq!(found.identity, identity(base.len() as u64));
    assert_eq!(found.changed, 4 * BLOCK + BLOCK);
}

#[test]
fn a_discarded_overlay_is_gone_whole_at_every_step_of_a_power_cut() {
    for step in 0.. {
        let (fake, base, now) = used();
        fake.cut_power_at(step);
        let result = discard(&fake);
        let done = !fake.is_off();
        assert_eq!(result.is_ok(), done, "step {step}");
        if done && forget_discarded(&fake).is_ok() && !fake.is_off() {
            assert!(step > 4, "{step}");
            return;
        }
        for seed in 0..20 {
            let after = fake.after_crash(seed);
            let gone = done || was_discarded(&after).unwrap();
            let overlay = open_fake(&after, &base).unwrap();
            let found = everything(&overlay);
            assert!(
                found == if gone { base.clone() } else { now.clone() },
                "step {step}, seed {seed}: {gone}"
            );
            // And what is written from here on stays.
            overlay.write(3 * BLOCK, &[5; 4096]).unwrap();
            overlay.flush().unwrap();
            let found = everything(&overlay);
            drop(overlay);
            let again = after.after_crash(seed);
            assert!(everything(&open_fake(&again, &base).unwrap()) == found);
        }
    }
}

#[test]
fn discarding_needs_no_space_and_never_waits() {
    let (fake, base, _) = used();
    let open = open_fake(&fake, &base).unwrap();
    assert!(matches!(discard(&fake), Err(OverlayError::Busy { .. })));
    drop(open);
    fake.set_capacity(Some(0));
    assert!(discard(&fake).unwrap());
    assert!(was_discarded(&fake).unwrap());
    assert!(!discard(&fake).unwrap());
    forget_discarded(&fake).unwrap();
    assert!(!was_discarded(&fake).unwrap());
    assert!(fake.list().unwrap().is_empty());
}
