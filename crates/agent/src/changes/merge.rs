//! `changes merge`: merges the data that mounts wrote into the image, or into a new one.
//!
//! The image's file is never written in place: the disk as mounts see it is written to a new file next to it, synced
//! and read back. Meanwhile the site itself holds the image's write lease, so that no mount writes; the changes
//! are kept. Then
//!
//! 1. the commit record is made durable (`merge`, see [`super::decided`]),
//! 2. the new file is renamed to the image's name, and its digest goes into the catalog,
//! 3. the changes are dropped, and the lease is released.
//!
//! Readers see the old file with its changes before step 2 and the new file afterwards: the same bytes. A crash before
//! step 1 leaves the image as it was; after a later crash, [`super::recover()`] finishes the merge.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::ImageName;
use drover_image::Format;
use drover_mount::server::{Claim, ClaimEnd};
use drover_net::{Code, DEFAULT_DOMAIN, PeerKey, Refusal};
use drover_storage::create_private;
use drover_store::lease::{MERGE_NOTE, MountId};
use drover_store::{ImageRecord, changes};
use drover_teleport::{Origin, TeleportError};
use serde::{Deserialize, Serialize};

use super::decided::Decided;
use super::part::{Part, Target};
use super::turn::{Here, PART, Turn, crash};
use crate::error::{Context, Error, Result, bail};
use crate::mounts;
use crate::text::bytes;

/// A merge request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    /// The image to merge.
    pub name: ImageName,
    /// Name of the new image; `None` merges in place.
    pub rename: Option<ImageName>,
    /// Format of the new image.
    pub to: Option<Target>,
    /// Drop the changes after merging them into a new image.
    pub drop: bool,
    /// Only report what would happen.
    pub dry_run: bool,
}

/// The result of a merge or of a dry run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Merged {
    /// The image that was mounted.
    pub image: String,
    /// The image that holds the merged data.
    #[serde(rename = "as")]
    pub target: String,
    /// Whether a merge took place: false when there were no changes, and for a dry run.
    pub merged: bool,
    /// Bytes of the disk that mounts changed.
    pub changed_bytes: u64,
    /// Format of the target.
    pub format: String,
    /// The file's length.
    pub size_bytes: u64,
    /// Space needed when the file system cannot share extents.
    pub room_bytes: u64,
    /// Free space.
    pub free_bytes: Option<u64>,
    /// The new digest.
    pub digest: Option<String>,
    /// Whether the changes were dropped.
    pub dropped: bool,
    /// Who holds the image at the moment; only set by a dry run.
    pub held: Option<String>,
}

/// A peer that has an image merged that belongs to it.
pub struct Author {
    /// Its key.
    pub key: PeerKey,
    /// Its name at this site.
    pub name: String,
    /// The image, as it was when it belonged to the peer.
    pub image: ImageRecord,
    /// Whether a peer may take so many more bytes for an image of this name.
    pub may_take: Box<MayTake>,
}

/// See [`Author::may_take`].
pub type MayTake = dyn Fn(&PeerKey, &ImageName, u64) -> Result<(), Refusal> + Send;

