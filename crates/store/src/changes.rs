//! The changes that mounts made to images: lists them, sets them aside when an image is replaced, and removes them. The
//! changes to an image are an overlay ([`drover_device::backend::overlay`]) in one directory with the image's lease.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use drover_core::{Digest, ImageName};
use drover_device::backend::overlay;
use drover_index::ImageId;
use drover_storage::{Directory, HostDirectory};

use crate::lease::{Holder, LeaseTable, has_overlay};
use crate::{ImageRecord, StoreError};

/// The directory of all overlays and leases.
const OVERLAYS: &str = "overlays";

/// The changes that mounts made to an image.
#[derive(Clone, Debug)]
pub struct Changes {
    /// The image.
    pub image: ImageName,
    /// Their directory.
    pub directory: PathBuf,
    /// Whether they belong to an earlier image of that name, and were set aside.
    pub earlier: bool,
    /// The digest of its base image, if that can be read.
    pub base: Option<Digest>,
    /// Bytes of the disk that differ from the image.
    pub changed: u64,
    /// Disk space used, in bytes.
    pub room: u64,
    /// Time of the last write, in seconds since 1970.
    pub written_unix: Option<i64>,
    /// The last writer.
    pub writer: Option<Holder>,
    /// The current holder of the writer's lease.
    pub holder: Option<Holder>,
    /// Why they cannot be read completely.
    pub problem: Option<String>,
}

/// The directory with the overlay and the lease of an image. `state` is the site's directory for mounted images.
#[must_use]
pub fn directory(state: &Path, name: &ImageName) -> PathBuf {
    state.join(OVERLAYS).join(name.as_str())
}

/// Marks an image that was written, or read, while it was still arriving: by mounts it is known by
/// [`in_transit`] instead of its digest, which was not known then.
const LAUNCHED: &str = "launched";

/// What stands for the digest of an image that is still arriving. It is a function of the ID that the image will have, so that
/// changes which were made over it are over the delivered image, too.
#[must_use]
pub fn in_transit(image: ImageId) -> Digest {
    let key = blake3::derive_key("drover 2026-11 image in transit", &image.0.to_le_bytes());
    Digest(key)
}

/// Marks an image that is used while it arrives. Durable on return.
///
/// # Errors
/// When the mark cannot be written.
pub fn mark_launched(directory: &Path) -> io::Result<()> {
    match directory.join(LAUNCHED).exists() {
        true => Ok(()),
        false => {
            // Creates the directory, durably.
            drop(HostDirectory::open_or_create(directory)?);
            drover_storage::atomic_replace(&directory.join(LAUNCHED), &[])
        }
    }
}

/// Whether an image was used while it was arriving, or is.
#[must_use]
pub fn is_launched(directory: &Path) -> bool {
    directory.join(LAUNCHED).exists()
}

/// The digest by which mounts know an image, and its changes are over.
#[must_use]
pub fn digest_for_mounts(state: &Path, image: &ImageRecord) -> Digest {
    match is_launched(&directory(state, &image.name)) {
        true => in_transit(image.id),
        false => image.digest,
    }
}

/// The images that have a [`directory()`].
///
/// # Errors
/// When `state` cannot be read.
pub fn names(state: &Path) -> Result<Vec<ImageName>, StoreError> {
    let mut found = directories(state)?;
    found.retain(|(_, _, earlier)| !earlier);
    Ok(found.into_iter().map(|(image, ..)| image).collect())
}

/// The changes to all images, by name. Blocks on the disk.
///
/// # Errors
/// When `state` cannot be read. Damaged changes are listed with their problem.
pub fn all(state: &Path) -> Result<Vec<Changes>, StoreError> {
    let found = directories(state)?.into_iter();
    let mut out: Vec<_> = found
        .filter_map(|(image, directory, earlier)| look(image, directory, earlier))
        .collect();
    out.sort_by(|a, b| {
        (&a.image, a.earlier, &a.directory).cmp(&(&b.image, b.earlier, &b.directory))
    });
    Ok(out)
}

/// The disk space that the changes to each image take, in bytes, and who wrote last. Reads none of them; blocks on the disk.
///
/// # Errors
/// When `state` cannot be read.
pub fn rooms(state: &Path) -> Result<Vec<(Option<Holder>, u64)>, StoreError> {
    let found = directories(state)?.into_iter();
    let written = found.filter(|(_, directory, _)| has_overlay(directory));
    let of = |(image, directory, _): (ImageName, PathBuf, bool)| {
        let room = room(&directory);
        let leases = LeaseTable::open(image, directory).ok();
        (
            leases.and_then(|leases| leases.last_writer().cloned()),
            room,
        )
    };
    Ok(written.map(of).collect())
}

/// The changes to one image. Blocks on the disk.
#[must_use]
pub fn of_image(state: &Path, name: &ImageName) -> Option<Changes> {
    let directory = directory(state, name);
    if !directory.is_dir() {
        return None;
    }
    look(name.clone(), directory, false)
}

/// Moves the overlay of an earlier image of this name out of the way. Returns its new directory.
///
/// # Errors
/// When it cannot be renamed.
pub fn set_aside(directory: &Path, name: &ImageName) -> io::Result<PathBuf> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let millis = since.map_or(0, |since| since.as_millis());
    // Image names never begin with a dot.
    let aside = directory.with_file_name(format!(".{name}-{millis}"));
    fs::rename(directory, &aside)?;
    Ok(aside)
}

