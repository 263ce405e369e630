//! Profiles of images, here and at peers: what a machine reads from its start until it serves. Their files are those of
//! `drover_store::profile`; here they meet the images that they are of.

mod moved;

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, ImageName, ReadAt};
use drover_image::VirtualDisk;
use drover_net::service::{CallEvent, OutgoingCall};
use drover_net::{Code, Connection, Identity, NetError};
use drover_store::profile::{Entry, FirstRead, MAX_BYTES, Profile, Profiles, scan};
use drover_store::{Catalog, ImageRecord, Peer, SiteCatalog};
use drover_teleport::FindProfile;
use drover_teleport::services::{GetProfile, MAX_PIECE, PutProfile, PutProfileReply};

use crate::audit::{Audited, Event, Record};
use crate::error::{Context, Error, Result, bail, msg, one_line};
use crate::home::Home;
use crate::mounts::open_disk;
use crate::remote::Call;
use crate::site;
use moved::{MIN_SHARED, Samples, sample};

/// How many other images' profiles are tried for an image that has none: those of the latest images.
const MAX_TRIED: usize = 32;

impl Audited for PutProfile {
    fn told(&self, reply: Option<&PutProfileReply>) -> Option<Record> {
        let record = Record::new(Event::ProfileChanged).image(&self.name);
        match reply {
            // Nothing of it is the image's.
            Some(put) if put.blocks == 0 => None,
            Some(put) => Some(record.bytes(put.blocks * BLOCK_SIZE_U64)),
            None => Some(record),
        }
    }
}

/// The profiles of the images of a home.
pub fn of(home: &Home) -> Profiles {
    Profiles::beside(&home.maps_dir())
}

/// What became of a profile that was put to an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Put {
    /// Blocks of it that the image has.
    pub blocks: u64,
    /// Blocks that it has not, or with another content.
    pub pruned: u64,
    /// Boots that the image's profile counts now.
    pub boots: u8,
}

/// An image of a home, for its profile.
pub struct OfImage<'a> {
    home: &'a Home,
    catalog: &'a Arc<SiteCatalog>,
    record: ImageRecord,
}