/// Merges, for the site's own user or for `author`, to whom a new image belongs. `progress` receives bytes done and the
/// total; setting `stop` cancels safely. Blocks the thread.
///
/// # Errors
/// Why the merge failed; unless the error says otherwise, nothing was changed.
pub fn merge(
    here: &Here,
    order: &Order,
    author: Option<&Author>,
    progress: &mut dyn FnMut(u64, u64),
    stop: &AtomicBool,
) -> Result<Merged> {
    let name = &order.name;
    let Some(turn) = Turn::take(here, name) else {
        return Err(refused(format!("{name} is being merged already")));
    };
    let finished = !order.dry_run && super::recover::finish(here, &turn, name, stop)?;
    let record = here
        .site
        .by_name(name)
        .ok_or_else(|| Error::no_image(None, name))?;
    if author.is_some_and(|author| author.image.id != record.id) {
        return Err(refused(format!(
            "{name} was replaced meanwhile; nothing was merged"
        )));
    }
    let to = check(here, order, &record)?;
    let mut merged = Merged {
        image: name.to_string(),
        target: order.rename.as_ref().unwrap_or(name).to_string(),
        format: format_of(to).as_str().into(),
        ..Merged::default()
    };
    let Some(changes) = changes::of_image(&here.state, name) else {
        if finished {
            (merged.merged, merged.dropped) = (true, true);
            merged.target.clone_from(&merged.image);
            merged.size_bytes = record.size_bytes;
            merged.digest = Some(record.digest.to_string());
        }
        return Ok(merged);
    };
    if let Some(problem) = changes.problem {
        bail!("the changes to {name} cannot be read: {problem}");
    }
    if changes.base != Some(changes::digest_for_mounts(&here.state, &record)) {
        return Err(refused(format!(
            "{name}: its changes are of an earlier image of that name; `drover changes drop {name}` drops them"
        )));
    }
    merged.changed_bytes = changes.changed;
    if order.dry_run {
        merged.held = changes
            .holder
            .map(|h| format!("{} ({})", h.peer_name, h.note));
        let part = Part::new(here.server.view(name)?, to)?;
        sizes(here, &part, author, &mut merged);
        return Ok(merged);
    }
    turn.make()?;
    let mount = MountId::random();
    let claim = here.server.claim(
        name,
        mounts::own(here.key, DEFAULT_DOMAIN),
        mount,
        MERGE_NOTE,
    );
    let claim = claim.inspect_err(|_| turn.tidy())?;
    crash("claimed");
    let made = Making {
        here,
        order,
        author,
        turn: &turn,
        record: &record,
        to,
        stop,
    }
    .run(claim, mount, &mut merged, progress);
    if made.is_err() && !turn.dir().join(super::decided::NAME).exists() {
        turn.tidy();
    }
    made.map(|()| merged)
}

fn sizes(here: &Here, part: &Part, author: Option<&Author>, merged: &mut Merged) {
    merged.size_bytes = part.len();
    merged.room_bytes = part.room();
    // How full the disk is, is the site's own business.
    merged.free_bytes = here.site.free_bytes().filter(|_| author.is_none());
}

/// Checks that the merge is possible; returns the format to write.
fn check(here: &Here, order: &Order, record: &ImageRecord) -> Result<Target> {
    let name = &order.name;
    let own = match record.format.as_str() {
        "raw" => Some(Target::Raw),
        "qcow2" => Some(Target::Qcow2),
        _ => None,
    };
    let Some(to) = order.to.or(own) else {
        return Err(not_in_place(format!(
            "{name} is a {} image, which drover cannot write; merge it into a new raw or qcow2 image",
            record.format
        )));
    };
    if let Some(rename) = &order.rename {
        if here.site.by_name(rename).is_some() {
            return Err(refused(format!(
                "an image called {rename} exists already; choose another name"
            )));
        }
        here.site.check_unknown_file(rename)?;
        return Ok(to);
    }
    if own != Some(to) {
        return Err(not_in_place(format!(
            "{name} is a {} image; to convert it, merge it into a new image",
            record.format
        )));
    }
    if record.external {
        return Err(not_in_place(format!(
            "{name} was indexed in place, and drover never changes its file; merge it into a new image"
        )));
    }
    if to == Target::Qcow2 && has_snapshots(&record.path)? {
        return Err(not_in_place(format!(
            "{name} has internal snapshots, which the merged image would lack; merge it into a new image"
        )));
    }
    if let Some(other) = backed_by(here, record) {
        return Err(not_in_place(format!(
            "{name} is the backing file of {other}, which would change with it; merge it into a new image"
        )));
    }
    Ok(to)
}

/// Whether a qcow2 file has internal snapshots.
fn has_snapshots(path: &Path) -> Result<bool> {
    let mut count = [0; 4];
    File::open(path)
        .and_then(|file| file.read_exact_at(&mut count, 60))
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(u32::from_be_bytes(count) > 0)
}

