//! Machines that move between sites: which site may run one, and the move that is under way.
//!
//! Each machine has one small file, `machines/NAME` (`docs/format/machine.md`), and each change of it is atomic and
//! durable before anything is done that relies on it. A move has two commit points. The source **commits**: from then on
//! its copy is frozen, whatever happens. The destination then **takes** the machine or **refuses** it, once and for good:
//! it runs there, or it is thawed at the source. Between the two nobody may run it, and a site that comes back asks.
//! (`r3map §1.4.6` has one message instead, which is not idempotent.)

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

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
    fn was_here(&self) -> bool {
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
            Some(Move::Taken(..)) | None => {}
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

/// Keeps other processes from changing a machine.
#[derive(Debug)]
pub struct MachineLock(File);

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
        let file = drover_storage::create_private(&path)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                file.set_len(0)?;
                Ok(Some(MachineLock(file)))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
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
}

impl MachineLock {
    /// Names this process as the one that moves the machine from here.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn sign(&mut self) -> io::Result<()> {
        self.0.write_all(std::process::id().to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Token = Token([1; 16]);
    const LATER: Token = Token([2; 16]);
    const SEED: Seed = Seed([3; 16]);

    fn other(n: u8) -> Other {
        Other {
            key: [n; 32],
            name: format!("site{n}"),
        }
    }

    fn name() -> ImageName {
        ImageName::new("web").unwrap()
    }

    #[test]
    fn a_move_there_and_back() {
        let home = MachineRecord::new(SEED, vec![name()]);
        let leaving = home.leave(TOKEN, other(2)).unwrap();
        assert!(leaving.may_run());
        let none = MachineRecord::foreign(SEED, Generation(0), other(1));
        let coming = none
            .receive(TOKEN, SEED, Generation(0), other(1), vec![name()])
            .unwrap();
        assert!(!coming.may_run() && coming.decision(TOKEN) == Decision::Open);
        let committed = leaving.commit(TOKEN).unwrap();
        assert!(!committed.may_run());
        let there = coming.take(TOKEN).unwrap();
        assert!(there.may_run() && there.decision(TOKEN) == Decision::Taken);
        assert_eq!(there.generation, Generation(1));
        let gone = committed.gone(TOKEN).unwrap();
        assert!(!gone.may_run() && gone.generation == Generation(1));

        assert_eq!(there.leave(LATER, other(1)).unwrap_err().code, Code::Held);
        let there = there.started(TOKEN).unwrap();
        let back = there.leave(LATER, other(1)).unwrap();
        let home = gone
            .receive(LATER, SEED, Generation(1), other(2), vec![name()])
            .unwrap();
        let back = back.commit(LATER).unwrap();
        let home = home.take(LATER).unwrap();
        assert!(home.may_run() && home.generation == Generation(2));
        assert!(!back.gone(LATER).unwrap().may_run());
    }

    #[test]
    fn a_decision_stands() {
        let none = MachineRecord::foreign(SEED, Generation(0), other(1));
        let coming = none
            .receive(TOKEN, SEED, Generation(0), other(1), vec![name()])
            .unwrap();
        let refused = coming.refuse(TOKEN).unwrap();
        assert_eq!(refused.decision(TOKEN), Decision::Refused);
        assert_eq!((refused.take(TOKEN), refused.refuse(TOKEN)), (None, None));
        let again = refused.receive(TOKEN, SEED, Generation(0), other(1), vec![name()]);
        assert_eq!(again.unwrap_err().code, Code::Denied);
        let coming = refused
            .receive(LATER, SEED, Generation(0), other(1), vec![name()])
            .unwrap();
        let taken = coming.take(LATER).unwrap();
        assert_eq!(taken.decision(LATER), Decision::Taken);
        assert_eq!(taken.refuse(LATER), None);
        assert_eq!(taken.decision(Token([9; 16])), Decision::Unknown);
    }

    #[test]
    fn a_machine_that_never_came_keeps_neither_name_nor_generation() {
        let known = MachineRecord::foreign(SEED, Generation(0), other(1));
        let from = |machine: &MachineRecord, token, seed: u8, at, n| {
            machine.receive(
                token,
                Seed([seed; 16]),
                Generation(at),
                other(n),
                vec![name()],
            )
        };
        // One that says that it has moved for ever so often, and is not taken.
        let liar = from(&known, TOKEN, 3, u64::MAX, 1).unwrap();
        let refused = liar.refuse(TOKEN).unwrap();
        assert_eq!(refused.generation, Generation(0));
        let honest = from(&refused, LATER, 3, 0, 1).unwrap();
        assert_eq!(honest.take(LATER).unwrap().generation, Generation(1));
        // Another machine of that name, after it and from another site.
        let coming = from(&refused, LATER, 4, 0, 2).unwrap();
        assert_eq!(coming.seed, Seed([4; 16]));
        assert_eq!(coming.decision(TOKEN), Decision::Refused, "not forgotten");
        let code = |got: Result<MachineRecord, Refusal>| got.unwrap_err().code;
        let third = Token([5; 16]);
        assert_eq!(code(from(&coming, third, 5, 0, 3)), Code::Held);
        assert_eq!(code(from(&coming, TOKEN, 4, 0, 2)), Code::Denied);
        // The same site begins with a new machine: it has given up the other.
        let newer = from(&coming, third, 5, 0, 2).unwrap();
        assert_eq!(newer.decision(LATER), Decision::Refused);
        // One that came keeps it, also when it has left.
        let here = newer.take(third).unwrap().started(third).unwrap();
        assert_eq!(code(from(&here, Token([6; 16]), 4, 0, 2)), Code::Denied);
        let left = here.leave(LATER, other(2)).unwrap().commit(LATER).unwrap();
        let left = left.gone(LATER).unwrap();
        assert_eq!(code(from(&left, Token([6; 16]), 4, 9, 2)), Code::Denied);
    }

    #[test]
    fn a_peer_that_is_given_another_name_goes_on() {
        let renamed = |n| Other {
            name: "renamed".into(),
            ..other(n)
        };
        let here = MachineRecord::new(SEED, vec![name()]);
        let leaving = here.leave(TOKEN, other(2)).unwrap();
        let committed = leaving.commit(TOKEN).unwrap();
        assert_eq!(committed.leave(LATER, renamed(2)).unwrap(), committed);
        let none = MachineRecord::foreign(SEED, Generation(0), other(1));
        let receive = |machine: &MachineRecord, from| {
            machine.receive(TOKEN, SEED, Generation(0), from, vec![name()])
        };
        let coming = receive(&none, other(1)).unwrap();
        assert_eq!(receive(&coming, renamed(1)).unwrap(), coming);
    }

    #[test]
    fn two_machines_of_one_origin_are_found() {
        let here = MachineRecord::new(SEED, vec![name()]);
        let e = here.receive(TOKEN, SEED, Generation(0), other(2), vec![name()]);
        assert_eq!(e.unwrap_err().code, Code::Held);
        let e = here.receive(TOKEN, Seed([4; 16]), Generation(0), other(2), vec![name()]);
        assert_eq!(e.unwrap_err().code, Code::Denied);
        let old = MachineRecord::foreign(SEED, Generation(5), other(1));
        let e = old.receive(TOKEN, SEED, Generation(4), other(2), vec![name()]);
        assert_eq!(e.unwrap_err().code, Code::Denied);
        let leaving = here.leave(TOKEN, other(2)).unwrap();
        assert_eq!(leaving.leave(LATER, other(3)).unwrap_err().code, Code::Held);
        assert_eq!(leaving.leave(LATER, other(2)).unwrap(), leaving);
        assert_eq!(leaving.commit(LATER), None);
    }

    #[test]
    fn a_record_is_read_back_or_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let machines = Machines::new(tmp.path().join("machines"));
        assert_eq!(machines.load(&name()).unwrap(), None);
        assert!(machines.names().unwrap().is_empty());
        let machine = MachineRecord::new(SEED, vec![name()]);
        machines.store(&name(), &machine).unwrap();
        assert_eq!(machines.load(&name()).unwrap(), Some(machine));
        let lock = machines.lock(&name()).unwrap();
        assert!(lock.is_some() && machines.lock(&name()).unwrap().is_none());
        drop(lock);
        assert!(machines.lock(&name()).unwrap().is_some());
        assert_eq!(machines.names().unwrap(), [name()]);
        let path = tmp.path().join("machines/web");
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(machines.load(&name()).unwrap_err().code, Code::Corrupt);
        }
        machines.remove(&name()).unwrap();
        assert_eq!(machines.load(&name()).unwrap(), None);
    }
}
