//! Machines that libvirt manages: asked over its own protocol, since a migration by its API on both sides is the only one that
//! it notices.
//!
//! [`Domain`] is a machine of a libvirt daemon of this host. Its migration is made of the steps that `virsh migrate` calls one after the other
//! at both daemons, taken one by one, so that what crosses between the sites, and who decides, is up to the caller: no
//! description, cookie or address of the other site is given to libvirt here.

mod connection;
mod description;
mod migration;
mod monitor;
mod xdr;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::connection::Uri;
use self::connection::{Connection, Procedure};
pub use self::description::{Description, Disk, Medium};
pub use self::migration::{Job, Performed};
use self::xdr::{Reader, Writer};
use crate::error::HypervisorError;

/// Flag of a description: that of the next start.
const XML_INACTIVE: u32 = 2;

/// Flag of a description: with what is secret.
const XML_SECURE: u32 = 1;

/// Flags of a snapshot: nothing is remembered of it, only the disks, all or none.
const SNAPSHOT_FLAGS: u32 = 4 | 16 | 128;

/// Flags of a commit: of the topmost layer, into the one below it.
const COMMIT_FLAGS: u32 = 1 | 4;

/// Flag of the end of a commit: the lower layer is used from now on.
const PIVOT: u32 = 2;

/// Why a machine is paused: an I/O error.
const IO_ERROR: u32 = 5;

/// How long libvirt may take for a snapshot, or to change layers.
const LAYER_LIMIT: Duration = Duration::from_secs(300);

/// How long a commit may take.
const COMMIT_LIMIT: Duration = Duration::from_secs(6 * 3600);

/// How often it is looked at.
const COMMIT_POLL: Duration = Duration::from_millis(50);

/// What a machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainState {
    /// It runs.
    Running,
    /// It is paused.
    Paused,
    /// It is paused, since one of its disks has failed.
    Stalled,
    /// It is off.
    Off,
    /// Anything else, by libvirt's number.
    Other(u32),
}

/// A machine of a libvirt daemon.
#[derive(Clone, Debug)]
pub struct Domain {
    connection: Arc<Connection>,
    name: String,
    uuid: [u8; 16],
    id: u32,
}

impl Domain {
    /// Connects, and looks a machine up by its name.
    ///
    /// # Errors
    /// When libvirt cannot be reached, or has no such machine.
    pub async fn open(uri: &Uri, name: &str) -> Result<Domain, HypervisorError> {
        let connection = Arc::new(Connection::open(uri).await?);
        let what = format!("find the machine {name}");
        let body = Writer::default().text(name);
        let found = connection.call(Procedure::LookupByName, &what, body).await;
        let found = found.map_err(|e| match e {
            HypervisorError::NoMachine { uri, .. } => HypervisorError::NoMachine {
                uri,
                name: name.to_owned(),
            },
            e => e,
        })?;
        let mut found = Reader::new(&found);
        let read = (|| Some((found.text()?, found.fixed(16)?, found.number()?)))();
        let (name, uuid, id) = read.ok_or_else(|| connection.unknown(&what))?;
        let mut bytes = [0; 16];
        bytes.copy_from_slice(uuid);
        Ok(Domain {
            connection,
            name,
            uuid: bytes,
            id,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine as an argument.
    fn argument(&self) -> Writer {
        Writer::default()
            .text(&self.name)
            .fixed(&self.uuid)
            .number(self.id)
    }

    /// What it is doing.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn state(&self) -> Result<DomainState, HypervisorError> {
        let what = "tell the machine's state";
        let body = self.argument().number(0);
        let state = self
            .connection
            .call(Procedure::GetState, what, body)
            .await?;
        let mut state = Reader::new(&state);
        let read = (|| Some((state.number()?, state.number()?)))();
        Ok(match read.ok_or_else(|| self.connection.unknown(what))? {
            // Blocked is a kind of running.
            (1 | 2, _) => DomainState::Running,
            (3, IO_ERROR) => DomainState::Stalled,
            (3, _) => DomainState::Paused,
            (5, _) => DomainState::Off,
            (other, _) => DomainState::Other(other),
        })
    }

    /// Its description as it runs, or as it will be started the next time.
    ///
    /// # Errors
    /// When libvirt does not give it, or it is not understood.
    pub async fn describe(&self, next_start: bool) -> Result<Description, HypervisorError> {
        let xml = self.xml(if next_start { XML_INACTIVE } else { 0 }).await?;
        let parsed = Description::parse(&xml);
        parsed.map_err(|reason| self.connection.unsupported("describe the machine", reason))
    }

    /// The description with which it will be started the next time, for [`Self::define`].
    ///
    /// # Errors
    /// When libvirt does not give it.
    pub async fn definition(&self) -> Result<String, HypervisorError> {
        self.xml(XML_INACTIVE | XML_SECURE).await
    }

    async fn xml(&self, flags: u32) -> Result<String, HypervisorError> {
        let what = "describe the machine";
        let body = self.argument().number(flags);
        let xml = self.connection.call(Procedure::XmlDesc, what, body).await?;
        let xml = Reader::new(&xml).text();
        xml.ok_or_else(|| self.connection.unknown(what))
    }

    /// Changes how it will be started the next time.
    ///
    /// # Errors
    /// When libvirt does not take it.
    pub async fn define(&self, definition: &str) -> Result<(), HypervisorError> {
        let body = Writer::default().text(definition);
        let what = "define the machine";
        self.connection.call(Procedure::Define, what, body).await?;
        Ok(())
    }

    /// Whether libvirt starts it when the host starts.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn autostart(&self) -> Result<bool, HypervisorError> {
        let what = "tell whether the machine is started with the host";
        let get = Procedure::GetAutostart;
        let set = self.connection.call(get, what, self.argument()).await?;
        let set = Reader::new(&set).number();
        Ok(set.ok_or_else(|| self.connection.unknown(what))? != 0)
    }

    /// Has libvirt start it when the host starts, or not.
    ///
    /// # Errors
    /// When libvirt does not take it.
    pub async fn set_autostart(&self, starts: bool) -> Result<(), HypervisorError> {
        let what = "change whether the machine is started with the host";
        let body = self.argument().number(u32::from(starts));
        let set = Procedure::SetAutostart;
        self.connection.call(set, what, body).await?;
        Ok(())
    }

    /// Lets it run.
    ///
    /// # Errors
    /// When libvirt does not.
    pub async fn resume(&self) -> Result<(), HypervisorError> {
        let what = "resume the machine";
        self.connection
            .call(Procedure::Resume, what, self.argument())
            .await?;
        Ok(())
    }

    /// Ends it, as if its power was cut.
    ///
    /// # Errors
    /// When libvirt does not.
    pub async fn destroy(&self) -> Result<(), HypervisorError> {
        let what = "end the machine";
        self.connection
            .call(Procedure::Destroy, what, self.argument())
            .await?;
        Ok(())
    }

    /// Puts a layer over each of some disks at one moment, in a file that libvirt makes: what is below is not written from then on.
    ///
    /// # Errors
    /// When libvirt does not; then all disks are as they were.
    pub async fn add_layers(&self, layers: &[(String, PathBuf)]) -> Result<(), HypervisorError> {
        let live = self.describe(false).await?;
        let xml = description::snapshot(&live, layers);
        let what = "put layers over the disks";
        let body = self.argument().text(&xml).number(SNAPSHOT_FLAGS);
        let snapshot = Procedure::SnapshotCreate;
        let done = self
            .connection
            .call_within(snapshot, what, body, LAYER_LIMIT);
        done.await?;
        Ok(())
    }

    /// Bytes of a disk that a migration has yet to copy; `None` if it copies none.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn uncopied(&self, disk: &str) -> Result<Option<u64>, HypervisorError> {
        let what = format!("tell how far the copy of {disk} is");
        let progress = self.job_progress(disk, &what).await?;
        Ok(progress.map(|(done, all)| all.saturating_sub(done)))
    }

