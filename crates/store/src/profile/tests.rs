use proptest::prelude::*;

use super::*;
use drover_storage::EnvelopeError;

const BLOCK: usize = 4096;

/// A disk with a block of each byte; 0 is a block of zeros.
fn disk(blocks: &[u8]) -> Vec<u8> {
    blocks.iter().flat_map(|byte| [*byte; BLOCK]).collect()
}

fn reads(blocks: &[u64]) -> Vec<FirstRead> {
    let read = |(at_ms, block): (u32, &u64)| FirstRead {
        block: *block,
        at_ms,
    };
    (0..).zip(blocks).map(read).collect()
}

fn boot(disk: &Vec<u8>, blocks: &[u64]) -> Profile {
    Profile::of_boot(disk, &reads(blocks)).unwrap()
}

fn blocks(profile: &Profile) -> Vec<u64> {
    profile.entries().iter().map(|entry| entry.block).collect()
}

#[test]
fn a_boot_is_what_it_read_but_for_zeros_and_what_is_outside() {
    let mut disk = disk(&[1, 0, 3, 4]);
    disk.truncate(3 * BLOCK + 100);
    let profile = boot(&disk, &[3, 1, 9, 0, 3, u64::MAX]);
    assert_eq!(blocks(&profile), [3, 0]);
    assert_eq!((profile.boots(), profile.bytes()), (1, 8192));
    let told = Profile::without_content(disk.len() as u64, &reads(&[3, 1, 9, 0, 3, u64::MAX]));
    assert_eq!(blocks(&told), [3, 1, 0]);
    let told = Profile::decode(&told.encode()).unwrap();
    assert_eq!(Profile::of_boot(&disk, &told.reads()).unwrap(), profile);
    // The last block is cut by the end of the disk, and by that of a smaller one.
    assert_eq!(profile.order(disk.len() as u64), [12288..12388, 0..4096]);
    assert_eq!(profile.order(12_300), [12288..12300, 0..4096]);
    assert_eq!(profile.order(4096).first(), Some(&(0..4096)));
    assert!(profile.order(0).is_empty());
}

#[test]
fn one_that_is_put_to_a_smaller_disk_has_no_block_outside_of_it() {
    let disk = disk(&[1, 2, 3, 4]);
    let mut profile = boot(&disk, &[3, 1, 2]);
    profile.set_image(Digest([1; 32]));
    profile.put_to_disk(2 * BLOCK as u64 + 1);
    assert_eq!(blocks(&profile), [1, 2]);
    assert_eq!(profile.disk_bytes(), 2 * BLOCK as u64 + 1);
    assert_eq!(profile.image(), Digest::default());
    assert_eq!(Profile::decode(&profile.encode()).unwrap(), profile);
}

