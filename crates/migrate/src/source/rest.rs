//! What of a machine's disks is still here when it has been handed over: it follows while the machine runs there.
//!
//! Before the commitment it is recorded where the disks can be read, in `machines/.NAME.rest`: the same command goes on with
//! that after a crash, also when the hypervisor here has ended. What is left the other site says.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, ImageName};
use drover_device::stage::MAX_ARRIVING;
use drover_net::{Code, NetError, Refusal, decode, encode};
use drover_store::machine::{Machines, Token};
use drover_teleport::SendOptions;
use parking_lot::Mutex;

use super::ahead::{Ahead, connect};
use super::left::{FORMAT, LeftDisk, LeftDisks, Rest, Round, TAKEN, is_away};
use super::report::{MoveEvent, OnMove, PostCopy, Step};
use super::{Driver, call, call_over, millis};
use crate::disks::{DiskWriter, Sent};
use crate::error::MigrateError;
use crate::hold::hold;
use crate::program::behind::{Behind, Calling, Link, is_unknown};
use crate::program::parts::Blocks;
use crate::program::protocol::kind;
use crate::protocol::{FetchDisks, Kind, SendDisks};

/// How long the servers of all disks may take to start, and how often that is looked at.
const SERVER_LIMIT: Duration = Duration::from_secs(30);
const SERVER_POLL: Duration = Duration::from_millis(200);

/// The site that the machine has gone to.
struct Gone {
    send: SendOptions,
    machine: ImageName,
    token: Token,
    on_event: OnMove,
    /// For the first that is wanted.
    fetches: Mutex<Option<Ahead>>,
}

impl Link for Gone {
    fn name(&self) -> String {
        self.machine.to_string()
    }

    fn give_up_after(&self) -> Duration {
        // The machine waits for it.
        Duration::MAX
    }

    fn names_what_it_lacks(&self) -> bool {
        true
    }

    fn pages(&self) -> Calling<'_> {
        Box::pin(async {
            let request = SendDisks {
                kind: Kind::Machine,
                machine: self.machine.clone(),
                token: self.token,
            };
            call(&self.send, &request).await
        })
    }

    fn fetches(&self) -> Calling<'_> {
        Box::pin(async {
            let request = FetchDisks {
                machine: self.machine.clone(),
                token: self.token,
            };
            let ahead = self.fetches.lock().take();
            let connection = match ahead {
                Some(ahead) => ahead.made().await?,
                None => connect(&self.send).await?,
            };
            let (reader, writer, ..) = call_over(connection, &self.send, &request).await?;
            Ok((reader, writer))
        })
    }

    fn tell(&self, left: u64) {
        (self.on_event)(MoveEvent::Left { bytes: left });
    }

    fn broke(&self, error: &MigrateError) {
        let error = error.to_string();
        (self.on_event)(MoveEvent::Reconnecting { error });
    }
}

/// Whether what is left cannot be read, or is not taken, until somebody changes that. A hypervisor that has ended does not prevent
/// it: the disks are read without it then.
fn is_for_good(error: &MigrateError) -> bool {
    matches!(
        error,
        MigrateError::Unsupported(_)
            | MigrateError::File { .. }
            | MigrateError::Refused(_)
            | MigrateError::Net(NetError::Refused(_))
            | MigrateError::Protocol(_)
    )
}

/// A record was not stored by which a machine stays. The next move finds that out again; but as long as the record says that the
/// machine was handed over, its disks refuse what it writes: it stays paused.
fn stays_unstored(
    machines: &Machines,
    machine: &ImageName,
    why: &Refusal,
) -> Result<(), MigrateError> {
    if machines.may_run(machine) {
        tracing::warn!("{why}");
        return Ok(());
    }
    Err(MigrateError::paused(machine, why))
}

