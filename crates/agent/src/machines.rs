//! Machines and disks that move between sites: what is known of them, and requests about them.
//!
//! A disk of a program has a record like a machine's, under the name of its image at this site.

use drover_core::ImageName;
use drover_migrate::protocol::Kind;
use drover_net::{Code, PeerKey, Refusal, request};
use drover_store::ImageRecord;
use drover_store::lease::MountId;
use drover_store::machine::{MachineRecord, Machines, Move, Owner};
use serde::{Deserialize, Serialize};

use crate::audit::Migration;
use crate::error::{Error, Result};
use crate::home::Home;
use crate::remote::Call;
use crate::text::clean;

/// Request: close the disks of a machine that has left this site, or make what was written to a disk that has left part of its
/// image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CloseMachine {
    /// Which of the two.
    pub kind: Kind,
    /// Its name.
    pub name: ImageName,
}
request!(CloseMachine: "machine.close", Manage, () => ());

/// Request: give up a move to this site, see [`drover_migrate::Moves::give_up`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RefuseMachine {
    /// Whether it is a machine or a disk.
    pub kind: Kind,
    /// Its name.
    pub name: ImageName,
}
request!(RefuseMachine: "machine.refuse", Manage, () => ());

/// Request: end the move of a machine that runs here, and whose source is lost for good with some of its disks, see
/// [`drover_migrate::Moves::break_off`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BreakMachine {
    /// Its name.
    pub name: ImageName,
}
request!(BreakMachine: "machine.break", Manage, () => KeptMachine);

/// The answer to [`BreakMachine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptMachine {
    /// Bytes of its disks that are lost; `None` if that is not known.
    pub lost_bytes: Option<u64>,
    /// Whether it runs.
    pub runs: bool,
}

/// Request: the generations of a disk of a machine that this site serves, or that has left it; `None` if they are not known.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GetGenerations {
    /// The machine's name.
    pub name: ImageName,
    /// The disk, by its place in the machine.
    pub disk: u32,
}
request!(GetGenerations: "machine.generations", Manage, () => Option<Vec<u8>>);

/// Request: how many bytes of the disks of a machine that runs here have not arrived; `None` if its disks are not open.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GetMissing {
    /// The machine's name.
    pub name: ImageName,
}
request!(GetMissing: "machine.missing", Manage, () => Option<u64>);

/// Request: count a migration from this site that has ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CountMigration {
    /// What it took; `None` if the machine stayed here.
    pub moved: Option<Migration>,
}
request!(CountMigration: "machine.count", Manage, () => ());

/// The mount of a disk of a machine, or of a disk that comes: the same after a restart, so that it gets its write lease back. No
/// other machine has it, whatever seed and disks its source claims.
pub(crate) fn mount_id(
    kind: Kind,
    name: &ImageName,
    record: &MachineRecord,
    index: usize,
) -> MountId {
    let mut hasher = blake3::Hasher::new_derive_key(match kind {
        Kind::Machine => "drover machine disk mount",
        Kind::Disk => "drover moved disk mount",
    });
    hasher.update(&record.seed.0);
    hasher.update(&(index as u64).to_le_bytes());
    hasher.update(name.as_str().as_bytes());
    let mut mount = [0; 16];
    mount.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    MountId(mount)
}

/// What a record says of the image that its disk was when it last moved from here: another one may have its name since.
pub(crate) fn disk_of(image: &ImageRecord) -> String {
    format!("disk:{}@{}", image.name, image.id.0)
}

/// Forgets what is known of the disk that an image was, which has been removed, unless a move is under way.
pub(crate) fn forget_disk(disks: &Machines, name: &ImageName) {
    let forgotten = match (disks.lock(name), disks.load(name)) {
        (Ok(Some(_lock)), Ok(Some(record))) if record.under_way.is_none() => disks.remove(name),
        _ => return,
    };
    if let Err(e) = forgotten {
        tracing::warn!(image = %name, "the record of its moves is left: {e}");
    }
}

/// Whether an image may be written here: not if it is a disk that has moved, or is about to arrive, but by the move itself.
///
/// # Errors
/// [`Code::Held`], with the way out.
pub(crate) fn may_be_written(
    disks: &Machines,
    name: &ImageName,
    mount: Option<MountId>,
) -> Result<(), Refusal> {
    let Some(record) = disks.load(name)?.filter(|record| !record.may_run()) else {
        return Ok(());
    };
    // A move to this site that was given up says nothing of an image that got its name since.
    if record.under_way.is_none() && !record.was_here() {
        return Ok(());
    }
    if mount == Some(mount_id(Kind::Disk, name, &record, 0)) {
        return Ok(());
    }
    let text = match (&record.under_way, &record.owner) {
        (Some(Move::Committed(_, to)), _) => {
            let to = clean(&to.name);
            format!(
                "{name} is being handed over to {to}, which may have it: `drover move {name} {to}` finds out"
            )
        }
        (Some(Move::Coming(_, from, _)), _) => {
            format!("{name} is being moved here from {}", clean(&from.name))
        }
        (_, Owner::There(at)) => {
            let at = clean(&at.name);
            format!(
                "{name} has moved to {at}, and this is an old copy: move it back, mount it read-only, or, if the other copy is lost, thaw this one with `drover mounts break {name}` at the site that has it"
            )
        }
        (_, Owner::Here) => return Ok(()),
    };
    Err(Refusal::new(Code::Held, text))
}

