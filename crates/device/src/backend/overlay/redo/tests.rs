use bytes::Bytes;
use fastrand::Rng;

use super::*;
use drover_storage::FakeDirectory;

fn of(base: &Digest, size: u64) -> RedoOf<'_> {
    RedoOf {
        base,
        size,
        boot: [0; 16],
    }
}

/// Random overlapping changes against a vector that says, for each block, what its content is.
#[test]
fn later_changes_win() {
    for seed in 0..30 {
        let mut rng = Rng::with_seed(seed);
        let fake = FakeDirectory::default();
        let base = Digest([1; 32]);
        let blocks = 40;
        let mut redo = Redo::create(&fake, Epoch(5), of(&base, blocks * BLOCK_SIZE_U64)).unwrap();
        let mut model: Vec<Option<u8>> = vec![None; blocks as usize];
        for byte in 1..60u8 {
            let first = rng.u64(0..blocks);
            let count = rng.u64(0..=(blocks - first).min(8));
            let length = count * BLOCK_SIZE_U64;
            let (change, byte) = match rng.bool() {
                true => (Change::Zero(first * BLOCK_SIZE_U64, length), 0),
                false => {
                    let bytes = Bytes::from(vec![byte; length as usize]);
                    (Change::Write(first * BLOCK_SIZE_U64, bytes), byte)
                }
            };
            redo.append(&[change]).unwrap();
            model[first as usize..(first + count) as usize].fill(Some(byte));
        }
        let check = |redo: &Redo| {
            let mut found = vec![None; blocks as usize];
            for (run, place) in redo.pieces(3..37) {
                assert!(
                    run.start >= 3 && run.end <= 37 && !run.is_empty(),
                    "seed {seed}"
                );
                for block in run.clone() {
                    let mut byte = [0];
                    if let Some(at) = place {
                        let at = at + (block - run.start) * BLOCK_SIZE_U64;
                        read_exact_at(redo.file.as_ref(), &mut byte, at).unwrap();
                    }
                    assert!(found[block as usize].replace(byte[0]).is_none(), "twice");
                }
            }
            assert!(found[3..37] == model[3..37], "seed {seed}");
        };
        check(&redo);
        assert!(redo.seal().is_ok());
        let size = blocks * BLOCK_SIZE_U64;
        let OpenedRedo::Sealed(again) =
            Redo::open(&fake, Epoch(5), of(&base, size), Access::Write).unwrap()
        else {
            panic!("seed {seed}: sealed and not found");
        };
        check(&again);
        let ends = again.all().map(|p| p.0.end);
        assert!(ends.max() <= Some(blocks));
        // It is of this epoch and this base only, and of a device at least as long.
        for (epoch, base, size) in [
            (Epoch(5), Digest([2; 32]), size),
            (Epoch(5), base, BLOCK_SIZE_U64),
        ] {
            let result = Redo::open(&fake, epoch, of(&base, size), Access::Write);
            assert!(matches!(result, Err(OverlayError::Damaged { .. })));
        }
    }
}

#[test]
fn names_are_of_epochs_or_not() {
    assert_eq!(epoch_of("epoch-12"), Some(Epoch(12)));
    for name in [
        "epoch-",
        "epoch-012",
        "epoch-+1",
        "epoch-1.new",
        "data",
        "epoch--1",
    ] {
        assert_eq!(epoch_of(name), None, "{name}");
    }
}
