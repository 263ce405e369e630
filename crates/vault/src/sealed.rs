//! The objects of an encrypted vault (`docs/format/vault-encryption.md`): every content sealed in pieces, so that parts
//! can be read, and the names of machines in keys.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use bytes::Bytes;
use data_encoding::BASE64URL_NOPAD;

use crate::error::StoreError;
use crate::objects::{Listed, Objects};

/// Bytes of a piece before it is sealed.
pub const PIECE: usize = 64 << 10;
/// What sealing adds to a piece: a salt before it, a tag after it.
pub const OVERHEAD: usize = SALT + TAG;
const SALT: usize = 24;
const TAG: usize = 16;
const SEALED: u64 = (PIECE + OVERHEAD) as u64;
/// Bytes of the tag of a name.
const NAME_TAG: usize = 16;

/// Kinds of objects whose keys have a machine as second component.
const OF_MACHINES: [&str; 8] = [
    "containers",
    "dropped",
    "forgotten",
    "held",
    "owners",
    "recipes",
    "snapshots",
    "uses",
];

/// The keys of a vault, from its master key.
#[derive(Clone)]
pub struct Keys {
    content: [u8; 32],
    name_tags: [u8; 32],
    names: [u8; 32],
    digests: [u8; 32],
}

impl Keys {
    /// All keys, by the master key.
    #[must_use]
    pub fn derive(master: &[u8; 32]) -> Keys {
        let of = |what: &str| blake3::derive_key(&format!("drover 2026-11 vault {what}"), master);
        Keys {
            content: of("content"),
            name_tags: of("tags of names"),
            names: of("names"),
            digests: of("digests"),
        }
    }

    /// The key of the digests of blocks.
    #[must_use]
    pub fn digests(&self) -> [u8; 32] {
        self.digests
    }

    /// The key of one piece, which seals nothing else: its salt is random and of 192 bits. It is of no other place
    /// (`bound`) either, so that no store can offer one ciphertext as two pieces.
    fn piece(&self, salt: &[u8], bound: &[u8]) -> LessSafeKey {
        let mut hasher = blake3::Hasher::new_keyed(&self.content);
        hasher.update(salt);
        hasher.update(bound);
        let key = hasher.finalize();
        let key = UnboundKey::new(&AES_256_GCM, key.as_bytes()).expect("a key of 32 bytes");
        LessSafeKey::new(key)
    }

    /// Seals a content, to be stored under `key`.
    ///
    /// # Panics
    /// If the system has no random numbers.
    #[must_use]
    pub fn seal(&self, key: &str, content: &[u8]) -> Vec<u8> {
        let pieces = content.len().div_ceil(PIECE).max(1);
        let mut out = Vec::with_capacity(content.len() + pieces * OVERHEAD);
        for number in 0..pieces {
            let piece = &content[number * PIECE..content.len().min((number + 1) * PIECE)];
            let mut salt = [0; SALT];
            aws_lc_rs::rand::fill(&mut salt).expect("random numbers");
            out.extend_from_slice(&salt);
            let at = out.len();
            out.extend_from_slice(piece);
            let bound = bound(key, number as u64, number + 1 == pieces);
            let tag = self
                .piece(&salt, &bound)
                .seal_in_place_separate_tag(zero(), Aad::from(bound), &mut out[at..])
                .expect("a piece of 64 KiB can be sealed");
            out.extend_from_slice(tag.as_ref());
        }
        out
    }

    /// Opens pieces from number `first` on. With `is_all`, they must go to the object's end. None if they are not what
    /// was stored under `key`.
    #[must_use]
    pub fn open(&self, key: &str, first: u64, sealed: &[u8], is_all: bool) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(sealed.len());
        let mut pieces = sealed.chunks(SEALED as usize).peekable();
        let mut number = first;
        while let Some(piece) = pieces.next() {
            let (salt, body) = piece.split_at_checked(SALT)?;
            let is_last = pieces.peek().is_none();
            // A short piece is the object's last one; the last of those that were asked for may be.
            let ends: &[bool] = match (is_last, is_all || piece.len() < SEALED as usize) {
                (false, _) => &[false],
                (true, true) => &[true],
                (true, false) => &[false, true],
            };
            let at = out.len();
            let opened = ends.iter().any(|&end| {
                out.truncate(at);
                out.extend_from_slice(body);
                let bound = bound(key, number, end);
                let opened = self
                    .piece(salt, &bound)
                    .open_in_place(zero(), Aad::from(bound), &mut out[at..])
                    .map(|plain| plain.len());
                match opened {
                    Ok(len) => {
                        out.truncate(at + len);
                        true
                    }
                    Err(_) => false,
                }
            });
            if !opened {
                return None;
            }
            number += 1;
        }
        (!sealed.is_empty()).then_some(out)
    }

    /// A name as a component of a key: always the same, so that it can be listed by.
    fn seal_name(&self, name: &str) -> String {
        let tag = blake3::keyed_hash(&self.name_tags, name.as_bytes());
        let mut bytes = tag.as_bytes()[..NAME_TAG].to_vec();
        let stream = self.stream(&bytes, name.len());
        bytes.extend(name.bytes().zip(stream).map(|(a, b)| a ^ b));
        BASE64URL_NOPAD.encode(&bytes)
    }

    /// The name that a component stands for; none if it is none of this vault.
    fn open_name(&self, component: &str) -> Option<String> {
        let bytes = BASE64URL_NOPAD.decode(component.as_bytes()).ok()?;
        let (tag, sealed) = bytes.split_at_checked(NAME_TAG)?;
        let stream = self.stream(tag, sealed.len());
        let name = sealed.iter().zip(stream).map(|(a, b)| a ^ b).collect();
        let name = String::from_utf8(name).ok()?;
        (self.seal_name(&name) == component).then_some(name)
    }

    fn stream(&self, tag: &[u8], len: usize) -> Vec<u8> {
        let mut stream = vec![0; len];
        let mut hasher = blake3::Hasher::new_keyed(&self.names);
        hasher.update(tag).finalize_xof().fill(&mut stream);
        stream
    }

    /// A key as the store has it.
    #[must_use]
    pub fn seal_key(&self, key: &str) -> String {
        map_machine(key, |name| Some(self.seal_name(name))).unwrap_or_else(|| key.to_owned())
    }

    /// The key that the store has as `key`; none if it is none of this vault.
    #[must_use]
    pub fn open_key(&self, key: &str) -> Option<String> {
        map_machine(key, |name| self.open_name(name))
    }
}

