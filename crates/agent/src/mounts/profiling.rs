//! What is read of a mount's disk first: recorded for the profile of its image, and used to prefetch.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError, ImageName, ReadAt};
use drover_device::stage::Recording;
use drover_device::synced::Order;
use drover_net::{DEFAULT_DOMAIN, NetError, request};
use drover_store::Catalog;
use drover_store::profile::Profile;
use drover_teleport::services::PutProfileReply;
use serde::{Deserialize, Serialize};
use tokio::task::{AbortHandle, JoinHandle};

use super::control::{self, ANSWER_LIMIT};
use super::record::{How, Written};
use super::target::{Prefetch, Target};
use crate::error::{Context, Error, Result, bail, msg, one_line};
use crate::home::Home;
use crate::profiles::{self, OfImage, Put};
use crate::remote::Call;
use crate::site::{self, find_peer};

/// How long a peer may take to add a boot to the profile of its image.
const PUT_LIMIT: Duration = Duration::from_secs(30);

/// How long a mount waits for the profile of its image. It prefetches in the order of the disk until the profile is here.
const GET_LIMIT: Duration = Duration::from_secs(2);

/// Request: record what is read first of the disks of the mount. Refused while it is being recorded.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StartProfile {
    /// How long; `None` until [`StopProfile`], or the end of the mount.
    pub seconds: Option<u64>,
}
request!(StartProfile: "mount.profile.start", Manage, () => ());

/// Request: end the recording, and add it to the profiles of the images; a recording that has ended already is told of again.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StopProfile;
request!(StopProfile: "mount.profile.stop", Manage, () => Vec<Profiled>);

/// What was recorded of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profiled {
    /// Its target.
    pub image: String,
    /// Blocks that were read, zeros included.
    pub blocks: u64,
    /// Blocks that were overwritten before they were read.
    pub written_first: u64,
    /// How long it was recorded, in milliseconds.
    pub lasted_ms: u64,
    /// There was more to record than a profile holds.
    pub is_cut: bool,
    /// Boots that the image's profile counts now; none if it was written to a file.
    pub boots: Option<u8>,
    /// The file that it was written to.
    pub file: Option<PathBuf>,
    /// Why it was not kept.
    pub problem: Option<String>,
}

/// The recording of a mount, in its process.
#[derive(Default)]
pub(super) struct Profiling {
    /// Ends it in time.
    pub(super) timer: Option<AbortHandle>,
    /// Where it goes; `None` for the profiles of the images.
    pub(super) file: Option<PathBuf>,
    /// What the last one was.
    pub(super) last: Vec<Profiled>,
}

/// Begins a recording of a mount.
///
/// # Errors
/// When its process does not answer, or is recording.
pub async fn start_profile((place, _): &Written, limit: Option<Duration>) -> Result<()> {
    let request = StartProfile {
        seconds: limit.map(|limit| limit.as_secs()),
    };
    control::ask(&place.socket(), &request, ANSWER_LIMIT, |()| {}).await
}

/// Ends the recording of a mount.
///
/// # Errors
/// When its process does not answer, or has not recorded.
pub async fn stop_profile((place, _): &Written) -> Result<Vec<Profiled>> {
    control::ask(&place.socket(), &StopProfile, PUT_LIMIT * 2, |()| {}).await
}

/// Refuses options that cannot be: before anything is created.
///
/// # Errors
/// When the profile to prefetch by cannot be used, or that to record not be written.
pub fn check(how: &How) -> Result<()> {
    if let Prefetch::File(path) = &how.prefetch {
        read(path)?;
    }
    if let Some(directory) = how.record.as_deref().and_then(Path::parent)
        && !directory.is_dir()
    {
        bail!(
            "cannot write the profile: there is no directory {}",
            directory.display()
        );
    }
    Ok(())
}

/// A profile from a file.
///
/// # Errors
/// When there is none, or it is damaged.
pub fn read(path: &Path) -> Result<Profile> {
    let profile = Profile::read(path).map_err(|e| match e {
        e @ drover_store::profile::ProfileError::File { .. } => {
            Error::from(e).context("cannot read the profile")
        }
        e => msg!(
            "{}: {e}; `drover profile export` writes one",
            path.display()
        ),
    })?;
    profile.with_context(|| {
        format!(
            "cannot read the profile {}: no such file or directory",
            path.display()
        )
    })
}

/// The profile of a peer's image that a mount is to prefetch by, on its way.
pub(super) struct Coming(Option<JoinHandle<Option<Profile>>>);

impl Coming {
    /// None is.
    pub(super) fn none() -> Self {
        Coming(None)
    }

    /// Asks the peer for it, if the mount prefetches by it.
    pub(super) fn ask(home: &Home, peer: &drover_store::Peer, image: &Target, how: &How) -> Self {
        let (Prefetch::Profile, Ok(name), Ok(identity)) =
            (&how.prefetch, ImageName::new(&image.image), home.identity())
        else {
            return Coming(None);
        };
        let peer = peer.clone();
        Coming(Some(tokio::spawn(async move {
            let profile = profiles::of_peer(&identity, &peer, &name).await;
            // Without it the mount is only slower.
            let no_profile = |e: Error| tracing::info!("no profile of {name}: {}", one_line(&e));
            profile.map_err(no_profile).ok().flatten()
        })))
    }

