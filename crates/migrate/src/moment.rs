//! Disks as of one moment, held while they are read at this site: for a snapshot in a vault.
//!
//! A machine goes on meanwhile; what it overwrites is copied aside, as for a [replica](crate::replica). Its QEMU records on
//! between two moments what is written, so that the next time only that has to be read.

mod device;

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use drover_core::{BlockDevice, ImageName, ReadAt};
use drover_hypervisor::machine::Machine;
use drover_hypervisor::{Agent, GuestAgent, Rounds};
use drover_image::{Format, Layout, Outgoing};

pub use self::device::DeviceMoments;
use crate::error::MigrateError;
use crate::hooks::Hooks;
use crate::replica::machine::dirty;
use crate::source::disks::{self, Opening, data_runs};

/// Bytes for each bit of what is recorded between moments, which may be days: two MiB of bits a TiB.
const GRANULARITY: u32 = 64 << 10;

/// Whether the guest's file systems are frozen for the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Freeze {
    /// If it has an agent that does it.
    #[default]
    IfPossible,
    /// Fail if that is not possible.
    Always,
    /// The agent is not asked.
    Never,
}

/// What is held of a machine, and how.
pub struct MachineOptions {
    /// The machine's name.
    pub name: ImageName,
    /// Tells what is recorded for one purpose from that for others; at most 20 letters and digits. Those for other vaults have the same
    /// first letter and length.
    pub series: String,
    /// Gets the socket of the hypervisor's exports.
    pub work: PathBuf,
    /// Gets what the machine overwrites in the meantime.
    pub scratch: PathBuf,
    /// Whether the guest's file systems are frozen.
    pub freeze: Freeze,
    /// Bring the programs into a state that is good to begin from, before the moment, and let them go on at once.
    pub hooks: Arc<dyn Hooks>,
    /// Begin anew: what was recorded is not looked at.
    pub all: bool,
}

/// Whether the guest's file systems were frozen at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frozen {
    /// So many of them.
    Yes(u64),
    /// Why not.
    No(String),
}

/// A disk as of the moment.
pub struct HeldDisk {
    /// The machine's name for it.
    pub device: String,
    /// All of it, as a raw image.
    pub image: Outgoing,
    /// What the earlier state was called, see [`MachineMoment::done`], and what was written since; none if that is not known.
    pub since: Option<(String, Vec<Range<u64>>)>,
}

/// The disks of a machine, held at one moment. [`MachineMoment::done`] or [`MachineMoment::give_up`] has to follow.
pub struct MachineMoment {
    machine: Machine,
    series: String,
    work: PathBuf,
    rounds: Rounds,
    opening: Opening,
    /// Whether what was recorded before still counts.
    goes_on: bool,
    /// Whether the guest's file systems were frozen.
    pub frozen: Frozen,
}

impl MachineMoment {
    /// Holds the disks of now. Not to be dropped while it waits: the guest may be frozen then.
    ///
    /// # Errors
    /// When the disks cannot be held, or the guest should be frozen and is not: the machine goes on.
    pub async fn hold(
        machine: &Machine,
        options: &MachineOptions,
    ) -> Result<(MachineMoment, Vec<HeldDisk>), MigrateError> {
        // Of a process that was killed: what it held is no disk's node.
        for series in left(machine, &options.series).await? {
            drover_hypervisor::rounds::let_go(machine, &series, &options.work).await?;
        }
        let found = disks::writable(machine, &options.name, None).await?;
        if found.offers.is_empty() {
            let text = format!("{} has no disk that it can write", options.name);
            return Err(MigrateError::Unsupported(text));
        }
        // If it has to be there and is not, nothing was touched.
        let agent = agent(machine, options.freeze).await?;
        let nodes: Vec<&str> = found.nodes().iter().map(String::as_str).collect();
        let known = known(machine, options, &nodes).await;
        let goes_on = known.is_some();
        let (rounds, notes) = match known {
            Some((rounds, notes)) => (Some(rounds), notes),
            None => (None, Vec::new()),
        };
        let mut frozen = Frozen::No(String::new());
        let held = with_hooks(&options.hooks, async || {
            let (held, was) = with_frozen(agent, options.freeze, async || {
                hold(machine, options, &nodes, rounds).await
            })
            .await?;
            frozen = was;
            Ok(held)
        });
        let (rounds, views) = match held.await {
            Ok(held) => held,
            Err(e) => {
                forget(machine, &options.series, &options.work).await;
                return Err(e);
            }
        };
        let moment = MachineMoment {
            machine: machine.clone(),
            series: options.series.clone(),
            work: options.work.clone(),
            rounds,
            opening: Opening::default(),
            goes_on,
            frozen,
        };
        let devices = found.offers.into_iter().map(|offer| offer.device).collect();
        match moment.open(devices, views, notes).await {
            Ok(disks) => Ok((moment, disks)),
            Err(e) => {
                moment.give_up().await;
                Err(e)
            }
        }
    }

