//! Logs truncated anywhere, partial files that lost writes, and resuming from them.

use std::os::unix::fs::FileExt;

use drover_core::BLOCK_SIZE;
use drover_image::{Conversion, open_for_sending};
use drover_index::{Origin, PlanRun, Via};
use fastrand::Rng;

use super::*;
use crate::protocol::BATCH_BLOCKS;
use crate::walk::Walk;

/// A raw image and the messages that a destination would receive for it.
pub(crate) struct Sample {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) bytes: Vec<u8>,
    pub(crate) opening: Opening,
    pub(crate) layout: Arc<Layout>,
    pub(crate) batches: Vec<Batch>,
    pub(crate) digest: Digest,
}

/// An image of data and zeros, its third batch all zeros.
pub(crate) fn sample(name: &str, seed: u64, length: usize) -> Sample {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::with_seed(seed);
    let mut bytes = vec![0; length];
    rng.fill(&mut bytes);
    let batch = BATCH_BLOCKS as usize * BLOCK_SIZE;
    for (n, block) in bytes.chunks_mut(BLOCK_SIZE).enumerate() {
        if rng.u8(0..9) == 0 || n * BLOCK_SIZE / batch == 2 {
            block.fill(0);
        }
    }
    let path = dir.path().join(name);
    std::fs::write(&path, &bytes).unwrap();
    let image = open_for_sending(&path, Conversion::AsIs).unwrap();
    let mut walk = Walk::new(&image);
    let mut batches = Vec::new();
    while let Some(batch) = walk.next_batch().unwrap() {
        batches.push(batch);
    }
    let digest = walk.digest().unwrap();
    let offer = Offer {
        slot: 0,
        name: ImageName::new(name).unwrap(),
        format: "raw".into(),
        file_bytes: image.layout.file_len(),
        virtual_bytes: image.virtual_size,
        walk_blocks: image.layout.walk_blocks(),
        layout_bytes: image.layout.encode().len() as u64,
        stamp: Digest([1; 32]),
        dry_run: false,
    };
    let opening = Opening {
        peer: PeerKey([3; 32]),
        peer_name: "lyon".into(),
        offer,
        image: seed,
    };
    Sample {
        dir,
        bytes,
        opening,
        layout: Arc::new(image.layout),
        batches,
        digest,
    }
}

pub(crate) fn disk() -> Arc<dyn Disk> {
    Arc::new(drover_storage::HostDisk)
}

pub(crate) fn literal(batch: &Batch) -> Plan {
    let runs = match batch.digests.len() as u32 {
        0 => vec![],
        count => vec![PlanRun {
            count,
            origin: Origin::Literal,
            via: Via::Literal,
        }],
    };
    Plan {
        runs,
        stores: vec![],
    }
}

impl Sample {
    pub(crate) fn create(&self, dir: &Path) -> Transfer {
        let encoded = self.layout.encode();
        Transfer::create(
            dir,
            self.opening.clone(),
            self.layout.clone(),
            &encoded,
            &disk(),
        )
        .unwrap()
    }

    /// A transfer whose data has all arrived.
    pub(crate) fn arrived(&self, dir: &Path) -> Transfer {
        let mut transfer = self.create(dir);
        for batch in &self.batches {
            transfer.log_batch(batch, &literal(batch)).unwrap();
        }
        transfer.part.write_all_at(&self.bytes, 0).unwrap();
        transfer.log.sync().unwrap();
        transfer
    }

    fn resume(&self, dir: &Path) -> Option<(Transfer, Vec<Restored>)> {
        let mut restored = Vec::new();
        let transfer = Transfer::resume(
            dir,
            &self.opening.offer,
            &self.layout,
            &self.layout.encode(),
            &disk(),
            |opening, r| {
                assert_eq!(*opening, self.opening);
                restored.push(r);
                Ok(())
            },
        );
        transfer.unwrap().map(|t| (t, restored))
    }
}

/// Offsets at which the log's records end.
fn boundaries(log: &Path) -> Vec<u64> {
    LogReader::open(log)
        .unwrap()
        .unwrap()
        .map(|r| r.end)
        .collect()
}

