//! The bytes of a disk in a store (`docs/format/chunk-store.md`): its header, the pages of its table, its objects, and
//! their keys. What comes from a store is not trusted.

use std::ops::Range;

use bytes::Bytes;

/// The key of the header.
pub const HEADER: &str = "disk";
/// The key of what conditional writes are tried on.
pub const PROBE: &str = "probe";
/// What keys of objects begin with.
pub const OBJECTS: &str = "o/";
/// What keys of pages begin with.
pub const PAGES: &str = "t/";

const MAGIC: [u8; 8] = *b"DRVRSTO\0";
const VERSION: u32 = 1;
/// Up to the text of the holder.
const FIXED: usize = 8 + 4 + 4 + 4 + 4 + 8 + 16 + 8 + 8 + 8 + 16 + 16 + 8 + 4;

/// Objects of a page.
pub const PER_PAGE: u64 = 1024;
/// Pages of a disk: their versions are in the header.
pub const MAX_PAGES: u64 = 1 << 14;
/// Objects of a disk.
pub const MAX_OBJECTS: u64 = PER_PAGE * MAX_PAGES;
/// Bytes of the text of a holder.
pub const MAX_HOLDER: usize = 256;
/// Bytes of a header.
pub const MAX_HEADER: usize = FIXED + MAX_HOLDER + VERSION_LENGTH * MAX_PAGES as usize + 4;
/// The smallest and the largest chunk.
pub const CHUNKS: Range<u32> = 4096..(4 << 20) + 1;
/// The largest object: chunks of it, without their digests.
pub const MAX_OBJECT: u32 = 4 << 20;

/// Bytes of a digest.
const DIGEST: usize = 16;

/// Bits of a version that count what a session wrote.
const COUNT_BITS: u32 = 40;
/// Bits of a version that are random.
const RANDOM_BITS: u32 = 64;
/// Bytes of a version.
const VERSION_LENGTH: usize = 16;
/// Sessions of a disk: how often it can be opened for writing.
pub const MAX_SESSIONS: u32 = 1 << 24;

/// The version of an object or page, which no two writes share: 0 is none, else the session, a count in it, and a random
/// number, by which two processes that take themselves for the same session, as clones of a machine do, differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u128);

impl Version {
    /// None: all zeros.
    pub const NONE: Version = Version(0);

    /// The `count`-th one of a session; none if there are no more.
    pub fn new(session: u32, count: u64, random: u64) -> Option<Version> {
        let fits = session < MAX_SESSIONS && count < 1 << COUNT_BITS;
        let number = u128::from(session) << COUNT_BITS | u128::from(count);
        fits.then(|| Version(number << RANDOM_BITS | u128::from(random)))
    }

    /// The session that wrote it.
    pub fn session(self) -> u32 {
        (self.0 >> (COUNT_BITS + RANDOM_BITS)) as u32
    }

    /// Whether it names an object.
    pub fn is_some(self) -> bool {
        self != Version::NONE
    }
}

/// Who may write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// By which it knows its own lease again.
    pub token: [u8; 16],
    /// Seconds since 1970.
    pub since_unix: u64,
    /// For people.
    pub text: String,
}

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Bytes of a chunk, the unit of reading.
    pub chunk: u32,
    /// Bytes of the disk in an object, the unit of writing: a multiple of the chunk.
    pub object: u32,
    /// A random number of this disk.
    pub id: [u8; 16],
    /// How often it was opened for writing.
    pub session: u32,
    /// Whether the session ended, and left nothing behind.
    pub is_clean: bool,
    /// How often this header was written.
    pub commits: u64,
    /// The last epoch of a managed device.
    pub epoch: u64,
    /// A random number of this header: no two writers write the same one.
    pub nonce: [u8; 16],
    /// The lease.
    pub holder: Option<Holder>,
    /// The versions of the pages, none for those without objects.
    pub pages: Vec<Version>,
}

/// Why bytes are no header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderProblem {
    /// They are something else.
    Foreign,
    /// A newer version of drover wrote them.
    Newer,
    /// They are damaged.
    Damaged(&'static str),
}