    async fn open(
        &self,
        devices: Vec<String>,
        views: Vec<drover_hypervisor::rounds::View>,
        notes: Vec<Vec<String>>,
    ) -> Result<Vec<HeldDisk>, MigrateError> {
        let held = self.rounds.held().await?.unwrap_or_default();
        if held.len() != devices.len() {
            return Err(MigrateError::Protocol("the disks of a moment"));
        }
        let (mut views, mut notes) = (views.into_iter(), notes.into_iter());
        let mut disks = Vec::new();
        for (device, view) in devices.into_iter().zip(held) {
            // All that was written since any of its notes is recorded.
            let note = notes.next().and_then(|mut notes| notes.pop());
            let since = match (views.next(), note) {
                (Some(view), Some(note)) => Some((note, dirty(&self.opening, view).await?)),
                _ => None,
            };
            let opened = disks::open(&self.opening, view, |device, _| image(device));
            disks.push(HeldDisk {
                device,
                image: opened.await?,
                since,
            });
        }
        Ok(disks)
    }

    /// All of it was read: what the state of each disk is called, up to 16 hexadecimal digits. It is not held any more; what is written
    /// from then on is recorded.
    ///
    /// # Errors
    /// Those of the hypervisor: the next time all is read.
    pub async fn done(mut self, notes: &[String]) -> Result<(), MigrateError> {
        let _none_opens = self.opening.write().await;
        let done = async {
            self.rounds.note(notes).await?;
            self.rounds.rest().await
        };
        let done = done.await;
        if done.is_err() {
            forget(&self.machine, &self.series, &self.work).await;
        }
        Ok(done?)
    }

    /// Not all of it was read: what was recorded before still counts.
    pub async fn give_up(mut self) {
        let _none_opens = self.opening.write().await;
        let given_up = match self.goes_on {
            true => self.rounds.give_up_held().await.is_ok(),
            false => false,
        };
        if !given_up {
            forget(&self.machine, &self.series, &self.work).await;
        }
    }

    /// Leaves nothing in the hypervisor, not what records either.
    pub async fn end(self) {
        let _none_opens = self.opening.write().await;
        forget(&self.machine, &self.series, &self.work).await;
    }
}

/// The series of this purpose that may have left something; others for other vaults begin with the same letter.
async fn left(machine: &Machine, own: &str) -> Result<BTreeSet<String>, MigrateError> {
    let mut all = BTreeSet::from([own.to_owned()]);
    for medium in machine.nodes().await? {
        let series = medium.node.strip_prefix("drover-");
        let series = series.and_then(|rest| rest.split_once('-'));
        all.extend(
            series
                .map(|(series, _)| series.to_owned())
                .filter(|series| series.len() == own.len() && series.get(..1) == own.get(..1)),
        );
    }
    Ok(all)
}

