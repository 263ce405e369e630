//! Writing the header of a disk, of which each state is written over the one before and over no other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drover_core::DeviceError;
use parking_lot::Mutex;

use super::format::{HEADER, Header, MAX_HEADER};
use super::store::{ChunkStore, Tag};

/// How often a header is written that neither was written nor met another.
const MAX_TRIES: u32 = 8;
/// The first pause between; each is twice as long.
const PAUSE: Duration = Duration::from_millis(50);

/// What became of a header.
pub(super) enum Outcome {
    /// It was written, with this tag.
    Written(Tag),
    /// It was not, and never will be: why, and whether the disk is gone.
    Refused(DeviceError),
    /// It is not known.
    Unsure(DeviceError),
}

/// What is where a header was to be written.
pub(super) enum Seen {
    /// It, with this tag.
    New(Tag),
    /// The one before.
    Before,
    /// An earlier attempt of this session, which was given up and arrived after all.
    Late(Tag),
}

/// Headers that a process remembers to have tried.
const MAX_TRIED: usize = 4096;

/// What a process knows of its own headers, without waiting for a commit that is under way.
pub(super) struct Own {
    /// The one that was written last.
    pub(super) header: Arc<Header>,
    /// The numbers of those that were tried, the last ones.
    tried: VecDeque<[u8; 16]>,
}

impl Own {
    pub(super) fn new(header: Header) -> Self {
        Own {
            tried: VecDeque::from([header.nonce]),
            header: Arc::new(header),
        }
    }

    /// Notes one before it is tried.
    pub(super) fn note(&mut self, header: &Header) {
        if self.tried.len() == MAX_TRIED {
            self.tried.pop_front();
        }
        self.tried.push_back(header.nonce);
    }

    /// Whether this process wrote a header, or tried to.
    pub(super) fn has(&self, header: &Header) -> bool {
        self.tried.contains(&header.nonce)
    }
}

/// Writes a header over `ours`, which has this tag. `own` has the headers that this process tried: one of those that is there
/// instead arrived late, and is written over. Nobody else's is, whatever it says.
pub(super) fn write_header(
    store: &dyn ChunkStore,
    tag: &Tag,
    ours: &Header,
    new: &Header,
    own: Option<&Mutex<Own>>,
) -> Outcome {
    let bytes = new.encode();
    let mut tag = tag.clone();
    let mut pause = PAUSE;
    let mut last = DeviceError::Unavailable(format!(
        "{}: the store keeps refusing to write the header, although nobody else writes it",
        store.describe()
    ));
    for _ in 0..MAX_TRIES {
        match store.swap(HEADER, Some(&tag), bytes.clone()) {
            Ok(Some(tag)) => return Outcome::Written(tag),
            Ok(None) => {}
            Err(error) if error.is_transient() => last = error,
            Err(error) => return Outcome::Unsure(error),
        }
        match look_for(store, &tag, ours, &bytes, own) {
            Ok(Seen::New(tag)) => return Outcome::Written(tag),
            Ok(Seen::Late(late)) => tag = late,
            // A conflict with a write that took place at the same time.
            Ok(Seen::Before) => {}
            Err(Outcome::Unsure(error)) => last = error,
            Err(outcome) => return outcome,
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    Outcome::Unsure(last)
}

/// What is there, `tag` being that of `ours` and `bytes` what was written over it.
pub(super) fn look_for(
    store: &dyn ChunkStore,
    tag: &Tag,
    ours: &Header,
    bytes: &Bytes,
    own: Option<&Mutex<Own>>,
) -> Result<Seen, Outcome> {
    let (now, at) = match store.look(HEADER, MAX_HEADER) {
        Ok(Some((now, at))) if now == bytes => return Ok(Seen::New(at)),
        Ok(Some((_, at))) if at == *tag => return Ok(Seen::Before),
        Ok(Some((now, at))) => (now, at),
        Ok(None) => return Err(Outcome::Refused(another(store, ours, None))),
        Err(error) => return Err(Outcome::Unsure(error)),
    };
    let is_own = |now: &Header| own.is_some_and(|own| own.lock().has(now));
    match Header::decode(&now) {
        Ok(now) if is_own(&now) && now.commits > ours.commits => Ok(Seen::Late(at)),
        _ => Err(Outcome::Refused(another(store, ours, Some(&now)))),
    }
}

/// Why the header of a store is not `ours`.
pub(super) fn another(store: &dyn ChunkStore, ours: &Header, now: Option<&[u8]>) -> DeviceError {
    let place = store.describe();
    let Some(now) = now else {
        return DeviceError::Corrupt(format!(
            "{place}: the header of the disk is gone: the store has lost what it had acknowledged"
        ));
    };
    let lost = |why: String| DeviceError::Io(Arc::new(std::io::Error::other(why)));
    let Ok(now) = Header::decode(now) else {
        return DeviceError::Corrupt(format!("{place}: the header of the disk is damaged"));
    };
    if now.id != ours.id {
        return lost(format!("{place}: another disk was made there"));
    }
    let is_same = |now: &Header| (now.session, &now.holder) == (ours.session, &ours.holder);
    if is_same(&now) && now.holder.is_some() && now.commits >= ours.commits {
        return lost(format!(
            "{place}: a copy of this mount writes the disk as well, as one in a clone of this host would: it is used here no more"
        ));
    }
    if now.session < ours.session || (now.session == ours.session && now.commits < ours.commits) {
        return DeviceError::Corrupt(format!(
            "{place}: the store went back to an earlier state: it has lost what it had acknowledged"
        ));
    }
    lost(match &now.holder {
        Some(holder) => format!(
            "{place}: its write lease was broken, and {} holds it now",
            holder.text
        ),
        None => format!("{place}: its write lease was broken"),
    })
}
