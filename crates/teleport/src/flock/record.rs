//! What is known of a flock, and the file that keeps it: `flocks/KEY` in the work directory (`docs/format/flock.md`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use drover_core::{BLOCK_SIZE_U64, Digest, ImageName};
use drover_net::PeerKey;
use drover_storage::Envelope;
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::protocol::Delivered;

/// Maximum number of images of a flock; the names must fit into one request.
pub const MAX_FLOCK_IMAGES: usize = 256;

/// Maximum number of flocks that a site remembers, those that are over included.
pub const MAX_FLOCKS: usize = 1024;

/// Maximum number of flocks of one peer that a site remembers.
pub const MAX_PEER_FLOCKS: usize = 64;

/// The longest explanation that is kept of a failure, in bytes.
const MAX_WHY: usize = 1000;

const FILE: Envelope = Envelope {
    magic: *b"DRVRFLK\0",
    version: 2,
    max_bytes: 256 << 10,
};

/// The same without the nodes, which are at the end.
const FORMER: Envelope = Envelope { version: 1, ..FILE };

/// How a flock stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlockState {
    /// Its images arrive, or will when it is sent again.
    Open,
    /// All of an atomic flock has arrived, and it is decided that the images get their names.
    Naming,
    /// It is over: all of it was delivered.
    Delivered,
    /// It is over: images were not delivered; of an atomic flock, none.
    Failed,
}

/// How an image of a flock stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageState {
    /// It has not arrived completely.
    Waiting,
    /// It is complete and verified, and waits without a name for the other images of its flock.
    Arrived,
    /// It was delivered.
    Delivered,
    /// The site had the same image under that name.
    Unchanged,
    /// It was not delivered.
    Failed,
}

/// The blocks of an image by where they came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ImageBlocks {
    /// Zeros.
    pub zero: u64,
    /// Repeated within the image.
    pub own: u64,
    /// From the other images of the flock.
    pub flock: u64,
    /// From what the site had before.
    pub site: u64,
    /// Sent.
    pub sent: u64,
    /// Sent in an earlier session.
    pub resumed: u64,
}

impl ImageBlocks {
    /// The blocks of a delivered image of a flock.
    #[must_use]
    pub fn of(delivered: &Delivered) -> Self {
        let origins = delivered.origins.unwrap_or_default();
        ImageBlocks {
            zero: delivered.zero_blocks,
            own: origins.own,
            flock: origins.flock,
            site: origins.site,
            sent: delivered.sent_blocks,
            resumed: delivered.resumed_blocks,
        }
    }

    /// The numbers of bytes: zero, own, flock, site, sent, resumed.
    #[must_use]
    pub fn bytes(&self) -> [u64; 6] {
        [
            self.zero,
            self.own,
            self.flock,
            self.site,
            self.sent,
            self.resumed,
        ]
        .map(|blocks| blocks.saturating_mul(BLOCK_SIZE_U64))
    }
}

/// An image of a flock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlockImage {
    /// Its name at the destination.
    pub name: ImageName,
    /// How it stands.
    pub state: ImageState,
    /// The length of its file in bytes, once it was offered.
    pub size_bytes: u64,
    /// Its number at the destination, once it was offered; else 0.
    pub image: u64,
    /// Its digest, once it has arrived; else zeros.
    pub digest: Digest,
    /// When it arrived, in seconds since 1970.
    pub added_unix: i64,
    /// Its blocks by where they came from, once it has arrived.
    pub blocks: ImageBlocks,
}

impl FlockImage {
    /// An image that has not been offered yet.
    #[must_use]
    pub fn waiting(name: ImageName) -> Self {
        FlockImage {
            name,
            state: ImageState::Waiting,
            size_bytes: 0,
            image: 0,
            digest: Digest::default(),
            added_unix: 0,
            blocks: ImageBlocks::default(),
        }
    }
}

/// What is known of a flock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlockRecord {
    /// Its name.
    pub name: ImageName,
    /// The number of this sending of it, chosen by the source.
    pub id: [u8; 16],
    /// The key of the other site: of the one that sends it, where it is received.
    pub peer: PeerKey,
    /// This site's name for it.
    pub peer_name: String,
    /// Whether all of its images are delivered, or none.
    pub atomic: bool,
    /// How it stands.
    pub state: FlockState,
    /// When it began, in seconds since 1970.
    pub begun_unix: i64,
    /// When anything of this last changed.
    pub touched_unix: i64,
    /// Its images, in the order in which they are sent.
    pub images: Vec<FlockImage>,
    /// Why it failed; else empty.
    pub why: String,
    /// The nodes of this site that receive the images, or send them, by the images' places; none of a site that has no nodes.
    pub nodes: BTreeMap<u32, String>,
}