/// What was recorded since an earlier moment, and what that is called.
async fn known(
    machine: &Machine,
    options: &MachineOptions,
    nodes: &[&str],
) -> Option<(Rounds, Vec<Vec<String>>)> {
    if options.all {
        return None;
    }
    let (series, work) = (&options.series, &options.work);
    let known = async {
        let Some(rounds) = Rounds::resume(machine, series, nodes, work, GRANULARITY).await? else {
            return Ok(None);
        };
        let notes = rounds.noted().await?;
        Ok::<_, MigrateError>(Some((rounds, notes)))
    };
    match known.await {
        Ok(known) => known.filter(|(_, notes)| notes.iter().all(|notes| !notes.is_empty())),
        Err(e) => {
            tracing::info!("what was written is not known: {e}");
            None
        }
    }
}

type Views = Vec<drover_hypervisor::rounds::View>;

async fn hold(
    machine: &Machine,
    options: &MachineOptions,
    nodes: &[&str],
    rounds: Option<Rounds>,
) -> Result<(Rounds, Views), MigrateError> {
    let scratch = &options.scratch;
    if let Some(mut rounds) = rounds {
        let views = rounds.hold_next(scratch).await?;
        return Ok((rounds, views));
    }
    let (series, work) = (&options.series, &options.work);
    let begun = Rounds::begin_held(machine, series, nodes, work, GRANULARITY, scratch);
    Ok((begun.await?, Vec::new()))
}

/// Removes what a series has left in the hypervisor.
async fn forget(machine: &Machine, series: &str, work: &std::path::Path) {
    if let Err(e) = drover_hypervisor::rounds::clear(machine, series, work).await {
        tracing::debug!("what recorded the machine's writes is left: {e}");
    }
}

/// The guest's agent; or why none is asked.
async fn agent(
    machine: &Machine,
    freeze: Freeze,
) -> Result<Result<GuestAgent, String>, MigrateError> {
    let why = match (freeze, machine.guest_agent().await?) {
        (Freeze::Never, _) => "not asked for".to_owned(),
        (_, Agent::At(socket)) => match GuestAgent::connect(&socket).await {
            Ok(agent) => return Ok(Ok(agent)),
            Err(e) => e.to_string(),
        },
        (_, Agent::None) => {
            "the machine has no port of a guest agent (org.qemu.guest_agent.0)".into()
        }
        (_, Agent::Silent) => "no guest agent runs in the machine".into(),
    };
    match freeze {
        Freeze::Always => Err(MigrateError::Unsupported(format!(
            "the file systems of the guest cannot be frozen: {why}"
        ))),
        _ => Ok(Err(why)),
    }
}

/// Does something while the guest's file systems are frozen.
async fn with_frozen<T>(
    agent: Result<GuestAgent, String>,
    freeze: Freeze,
    then: impl AsyncFnOnce() -> Result<T, MigrateError>,
) -> Result<(T, Frozen), MigrateError> {
    let mut agent = match agent {
        Ok(agent) => agent,
        Err(why) => return Ok((then().await?, Frozen::No(why))),
    };
    let (why, left) = match agent.freeze().await {
        Ok(count @ 1..) => {
            let done = then().await;
            let Err(left) = thaw(agent).await else {
                return Ok((done?, Frozen::Yes(count)));
            };
            let why = match done {
                Ok(_) => left,
                Err(e) => format!("{e}; {left}"),
            };
            return Err(MigrateError::Unsupported(why));
        }
        Ok(0) => {
            let why = "the guest agent found no file system to freeze";
            (why.to_owned(), thaw(agent).await.err())
        }
        Err(e) => {
            let why = e.to_string();
            // It may have frozen some, or do so yet; one that is frozen by others is not ours to thaw, and one whose agent
            // refuses is not frozen.
            let left = match why.contains("frozen already") {
                true => None,
                false => thaw(agent).await.err(),
            };
            let is_refused = why.contains("the guest agent says");
            (why, left.filter(|_| !is_refused))
        }
    };
    let why = match left {
        Some(left) => format!("{why}; {left}"),
        None => why,
    };
    match freeze {
        Freeze::Always => Err(MigrateError::Unsupported(format!(
            "the file systems of the guest cannot be frozen: {why}"
        ))),
        _ => Ok((then().await?, Frozen::No(why))),
    }
}