impl<'a> OfImage<'a> {
    /// That of the image called `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn named(home: &'a Home, catalog: &'a Arc<SiteCatalog>, name: &ImageName) -> Result<Self> {
        let record = catalog.by_name(name)?;
        let record = record.ok_or_else(|| Error::no_image(None, name))?;
        Ok(OfImage {
            home,
            catalog,
            record,
        })
    }

    /// That of the image whose file this is; `None` when it is none of this home's, or was changed.
    ///
    /// # Errors
    /// When the catalog cannot be read.
    pub fn at(home: &'a Home, catalog: &'a Arc<SiteCatalog>, path: &Path) -> Result<Option<Self>> {
        let Ok(path) = path.canonicalize() else {
            return Ok(None);
        };
        let is_it = |r: &ImageRecord| r.path.canonicalize().is_ok_and(|p| p == path);
        let record = catalog.images()?.into_iter().find(is_it);
        Ok(record
            .filter(|record| !crate::mounts::was_changed(record))
            .map(|record| OfImage {
                home,
                catalog,
                record,
            }))
    }

    /// Its profile, without the blocks that have changed. If it has none, that of another image of this home, as far as its
    /// blocks are here: in the same places, else, by the digests of the image, anywhere.
    ///
    /// # Errors
    /// When it is damaged, or cannot be compared with the image.
    pub fn get(&self) -> Result<Option<Profile>> {
        let shelf = of(self.home);
        let Some(found) = shelf.load(self.record.id)? else {
            return of_another(self.home, self.catalog, Some(&self.record), || self.disk());
        };
        if found.image() == self.record.digest {
            return Ok(Some(found));
        }
        let disk = self.disk()?;
        let digest = self.record.digest;
        let mut pruned = None;
        shelf.change(self.record.id, |before| {
            // It may have been replaced meanwhile.
            let mut profile = before.unwrap_or(found);
            profile
                .prune(&disk)
                .context("cannot compare a profile with its image")?;
            profile.set_image(digest);
            pruned = Some(profile.clone());
            Ok::<_, Error>(Some(profile))
        })?;
        Ok(pruned.filter(|profile| !profile.is_empty()))
    }

    fn disk(&self) -> Result<VirtualDisk> {
        open_disk(self.home, self.catalog, &self.record)
    }

    /// Adds a boot to its profile.
    ///
    /// # Errors
    /// When the image cannot be read, or the profile not written.
    pub fn add_boot(&self, reads: &[FirstRead]) -> Result<Put> {
        let disk = self.disk()?;
        let mut boot = Profile::of_boot(&disk, reads).context("cannot read the image")?;
        boot.set_image(self.record.digest);
        let mut put = Put {
            blocks: boot.entries().len() as u64,
            ..Put::default()
        };
        of(self.home).change(self.record.id, |before| {
            let profile = match before {
                // Nothing of it is an image's: no boot.
                before if boot.is_empty() => {
                    put.boots = before.as_ref().map_or(0, Profile::boots);
                    return Ok(before);
                }
                None => boot,
                Some(mut profile) => {
                    if profile.image() != boot.image() {
                        let pruned = profile.prune(&disk).context("cannot read the image")?;
                        put.pruned = pruned as u64;
                    }
                    profile.merge(&boot);
                    profile
                }
            };
            put.boots = profile.boots();
            Ok::<_, Error>(Some(profile))
        })?;
        Ok(put)
    }

    /// Makes a profile of another image that of this one, as far as the image has its blocks anywhere. They are looked for in the
    /// whole image, unless they all are in the same places. `progress` is called with the bytes done and the total.
    ///
    /// # Errors
    /// When the image has none of them; as [`OfImage::add_boot`].
    pub fn import(&self, profile: &Profile, mut progress: impl FnMut(u64, u64)) -> Result<Put> {
        let disk = self.disk()?;
        let mut here = profile.clone();
        let moved = here.prune(&disk).context("cannot read the image")?;
        if moved > 0 {
            let all = |done, total| {
                progress(done, total);
                true
            };
            here = scan(profile, &disk, all)?;
        }
        if here.is_empty() {
            bail!(
                "{} has none of its {} blocks: it is the profile of another disk",
                self.record.name,
                profile.entries().len()
            );
        }
        let pruned = (profile.entries().len() - here.entries().len()) as u64;
        here.set_image(self.record.digest);
        let put = Put {
            blocks: here.entries().len() as u64,
            pruned,
            boots: here.boots(),
        };
        of(self.home).change(self.record.id, |_| Ok::<_, Error>(Some(here)))?;
        Ok(put)
    }

    /// Whether it has a profile, be it damaged.
    pub fn has_one(&self) -> bool {
        of(self.home).path(self.record.id).exists()
    }

    /// Forgets its profile.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn forget(&self) -> Result<()> {
        of(self.home).change(self.record.id, |_| Ok::<_, Error>(None))
    }
}

/// Gives an image the profile of an earlier state of the same disk, if it has none; the first name is the earlier's.
///
/// # Errors
/// When the catalog or a profile cannot be read, or it cannot be written.
pub fn hand_on(home: &Home, catalog: &Arc<SiteCatalog>, names: [&ImageName; 2]) -> Result<()> {
    let (old, new) = (catalog.by_name(names[0])?, catalog.by_name(names[1])?);
    let (Some(old), Some(new)) = (old, new) else {
        return Ok(());
    };
    let shelf = of(home);
    let Some(profile) = shelf.load(old.id)? else {
        return Ok(());
    };
    shelf.change(new.id, |before| {
        let profile = before.unwrap_or(profile);
        Ok::<_, Error>(Some(profile))
    })
}

