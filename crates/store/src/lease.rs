//! Leases of images: at most one writer, or any number of readers; beside either, mounts that stand by to take the writer's
//! lease over.
//!
//! A write lease survives a lost connection and restarts of the mount and of the site, because dirty data that is not
//! yet pushed would be lost with it. It ends when the mount is closed, or when the site's owner breaks it. One with a term
//! is broken for another mount when its holder has had no connection for longer than that. Read leases last only while
//! the reader is connected.

mod file;
mod hand_over;
mod record;

use record::{Broken, Record};
pub use record::{HandOverToken, Holder, Loss, MountId};

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use drover_core::{Digest, ImageName};
use drover_net::{Code, Peer, PeerKey, Refusal};
use serde::{Deserialize, Serialize};

/// The access that a mount requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read; shared with other readers.
    ReadOnly,
    /// Read and write; exclusive.
    ReadWrite,
    /// Read beside a writer, in order to take over its lease ([`LeaseTable::hand_over`]); shared with all others.
    Standby,
}

/// Identifies the state of an image's device. A cache is valid for one such state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The image's digest.
    pub digest: Digest,
    /// Incremented with each change of writer.
    pub edition: u64,
    /// The last committed epoch.
    pub epoch: u64,
}

/// How long a disconnected reader keeps writers out.
pub const READER_GRACE: Duration = Duration::from_secs(60);

/// Upper bound on the term of a lease, in seconds: ten years.
pub const MAX_TERM: u64 = 10 * 366 * 86_400;

/// Note in the lease while the site itself holds it, to merge changes.
pub const MERGE_NOTE: &str = "drover changes merge";

/// Upper bound on remembered broken leases; their holders learn of it when they return.
const MAX_BROKEN: usize = 16;

/// Upper bound on remembered closed mounts.
const MAX_CLOSED: usize = 64;

/// Upper bound on readers of an image.
const MAX_READERS: usize = 256;

impl Holder {
    fn is(&self, who: &Who) -> bool {
        (self.peer, self.mount) == (who.peer.key.0, who.mount)
    }
}

impl Record {
    /// Its holder is told of it when it returns.
    fn lose(&mut self, holder: &Holder, how: Loss) {
        self.broken.push(Broken {
            peer: holder.peer,
            mount: holder.mount,
            how,
        });
        if self.broken.len() > MAX_BROKEN {
            self.broken.remove(0);
        }
    }

    /// State for an image that was written but has no other record: an edition beyond all earlier ones.
    fn unknown() -> Self {
        Self {
            edition: unix_now(),
            ..Self::default()
        }
    }
}

/// Whether mounts have written over the image, regardless of its lease.
pub(crate) fn has_overlay(directory: &Path) -> bool {
    directory.join("states").exists()
}

/// A mount that requests access.
#[derive(Clone, Debug)]
pub struct Who {
    /// Its site.
    pub peer: Peer,
    /// Its identifier.
    pub mount: MountId,
    /// The number of its link.
    pub link: u64,
    /// A note that describes it, for display.
    pub note: String,
    /// How many seconds without a connection it keeps a write lease; `None` for ever.
    pub term: Option<u64>,
}

impl Who {
    fn holder(&self) -> Holder {
        Holder {
            peer: self.peer.key.0,
            peer_name: self.peer.name.clone(),
            mount: self.mount,
            since_unix: unix_now(),
            note: self.note.clone(),
            term: self.term,
        }
    }

    /// A description of it, for messages.
    #[must_use]
    pub fn description(&self) -> String {
        describe(&self.peer.name, &self.note)
    }
}

#[derive(Debug)]
struct Reader {
    name: String,
    since: Duration,
    /// When its last connection ended.
    left: Option<Duration>,
}

/// The leases of one image. Changes are durable when a call returns.
pub struct LeaseTable {
    image: ImageName,
    directory: PathBuf,
    record: Record,
    readers: HashMap<(PeerKey, MountId), Reader>,
    /// Mounts that are connected in order to take the write lease over.
    standbys: HashMap<(PeerKey, MountId), Who>,
    /// The latest link by which the holder of the write lease came; 0 if none is known.
    holder_link: u64,
    /// Recently closed mounts, with their last link: a late connection of that link does not reopen them.
    closed: VecDeque<(PeerKey, MountId, u64)>,
}