/// Has the file systems thawed, if need be by another connection; or what to do about those that may be frozen.
async fn thaw(mut agent: GuestAgent) -> Result<(), String> {
    let socket = agent.socket().to_owned();
    let Err(first) = agent.thaw().await else {
        return Ok(());
    };
    tracing::debug!("once more: {first}");
    let thawed = match agent.again().await {
        Ok(mut agent) => agent.thaw().await.map(drop),
        Err(e) => Err(e),
    };
    thawed.map_err(|e| {
        format!(
            "the guest's file systems may still be frozen: guest-fsfreeze-thaw at {socket} ({e})"
        )
    })
}

/// Does something between the hooks.
async fn with_hooks<T>(
    hooks: &Arc<dyn Hooks>,
    then: impl AsyncFnOnce() -> Result<T, MigrateError>,
) -> Result<T, MigrateError> {
    let paused = run(hooks, "paused", |hooks| hooks.pause(&|| false)).await;
    let done = match paused {
        Ok(()) => then().await,
        Err(e) => Err(e),
    };
    run(hooks, "resumed", |hooks| hooks.resume())
        .await
        .and(done)
}

async fn run(
    hooks: &Arc<dyn Hooks>,
    what: &'static str,
    hook: fn(&dyn Hooks) -> Result<(), String>,
) -> Result<(), MigrateError> {
    let hooks = Arc::clone(hooks);
    let done = tokio::task::spawn_blocking(move || hook(&*hooks)).await;
    let done = done.map_err(|_| MigrateError::Stopped)?;
    done.map_err(|why| MigrateError::Hook { what, why })
}

/// All of a device that does not change, as a raw image in the order of the disk. Where it has no data it is not read.
///
/// # Errors
/// Those of the device.
pub fn image(device: Arc<dyn BlockDevice>) -> Result<Outgoing, drover_core::DeviceError> {
    let size = device.size();
    let runs = data_runs(device.as_ref())?;
    Ok(Outgoing {
        virtual_size: size,
        content: Arc::new(Content { device, runs }),
        layout: Layout::in_file_order(size, std::slice::from_ref(&(0..size))),
        format: Format::Raw,
        notes: Vec::new(),
        stamps: Vec::new(),
    })
}

/// A device of which only the data is read.
struct Content {
    device: Arc<dyn BlockDevice>,
    /// Where it is, in order.
    runs: Vec<Range<u64>>,
}

