//! Machines that move between sites: which site may run one, and the move that is under way.
//!
//! Each machine has one small file, `machines/NAME` (`docs/format/machine.md`), and each change of it is atomic and
//! durable before anything is done that relies on it. A move has two commit points. The source **commits**: from then on
//! its copy is frozen, whatever happens. The destination then **takes** the machine or **refuses** it, once and for good:
//! it runs there, or it is thawed at the source. Between the two nobody may run it, and a site that comes back asks.
//! (`r3map §1.4.6` has one message instead, which is not idempotent.)

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use drover_core::ImageName;
use drover_net::{Code, Refusal, decode, encode};
use drover_storage::Envelope;
use serde::{Deserialize, Serialize};

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRMCH\0",
    version: 1,
    max_bytes: 256 << 10,
};

/// Upper bound on the disks of a machine.
pub const MAX_DISKS: usize = 32;

/// Upper bound on machines of one other site that never came here, and of which it is remembered that they were refused.
pub const MAX_REFUSED: usize = 64;

/// Upper bound on the decisions about earlier moves that are remembered.
const MAX_DECIDED: usize = 64;

/// How many times a machine has moved.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Generation(pub u64);

impl Generation {
    /// The generation after one more move.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// Identifies a machine over all its moves: random, chosen when it first moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seed(pub [u8; 16]);

/// Identifies one move: random, chosen by its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

/// The other site of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Other {
    /// Its key.
    pub key: [u8; 32],
    /// Its name, for messages.
    pub name: String,
}

/// Which site may run a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// This one.
    Here,
    /// Another one.
    There(Other),
}

/// The move that is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Move {
    /// It is copied to another site and may still run here.
    Leaving(Token, Other),
    /// It is frozen here: the other site takes it or refuses it.
    Committed(Token, Other),
    /// It is received from another site, where it has this generation, and may not run here.
    Coming(Token, Other, Generation),
    /// It was taken, and is to be started here.
    Taken(Token, Other),
    /// It was taken, and runs here; some of it is at the other site still, or nowhere if the process that ran it has died.
    Partial(Token, Other),
}

/// What a site knows of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Its seed.
    pub seed: Seed,
    /// How many times it had moved when it was last taken by the site that has it.
    pub generation: Generation,
    /// The images of its disks at this site, in the machine's order.
    pub disks: Vec<ImageName>,
    /// Which site may run it.
    pub owner: Owner,
    /// The move that is under way, if any.
    pub under_way: Option<Move>,
    /// The hypervisor that runs it at this site, as the command that last moved it from here was given it.
    pub hypervisor: Option<String>,
    /// Its name at the other site, as that command was given it.
    pub name_there: Option<ImageName>,
    /// Moves to this site that were decided, oldest first, and whether the machine was taken.
    decided: Vec<(Token, bool)>,
}

/// What became of a move, as its destination knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    /// The destination took the machine.
    Taken,
    /// The destination refused it, and will never take it by this move.
    Refused,
    /// The destination has not decided.
    Open,
    /// The destination knows nothing of this move: only a person can tell.
    Unknown,
}

impl MachineRecord {
    /// A machine that runs at this site and never moved.
    #[must_use]
    pub fn new(seed: Seed, disks: Vec<ImageName>) -> Self {
        Self {
            seed,
            generation: Generation::default(),
            disks,
            owner: Owner::Here,
            under_way: None,
            hypervisor: None,
            name_there: None,
            decided: Vec::new(),
        }
    }

    /// What this site knows of a machine that it is about to receive for the first time; it belongs to the other site.
    #[must_use]
    pub fn foreign(seed: Seed, generation: Generation, from: Other) -> Self {
        Self {
            seed,
            generation,
            disks: Vec::new(),
            owner: Owner::There(from),
            under_way: None,
            hypervisor: None,
            name_there: None,
            decided: Vec::new(),
        }
    }

    /// Whether it may run here, and its disks may be written.
    #[must_use]
    pub fn may_run(&self) -> bool {
        self.owner == Owner::Here && !matches!(self.under_way, Some(Move::Committed(..)))
    }

    /// Whether it has ever been at this site.
    #[must_use]
    pub fn was_here(&self) -> bool {
        let has_come = self.decided.iter().any(|(_, taken)| *taken);
        self.owner == Owner::Here || self.hypervisor.is_some() || has_come
    }

