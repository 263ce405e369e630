//! Power failures at every step; the recovered state is compared with all permitted ones.

use super::*;

const SECTOR: usize = 512;

/// What each sector may hold after a crash: the durable content, and all that came later.
struct Possible {
    sectors: Vec<Vec<Vec<u8>>>,
    /// Something was changed and not flushed.
    plain: bool,
    epoch: u64,
}

impl Possible {
    fn of(bytes: &[u8]) -> Self {
        Self {
            sectors: bytes.chunks(SECTOR).map(|s| vec![s.to_vec()]).collect(),
            plain: false,
            epoch: 0,
        }
    }

    fn live(&self) -> Vec<u8> {
        let last = |s: &Vec<Vec<u8>>| s.last().cloned().unwrap();
        self.sectors.iter().flat_map(last).collect()
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut live = self.live();
        live[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        self.plain |= !data.is_empty();
        let touched = offset as usize / SECTOR..(offset as usize + data.len()).div_ceil(SECTOR);
        for (nth, sector) in live.chunks(SECTOR).enumerate() {
            if touched.contains(&nth) {
                self.sectors[nth].push(sector.to_vec());
            }
        }
    }

    fn flushed(&mut self) {
        for versions in &mut self.sectors {
            versions.drain(..versions.len() - 1);
        }
        self.epoch += u64::from(self.plain);
        self.plain = false;
    }

    fn allows(&self, found: &[u8]) -> bool {
        let mut sectors = found.chunks(SECTOR).zip(&self.sectors);
        sectors.all(|(found, versions)| versions.iter().any(|v| v == found))
    }
}

/// Runs until a call fails. What may be found then, and, when a commit was under way, what may be found if it counts.
fn run(
    fake: &FakeDirectory,
    base: &[u8],
    rng: &mut Rng,
    steps: usize,
) -> (Possible, Option<Vec<u8>>) {
    let mut possible = Possible::of(base);
    let size = base.len() as u64;
    let Ok(overlay) = open_fake(fake, base) else {
        return (possible, None);
    };
    for _ in 0..steps {
        let offset = rng.u64(0..size);
        let before = possible.plain;
        let most = [700, 9_000][rng.usize(0..2)];
        let length = rng.u64(0..=most.min(size - offset));
        let result = match rng.u8(0..10) {
            0..4 => {
                let data: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
                possible.write(offset, &data);
                overlay.write(offset, &data)
            }
            4 | 5 => {
                let whole = offset.next_multiple_of(BLOCK)..(offset + length) / BLOCK * BLOCK;
                if rng.bool() {
                    possible.write(offset, &vec![0; length as usize]);
                    overlay.write_zeroes(offset, length, Zeroes::default())
                } else if whole.start < whole.end {
                    let length = whole.end - whole.start;
                    possible.write(whole.start, &vec![0; length as usize]);
                    overlay.trim(whole.start, length)
                } else {
                    Ok(())
                }
            }
            6 | 7 => {
                let result = overlay.flush();
                if result.is_ok() {
                    possible.flushed();
                }
                result
            }
            _ => {
                if overlay.flush().is_err() {
                    return (possible, None);
                }
                possible.flushed();
                let epoch = Epoch(overlay.committed().0 + 1);
                assert_eq!(epoch.0, possible.epoch + 1);
                let mut model = possible.live();
                for _ in 0..rng.usize(1..3) {
                    if overlay
                        .stage(epoch, &epochs::any_changes(rng, &mut model))
                        .is_err()
                    {
                        return (possible, None);
                    }
                }
                if overlay.commit(epoch).is_err() {
                    return (possible, Some(model));
                }
                possible = Possible::of(&model);
                possible.epoch = epoch.0;
                Ok(())
            }
        };
        if result.is_err() {
            // It may not even have begun.
            possible.plain = before;
            break;
        }
    }
    (possible, None)
}

fn check(
    after: &FakeDirectory,
    base: &[u8],
    possible: &Possible,
    committing: Option<&Vec<u8>>,
    said: &str,
) {
    let overlay = open_fake(after, base).unwrap_or_else(|e| panic!("{said}: {e}"));
    let found = everything(&overlay);
    let epoch = overlay.committed().0;
    match committing {
        Some(model) if epoch == possible.epoch + 1 => {
            assert!(found == *model, "{said}: half an epoch")
        }
        Some(_) => assert_eq!(epoch, possible.epoch, "{said}"),
        None => {
            // A flush that was cut off may have counted, and an unclean end counts one more.
            let most = possible.epoch + 2;
            let least = possible.epoch + u64::from(possible.plain);
            assert!(
                (least..=most).contains(&epoch),
                "{said}: epoch {epoch} of {least} to {most}"
            );
        }
    }
    assert!(
        possible.allows(&found) || committing.is_some_and(|model| found == *model),
        "{said}: what was never there"
    );
    overlay.abandon().unwrap();
    // It continues, and its data survives.
    overlay.write(100, &[9; 5000]).unwrap();
    overlay.flush().unwrap();
    let mut later = found;
    later[100..5100].fill(9);
    drop(overlay);
    let again = open_fake(&after.after_crash(7), base).unwrap();
    assert!(everything(&again) == later, "{said}: it did not stay");
}

#[test]
fn the_power_may_fail_at_any_step() {
    for seed in 0..4 {
        let sector = [512, 4096][seed as usize % 2];
        let base = image([8 * BLOCK, 7 * BLOCK + 700][seed as usize / 2 % 2]);
        let whole = FakeDirectory::new(sector, seed);
        run(&whole, &base, &mut Rng::with_seed(seed), 14);
        for step in 0..whole.steps() {
            let fake = FakeDirectory::new(sector, seed);
            fake.cut_power_at(step);
            let (possible, committing) = run(&fake, &base, &mut Rng::with_seed(seed), 14);
            assert!(fake.is_off(), "seed {seed}, step {step}");
            for crash in 0..2 {
                let said = format!("seed {seed}, step {step}, crash {crash}");
                let after = fake.after_crash(crash);
                check(&after, &base, &possible, committing.as_ref(), &said);
            }
        }
    }
}

/// Power fails while an overlay is opened after a crash, again and again.
#[test]
fn the_power_may_fail_while_it_recovers() {
    for seed in 0..4 {
        let base = image(8 * BLOCK);
        let whole = FakeDirectory::new(512, seed);
        run(&whole, &base, &mut Rng::with_seed(seed), 20);
        let steps = whole.steps();
        for step in (0..steps).step_by(5) {
            let mut fake = FakeDirectory::new(512, seed);
            fake.cut_power_at(step);
            let (possible, committing) = run(&fake, &base, &mut Rng::with_seed(seed), 20);
            for crash in 0..6 {
                fake = fake.after_crash(crash);
                fake.cut_power_at(crash * 2 + 1);
                if open_fake(&fake, &base).is_ok() && !fake.is_off() {
                    break;
                }
            }
            let said = format!("seed {seed}, step {step}");
            let after = fake.after_crash(seed);
            let overlay = open_fake(&after, &base).unwrap_or_else(|e| panic!("{said}: {e}"));
            let found = everything(&overlay);
            assert!(
                possible.allows(&found) || committing.is_some_and(|model| found == model),
                "{said}: what was never there"
            );
        }
    }
}

/// Errors at random: no crash, and nothing that was acknowledged is lost.
#[test]
fn errors_lose_nothing_that_was_flushed() {
    for seed in 0..30 {
        let mut rng = Rng::with_seed(seed);
        let base = image(8 * BLOCK);
        let fake = FakeDirectory::new(512, seed);
        drop(open_fake(&fake, &base).unwrap());
        let mut chance = Rng::with_seed(seed);
        fake.set_faults(move |operation, _| {
            let fails = operation != drover_storage::Operation::Read && chance.u8(0..40) == 0;
            fails.then_some(std::io::ErrorKind::StorageFull)
        });
        let (possible, committing) = run(&fake, &base, &mut rng, 40);
        fake.clear_faults();
        for after in [fake.after_kill(), fake.after_crash(seed)] {
            check(
                &after,
                &base,
                &possible,
                committing.as_ref(),
                &format!("seed {seed}"),
            );
        }
    }
}