impl ReadAt for Content {
    fn len(&self) -> u64 {
        self.device.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.device.size().saturating_sub(offset);
        let n = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let buffer = &mut buffer[..n];
        buffer.fill(0);
        let end = offset + n as u64;
        let first = self.runs.partition_point(|run| run.end <= offset);
        for run in self.runs[first..].iter().take_while(|run| run.start < end) {
            let (from, to) = (run.start.max(offset), run.end.min(end));
            let part = &mut buffer[(from - offset) as usize..(to - offset) as usize];
            let read = self.device.read(from, part);
            read.map_err(|e| io::Error::other(e.to_string()))?;
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use drover_device::backend::MemoryDevice;

    use super::*;

    #[test]
    fn holes_are_zero_and_not_read() {
        let bytes: Vec<u8> = (0..64 << 10).map(|n| (n % 251) as u8 + 1).collect();
        let mut rng = fastrand::Rng::with_seed(44);
        for _ in 0..200 {
            let mut runs: Vec<Range<u64>> = Vec::new();
            let mut at = 0;
            while at < bytes.len() as u64 {
                let (gap, run) = (rng.u64(0..9000), rng.u64(1..9000));
                let from = (at + gap).min(bytes.len() as u64);
                let to = (from + run).min(bytes.len() as u64);
                if from < to {
                    runs.push(from..to);
                }
                at = to.max(at + 1);
            }
            let mut expected = vec![0; bytes.len()];
            for run in &runs {
                let run = run.start as usize..run.end as usize;
                expected[run.clone()].copy_from_slice(&bytes[run]);
            }
            let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::from_bytes(&bytes));
            let content = Content { device, runs };
            let from = rng.usize(0..bytes.len());
            let mut buffer = vec![9; rng.usize(0..20_000)];
            let n = content.read_at(&mut buffer, from as u64).unwrap();
            assert_eq!(n, buffer.len().min(bytes.len() - from));
            assert!(buffer[..n] == expected[from..from + n]);
        }
    }

    type Heard = Arc<parking_lot::Mutex<Vec<String>>>;

    /// An agent that answers so, line by line; at `-` it hangs up, and the next connection goes on. What it was asked is in `heard`.
    fn answering(answers: &[&'static str], heard: &Heard) -> (tempfile::TempDir, PathBuf) {
        use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qga");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let (answers, heard) = (answers.to_vec(), Arc::clone(heard));
        tokio::spawn(async move {
            for part in answers.split(|answer| *answer == "-") {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = BufReader::new(stream);
                for answer in ["\u{ff}"].iter().chain(part) {
                    let mut line = Vec::new();
                    if stream.read_until(b'\n', &mut line).await.unwrap() == 0 {
                        break;
                    }
                    let line = String::from_utf8_lossy(&line).into_owned();
                    let bytes = match *answer {
                        "\u{ff}" => {
                            let id: String = line.chars().filter(char::is_ascii_digit).collect();
                            [b"\xff{\"return\": ", id.as_bytes(), b"}\n"].concat()
                        }
                        answer => {
                            let asked = line.split("guest-fsfreeze-").nth(1).unwrap();
                            let asked = asked.split('"').next().unwrap();
                            heard.lock().push(asked.to_owned());
                            format!("{{\"return\": {answer}}}\n").into_bytes()
                        }
                    };
                    stream.get_mut().write_all(&bytes).await.unwrap();
                }
            }
        });
        (dir, path)
    }

    #[tokio::test]
    async fn what_is_frozen_is_thawed_and_what_may_not_be_is_said() {
        // What the agent answers, how it is asked, whether the middle succeeds; what is done, and what is said.
        let thawed = "\"thawed\"";
        let broken = "\"x\"";
        let (auto, always) = (Freeze::IfPossible, Freeze::Always);
        let all = "status freeze hold thaw";
        let twice = "status freeze hold thaw thaw";
        let may = "may still be frozen: guest-fsfreeze-thaw at";
        for (answers, freeze, succeeds, done, said) in [
            (&[thawed, "2", "2"][..], always, true, all, ""),
            (&[thawed, "2", "2"], auto, false, all, "the middle"),
            // Once more by another connection.
            (&[thawed, "2", broken, "-", "2"], auto, true, twice, ""),
            (&[thawed, "2", broken, "-", broken], auto, true, twice, may),
            (
                &[thawed, "2", broken, "-", broken],
                auto,
                false,
                twice,
                "the middle; the guest",
            ),
            // Nothing was frozen.
            (
                &[thawed, "0", "0"],
                auto,
                true,
                "status freeze thaw hold",
                "no file system",
            ),
            (
                &[thawed, "0", "0"],
                always,
                true,
                "status freeze thaw",
                "no file system",
            ),
        ] {
            let heard = Heard::default();
            let (_dir, path) = answering(answers, &heard);
            let agent = Ok(GuestAgent::connect(&path).await.unwrap());
            let held = with_frozen(agent, freeze, async || {
                heard.lock().push("hold".into());
                match succeeds {
                    true => Ok(()),
                    false => Err(MigrateError::Unsupported("the middle".into())),
                }
            });
            let what = match held.await {
                Ok(((), Frozen::Yes(2))) => String::new(),
                Ok(((), frozen)) => format!("{frozen:?}"),
                Err(e) => e.to_string(),
            };
            assert_eq!(heard.lock().join(" "), done, "{answers:?}");
            assert!(
                what.contains(said) && what.is_empty() == said.is_empty(),
                "{what}"
            );
        }
    }
}