/// Replaces the machine of a key, if its kind has one; none if `map` does.
fn map_machine(key: &str, map: impl FnOnce(&str) -> Option<String>) -> Option<String> {
    let mut parts: Vec<&str> = key.split('/').collect();
    if parts.len() < 2 || !OF_MACHINES.contains(&parts[0]) {
        return Some(key.to_owned());
    }
    let mapped = map(parts[1])?;
    parts[1] = &mapped;
    Some(parts.join("/"))
}

/// What a piece is bound to: its object, its place in it, whether it is the last.
fn bound(key: &str, number: u64, is_last: bool) -> Vec<u8> {
    let mut bound = key.as_bytes().to_vec();
    bound.push(0);
    bound.extend_from_slice(&number.to_le_bytes());
    bound.push(u8::from(is_last));
    bound
}

/// No nonce is needed: no two pieces have the same key.
fn zero() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

/// Objects that are sealed on the way to another store.
pub(crate) struct SealedObjects {
    inner: Arc<dyn Objects>,
    keys: Keys,
}

impl SealedObjects {
    pub(crate) fn new(inner: Arc<dyn Objects>, keys: Keys) -> Self {
        SealedObjects { inner, keys }
    }

    fn opened(
        &self,
        key: &str,
        first: u64,
        sealed: &[u8],
        all: bool,
    ) -> Result<Vec<u8>, StoreError> {
        let opened = self.keys.open(key, first, sealed, all);
        opened.ok_or_else(|| StoreError {
            doing: "decrypt",
            key: key.to_owned(),
            vault: self.describe(),
            why: "it is damaged, or was not written with the key of the vault".into(),
            can_retry: false,
            is_damage: true,
        })
    }
}