/// An image of this site that uses this one's file as its backing file.
fn backed_by(here: &Here, record: &ImageRecord) -> Option<ImageName> {
    let ours = fs::metadata(&record.path).ok()?;
    let others = here.site.list().into_iter().filter(|o| o.id != record.id);
    let mut others = others.filter(|o| o.format != "raw");
    let backed = others.find(|other| mounts::is_read_by(&ours, &other.path));
    backed.map(|other| other.name)
}

/// A merge in progress.
struct Making<'a> {
    here: &'a Here,
    order: &'a Order,
    author: Option<&'a Author>,
    turn: &'a Turn,
    record: &'a ImageRecord,
    to: Target,
    stop: &'a AtomicBool,
}

impl Making<'_> {
    fn run(
        &self,
        claim: Claim,
        mount: MountId,
        merged: &mut Merged,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let part = Part::new(claim.view().clone(), self.to)?;
        sizes(self.here, &part, self.author, merged);
        self.check_quota(merged.room_bytes)?;
        let path = self.turn.dir().join(PART);
        self.write(&part, &path, merged, progress)?;
        drop(part);
        crash("written");
        let prepared = self.read_back(&path, merged, progress)?;
        crash("prepared");
        let adopted = self.adopt(&claim, mount, &path, &prepared, merged);
        match adopted {
            Ok(()) => {}
            // The merge is already committed: a retry finishes it.
            Err(e) if self.turn.dir().join(super::decided::NAME).exists() => {
                claim.leave();
                return Err(e.context(format!(
                    "{}: the merge is not complete; run the command again, or restart the site, to finish it",
                    self.order.name
                )));
            }
            Err(e) => {
                self.here.site.forget_prepared(&prepared);
                return Err(e);
            }
        }
        crash("adopted");
        merged.merged = true;
        merged.dropped = self.order.rename.is_none() || self.order.drop;
        let ended = claim.end(match &self.order.rename {
            None => ClaimEnd::Merged(prepared.digest),
            Some(_) if self.order.drop => ClaimEnd::Dropped,
            Some(_) => ClaimEnd::Kept,
        });
        crash("ended");
        match ended {
            Ok(true) => {}
            Ok(false) => merged.dropped = false,
            Err(e) if self.order.rename.is_some() => return Err(e.into()),
            Err(e) => {
                return Err(Error::from(e).context(format!(
                    "{} is merged, but its old changes could not be dropped yet; run the command again",
                    self.order.name
                )));
            }
        }
        self.turn.tidy();
        Ok(())
    }

    /// Refuses what the owner of the image that is made may not take.
    fn check_quota(&self, bytes: u64) -> Result<()> {
        let Some(author) = self.author else {
            return Ok(());
        };
        let taken = match (&self.order.rename, self.record.owner) {
            (Some(rename), _) => (author.may_take)(&author.key, rename, bytes),
            (None, Some(owner)) => (author.may_take)(&owner, &self.order.name, bytes),
            (None, None) => Ok(()),
        };
        taken.map_err(Error::Refused)
    }

    fn stopped(&self) -> Result<()> {
        match self.stop.load(Ordering::Relaxed) {
            true => bail!("stopped; {} is unchanged", self.order.name),
            false => Ok(()),
        }
    }

    fn write(
        &self,
        part: &Part,
        path: &Path,
        merged: &Merged,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let create = || -> Result<File> {
            let file = create_private(path)
                .with_context(|| format!("cannot create {}", path.display()))?;
            let permissions = match self.order.rename {
                Some(_) => Permissions::from_mode(self.here.site.image_mode()),
                None => fs::metadata(&self.record.path)
                    .with_context(|| format!("cannot read {}", self.record.path.display()))?
                    .permissions(),
            };
            file.set_permissions(permissions)
                .with_context(|| format!("cannot create {}", path.display()))?;
            Ok(file)
        };
        let all = merged.size_bytes * 2;
        let mut report = |done| {
            progress(done, all);
            self.stopped()
        };
        let mut file = create()?;
        let raw = self.record.format == "raw" && self.to == Target::Raw;
        let shared = raw && part.write_over(&self.record.path, &file, path, &mut report)?;
        if !shared {
            check_room(&self.order.name, self.here.site.free_bytes(), merged)?;
            file = create()?;
            part.write(&file, path, &mut report)?;
        }
        file.sync_all()
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads the new file back, which computes its digest and gives its blocks to the matcher.
    fn read_back(
        &self,
        path: &Path,
        merged: &mut Merged,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<ImageRecord> {
        let rename = self.order.rename.as_ref();
        let (name, from, owner) = match (rename, self.author) {
            (Some(rename), None) => (rename, "", None),
            (Some(rename), Some(author)) => (rename, &*author.name, Some(author.key)),
            (None, _) => (&self.order.name, &*self.record.from, self.record.owner),
        };
        let origin = Origin { from, owner };
        let size = merged.size_bytes;
        let mut report = |done: u64, total: u64| {
            progress(size + size * done / total.max(1), size * 2);
            match self.stop.load(Ordering::Relaxed) {
                true => Err(TeleportError::Stopped),
                false => Ok(()),
            }
        };
        let prepared = match self.here.site.prepare(path, name, origin, &mut report) {
            Err(TeleportError::Stopped) => return self.stopped().map(|()| self.record.clone()),
            other => other?,
        };
        if prepared.format != format_of(self.to).as_str() {
            // A guest may have written another format's header to its raw disk, which would then be misdetected.
            self.here.site.forget_prepared(&prepared);
            return Err(not_in_place(format!(
                "{}: the guest's data begins like a {} image, so a raw file would be mistaken for one; merge it into a new qcow2 image",
                self.order.name, prepared.format
            )));
        }
        merged.digest = Some(prepared.digest.to_string());
        Ok(prepared)
    }

    /// Commits the merge and renames the file to the image's name.
    fn adopt(
        &self,
        claim: &Claim,
        mount: MountId,
        path: &Path,
        prepared: &ImageRecord,
        merged: &mut Merged,
    ) -> Result<()> {
        self.stopped()?;
        let fresh = self.order.rename.is_some();
        let decided = Decided {
            image: self.order.name.clone(),
            mount: mount.0,
            old: self.record.digest,
            new: prepared.digest,
            from: prepared.from.clone(),
        };
        let done = claim.while_held(|| -> Result<()> {
            // A delivery of this name that was in flight may have finished before the lease was taken.
            let now = self.here.site.by_name(&self.order.name);
            if now.map(|now| now.id) != Some(self.record.id) {
                return Err(refused(format!(
                    "{} was replaced or removed during the merge; nothing was merged",
                    self.order.name
                )));
            }
            if !fresh {
                decided.write(self.turn.dir())?;
                crash("decided");
            }
            self.here.site.adopt(Some(path), prepared, fresh)?;
            Ok(())
        });
        merged.size_bytes = prepared.size_bytes;
        match done {
            Some(done) => done,
            None => Err(refused(format!(
                "the lease of {} was revoked during the merge (`drover mounts break`): the image is unchanged, merge again",
                self.order.name
            ))),
        }
    }
}

fn check_room(name: &ImageName, free: Option<u64>, merged: &Merged) -> Result<()> {
    match free {
        Some(free) if free < merged.room_bytes => Err(refused(format!(
            "{name}: the merged image needs {} beside the old one, and {} are free; free some space, or `drover send` the image to another site first",
            bytes(merged.room_bytes),
            bytes(free)
        ))),
        _ => Ok(()),
    }
}

fn format_of(to: Target) -> Format {
    match to {
        Target::Raw => Format::Raw,
        Target::Qcow2 => Format::Qcow2,
    }
}

/// Error: the image can only be merged into a new one, not in place.
fn not_in_place(text: String) -> Error {
    Error::coded(Code::ReadOnly, text)
}

fn refused(text: String) -> Error {
    Error::refused(text)
}