/// Whether there can be such a disk.
pub fn is_possible(size: u64, chunk: u32, object: u32) -> bool {
    chunk.is_power_of_two()
        && CHUNKS.contains(&chunk)
        && object.is_power_of_two()
        && (chunk..=MAX_OBJECT).contains(&object)
        && size.div_ceil(u64::from(object)) <= MAX_OBJECTS
}

fn crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

impl Header {
    /// Objects of the disk.
    pub fn objects(&self) -> u64 {
        self.size.div_ceil(u64::from(self.object))
    }

    /// Bytes of the disk in an object: less than usual in the last one.
    pub fn length(&self, index: u64) -> u32 {
        let start = index.saturating_mul(u64::from(self.object));
        let left = self.size.saturating_sub(start);
        u32::try_from(left).unwrap_or(u32::MAX).min(self.object)
    }

    /// Its bytes.
    pub fn encode(&self) -> Bytes {
        let mut bytes =
            Vec::with_capacity(FIXED + MAX_HOLDER + VERSION_LENGTH * self.pages.len() + 4);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.chunk.to_le_bytes());
        bytes.extend_from_slice(&self.object.to_le_bytes());
        let flags = u32::from(self.is_clean) | u32::from(self.holder.is_some()) << 1;
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&self.id);
        bytes.extend_from_slice(&u64::from(self.session).to_le_bytes());
        bytes.extend_from_slice(&self.commits.to_le_bytes());
        bytes.extend_from_slice(&self.epoch.to_le_bytes());
        bytes.extend_from_slice(&self.nonce);
        let (token, since, text) = match &self.holder {
            Some(holder) => (holder.token, holder.since_unix, holder.text.as_str()),
            None => ([0; 16], 0, ""),
        };
        let text = cut(text);
        bytes.extend_from_slice(&token);
        bytes.extend_from_slice(&since.to_le_bytes());
        bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
        for page in &self.pages {
            bytes.extend_from_slice(&page.0.to_le_bytes());
        }
        bytes.extend_from_slice(&crc(&bytes).to_le_bytes());
        bytes.into()
    }

    /// From its bytes.
    ///
    /// # Errors
    /// [`HeaderProblem`].
    pub fn decode(bytes: &[u8]) -> Result<Header, HeaderProblem> {
        use HeaderProblem::{Damaged, Foreign, Newer};
        if bytes.len() < 12 || bytes[..8] != MAGIC {
            return Err(Foreign);
        }
        if number::<4>(bytes, 8) != u64::from(VERSION) {
            return Err(Newer);
        }
        if bytes.len() < FIXED + 4 || bytes.len() > MAX_HEADER {
            return Err(Damaged("it has another length"));
        }
        let (content, sum) = bytes.split_at(bytes.len() - 4);
        // A fuzzer need not guess it.
        if number::<4>(sum, 0) != u64::from(crc(content)) && !cfg!(fuzzing) {
            return Err(Damaged("its checksum is wrong"));
        }
        let (chunk, object) = (
            number::<4>(content, 12) as u32,
            number::<4>(content, 16) as u32,
        );
        let (flags, size) = (number::<4>(content, 20), number::<8>(content, 24));
        if !is_possible(size, chunk, object) || flags > 3 {
            return Err(Damaged("no disk has this size and chunk"));
        }
        let session = u32::try_from(number::<8>(content, 48)).ok();
        let session = session.filter(|session| *session < MAX_SESSIONS);
        let text = number::<4>(content, 112) as usize;
        let pages = content.get(FIXED + text.min(MAX_HOLDER + 1)..);
        let text = content
            .get(FIXED..FIXED + text)
            .filter(|t| t.len() <= MAX_HOLDER);
        let (Some(session), Some(pages), Some(text)) = (session, pages, text) else {
            return Err(Damaged("its lease cannot be read"));
        };
        let text = std::str::from_utf8(text).map_err(|_| Damaged("its lease cannot be read"))?;
        let header = Header {
            size,
            chunk,
            object,
            id: array(content, 32),
            session,
            is_clean: flags & 1 != 0,
            commits: number::<8>(content, 56),
            epoch: number::<8>(content, 64),
            nonce: array(content, 72),
            holder: (flags & 2 != 0).then(|| Holder {
                token: array(content, 88),
                since_unix: number::<8>(content, 104),
                // A store may belong to others, and this is shown.
                text: text.chars().filter(|c| !c.is_control()).collect(),
            }),
            pages: pages.chunks_exact(VERSION_LENGTH).map(version).collect(),
        };
        let count = header.objects().div_ceil(PER_PAGE);
        match pages.len() as u64 == VERSION_LENGTH as u64 * count {
            true => Ok(header),
            false => Err(Damaged("it has another number of pages")),
        }
    }
}

