//! A storage with a live and a durable image, a power switch, and a size.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::storage::{Storage, StorageFile};

/// Files in memory that behave like files on a disk whose power can fail.
///
/// Clones share the files. After [`cut_power_at`](Self::cut_power_at) took effect every call
/// fails; [`after_crash`](Self::after_crash) gives the storage as it could be found then.
#[derive(Clone, Default)]
pub struct SimStorage {
    state: Arc<Mutex<State>>,
}

/// An open file of a [`SimStorage`].
pub struct SimFile {
    state: Arc<Mutex<State>>,
    id: u64,
}

#[derive(Default)]
struct State {
    files: HashMap<u64, Data>,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    /// Name maps after each change since the last `sync_names`.
    name_steps: Vec<BTreeMap<String, u64>>,
    next_id: u64,
    /// Calls that change something.
    changes: u64,
    cut_at: Option<u64>,
    off: bool,
    capacity: Option<u64>,
}

#[derive(Default)]
struct Data {
    live: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Change>,
}

enum Change {
    Write(u64, Vec<u8>),
    Size(u64),
}

impl Change {
    fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Change::Write(offset, bytes) => {
                let at = *offset as usize;
                to.resize(to.len().max(at + bytes.len()), 0);
                to[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Change::Size(n) => to.resize(*n as usize, 0),
        }
    }
}

fn power_is_off() -> io::Error {
    io::Error::other("the power is off")
}

impl SimStorage {
    /// An empty storage of unlimited size.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// How many changing calls (writes, syncs, creations, ...) there were.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Lets the power fail during changing call number `n` (counted from zero, as
    /// [`changes`](Self::changes) counts).
    pub fn cut_power_at(&self, n: u64) {
        self.lock().cut_at = Some(n);
    }

    /// Limits the sum of all files' sizes; writes beyond it fail with `StorageFull`.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.lock().capacity = bytes;
    }

    /// The storage as it may be found after power came back: of what was not synced, any part of
    /// the writes, some of them torn, and the first few changes of names. `seed` chooses.
    #[must_use]
    pub fn after_crash(&self, seed: u64) -> SimStorage {
        let mut rng = Rng(seed);
        let state = self.lock();
        let step = rng.below(state.name_steps.len() as u64 + 1) as usize;
        let names = match step.checked_sub(1) {
            Some(i) => state.name_steps[i].clone(),
            None => state.durable_names.clone(),
        };
        let mut files = HashMap::new();
        for &id in names.values() {
            let data = &state.files[&id];
            let mut bytes = data.durable.clone();
            for change in &data.pending {
                match (rng.below(4), change) {
                    (0, _) => {}
                    (1, Change::Write(at, b)) => {
                        let n = rng.below(b.len() as u64 + 1) as usize;
                        Change::Write(*at, b[..n].to_vec()).apply(&mut bytes);
                    }
                    _ => change.apply(&mut bytes),
                }
            }
            let data = Data {
                live: bytes.clone(),
                durable: bytes,
                pending: Vec::new(),
            };
            files.insert(id, data);
        }
        let state = State {
            files,
            durable_names: names.clone(),
            names,
            next_id: state.next_id,
            ..State::default()
        };
        SimStorage {
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// The file's bytes, for a look or to damage them: what `with` does is durable at once.
    pub fn edit<R>(&self, name: &str, with: impl FnOnce(&mut Vec<u8>) -> R) -> Option<R> {
        let mut state = self.lock();
        let id = *state.names.get(name)?;
        let data = state.files.get_mut(&id)?;
        let result = with(&mut data.live);
        data.durable.clone_from(&data.live);
        data.pending.clear();
        Some(result)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn powered(&self) -> io::Result<()> {
        if self.off {
            Err(power_is_off())
        } else {
            Ok(())
        }
    }

    /// Before each change: `true` when it is the one in which the power fails.
    fn change(&mut self) -> io::Result<bool> {
        self.powered()?;
        self.off = self.cut_at == Some(self.changes);
        self.changes += 1;
        Ok(self.off)
    }

    fn names_changed(&mut self) {
        self.name_steps.push(self.names.clone());
    }

    fn used(&self) -> u64 {
        self.names
            .values()
            .map(|id| self.files[id].live.len() as u64)
            .sum()
    }
}

impl Storage for SimStorage {
    type File = SimFile;

    fn open(&self, name: &str) -> io::Result<SimFile> {
        let state = self.lock();
        state.powered()?;
        let id = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(SimFile {
            state: Arc::clone(&self.state),
            id,
        })
    }

    fn create(&self, name: &str) -> io::Result<SimFile> {
        let mut state = self.lock();
        let cut = state.change()?;
        let id = match state.names.get(name) {
            Some(&id) => id,
            None => {
                let id = state.next_id;
                state.next_id += 1;
                state.files.insert(id, Data::default());
                state.names.insert(name.to_owned(), id);
                state.names_changed();
                id
            }
        };
        if let Some(data) = state.files.get_mut(&id) {
            data.live.clear();
            data.pending.push(Change::Size(0));
        }
        if cut {
            return Err(power_is_off());
        }
        Ok(SimFile {
            state: Arc::clone(&self.state),
            id,
        })
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.lock();
        let cut = state.change()?;
        let id = state.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.names.insert(to.to_owned(), id);
        state.names_changed();
        if cut { Err(power_is_off()) } else { Ok(()) }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.lock();
        let cut = state.change()?;
        state.names.remove(name);
        state.names_changed();
        if cut { Err(power_is_off()) } else { Ok(()) }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let state = self.lock();
        state.powered()?;
        Ok(state.names.keys().cloned().collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.change()? {
            return Err(power_is_off());
        }
        state.durable_names = state.names.clone();
        state.name_steps.clear();
        Ok(())
    }
}

impl SimFile {
    fn with<R>(&self, f: impl FnOnce(&mut State, u64) -> R) -> R {
        f(&mut lock(&self.state), self.id)
    }

    fn apply(&self, change: Change) -> io::Result<()> {
        self.with(|state, id| {
            let cut = state.change()?;
            let capacity = state.capacity;
            let used = state.used();
            let data = state.files.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
            let end = match &change {
                Change::Write(at, b) => at + b.len() as u64,
                Change::Size(n) => *n,
            };
            let grown = end.saturating_sub(data.live.len() as u64);
            if grown > 0 && capacity.is_some_and(|c| used + grown > c) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            change.apply(&mut data.live);
            data.pending.push(change);
            if cut { Err(power_is_off()) } else { Ok(()) }
        })
    }
}

impl StorageFile for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.with(|state, id| {
            state.powered()?;
            let live = &state.files.get(&id).ok_or(io::ErrorKind::NotFound)?.live;
            let from = live.len().min(offset as usize);
            let n = buf.len().min(live.len() - from);
            buf[..n].copy_from_slice(&live[from..from + n]);
            Ok(n)
        })
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.apply(Change::Write(offset, buf.to_vec()))
    }

    fn size(&self) -> io::Result<u64> {
        self.with(|state, id| {
            state.powered()?;
            Ok(state.files.get(&id).map_or(0, |d| d.live.len() as u64))
        })
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.apply(Change::Size(size))
    }

    fn sync(&self) -> io::Result<()> {
        self.with(|state, id| {
            if state.change()? {
                return Err(power_is_off());
            }
            let data = state.files.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
            data.durable.clone_from(&data.live);
            data.pending.clear();
            Ok(())
        })
    }
}

/// A small generator, so that the crate needs none outside its tests.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        (z ^ (z >> 32)) % n
    }
}
