//! What a peer says of a disk's generations, and a map file that is damaged or forged: opened, written and compared.

use std::sync::Arc;

use drover_storage::FakeDirectory;
use drover_store::generations::{
    Contents, FILE_NAME, Generation, Generations, MAX_SUMMARY_BYTES, Summary,
};

/// Keeps a map small.
const SIZE: u64 = 300 << 20;

pub fn run(data: &[u8]) {
    match data {
        [0, rest @ ..] => summary(rest),
        [_, rest @ ..] => map(rest),
        [] => {}
    }
}

fn summary(bytes: &[u8]) {
    let Ok(summary) = Summary::decode(bytes) else {
        return;
    };
    let again = summary.encode();
    assert!(again.len() <= MAX_SUMMARY_BYTES);
    assert_eq!(Summary::decode(&again), Ok(summary.clone()));
    let _ = summary.compare(&summary);
    let newer = summary.newer_than(Generation(summary.generation().0 / 2));
    assert!(newer.windows(2).all(|two| two[0].end < two[1].start));
    assert!(newer.last().is_none_or(|last| last.end <= summary.size));
    if summary.size <= SIZE {
        let directory = Arc::new(FakeDirectory::default());
        let now = Contents::new(&[], 0, 0);
        if let Ok(next) = Generations::succeed(directory, summary.size, &summary, now) {
            let next = next.summary().expect("a new map");
            let _ = (next.compare(&summary), summary.compare(&next));
        }
    }
}

fn map(bytes: &[u8]) {
    let directory = Arc::new(FakeDirectory::default());
    let now = Contents::new(&[], 0, 0);
    let open = || Generations::open(directory.clone(), SIZE, now);
    directory.put(FILE_NAME, bytes);
    let Ok(map) = open() else {
        return;
    };
    if map.is_frozen() {
        map.thaw().expect("a thaw");
    }
    map.begin(now).expect("a beginning");
    let generation = map.about().generation;
    drop(map.before_write(70 << 20, 1).expect("a write"));
    assert_eq!(map.track().expect("a generation"), generation.next());
    map.close(now).expect("a close");
    let newer = map
        .newer_than(Generation(generation.0 - 1))
        .expect("it is believed");
    assert!(newer.iter().any(|range| range.contains(&(70 << 20))));
    drop(map);
    let map = open().expect("a map that was opened once");
    assert_eq!(map.newer_than(Generation(generation.0 - 1)), Some(newer));
}