impl FlockRecord {
    /// Whether nothing more happens to it unless it is sent again.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.state, FlockState::Delivered | FlockState::Failed)
    }

    /// Sets why it failed, on one line.
    pub fn fail(&mut self, why: &str) {
        self.state = FlockState::Failed;
        let clean = |c: char| if c.is_control() { ' ' } else { c };
        let mut text: String = why.chars().map(clean).collect();
        text.truncate(text.floor_char_boundary(MAX_WHY));
        self.why = text;
    }

    /// The image of that name.
    pub fn image(&mut self, name: &ImageName) -> Option<&mut FlockImage> {
        self.images.iter_mut().find(|image| image.name == *name)
    }

    /// Writes it to a file, durably.
    ///
    /// # Errors
    /// Errors of the system.
    pub(crate) fn save(&self, path: &Path) -> Result<(), TeleportError> {
        let failed = TeleportError::file("write", path);
        FILE.write(path, &drover_net::encode(self)).map_err(failed)
    }

    /// Reads a record from the bytes of its file; none if they are not one.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let record: FlockRecord = match FILE.open(bytes) {
            Ok(body) => drover_net::decode(body).ok()?,
            // An empty map is one zero.
            Err(_) => drover_net::decode(&[FORMER.open(bytes).ok()?, &[0]].concat()).ok()?,
        };
        let count = record.images.len();
        let mut nodes = record.nodes.keys();
        let good = count <= MAX_FLOCK_IMAGES && nodes.all(|nth| (*nth as usize) < count);
        good.then_some(record)
    }
}

/// Reads the record in a file, if there is a good one.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn read_one(path: &Path) -> Result<Option<FlockRecord>, TeleportError> {
    let bytes = FILE.read(path).map_err(TeleportError::file("read", path))?;
    Ok(bytes.as_deref().and_then(FlockRecord::parse))
}

/// A flock of a site, for listings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlockInfo {
    /// What is known of it.
    pub record: FlockRecord,
    /// The sessions that send it now.
    pub sessions: u32,
    /// The images that arrive now: name, bytes that are there, bytes of all.
    pub under_way: Vec<(ImageName, u64, u64)>,
    /// The images that a machine can run from at the site now: those that are there, and those that are still arriving.
    pub launchable: Vec<ImageName>,
}

/// The key of a flock, and the name of its file: 32 hexadecimal digits from its sender and its name.
pub(crate) fn flock_key(peer: &PeerKey, name: &ImageName) -> String {
    let mut h = blake3::Hasher::new_derive_key("drover 2026-11 flock key");
    h.update(&peer.0);
    h.update(name.as_str().as_bytes());
    h.finalize().to_hex().as_str()[..32].to_owned()
}

/// The directory with the records of flocks.
pub(crate) fn flocks_dir(work_dir: &Path) -> PathBuf {
    work_dir.join("flocks")
}

/// What the records in a directory say: those that can be read with their paths, and the paths of the others.
pub(crate) type Found = (Vec<(PathBuf, FlockRecord)>, Vec<PathBuf>);

/// Reads the records in a work directory.
///
/// # Errors
/// When the directory cannot be listed or a file cannot be read.
pub(crate) fn read_all(work_dir: &Path) -> Result<Found, TeleportError> {
    let dir = flocks_dir(work_dir);
    let failed = |e| TeleportError::file("list", &dir)(e);
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    let entries = match std::fs::read_dir(&dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((good, bad)),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        // Temporary files of a replacement that was cut off begin with a dot.
        if !name.is_some_and(crate::transfers::is_key) {
            continue;
        }
        let bytes = FILE
            .read(&path)
            .map_err(TeleportError::file("read", &path))?;
        match bytes.as_deref().and_then(FlockRecord::parse) {
            Some(record) => good.push((path, record)),
            None => bad.push(path),
        }
    }
    Ok((good, bad))
}

/// The flocks that a site with these work directories, which need not run, has received, those that changed last first.
///
/// # Errors
/// When their records cannot be read.
pub fn flocks(work_dirs: &[PathBuf]) -> Result<Vec<FlockInfo>, TeleportError> {
    let mut found = Vec::new();
    for dir in work_dirs {
        found.extend(read_all(dir)?.0);
    }
    let info = |record| FlockInfo {
        record,
        sessions: 0,
        under_way: Vec::new(),
        launchable: Vec::new(),
    };
    let mut all: Vec<_> = found.into_iter().map(|(_, record)| info(record)).collect();
    sort(&mut all);
    Ok(all)
}