impl Objects for SealedObjects {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        let sealed = self.keys.seal(key, &bytes);
        self.inner.create(&self.keys.seal_key(key), sealed.into())
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        match self.inner.get(&self.keys.seal_key(key))? {
            None => Ok(None),
            Some(sealed) => Ok(Some(self.opened(key, 0, &sealed, true)?.into())),
        }
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        let first = range.start / PIECE as u64;
        let end = range.end.div_ceil(PIECE as u64).max(first + 1);
        let pieces = first.saturating_mul(SEALED)..end.saturating_mul(SEALED);
        let Some(sealed) = self.inner.get_range(&self.keys.seal_key(key), pieces)? else {
            return Ok(None);
        };
        // Beyond the end, which is not proved: what lacks is missed by whoever asked.
        if sealed.is_empty() && first > 0 {
            return Ok(Some(Bytes::new()));
        }
        let opened = Bytes::from(self.opened(key, first, &sealed, false)?);
        let skipped = first * PIECE as u64;
        let at =
            |n: u64| usize::try_from(n - skipped).map_or(opened.len(), |n| n.min(opened.len()));
        Ok(Some(
            opened.slice(at(range.start)..at(range.end.max(range.start))),
        ))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let listed = self.inner.list(&self.keys.seal_key(prefix))?;
        let open = |object: Listed| {
            Some(Listed {
                key: self.keys.open_key(&object.key)?,
                ..object
            })
        };
        Ok(listed.into_iter().filter_map(open).collect())
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        self.inner.remove(&self.keys.seal_key(key))
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn sweep(&self, older: Duration) -> Result<u64, StoreError> {
        self.inner.sweep(older)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::MemoryObjects;
    use proptest::prelude::*;

    fn setting() -> (MemoryObjects, SealedObjects) {
        let memory = MemoryObjects::default();
        let sealed = SealedObjects::new(Arc::new(memory.clone()), Keys::derive(&[7; 32]));
        (memory, sealed)
    }

    #[test]
    fn nothing_of_a_name_or_a_content_is_in_the_store() {
        let (memory, sealed) = setting();
        let key = "recipes/web-server/20261120T100000Z-00000000ab/head";
        let content = vec![b'x'; 200_000];
        assert!(sealed.create(key, content.clone().into()).unwrap());
        assert!(!sealed.create(key, content.clone().into()).unwrap());
        assert_eq!(sealed.list("recipes/web-server").unwrap()[0].key, key);
        assert_eq!(sealed.list("recipes/web").unwrap(), []);
        let stored = memory.keys();
        assert!(stored[0].starts_with("recipes/") && !stored[0].contains("web"));
        let bytes = memory.get(&stored[0]).unwrap().unwrap();
        assert_eq!(bytes.len(), content.len() + 4 * OVERHEAD);
        assert!(!bytes.windows(8).any(|w| w == b"xxxxxxxx"));
        // Another vault's key opens nothing.
        let other = SealedObjects::new(Arc::new(memory.clone()), Keys::derive(&[8; 32]));
        assert_eq!(other.list("recipes").unwrap(), []);
        assert_eq!(Keys::derive(&[8; 32]).open(key, 0, &bytes, true), None);
        sealed.remove(key).unwrap();
        assert_eq!(memory.keys(), Vec::<String>::new());
    }

    #[test]
    fn an_object_that_was_cut_off_or_exchanged_is_damaged() {
        let (memory, sealed) = setting();
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE] {
            let key = format!("claims/{len}");
            sealed.create(&key, vec![9; len].into()).unwrap();
            assert_eq!(sealed.get(&key).unwrap().unwrap().len(), len);
            let whole = memory.get(&key).unwrap().unwrap();
            let keys = Keys::derive(&[7; 32]);
            assert_eq!(keys.open("claims/x", 0, &whole, true), None);
            for cut in [0, 1, SEALED as usize, whole.len() - 1] {
                if cut < whole.len() {
                    assert_eq!(
                        keys.open(&key, 0, &whole[..cut], true),
                        None,
                        "{len}, {cut}"
                    );
                }
            }
            assert_eq!(keys.open(&key, 1, &whole, true), None);
            // The last two pieces exchanged.
            if len == 3 * PIECE {
                let mut mixed = whole.to_vec();
                mixed.rotate_left(SEALED as usize);
                assert_eq!(keys.open(&key, 0, &mixed, true), None);
            }
        }
        memory.damage("claims/1", |bytes| bytes[3] ^= 1);
        let error = sealed.get("claims/1").unwrap_err();
        assert!(error.is_damage && !error.can_retry, "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// As a plain store, for any content and range.
        #[test]
        fn like_a_plain_store(
            len in prop_oneof![0..200usize, (PIECE - 2)..(PIECE + 2), 0..4 * PIECE],
            ranges in proptest::collection::vec((0..5 * PIECE as u64, 0..3 * PIECE as u64), 1..8),
            name in "[a-zA-Z0-9_.=-]{1,100}",
        ) {
            let (memory, sealed) = setting();
            let plain = MemoryObjects::default();
            let mut content = vec![0; len];
            fastrand::Rng::with_seed(len as u64).fill(&mut content);
            let key = format!("containers/{name}/1.0");
            sealed.create(&key, content.clone().into()).unwrap();
            plain.create(&key, content.into()).unwrap();
            prop_assert_eq!(sealed.get(&key).unwrap(), plain.get(&key).unwrap());
            for (from, len) in ranges {
                prop_assert_eq!(
                    sealed.get_range(&key, from..from + len).unwrap(),
                    plain.get_range(&key, from..from + len).unwrap()
                );
            }
            prop_assert_eq!(&sealed.list("containers").unwrap()[0].key, &key);
            prop_assert_eq!(memory.keys().len(), 1);
        }

        #[test]
        fn a_flipped_bit_is_found(len in 0..3 * PIECE, at in any::<prop::sample::Index>(), bit in 0..8) {
            let keys = Keys::derive(&[7; 32]);
            let content = vec![5; len];
            let mut sealed = keys.seal("hooks/1", &content);
            prop_assert_eq!(keys.open("hooks/1", 0, &sealed, true), Some(content));
            let at = at.index(sealed.len());
            sealed[at] ^= 1u8 << bit;
            prop_assert_eq!(keys.open("hooks/1", 0, &sealed, true), None);
            prop_assert_eq!(keys.open("hooks/1", 0, &sealed, false), None);
        }

        #[test]
        fn hostile_names(key in "(containers|uses)/\\PC{0,40}", sealed in proptest::collection::vec(any::<u8>(), 0..200)) {
            let keys = Keys::derive(&[7; 32]);
            prop_assert_eq!(keys.open_key(&key), None);
            prop_assert_eq!(keys.open(&key, 0, &sealed, false), None);
        }
    }
}
