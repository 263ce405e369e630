//! Any bytes in place of a part of any file of the matcher's index: it opens, plans stay valid, and it
//! opens again. Checksums always match in a fuzzing build, so that the fuzzer reaches the code behind them.

use drover_core::{Digest, Head};
use drover_index::testing::Destination;
use drover_index::{ImageId, Matcher, MatcherConfig, digests_of};
use drover_storage::{Directory, FakeDirectory};

fn config() -> MatcherConfig {
    MatcherConfig {
        c0_bytes: 3 << 10,
        c1_bytes: 1 << 10,
        c2_bytes: 1 << 10,
        sequence_limit: 8,
        cached_pages: 8,
        ..MatcherConfig::default()
    }
}

/// Sends an image of numbered blocks.
fn send(m: &mut Matcher, d: &mut Destination, id: u64, blocks: std::ops::Range<u64>) {
    let digests: Vec<Digest> = blocks
        .map(|n| {
            let mut d = [0; 32];
            for (i, w) in d.chunks_exact_mut(8).enumerate() {
                let z = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (i as u64) << 7);
                w.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
            }
            Digest(d)
        })
        .collect();
    let heads: Vec<Head> = (0..digests.len())
        .map(|i| [Head::Strong, Head::No, Head::Weak, Head::No][i / 3 % 4])
        .collect();
    let Ok(mut cursor) = m.begin(ImageId(id)) else {
        return;
    };
    for (ds, hs) in digests.chunks(100).zip(heads.chunks(100)) {
        let plan = m.batch(&mut cursor, ds, hs).expect("storage does not fail");
        d.apply(ImageId(id), ds, &plan)
            .expect("a plan keeps its rules");
    }
    m.finish(cursor).expect("storage does not fail");
}

pub fn run(data: &[u8]) {
    let [file, low, high, bytes @ ..] = data else {
        return;
    };
    let storage = FakeDirectory::default();
    let mut d = Destination::new();
    let (mut m, _) = Matcher::open(storage.clone(), config()).expect("an empty index opens");
    send(&mut m, &mut d, 1, 0..200);
    send(&mut m, &mut d, 2, 50..260);
    m.persist().expect("storage does not fail");
    drop(m);
    let names = storage.list().expect("storage does not fail");
    let name = &names[usize::from(*file & 0x7f) % names.len()];
    storage.edit(name, |b| {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (b.len() + 1);
        let n = bytes.len().min(b.len() - at);
        b[at..at + n].copy_from_slice(&bytes[..n]);
        if file & 0x80 != 0 {
            b.truncate(at + n);
        }
    });
    for id in 1..4 {
        let mut last = None;
        let all = digests_of(&storage, id, 1000, |index, _| {
            assert!(last.is_none_or(|last| last < index));
            last = Some(index);
            true
        });
        let all = all.expect("storage does not fail").unwrap_or(0);
        assert!(all <= 1000 && last.is_none_or(|last| last < all));
    }
    let (mut m, _) = Matcher::open(storage.clone(), config()).expect("opens whatever it is");
    send(&mut m, &mut d, 3, 0..300);
    for image in m.images() {
        m.reindex(image.image)
            .expect("complete images can be indexed again");
    }
    m.persist().expect("storage does not fail");
    drop(m);
    Matcher::open(storage, config()).expect("opens again");
}
