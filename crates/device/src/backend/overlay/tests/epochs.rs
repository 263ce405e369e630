//! Epochs: staging, sealing, copying.

use std::io;
use std::sync::atomic::AtomicBool;

use super::*;
use drover_storage::Operation;

/// Whole blocks of a device.
fn any_blocks(rng: &mut Rng, size: u64) -> (u64, u64) {
    let first = rng.u64(0..size.div_ceil(BLOCK));
    let offset = first * BLOCK;
    (offset, (rng.u64(1..6) * BLOCK).min(size - offset))
}

/// Changes that overlap, and what they make of `model`.
pub(super) fn any_changes(rng: &mut Rng, model: &mut [u8]) -> Vec<Change> {
    let count = rng.usize(0..6);
    let change = |_| {
        let (offset, length) = any_blocks(rng, model.len() as u64);
        let range = offset as usize..(offset + length) as usize;
        match rng.bool() {
            true => {
                let data: Vec<u8> = range.clone().map(|_| rng.u8(..)).collect();
                model[range].copy_from_slice(&data);
                Change::Write(offset, data.into())
            }
            false => {
                model[range].fill(0);
                Change::Zero(offset, length)
            }
        }
    };
    (0..count).map(change).collect()
}

pub(super) fn commit_something(overlay: &Overlay, rng: &mut Rng, model: &mut Vec<u8>) {
    overlay.flush().unwrap();
    let epoch = Epoch(overlay.committed().0 + 1);
    let before = model.clone();
    for _ in 0..rng.usize(1..4) {
        overlay.stage(epoch, &any_changes(rng, model)).unwrap();
    }
    assert!(everything(overlay) == before, "what is staged is not seen");
    if rng.u8(0..4) == 0 {
        overlay.abandon().unwrap();
        *model = before;
        return;
    }
    overlay.commit(epoch).unwrap();
    assert_eq!(overlay.committed(), epoch);
    overlay.commit(epoch).unwrap();
    assert_eq!(overlay.committed(), epoch);
}

#[test]
fn epochs_come_in_turn() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    for wrong in [0, u64::MAX] {
        let error = overlay
            .stage(Epoch(wrong), &[write(0, 1, BLOCK)])
            .unwrap_err();
        assert!(matches!(error, OverlayError::WrongEpoch { .. }), "{error}");
    }
    let error = overlay.commit(Epoch(1)).unwrap_err();
    assert!(matches!(error, OverlayError::NothingStaged(_)), "{error}");
    let error = overlay.commit(Epoch(u64::MAX)).unwrap_err();
    assert!(matches!(error, OverlayError::WrongEpoch { .. }), "{error}");
    overlay.commit(Epoch(0)).unwrap();
    overlay.stage(Epoch(1), &[]).unwrap();
    overlay.commit(Epoch(1)).unwrap();
    assert_eq!(
        overlay.committed(),
        Epoch(1),
        "an epoch without changes counts"
    );
    for (offset, length) in [(1, BLOCK), (0, 100), (7 * BLOCK, 2 * BLOCK), (!4095, BLOCK)] {
        let error = overlay
            .stage(Epoch(2), &[Change::Zero(offset, length)])
            .unwrap_err();
        assert!(matches!(error, OverlayError::BadChange { .. }), "{error}");
    }
    assert_eq!(overlay.changed(), 0);
    assert!(!fake.list().unwrap().iter().any(|n| n.starts_with("epoch")));
}

#[test]
fn whoever_writes_chooses_the_number_and_one_epoch_is_staged_at_a_time() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    let first = overlay.committed().after(0xDEAD_BEEF);
    overlay.stage(first, &[write(0, 7, BLOCK)]).unwrap();
    let earlier = Epoch(first.0 - 1);
    let error = overlay.stage(earlier, &[write(0, 8, BLOCK)]).unwrap_err();
    assert!(matches!(error, OverlayError::WrongEpoch { .. }), "{error}");
    overlay.commit(first).unwrap();
    assert_eq!(overlay.committed(), first);
    drop(overlay);
    let overlay = open_fake(&fake, &base).unwrap();
    assert_eq!(overlay.committed(), first);
    let mut block = [0; BLOCK as usize];
    overlay.read(0, &mut block).unwrap();
    assert!(block.iter().all(|b| *b == block[0]) && block[0] != 8);
}

