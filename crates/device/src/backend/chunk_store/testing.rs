//! A store in memory that fails as told: errors, lost answers, writes that arrive late, careless conditions; and what a
//! store may do behind a disk's back: lose values, mangle them, go back to an earlier state.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use drover_core::DeviceError;
use parking_lot::Mutex;

use super::store::{ChunkStore, Each, Promise, Tag, Wanted};

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreFault {
    /// Nothing is done, and an error is answered.
    Refused,
    /// It is done, and an error is answered.
    LostAnswer,
    /// An error is answered, and it is done some requests later.
    Late,
    /// The credentials have expired: nothing is done.
    Denied,
    /// Nothing is done, and what is answered cannot be understood.
    Strange,
}

/// How many requests later a late one is done.
const LATE: Range<u64> = 1..12;

/// Between a check and the write of a racy store.
const RACE: std::time::Duration = std::time::Duration::from_millis(200);

type Values = BTreeMap<String, (Bytes, u64)>;

enum Write {
    Put(String, Bytes),
    Swap(String, Option<Tag>, Bytes),
    Remove(String),
}

#[derive(Default)]
struct State {
    values: Values,
    tags: u64,
    requests: u64,
    late: Vec<(u64, Write)>,
}

type Choose = dyn FnMut(&str, &str) -> Option<StoreFault> + Send;

/// A store in memory.
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<State>,
    choose: Mutex<Option<Box<Choose>>>,
    is_careless: bool,
    is_racy: bool,
}

impl MemoryStore {
    /// A store that does what it is asked, until told otherwise.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One that ignores conditions of writes.
    #[must_use]
    pub fn careless() -> Self {
        MemoryStore {
            is_careless: true,
            ..Self::default()
        }
    }

    /// One that checks conditions of writes, and then writes.
    #[must_use]
    pub fn racy() -> Self {
        MemoryStore {
            is_racy: true,
            ..Self::default()
        }
    }

    /// Lets requests fail: `choose` is called with each one's kind (`get`, `put`, `remove`, `list`, `look`, `swap`, `settle`)
    /// and key.
    pub fn fail(&self, choose: impl FnMut(&str, &str) -> Option<StoreFault> + Send + 'static) {
        *self.choose.lock() = Some(Box::new(choose));
    }

    /// Ends that. What is late arrives now.
    pub fn heal(&self) {
        *self.choose.lock() = None;
        let mut state = self.state.lock();
        for (_, write) in std::mem::take(&mut state.late) {
            state.write(write, self.is_careless);
        }
    }

    /// Its keys.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        self.state.lock().values.keys().cloned().collect()
    }

    /// A copy of all values.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<String, Bytes> {
        let state = self.state.lock();
        let values = state.values.iter();
        values.map(|(k, (v, _))| (k.clone(), v.clone())).collect()
    }

    /// Goes back to an earlier state, or to any other.
    pub fn restore(&self, values: BTreeMap<String, Bytes>) {
        let mut state = self.state.lock();
        state.values.clear();
        for (key, value) in values {
            state.put(key, value);
        }
    }

    /// Changes a value behind the disk's back, or removes it.
    pub fn change(&self, key: &str, change: impl FnOnce(Vec<u8>) -> Option<Vec<u8>>) {
        let mut state = self.state.lock();
        let Some((value, _)) = state.values.remove(key) else {
            return;
        };
        if let Some(value) = change(value.to_vec()) {
            state.put(key.to_owned(), value.into());
        }
    }

    /// Does a request, unless it is to fail.
    fn act<T>(
        &self,
        kind: &str,
        key: &str,
        late: impl FnOnce() -> Option<Write>,
        act: impl FnOnce(&mut State) -> T,
    ) -> Result<T, DeviceError> {
        let fault = match &mut *self.choose.lock() {
            Some(choose) => choose(kind, key),
            None => None,
        };
        let mut state = self.state.lock();
        state.requests += 1;
        let now = state.requests;
        let (due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut state.late)
            .into_iter()
            .partition(|(at, _)| *at <= now);
        state.late = rest;
        for (_, write) in due {
            state.write(write, self.is_careless);
        }
        let failed = |why: &str| DeviceError::Unavailable(format!("memory: {kind} {key}: {why}"));
        match fault {
            None => Ok(act(&mut state)),
            Some(StoreFault::Refused) => Err(failed("refused")),
            Some(StoreFault::Strange) => Err(DeviceError::Corrupt("memory: strange".into())),
            Some(StoreFault::Denied) => Err(failed("403 Forbidden")),
            Some(StoreFault::LostAnswer) => {
                act(&mut state);
                Err(failed("no answer"))
            }
            Some(StoreFault::Late) => {
                let write = late();
                state
                    .late
                    .extend(write.map(|write| (now + fastrand::u64(LATE), write)));
                Err(failed("no answer yet"))
            }
        }
    }
}

