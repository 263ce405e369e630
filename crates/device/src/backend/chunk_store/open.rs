//! Creating and opening a disk in a store, and breaking its lease.

use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use drover_core::DeviceError;

use super::device::StoreDevice;
use super::error::OpenError;
use super::format::{
    HEADER, Header, HeaderProblem, Holder, MAX_HEADER, MAX_SESSIONS, OBJECTS, PAGES, PER_PAGE,
    PROBE, Version, is_possible, parse_key, random,
};
use super::head::{Outcome, write_header};
use super::inner::{Committed, MAX_BUFFER};
use super::store::{ChunkStore, Tag};
use super::sweep::{read_table, sweep};

/// A disk that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewStore {
    /// Its size in bytes.
    pub size: u64,
    /// Bytes of a chunk, a power of two from 4 KiB to 4 MiB.
    pub chunk: u32,
    /// Bytes of the disk in an object, a power of two up to 4 MiB and at least a chunk; none for what suits the store.
    pub object: Option<u32>,
}

/// How a disk is opened.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Refuses writes, and takes no lease.
    pub read_only: bool,
    /// What holds the lease: the same after a crash.
    pub token: [u8; 16],
    /// The same for people.
    pub holder: String,
    /// Bytes that are written and not yet in the store, at most.
    pub max_buffer: u64,
}

impl StoreOptions {
    /// To write, with the usual buffer.
    #[must_use]
    pub fn new(token: [u8; 16], holder: &str) -> Self {
        StoreOptions {
            read_only: false,
            token,
            holder: holder.to_owned(),
            max_buffer: MAX_BUFFER,
        }
    }
}

fn now_unix() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// The header, as it is.
fn read_header(store: &dyn ChunkStore) -> Result<Option<(Header, Tag)>, OpenError> {
    let place = || store.describe();
    let Some((bytes, tag)) = store.look(HEADER, MAX_HEADER)? else {
        return Ok(None);
    };
    match Header::decode(&bytes) {
        Ok(header) => Ok(Some((header, tag))),
        Err(HeaderProblem::Foreign) => Err(OpenError::Foreign(place())),
        Err(HeaderProblem::Newer) => Err(OpenError::Newer(place())),
        Err(HeaderProblem::Damaged(what)) => Err(OpenError::Lost {
            place: place(),
            what,
        }),
    }
}

/// Makes a disk of zeros.
///
/// # Errors
/// [`OpenError`]; [`OpenError::Exists`] if there is one.
pub fn create(store: &dyn ChunkStore, new: NewStore) -> Result<(), OpenError> {
    let object = new.object.unwrap_or_else(|| store.object().max(new.chunk));
    if !is_possible(new.size, new.chunk, object) {
        return Err(OpenError::Shape {
            size: new.size,
            object,
        });
    }
    if read_header(store)?.is_some() {
        return Err(OpenError::Exists(store.describe()));
    }
    let mut remains = false;
    for prefix in [OBJECTS, PAGES] {
        store.list(prefix, &mut |key| remains |= parse_key(key).is_some())?;
    }
    if remains {
        // Perhaps somebody made a disk meanwhile.
        return Err(match read_header(store)? {
            Some(_) => OpenError::Exists(store.describe()),
            None => OpenError::Remains(store.describe()),
        });
    }
    probe(store)?;
    let mut header = Header {
        size: new.size,
        chunk: new.chunk,
        object,
        id: fresh()?,
        session: 0,
        is_clean: true,
        commits: 0,
        epoch: 0,
        nonce: fresh()?,
        holder: None,
        pages: Vec::new(),
    };
    let pages = header.objects().div_ceil(PER_PAGE) as usize;
    header.pages = vec![Version::NONE; pages];
    let bytes = header.encode();
    let swapped = swap(store, HEADER, None, &bytes);
    if matches!(swapped, Ok(true)) {
        return Ok(());
    }
    // It may be this one, if the answer was lost.
    match (store.look(HEADER, MAX_HEADER)?, swapped) {
        (Some((now, _)), _) if now == bytes => Ok(()),
        (Some(_), _) => Err(OpenError::Exists(store.describe())),
        (None, Err(error)) => Err(error.into()),
        (None, Ok(_)) => Err(DeviceError::Unavailable(format!(
            "{}: the store refused to write the header",
            store.describe()
        ))
        .into()),
    }
}

fn fresh() -> Result<[u8; 16], DeviceError> {
    Ok(random()?)
}

/// How often a conditional write is tried that has no answer.
const MAX_TRIES: u32 = 8;
/// The first pause between; each is twice as long.
const PAUSE: Duration = Duration::from_millis(50);

/// Conditional writes that are tried at once.
const AT_ONCE: usize = 4;
/// Bytes of what they write, at most.
const MAX_PROBE: usize = 4096;

