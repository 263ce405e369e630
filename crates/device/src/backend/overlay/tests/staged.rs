//! Interrupted epochs: parts that were accepted stay staged, and only those.

use std::io;

use drover_storage::{Access, Operation};

use super::*;

/// Bytes of a seal.
const SEAL: usize = 32;

/// What a writer that was interrupted does: asks what is staged, sends the rest of `wanted`, commits.
fn go_on(overlay: &Overlay, epoch: Epoch, wanted: &[u8], changed: &[bool]) -> u64 {
    let mut missing = changed.to_vec();
    let (mut from, mut staged) = (0, 0);
    while from < overlay.size() {
        let (runs, next) = overlay.staged_runs(epoch, from, 2);
        assert!(next > from && runs.len() <= 2);
        for (offset, length) in runs {
            assert!(offset >= from && offset + length <= next && length > 0);
            let blocks = offset / BLOCK..(offset + length).div_ceil(BLOCK);
            staged += blocks.end - blocks.start;
            missing[blocks.start as usize..blocks.end as usize].fill(false);
        }
        from = next;
    }
    for (block, _) in missing.iter().enumerate().filter(|(_, missing)| **missing) {
        let range = block * BLOCK_SIZE..((block + 1) * BLOCK_SIZE).min(wanted.len());
        let bytes = Bytes::copy_from_slice(&wanted[range.clone()]);
        let change = Change::Write(range.start as u64, bytes);
        overlay.stage(epoch, &[change]).unwrap();
    }
    overlay.commit(epoch).unwrap();
    staged
}

/// Changes of an epoch in an order, each block once, as a writer sends what it has frozen.
fn parts(rng: &mut Rng, model: &mut [u8], changed: &mut [bool]) -> Vec<Change> {
    let mut parts = Vec::new();
    for (block, changed) in changed.iter_mut().enumerate() {
        if rng.u8(0..3) == 0 {
            continue;
        }
        *changed = true;
        let range = block * BLOCK_SIZE..((block + 1) * BLOCK_SIZE).min(model.len());
        let (offset, length) = (range.start as u64, range.len() as u64);
        parts.push(match rng.u8(0..4) {
            0 => {
                model[range].fill(0);
                Change::Zero(offset, length)
            }
            _ => {
                rng.fill(&mut model[range.clone()]);
                Change::Write(offset, Bytes::copy_from_slice(&model[range]))
            }
        });
    }
    parts
}

#[test]
fn what_was_staged_stays_over_a_restart() {
    let fake = FakeDirectory::default();
    let base = image(64 * BLOCK);
    let epoch = Epoch(0).after(77);
    let overlay = open_fake(&fake, &base).unwrap();
    let changes = [write(0, 1, 20 * BLOCK), Change::Zero(40 * BLOCK, 4 * BLOCK)];
    overlay.stage(epoch, &changes).unwrap();
    drop(overlay);
    for fake in [fake.after_kill(), fake] {
        let overlay = open_fake(&fake, &base).unwrap();
        assert_eq!(overlay.staged_epoch(), Some(epoch));
        assert_eq!(overlay.committed(), Epoch(0));
        assert!(everything(&overlay) == base, "it does not count yet");
        let runs = vec![(0, 20 * BLOCK), (40 * BLOCK, 4 * BLOCK)];
        assert_eq!(overlay.staged_runs(epoch, 0, 9), (runs, 64 * BLOCK));
        let none = (Vec::new(), 64 * BLOCK);
        assert_eq!(
            overlay.staged_runs(Epoch(1), 0, 9),
            none,
            "of another epoch"
        );
        let refused = overlay.write(0, &[1]).unwrap_err();
        assert!(matches!(refused, DeviceError::Unavailable(_)), "{refused}");
        overlay
            .stage(epoch, &[write(63 * BLOCK, 3, BLOCK)])
            .unwrap();
        overlay.commit(epoch).unwrap();
        let mut model = base.clone();
        model[..20 * BLOCK_SIZE].fill(1);
        model[40 * BLOCK_SIZE..44 * BLOCK_SIZE].fill(0);
        model[63 * BLOCK_SIZE..].fill(3);
        assert!(everything(&overlay) == model);
        overlay.write(0, &[1]).unwrap();
    }
}

#[test]
fn an_epoch_may_be_as_large_as_its_device() {
    const BLOCKS: u64 = 300_000;
    let fake = FakeDirectory::default();
    let base = Arc::new(MemoryDevice::new(BLOCKS * BLOCK));
    let identity = identity(BLOCKS * BLOCK);
    let options = Options::default();
    let overlay = Overlay::open(Arc::new(fake.clone()), base, identity, options).unwrap();
    let zero = |block| Change::Zero(block * BLOCK, BLOCK);
    // More than had room in one, and no two of them neighbours.
    for part in (0..BLOCKS).step_by(2).collect::<Vec<_>>().chunks(1000) {
        let changes: Vec<_> = part.iter().map(|block| zero(*block)).collect();
        overlay.stage(Epoch(1), &changes).unwrap();
    }
    for part in (1..BLOCKS).step_by(2).collect::<Vec<_>>().chunks(1000) {
        let changes: Vec<_> = part.iter().map(|block| zero(*block)).collect();
        overlay.stage(Epoch(1), &changes).unwrap();
    }
    overlay
        .stage(Epoch(1), &[write(5 * BLOCK, 9, BLOCK)])
        .unwrap();
    overlay.commit(Epoch(1)).unwrap();
    assert_eq!(overlay.changed(), BLOCKS * BLOCK);
    let mut bytes = [0; 10];
    overlay.read(5 * BLOCK, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 10]);
}