impl State {
    fn put(&mut self, key: String, value: Bytes) -> u64 {
        self.tags += 1;
        self.values.insert(key, (value, self.tags));
        self.tags
    }

    fn swap(
        &mut self,
        key: String,
        was: Option<&Tag>,
        value: Bytes,
        careless: bool,
    ) -> Option<Tag> {
        let now = self.values.get(&key).map(|(_, tag)| of(*tag));
        (careless || now.as_ref() == was).then(|| of(self.put(key, value)))
    }

    fn write(&mut self, write: Write, careless: bool) {
        match write {
            Write::Put(key, value) => drop(self.put(key, value)),
            Write::Swap(key, was, value) => drop(self.swap(key, was.as_ref(), value, careless)),
            Write::Remove(key) => drop(self.values.remove(&key)),
        }
    }
}

fn of(tag: u64) -> Tag {
    Tag {
        etag: Some(tag.to_string()),
        version: None,
    }
}

impl ChunkStore for MemoryStore {
    fn get(&self, wanted: &[Wanted]) -> Each<Option<Bytes>> {
        let get = |wanted: &Wanted| {
            self.act(
                "get",
                &wanted.key,
                || None,
                |state| {
                    let (value, _) = state.values.get(&wanted.key)?;
                    let end = (wanted.range.end as usize).min(value.len());
                    Some(value.slice((wanted.range.start as usize).min(end)..end))
                },
            )
        };
        wanted.iter().map(get).collect()
    }

    fn put(&self, values: Vec<(String, Bytes)>) -> Each<()> {
        let put = |(key, value): (String, Bytes)| {
            let late = || Some(Write::Put(key.clone(), value.clone()));
            self.act("put", &key, late, |state| {
                state.put(key.clone(), value.clone());
            })
        };
        values.into_iter().map(put).collect()
    }

    fn remove(&self, keys: &[String]) -> Result<(), DeviceError> {
        let remove = |key: &String| {
            let late = || Some(Write::Remove(key.clone()));
            self.act("remove", key, late, |state| drop(state.values.remove(key)))
        };
        keys.iter().try_for_each(remove)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(&str)) -> Result<(), DeviceError> {
        self.act("list", prefix, || None, |_| ())?;
        let keys = self.keys();
        let some = keys.iter().filter(|key| key.starts_with(prefix));
        some.for_each(|key| each(key));
        Ok(())
    }

    fn look(&self, key: &str, most: usize) -> Result<Option<(Bytes, Tag)>, DeviceError> {
        let found = self.act("look", key, || None, |state| state.values.get(key).cloned())?;
        let found = found.filter(|(value, _)| value.len() <= most);
        Ok(found.map(|(value, tag)| (value, of(tag))))
    }

    fn swap(&self, key: &str, was: Option<&Tag>, value: Bytes) -> Result<Option<Tag>, DeviceError> {
        let late = || Some(Write::Swap(key.to_owned(), was.cloned(), value.clone()));
        if self.is_racy {
            let now = self.state.lock().values.get(key).map(|(_, tag)| of(*tag));
            if now.as_ref() != was {
                return Ok(None);
            }
            std::thread::sleep(RACE);
            return Ok(Some(of(self.state.lock().put(key.to_owned(), value))));
        }
        self.act("swap", key, late, |state| {
            state.swap(key.to_owned(), was, value.clone(), self.is_careless)
        })
    }

    fn no_tag(&self) -> Tag {
        of(0)
    }

    fn settle(&self) -> Result<(), DeviceError> {
        self.act("settle", "", || None, |_| ())
    }

    fn promise(&self) -> Promise {
        Promise {
            is_durable: true,
            note: None,
        }
    }

    fn object(&self) -> u32 {
        16 << 10
    }

    fn describe(&self) -> String {
        "memory".into()
    }
}