    /// Whether its move from here is committed: only the other site can tell who runs it.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        matches!(self.under_way, Some(Move::Committed(..)))
    }

    /// The source begins a move. The move that is under way already is continued if it goes to the same site.
    ///
    /// # Errors
    /// [`Code::Held`]: it is elsewhere, or on its way to or from another site.
    pub fn leave(&self, token: Token, to: Other) -> Result<Self, Refusal> {
        let held = |text: String| Err(Refusal::new(Code::Held, text));
        match (&self.owner, &self.under_way) {
            (_, Some(Move::Leaving(_, other) | Move::Committed(_, other)))
                if other.key == to.key =>
            {
                Ok(self.clone())
            }
            (_, Some(Move::Leaving(_, other) | Move::Committed(_, other))) => {
                held(format!("it is being moved to {}", other.name))
            }
            (_, Some(Move::Coming(_, other, _))) => {
                held(format!("it is being received from {}", other.name))
            }
            (_, Some(Move::Taken(_, other))) => {
                held(format!("it came from {} and is being started", other.name))
            }
            (_, Some(Move::Partial(_, other))) => {
                held(format!("not all of it has come from {} yet", other.name))
            }
            (Owner::There(other), None) => held(format!("it runs at {}", other.name)),
            (Owner::Here, None) => Ok(Self {
                under_way: Some(Move::Leaving(token, to)),
                ..self.clone()
            }),
        }
    }

    /// The source freezes its copy and leaves the decision to the destination.
    #[must_use]
    pub fn commit(&self, token: Token) -> Option<Self> {
        match &self.under_way {
            Some(Move::Leaving(own, to)) if *own == token => Some(Self {
                under_way: Some(Move::Committed(token, to.clone())),
                ..self.clone()
            }),
            Some(Move::Committed(own, _)) if *own == token => Some(self.clone()),
            _ => None,
        }
    }

    /// The destination took it: the source's copy is an old one.
    #[must_use]
    pub fn gone(&self, token: Token) -> Option<Self> {
        match &self.under_way {
            Some(Move::Committed(own, to)) if *own == token => Some(Self {
                generation: self.generation.next(),
                owner: Owner::There(to.clone()),
                under_way: None,
                ..self.clone()
            }),
            _ => None,
        }
    }

    /// The destination refused it, or a person knows that it does not run there: the source's copy is thawed, and the move
    /// is as it was before it was committed.
    #[must_use]
    pub fn thaw(&self, token: Token) -> Option<Self> {
        match &self.under_way {
            Some(Move::Committed(own, to)) if *own == token => Some(Self {
                under_way: Some(Move::Leaving(token, to.clone())),
                ..self.clone()
            }),
            _ => None,
        }
    }

    /// The source gives up a move that is not committed.
    #[must_use]
    pub fn stay(&self, token: Token) -> Option<Self> {
        match &self.under_way {
            Some(Move::Leaving(own, _)) if *own == token => Some(Self {
                under_way: None,
                ..self.clone()
            }),
            _ => None,
        }
    }

    /// The destination begins to receive it, with images of these names for its disks. What it receives has the generation
    /// after `generation`.
    ///
    /// # Errors
    /// [`Code::Held`]: it is here, or being received by another move; [`Code::Denied`]: another machine of that name, an
    /// older generation than the one known here, or a move that was decided. What was never here does not keep its name.
    pub fn receive(
        &self,
        token: Token,
        seed: Seed,
        generation: Generation,
        from: Other,
        disks: Vec<ImageName>,
    ) -> Result<Self, Refusal> {
        let denied = |text: &str| Err(Refusal::new(Code::Denied, text));
        let held = |text: &str| Err(Refusal::new(Code::Held, text));
        if self.decided.iter().any(|(known, _)| *known == token) {
            return denied("that move is over");
        }
        if self.seed != seed {
            if self.was_here() {
                return denied("another machine has that name here; move it under another name");
            }
            // Of a machine that never came here nothing but its moves is known.
            let given_up = match &self.under_way {
                Some(Move::Coming(known, other, _)) if other.key == from.key => self.refuse(*known),
                Some(_) => return held("another machine of that name is being received here"),
                None => None,
            };
            let mut new = Self::foreign(seed, generation, from.clone());
            new.decided = given_up.unwrap_or_else(|| self.clone()).decided;
            return new.receive(token, seed, generation, from, disks);
        }
        match &self.under_way {
            Some(Move::Coming(known, other, _)) if *known == token && other.key == from.key => {
                return Ok(self.clone());
            }
            // Its source begins one move at a time: it has given up the other one.
            Some(Move::Coming(known, other, _)) if other.key == from.key => {
                let refused = self.refuse(*known).unwrap_or_else(|| self.clone());
                return refused.receive(token, seed, generation, from, disks);
            }
            Some(Move::Coming(..)) => return held("it is being received here from another site"),
            Some(Move::Leaving(..) | Move::Committed(..)) => {
                return held("it is being moved from here");
            }
            Some(Move::Taken(..) | Move::Partial(..)) | None => {}
        }
        if self.owner == Owner::Here {
            return held("it runs here already: two machines of one origin");
        }
        if generation < self.generation {
            return denied("it has moved on since that copy was made: this is an old copy of it");
        }
        Ok(Self {
            disks,
            under_way: Some(Move::Coming(token, from, generation)),
            ..self.clone()
        })
    }

    /// Whether the machine came here by this move, and has not left since.
    #[must_use]
    pub fn came_by(&self, token: Token) -> bool {
        self.owner == Owner::Here && self.decided.last() == Some(&(token, true))
    }

    /// What became of a move to this site.
    #[must_use]
    pub fn decision(&self, token: Token) -> Decision {
        if matches!(&self.under_way, Some(Move::Coming(own, ..)) if *own == token) {
            return Decision::Open;
        }
        let known = self.decided.iter().find(|(known, _)| *known == token);
        match known {
            Some((_, true)) => Decision::Taken,
            Some((_, false)) => Decision::Refused,
            None => Decision::Unknown,
        }
    }

    /// The destination takes the machine, which its source has committed, and is to start it.
    #[must_use]
    pub fn take(&self, token: Token) -> Option<Self> {
        let mut taken = self.decide(token, true)?;
        let Some(Move::Coming(token, from, generation)) = &self.under_way else {
            return None;
        };
        taken.generation = generation.next();
        taken.owner = Owner::Here;
        taken.under_way = Some(Move::Taken(*token, from.clone()));
        Some(taken)
    }

    /// As [`Self::take`], of one that runs before all of it is there. [`Self::whole`] follows.
    #[must_use]
    pub fn take_part(&self, token: Token) -> Option<Self> {
        let mut taken = self.take(token)?;
        if let Some(Move::Taken(token, from)) = taken.under_way {
            taken.under_way = Some(Move::Partial(token, from));
        }
        Some(taken)
    }

    /// Whether it was taken, and not all of it had come.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        matches!(self.under_way, Some(Move::Partial(..)))
    }

    /// All is there of what was taken before that, and durable.
    #[must_use]
    pub fn whole(&self, token: Token) -> Option<Self> {
        match &self.under_way {
            Some(Move::Partial(own, from)) if *own == token => Some(Self {
                under_way: Some(Move::Taken(token, from.clone())),
                ..self.clone()
            }),
            _ => None,
        }
    }

    /// The destination has started the machine that it took.
    #[must_use]
    pub fn started(&self, token: Token) -> Option<Self> {
        match &self.under_way {
            Some(Move::Taken(own, _)) if *own == token => Some(Self {
                under_way: None,
                ..self.clone()
            }),
            _ => None,
        }
    }

    /// The destination refuses the machine for good.
    #[must_use]
    pub fn refuse(&self, token: Token) -> Option<Self> {
        self.decide(token, false)
    }

    fn decide(&self, token: Token, taken: bool) -> Option<Self> {
        if self.decision(token) != Decision::Open {
            return None;
        }
        let mut decided = self.clone();
        decided.under_way = None;
        decided.decided.push((token, taken));
        if decided.decided.len() > MAX_DECIDED {
            decided.decided.remove(0);
        }
        Some(decided)
    }
}