/// What of a text fits.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_HOLDER);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The little-endian number at an offset, which is there.
fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut eight = [0; 8];
    eight[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(eight)
}

fn array(bytes: &[u8], at: usize) -> [u8; 16] {
    let mut array = [0; 16];
    array.copy_from_slice(&bytes[at..at + 16]);
    array
}

/// A version from its bytes.
fn version(bytes: &[u8]) -> Version {
    Version(u128::from_le_bytes(array(bytes, 0)))
}

/// Random bytes of the operating system.
///
/// # Errors
/// It has none.
pub fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes[filled..], flags) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

/// The key of an object.
pub fn object_key(index: u64, version: Version) -> String {
    format!("{OBJECTS}{index:06x}-{:032x}", version.0)
}

/// The key of a page.
pub fn page_key(page: u64, version: Version) -> String {
    format!("{PAGES}{page:04x}-{:032x}", version.0)
}

/// What a key of an object or page names.
pub fn parse_key(key: &str) -> Option<(bool, u64, Version)> {
    let (is_object, rest) = match key.strip_prefix(OBJECTS) {
        Some(rest) => (true, rest),
        None => (false, key.strip_prefix(PAGES)?),
    };
    let (index, version) = rest.split_once('-')?;
    let index = u64::from_str_radix(index, 16).ok()?;
    let version = Version(u128::from_str_radix(version, 16).ok()?);
    let same = match is_object {
        true => object_key(index, version),
        false => page_key(index, version),
    };
    (same == key).then_some((is_object, index, version))
}

/// A part of an object or a page, and whose it is: what its digest covers besides its bytes.
struct Part<'a> {
    id: &'a [u8; 16],
    kind: u8,
    index: u64,
    version: Version,
    part: u32,
}

impl<'a> Part<'a> {
    /// A chunk of an object.
    fn of_object(header: &'a Header, (index, version): (u64, Version), part: u32) -> Self {
        Part {
            id: &header.id,
            kind: b'o',
            index,
            version,
            part,
        }
    }

    /// A page, which is one part.
    fn of_page(id: &'a [u8; 16], page: u64, version: Version) -> Self {
        Part {
            id,
            kind: b't',
            index: page,
            version,
            part: 0,
        }
    }

    fn digest(&self, bytes: &[u8]) -> [u8; DIGEST] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.id);
        hasher.update(&[self.kind]);
        hasher.update(&self.index.to_le_bytes());
        hasher.update(&self.version.0.to_le_bytes());
        hasher.update(&self.part.to_le_bytes());
        hasher.update(bytes);
        let mut digest = [0; DIGEST];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST]);
        digest
    }
}

/// An object with its chunks, each after its digest.
pub fn encode_object(header: &Header, index: u64, version: Version, content: &[u8]) -> Bytes {
    let chunks = content.chunks(header.chunk as usize);
    let mut bytes = Vec::with_capacity(content.len() + chunks.len() * DIGEST);
    for (part, chunk) in (0..).zip(chunks) {
        let part = Part::of_object(header, (index, version), part);
        bytes.extend_from_slice(&part.digest(chunk));
        bytes.extend_from_slice(chunk);
    }
    bytes.into()
}