#[test]
fn several_boots_are_weighed() {
    let disk = disk(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut profile = boot(&disk, &[5, 1, 2]);
    for _ in 0..4 {
        profile.merge(&boot(&disk, &[1, 2, 3]));
    }
    assert_eq!(profile.boots(), 5);
    // One boot in five read block 5: it goes last, although it was the first then.
    assert_eq!(profile.order(1 << 20), [4096..16384, 20480..24576]);
    let by = |block| {
        profile
            .entries()
            .iter()
            .find(|e| e.block == block)
            .unwrap()
            .boots
    };
    assert_eq!([1, 2, 3, 5].map(by), [5, 5, 4, 1]);
    // What is no longer read is forgotten.
    for _ in 0..40 {
        profile.merge(&boot(&disk, &[1, 2]));
    }
    assert_eq!(blocks(&profile), [1, 2]);
    assert!(profile.boots() <= MAX_BOOTS);
}

#[test]
fn the_same_boot_again_changes_no_order() {
    let disk = disk(&[1; 64]);
    let order: Vec<u64> = (0..64).map(|n| n * 29 % 64).collect();
    let mut profile = boot(&disk, &order);
    for _ in 0..50 {
        profile.merge(&boot(&disk, &order));
        assert_eq!(blocks(&profile), order);
    }
}

#[test]
fn what_has_changed_is_pruned_and_comes_back_as_new() {
    let before = disk(&[1, 2, 3, 4]);
    let after = disk(&[1, 9, 3]);
    let mut profile = boot(&before, &[3, 2, 1, 0]);
    profile.merge(&boot(&before, &[3, 2, 1, 0]));
    let mut pruned = profile.clone();
    assert_eq!(pruned.prune(&after).unwrap(), 2);
    assert_eq!(blocks(&pruned), [2, 0]);
    assert_eq!(pruned.disk_bytes(), after.len() as u64);
    assert_eq!(pruned.prune(&after).unwrap(), 0);
    // A boot of the changed image says the same, without the pruning.
    profile.merge(&boot(&after, &[2, 1, 0]));
    let boots = |p: &Profile| Vec::from_iter(p.entries().iter().map(|e| (e.block, e.boots)));
    assert_eq!(boots(&profile), [(2, 3), (1, 1), (0, 3)]);
}

#[test]
fn too_many_blocks_are_cut_to_those_that_most_boots_read() {
    let entry = |block, boots| Entry {
        block,
        at_ms: 0,
        boots,
        digest: [7; 12],
    };
    let most = MAX_BLOCKS as u64;
    let make = |boots, blocks: Range<u64>, read_by| Profile {
        disk_bytes: MAX_DISK_BYTES,
        image: Digest([1; 32]),
        boots,
        entries: blocks.map(|block| entry(block, read_by)).collect(),
    };
    let mut profile = make(2, 0..most, 1);
    profile.merge(&make(2, most - 1..most + 9, 2));
    assert_eq!(profile.entries().len(), MAX_BLOCKS);
    let has = |block| profile.entries().iter().any(|e| e.block == block);
    assert!((most - 1..most + 9).all(has) && has(0) && has(most - 11) && !has(most - 2));
    // Scattered as far as can be, it still fits its file.
    for (n, entry) in profile.entries.iter_mut().enumerate() {
        let block = n as u64 * 2;
        entry.block = match n % 2 {
            0 => block,
            _ => (MAX_DISK_BYTES / 4096) - 1 - block,
        };
        entry.at_ms = if n % 2 == 0 { 0 } else { u32::MAX };
    }
    let bytes = profile.encode();
    assert!(bytes.len() <= MAX_BYTES, "{}", bytes.len());
    assert_eq!(Profile::decode(&bytes).unwrap(), profile);
}

#[test]
fn a_profile_is_found_by_content() {
    let template = disk(&[1, 2, 3, 4, 5, 6, 7]);
    let mut profile = boot(&template, &[4, 5, 0, 3, 6]);
    profile.merge(&boot(&template, &[4, 5, 0, 3, 6]));
    // The first stays, the file of blocks 3 to 5 is elsewhere twice, in pieces first, and block 6 is gone.
    let derived = disk(&[1, 8, 4, 5, 8, 6, 8, 8, 4, 5, 6]);
    let mut search = Search::new(&profile);
    let all: Vec<u64> = (0..11).collect();
    let digests = digests_at(&derived, &all).unwrap();
    for block in all {
        search.see(block, &digests[&block]);
    }
    let found = search.finish(derived.len() as u64);
    // Block 5 is still where it was; what was in block 4 is at the first place free.
    assert_eq!(blocks(&found), [3, 5, 0, 2]);
    assert_eq!(found.boots(), 2);
    assert_eq!(found.clone().prune(&derived).unwrap(), 0);
}

#[test]
fn a_file_that_moved_stays_whole() {
    let template = disk(&[9, 1, 2, 1, 2, 1, 3]);
    let profile = boot(&template, &[1, 2, 3, 4, 5, 6]);
    let moved = disk(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 1, 2, 1, 3]);
    let mut search = Search::new(&profile);
    let all: Vec<u64> = (0..14).collect();
    for (block, digest) in &digests_at(&moved, &all).unwrap() {
        search.see(*block, digest);
    }
    let found = search.finish(moved.len() as u64);
    let mut places = blocks(&found);
    places.sort_unstable();
    assert_eq!(places, [8, 9, 10, 11, 12, 13]);
}

#[test]
fn a_whole_image_is_searched() {
    let template = disk(&[1, 2, 3]);
    let profile = boot(&template, &[2, 0]);
    let derived = std::sync::Arc::new(disk(&[0, 3, 0, 1]));
    let derived = drover_image::VirtualDisk::from_content(derived).unwrap();
    let mut seen = Vec::new();
    let found = scan(&profile, &derived, |done, total| {
        seen.push((done, total));
        true
    });
    assert_eq!(blocks(&found.unwrap()), [1, 3]);
    assert_eq!(seen.last(), Some(&(16384, 16384)));
}

#[test]
fn a_file_comes_back_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("7.profile");
    assert!(Profile::read(&path).unwrap().is_none());
    let mut profile = boot(&disk(&[1, 2, 3]), &[2, 0, 1]);
    profile.set_image(Digest([5; 32]));
    profile.write(&path).unwrap();
    assert_eq!(Profile::read(&path).unwrap().unwrap(), profile);
    let good = std::fs::read(&path).unwrap();
    assert_eq!(good, profile.encode());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(Profile::decode(&bad).is_err(), "byte {at}");
        assert!(Profile::decode(&good[..at]).is_err(), "cut at {at}");
    }
    let foreign = Profile::decode(b"drover order 1\n0 65536\n").unwrap_err();
    assert!(matches!(
        foreign,
        ProfileError::Envelope(EnvelopeError::Foreign)
    ));
}