    /// Waits a moment for it.
    pub(super) async fn soon(&mut self) -> Option<Profile> {
        let coming = self.0.as_mut()?;
        let there = tokio::time::timeout(GET_LIMIT, coming).await.ok()?;
        self.0 = None;
        there.ok().flatten()
    }

    /// Calls `then` when it has come after all.
    pub(super) fn later(self, then: impl FnOnce(Profile) + Send + 'static) {
        let Some(coming) = self.0 else { return };
        tokio::spawn(async move {
            if let Ok(Some(profile)) = coming.await {
                then(profile);
            }
        });
    }
}

/// The order of a profile for a device of that shape.
pub(super) fn order(profile: &Profile, shape: drover_device::remote::Shape) -> Order {
    Order::of_ranges(&profile.order(shape.size), shape)
}

/// Keeps a recording: in `file`, or in the profile of the image. Blocks.
pub(super) fn keep(
    home: &Home,
    target: &Target,
    device: &Arc<dyn BlockDevice>,
    recording: Recording,
    file: Option<&Path>,
) -> Profiled {
    let mut profiled = Profiled {
        image: target.to_string(),
        blocks: recording.reads.len() as u64,
        written_first: recording.written_first,
        lasted_ms: recording.lasted_ms,
        is_cut: recording.is_cut,
        boots: None,
        file: None,
        problem: None,
    };
    let kept = match file {
        Some(file) => to_file(device, &recording, file).map(|()| profiled.file = Some(file.into())),
        None => to_image(home, target, device.size(), &recording)
            .map(|put| profiled.boots = Some(put.boots)),
    };
    if let Err(e) = kept {
        profiled.problem = Some(one_line(&e));
    }
    profiled
}

fn to_file(device: &Arc<dyn BlockDevice>, recording: &Recording, file: &Path) -> Result<()> {
    let content = Content(Arc::clone(device));
    let profile = Profile::of_boot(&content, &recording.reads);
    profile.context("cannot read the disk")?.write(file)?;
    Ok(())
}

fn to_image(home: &Home, target: &Target, size: u64, recording: &Recording) -> Result<Put> {
    if target.local.is_some() {
        bail!("{target} is no image, and has no profile: record it into a file");
    }
    let name = ImageName::new(&target.image)?;
    let boot = Profile::without_content(size, &recording.reads);
    let Some(peer) = &target.peer else {
        let home = home.domain(target.domain.as_deref().unwrap_or(DEFAULT_DOMAIN))?;
        let catalog = Arc::new(site::open_catalog(&home)?);
        if catalog.by_name(&name)?.is_some() {
            return OfImage::named(&home, &catalog, &name)?.add_boot(&recording.reads);
        }
        // It is still being sent: the site has what is here of it.
        return wait_for(async move {
            let Some(call) = Call::local(&home).await? else {
                bail!("{name} has not arrived completely, and no site runs here that receives it");
            };
            let put = profiles::add_boot_at(call.into_connection(), &name, &boot).await;
            put.map_err(|e| match e {
                NetError::Refused(refusal) => Error::Refused(refusal),
                e => e.into(),
            })
        });
    };
    let (identity, peer) = (
        home.identity()?,
        find_peer(&site::open_catalog(home)?, peer)?,
    );
    wait_for(async move {
        let connection = Call::peer(&identity, &peer).await?.into_connection();
        let put = profiles::add_boot_at(connection, &name, &boot).await;
        put.map_err(|e| match e {
            NetError::Refused(refusal) => Error::of_peer(&peer.name, &refusal),
            e => e.into(),
        })
    })
}

/// Waits for what a site says of a boot, on a thread of its own, as the caller's may belong to a runtime.
fn wait_for(put: impl Future<Output = Result<PutProfileReply>> + Send) -> Result<Put> {
    let put = std::thread::scope(|scope| {
        let run = move || -> Result<_> {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_all().build()?;
            runtime.block_on(async { tokio::time::timeout(PUT_LIMIT, put).await? })
        };
        scope.spawn(run).join()
    });
    let put = put.unwrap_or_else(|_| bail!("it panicked"))?;
    Ok(Put {
        blocks: put.blocks,
        pruned: put.pruned,
        boots: put.boots,
    })
}

/// The content of a device.
pub(super) struct Content(pub(super) Arc<dyn BlockDevice>);

impl ReadAt for Content {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let room = self.0.size().saturating_sub(offset);
        let longest = u64::from(self.0.capabilities().longest);
        let length = (buf.len() as u64).min(room).min(longest) as usize;
        let read = self.0.read(offset, &mut buf[..length]);
        read.map_err(|e: DeviceError| io::Error::other(e.to_string()))?;
        Ok(length)
    }
}