#[test]
fn a_log_cut_anywhere_and_a_part_that_lost_writes_are_resumed_as_far_as_they_go() {
    let sample = sample("a.raw", 1, 34 << 20);
    let dir = sample.dir.path().join("transfer");
    drop(sample.arrived(&dir));
    let log = dir.join("log");
    let whole = std::fs::read(&log).unwrap();
    let ends = boundaries(&log);
    assert_eq!(ends.len(), 2 + sample.batches.len());
    let mut rng = Rng::with_seed(2);
    let mut cuts = ends.clone();
    for pair in [&[16], &ends[..]].concat().windows(2) {
        cuts.extend([pair[0] + 5, rng.u64(pair[0] + 1..pair[1]), pair[1] - 1]);
    }
    for cut in cuts {
        std::fs::write(&log, &whole[..cut as usize]).unwrap();
        // Data lost in a power failure: holes, and partly written blocks.
        let part = File::options()
            .write(true)
            .open(dir.join("image.part"))
            .unwrap();
        part.write_all_at(&sample.bytes, 0).unwrap();
        let mut lost = std::collections::BTreeSet::new();
        for _ in 0..rng.usize(0..40) {
            let block = rng.u64(0..sample.opening.offer.walk_blocks);
            let (at, n) = (block * BLOCK_SIZE as u64, rng.usize(1..=BLOCK_SIZE));
            let there = &sample.bytes[at as usize..at as usize + BLOCK_SIZE];
            if there.iter().any(|b| *b != 0) {
                let rubbish = if rng.bool() { vec![0; n] } else { vec![9; n] };
                part.write_all_at(&rubbish, at).unwrap();
                lost.insert(block);
            }
        }
        let complete = ends.iter().filter(|e| **e <= cut).count();
        let Some((mut transfer, restored)) = sample.resume(&dir) else {
            assert!(complete < 2, "cut at {cut}");
            assert!(inspect(&dir).unwrap().is_none());
            continue;
        };
        assert_eq!(restored.len(), complete - 2, "cut at {cut}");
        let mut found = std::collections::BTreeSet::new();
        for (r, batch) in restored.iter().zip(&sample.batches) {
            assert_eq!(*r.batch, *batch);
            assert_eq!(r.plan.is_some(), r.missing.count() > 0);
            assert!(r.plan.as_ref().is_none_or(|p| *p == literal(batch)));
            let places: Vec<u64> = batch.data.iter().collect();
            found.extend(
                r.missing
                    .iter()
                    .map(|i| batch.first_block() + places[i as usize]),
            );
        }
        lost.retain(|b| *b < restored.len() as u64 * BATCH_BLOCKS);
        assert_eq!(found, lost, "cut at {cut}");
        // It continues after the truncation.
        for batch in &sample.batches[restored.len()..] {
            transfer.log_batch(batch, &literal(batch)).unwrap();
        }
        drop(transfer);
        assert_eq!(std::fs::read(&log).unwrap(), whole, "cut at {cut}");
    }
}

/// Batches of zeros need no plan, and must not be logged before earlier ones that wait for theirs.
#[test]
fn batches_are_logged_in_the_order_of_the_walk() {
    let sample = sample("a.raw", 3, 34 << 20);
    let dir = sample.dir.path().join("transfer");
    let log_of = |order: &[usize]| {
        let mut transfer = sample.create(&dir);
        for &n in order {
            let batch = &sample.batches[n];
            transfer.log_batch(batch, &literal(batch)).unwrap();
        }
        let indices = |restored: Vec<Restored>| restored.iter().map(|r| r.batch.index).collect();
        let found: Vec<u64> = indices(sample.resume(&dir).unwrap().1);
        let data = inspect(&dir).unwrap().unwrap().data;
        assert_eq!(data.len(), found.len());
        found
    };
    assert_eq!(log_of(&[2, 0, 1, 3, 4]), [0, 1, 2, 3, 4]);
    assert_eq!(log_of(&[0, 2, 4, 3, 1]), [0, 1, 2, 3, 4]);
    assert_eq!(log_of(&[0, 2, 3]), [0]);
    assert_eq!(log_of(&[2]), [0; 0]);
}

#[test]
fn only_the_same_offer_resumes() {
    let sample = sample("a.raw", 4, 100_000);
    let dir = sample.dir.path().join("transfer");
    drop(sample.arrived(&dir));
    let offer = &sample.opening.offer;
    let resumes = |offer: &Offer| {
        Transfer::resume(
            &dir,
            offer,
            &sample.layout,
            &sample.layout.encode(),
            &disk(),
            |_, _| Ok(()),
        )
        .unwrap()
        .is_some()
    };
    let slot = offer.slot + 7;
    assert!(resumes(&Offer {
        slot,
        ..offer.clone()
    }));
    let changed = [
        Offer {
            stamp: Digest([2; 32]),
            ..offer.clone()
        },
        Offer {
            file_bytes: 99_999,
            ..offer.clone()
        },
        Offer {
            walk_blocks: 1,
            ..offer.clone()
        },
        Offer {
            format: "vdi".into(),
            ..offer.clone()
        },
    ];
    assert!(changed.iter().all(|o| !resumes(o)));
    // Nor a log with another layout that claims to be the same.
    let other = Arc::new(Layout::in_file_order(100_000, &[0..4096, 8192..12288]));
    let resumed = Transfer::resume(&dir, offer, &other, &other.encode(), &disk(), |_, _| Ok(()));
    assert!(resumed.unwrap().is_none());
    assert!(
        Transfer::resume(
            &dir.join("none"),
            offer,
            &sample.layout,
            &sample.layout.encode(),
            &disk(),
            |_, _| Ok(())
        )
        .unwrap()
        .is_none()
    );
}