/// The profile of another image that this one is derived from, or with it, as far as the image has its blocks in the same places.
fn of_another(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    image: Option<&ImageRecord>,
    open: impl Fn() -> Result<VirtualDisk>,
) -> Result<Option<Profile>> {
    let there = closest(home, catalog, image, || {
        Ok(Box::new(open()?) as Box<dyn ReadAt>)
    })?;
    let profile = match (there, image) {
        (Some((mut profile, disk)), _) => {
            profile.prune(&*disk).context("cannot read the image")?;
            Some(profile)
        }
        (None, Some(image)) => moved_from_another(home, catalog, image, open)?,
        (None, None) => None,
    };
    Ok(profile.map(|mut profile| {
        if let Some(image) = image {
            profile.set_image(image.digest);
        }
        profile
    }))
}

/// The profile of another image of which this one has the most blocks anywhere, if it has enough of them.
fn moved_from_another(
    home: &Home,
    catalog: &SiteCatalog,
    image: &ImageRecord,
    open: impl Fn() -> Result<VirtualDisk>,
) -> Result<Option<Profile>> {
    let shelf = of(home);
    let (mut samples, mut ids) = (Samples::default(), Vec::new());
    for other in others(home, catalog, Some(image))? {
        if let Some(theirs) = shelf.load(other.id).ok().flatten() {
            samples.add(&theirs);
            ids.push(other.id);
        }
    }
    if ids.is_empty() {
        return Ok(None);
    }
    let load = |number: usize| Ok(shelf.load(ids[number])?);
    samples.find(home, image, &open()?, load)
}

/// The other images that have profiles, the latest first.
fn others(
    home: &Home,
    catalog: &SiteCatalog,
    image: Option<&ImageRecord>,
) -> Result<impl Iterator<Item = ImageRecord> + use<>> {
    let shelf = of(home);
    let mut others = catalog.images()?;
    others.retain(|other| {
        image.is_none_or(|image| image.id != other.id) && shelf.path(other.id).exists()
    });
    others.sort_by_key(|other| std::cmp::Reverse(other.added_unix));
    Ok(others.into_iter().take(MAX_TRIED))
}

/// The profile of another image of which a disk has the most blocks in the same places, if it has enough of a sample; and that disk.
fn closest<'a, D: Deref<Target = dyn ReadAt + 'a>>(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    image: Option<&ImageRecord>,
    open: impl Fn() -> Result<D>,
) -> Result<Option<(Profile, D)>> {
    let shelf = of(home);
    let mut disk = None;
    let mut best: Option<(usize, Profile)> = None;
    for other in others(home, catalog, image)? {
        // A damaged one is of no use, and is told of when its own image is asked for it.
        let Some(theirs) = shelf.load(other.id).ok().flatten() else {
            continue;
        };
        let disk = match &disk {
            Some(disk) => disk,
            None => disk.insert(open()?),
        };
        let shared = shared(&theirs, &**disk).context("cannot read the image")?;
        if shared >= MIN_SHARED && best.as_ref().is_none_or(|best| best.0 < shared) {
            best = Some((shared, theirs));
        }
    }
    Ok(best.map(|(_, profile)| profile).zip(disk))
}

/// Finds profiles for disks that are no files, or are being written to: that of the image of this home of which the disk has the
/// most blocks in the same places. They are not compared with all of it, which who gets them does when they are used.
#[must_use]
pub fn by_content(home: &Home) -> FindProfile {
    let home = home.clone();
    let find = move |disk: &dyn ReadAt| -> Result<Option<Profile>> {
        let catalog = Arc::new(site::open_catalog(&home)?);
        let found = closest(&home, &catalog, None, || Ok(disk))?;
        Ok(found.map(|(mut profile, _)| {
            profile.put_to_disk(disk.len());
            profile
        }))
    };
    FindProfile(Arc::new(move |disk| {
        let failed = |e: &Error| tracing::info!("no profile is sent along: {}", one_line(e));
        find(disk).inspect_err(failed).ok().flatten()
    }))
}

