use proptest::prelude::*;

use super::*;
use drover_storage::FakeDirectory;

fn digest(n: u64) -> Digest {
    Digest(*blake3::hash(&n.to_le_bytes()).as_bytes()).short()
}

fn head(n: u64) -> Head {
    [Head::No, Head::Weak, Head::Strong][n as usize % 3]
}

fn check(file: &mut HashFile, want: u64) {
    assert_eq!(file.blocks(), want);
    let pages = want.div_ceil(PER_PAGE as u64);
    for no in 0..pages {
        let page = file.page(no).unwrap().unwrap();
        let first = no * PER_PAGE as u64;
        for i in 0..PER_PAGE as u64 {
            let there = first + i < want;
            assert_eq!(page.get(i as usize), there.then(|| digest(first + i)));
        }
        if file.is_settled(no) {
            let heads: Vec<Head> = (first..want.min(first + PER_PAGE as u64))
                .map(head)
                .collect();
            assert_eq!(file.heads(no).unwrap(), heads);
        }
    }
    assert!(file.page(pages).unwrap().is_none());
    assert!(file.page(u64::MAX).unwrap().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_was_appended_is_read_back(batches in proptest::collection::vec(0u64..900, 0..8)) {
        let storage = FakeDirectory::default();
        let mut file = HashFile::create(&storage, 7, 3).unwrap();
        let mut n = 0;
        for b in batches {
            let digests: Vec<Digest> = (n..n + b).map(digest).collect();
            let heads: Vec<Head> = (n..n + b).map(head).collect();
            // A batch that is taken back leaves no trace.
            file.append(&digests, &heads);
            file.take_back(digests.len());
            file.append(&digests, &heads);
            n += b;
            check(&mut file, n);
            file.flush().unwrap();
            check(&mut file, n);
        }
        prop_assert!(HashFile::open(&storage, 7).unwrap().is_none(), "not complete yet");
        file.finish().unwrap();
        check(&mut file, n);
        let mut again = HashFile::open(&storage, 7).unwrap().expect("complete");
        let mut all = Vec::new();
        let counted = digests_of(&storage, 7, n, |index, short| {
            let full = digest(index).0;
            all.push(index);
            short[..] == full[..Digest::SHORT_LEN]
        });
        prop_assert_eq!(counted.unwrap(), Some(n));
        prop_assert!(all.into_iter().eq(0..n));
        prop_assert_eq!(again.header(), Header { image: 7, serial: 3, blocks: n, complete: true });
        check(&mut again, n);
    }

    #[test]
    fn any_header_is_read_or_refused(noise: [u8; 32], keep: bool) {
        let mut bytes = Header { image: 1, serial: 2, blocks: 3, complete: true }.to_bytes();
        if !keep {
            bytes[..32].copy_from_slice(&noise);
        }
        prop_assert_eq!(Header::from_bytes(&bytes).is_some(), keep);
    }
}

#[test]
fn a_damaged_byte_anywhere_is_noticed() {
    let storage = FakeDirectory::default();
    let mut file = HashFile::create(&storage, 1, 1).unwrap();
    file.append(
        &(0..800).map(digest).collect::<Vec<_>>(),
        &(0..800).map(head).collect::<Vec<_>>(),
    );
    file.finish().unwrap();
    let (hash, side) = names(1);
    for (name, step) in [(&hash, 257), (&side, 1)] {
        let len = storage.edit(name, |b| b.len()).unwrap();
        for at in (0..len).step_by(step) {
            storage.edit(name, |b| b[at] ^= 0x10);
            let damaged = match HashFile::open(&storage, 1).unwrap() {
                None => true,
                Some(mut f) => (0..3).any(|p| f.page(p).is_err() || f.heads(p).is_err()),
            };
            assert!(damaged, "{name} byte {at}");
            storage.edit(name, |b| b[at] ^= 0x10);
        }
        // Truncated.
        let whole = storage
            .edit(name, |b| std::mem::replace(b, b[..len - 1].to_vec()))
            .unwrap();
        assert!(HashFile::open(&storage, 1).unwrap().is_none());
        storage.edit(name, |b| *b = whole);
    }
    check(&mut HashFile::open(&storage, 1).unwrap().unwrap(), 800);
}

#[test]
fn all_digests_are_those_of_sound_pages_and_only_of_a_complete_file() {
    let storage = FakeDirectory::default();
    let seen = |limit: u64| {
        let mut seen = Vec::new();
        let all = digests_of(&storage, 7, limit, |index, _| {
            seen.push(index);
            true
        });
        (all.unwrap(), seen)
    };
    assert_eq!(seen(u64::MAX), (None, vec![]));
    let mut file = HashFile::create(&storage, 7, 3).unwrap();
    let n = 2 * PER_PAGE as u64 + 5;
    let all: Vec<u64> = (0..n).collect();
    let digests: Vec<Digest> = all.iter().copied().map(digest).collect();
    let heads: Vec<Head> = all.iter().copied().map(head).collect();
    file.append(&digests, &heads);
    file.flush().unwrap();
    assert_eq!(seen(u64::MAX), (None, vec![]));
    file.finish().unwrap();
    assert_eq!(seen(n), (Some(n), all.clone()));
    assert_eq!(seen(n - 1), (None, vec![]));
    let (hash, _) = names(7);
    storage.edit(&hash, |bytes| bytes[PAGE_BYTES + 17] ^= 1);
    let sound = |index: &u64| index / PER_PAGE as u64 != 1;
    assert_eq!(seen(n), (Some(n), all.into_iter().filter(sound).collect()));
    storage.edit(&hash, |bytes| bytes.truncate(PAGE_BYTES));
    assert_eq!(seen(n), (None, vec![]));
}

#[test]
fn a_header_that_claims_too_much_allocates_nothing() {
    let storage = FakeDirectory::default();
    HashFile::create(&storage, 9, 1).unwrap().finish().unwrap();
    let header = Header {
        image: 9,
        serial: 1,
        blocks: u64::MAX,
        complete: true,
    };
    storage.edit(&names(9).1, |b| b[..64].copy_from_slice(&header.to_bytes()));
    assert!(HashFile::open(&storage, 9).unwrap().is_none());
}

#[test]
fn file_names() {
    assert_eq!(any_file_of(&names(0xabc).1), Some(0xabc));
    assert_eq!(any_file_of(&names(0xabc).0), Some(0xabc));
    for other in [
        "seq.side",
        "img-.side",
        "img-12.side",
        "img-000000000000ABCD.side",
        "img-+00000000000000a.side",
    ] {
        assert_eq!(any_file_of(other), None, "{other}");
    }
}