/// Tries a conditional write until there is an answer: whether it was done. One that was done without an answer is refused
/// when it is tried again.
fn swap(
    store: &dyn ChunkStore,
    key: &str,
    was: Option<&Tag>,
    value: &Bytes,
) -> Result<bool, DeviceError> {
    let mut pause = PAUSE;
    for _ in 1..MAX_TRIES {
        match store.swap(key, was, value.clone()) {
            Err(error) if error.is_transient() => tracing::debug!("{error}"),
            answered => return Ok(answered?.is_some()),
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    Ok(store.swap(key, was, value.clone())?.is_some())
}

/// Whether conditional writes are refused when they have to be.
fn probe(store: &dyn ChunkStore) -> Result<(), OpenError> {
    let value = Bytes::from_static(b"drover tries conditional writes here");
    let swap = |was: Option<&Tag>| swap(store, PROBE, was, &value);
    if (swap(None)? && swap(None)?) || swap(Some(&store.no_tag()))? {
        return Err(OpenError::Careless(store.describe()));
    }
    // Of several at once, at most one may win: a store that first checks and then writes lets others in between.
    let Some((_, tag)) = store.look(PROBE, MAX_PROBE)? else {
        return Ok(());
    };
    let values = (0..AT_ONCE).map(|_| Ok([&value[..], &fresh()?].concat().into()));
    let values = values.collect::<Result<Vec<Bytes>, DeviceError>>()?;
    let start = Barrier::new(AT_ONCE);
    let won = std::thread::scope(|scope| {
        let threads = values.into_iter().map(|value| {
            scope.spawn(|| {
                start.wait();
                matches!(store.swap(PROBE, Some(&tag), value), Ok(Some(_)))
            })
        });
        let threads: Vec<_> = threads.collect();
        let won = threads.into_iter().map(|t| t.join().unwrap_or(false));
        won.filter(|won| *won).count()
    });
    match won {
        0 | 1 => Ok(()),
        _ => Err(OpenError::Careless(store.describe())),
    }
}

impl StoreDevice {
    /// Opens the disk in a store; to write, it takes the lease, which a holder with the same token gives up.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(store: Arc<dyn ChunkStore>, options: &StoreOptions) -> Result<Self, OpenError> {
        let absent = || OpenError::Absent(store.describe());
        let (before, tag) = read_header(&*store)?.ok_or_else(absent)?;
        check_holder(&*store, &before, options)?;
        if options.read_only {
            let table = read_table(&*store, &before.id, &before.pages)?;
            let committed = Committed::new(before, tag);
            let device = StoreDevice::new(store, committed, table, true, options.max_buffer);
            return Ok(device?);
        }
        if before.session + 1 == MAX_SESSIONS {
            return Err(OpenError::WornOut(store.describe()));
        }
        let (table, probed) = std::thread::scope(|scope| {
            let probing = scope.spawn(|| probe(&*store));
            let table = read_table(&*store, &before.id, &before.pages);
            (table, probing.join())
        });
        let table = table?;
        probed.unwrap_or_else(|_| Err(DeviceError::Closed.into()))?;
        let mut header = before.clone();
        header.session += 1;
        header.is_clean = false;
        header.nonce = fresh()?;
        header.commits = header.commits.saturating_add(1);
        header.holder = Some(Holder {
            token: options.token,
            since_unix: now_unix(),
            text: options.holder.clone(),
        });
        let tag = match write_header(&*store, &tag, &before, &header, None) {
            Outcome::Written(tag) => tag,
            // It may be that another took the lease meanwhile, or that this one was lost.
            Outcome::Refused(error) => {
                if let Some((now, _)) = read_header(&*store)? {
                    check_holder(&*store, &now, options)?;
                    if (now.id, now.session) == (before.id, before.session) {
                        // A write of the process before this one has arrived.
                        return Err(DeviceError::Unavailable(format!(
                            "{}: its header was written at this moment: try again",
                            store.describe()
                        ))
                        .into());
                    }
                }
                return Err(error.into());
            }
            Outcome::Unsure(error) => return Err(error.into()),
        };
        // What the session before has written and perhaps not made durable is from now on.
        store.settle()?;
        let swept = (!before.is_clean).then(|| read_table(&*store, &before.id, &before.pages));
        let swept = swept.transpose()?;
        let session = header.session;
        let committed = Committed::new(header, tag);
        let mut device = StoreDevice::new(store, committed, table, false, options.max_buffer)?;
        device.resumed = before.holder.is_some();
        if let Some(table) = swept {
            device.inner.doomed.set_unswept(true);
            let inner = Arc::clone(&device.inner);
            let sweeping = std::thread::Builder::new().name("store-sweep".into());
            let sweeping = sweeping.spawn(move || {
                sweep(&*inner.store, &inner.doomed, session, &table, &before.pages);
            });
            sweeping.map_err(DeviceError::from)?;
        }
        Ok(device)
    }
}

fn check_holder(
    store: &dyn ChunkStore,
    header: &Header,
    options: &StoreOptions,
) -> Result<(), OpenError> {
    match &header.holder {
        Some(holder) if options.read_only || holder.token != options.token => {
            Err(OpenError::Held {
                place: store.describe(),
                holder: holder.clone(),
                since: since(holder.since_unix),
            })
        }
        _ => Ok(()),
    }
}

fn since(unix: u64) -> String {
    let seconds = now_unix().saturating_sub(unix);
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// Who holds the write lease of the disk in a store.
///
/// # Errors
/// [`OpenError`].
pub fn holder(store: &dyn ChunkStore) -> Result<Option<Holder>, OpenError> {
    let absent = || OpenError::Absent(store.describe());
    Ok(read_header(store)?.ok_or_else(absent)?.0.holder)
}

/// Takes the write lease from whoever holds it; returns who did. What that one has not flushed is lost, and it cannot write
/// any more.
///
/// # Errors
/// [`OpenError`].
pub fn break_lease(store: &dyn ChunkStore) -> Result<Option<Holder>, OpenError> {
    let mut last = DeviceError::Closed;
    for _ in 0..MAX_TRIES {
        let absent = || OpenError::Absent(store.describe());
        let (before, tag) = read_header(store)?.ok_or_else(absent)?;
        let Some(held) = before.holder.clone() else {
            return Ok(None);
        };
        let mut header = before.clone();
        header.holder = None;
        header.nonce = fresh()?;
        header.commits = header.commits.saturating_add(1);
        match write_header(store, &tag, &before, &header, None) {
            Outcome::Written(_) => return Ok(Some(held)),
            // Its holder flushed in between.
            Outcome::Refused(error) => last = error,
            Outcome::Unsure(error) => return Err(error.into()),
        }
    }
    Err(last.into())
}