/// A person knows that an image that has moved, or was handed over, is to be used here: forgets its move. Whether there was
/// one.
///
/// # Errors
/// When a command moves it, or its record cannot be removed.
pub(crate) fn forget_move(disks: &Machines, name: &ImageName) -> Result<bool, Refusal> {
    let failed = |e: &dyn std::fmt::Display| {
        Refusal::new(Code::Io, format!("the record of the disk {name}: {e}"))
    };
    // A damaged record says nothing of who may write.
    if matches!(disks.load(name), Ok(None)) {
        return Ok(false);
    }
    let lock = disks.lock(name).map_err(|e| failed(&e))?;
    if lock.is_none() {
        let text = format!("{name} is being moved: give that up with `drover move --abort {name}`");
        return Err(Refusal::new(Code::Held, text));
    }
    if let Ok(Some(record)) = disks.load(name)
        && record.may_run()
    {
        return Ok(false);
    }
    disks.remove(name).map_err(|e| failed(&e))?;
    Ok(true)
}

/// What was handed over to a peer, which may have it: only that peer knows. One that is lost for good is forgotten after a person has
/// ended those moves. A record that cannot be read hides no other.
///
/// # Errors
/// With the way out, which names one of them; when the site's directory cannot be read.
pub fn check_not_handed_over(home: &Home, peer: &str, key: &PeerKey) -> Result<()> {
    let of = |records: &Machines| -> Result<Option<ImageName>> {
        let mut names = records.names()?.into_iter();
        Ok(names.find(|name| {
            let record = records.load(name).ok().flatten();
            let under_way = record.and_then(|record| record.under_way);
            matches!(under_way, Some(Move::Committed(_, to)) if to.key == key.0)
        }))
    };
    let held = |text: String| Error::Refused(Refusal::new(Code::Held, text));
    if let Some(name) = of(&home.machines())? {
        return Err(held(format!(
            "the machine {name} was handed over to {peer}, and only {peer} knows whether it has it: migrate it to {peer} again to find out, or, if {peer} is lost for good, `drover migrate --break {name}`"
        )));
    }
    for domain in home.all_domains()? {
        if let Some(name) = of(&domain.disks())? {
            return Err(held(format!(
                "the disk {name} was handed over to {peer}, and only {peer} knows whether it has it: `drover move {name} {peer}` finds out, or, if {peer} is lost for good, `drover mounts break {name}`"
            )));
        }
    }
    Ok(())
}

/// A machine, as reported to users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MachineInfo {
    /// Its name.
    pub name: String,
    /// `here`, `leaving`, `committed`, `coming`, `starting`, `arriving` (it runs here, some of its disks has not come) or `away`.
    pub state: &'static str,
    /// The site that it goes to, comes from, or is at.
    pub peer: Option<String>,
    /// How often it has moved.
    pub generation: u64,
    /// The images of its disks at this site.
    pub disks: Vec<String>,
    /// The hypervisor that runs it at this site, where it was last moved from here.
    pub hypervisor: Option<String>,
    /// Bytes of its disks that have not come yet, of one that is `arriving`; of one that is `here`, those that were lost, if any were,
    /// and that nobody can read. `None` of others, and where the site does not say.
    pub left_bytes: Option<u64>,
}

impl MachineInfo {
    fn new(name: &ImageName, record: &MachineRecord) -> Self {
        let (state, peer) = match (&record.under_way, &record.owner) {
            (Some(Move::Leaving(_, to)), _) => ("leaving", Some(to)),
            (Some(Move::Committed(_, to)), _) => ("committed", Some(to)),
            (Some(Move::Coming(_, from, _)), _) => ("coming", Some(from)),
            (Some(Move::Taken(_, from)), _) => ("starting", Some(from)),
            (Some(Move::Partial(_, from)), _) => ("arriving", Some(from)),
            (None, Owner::Here) => ("here", None),
            (None, Owner::There(at)) => ("away", Some(at)),
        };
        MachineInfo {
            name: name.to_string(),
            state,
            peer: peer.map(|peer| peer.name.clone()),
            generation: record.generation.0,
            disks: record.disks.iter().map(ToString::to_string).collect(),
            hypervisor: record.hypervisor.clone(),
            left_bytes: None,
        }
    }

    /// Asks the running site what of it is missing, if anything is.
    async fn ask_missing(&mut self, home: &Home) -> Result<()> {
        if !matches!(self.state, "arriving" | "here") {
            return Ok(());
        }
        let Ok(name) = ImageName::new(&self.name) else {
            return Ok(());
        };
        if let Some(call) = Call::local(home).await? {
            let missing = call.ask(&GetMissing { name }, |()| {}).await?;
            self.left_bytes = missing.filter(|bytes| *bytes > 0 || self.state == "arriving");
        }
        Ok(())
    }
}

/// As [`list`], with what is missing of those that are arriving, as far as the site that runs says it.
///
/// # Errors
/// As [`list`].
pub async fn list_with_missing(home: &Home) -> Result<Vec<MachineInfo>> {
    let mut list = list(home)?;
    for machine in &mut list {
        if let Err(e) = machine.ask_missing(home).await {
            tracing::debug!("what is missing of {} is not known: {e}", machine.name);
        }
    }
    Ok(list)
}

/// The machines that have moved to or from this site, or are about to.
///
/// # Errors
/// When a record cannot be read.
pub fn list(home: &Home) -> Result<Vec<MachineInfo>> {
    list_of(&home.machines())
}

/// The disks of programs in a domain that have moved to this site or from it, or are about to.
///
/// # Errors
/// When a record cannot be read.
pub fn list_disks(home: &Home) -> Result<Vec<MachineInfo>> {
    list_of(&home.disks())
}

fn list_of(machines: &Machines) -> Result<Vec<MachineInfo>> {
    let mut list = Vec::new();
    for name in machines.names()? {
        // It may be forgotten meanwhile.
        if let Some(record) = machines.load(&name).map_err(Error::Refused)? {
            list.push(MachineInfo::new(&name, &record));
        }
    }
    Ok(list)
}
