//! Writing the header of a disk, of which each state is written over the one before and over no other.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drover_core::DeviceError;

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

/// Writes a header over `ours`, which has this tag. `is_own` says that nobody but this process writes headers of its session:
/// one of those that is there instead is an earlier attempt, and is written over.
pub(super) fn write_header(
    store: &dyn ChunkStore,
    tag: &Tag,
    ours: &Header,
    new: &Header,
    is_own: bool,
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
        match look_for(store, &tag, ours, &bytes) {
            Ok(Seen::New(tag)) => return Outcome::Written(tag),
            Ok(Seen::Late(late)) if is_own => tag = late,
            Ok(Seen::Late(_)) => {
                return Outcome::Refused(DeviceError::Unavailable(format!(
                    "{}: somebody else writes the header at this moment",
                    store.describe()
                )));
            }
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
) -> Result<Seen, Outcome> {
    let (now, at) = match store.look(HEADER, MAX_HEADER) {
        Ok(Some((now, at))) if now == bytes => return Ok(Seen::New(at)),
        Ok(Some((_, at))) if at == *tag => return Ok(Seen::Before),
        Ok(Some((now, at))) => (now, at),
        Ok(None) => return Err(Outcome::Refused(another(store, ours, None))),
        Err(error) => return Err(Outcome::Unsure(error)),
    };
    let of = |h: &Header| (h.id, h.session, h.holder.clone());
    match Header::decode(&now) {
        Ok(now) if of(&now) == of(ours) && now.holder.is_some() && now.commits > ours.commits => {
            Ok(Seen::Late(at))
        }
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
