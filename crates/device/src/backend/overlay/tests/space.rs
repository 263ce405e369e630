//! Space that is asked for before a change is what the change takes.

use super::*;

fn keep(keep_allocated: bool) -> Zeroes {
    Zeroes {
        keep_allocated,
        only_fast: false,
    }
}

#[test]
fn no_change_takes_more_than_it_asks_for() {
    let fake = FakeDirectory::default();
    let blocks = 64;
    let overlay = open_fake(&fake, &image(blocks * BLOCK - 1000)).unwrap();
    let size = overlay.size();
    let mut rng = Rng::with_seed(11);
    for round in 0..3000 {
        let offset = rng.u64(..size);
        let length = rng.u64(1..=(size - offset).min(5 * BLOCK));
        let before = fake.used();
        let (asked, what) = match rng.u8(..4) {
            0 => {
                let asked = overlay.space_for_write(offset, length);
                overlay.write(offset, &vec![7; length as usize]).unwrap();
                (asked, "write")
            }
            1 => {
                let asked = overlay.space_for_trim(offset, length);
                overlay.trim(offset, length).unwrap();
                (asked, "trim")
            }
            n => {
                let asked = overlay.space_for_zeroes(offset, length, n == 2);
                overlay.write_zeroes(offset, length, keep(n == 2)).unwrap();
                (asked, "zeroes")
            }
        };
        // The log is written by the flush, and rewritten when it is long.
        let took = fake.used().saturating_sub(before);
        assert!(
            took <= asked,
            "{round}: {what} {offset} {length}: {took} of {asked}"
        );
        overlay.flush().unwrap();
    }
}

#[test]
fn blocks_that_are_there_take_nothing_again() {
    let overlay = open_fake(&FakeDirectory::default(), &image(64 * BLOCK)).unwrap();
    let log = overlay.space_for_write(0, BLOCK) - BLOCK;
    assert!(log < 1000, "{log}");
    // Part of a block is written with the rest of it.
    assert_eq!(overlay.space_for_write(1, 1), BLOCK + log);
    assert_eq!(overlay.space_for_write(BLOCK - 1, 2), 2 * BLOCK + log);
    for (offset, length, edges) in [
        (1, 1, 1),
        (BLOCK - 1, 2, 2),
        (1, 3 * BLOCK, 2),
        (0, BLOCK, 0),
    ] {
        let asked = overlay.space_for_zeroes(offset, length, false);
        assert!(asked >= edges * BLOCK, "{offset} {length}: {asked}");
        assert!(asked > 0 && asked <= edges * BLOCK + 1000, "{asked}");
    }
    assert!(overlay.space_for_zeroes(0, 9 * BLOCK, true) >= 9 * BLOCK);
    assert!(overlay.space_for_trim(0, 9 * BLOCK) > 0, "of the log");
    overlay.write(0, &vec![1; 8 * BLOCK_SIZE]).unwrap();
    for asked in [
        overlay.space_for_write(100, 7 * BLOCK),
        overlay.space_for_zeroes(100, 50, false),
        overlay.space_for_zeroes(0, 8 * BLOCK, true),
        // What gives space back is never refused.
        overlay.space_for_zeroes(0, 8 * BLOCK + 1, false),
        overlay.space_for_trim(0, 64 * BLOCK),
        // It fails anyway.
        overlay.space_for_write(u64::MAX, 2),
    ] {
        assert_eq!(asked, 0);
    }
    let epoch = Epoch(overlay.committed().0 + 2);
    let changes = [write(4 * BLOCK, 3, 8 * BLOCK), Change::Zero(0, BLOCK)];
    assert!(Overlay::space_to_stage(&changes) > 8 * BLOCK);
    overlay.stage(epoch, &changes).unwrap();
    let asked = overlay.space_to_commit(epoch);
    assert!((4 * BLOCK..4 * BLOCK + 1000).contains(&asked), "{asked}");
    overlay.commit(epoch).unwrap();
    assert_eq!(overlay.space_to_commit(epoch), 0);
}

/// Nobody need flush: what a change leaves to log is logged in time.
#[test]
fn changes_that_are_never_flushed_are_logged_at_last() {
    let fake = FakeDirectory::default();
    let base = Arc::new(MemoryDevice::new(1 << 30));
    let overlay = Overlay::open(
        Arc::new(fake.clone()),
        base,
        identity(1 << 30),
        Options::default(),
    )
    .unwrap();
    let log = || fake.bytes(STATES).unwrap().len();
    let before = log();
    for block in 0..70_000 {
        overlay.trim(2 * block * BLOCK, BLOCK).unwrap();
    }
    assert!(log() - before > 65_536 * 24, "{before} {}", log());
}