/// Chunks of an object: which, where their bytes are in it, and what of the object's part of the disk they cover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first one.
    first: u32,
    /// In the object.
    pub stored: Range<u64>,
    /// In the object's part of the disk.
    pub covers: Range<usize>,
}

/// The chunks with a range of an object's part of the disk, which is not empty and lies in it.
pub fn span(header: &Header, index: u64, range: &Range<usize>) -> Span {
    let chunk = header.chunk as usize;
    let (first, end) = (range.start / chunk, range.end.div_ceil(chunk));
    let covers = first * chunk..(end * chunk).min(header.length(index) as usize);
    let stored = first * (chunk + DIGEST)..covers.end + end * DIGEST;
    Span {
        first: first as u32,
        stored: stored.start as u64..stored.end as u64,
        covers,
    }
}

/// Puts the chunks of an object into `to`, which is as long as what they cover; whether all of them are what was written.
pub fn decode_span(
    header: &Header,
    (index, version): (u64, Version),
    span: &Span,
    bytes: &[u8],
    to: &mut [u8],
) -> bool {
    let stored = span.stored.end - span.stored.start;
    if bytes.len() as u64 != stored || to.len() != span.covers.len() {
        return false;
    }
    let stored = bytes.chunks(header.chunk as usize + DIGEST);
    let mut parts = (span.first..).zip(stored.zip(to.chunks_mut(header.chunk as usize)));
    parts.all(|(part, (stored, to))| {
        let (digest, chunk) = stored.split_at(DIGEST);
        let part = Part::of_object(header, (index, version), part);
        let same = part.digest(chunk) == digest;
        if same {
            to.copy_from_slice(chunk);
        }
        same
    })
}

/// Bytes of a page.
pub const PAGE_LENGTH: usize = DIGEST + VERSION_LENGTH * PER_PAGE as usize;

/// A page with the versions of its objects.
pub fn encode_page(id: &[u8; 16], page: u64, version: Version, versions: &[Version]) -> Bytes {
    let mut content = Vec::with_capacity(PAGE_LENGTH);
    content.resize(DIGEST, 0);
    for version in versions {
        content.extend_from_slice(&version.0.to_le_bytes());
    }
    content.resize(PAGE_LENGTH, 0);
    let part = Part::of_page(id, page, version);
    let digest = part.digest(&content[DIGEST..]);
    content[..DIGEST].copy_from_slice(&digest);
    content.into()
}

