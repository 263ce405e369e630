//! Images of this site that are mounted here: once an image is complete, the mount reads what nobody has written over from the
//! image's files, and only the rest by way of the site's process.

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
use crate::error::{Error, Result};
use crate::home::Home;
use crate::site;

/// Interval at which it is looked whether an image is complete.
const PAUSE: Duration = Duration::from_millis(250);

/// Longest interval after failures.
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

impl Found {
    /// Tells a mount of the image as soon as it is complete, unless the mount ends before.
    async fn tell(self, near: Weak<Near>) {
        let (mut first, mut pause) = (true, PAUSE);
        while near.strong_count() > 0 {
            match self.look(first).await {
                Ok(Some((base, written))) => {
                    if let Some(near) = near.upgrade()
                        && !near.found(base, written)
                    {
                        tracing::warn!(image = %self.name, "the file of the image is of another size than the image");
                    }
                    return;
                }
                Ok(None) => pause = PAUSE,
                // A site of an earlier version, or none that runs: everything is read by way of the server of mounts.
                Err(e) if matches!(e.code(), Some(Code::Unsupported | Code::Protocol)) => return,
                Err(e) => {
                    tracing::debug!(image = %self.name, error = %e, "the image is not read from its file yet");
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
            }
            first = false;
            tokio::time::sleep(pause).await;
        }
    }

    /// The image, if it is complete, and what was written over it.
    async fn look(&self, first: bool) -> Result<Option<Seen>> {
        let (home, name, digest) = (self.home.clone(), self.name.clone(), self.digest);
        let open = move || {
            // What is in transit gets its name in the directory of images. It is looked for often.
            match first || home.images_dir().join(name.as_str()).exists() {
                true => open(&home, &name, digest),
                false => Ok(None),
            }
        };
        let Some(base) = tokio::task::spawn_blocking(open).await?? else {
            return Ok(None);
        };
        let seen = self.lease.changes().await?;
        let written = seen.ranges().collect();
        Ok((seen.digest == self.digest).then_some((base, written)))
    }
}

/// An image, and the byte ranges that were written over.
type Seen = (Arc<dyn BlockDevice>, Vec<std::ops::Range<u64>>);

/// Opens the files of an image; `None` if the site has none with this digest, or none that is complete.
fn open(home: &Home, name: &ImageName, digest: Digest) -> Result<Option<Arc<dyn BlockDevice>>> {
    let catalog = Arc::new(site::look_at_catalog(home)?);
    let Some(record) = catalog.by_name(name)? else {
        return Ok(None);
    };
    if changes::digest_for_mounts(&home.mounted_dir(), &record) != digest {
        return Ok(None);
    }
    let disk = open_disk(home, &catalog, &record)?;
    // Of the file that was opened: it may have been replaced since the catalog was read.
    let (opened, recorded) = (disk.stamps().first().map(|(_, stamp)| *stamp), record.stamp);
    let same = opened.zip(recorded);
    let same = same.is_some_and(|(a, b)| (a.size, a.mtime_ns) == (b.size, b.mtime_ns));
    match same {
        true => Ok(Some(Arc::new(ImageDevice::new(disk)))),
        false => Err(Error::refused(format!("{name} was changed meanwhile"))),
    }
}
