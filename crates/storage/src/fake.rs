//! A directory in memory with simulated power failures: it keeps the current contents and the durable ones.

mod inode;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

use fastrand::Rng;
use parking_lot::Mutex;

use self::inode::Inode;
use super::{Access, Directory, File, Lock, check_name};

/// A directory in memory with a live and a durable image of every file and of the names.
///
/// Clones share the files. Every modifying call is a step, counted by [`FakeDirectory::steps`].
/// [`FakeDirectory::cut_power_at`] makes the power fail in one of them: from then on every call fails, and
/// [`FakeDirectory::after_crash`] returns a possible state of the directory afterwards. For what was not synced:
/// - each sector holds one of the contents it had since its file was last synced, independently of its neighbours;
/// - a file has one of the lengths it had since then;
/// - the names are as after one of the changes since the directory was last synced.
///
/// A [`File::sync`] that is made to fail behaves as on Linux: earlier writes are lost or not, by the seed, can still be
/// read, and no later sync restores them. Syncs can also be made to lie, see [`FakeDirectory::let_syncs_lie`].
#[derive(Clone)]
pub struct FakeDirectory {
    state: Arc<Mutex<State>>,
}

/// A step, as passed to [`FakeDirectory::set_faults`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Directory::create`], also when it only truncates.
    Create,
    /// [`Directory::rename`].
    Rename,
    /// [`Directory::remove`].
    Remove,
    /// [`Directory::sync`].
    SyncDirectory,
    /// [`File::write_at`].
    Write,
    /// [`File::set_len`].
    SetLen,
    /// [`File::punch_hole`].
    Punch,
    /// [`File::allocate`].
    Allocate,
    /// [`File::sync`].
    Sync,
    /// [`File::read_at`]: not a step, but it can be made to fail.
    Read,
}

type Faults = Box<dyn FnMut(Operation, &str) -> Option<io::ErrorKind> + Send>;

struct State {
    files: HashMap<u64, Inode>,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    /// The names after each change since the directory was last synced.
    name_steps: Vec<BTreeMap<String, u64>>,
    /// Lock holders by name; one for an exclusive lock.
    locks: HashMap<String, Vec<(Weak<()>, Lock)>>,
    next_id: u64,
    sector: u64,
    steps: u64,
    cut_at: Option<u64>,
    off: bool,
    capacity: Option<u64>,
    faults: Option<Faults>,
    /// Syncs succeed without making anything durable.
    syncs_lie: bool,
    rng: Rng,
}

fn power_is_off() -> io::Error {
    io::Error::other("the power is off")
}

impl Default for FakeDirectory {
    fn default() -> Self {
        Self::new(512, 0)
    }
}

impl FakeDirectory {
    /// An empty directory on a disk that writes sectors of `sector` bytes atomically (512 or 4096). `seed` decides what
    /// a failed sync loses.
    #[must_use]
    pub fn new(sector: u32, seed: u64) -> Self {
        Self {
            state: Arc::new(Mutex::new(State {
                files: HashMap::new(),
                names: BTreeMap::new(),
                durable_names: BTreeMap::new(),
                name_steps: Vec::new(),
                locks: HashMap::new(),
                next_id: 0,
                sector: u64::from(sector),
                steps: 0,
                cut_at: None,
                off: false,
                capacity: None,
                faults: None,
                syncs_lie: false,
                rng: Rng::with_seed(seed),
            })),
        }
    }

