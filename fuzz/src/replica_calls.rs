//! What the source of a replica asks, each a kind, a length of two bytes and a request: handled or refused. And the record of
//! a replica, forged.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use drover_core::{Digest, ImageName};
use drover_migrate::replica::protocol::{BeginRound, CompleteRound, TellPoint};
use drover_net::{Refusal, decode, encode};
use drover_storage::FakeDirectory;
use drover_store::generations::{Contents, Generations, Summary};
use drover_store::machine::{Other, Token};
use drover_store::replica::{MAX_RECORD_BYTES, Offer, Replica, in_other_rounds, replica_of};

/// Keeps a map of generations small.
const SIZE: u64 = 300 << 20;

/// Keeps many records small.
const MAX_KEPT: usize = 4;

pub fn run(data: &[u8]) {
    match data {
        [0, rest @ ..] => drop(decode::<Replica>(rest).map(|forged| use_it(&forged))),
        [_, rest @ ..] => calls(rest),
        [] => {}
    }
}

/// Whatever it says, it is no more than refused.
fn use_it(forged: &Replica) {
    let name = ImageName::new("web").expect("a name");
    let offer = Offer {
        seed: forged.seed,
        is_machine: forged.is_machine,
        devices: vec![String::new(); 2],
        every_seconds: None,
    };
    let begun = forged.begin(&name, &offer, Token([1; 16]), 0);
    let over = begun.as_ref().unwrap_or(forged).fail_over(1);
    assert!(over.under_way.is_none());
    assert!(over.begin(&name, &offer, Token([2; 16]), 0).is_err());
}

fn calls(mut rest: &[u8]) {
    let mut kept = BTreeMap::new();
    let mut rounds = 0;
    while let Some((&[kind, low, high], more)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([low, high]));
        let (request, more) = more.split_at(length.min(more.len()));
        rest = more;
        match kind % 4 {
            0 => begin(&mut kept, request, &mut rounds),
            1 => complete(&mut kept, request),
            2 => tell(&kept, request),
            _ => {
                if let Some(known) = kept.values_mut().next() {
                    *known = known.fail_over(rounds);
                }
            }
        }
        kept.iter().for_each(|(name, known)| check(name, known));
    }
}

fn begin(kept: &mut BTreeMap<ImageName, Replica>, request: &[u8], rounds: &mut u64) {
    let Ok(ask) = decode::<BeginRound>(request) else {
        return;
    };
    let from = Other {
        key: [1; 32],
        name: "paris".into(),
    };
    let new = || Replica::new(ask.seed, from, ask.is_machine);
    let known = match kept.get(&ask.name) {
        Some(known) => known.clone(),
        None if kept.len() == MAX_KEPT => return,
        None => new(),
    };
    *rounds += 1;
    let mut token = [0; 16];
    token[..8].copy_from_slice(&rounds.to_le_bytes());
    let offer = Offer {
        seed: ask.seed,
        is_machine: ask.is_machine,
        devices: ask.disks,
        every_seconds: ask.every_seconds,
    };
    if let Ok(begun) = known.begin(&ask.name, &offer, Token(token), *rounds) {
        assert!(known.failed_over_ms.is_none());
        assert_eq!(begun.point, known.point);
        kept.insert(ask.name, begun);
    }
}

fn complete(kept: &mut BTreeMap<ImageName, Replica>, request: &[u8]) {
    let Ok(ask) = decode::<CompleteRound>(request) else {
        return;
    };
    let Some(known) = kept.get_mut(&ask.name) else {
        return;
    };
    let delivered = |image: &ImageName, _: &Digest| -> Result<u64, Refusal> {
        assert!(known.receives(image) && !known.has(image));
        Ok(4096)
    };
    if let Ok(Some(complete)) = known.complete(ask.round, &ask.digests, ask.age_ms, 1, delivered) {
        assert!(known.failed_over_ms.is_none());
        *known = complete;
    }
}

fn tell(kept: &BTreeMap<ImageName, Replica>, request: &[u8]) {
    let Ok(told) = decode::<TellPoint>(request) else {
        return;
    };
    let known = kept.get(&told.name);
    let point = known.and_then(|known| known.point.as_ref());
    let Some(image) = point.and_then(|point| point.images.get(told.disk as usize)) else {
        return;
    };
    if let Ok(of) = Summary::decode(&told.generations)
        && of.size <= SIZE
    {
        let directory = Arc::new(FakeDirectory::default());
        let _ = Generations::succeed(directory, image.size, &of, Contents::new(&[], 0, 0));
    }
}

/// No image is in two roles, or of another replica; and it fits into its file.
fn check(name: &ImageName, known: &Replica) {
    let bytes = encode(known);
    assert!(bytes.len() <= MAX_RECORD_BYTES);
    assert_eq!(decode::<Replica>(&bytes).as_ref().ok(), Some(known));
    let point = known.point.iter().flat_map(|point| &point.images);
    let under_way = known.under_way.iter().flat_map(|round| &round.images);
    let all: Vec<_> = point
        .map(|image| &image.name)
        .chain(under_way)
        .chain(&known.left)
        .collect();
    let different: HashSet<_> = all.iter().collect();
    assert_eq!(different.len(), all.len());
    for image in all {
        assert_eq!(replica_of(image).as_ref(), Some(name));
        let other = in_other_rounds(image).expect("a name");
        assert_eq!(replica_of(&other).as_ref(), Some(name));
    }
}
