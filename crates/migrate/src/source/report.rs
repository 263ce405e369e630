//! What a move is told, and what it tells.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_hypervisor::machine::{Data, RamInfo};
use drover_net::{PeerKey, Refusal};
use drover_store::lease::{HandOverToken, MountId};
use drover_store::machine::Token;
use drover_teleport::SendOptions;
use drover_teleport::progress::{Counters, SendEvent, WireTotals};
use serde::{Deserialize, Serialize};

use crate::destination::Pending;

/// What to move, and how.
#[derive(Clone)]
pub struct MoveOptions {
    /// Connection and limits, as for sending images.
    pub send: SendOptions,
    /// The machine's name at this site.
    pub machine: ImageName,
    /// Its name there.
    pub name_there: ImageName,
    /// The hypervisor, as a person names it; recorded.
    pub hypervisor: String,
    /// A private directory of moves of this machine, which need not exist; removed at the end.
    pub work: PathBuf,
    /// A directory for what the machine overwrites while its disks are sent, at most all of them.
    pub scratch: PathBuf,
    /// What is known of its disks, if anything is.
    pub generations: Option<Arc<dyn DiskGenerations>>,
    /// The mounts of this site, if it has any.
    pub mounts: Option<Arc<dyn Mounts>>,
    /// Whether disks that are mounts are copied like others.
    pub copy_mounts: bool,
    /// How long the machine may be paused, by estimate; a shorter pause is tried first.
    pub max_pause: Option<Duration>,
    /// Whether the last that was written to the disks may follow when the machine runs there.
    pub post_copy: PostCopy,
    /// Whether what is left of the disks is read from their files also when those look as if they had been written since the
    /// machine was handed over.
    pub trust_files: bool,
    /// Whether the hypervisor stays, paused, when the machine is gone.
    pub keep_source: bool,
    /// What is counted while the images are sent.
    pub counters: Arc<Counters>,
    /// Bytes on the wire while the images are sent.
    pub wire: Arc<WireTotals>,
}

/// Whether what was written to the disks last may follow when the machine runs at the other site already. Until it has, the
/// machine depends on both sites.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PostCopy {
    /// It does not: the machine is paused as long as that takes.
    Never,
    /// If it does not fit into the pause.
    #[default]
    WhenNeeded,
    /// Everything that was written since the state of the disks that was sent first.
    AtOnce,
}

/// The mounts of a site: disks of machines that are images of other sites.
pub trait Mounts: Send + Sync {
    /// The mount that these bytes are, if it is one whose write lease can be handed over.
    ///
    /// # Errors
    /// When that cannot be found out.
    fn find<'a>(&'a self, data: &'a Data) -> Pending<'a, Result<Option<Mounted>, Refusal>>;

    /// Checks that the lease can be handed over, and pushes what was written to the mount, which goes on. Bytes that were written
    /// meanwhile.
    ///
    /// # Errors
    /// When it cannot be handed over.
    fn prepare<'a>(&'a self, mounted: &'a Mounted, to: Heir) -> Pending<'a, Result<u64, Refusal>>;

    /// Pushes what was written to a mount, ends it, and hands its write lease over. Done again, it finds that out, also when the
    /// mount is not there any more.
    ///
    /// # Errors
    /// When that is not possible now: it may be tried again, but with [`Code::Lost`](drover_net::Code::Lost), by which the mount
    /// had no lease any more that it could hand over.
    fn hand_over<'a>(&'a self, mounted: &'a Mounted, to: Heir) -> Pending<'a, Result<(), Refusal>>;
}

/// Who gets a write lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heir {
    /// The site that the machine goes to.
    pub site: PeerKey,
    /// The mount there that stands by.
    pub mount: MountId,
    /// Names the hand-over.
    pub token: HandOverToken,
}

/// A mount that a machine has as a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// Its name at this site.
    pub mount: String,
    /// What the site that has the image calls it.
    pub id: MountId,
    /// The site that has the image.
    pub site: PeerKey,
    /// What that is called here.
    pub site_name: String,
    /// The image's name there.
    pub image: ImageName,
}

/// What a site knows of the generations of a machine's disks.
pub trait DiskGenerations: Send + Sync {
    /// Those of a disk, by its place in the machine, as of now: an encoded `drover_store::generations::Summary`. None if they
    /// are not known.
    fn of(&self, disk: u32) -> Pin<Box<dyn Future<Output = Option<Vec<u8>>> + Send + '_>>;
}

/// What happens during a move.
#[derive(Clone, Debug)]
pub enum MoveEvent {
    /// A step begins.
    Step(Step),
    /// Of sending the images.
    Send(SendEvent),
    /// A round over the disks ended; bytes that were sent.
    Round {
        /// Its number.
        round: u32,
        /// Bytes that were written since the one before.
        bytes: u64,
    },
    /// How memory goes.
    Memory(RamInfo),
    /// The machine runs there; bytes of its disks that are still here.
    Left {
        /// Bytes.
        bytes: u64,
    },
    /// The connection broke, and is made again.
    Reconnecting {
        /// Why.
        error: String,
    },
}