/// The machines of a site, by name; names have the rules of images' names.
#[derive(Clone, Debug)]
pub struct Machines {
    directory: PathBuf,
}

/// Keeps other processes from changing a machine. Its file is removed with it, where nothing is known of the machine.
#[derive(Debug)]
pub struct MachineLock {
    file: File,
    path: PathBuf,
    record: PathBuf,
    /// See [`Machines::ask_to_stop`].
    stop: PathBuf,
}

impl Drop for MachineLock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.stop);
        if matches!(self.record.try_exists(), Ok(false)) {
            // Whoever has it open looks whether it is still there.
            let _ = std::fs::remove_file(&self.path);
        }
        // A child that was just forked may have the file open too.
        let _ = self.file.unlock();
    }
}

impl Machines {
    /// The machines in a directory, which need not exist.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What is known of a machine.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged: then nobody knows who may run it.
    pub fn load(&self, name: &ImageName) -> Result<Option<MachineRecord>, Refusal> {
        let path = self.directory.join(name.as_str());
        let wrong = |code, why: &dyn std::fmt::Display| {
            Refusal::new(code, format!("the record of the machine {name}: {why}"))
        };
        let bytes = FORMAT.read(&path).map_err(|e| wrong(Code::Io, &e))?;
        let Some(bytes) = bytes else {
            return Ok(None);
        };
        let body = FORMAT.open(&bytes).map_err(|e| wrong(Code::Corrupt, &e))?;
        let machine: MachineRecord = decode(body).map_err(|e| wrong(Code::Corrupt, &e))?;
        Ok(Some(machine))
    }

