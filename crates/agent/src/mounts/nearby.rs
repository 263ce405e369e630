//! Images of this site that are mounted here: once an image is complete, the mount reads what nobody has written over from the
//! image's files, and only the rest by way of the site's process.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use drover_core::{BlockDevice, Digest, ImageName};
use drover_device::backend::ImageDevice;
use drover_mount::client::{Client, Connector};
use drover_mount::direct::{Near, NearDevice};
use drover_net::Code;
use drover_store::lease::MountId;
use drover_store::{Catalog, changes};

use super::lease::Lease;
use super::open_disk;
use super::target::Target;
use crate::error::Result;
use crate::home::Home;
use crate::site;

/// Interval at which it is looked whether an image is complete.
const PAUSE: Duration = Duration::from_millis(250);

/// Longest interval while that fails, or finds another image.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The device of a mounted image of this site. Call within a runtime.
///
/// # Errors
/// When it is no image.
pub(super) fn device(
    home: &Home,
    connector: &Arc<dyn Connector>,
    image: &Target,
    mount: MountId,
    client: &Arc<Client>,
) -> Result<NearDevice> {
    let (device, near) = NearDevice::new(Arc::clone(client));
    let found = Found {
        home: home.clone(),
        name: ImageName::new(&image.image)?,
        digest: client.identity().digest,
        lease: Lease::new(connector, image, mount)?,
    };
    let near = Arc::downgrade(&near);
    drop(tokio::spawn(found.tell(near)));
    Ok(device)
}

/// Finds an image of this site.
struct Found {
    home: Home,
    name: ImageName,
    /// The digest by which mounts know it.
    digest: Digest,
    lease: Lease,
}

/// What was found of an image.
enum Looked {
    /// Nothing of that name: it is in transit.
    Nothing,
    /// Another image, or one that cannot be read from its files.
    Another,
    /// The image, and the byte ranges that were written over.
    It(Arc<dyn BlockDevice>, Vec<Range<u64>>),
}

impl Found {
    /// Tells a mount of the image as soon as it is complete, unless the mount ends before.
    async fn tell(self, near: Weak<Near>) {
        let mut pause = PAUSE;
        while near.strong_count() > 0 {
            match self.look().await {
                Ok(Looked::It(base, written)) => {
                    if let Some(near) = near.upgrade()
                        && !near.found(base, written)
                    {
                        tracing::warn!(image = %self.name, "the file of the image is of another size than the image");
                    }
                    return;
                }
                // What is in transit gets its name in the directory of images.
                Ok(Looked::Nothing) => {
                    self.appears(&near).await;
                    pause = PAUSE;
                    continue;
                }
                Ok(Looked::Another) => {}
                // A site of an earlier version, or none that runs: everything is read by way of the server of mounts.
                Err(e) if matches!(e.code(), Some(Code::Unsupported | Code::Protocol)) => return,
                Err(e) => {
                    tracing::debug!(image = %self.name, error = %e, "the image is not read from its file yet");
                }
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Waits until there is a file of its name, or the mount has ended.
    async fn appears(&self, near: &Weak<Near>) {
        let path = self.home.images_dir().join(self.name.as_str());
        loop {
            tokio::time::sleep(PAUSE).await;
            let path = path.clone();
            let exists = tokio::task::spawn_blocking(move || path.exists());
            if near.strong_count() == 0 || exists.await.unwrap_or(true) {
                return;
            }
        }
    }

    async fn look(&self) -> Result<Looked> {
        let (home, name, digest) = (self.home.clone(), self.name.clone(), self.digest);
        let opened = tokio::task::spawn_blocking(move || open(&home, &name, digest));
        let base = match opened.await?? {
            Opened::Nothing => return Ok(Looked::Nothing),
            Opened::Another => return Ok(Looked::Another),
            Opened::It(base) => base,
        };
        let seen = self.lease.changes().await?;
        match seen.digest == self.digest {
            true => Ok(Looked::It(base, seen.ranges().collect())),
            false => Ok(Looked::Another),
        }
    }
}

/// What the catalog has by a name.
enum Opened {
    Nothing,
    Another,
    It(Arc<dyn BlockDevice>),
}

/// Opens the files of the image of that name, if it has this digest.
fn open(home: &Home, name: &ImageName, digest: Digest) -> Result<Opened> {
    let catalog = Arc::new(site::look_at_catalog(home)?);
    let Some(record) = catalog.by_name(name)? else {
        return Ok(Opened::Nothing);
    };
    if changes::digest_for_mounts(&home.mounted_dir(), &record) != digest {
        return Ok(Opened::Another);
    }
    let disk = open_disk(home, &catalog, &record)?;
    // Of the file that was opened: it may have been replaced since the catalog was read.
    let (opened, recorded) = (disk.stamps().first().map(|(_, stamp)| *stamp), record.stamp);
    let same = opened.zip(recorded);
    match same.is_some_and(|(a, b)| (a.size, a.mtime_ns) == (b.size, b.mtime_ns)) {
        true => Ok(Opened::It(Arc::new(ImageDevice::new(disk)))),
        false => Ok(Opened::Another),
    }
}