/// The share of a sample of a profile's blocks that a disk has in the same places, in percent.
fn shared(profile: &Profile, disk: &dyn ReadAt) -> std::io::Result<usize> {
    let sample = sample(profile);
    let blocks = Vec::from_iter(sample.iter().map(|entry| entry.block));
    let here = drover_store::profile::digests_at(disk, &blocks)?;
    let same = |entry: &&&Entry| here.get(&entry.block) == Some(&entry.digest);
    Ok(sample.iter().filter(same).count() * 100 / sample.len().max(1))
}

/// The profile of a peer's image; `None` when it has none, or that peer knows none.
///
/// # Errors
/// When the peer cannot be reached or refuses, or what it sends is no profile.
pub async fn of_peer(
    identity: &Identity,
    peer: &Peer,
    name: &ImageName,
) -> Result<Option<Profile>> {
    let mut bytes = Vec::new();
    let request = GetProfile { name: name.clone() };
    let mut calling = OutgoingCall::start(
        Call::peer(identity, peer).await?.into_connection(),
        &request,
    )
    .await?;
    loop {
        match calling.next().await {
            Ok(CallEvent::Progress(piece)) if bytes.len() + piece.len() <= MAX_BYTES => {
                bytes.extend(piece);
            }
            Ok(CallEvent::Progress(_)) => {
                bail!("{}: the profile of {name} is too long", peer.name);
            }
            Ok(CallEvent::Reply(0)) => return Ok(None),
            Ok(CallEvent::Reply(_)) => break,
            Err(NetError::Refused(refusal)) if refusal.code == Code::Unsupported => {
                return Ok(None);
            }
            Err(NetError::Refused(refusal)) => return Err(Error::of_peer(&peer.name, &refusal)),
            Err(e) => return Err(e.into()),
        }
    }
    let profile = Profile::decode(&bytes);
    let profile = profile.map_err(|e| msg!("{}: the profile of {name}: {e}", peer.name))?;
    Ok(Some(profile))
}

/// Adds a boot to the profile of an image of a site.
///
/// # Errors
/// When the connection breaks, or the site refuses.
pub async fn add_boot_at(
    connection: Connection,
    name: &ImageName,
    boot: &Profile,
) -> Result<PutProfileReply, NetError> {
    let bytes = boot.encode();
    let request = PutProfile {
        name: name.clone(),
        bytes: bytes.len() as u32,
    };
    let mut calling = OutgoingCall::<PutProfile>::start(connection, &request).await?;
    for piece in bytes.chunks(MAX_PIECE) {
        // It may have refused: its reply says why.
        if calling.report(&piece.to_vec()).await.is_err() {
            break;
        }
    }
    loop {
        if let CallEvent::Reply(reply) = calling.next().await? {
            calling.close().await;
            return Ok(reply);
        }
    }
}

/// The profile that is sent along with an image file: that of the image of this home that it is, else that of another one, as
/// far as the file has its blocks in the same places. Blocks.
///
/// # Errors
/// When it is damaged, or cannot be compared with the image.
pub fn of_file(home: &Home, path: &Path) -> Result<Option<Profile>> {
    let catalog = Arc::new(site::open_catalog(home)?);
    match OfImage::at(home, &catalog, path)? {
        Some(image) => image.get(),
        None => of_another(home, &catalog, None, || Ok(VirtualDisk::open(path)?)),
    }
}

/// The same of a profile that is named for the file.
///
/// # Errors
/// When the file cannot be read, or has none of its blocks in the same places.
pub fn for_file(profile: &Profile, path: &Path) -> Result<Profile> {
    let mut here = profile.clone();
    let pruned = here.prune(&VirtualDisk::open(path)?);
    pruned.context("cannot read the image")?;
    if here.is_empty() {
        bail!(
            "the image has none of its {} blocks in the same places: it is the profile of another disk",
            profile.entries().len()
        );
    }
    Ok(here)
}