#[test]
fn a_later_epoch_takes_the_place_of_one_that_was_given_up() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    let first = overlay.committed().after(5);
    let second = first.after(1);
    overlay.stage(first, &[write(0, 7, 2 * BLOCK)]).unwrap();
    overlay.stage(second, &[write(BLOCK, 8, BLOCK)]).unwrap();
    // What comes late of the first is not taken for part of the second.
    let late = overlay.stage(first, &[write(0, 9, BLOCK)]).unwrap_err();
    assert!(matches!(late, OverlayError::WrongEpoch { .. }), "{late}");
    let late = overlay.commit(first).unwrap_err();
    assert!(matches!(late, OverlayError::NothingStaged(_)), "{late}");
    overlay.commit(second).unwrap();
    let mut model = base;
    model[BLOCK_SIZE..2 * BLOCK_SIZE].fill(8);
    assert!(everything(&overlay) == model && overlay.committed() == second);
    assert!(!fake.list().unwrap().iter().any(|n| n.starts_with("epoch")));
}

/// An epoch that was dropped and begun again under its number has not all that was staged for it.
#[test]
fn an_epoch_is_sealed_with_what_it_should_have_or_not_at_all() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK + 700);
    let overlay = open_fake(&fake, &base).unwrap();
    let epoch = Epoch(1).after(5);
    let first = [write(0, 7, 2 * BLOCK), Change::Zero(8 * BLOCK, 700)];
    let second = [write(BLOCK, 8, BLOCK), write(4 * BLOCK, 9, BLOCK)];
    let covers = 3 * BLOCK + 700;
    let refused = |covers| {
        let error = overlay.seal(epoch, covers).unwrap_err();
        assert!(matches!(error, OverlayError::NotWhole { .. }), "{error}");
        let error = DeviceError::from(error);
        assert!(matches!(error, DeviceError::Unavailable(_)), "{error}");
        assert_eq!(overlay.committed(), Epoch(0));
        assert!(everything(&overlay) == base, "half an epoch counts");
    };
    overlay.stage(epoch, &first).unwrap();
    overlay.abandon().unwrap();
    overlay.stage(epoch, &second).unwrap();
    refused(covers);
    let runs = vec![(BLOCK, BLOCK), (4 * BLOCK, BLOCK)];
    assert_eq!(overlay.staged_runs(epoch, 0, 9), (runs, base.len() as u64));
    overlay.stage(epoch, &first).unwrap();
    refused(covers - 1);
    refused(4 * BLOCK);
    // In the order in which they were to count.
    overlay.stage(epoch, &second).unwrap();
    overlay.seal(epoch, covers).unwrap();
    overlay.seal(epoch, covers).unwrap();
    overlay.settle().unwrap();
    let mut model = base.clone();
    model[..BLOCK_SIZE].fill(7);
    model[BLOCK_SIZE..2 * BLOCK_SIZE].fill(8);
    model[4 * BLOCK_SIZE..5 * BLOCK_SIZE].fill(9);
    model[8 * BLOCK_SIZE..].fill(0);
    assert!(everything(&overlay) == model && overlay.committed() == epoch);
}

#[test]
fn plain_changes_wait_for_a_staged_epoch() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.write(0, &[1; 10]).unwrap();
    // Plain writes: those changes are an epoch of their own.
    let error = overlay.stage(Epoch(1), &[write(0, 1, BLOCK)]).unwrap_err();
    assert!(matches!(error, OverlayError::WrongEpoch { .. }), "{error}");
    assert_eq!(overlay.committed(), Epoch(1));
    overlay.stage(Epoch(2), &[write(0, 9, BLOCK)]).unwrap();
    let refused = overlay.write(0, &[1]).unwrap_err();
    assert!(matches!(refused, DeviceError::Unavailable(_)), "{refused}");
    overlay.flush().unwrap();
    // A crash now is no epoch more: it would be taken for the one that is being staged.
    assert_eq!(
        open_fake(&fake.after_kill(), &base).unwrap().committed(),
        Epoch(1)
    );
    overlay.commit(Epoch(2)).unwrap();
    overlay.write(0, &[1]).unwrap();
    overlay.stage(Epoch(3), &[]).unwrap_err();
    overlay.stage(Epoch(4), &[]).unwrap();
    overlay.abandon().unwrap();
    overlay.write(0, &[2]).unwrap();
    assert_eq!(everything(&overlay)[..2], [2, 9]);
}