impl LeaseTable {
    /// Loads the leases stored in `directory`, which need not exist.
    ///
    /// # Errors
    /// A file that is unreadable or damaged.
    pub fn open(image: ImageName, directory: PathBuf) -> Result<Self, Refusal> {
        file::remove_leftovers(&directory);
        let record = match file::load(&directory)? {
            Some(record) => record,
            None if has_overlay(&directory) => Record::unknown(),
            None => Record::default(),
        };
        Ok(Self {
            record,
            image,
            directory,
            readers: HashMap::new(),
            standbys: HashMap::new(),
            holder_link: 0,
            closed: VecDeque::new(),
        })
    }

    /// Replaces an unusable lease file with one without a holder. The former holder will find that another mount has
    /// written the image meanwhile. False when the file is usable or missing.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn replace_damaged(directory: &Path) -> Result<bool, Refusal> {
        match file::load(directory) {
            Err(refusal) if refusal.code == Code::Corrupt => {}
            result => return result.map(|_| false),
        }
        file::set_aside(directory).map_err(|e| {
            let text = format!("cannot rename the lease in {}: {e}", directory.display());
            Refusal::new(Code::Io, text)
        })?;
        file::store(directory, &Record::unknown())?;
        Ok(true)
    }

    /// Rewrites the file, after something else has damaged it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn store_again(&mut self) -> Result<(), Refusal> {
        self.keep(self.record.clone())
    }

    /// The holder of the write lease, if any.
    pub fn holder(&self) -> Option<&Holder> {
        self.record.holder.as_ref()
    }

    /// The last holder of the write lease, if known.
    pub fn last_writer(&self) -> Option<&Holder> {
        self.record.last.as_ref()
    }

    /// Whether a mount holds the write lease.
    pub fn is_held_by(&self, peer: PeerKey, mount: MountId) -> bool {
        self.holder()
            .is_some_and(|holder| (holder.peer, holder.mount) == (peer.0, mount))
    }

    /// Whether a mount has ever held the write lease.
    pub fn was_written(&self) -> bool {
        self.record.edition > 0
    }

    /// The edition of the last writer.
    pub fn last_edition(&self) -> u64 {
        self.record.edition
    }

    /// The edition, and whether `expected` matches the current state, apart from this mount's own writes.
    pub fn edition(&self, who: &Who, expected: Option<Identity>, now: Identity) -> (u64, bool) {
        let own = self.record.last_writer == Some((who.peer.key.0, who.mount));
        let edition = self.record.edition;
        let fresh = expected.is_some_and(|expected| {
            let epoch = expected.epoch == now.epoch || (own && expected.epoch <= now.epoch);
            expected.digest == now.digest && expected.edition == edition && epoch
        });
        (edition, fresh)
    }

    /// Admits a mount, or refuses it, naming the mounts that hold the image. `now` is monotonic; `connected` says
    /// whether a mount has connections.
    ///
    /// # Errors
    /// [`Code::Held`], [`Code::Lost`], or the lease cannot be written.
    pub fn enter(
        &mut self,
        who: &Who,
        access: Access,
        now: Duration,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
    ) -> Result<(), Refusal> {
        let image = self.image.as_str();
        let key = (who.peer.key.0, who.mount);
        let is_it = |broken: &&Broken| (broken.peer, broken.mount) == key;
        if let Some(broken) = self.record.broken.iter().find(is_it) {
            return Err(Refusal::new(Code::Lost, broken.how.message(image)));
        }
        let late = |(peer, mount, link): &(PeerKey, MountId, u64)| {
            (peer, mount) == (&who.peer.key, &who.mount) && who.link <= *link
        };
        if self.closed.iter().any(late) {
            return Err(Refusal::new(Code::Unavailable, "the mount is closed"));
        }
        match self.record.holder.as_ref() {
            Some(holder) if holder.is(who) => {
                if access == Access::ReadWrite && holder.term != who.term {
                    self.change_term(who.term)?;
                }
                self.holder_link = self.holder_link.max(who.link);
                return Ok(());
            }
            Some(holder) if access != Access::Standby || holder.note == MERGE_NOTE => {
                return Err(Refusal::new(Code::Held, held(image, holder)));
            }
            Some(_) => return self.stand_by(who),
            None => {}
        }
        self.forget_readers(now, connected);
        match access {
            Access::ReadOnly => self.read(who, now),
            Access::ReadWrite => self.write(who, now),
            Access::Standby => self.stand_by(who),
        }
    }

    /// The holder wants another term than before.
    fn change_term(&mut self, term: Option<u64>) -> Result<(), Refusal> {
        let mut record = self.record.clone();
        for holder in [&mut record.holder, &mut record.last].into_iter().flatten() {
            holder.term = term;
        }
        self.keep(record)
    }

    /// Drops readers whose grace period is over.
    fn forget_readers(&mut self, now: Duration, connected: &dyn Fn(&(PeerKey, MountId)) -> bool) {
        self.readers.retain(|key, reader| {
            reader.left.is_none_or(|left| now < left + READER_GRACE) || connected(key)
        });
    }

    /// Whether it can be dropped from memory and reloaded without losing state.
    pub fn is_idle(&mut self, now: Duration) -> bool {
        self.forget_readers(now, &|_| false);
        self.readers.is_empty()
    }

    fn read(&mut self, who: &Who, now: Duration) -> Result<(), Refusal> {
        let key = (who.peer.key, who.mount);
        if !self.readers.contains_key(&key) && self.readers.len() >= MAX_READERS {
            let text = format!("{} has too many readers", self.image.as_str());
            return Err(Refusal::new(Code::Busy, text));
        }
        let reader = self.readers.entry(key).or_insert_with(|| Reader {
            name: describe(&who.peer.name, &who.note),
            since: now,
            left: None,
        });
        reader.left = None;
        Ok(())
    }

    fn write(&mut self, who: &Who, now: Duration) -> Result<(), Refusal> {
        let own = (who.peer.key, who.mount);
        if let Some((_, reader)) = self.readers.iter().find(|(key, _)| **key != own) {
            let left = match reader.left {
                Some(_) => "; it is not connected and will be forgotten within a minute",
                None => "; unmount it there, or mount it read-only here",
            };
            let text = format!(
                "{} was mounted for reading {} by {}{left}",
                self.image.as_str(),
                ago(now.saturating_sub(reader.since).as_secs()),
                reader.name,
            );
            return Err(Refusal::new(Code::Held, text));
        }
        let key = (who.peer.key.0, who.mount);
        let mut record = self.record.clone();
        record.edition += u64::from(record.last_writer != Some(key));
        record.last_writer = Some(key);
        record.holder = Some(who.holder());
        record.last = record.holder.clone();
        self.keep(record)?;
        self.holder_link = who.link;
        self.readers.remove(&own);
        self.standbys.remove(&own);
        Ok(())
    }

    /// Gives the write lease to the site itself, for a merge: mounts are kept out, and the record of the last writer is
    /// kept.
    ///
    /// # Errors
    /// [`Code::Held`]: a mount writes or reads the image; or the lease cannot be written.
    pub fn claim(
        &mut self,
        who: &Who,
        now: Duration,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
    ) -> Result<(), Refusal> {
        self.check_free(now, connected)?;
        let mut record = self.record.clone();
        record.holder = Some(who.holder());
        self.keep(record)
    }

    /// Fails when a mount writes or reads the image.
    ///
    /// # Errors
    /// [`Code::Held`], naming the mount.
    pub fn check_free(
        &mut self,
        now: Duration,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
    ) -> Result<(), Refusal> {
        let image = self.image.as_str();
        if let Some(holder) = self.holder() {
            return Err(Refusal::new(Code::Held, held(image, holder)));
        }
        self.forget_readers(now, connected);
        self.standbys.retain(|key, _| connected(key));
        if let Some(standby) = self.standbys.values().next() {
            let text = format!(
                "{} stands by for {}; unmount it there",
                standby.description(),
                self.image
            );
            return Err(Refusal::new(Code::Held, text));
        }
        if self.readers.is_empty() {
            return Ok(());
        }
        let mut readers: Vec<_> = self.readers.values().map(|r| r.name.as_str()).collect();
        readers.sort_unstable();
        let left = match self.readers.values().any(|r| r.left.is_some()) {
            true => " (one that is not connected is forgotten within a minute)",
            false => "",
        };
        let image = self.image.as_str();
        let readers = readers.join(", ");
        let text = format!("{image} is mounted for reading by {readers}; unmount it there{left}");
        Err(Refusal::new(Code::Held, text))
    }

    /// Starts a new edition after changes were discarded, so that caches of the old state are not taken as valid.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn renew(&mut self) -> Result<(), Refusal> {
        if !self.was_written() {
            return Ok(());
        }
        let mut record = self.record.clone();
        record.edition += 1;
        (record.last_writer, record.last) = (None, None);
        self.keep(record)
    }

    /// Records that a mount's last connection has ended.
    pub fn left(&mut self, peer: PeerKey, mount: MountId, now: Duration) {
        if let Some(reader) = self.readers.get_mut(&(peer, mount)) {
            reader.left = Some(now);
        }
    }

    /// Releases a mount's lease.
    ///
    /// # Errors
    /// When the file cannot be written; the lease then remains.
    pub fn close(&mut self, peer: PeerKey, mount: MountId, link: u64) -> Result<(), Refusal> {
        self.closed.push_back((peer, mount, link));
        if self.closed.len() > MAX_CLOSED {
            self.closed.pop_front();
        }
        self.readers.remove(&(peer, mount));
        self.end_standby(peer, mount, link);
        if !self.is_held_by(peer, mount) {
            return Ok(());
        }
        self.keep(Record {
            holder: None,
            ..self.record.clone()
        })
    }

    /// Breaks the write lease if `how` says how its holder loses it; returns both.
    ///
    /// # Errors
    /// When the file cannot be written; the lease then remains.
    pub fn break_lease(
        &mut self,
        how: &dyn Fn(&Holder) -> Option<Loss>,
    ) -> Result<Option<(Holder, Loss)>, Refusal> {
        let mut record = self.record.clone();
        let Some(holder) = record.holder.take() else {
            return Ok(None);
        };
        let Some(how) = how(&holder) else {
            return Ok(None);
        };
        record.lose(&holder, how.clone());
        self.keep(record)?;
        Ok(Some((holder, how)))
    }

    fn keep(&mut self, record: Record) -> Result<(), Refusal> {
        file::store(&self.directory, &record)?;
        self.record = record;
        Ok(())
    }
}