#[test]
fn a_part_that_is_gone_or_short_is_noticed() {
    let sample = sample("a.raw", 5, 1_000_000);
    let dir = sample.dir.path().join("transfer");
    drop(sample.arrived(&dir));
    let part = dir.join("image.part");
    File::options()
        .write(true)
        .open(&part)
        .unwrap()
        .set_len(500_000)
        .unwrap();
    let (transfer, restored) = sample.resume(&dir).unwrap();
    assert!(restored[0].missing.count() > 50);
    assert!(restored[0].missing.iter().all(|i| i > 50));
    assert_eq!(transfer.part.metadata().unwrap().len(), 1_000_000);
    drop(transfer);
    std::fs::remove_file(&part).unwrap();
    assert!(sample.resume(&dir).is_none());
}

/// Blocks that came ahead of their batches, as a file that was cut or damaged anywhere says.
#[test]
fn what_came_ahead_counts_only_with_its_digest() {
    let sample = sample("a.raw", 11, 3 * BATCH_BLOCKS as usize * BLOCK_SIZE);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("t");
    let mut transfer = sample.create(&dir);
    let zero = 2 * BATCH_BLOCKS + 5;
    let is_data = |block: &u64| {
        let at = *block as usize * BLOCK_SIZE;
        !drover_core::is_zero(&sample.bytes[at..at + BLOCK_SIZE])
    };
    let mut data = (BATCH_BLOCKS + 7..).filter(is_data);
    let first = (3..).find(is_data).unwrap();
    let given = vec![first, data.next().unwrap(), data.next().unwrap(), zero];
    let mut noted = Vec::new();
    for block in &given {
        let at = *block as usize * BLOCK_SIZE;
        let content = &sample.bytes[at..at + BLOCK_SIZE];
        transfer.part.write_all_at(content, at as u64).unwrap();
        noted.push((*block, drover_index::digest_block(content)));
    }
    transfer.log_ahead(&noted[..2]).unwrap();
    transfer.log_ahead(&[]).unwrap();
    transfer.log_ahead(&noted[2..]).unwrap();
    let read = |from: u64| {
        let part = File::open(dir.join("image.part")).unwrap();
        let found = read_ahead(&dir, &part, &sample.layout, from).unwrap();
        let blocks = |bits: &std::collections::HashMap<u64, DataBits>| -> Vec<u64> {
            let blocks = bits.iter().flat_map(|(index, bits)| {
                bits.iter().map(move |place| index * BATCH_BLOCKS + place)
            });
            let mut blocks: Vec<u64> = blocks.collect();
            blocks.sort_unstable();
            blocks
        };
        (blocks(&found[0]), blocks(&found[1]))
    };
    assert_eq!(read(0), (given[..3].to_vec(), vec![zero]));
    assert_eq!(read(1), (given[1..3].to_vec(), vec![zero]));
    // A block that was lost, or became another one.
    let at = given[1] * BLOCK_SIZE as u64;
    transfer.part.write_all_at(&[0; BLOCK_SIZE], at).unwrap();
    assert_eq!(read(0), (vec![given[0], given[2]], vec![zero]));

    let path = dir.join("ahead");
    let whole = std::fs::read(&path).unwrap();
    for cut in 0..whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let (data, zeros) = read(0);
        assert!(data.iter().all(|b| given.contains(b)) && zeros.len() <= 1);
        let mut bad = whole.clone();
        bad[cut] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        let (data, zeros) = read(0);
        assert!(data.iter().all(|b| given.contains(b)) && zeros.iter().all(|b| *b == zero));
    }
    // It goes on after a torn record, by another process.
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    drop(transfer);
    let resumed = Transfer::resume(
        &dir,
        &sample.opening.offer,
        &sample.layout,
        &sample.layout.encode(),
        &disk(),
        |_, _| Ok(()),
    );
    let mut resumed = resumed.unwrap().unwrap();
    assert_eq!(read(0), (vec![given[0]], vec![]));
    resumed.log_ahead(&noted[2..]).unwrap();
    assert_eq!(read(0), (vec![given[0], given[2]], vec![zero]));
    resumed.distrust().unwrap();
    assert_eq!(read(0), (vec![], vec![]));
}