#[test]
fn an_epoch_has_a_limit() {
    let fake = FakeDirectory::default();
    let options = Options {
        stage_limit: 10 * BLOCK,
        ..Options::default()
    };
    let overlay = open_over(Arc::new(fake.clone()), &image(64 * BLOCK), options).unwrap();
    overlay.stage(Epoch(1), &[write(0, 1, 8 * BLOCK)]).unwrap();
    let staged = overlay.staged();
    let error = overlay
        .stage(Epoch(1), &[write(0, 2, 4 * BLOCK)])
        .unwrap_err();
    assert!(matches!(DeviceError::from(error), DeviceError::NoSpace(_)));
    assert_eq!(overlay.staged(), staged);
    overlay.commit(Epoch(1)).unwrap();
    assert_eq!(everything(&overlay)[..8 * BLOCK_SIZE], [1; 8 * BLOCK_SIZE]);
}

#[test]
fn a_full_disk_is_found_before_the_epoch_counts() {
    let fake = FakeDirectory::new(4096, 0);
    let base = image(64 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.stage(Epoch(1), &[write(0, 1, 20 * BLOCK)]).unwrap();
    // Room for the redo, but not for the copy.
    fake.set_capacity(Some(fake.used() + 10 * BLOCK));
    let error = overlay.commit(Epoch(1)).unwrap_err();
    assert!(matches!(DeviceError::from(error), DeviceError::NoSpace(_)));
    assert_eq!(overlay.committed(), Epoch(0));
    assert!(everything(&overlay) == base);
    let all = (vec![(0, 20 * BLOCK)], 64 * BLOCK);
    assert_eq!(overlay.staged_runs(Epoch(1), 0, 10), all, "nor is it lost");
    overlay.stage(Epoch(2), &[write(0, 1, BLOCK)]).unwrap();
    overlay.commit(Epoch(2)).unwrap();
    // Nor for the redo.
    let error = overlay
        .stage(Epoch(3), &[write(0, 1, 60 * BLOCK)])
        .unwrap_err();
    assert!(matches!(DeviceError::from(error), DeviceError::NoSpace(_)));
    overlay.abandon().unwrap();
    assert_eq!(everything(&overlay)[..BLOCK_SIZE], [1; BLOCK_SIZE]);
    assert!(everything(&overlay)[BLOCK_SIZE..] == base[BLOCK_SIZE..]);
}

#[test]
fn an_epoch_that_cannot_be_copied_counts_and_is_read_from_its_redo() {
    for failing in [Operation::Write, Operation::Read] {
        let fake = FakeDirectory::default();
        let base = image(64 * BLOCK);
        let overlay = open_fake(&fake, &base).unwrap();
        overlay.write(3 * BLOCK, &[5; 100]).unwrap();
        overlay.flush().unwrap();
        let changes = [
            write(2 * BLOCK, 1, 4 * BLOCK),
            Change::Zero(4 * BLOCK, BLOCK),
            write(63 * BLOCK, 2, BLOCK),
        ];
        overlay.stage(Epoch(2), &changes).unwrap();
        let name = match failing {
            Operation::Read => "epoch-2",
            _ => DATA,
        };
        fake.set_faults(move |operation, file| {
            (operation == failing && file == name).then_some(io::ErrorKind::StorageFull)
        });
        overlay.commit(Epoch(2)).unwrap();
        assert_eq!(overlay.committed(), Epoch(2));
        let error = overlay.write(0, &[1]).unwrap_err();
        assert!(matches!(error, DeviceError::NoSpace(_)), "{error}");
        let error = overlay.stage(Epoch(3), &[]).unwrap_err();
        assert!(matches!(DeviceError::from(error), DeviceError::NoSpace(_)));
        let mut model = base.clone();
        model[2 * BLOCK_SIZE..6 * BLOCK_SIZE].fill(1);
        model[4 * BLOCK_SIZE..5 * BLOCK_SIZE].fill(0);
        model[63 * BLOCK_SIZE..].fill(2);
        if failing == Operation::Write {
            assert!(everything(&overlay) == model);
            assert_eq!(overlay.changed(), 5 * BLOCK);
            let kinds: Vec<_> = overlay.extents(3 * BLOCK, 3 * BLOCK).unwrap();
            assert_eq!(
                kinds.iter().map(|run| run.kind).collect::<Vec<_>>(),
                [ExtentKind::Data, ExtentKind::Zero, ExtentKind::Data]
            );
        } else {
            let error = overlay.read(2 * BLOCK, &mut [0; 10]).unwrap_err();
            assert!(
                matches!(error, DeviceError::NoSpace(_)),
                "an error, never other bytes"
            );
        }
        // Also over a restart, as long as it lasts: read-only and not.
        drop(overlay);
        if failing == Operation::Write {
            for read_only in [true, false] {
                let options = Options {
                    read_only,
                    ..Options::default()
                };
                let overlay = open_over(Arc::new(fake.clone()), &base, options).unwrap();
                assert!(everything(&overlay) == model && overlay.committed() == Epoch(2));
                let refused = overlay.write(0, &[1]).unwrap_err();
                assert_eq!(
                    matches!(refused, DeviceError::ReadOnly),
                    read_only,
                    "{refused}"
                );
            }
        }
        fake.clear_faults();
        let overlay = open_fake(&fake, &base).unwrap();
        assert!(everything(&overlay) == model && overlay.committed() == Epoch(2));
        overlay.write(0, &[1]).unwrap();
        assert!(!fake.list().unwrap().iter().any(|n| n.starts_with("epoch")));
    }
}

#[test]
fn copying_is_tried_again_before_the_next_change() {
    let fake = FakeDirectory::default();
    let overlay = open_fake(&fake, &image(8 * BLOCK)).unwrap();
    overlay.stage(Epoch(1), &[write(0, 1, BLOCK)]).unwrap();
    fake.set_faults(|operation, file| {
        (operation == Operation::Write && file == DATA).then_some(io::ErrorKind::Other)
    });
    overlay.commit(Epoch(1)).unwrap();
    overlay.write(0, &[2]).unwrap_err();
    fake.clear_faults();
    overlay.write(0, &[2]).expect_err("not at once");
    std::thread::sleep(crate::backend::overlay::epochs::RETRY);
    overlay.write(0, &[2]).unwrap();
    assert_eq!(everything(&overlay)[..2], [2, 1]);
}

/// Readers run while epochs are committed. Every second block is in the base, so that a request is made of many reads,
/// between which a commit could get if nothing kept it out.
#[test]
fn a_reader_sees_all_of_an_epoch_or_nothing() {
    const BLOCKS: u64 = 1024;
    let dir = tempfile::tempdir().unwrap();
    let directory = Arc::new(HostDirectory::open(dir.path()).unwrap());
    let base = vec![0; (BLOCKS * BLOCK) as usize];
    let overlay = open_over(directory, &base, Options::default()).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = || {
            let mut seen = std::collections::BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                let bytes = everything(&overlay);
                let mut blocks = bytes.chunks(BLOCK_SIZE).step_by(2);
                assert!(
                    blocks.all(|b| b[0] == bytes[0]),
                    "two epochs in one request"
                );
                seen.insert(bytes[0]);
            }
            seen.len()
        };
        let readers = [scope.spawn(reader), scope.spawn(reader)];
        for epoch in 1..=20u64 {
            let change = |block: u64| match epoch % 5 {
                0 => Change::Zero(block * BLOCK, BLOCK),
                _ => write(block * BLOCK, epoch as u8, BLOCK),
            };
            let changes: Vec<_> = (0..BLOCKS).step_by(2).map(change).collect();
            overlay.stage(Epoch(epoch), &changes).unwrap();
            overlay.commit(Epoch(epoch)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 1);
        }
    });
}