impl Holder {
    /// How it loses its lease to another mount, if it may: it has had no connection for `gone`.
    #[must_use]
    pub fn loss(&self, gone: Duration, by: &Who) -> Option<Loss> {
        let term = self.term.filter(|term| gone.as_secs() >= *term)?;
        Some(Loss::TermOver {
            term,
            at_unix: unix_now(),
            by: by.description(),
        })
    }
}

impl Loss {
    /// The message for a mount that has lost its lease of an image.
    #[must_use]
    pub fn message(&self, image: &str) -> String {
        let lost = match self {
            Loss::Revoked => format!(
                "the write lease of {image} was revoked at its site (`drover mounts break`)"
            ),
            Loss::TermOver { term, at_unix, by } => format!(
                "the write lease of {image} ended at {}, when {by} took it: this mount had been out of contact for longer than the lease's term, {}",
                moment(*at_unix),
                term_text(*term)
            ),
            Loss::HandedOver { at_unix, to, .. } => {
                return format!(
                    "the write lease of {image} was handed over to {to} at {}: unmount this one with --discard, since all that it had was pushed before",
                    moment(*at_unix)
                );
            }
        };
        format!(
            "{lost}: data that was not pushed stays in this mount's cache; discard it to mount the image again"
        )
    }
}

/// A term, for people: `1h`.
#[must_use]
pub fn term_text(seconds: u64) -> String {
    let seconds = i64::try_from(seconds.min(MAX_TERM)).unwrap_or(0);
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let rest_text = format!("{:#}", jiff::SignedDuration::from_secs(rest));
    match (days, rest) {
        (0, _) => rest_text,
        (days, 0) => format!("{days}d"),
        (days, _) => format!("{days}d {rest_text}"),
    }
}

