//! Entry points for fuzzers: hostile bodies in envelopes whose checksums are right. Only built for fuzzing.

use drover_core::{Digest, put_varint};

use crate::container::{GROUP_BLOCKS, Head, reseal_for_fuzzing};
use crate::digester::Digester;
use crate::peer::{Ask, MAX_PUT_BYTES, MAX_READ_BYTES, Serving, Task, asking_for_fuzzing};
use crate::recipe::{PAGE_BLOCKS, Page, RecipeHead, head_for_fuzzing};
use crate::record::{
    HolderRecord, HookRecord, KeyRecord, SnapshotRecord, VaultRecord, seal_all_for_fuzzing,
};
use crate::sealed::Keys;
use crate::uses::{Uses, uses_for_fuzzing};

/// A container: its head, and every group that it says it has.
pub fn container(bytes: &[u8]) {
    let _ = Head::parse(bytes);
    let bytes = reseal_for_fuzzing(bytes);
    if let Ok(head) = Head::parse(&bytes) {
        assert_eq!(head.present.count() as usize, head.digests.len());
        assert_eq!(head.groups(), head.digests.len().div_ceil(GROUP_BLOCKS));
        for local in head.present.iter() {
            assert!(head.position(local).is_some());
        }
        let _ = head.verify(&bytes, &Digester::default());
    }
}

/// A page of a recipe; what is accepted covers its blocks and round-trips.
pub fn page(bytes: &[u8]) {
    let [a, b, containers, rest @ ..] = bytes else {
        return;
    };
    let blocks = usize::from(u16::from_le_bytes([*a, *b])) % (PAGE_BLOCKS + 1);
    let mut forged = Vec::new();
    let segments = blocks.div_ceil(512);
    put_varint(&mut forged, segments as u64);
    forged.resize(forged.len() + segments * Digest::LEN, 7);
    put_varint(&mut forged, rest.len() as u64);
    forged.extend(zstd::bulk::compress(rest, 1).unwrap_or_default());
    for bytes in [rest, &forged] {
        if let Ok(page) = Page::decode(bytes, blocks, usize::from(*containers)) {
            let total: usize = page.runs.iter().map(|r| r.blocks as usize).sum();
            assert_eq!(total, blocks);
            assert_eq!(
                Page::decode(&page.encode(), blocks, usize::from(*containers)),
                Ok(page)
            );
        }
    }
}

/// The head of a recipe.
pub fn recipe_head(bytes: &[u8]) {
    let _ = RecipeHead::decode(bytes);
    if let Ok((head, _)) = RecipeHead::decode(&head_for_fuzzing(bytes)) {
        assert_eq!(RecipeHead::decode(&head.encode()).map(|d| d.0), Ok(head));
    }
}

/// What a snapshot uses.
pub fn uses(bytes: &[u8]) {
    let _ = Uses::decode(bytes);
    if let Ok(uses) = Uses::decode(&uses_for_fuzzing(bytes)) {
        assert_eq!(Uses::decode(&uses.encode()), Ok(uses));
    }
}

/// What an encrypted vault's store may say: pieces and names, which are refused.
pub fn sealed(bytes: &[u8]) {
    let keys = Keys::derive(&[1; 32]);
    let key = String::from_utf8_lossy(bytes);
    if let Some(opened) = keys.open_key(&key) {
        assert_eq!(keys.seal_key(&opened), key);
    }
    for all in [false, true] {
        assert_eq!(keys.open("containers/x", 0, bytes, all), None);
    }
    let sealed = keys.seal("x", bytes);
    assert_eq!(keys.open("x", 0, &sealed, true).as_deref(), Some(bytes));
}

/// What a peer sends about a vault: frames for the end that serves, and for the one that asks. Each is a kind, a length and so
/// many bytes.
pub fn peer(bytes: &[u8]) {
    let mut frames = Vec::new();
    let mut rest = bytes;
    while let [kind, len, tail @ ..] = rest {
        let (payload, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        frames.push((*kind, bytes::Bytes::copy_from_slice(payload)));
        rest = tail;
    }
    let mut serving = Serving::default();
    for (kind, payload) in &frames {
        match serving.frame(*kind, payload) {
            Err(_) => break,
            Ok(None) => assert!(serving.missing() <= MAX_PUT_BYTES as usize),
            Ok(Some(Task::Create(_, bytes))) => assert!(bytes.len() <= MAX_PUT_BYTES as usize),
            Ok(Some(Task::Read(_, range))) => {
                assert!(range.end - range.start <= u64::from(MAX_READ_BYTES));
            }
            Ok(Some(Task::List(key) | Task::Remove(key))) => {
                assert!(
                    key.split('/')
                        .all(|part| !part.is_empty() && !part.starts_with('.'))
                );
            }
        }
    }
    let key = "uses".to_owned();
    for ask in [
        Ask::List {
            prefix: key.clone(),
        },
        Ask::Read {
            key: key.clone(),
            from: 0,
            len: 5,
        },
        Ask::Remove { key },
    ] {
        asking_for_fuzzing(&ask, &frames);
    }
}

/// The small records.
pub fn records(bytes: &[u8]) {
    for sealed in seal_all_for_fuzzing(bytes) {
        let _ = VaultRecord::decode(&sealed);
        let _ = HookRecord::decode(&sealed);
        let _ = (HolderRecord::decode(&sealed), KeyRecord::decode(&sealed));
        if let Ok(record) = SnapshotRecord::decode(&sealed) {
            assert_eq!(SnapshotRecord::decode(&record.encode()), Ok(record));
        }
    }
}
