//! Who may write an image: one mount, or none; and who reads it meanwhile.
//!
//! A writer's lease outlives its link, the mount's program and the site's: what it has changed and not yet sent would be lost with it.
//! It ends when the mount is closed, or when the site's owner breaks it. Readers only last as long as they are there.

mod file;
mod record;

use record::Record;
pub use record::{Holder, MountId};

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use drover_core::{Digest, ImageName};
use drover_net::{Code, Peer, PeerKey, Refusal};
use serde::{Deserialize, Serialize};

/// What a mount wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read; shared with other readers.
    ReadOnly,
    /// Read and write; alone.
    ReadWrite,
}

/// Which state of which image a device is. A cache belongs to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The image's digest.
    pub digest: Digest,
    /// Grows with each writer that is not the one before.
    pub edition: u64,
    /// The last epoch that counts.
    pub epoch: u64,
}

/// How long a reader that has lost its link keeps writers out.
pub const READER_GRACE: Duration = Duration::from_secs(60);

/// What the lease says while the site itself has it, to merge what mounts wrote.
pub const MERGE_NOTE: &str = "drover changes merge";

/// Broken leases that are remembered, so that their holders learn of it.
const MAX_BROKEN: usize = 16;

/// Closed mounts that are remembered.
const MAX_CLOSED: usize = 64;

/// Readers of an image at most.
const MAX_READERS: usize = 256;

impl Holder {
    fn is(&self, who: &Who) -> bool {
        (self.peer, self.mount) == (who.peer.key.0, who.mount)
    }
}

impl Record {
    /// Of an image that was written when that is all that is known: beyond all editions that there were.
    fn unknown() -> Self {
        Self {
            edition: unix_now(),
            ..Self::default()
        }
    }
}

/// Whether mounts have written over the image, whatever its lease says.
fn has_overlay(directory: &Path) -> bool {
    directory.join("states").exists()
}

/// A mount that comes.
#[derive(Clone, Debug)]
pub struct Who {
    /// From which site.
    pub peer: Peer,
    /// Which mount.
    pub mount: MountId,
    /// Which of its links.
    pub link: u64,
    /// What it says about itself.
    pub note: String,
}

impl Who {
    fn holder(&self) -> Holder {
        Holder {
            peer: self.peer.key.0,
            peer_name: self.peer.name.clone(),
            mount: self.mount,
            since_unix: unix_now(),
            note: self.note.clone(),
        }
    }
}

#[derive(Debug)]
struct Reader {
    name: String,
    since: Duration,
    /// When its last connection ended.
    left: Option<Duration>,
}

/// The leases of one image. Changes are on disk when a call returns.
pub struct LeaseTable {
    image: ImageName,
    directory: PathBuf,
    record: Record,
    readers: HashMap<(PeerKey, MountId), Reader>,
    /// Mounts that were closed lately, and on which link: a connection of it that comes late does not open them again.
    closed: VecDeque<(PeerKey, MountId, u64)>,
}