/// Power failures at every step of an epoch; the sender resumes from what is staged then.
#[test]
fn an_interrupted_epoch_becomes_the_one_that_was_frozen() {
    for seed in 0..6 {
        let size = [16 * BLOCK, 15 * BLOCK + 700][seed as usize % 2];
        let base = image(size);
        let mut model = base.clone();
        let mut changed = vec![false; size.div_ceil(BLOCK) as usize];
        let parts = parts(&mut Rng::with_seed(seed), &mut model, &mut changed);
        let epoch = Epoch(0).after(seed as u32);
        let run = |fake: &FakeDirectory| -> Result<(), OverlayError> {
            let overlay = open_fake(fake, &base)?;
            for (nth, part) in parts.iter().enumerate() {
                overlay.stage(epoch, std::slice::from_ref(part))?;
                // Some come twice, as after a lost answer.
                if nth % 5 == 4 {
                    overlay.stage(epoch, &parts[nth - 2..=nth])?;
                }
            }
            overlay.commit(epoch)
        };
        let whole = FakeDirectory::new(512, seed);
        run(&whole).unwrap();
        let mut kept = 0;
        for step in 0..whole.steps() {
            let fake = FakeDirectory::new(512, seed);
            fake.cut_power_at(step);
            let _ = run(&fake);
            for (crash, after) in [fake.after_crash(1), fake.after_crash(2), fake.after_kill()]
                .into_iter()
                .enumerate()
            {
                let said = format!("seed {seed}, step {step}, crash {crash}");
                let overlay = open_fake(&after, &base).unwrap_or_else(|e| panic!("{said}: {e}"));
                if overlay.committed() != epoch {
                    assert!(everything(&overlay) == base, "{said}: half an epoch");
                    kept += go_on(&overlay, epoch, &model, &changed);
                }
                assert!(everything(&overlay) == model, "{said}: not what was frozen");
                drop(overlay);
                let again = open_fake(&after.after_crash(3), &base).unwrap();
                assert!(everything(&again) == model, "{said}: it did not stay");
            }
        }
        assert!(kept > 0, "seed {seed}: nothing was ever kept");
    }
}

/// Epochs that are given up, taken up and restarted, against a plain vector.
#[test]
fn whatever_becomes_of_epochs_the_device_is_at_one_of_them() {
    for seed in 0..20 {
        let mut rng = Rng::with_seed(seed);
        let size = [16 * BLOCK, 15 * BLOCK + 700][seed as usize % 2];
        let base = image(size);
        let mut model = base.clone();
        let mut fake = FakeDirectory::new(512, seed);
        let mut overlay = open_fake(&fake, &base).unwrap();
        let mut last = Epoch(0);
        for step in 0..40 {
            let said = format!("seed {seed}, step {step}");
            let epoch = last.max(overlay.committed()).after(rng.u32(..));
            last = epoch;
            let mut wanted = model.clone();
            let mut changed = vec![false; size.div_ceil(BLOCK) as usize];
            let parts = parts(&mut rng, &mut wanted, &mut changed);
            let upto = rng.usize(0..=parts.len());
            for part in parts[..upto].chunks(3) {
                overlay.stage(epoch, part).unwrap();
            }
            assert!(
                everything(&overlay) == model,
                "{said}: it is seen too early"
            );
            let how = rng.u8(0..5);
            if how < 2 {
                fake = match how {
                    0 => fake.after_kill(),
                    _ => fake.after_crash(step),
                };
                drop(overlay);
                overlay = open_fake(&fake, &base).unwrap();
                assert!(everything(&overlay) == model, "{said}: after the restart");
            }
            // Else it is given up, and a later one takes its place.
            if how < 4 {
                go_on(&overlay, epoch, &wanted, &changed);
                model = wanted;
                assert_eq!(overlay.committed(), epoch, "{said}");
            }
            assert!(everything(&overlay) == model, "{said}");
        }
    }
}

/// A process was killed before it had synced the seal, and its epoch counts: it must not vanish afterwards.
#[test]
fn an_epoch_that_counts_is_durable() {
    let base = image(64 * BLOCK);
    let epoch = Epoch(0).after(77);
    let changes = [write(0, 1, 20 * BLOCK)];
    let full = |fake: &FakeDirectory| {
        fake.set_faults(|operation, name| {
            let copies = operation == Operation::Write && name == DATA;
            copies.then_some(io::ErrorKind::StorageFull)
        });
    };
    let killed = FakeDirectory::default();
    let overlay = open_fake(&killed, &base).unwrap();
    overlay.stage(epoch, &changes).unwrap();
    full(&killed);
    overlay.seal(epoch, 20 * BLOCK).unwrap();
    drop(overlay);
    for seed in 0..20 {
        let fake = FakeDirectory::new(512, seed);
        for name in killed.list().unwrap() {
            let bytes = killed.bytes(&name).unwrap();
            let synced = match name.starts_with("epoch-") {
                true => bytes.len() - SEAL,
                false => bytes.len(),
            };
            fake.put(&name, &bytes[..synced]);
            if synced < bytes.len() {
                let file = fake.open(&name, Access::Write).unwrap();
                file.write_at(&bytes[synced..], synced as u64).unwrap();
            }
        }
        full(&fake);
        let overlay = open_fake(&fake, &base).unwrap();
        assert_eq!(overlay.committed(), epoch);
        drop(overlay);
        fake.cut_power_at(fake.steps());
        let overlay = open_fake(&fake.after_crash(seed), &base).unwrap();
        assert_eq!(overlay.committed(), epoch, "seed {seed}");
        assert_eq!(
            everything(&overlay)[..20 * BLOCK as usize],
            [1; 20 * BLOCK as usize]
        );
    }
}