    /// Number of steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.state.lock().steps
    }

    /// Makes the power fail in step `n`, counted from zero as by [`FakeDirectory::steps`]. That step's writes count as
    /// not synced.
    pub fn cut_power_at(&self, n: u64) {
        self.state.lock().cut_at = Some(n);
    }

    /// Whether the power has failed.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.state.lock().off
    }

    /// Limits the bytes of all sectors that are written or reserved; beyond it, writes fail with `StorageFull` after
    /// writing the sectors that fit.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.state.lock().capacity = bytes;
    }

    /// Bytes of all sectors that are written or reserved.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.state.lock().used()
    }

    /// Injects failures: `faults` is called before each step, with the file's name (none for the directory). Replaces
    /// the previous setting.
    pub fn set_faults(
        &self,
        faults: impl FnMut(Operation, &str) -> Option<io::ErrorKind> + Send + 'static,
    ) {
        self.state.lock().faults = Some(Box::new(faults));
    }

    /// Ends the failures injected by [`FakeDirectory::set_faults`].
    pub fn clear_faults(&self) {
        self.state.lock().faults = None;
    }

    /// From now on, syncs of files and of the directory succeed without making anything durable, like a disk that
    /// acknowledges a flush and keeps its write cache. Only a power failure reveals it.
    pub fn let_syncs_lie(&self) {
        self.state.lock().syncs_lie = true;
    }

    /// A state of the directory that may be found after the power failure, chosen by `seed`. Open files and locks are
    /// gone.
    #[must_use]
    pub fn after_crash(&self, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let state = self.state.lock();
        // From losing everything to losing nothing: a fair coin per sector would only find mixtures.
        let keep = [0.0, 0.1, 0.5, 0.9, 1.0][rng.usize(0..5)];
        let names = match rng.usize(0..=state.name_steps.len()) {
            0 => &state.durable_names,
            step => &state.name_steps[step - 1],
        };
        let mut files = HashMap::new();
        for (name, id) in names {
            let image = state.files[id].after_crash(&mut rng, keep, state.sector);
            files.insert(*id, Inode::durable(name, image));
        }
        let after = Self::new(state.sector as u32, rng.u64(..));
        {
            let mut new = after.state.lock();
            new.files = files;
            new.names = names.clone();
            new.durable_names = names.clone();
            new.next_id = state.next_id;
        }
        after
    }

    /// A copy of the directory with everything synced: the state after a killed process. Locks are gone.
    #[must_use]
    pub fn after_kill(&self) -> Self {
        let state = self.state.lock();
        let after = Self::new(state.sector as u32, 0);
        {
            let mut new = after.state.lock();
            for (name, id) in &state.names {
                let live = state.files[id].live.clone();
                new.files.insert(*id, Inode::durable(name, live));
            }
            new.names = state.names.clone();
            new.durable_names = state.names.clone();
            new.next_id = state.next_id;
        }
        after
    }

    /// The contents of a file, for inspection.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.state.lock();
        let live = &state.files[state.names.get(name)?].live;
        let mut bytes = vec![0; live.length as usize];
        live.read(&mut bytes, 0, state.sector);
        Some(bytes)
    }

    /// Modifies the contents of a file, as [`FakeDirectory::put`] does. None if there is no such file.
    pub fn edit<R>(&self, name: &str, with: impl FnOnce(&mut Vec<u8>) -> R) -> Option<R> {
        let mut bytes = self.bytes(name)?;
        let result = with(&mut bytes);
        self.put(name, &bytes);
        Some(result)
    }

    /// Makes reads that touch a range of a file fail, until the file is put or created again; another file renamed to
    /// its name is unaffected.
    pub fn set_unreadable(&self, name: &str, range: Range<u64>) {
        let mut state = self.state.lock();
        let id = state.names.get(name).copied();
        if let Some(inode) = id.and_then(|id| state.files.get_mut(&id)) {
            inode.unreadable = Some(range);
        }
    }

    /// Places a file, durable at once, to damage or forge one.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        let sector = state.sector;
        let mut inode = Inode::default();
        inode.write(0, bytes, sector);
        state.files.insert(id, Inode::durable(name, inode.live));
        state.names.insert(name.to_owned(), id);
        state.durable_names.insert(name.to_owned(), id);
        for step in &mut state.name_steps {
            step.insert(name.to_owned(), id);
        }
    }
}

impl State {
    fn powered(&self) -> io::Result<()> {
        match self.off {
            true => Err(power_is_off()),
            false => Ok(()),
        }
    }

    fn fault(&mut self, operation: Operation, name: &str) -> io::Result<()> {
        match self.faults.as_mut().and_then(|f| f(operation, name)) {
            Some(kind) => Err(io::Error::new(kind, "a fault that was asked for")),
            None => Ok(()),
        }
    }

    /// Before each step: `true` if the power fails in it.
    fn step(&mut self, operation: Operation, name: &str) -> io::Result<bool> {
        self.powered()?;
        self.off = self.cut_at == Some(self.steps);
        self.steps += 1;
        self.fault(operation, name)?;
        Ok(self.off)
    }

    fn names_changed(&mut self) {
        self.name_steps.push(self.names.clone());
    }

    fn used(&self) -> u64 {
        let held = |f: &Inode| f.live.sectors.len() + f.reserved.len();
        let count: usize = self.names.values().map(|id| held(&self.files[id])).sum();
        count as u64 * self.sector
    }

    /// How many more sectors may be allocated.
    fn room(&self) -> u64 {
        match self.capacity {
            Some(capacity) => capacity.saturating_sub(self.used()) / self.sector,
            None => u64::MAX,
        }
    }
}

impl FakeDirectory {
    fn file(&self, id: u64, access: Access) -> Box<dyn File> {
        Box::new(FakeFile {
            state: Arc::clone(&self.state),
            id,
            access,
        })
    }
}