/// Removes what was [set aside](set_aside) of earlier images of a name. Returns what was removed. Blocks on the disk.
///
/// # Errors
/// When one cannot be removed.
pub fn remove_earlier(state: &Path, name: &ImageName) -> Result<Vec<Changes>, StoreError> {
    let mut earlier = all(state)?;
    earlier.retain(|c| c.earlier && c.image == *name);
    for changes in &earlier {
        fs::remove_dir_all(&changes.directory)
            .map_err(StoreError::file("remove", &changes.directory))?;
    }
    Ok(earlier)
}

/// The directories below [`OVERLAYS`], and whether they are of earlier images.
fn directories(state: &Path) -> Result<Vec<(ImageName, PathBuf, bool)>, StoreError> {
    let overlays = state.join(OVERLAYS);
    let failed = |e| StoreError::file("list", &overlays)(e);
    let entries = match fs::read_dir(&overlays) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        result => result.map_err(failed)?,
    };
    let mut out = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().into_string().unwrap_or_default();
        let earlier = earlier_name(&name);
        if let Ok(image) = ImageName::new(earlier.unwrap_or(&name)) {
            out.push((image, entry.path(), earlier.is_some()));
        }
    }
    Ok(out)
}

/// The image whose overlay was set aside under this name.
fn earlier_name(name: &str) -> Option<&str> {
    let (image, when) = name.strip_prefix('.')?.rsplit_once('-')?;
    let number = !when.is_empty() && when.bytes().all(|b| b.is_ascii_digit());
    number.then_some(image)
}

/// Reads the changes of a directory; none when there are none.
fn look(image: ImageName, directory: PathBuf, earlier: bool) -> Option<Changes> {
    let mut found = Changes {
        image,
        earlier,
        base: None,
        changed: 0,
        room: room(&directory),
        written_unix: written(&directory),
        writer: None,
        holder: None,
        problem: None,
        directory,
    };
    match summary(&found.directory) {
        Ok(Some(summary)) => {
            found.base = Some(summary.identity.base);
            found.changed = summary.changed;
        }
        Ok(None) => {}
        Err(e) => found.problem = Some(e),
    }
    match LeaseTable::open(found.image.clone(), found.directory.clone()) {
        Ok(leases) => {
            found.writer = leases.last_writer().cloned();
            found.holder = leases.holder().cloned();
        }
        Err(e) => found.problem = Some(e.message),
    }
    (found.changed > 0 || found.problem.is_some()).then_some(found)
}

fn summary(directory: &Path) -> Result<Option<overlay::Summary>, String> {
    let open = HostDirectory::open(directory)
        .map_err(|e| format!("cannot open {}: {e}", directory.display()))?;
    let open: Arc<dyn Directory> = Arc::new(open);
    overlay::summary(&open).map_err(|e| e.to_string())
}

/// Disk space used by the files of a directory, in bytes.
fn room(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = fs::read_dir(directory) else {
        return 0;
    };
    let files = entries.flatten().filter_map(|entry| entry.metadata().ok());
    files
        .filter(|m| m.is_file())
        .map(|m| m.blocks() * 512)
        .sum()
}

/// Time of the last write to the data.
fn written(directory: &Path) -> Option<i64> {
    let when = fs::metadata(directory.join("data")).ok()?.modified().ok()?;
    let since = when.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use drover_net::{Peer, PeerKey, Rights};

    use super::*;
    use crate::lease::{Access, MountId, Who};

    #[test]
    fn what_nobody_flushed_is_taken_too() {
        let state = tempfile::tempdir().unwrap();
        let key = PeerKey([1; 32]);
        let written = |name: &str, peer: PeerKey| {
            let name = ImageName::new(name).unwrap();
            let directory = directory(state.path(), &name);
            fs::create_dir_all(&directory).unwrap();
            let who = Who {
                peer: Peer {
                    key: peer,
                    name: "lyon".into(),
                    rights: Rights::DEFAULT.of_peer(),
                    domain: "default".into(),
                },
                mount: MountId([1; 16]),
                link: 1,
                note: String::new(),
                term: None,
            };
            let mut leases = LeaseTable::open(name, directory.clone()).unwrap();
            let entered = leases.enter(&who, Access::ReadWrite, Duration::ZERO, &|_| false);
            entered.unwrap();
            leases.close(peer, who.mount, 1).unwrap();
            // Of no changes, as far as can be read.
            fs::write(directory.join("states"), "").unwrap();
            fs::write(directory.join("data"), vec![1; 100_000]).unwrap();
            fs::write(directory.join("epoch-1"), vec![1; 50_000]).unwrap();
            directory
        };
        let mine = written("a.img", key);
        written("b.img", PeerKey([2; 32]));
        let taken = || {
            let rooms = rooms(state.path()).unwrap().into_iter();
            let mine = rooms.filter(|(by, _)| by.as_ref().is_some_and(|by| by.peer == key.0));
            mine.map(|(_, room)| room).sum::<u64>()
        };
        assert_eq!(taken(), room(&mine));
        assert!(taken() >= 150_000);
        set_aside(&mine, &ImageName::new("a.img").unwrap()).unwrap();
        assert!(taken() >= 150_000, "what was set aside");
    }
}