/// Sorts flocks by their last change, the newest first.
pub(crate) fn sort(all: &mut [FlockInfo]) {
    all.sort_by(|a, b| {
        let of = |info: &FlockInfo| (info.record.touched_unix, info.record.begun_unix);
        (of(b), &a.record.name).cmp(&(of(a), &b.record.name))
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn record(name: &str, images: &[&str]) -> FlockRecord {
        let named = |name: &&str| FlockImage::waiting(ImageName::new(*name).unwrap());
        FlockRecord {
            name: ImageName::new(name).unwrap(),
            id: [3; 16],
            peer: PeerKey([7; 32]),
            peer_name: "paris".into(),
            atomic: true,
            state: FlockState::Open,
            begun_unix: 100,
            touched_unix: 200,
            images: images.iter().map(named).collect(),
            why: String::new(),
            nodes: BTreeMap::new(),
        }
    }

    #[test]
    fn a_record_comes_back_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(flocks_dir(dir.path())).unwrap();
        let mut shop = record("shop", &["web.qcow2", "db.qcow2"]);
        shop.fail("a line\nand another");
        assert_eq!(shop.why, "a line and another");
        let path = flocks_dir(dir.path()).join(flock_key(&shop.peer, &shop.name));
        shop.save(&path).unwrap();
        let other = flocks_dir(dir.path()).join("0".repeat(32));
        std::fs::write(&other, b"DRVRFLK\0 something else").unwrap();
        std::fs::write(flocks_dir(dir.path()).join(".tmp"), b"").unwrap();
        let (good, bad) = read_all(dir.path()).unwrap();
        assert_eq!(
            (good, bad),
            (vec![(path.clone(), shop.clone())], vec![other])
        );
        let bytes = std::fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x10;
            assert_eq!(FlockRecord::parse(&wrong), None, "byte {at}");
        }
        let all = flocks(&[dir.path().into()]).unwrap();
        assert_eq!(all[0].record, shop);

        // As an earlier version has written it, and one that names nodes.
        let mut body = drover_net::encode(&shop);
        assert_eq!(body.pop(), Some(0));
        assert_eq!(FlockRecord::parse(&FORMER.seal(&body)), Some(shop.clone()));
        shop.nodes.insert(1, "lyon-2".into());
        shop.save(&path).unwrap();
        assert_eq!(read_one(&path).unwrap(), Some(shop.clone()));
        shop.nodes.insert(2, "lyon-3".into());
        shop.save(&path).unwrap();
        assert_eq!(read_one(&path).unwrap(), None);
        assert_eq!(read_one(&dir.path().join("gone")).unwrap(), None);
    }

    /// The longest names, as many images as there may be: it fits into its file, and its order into a request.
    #[test]
    fn the_largest_flock_fits() {
        let names: Vec<String> = (0..MAX_FLOCK_IMAGES)
            .map(|i| format!("{i:03}{}", "n".repeat(ImageName::MAX_BYTES - 3)))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut large = record("x", &names);
        for image in &mut large.images {
            image.size_bytes = u64::MAX;
            image.image = u64::MAX;
            image.added_unix = i64::MAX;
            let n = u64::MAX;
            image.blocks = ImageBlocks {
                zero: n,
                own: n,
                flock: n,
                site: n,
                sent: n,
                resumed: n,
            };
        }
        large.nodes = (0..MAX_FLOCK_IMAGES as u32)
            .map(|n| (n, "n".repeat(63)))
            .collect();
        large.fail(&"w".repeat(5000));
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(flocks_dir(dir.path())).unwrap();
        let path = flocks_dir(dir.path()).join("1".repeat(32));
        large.save(&path).unwrap();
        assert_eq!(read_all(dir.path()).unwrap().0[0].1, large);
        let order = crate::services::OpenFlock {
            name: large.name.clone(),
            id: large.id,
            atomic: true,
            images: large
                .images
                .iter()
                .map(|image| crate::services::FlockItem {
                    name: image.name.clone(),
                    unchanged: Some(Digest([255; 32])),
                })
                .collect(),
        };
        assert!(drover_net::encode(&order).len() < (64 << 10) - 64);
    }
}