/// A time, in seconds since 1970.
fn moment(unix: u64) -> String {
    let time = i64::try_from(unix).ok();
    match time.and_then(|unix| jiff::Timestamp::from_second(unix).ok()) {
        Some(time) => time.strftime("%Y-%m-%d %H:%M UTC").to_string(),
        None => "an unknown time".into(),
    }
}

fn held(image: &str, holder: &Holder) -> String {
    if holder.note == MERGE_NOTE {
        return format!(
            "what mounts wrote over {image} is being made part of it at its site (begun {}); try again when that is done. \
             `drover mounts break {image}` there ends it and leaves the image as it was",
            ago(unix_now().saturating_sub(holder.since_unix))
        );
    }
    format!(
        "{} holds the write lease of {image}, taken {}: unmount it there, or, if that mount is lost, revoke the lease with \
         `drover mounts break {image}` at the site that has the image{}",
        describe(&holder.peer_name, &holder.note),
        ago(unix_now().saturating_sub(holder.since_unix)),
        holder.term.map_or_else(String::new, |term| format!(
            ", or wait until it has been out of contact for {}",
            term_text(term)
        )),
    )
}

fn describe(name: &str, note: &str) -> String {
    if note.is_empty() {
        name.to_owned()
    } else {
        format!("{name} ({note})")
    }
}

fn ago(seconds: u64) -> String {
    match seconds {
        // The clock may have been set back: do not report an age of 0 s.
        0..120 => "a moment ago".to_owned(),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn unix_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