impl Driver<'_> {
    /// See [`stays_unstored`]; a program's disk has no such gate.
    pub(super) fn stays_unstored(&self, why: &Refusal) -> Result<(), MigrateError> {
        match self.device.is_none() {
            true => stays_unstored(self.machines, &self.options.machine, why),
            false => {
                tracing::warn!("{why}");
                Ok(())
            }
        }
    }

    /// Makes what may be left of the disks ready to follow the machine, if that is wanted and the other site can.
    /// `fetches` is a connection for that.
    pub(super) async fn offer_rest(
        &mut self,
        sent: &Arc<Sent>,
        fetches: Ahead,
    ) -> Result<(), MigrateError> {
        self.rest = None;
        if self.options.post_copy == PostCopy::Never || self.disks.offers.is_empty() {
            return Ok(());
        }
        let (disks, devices) = self.disks.whole().await?;
        if let Some(disk) = disks.iter().find(|disk| disk.size > MAX_ARRIVING) {
            if self.options.post_copy == PostCopy::AtOnce {
                return Err(MigrateError::Unsupported(format!(
                    "a disk of {} bytes cannot follow, which those of less than 16 TiB can: use --post-copy never",
                    disk.size
                )));
            }
            return Ok(());
        }
        let behind = self.behind(devices, sent, Some(fetches));
        match behind.connect_fetches().await {
            Ok(answering) => {
                self.rest = Some(Rest {
                    behind,
                    answering: Some(answering),
                    pages: None,
                    disks,
                    is_left: false,
                });
                Ok(())
            }
            Err(e) if e.code() != Some(Code::Unsupported) => Err(e),
            // An earlier drover.
            Err(e) if self.options.post_copy == PostCopy::AtOnce => Err(e),
            Err(_) => Ok(()),
        }
    }

    fn behind(
        &self,
        devices: Vec<Arc<dyn BlockDevice>>,
        sent: &Arc<Sent>,
        fetches: Option<Ahead>,
    ) -> Arc<Behind> {
        let link = Gone {
            send: self.options.send.clone(),
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
            on_event: self.on_event.clone(),
            fetches: Mutex::new(fetches),
        };
        let none = Blocks::none_of(devices.iter().map(|device| device.size()).collect());
        Behind::new(devices, Arc::new(link), none, Arc::clone(sent))
    }

    /// Leaves the last round here: it is named, and follows when the machine runs there. Not flushed.
    pub(super) async fn leave(
        &mut self,
        round: &Round,
        writer: &mut DiskWriter,
    ) -> Result<(), MigrateError> {
        let Some(rest) = &mut self.rest else {
            return Err(MigrateError::Stopped);
        };
        let mut left = Blocks::none_of(rest.disks.iter().map(|disk| disk.size).collect());
        for (disk, _, ranges) in round {
            for range in ranges {
                left.add(*disk as usize, range.clone());
            }
        }
        for named in left.named() {
            writer.say(kind::LEFT, &encode(&named)).await?;
        }
        writer.say(kind::STATE, &[]).await?;
        self.report.left_bytes = left.bytes();
        rest.behind.leave(left);
        rest.is_left = true;
        Ok(())
    }

    /// Records where what is left can be read, and which mounts are to be handed over, once nobody writes to the disks any more.
    pub(super) async fn record_rest(&self) -> Result<(), MigrateError> {
        let rest = self.rest.as_ref().filter(|rest| rest.is_left);
        let mounts = self.disks.mounts.clone();
        if rest.is_none() && mounts.is_empty() {
            return Ok(());
        }
        let mut record = LeftDisks {
            token: self.seeder.token(),
            disks: rest.map(|rest| rest.disks.clone()).unwrap_or_default(),
            mounts,
        };
        let path = self.rest_path();
        let write = move || {
            record.disks.iter_mut().for_each(LeftDisk::stamp);
            FORMAT.write(&path, &encode(&record))
        };
        let written = tokio::task::spawn_blocking(write).await;
        let written = written.map_err(|_| MigrateError::Stopped)?;
        written.map_err(|error| MigrateError::File {
            what: format!("cannot write {}", self.rest_path().display()),
            error,
        })
    }

    /// The connection on which the rest follows.
    pub(super) fn goes_on_with(&mut self, writer: DiskWriter) {
        if let Some(rest) = self.rest.as_mut().filter(|rest| rest.is_left) {
            rest.pages = Some(writer);
        }
    }

    fn rest_path(&self) -> PathBuf {
        let name = format!(".{}.rest", self.options.machine);
        self.machines.directory().join(name)
    }

    /// Records that the other site has taken the machine: what follows may take long, and a person who breaks the move has to
    /// know.
    pub(super) async fn record_taken(&self) -> Result<(), MigrateError> {
        let path = self.taken_path();
        let token = self.seeder.token();
        let write = move || TAKEN.write(&path, &encode(&token));
        let written = tokio::task::spawn_blocking(write).await;
        let written = written.map_err(|_| MigrateError::Stopped)?;
        written.map_err(|error| MigrateError::File {
            what: format!("cannot write {}", self.taken_path().display()),
            error,
        })
    }

    /// The move is at its end.
    pub(super) fn forget_taken(&self) {
        // A stale one is ignored by its token.
        let _ = std::fs::remove_file(self.taken_path());
    }

    fn taken_path(&self) -> PathBuf {
        let name = format!(".{}.taken", self.options.machine);
        self.machines.directory().join(name)
    }

    /// Whether some of the disks is only here.
    pub(super) fn has_rest(&self) -> bool {
        self.rest_path().exists()
    }

    /// Nothing of the disks is left here that is not there, or the machine stays.
    pub(super) fn forget_rest(&mut self) {
        self.rest = None;
        // A stale one is ignored by its token.
        let _ = std::fs::remove_file(self.rest_path());
    }

    /// What is recorded of this move.
    fn recorded(&self) -> Result<Option<LeftDisks>, MigrateError> {
        let failed = |error: std::io::Error| MigrateError::File {
            what: format!("cannot read {}", self.rest_path().display()),
            error,
        };
        let Some(bytes) = FORMAT.read(&self.rest_path()).map_err(failed)? else {
            return Ok(None);
        };
        let damaged = |e: &dyn std::fmt::Display| failed(std::io::Error::other(e.to_string()));
        let body = FORMAT.open(&bytes).map_err(|e| damaged(&e))?;
        let known: LeftDisks = decode(body).map_err(|e| damaged(&e))?;
        Ok((known.token == self.seeder.token()).then_some(known))
    }

    /// What of the disks an earlier process has recorded.
    async fn recorded_rest(&self, known: LeftDisks) -> Result<Rest, MigrateError> {
        let begun = Instant::now();
        let devices = loop {
            let (disks, trust_files) = (known.disks.clone(), self.options.trust_files);
            let opened = tokio::task::spawn_blocking(move || {
                let devices = disks.iter().map(|disk| disk.open(trust_files));
                devices.collect::<Result<Vec<_>, _>>()
            });
            match opened.await.map_err(|_| MigrateError::Stopped)? {
                Err(e) if is_away(&e) && begun.elapsed() < SERVER_LIMIT => {
                    tokio::time::sleep(SERVER_POLL).await;
                }
                opened => break opened?,
            }
        };
        Ok(Rest {
            behind: self.behind(devices, &Arc::default(), None),
            answering: None,
            pages: None,
            disks: known.disks,
            is_left: true,
        })
    }

    /// Sends what is left, if anything is, of a machine that was taken.
    pub(super) async fn follow_rest(&mut self) -> Result<(), MigrateError> {
        let unfinished =
            |machine: &ImageName, peer: &str, why: &MigrateError| MigrateError::Unfinished {
                machine: machine.to_string(),
                peer: peer.to_owned(),
                why: why.to_string(),
                again: is_away(why) || !is_for_good(why),
            };
        let (machine, peer) = (
            self.options.name_there.clone(),
            self.options.send.peer_name.clone(),
        );
        let recorded = self.recorded();
        let recorded = recorded.map_err(|e| unfinished(&machine, &peer, &e))?;
        let mounts = recorded.as_ref().map(|recorded| recorded.mounts.clone());
        let mounts = mounts.unwrap_or_default();
        let (begun, leases) = (Instant::now(), self.leases(&mounts));
        let rest = self.rest.take().filter(|rest| rest.is_left);
        let mut stop = self.stop.clone();
        let rest = self.send_rest(rest, recorded);
        let leases = async {
            let lost = leases.hand_over().await;
            lost.map(|lost| (lost, millis(begun)))
        };
        let both = async { tokio::join!(leases, rest) };
        let (leases, rest) = tokio::select! {
            both = both => both,
            Ok(_) = stop.wait_for(|stop| *stop) => {
                return Err(unfinished(&machine, &peer, &MigrateError::Stopped));
            }
        };
        self.report.asked_bytes = match rest {
            Err(e) if e.code() == Some(Code::Lost) => {
                self.given_up = Some(e.to_string());
                0
            }
            rest => rest.map_err(|e| unfinished(&machine, &peer, &e))?,
        };
        let (lost, ms) = leases.map_err(|e| unfinished(&machine, &peer, &e))?;
        if !mounts.is_empty() {
            self.report.leases_ms = ms;
        }
        self.report.handed_over = mounts.iter().map(ToString::to_string).collect();
        if !lost.is_empty() {
            self.lost_leases = Some(lost.join("; "));
        }
        Ok(())
    }

    /// Sends what is left of the disks, if anything is: of this process, or what an earlier one has recorded. Bytes that were waited
    /// for.
    async fn send_rest(
        &self,
        rest: Option<Rest>,
        recorded: Option<LeftDisks>,
    ) -> Result<u64, MigrateError> {
        let rest = match (rest, recorded) {
            (Some(rest), _) => rest,
            (None, Some(recorded)) if !recorded.disks.is_empty() => {
                self.recorded_rest(recorded).await?
            }
            _ => return Ok(0),
        };
        self.step(Step::Rest);
        hold("rest").await;
        let connections = match (rest.pages, rest.answering) {
            (Some(pages), Some(answering)) => Ok((pages, answering)),
            _ => rest.behind.connect().await,
        };
        match rest.behind.send(connections).await {
            // All of it had arrived, and the answer was lost.
            Err(e) if is_unknown(&e) => Ok(0),
            sent => sent,
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_store::machine::{MachineRecord, Other, Seed};

    use super::*;

    #[test]
    fn a_machine_whose_disks_refuse_its_writes_stays_paused() {
        let directory = tempfile::tempdir().unwrap();
        let machines = Machines::new(directory.path().to_owned());
        let name = ImageName::new("web").unwrap();
        let (token, to) = (
            Token([2; 16]),
            Other {
                key: [1; 32],
                name: "far".into(),
            },
        );
        let here = MachineRecord::new(Seed([3; 16]), Vec::new());
        let leaving = here.leave(token, to).unwrap();
        let full = Refusal::new(Code::Io, "cannot write the record of the machine web");
        let stays = || stays_unstored(&machines, &name, &full);
        machines.store(&name, &leaving).unwrap();
        stays().unwrap();
        machines
            .store(&name, &leaving.commit(token).unwrap())
            .unwrap();
        let said = stays().unwrap_err().to_string();
        assert!(said.contains("web stays paused here"), "{said}");
        // One that cannot be read may be either.
        std::fs::write(directory.path().join("web"), "torn").unwrap();
        stays().unwrap_err();
    }

    #[test]
    fn what_somebody_has_to_mend_is_not_tried_again() {
        for (error, for_good) in [
            (MigrateError::Unsupported("another size".into()), true),
            (Refusal::new(Code::Held, "revoked").into(), true),
            (MigrateError::Lost, false),
            (MigrateError::Stopped, false),
        ] {
            assert_eq!(is_for_good(&error), for_good, "{error}");
        }
    }
}