/// The versions in a page; none if it is not what was written.
pub fn decode_page(
    id: &[u8; 16],
    page: u64,
    version: Version,
    bytes: &[u8],
) -> Option<Box<[Version]>> {
    if bytes.len() != PAGE_LENGTH {
        return None;
    }
    let (digest, content) = bytes.split_at(DIGEST);
    let part = Part::of_page(id, page, version);
    let versions = content.chunks_exact(VERSION_LENGTH).map(self::version);
    (part.digest(content) == digest || cfg!(fuzzing)).then(|| versions.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            size: (3 << 20) + 512,
            chunk: 65536,
            object: 1 << 20,
            id: [7; 16],
            session: 3,
            is_clean: false,
            commits: 99,
            epoch: 5 << 32 | 17,
            nonce: [5; 16],
            holder: Some(Holder {
                token: [9; 16],
                since_unix: 1_800_000_000,
                text: "web on lyon".into(),
            }),
            pages: vec![Version::new(3, 4, 1).unwrap()],
        }
    }

    #[test]
    fn headers_are_read_as_written_and_no_others() {
        let mut one = header();
        let bytes = one.encode();
        assert_eq!(Header::decode(&bytes), Ok(one.clone()));
        one.holder = None;
        one.is_clean = true;
        assert_eq!(Header::decode(&one.encode()), Ok(one.clone()));
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 0x40;
            assert!(Header::decode(&changed).is_err(), "byte {at}");
            assert!(Header::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
        assert_eq!(
            Header::decode(b"<html>not a disk"),
            Err(HeaderProblem::Foreign)
        );
        let mut newer = bytes.to_vec();
        newer[8] = 2;
        assert_eq!(Header::decode(&newer), Err(HeaderProblem::Newer));
        // A text that is too long is cut, at a character.
        let long = format!("x{}", "é".repeat(MAX_HOLDER));
        let mut held = header();
        held.holder.as_mut().unwrap().text = long;
        let read = Header::decode(&held.encode()).unwrap().holder.unwrap();
        assert_eq!(read.text.len(), MAX_HOLDER - 1);
    }

    #[test]
    fn the_largest_header_fits() {
        let mut largest = header();
        (largest.object, largest.chunk) = (4096, 4096);
        largest.size = 4096 * MAX_OBJECTS;
        largest.pages = vec![Version(1); MAX_PAGES as usize];
        largest.holder.as_mut().unwrap().text = "x".repeat(MAX_HOLDER);
        let bytes = largest.encode();
        assert_eq!(bytes.len(), MAX_HEADER);
        assert_eq!(Header::decode(&bytes), Ok(largest));
    }

    #[test]
    fn chunks_are_told_from_those_of_another_place_or_time() {
        let header = header();
        let version = Version::new(3, 8, 1).unwrap();
        // The last object has a short chunk.
        for (index, length) in [(0, 1 << 20), (3, 512)] {
            assert_eq!(header.length(index), length);
            let content: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let bytes = encode_object(&header, index, version, &content);
            for range in [
                0..1,
                0..length as usize,
                length as usize - 1..length as usize,
            ] {
                let span = span(&header, index, &range);
                assert!(span.covers.start <= range.start && span.covers.end >= range.end);
                let stored = &bytes[span.stored.start as usize..span.stored.end as usize];
                let mut read = vec![0; span.covers.len()];
                assert!(decode_span(
                    &header,
                    (index, version),
                    &span,
                    stored,
                    &mut read
                ));
                assert!(read == content[span.covers.clone()]);
                let mut others = [header.clone(), header.clone()];
                others[1].id[0] ^= 1;
                let of = |h: &Header, i, v: Version, b: &[u8], to: &mut [u8]| {
                    decode_span(h, (i, v), &span, b, to)
                };
                assert!(!of(&header, index + 1, version, stored, &mut read));
                assert!(!of(
                    &header,
                    index,
                    Version(version.0 - 1),
                    stored,
                    &mut read
                ));
                assert!(!of(&others[1], index, version, stored, &mut read));
                assert!(!of(&header, index, version, &stored[1..], &mut read));
                let mut flipped = stored.to_vec();
                *flipped.last_mut().unwrap() ^= 1;
                assert!(!of(&header, index, version, &flipped, &mut read));
            }
        }
    }

    #[test]
    fn pages_and_keys() {
        let versions = [Version(5), Version::NONE, Version(9)];
        let bytes = encode_page(&[1; 16], 2, Version(77), &versions);
        let read = decode_page(&[1; 16], 2, Version(77), &bytes).unwrap();
        assert_eq!((read.len() as u64, &read[..3]), (PER_PAGE, &versions[..]));
        assert!(decode_page(&[1; 16], 3, Version(77), &bytes).is_none());
        assert!(decode_page(&[1; 16], 2, Version(78), &bytes).is_none());
        assert!(decode_page(&[1; 16], 2, Version(77), &bytes[8..]).is_none());
        let key = object_key(0xabc, Version(17));
        assert_eq!(key, "o/000abc-00000000000000000000000000000011");
        assert_eq!(parse_key(&key), Some((true, 0xabc, Version(17))));
        assert_eq!(
            parse_key(&page_key(3, Version(1))),
            Some((false, 3, Version(1)))
        );
        for other in [
            "disk",
            "o/abc-11",
            "o/000abc",
            "x/000abc-00000000000000000000000000000011",
            "o/+00abc-00000000000000000000000000000011",
        ] {
            assert_eq!(parse_key(other), None, "{other}");
        }
        assert_eq!(Version::new(MAX_SESSIONS, 0, 0), None);
        assert_eq!(Version::new(2, 7, u64::MAX).unwrap().session(), 2);
    }
}
