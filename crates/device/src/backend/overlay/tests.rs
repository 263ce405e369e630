mod aside;
mod crash;
mod epochs;
mod files;
mod processes;
mod space;
mod staged;

use std::sync::Arc;

use bytes::Bytes;
use drover_core::{BLOCK_SIZE, ExtentKind, Zeroes};
use fastrand::Rng;

use super::*;
use crate::backend::MemoryDevice;
use crate::remote::Change;
use drover_storage::{FakeDirectory, HostDirectory};

const BLOCK: u64 = BLOCK_SIZE_U64;

fn identity(size: u64) -> Identity {
    Identity {
        base: Digest([7; 32]),
        size,
        name: "web.qcow2".into(),
    }
}

/// An image of bytes that tell where they are, a third of its blocks zeros.
fn image(size: u64) -> Vec<u8> {
    let mut rng = Rng::with_seed(size);
    let mut bytes = vec![0; size as usize];
    for block in bytes.chunks_mut(BLOCK_SIZE) {
        if rng.u8(0..3) > 0 {
            block.iter_mut().for_each(|b| *b = rng.u8(1..));
        }
    }
    bytes
}

fn open_over(
    directory: Arc<dyn Directory>,
    image: &[u8],
    options: Options,
) -> Result<Overlay, OverlayError> {
    let base = Arc::new(MemoryDevice::new(image.len() as u64));
    base.write(0, image).unwrap();
    Overlay::open(directory, base, identity(image.len() as u64), options)
}

fn open_fake(fake: &FakeDirectory, image: &[u8]) -> Result<Overlay, OverlayError> {
    open_over(Arc::new(fake.clone()), image, Options::default())
}

fn everything(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xA5; device.size() as usize];
    device.read(0, &mut bytes).unwrap();
    bytes
}

fn write(offset: u64, byte: u8, length: u64) -> Change {
    Change::Write(offset, Bytes::from(vec![byte; length as usize]))
}

#[test]
fn it_keeps_the_contract() {
    crate::testing::contract(&|size| {
        let fake = FakeDirectory::default();
        Box::new(open_fake(&fake, &vec![0; size as usize]).unwrap())
    });
}

#[test]
fn it_keeps_the_contract_on_a_disk() {
    let dirs = std::cell::RefCell::new(Vec::new());
    crate::testing::contract(&|size| {
        let dir = tempfile::tempdir().unwrap();
        let directory = Arc::new(HostDirectory::open(dir.path()).unwrap());
        dirs.borrow_mut().push(dir);
        Box::new(open_over(directory, &vec![0; size as usize], Options::default()).unwrap())
    });
}

/// Every kind of change, opened again now and then, against a plain vector.
#[test]
fn it_is_its_base_with_the_changes() {
    for seed in 0..6 {
        let mut rng = Rng::with_seed(seed);
        let size = [40 * BLOCK, 33 * BLOCK + 700, 5 * BLOCK + 1][seed as usize % 3];
        let mut model = image(size);
        let base = model.clone();
        let fake = FakeDirectory::default();
        let mut overlay = open_fake(&fake, &base).unwrap();
        assert!(overlay.changed() == 0 && everything(&overlay) == base);
        for step in 0..200 {
            let said = format!("seed {seed}, step {step}");
            let offset = rng.u64(0..=size);
            let most = [700, 20_000][rng.usize(0..2)];
            let length = rng.u64(0..=most.min(size - offset));
            let range = offset as usize..(offset + length) as usize;
            match rng.u8(0..9) {
                0..3 => {
                    let data: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
                    overlay.write(offset, &data).unwrap();
                    model[range].copy_from_slice(&data);
                }
                3 => {
                    let keep_allocated = rng.bool();
                    let zeroes = Zeroes {
                        keep_allocated,
                        only_fast: !keep_allocated && rng.bool(),
                    };
                    overlay.write_zeroes(offset, length, zeroes).unwrap();
                    model[range].fill(0);
                }
                4 => {
                    overlay.trim(offset, length).unwrap();
                    let mut now = vec![1; length as usize];
                    overlay.read(offset, &mut now).unwrap();
                    for (now, before) in now.iter().zip(&model[range.clone()]) {
                        assert!(*now == 0 || now == before, "{said}");
                    }
                    model[range].copy_from_slice(&now);
                }
                5 => overlay.flush().unwrap(),
                6 => epochs::commit_something(&overlay, &mut rng, &mut model),
                7 => {
                    for run in overlay.extents(offset, length).unwrap() {
                        let bytes = &model[run.offset as usize..run.end() as usize];
                        let zero = bytes.iter().all(|b| *b == 0);
                        assert!(run.kind == ExtentKind::Data || zero, "{said}: {run:?}");
                    }
                }
                _ => {
                    drop(overlay);
                    overlay = open_fake(&fake, &base).unwrap();
                }
            }
            assert!(everything(&overlay) == model, "{said}");
        }
    }
}