    /// Whether a machine may run here, as far as its record can be read. One without a record may.
    #[must_use]
    pub fn may_run(&self, name: &ImageName) -> bool {
        let known = self.load(name);
        known.is_ok_and(|known| known.is_none_or(|known| known.may_run()))
    }

    /// Replaces what is known of a machine; durable when it returns.
    ///
    /// # Errors
    /// When it cannot be written; then the former record remains.
    pub fn store(&self, name: &ImageName, machine: &MachineRecord) -> Result<(), Refusal> {
        let write = || {
            drover_storage::make_private_dir(&self.directory)?;
            FORMAT.write(&self.directory.join(name.as_str()), &encode(machine))
        };
        write().map_err(|e| {
            let text = format!("cannot write the record of the machine {name}: {e}");
            Refusal::new(Code::Io, text)
        })
    }

    /// Forgets a machine.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn remove(&self, name: &ImageName) -> io::Result<()> {
        let path = self.directory.join(name.as_str());
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(()) => drover_storage::sync_parent(&path),
        }
    }

    /// The names of all machines, sorted.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn names(&self) -> io::Result<Vec<ImageName>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            names.extend(name.to_str().and_then(|name| ImageName::new(name).ok()));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Takes the lock of a machine until the value is dropped; `None` when another process has it.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn lock(&self, name: &ImageName) -> io::Result<Option<MachineLock>> {
        drover_storage::make_private_dir(&self.directory)?;
        let path = self.directory.join(format!(".{name}.lock"));
        loop {
            let file = drover_storage::create_private(&path)?;
            match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
            // A former holder may have removed it meanwhile.
            match std::fs::metadata(&path) {
                Ok(there) if there.ino() == file.metadata()?.ino() => {}
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => continue,
            }
            file.set_len(0)?;
            let record = self.directory.join(name.as_str());
            let stop = self.stop_file(name);
            return Ok(Some(MachineLock {
                file,
                path,
                record,
                stop,
            }));
        }
    }

    /// Forgets moves to this site of machines that were never here, when they are over: for each site that they would have
    /// come from, all but the last [`MAX_REFUSED`]. What was decided about those is not known any more.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn forget_refused(&self) -> io::Result<()> {
        let is_refused = |record: &MachineRecord| record.under_way.is_none() && !record.was_here();
        let load = |name: &ImageName| self.load(name).ok().flatten().filter(is_refused);
        let mut refused: HashMap<[u8; 32], Vec<(SystemTime, ImageName)>> = HashMap::new();
        for name in self.names()? {
            let Some(record) = load(&name) else { continue };
            let Owner::There(from) = record.owner else {
                continue;
            };
            // It may be forgotten meanwhile.
            if let Ok(about) = std::fs::metadata(self.directory.join(name.as_str())) {
                let of = refused.entry(from.key).or_default();
                of.push((about.modified()?, name));
            }
        }
        for mut of in refused.into_values() {
            of.sort();
            let over = of.len().saturating_sub(MAX_REFUSED);
            for (_, name) in of.drain(..over) {
                let lock = self.lock(&name)?;
                if lock.is_some() && load(&name).is_some() {
                    self.remove(&name)?;
                }
            }
        }
        Ok(())
    }

    /// The process that moves a machine from here: it holds the lock, and has signed it.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn mover(&self, name: &ImageName) -> io::Result<Option<i32>> {
        let path = self.directory.join(format!(".{name}.lock"));
        let mut file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared) {
            Ok(()) => return Ok(None),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e.into()),
        }
        let mut text = String::new();
        Read::by_ref(&mut file).take(20).read_to_string(&mut text)?;
        Ok(text.parse().ok())
    }

    /// Asks the process that moves a machine from here ([`Self::mover`]) to stop doing that. It may move others at the same time,
    /// which go on.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn ask_to_stop(&self, name: &ImageName) -> io::Result<()> {
        drover_storage::create_private(&self.stop_file(name)).map(drop)
    }

    /// Whether this process, which moves a machine, was asked to stop that.
    #[must_use]
    pub fn is_asked_to_stop(&self, name: &ImageName) -> bool {
        // Without the lock, another process was asked.
        let is_mover = || {
            let mover = self.mover(name).ok().flatten();
            mover.and_then(|mover| u32::try_from(mover).ok()) == Some(std::process::id())
        };
        self.stop_file(name).exists() && is_mover()
    }

    fn stop_file(&self, name: &ImageName) -> PathBuf {
        self.directory.join(format!(".{name}.stop"))
    }
}

impl MachineLock {
    /// Names this process as the one that moves the machine from here. What an earlier one was asked does not count.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn sign(&mut self) -> io::Result<()> {
        match std::fs::remove_file(&self.stop) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.file
            .write_all(std::process::id().to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests;