impl LeaseTable {
    /// The leases as they are on disk in `directory`, which need not exist.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged.
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
            closed: VecDeque::new(),
        })
    }

    /// Puts a new file in the place of one that cannot be used: nobody has the lease then. Whoever had it is told that the
    /// image was written by another meanwhile. False when the file can be used, or is not there.
    ///
    /// # Errors
    /// A disk that does not take it.
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

    /// Writes the file anew, which something else has damaged.
    ///
    /// # Errors
    /// A disk that does not take it.
    pub fn store_again(&mut self) -> Result<(), Refusal> {
        self.keep(self.record.clone())
    }

    /// The writer's lease, if there is one.
    pub fn holder(&self) -> Option<&Holder> {
        self.record.holder.as_ref()
    }

    /// Who had the writer's lease last, as far as that is known.
    pub fn last_writer(&self) -> Option<&Holder> {
        self.record.last.as_ref()
    }

    /// Whether a mount has the writer's lease.
    pub fn is_held_by(&self, peer: PeerKey, mount: MountId) -> bool {
        self.holder()
            .is_some_and(|holder| (holder.peer, holder.mount) == (peer.0, mount))
    }

    /// Whether a mount has ever had the writer's lease.
    pub fn was_written(&self) -> bool {
        self.record.edition > 0
    }

    /// The edition of the last writer.
    pub fn last_edition(&self) -> u64 {
        self.record.edition
    }

    /// Which edition it is, and whether `expected` is the state that is there but for what this mount wrote itself.
    pub fn edition(&self, who: &Who, expected: Option<Identity>, now: Identity) -> (u64, bool) {
        let own = self.record.last_writer == Some((who.peer.key.0, who.mount));
        let edition = self.record.edition;
        let fresh = expected.is_some_and(|expected| {
            let epoch = expected.epoch == now.epoch || (own && expected.epoch <= now.epoch);
            expected.digest == now.digest && expected.edition == edition && epoch
        });
        (edition, fresh)
    }

    /// Lets a mount in, or says in one line who is in its way. `now` is a time of a clock that does not jump;
    /// `connected` says whether a mount has connections.
    ///
    /// # Errors
    /// [`Code::Held`], [`Code::Lost`], or a disk that does not take the lease.
    pub fn enter(
        &mut self,
        who: &Who,
        access: Access,
        now: Duration,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
    ) -> Result<(), Refusal> {
        let image = self.image.as_str();
        let key = (who.peer.key.0, who.mount);
        if self.record.broken.contains(&key) {
            return Err(Refusal::new(Code::Lost, broken(image)));
        }
        let late = |(peer, mount, link): &(PeerKey, MountId, u64)| {
            (peer, mount) == (&who.peer.key, &who.mount) && who.link <= *link
        };
        if self.closed.iter().any(late) {
            return Err(Refusal::new(Code::Unavailable, "the mount is closed"));
        }
        match self.record.holder.as_ref() {
            Some(holder) if holder.is(who) => return Ok(()),
            Some(holder) => return Err(Refusal::new(Code::Held, held(image, holder))),
            None => {}
        }
        self.forget_readers(now, connected);
        match access {
            Access::ReadOnly => self.read(who, now),
            Access::ReadWrite => self.write(who, now),
        }
    }

    /// Forgets readers that are gone for long.
    fn forget_readers(&mut self, now: Duration, connected: &dyn Fn(&(PeerKey, MountId)) -> bool) {
        self.readers.retain(|key, reader| {
            reader.left.is_none_or(|left| now < left + READER_GRACE) || connected(key)
        });
    }

    /// Whether nobody would miss it if it were opened anew.
    pub fn is_idle(&mut self, now: Duration) -> bool {
        self.forget_readers(now, &|_| false);
        self.readers.is_empty()
    }

    fn read(&mut self, who: &Who, now: Duration) -> Result<(), Refusal> {
        let key = (who.peer.key, who.mount);
        if !self.readers.contains_key(&key) && self.readers.len() >= MAX_READERS {
            let text = format!("{} has as many readers as it may", self.image.as_str());
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
        self.readers.remove(&own);
        Ok(())
    }

    /// Gives the writer's lease to the site itself, which changes nothing by it: mounts are kept out, and who wrote last is
    /// still known.
    ///
    /// # Errors
    /// [`Code::Held`]: somebody writes or reads it; or a disk that does not take the lease.
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

    /// Refuses when somebody writes the image or reads it.
    ///
    /// # Errors
    /// [`Code::Held`], with who that is.
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

    /// What was written is gone: whoever remembers it is not to take the image for what it was.
    ///
    /// # Errors
    /// A disk that does not take it.
    pub fn renew(&mut self) -> Result<(), Refusal> {
        if !self.was_written() {
            return Ok(());
        }
        let mut record = self.record.clone();
        record.edition += 1;
        (record.last_writer, record.last) = (None, None);
        self.keep(record)
    }

    /// A mount's last connection has ended.
    pub fn left(&mut self, peer: PeerKey, mount: MountId, now: Duration) {
        if let Some(reader) = self.readers.get_mut(&(peer, mount)) {
            reader.left = Some(now);
        }
    }

    /// A mount gives back what it has.
    ///
    /// # Errors
    /// A disk that does not take it; the lease is then still there.
    pub fn close(&mut self, peer: PeerKey, mount: MountId, link: u64) -> Result<(), Refusal> {
        self.closed.push_back((peer, mount, link));
        if self.closed.len() > MAX_CLOSED {
            self.closed.pop_front();
        }
        self.readers.remove(&(peer, mount));
        if !self.is_held_by(peer, mount) {
            return Ok(());
        }
        self.keep(Record {
            holder: None,
            ..self.record.clone()
        })
    }

    /// The site's owner takes the lease away; the holder that had it.
    ///
    /// # Errors
    /// A disk that does not take it; the lease is then still there.
    pub fn break_lease(&mut self) -> Result<Option<Holder>, Refusal> {
        let mut record = self.record.clone();
        let Some(holder) = record.holder.take() else {
            return Ok(None);
        };
        record.broken.push((holder.peer, holder.mount));
        if record.broken.len() > MAX_BROKEN {
            record.broken.remove(0);
        }
        self.keep(record)?;
        Ok(Some(holder))
    }

    fn keep(&mut self, record: Record) -> Result<(), Refusal> {
        file::store(&self.directory, &record)?;
        self.record = record;
        Ok(())
    }
}

/// What a mount is told whose lease was broken.
pub fn broken(image: &str) -> String {
    format!(
        "the write lease of {image} was revoked at its site (`drover mounts break`): data that was not pushed stays in this \
         mount's cache; discard it to mount the image again"
    )
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
         `drover mounts break {image}` at the site that has the image",
        describe(&holder.peer_name, &holder.note),
        ago(unix_now().saturating_sub(holder.since_unix)),
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
        // Clocks jump: nobody is to read of a lease of 0 s.
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