/// A step of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Images of the disks are sent.
    Images,
    /// What was written to them follows.
    Disks,
    /// Memory follows.
    Memory,
    /// The machine is paused, and handed over.
    Switch,
    /// It runs there; what is left of its disks follows.
    Rest,
}

/// Callback for events.
pub type OnMove = Arc<dyn Fn(MoveEvent) + Send + Sync>;

/// The parts of the pause, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Pause {
    /// The hook that pauses the program of a disk.
    pub hook_ms: u64,
    /// The last that was written to the disks.
    pub disks_ms: u64,
    /// The last of the memory, and the state of devices.
    pub memory_ms: u64,
    /// Until the other site has taken the machine, and started it.
    pub hand_over_ms: u64,
    /// All of it.
    pub total_ms: u64,
}

/// What a dry run expects of a move. What the machine writes meanwhile comes on top.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// Bytes on the wire for the images of its disks, from sampled compression.
    pub image_wire_bytes: u64,
    /// How long the other site takes to answer, in milliseconds.
    pub round_trip_ms: f64,
    /// The pause of a machine that does not write faster than the link carries, in milliseconds.
    pub pause_ms: u64,
    /// The rate at which it would be sent: the limit, or what the link carried when it was measured. `None` where neither is known.
    pub bytes_per_second: Option<u64>,
    /// Whether that was measured: it is an estimate.
    pub measured: bool,
    /// At most so long at that rate, with all of its memory.
    pub seconds: Option<f64>,
}

/// What a move took.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MoveReport {
    /// The machine's name there.
    pub machine: String,
    /// Bytes on the wire for the images of its disks.
    pub image_wire_bytes: u64,
    /// Bytes of the images that were not read before they were delivered, since an old copy was there.
    pub unread_bytes: u64,
    /// Bytes of disks that were written meanwhile, and sent in rounds.
    pub disk_bytes: u64,
    /// The same, as sent.
    pub disk_wire_bytes: u64,
    /// Bytes of memory and devices.
    pub memory_bytes: u64,
    /// The same, as sent.
    pub memory_wire_bytes: u64,
    /// Bytes of disks that were still here when the machine ran there.
    #[serde(skip)]
    pub left_bytes: u64,
    /// Of those, what it had to wait for.
    #[serde(skip)]
    pub asked_bytes: u64,
    /// Rounds over the disks.
    pub rounds: u32,
    /// The pause.
    pub pause: Pause,
    /// The disks that were handed over instead of copied, as `SITE:IMAGE`.
    #[serde(default)]
    pub handed_over: Vec<String>,
    /// From the end of the pause until the other site had their write leases, in milliseconds: so long the machine waits for them.
    #[serde(default)]
    pub leases_ms: u64,
    /// Whether the other site builds the hypervisor for it.
    #[serde(default)]
    pub built: bool,
    /// What a dry run expects.
    #[serde(default)]
    pub expected: Option<Expected>,
    /// What a person should know: what stays behind, what is missing at the other site.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The files of its disks that are left here, and that nothing uses any more.
    pub left: Vec<PathBuf>,
    /// The same, with the disks that they are.
    #[serde(skip)]
    pub left_disks: Vec<LeftFile>,
    /// The move.
    #[serde(skip)]
    pub token: Option<Token>,
    /// From begin to end.
    pub seconds: f64,
}

/// The file of a disk that a machine has left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftFile {
    /// The disk, by its place in the machine.
    pub disk: u32,
    /// The file.
    pub path: PathBuf,
    /// Its format in the words of the hypervisor: what a guest wrote to a raw disk does not tell that.
    pub format: String,
}

impl std::fmt::Display for Mounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.site_name, self.image)
    }
}

impl MoveReport {
    /// Bytes that crossed.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        self.image_wire_bytes + self.disk_wire_bytes + self.memory_wire_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount daemon sends it to the command, in an encoding that leaves out nothing.
    #[test]
    fn a_report_is_read_as_it_was_sent() {
        for expected in [None, Some(Expected::default())] {
            let report = MoveReport {
                machine: "web".into(),
                expected,
                left: vec!["/var/lib/web.raw".into()],
                seconds: 1.5,
                ..MoveReport::default()
            };
            let sent = drover_net::encode(&report);
            let read: MoveReport = drover_net::decode(&sent).unwrap();
            assert_eq!(read.expected, report.expected);
            assert_eq!((read.left, read.seconds), (report.left, report.seconds));
        }
    }
}