    /// Writes what is in the topmost layer of a disk to the one below, which the machine uses from then on. The layer's file
    /// remains.
    ///
    /// # Errors
    /// When libvirt does not; then the machine still uses both.
    pub async fn commit_layer(&self, disk: &str) -> Result<(), HypervisorError> {
        let what = format!("commit the layer over {disk}");
        let body = self
            .argument()
            .text(disk)
            .optional(None)
            .optional(None)
            .long(0)
            .number(COMMIT_FLAGS);
        // One that an earlier process began goes on.
        if self.job_progress(disk, &what).await?.is_none() {
            let commit = Procedure::BlockCommit;
            self.connection.call(commit, &what, body).await?;
        }
        let begun = Instant::now();
        loop {
            let progress = self.job_progress(disk, &what).await?;
            let Some((done, all)) = progress else {
                return Err(self.connection.unsupported(&what, "it ended".into()));
            };
            if all > 0 && done == all {
                let body = self.argument().text(disk).number(PIVOT);
                let end = Procedure::BlockJobAbort;
                let ended = self.connection.call_within(end, &what, body, LAYER_LIMIT);
                match ended.await {
                    Ok(_) => return Ok(()),
                    // All is copied a moment before the job is ready.
                    Err(e) if e.to_string().contains("not ready for pivot") => {}
                    Err(e) => return Err(e),
                }
            }
            if begun.elapsed() > COMMIT_LIMIT {
                return Err(self
                    .connection
                    .unsupported(&what, "it takes too long".into()));
            }
            tokio::time::sleep(COMMIT_POLL).await;
        }
    }

    /// Bytes that a job of a disk has done, and all that are to be; `None` without a job.
    async fn job_progress(
        &self,
        disk: &str,
        what: &str,
    ) -> Result<Option<(u64, u64)>, HypervisorError> {
        let body = self.argument().text(disk).number(0);
        let info = self
            .connection
            .call(Procedure::BlockJobInfo, what, body)
            .await?;
        let mut info = Reader::new(&info);
        let read = (|| {
            let (found, _kind) = (info.number()?, info.number()?);
            let (_bandwidth, done, all) = (info.long()?, info.long()?, info.long()?);
            Some((found, done, all))
        })();
        let (found, done, all) = read.ok_or_else(|| self.connection.unknown(what))?;
        Ok((found > 0).then_some((done, all)))
    }

    /// The layers on top of its disks whose files are called like this, by disk.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn layers(&self, prefix: &str) -> Result<Vec<(String, PathBuf)>, HypervisorError> {
        let live = self.describe(false).await?;
        let layers = live.disks.into_iter().filter_map(|disk| match disk.medium {
            Medium::File(path) if is_called(&path, prefix) => Some((disk.target, path)),
            _ => None,
        });
        Ok(layers.collect())
    }

    /// The size of a disk, as the machine sees it, in bytes.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn size(&self, disk: &str) -> Result<u64, HypervisorError> {
        let what = format!("tell the size of {disk}");
        let body = self.argument().text(disk).number(0);
        let info = self
            .connection
            .call(Procedure::BlockInfo, &what, body)
            .await?;
        let mut info = Reader::new(&info);
        let size = info.long().and_then(|_allocated| info.long());
        size.ok_or_else(|| self.connection.unknown(&what))
    }
}

/// Whether the name of a file begins so.
fn is_called(path: &Path, prefix: &str) -> bool {
    path.file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
}