#[test]
fn only_what_is_changed_takes_room() {
    let fake = FakeDirectory::default();
    let size = 1 << 20;
    let overlay = open_fake(&fake, &image(size)).unwrap();
    let before = fake.used();
    overlay.write(5 * BLOCK + 100, &[1; 10]).unwrap();
    overlay.write(20 * BLOCK, &vec![2; 8 * BLOCK_SIZE]).unwrap();
    assert_eq!(overlay.changed(), 9 * BLOCK);
    overlay.trim(0, 10 * BLOCK).unwrap();
    assert_eq!(overlay.changed(), 18 * BLOCK);
    overlay.flush().unwrap();
    let log = 2048;
    assert!(
        fake.used() - before <= 8 * BLOCK + log,
        "{}",
        fake.used() - before
    );
    let kinds: Vec<_> = overlay
        .extents(0, 28 * BLOCK)
        .unwrap()
        .iter()
        .map(|run| (run.length / BLOCK, run.kind))
        .collect();
    assert_eq!(kinds.first(), Some(&(10, ExtentKind::Zero)));
    assert_eq!(kinds.last().map(|run| run.1), Some(ExtentKind::Data));
    let keep = Zeroes {
        keep_allocated: true,
        only_fast: false,
    };
    let before = fake.used();
    overlay.write_zeroes(100 * BLOCK, 4 * BLOCK, keep).unwrap();
    assert_eq!(fake.used() - before, 4 * BLOCK);
    overlay.flush().unwrap();
    let before = fake.used();
    let epoch = Epoch(overlay.committed().0 + 1);
    overlay
        .stage(epoch, &[Change::Zero(100 * BLOCK, 3 * BLOCK)])
        .unwrap();
    overlay.commit(epoch).unwrap();
    assert!(before - fake.used() > 2 * BLOCK, "zeros give room back");
}

#[test]
fn a_block_is_copied_up_once_whoever_writes_first() {
    let fake = FakeDirectory::default();
    let base = image(400 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    let together = std::sync::Barrier::new(8);
    // Each thread writes its own bytes of every block, all at the same time.
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (overlay, together) = (&overlay, &together);
            scope.spawn(move || {
                for block in 0..400 {
                    together.wait();
                    let offset = block * BLOCK + thread * 512;
                    overlay.write(offset, &[thread as u8 + 1; 300]).unwrap();
                }
            });
        }
    });
    let mut model = base;
    for (nth, part) in model.chunks_mut(512).enumerate() {
        part[..300].fill((nth % 8) as u8 + 1);
    }
    assert!(everything(&overlay) == model);
}

#[test]
fn a_flush_of_changes_counts_an_epoch_and_one_of_nothing_does_not() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.flush().unwrap();
    assert_eq!(overlay.committed(), Epoch(0));
    overlay.write(0, &[1]).unwrap();
    overlay.flush().unwrap();
    overlay.flush().unwrap();
    assert_eq!(overlay.committed(), Epoch(1));
    overlay.write(0, &[2]).unwrap();
    overlay.flush().unwrap();
    assert_eq!(overlay.committed(), Epoch(2));
    drop(overlay);
    let overlay = open_fake(&fake, &base).unwrap();
    assert_eq!(overlay.committed(), Epoch(2), "closed cleanly");
    overlay.write(0, &[3]).unwrap();
    // Killed: what was not flushed may be there.
    let killed = fake.after_kill();
    drop(overlay);
    for fake in [killed, fake] {
        assert_eq!(open_fake(&fake, &base).unwrap().committed(), Epoch(3));
        assert_eq!(
            open_fake(&fake, &base).unwrap().committed(),
            Epoch(3),
            "and only once"
        );
    }
}

#[test]
fn a_long_log_is_rewritten_by_a_flush() {
    let fake = FakeDirectory::new(4096, 0);
    let base = vec![0; 128 * BLOCK_SIZE];
    let overlay = open_fake(&fake, &base).unwrap();
    let mut longest = 0;
    // Runs of one block, each changed every time.
    for round in 0..900u64 {
        for block in 0..64 {
            let at = block * 2 * BLOCK;
            match round % 2 {
                0 => overlay.write(at, &[1; 512]).unwrap(),
                _ => overlay.trim(at, BLOCK).unwrap(),
            }
        }
        overlay.flush().unwrap();
        longest = longest.max(fake.bytes(STATES).unwrap().len());
    }
    assert!(longest > 1 << 20 && longest < (1 << 20) + 8192, "{longest}");
    assert!(fake.bytes(STATES).unwrap().len() < 1 << 19);
    let epoch = overlay.committed();
    let now = everything(&overlay);
    overlay.write(0, &[5]).unwrap();
    overlay.flush().unwrap();
    let after = open_fake(&fake.after_crash(3), &base).unwrap();
    assert_eq!(after.committed().0, epoch.0 + 2, "it was not closed");
    assert!(everything(&after)[1..] == now[1..]);
}