#[test]
fn a_hostile_profile_is_refused() {
    let numbers = |numbers: &[u64], digests: usize| {
        let mut body = vec![9; 32];
        numbers
            .iter()
            .for_each(|n| drover_core::put_varint(&mut body, *n));
        body.extend(std::iter::repeat_n(7, digests * 12));
        codec::parse(&body).map(|profile| blocks(&profile))
    };
    // Disk, boots, blocks; a run of two from block 1 on, by 1 ms, of 1 boot.
    assert_eq!(numbers(&[40960, 2, 2, 2, 2, 2, 1], 2), Ok(vec![1, 2]));
    for bad in [
        &[1 << 60, 1, 0][..],
        &[40960, 17, 0],
        // A million of blocks, said and not there.
        &[1 << 40, 1, 1 << 20, 1 << 20, 0, 0, 1],
        &[1 << 40, 1, MAX_BLOCKS as u64, MAX_BLOCKS as u64, 0, 0, 1],
        // A run that is empty, too long, outside of the disk, before it.
        &[40960, 2, 2, 0, 2, 2, 1],
        &[40960, 2, 2, 3, 2, 2, 1],
        &[40960, 2, 2, 2, 18, 2, 1],
        &[40960, 2, 2, 2, 20, 2, 1],
        &[40960, 2, 2, 2, 1, 2, 1],
        &[40960, 2, 2, 2, u64::MAX, 2, 1],
        // A time before the start, or beyond all; more boots than there were, or none.
        &[40960, 2, 2, 2, 2, 1, 1],
        &[40960, 2, 2, 2, 2, u64::MAX - 1, 1],
        &[40960, 2, 2, 2, 2, 2, 3],
        &[40960, 2, 2, 2, 2, 2, 0],
        &[40960, 2, 2, 2, 2, 2],
    ] {
        assert!(numbers(bad, 2).is_err(), "{bad:?}");
    }
    assert!(numbers(&[40960, 2, 2, 2, 2, 2, 1], 3).is_err());
    assert!(numbers(&[40960, 2, 2, 2, 2, 2, 1], 1).is_err());
    assert_eq!(numbers(&[40960, 0, 0], 0), Ok(vec![]));
}

fn any_profile() -> impl Strategy<Value = Profile> {
    let entry = (0..64_u64, 0..5_u32, 1..4_u8, 0..3_u8);
    (3..MAX_BOOTS, prop::collection::vec(entry, 0..40)).prop_map(|(boots, entries)| {
        let mut seen = HashSet::new();
        let entry = |(block, at_ms, boots, byte)| Entry {
            block,
            at_ms,
            boots,
            digest: [byte; 12],
        };
        let entries = entries.into_iter().map(entry);
        Profile {
            disk_bytes: 64 * 4096,
            image: Digest::default(),
            boots,
            entries: entries.filter(|e| seen.insert(e.block)).collect(),
        }
    })
}

proptest! {
    #[test]
    fn bytes_and_back(profile in any_profile()) {
        prop_assert_eq!(Profile::decode(&profile.encode()).unwrap(), profile);
    }

    #[test]
    fn an_order_is_every_block_once(profile in any_profile(), size in 0..300_000_u64) {
        let mut plain = vec![false; size as usize];
        for range in profile.order(size) {
            prop_assert!(range.start < range.end && range.end <= size);
            for byte in &mut plain[range.start as usize..range.end as usize] {
                prop_assert!(!std::mem::replace(byte, true));
            }
        }
        for (at, is_there) in plain.iter().enumerate().step_by(1000) {
            let block = at as u64 / 4096;
            prop_assert_eq!(*is_there, profile.entries().iter().any(|e| e.block == block));
        }
    }

    #[test]
    fn a_merge_is_usable_and_has_what_was_new(mut a in any_profile(), b in any_profile()) {
        let halved = a.boots() + b.boots() > MAX_BOOTS;
        let both: HashSet<u64> = blocks(&a).into_iter().chain(blocks(&b)).collect();
        a.merge(&b);
        prop_assert_eq!(&Profile::decode(&a.encode()).unwrap(), &a);
        if !halved {
            prop_assert_eq!(blocks(&a).into_iter().collect::<HashSet<_>>(), both);
        }
    }
}