impl Directory for FakeDirectory {
    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        check_name(name)?;
        let mut state = self.state.lock();
        let cut = state.step(Operation::Create, name)?;
        let id = match state.names.get(name) {
            Some(id) => *id,
            None => {
                let id = state.next_id;
                state.next_id += 1;
                state.files.insert(id, Inode::named(name));
                state.names.insert(name.to_owned(), id);
                state.names_changed();
                id
            }
        };
        let sector = state.sector;
        if let Some(inode) = state.files.get_mut(&id)
            && inode.live.length > 0
        {
            inode.changes += 1;
            inode.clear(0, u64::MAX / 2, sector);
            inode.live.length = 0;
            inode.lengths.push(0);
        }
        match cut {
            true => Err(power_is_off()),
            false => Ok(self.file(id, Access::Write)),
        }
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>> {
        check_name(name)?;
        let state = self.state.lock();
        state.powered()?;
        let id = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.file(id, access))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        let mut state = self.state.lock();
        let cut = state.step(Operation::Rename, from)?;
        let id = state.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.names.insert(to.to_owned(), id);
        if let Some(inode) = state.files.get_mut(&id) {
            to.clone_into(&mut inode.name);
        }
        state.names_changed();
        match cut {
            true => Err(power_is_off()),
            false => Ok(()),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        let mut state = self.state.lock();
        let cut = state.step(Operation::Remove, name)?;
        state.names.remove(name).ok_or(io::ErrorKind::NotFound)?;
        state.names_changed();
        match cut {
            true => Err(power_is_off()),
            false => Ok(()),
        }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let state = self.state.lock();
        state.powered()?;
        Ok(state.names.keys().cloned().collect())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.step(Operation::SyncDirectory, "")? {
            return Err(power_is_off());
        }
        if !state.syncs_lie {
            state.durable_names = state.names.clone();
            state.name_steps.clear();
        }
        Ok(())
    }

    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>> {
        check_name(name)?;
        let mut state = self.state.lock();
        state.powered()?;
        let held = state.locks.entry(name.to_owned()).or_default();
        held.retain(|(holder, _)| holder.strong_count() > 0);
        let alone = |l: &Lock| *l == Lock::Exclusive;
        if held.iter().any(|(_, other)| alone(other)) || (alone(&lock) && !held.is_empty()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let holder = Arc::new(());
        held.push((Arc::downgrade(&holder), lock));
        Ok(Box::new(holder))
    }

    fn describe(&self, name: &str) -> String {
        format!("fake/{name}")
    }
}

struct FakeFile {
    state: Arc<Mutex<State>>,
    id: u64,
    access: Access,
}

impl FakeFile {
    /// Runs a step on the file; `f` receives how many sectors may be allocated.
    fn step(
        &self,
        operation: Operation,
        f: impl FnOnce(&mut Inode, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.access == Access::Read {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut state = self.state.lock();
        let name = state.files[&self.id].name.clone();
        let cut = state.step(operation, &name)?;
        let (sector, room) = (state.sector, state.room());
        let inode = state
            .files
            .get_mut(&self.id)
            .ok_or(io::ErrorKind::NotFound)?;
        inode.changes += 1;
        f(inode, sector, room)?;
        match cut {
            true => Err(power_is_off()),
            false => Ok(()),
        }
    }
}

impl File for FakeFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.state.lock();
        state.powered()?;
        let name = state.files[&self.id].name.clone();
        state.fault(Operation::Read, &name)?;
        let Inode {
            live, unreadable, ..
        } = &state.files[&self.id];
        let there = live.length.saturating_sub(offset);
        let count = there.min(buffer.len() as u64) as usize;
        let end = offset + buffer.len() as u64;
        if unreadable
            .as_ref()
            .is_some_and(|bad| offset < bad.end && end > bad.start)
        {
            return Err(io::Error::other("a bad sector"));
        }
        live.read(&mut buffer[..count], offset, state.sector);
        Ok(count)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.step(Operation::Write, |inode, sector, room| {
            let end = offset + data.len() as u64;
            let mut room = room;
            let held = |inode: &Inode, index: &u64| {
                inode.live.sectors.contains_key(index) || inode.reserved.contains(index)
            };
            for index in offset / sector..end.div_ceil(sector) {
                if held(inode, &index) {
                    continue;
                }
                if room == 0 {
                    let fits = (index * sector).saturating_sub(offset) as usize;
                    inode.write(offset, &data[..fits], sector);
                    return Err(io::ErrorKind::StorageFull.into());
                }
                room -= 1;
            }
            inode.write(offset, data, sector);
            Ok(())
        })
    }

    fn len(&self) -> io::Result<u64> {
        let state = self.state.lock();
        state.powered()?;
        Ok(state.files[&self.id].live.length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.step(Operation::SetLen, |inode, sector, _| {
            if length < inode.live.length {
                inode.clear(length, u64::MAX / 2, sector);
            }
            inode.live.length = length;
            inode.lengths.push(length);
            Ok(())
        })
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.step(Operation::Punch, |inode, sector, _| {
            inode.clear(offset, offset + length, sector);
            Ok(())
        })
    }

    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.step(Operation::Allocate, |inode, sector, room| {
            let mut room = room;
            for index in offset / sector..(offset + length).div_ceil(sector) {
                if inode.live.sectors.contains_key(&index) || inode.reserved.contains(&index) {
                    continue;
                }
                room = room.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
                inode.reserved.insert(index);
            }
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        let name = state.files[&self.id].name.clone();
        let cut = match state.step(Operation::Sync, &name) {
            Err(error) if !state.off => {
                let (mut rng, sector) = (state.rng.fork(), state.sector);
                if let Some(inode) = state.files.get_mut(&self.id) {
                    inode.fail_sync(&mut rng, sector);
                }
                return Err(error);
            }
            result => result?,
        };
        if cut {
            return Err(power_is_off());
        }
        if !state.syncs_lie
            && let Some(inode) = state.files.get_mut(&self.id)
        {
            inode.sync_pending();
        }
        Ok(())
    }
}
