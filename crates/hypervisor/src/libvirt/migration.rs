//! The steps of libvirt's migration protocol (version 3), of either side.

use std::path::Path;
use std::time::Duration;

use super::Domain;
use super::connection::Procedure;
use super::description::escaped;
use super::xdr::{Reader, Writer};
use crate::error::HypervisorError;

/// Flag of a migration: the machine runs meanwhile.
const LIVE: u32 = 1;

/// Flag: the machine is paused when it has arrived.
const PAUSED: u32 = 32;

/// Flag: what is in the topmost layer of its disks is copied.
const LAYERS: u32 = 128;

/// Flag: nothing else changes the machine meanwhile.
const PROTECTED: u32 = 256;

/// Flag: a machine that writes its memory faster than the link carries it is slowed down.
const AUTO_CONVERGE: u32 = 8192;

/// Flag: what the machine writes to its disks waits until it has been copied (libvirt 8.0).
const WRITES_WAIT: u32 = 1 << 18;

/// Flags of a source.
const OUTGOING: u32 = LIVE | LAYERS | PROTECTED | AUTO_CONVERGE;

/// Flags of a destination: its disks are not libvirt's to copy, and the machine does not run before it is told to.
const INCOMING: u32 = LIVE | PAUSED;

/// How long a migration may take.
const PERFORM_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// How long a machine may take to start, or to end.
const START_LIMIT: Duration = Duration::from_secs(300);

/// What was found out when all of a machine had left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Performed {
    /// When it was paused, in milliseconds since 1970.
    pub paused_ms: Option<u64>,
}

/// How far a migration is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Memory that was sent.
    pub memory_sent: u64,
    /// Memory that is left.
    pub memory_left: u64,
    /// All of it.
    pub memory_total: u64,
}

impl Domain {
    /// Begins a migration of the machine from here. [`Self::end_migration`] has to follow, unless the connection ends, and
    /// with it the migration.
    ///
    /// # Errors
    /// When the machine cannot migrate.
    pub async fn begin_migration(&self, disks: &[String]) -> Result<(), HypervisorError> {
        let body = self
            .argument()
            .parameters(&of_disks(disks))
            .number(OUTGOING);
        let what = "begin the migration";
        self.connection
            .call(Procedure::MigrateBegin, what, body)
            .await?;
        Ok(())
    }

    /// Lets libvirt send all of the machine: the topmost layers of these disks to the NBD server at `nbd`, in exports called
    /// `drive-` and the alias of the disk; then its memory to `memory`. At the end it is paused. With `writes_wait` it writes to these
    /// disks no faster than that server takes it.
    ///
    /// # Errors
    /// When that fails, or [`Self::abort_migration`] was called; the machine runs on after [`Self::end_migration`].
    pub async fn perform_migration(
        &self,
        disks: &[String],
        nbd: &Path,
        memory: &Path,
        writes_wait: bool,
    ) -> Result<Performed, HypervisorError> {
        let mut parameters = of_disks(disks);
        parameters.push(("migrate_uri", uri(memory)));
        parameters.push(("disks_uri", uri(nbd)));
        // Without it libvirt believes that the other side has no NBD server.
        let cookie = self.cookie("<feature name='nbd'/><nbd port='0'/>");
        let body = self
            .argument()
            .optional(None)
            .parameters(&parameters)
            .bytes(&cookie)
            .number(match writes_wait {
                true => OUTGOING | WRITES_WAIT,
                false => OUTGOING,
            });
        let what = "migrate the machine";
        let perform = Procedure::MigratePerform;
        let call = self
            .connection
            .call_within(perform, what, body, PERFORM_LIMIT);
        let answer = call.await?;
        let cookie = Reader::new(&answer).text().unwrap_or_default();
        let paused = cookie.split("<stopped>").nth(1);
        let paused = paused.and_then(|rest| rest.split('<').next()?.parse().ok());
        Ok(Performed { paused_ms: paused })
    }

    /// Whether what the machine writes can wait until it has been copied.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn can_let_writes_wait(&self) -> Result<bool, HypervisorError> {
        /// In which that came: 8.0.0.
        const SINCE: u64 = 8_000_000;
        let what = "tell its version";
        let version = self
            .connection
            .call(Procedure::LibraryVersion, what, Writer::default());
        let version = Reader::new(&version.await?).long();
        Ok(version.ok_or_else(|| self.connection.unknown(what))? >= SINCE)
    }

    /// Ends a migration from here: the machine is gone, and its QEMU ends; or it stays, and runs on.
    ///
    /// # Errors
    /// When there is none.
    pub async fn end_migration(&self, is_gone: bool) -> Result<(), HypervisorError> {
        let body = self
            .argument()
            .parameters(&[])
            .bytes(&[])
            .number(OUTGOING)
            .number(u32::from(!is_gone));
        let what = "end the migration";
        let end = Procedure::MigrateConfirm;
        let call = self.connection.call_within(end, what, body, START_LIMIT);
        call.await?;
        Ok(())
    }

    /// Has [`Self::perform_migration`] fail.
    ///
    /// # Errors
    /// When nothing can be aborted.
    pub async fn abort_migration(&self) -> Result<(), HypervisorError> {
        let what = "abort the migration";
        let body = self.argument();
        self.connection
            .call(Procedure::AbortJob, what, body)
            .await?;
        Ok(())
    }

    /// How long the machine may be paused by a migration.
    ///
    /// # Errors
    /// When libvirt does not take it.
    pub async fn set_max_pause(&self, pause: Duration) -> Result<(), HypervisorError> {
        let milliseconds = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        let body = self.argument().long(milliseconds.max(1)).number(0);
        let what = "limit the pause";
        self.connection
            .call(Procedure::SetMaxDowntime, what, body)
            .await?;
        Ok(())
    }

    /// How far the migration is.
    ///
    /// # Errors
    /// When libvirt does not say.
    pub async fn job(&self) -> Result<Job, HypervisorError> {
        let what = "tell how far the migration is";
        let body = self.argument();
        let info = self.connection.call(Procedure::JobInfo, what, body).await?;
        let mut info = Reader::new(&info);
        let read = (|| {
            info.number()?;
            // Times, and all of it.
            for _ in 0..5 {
                info.long()?;
            }
            Some((info.long()?, info.long()?, info.long()?))
        })();
        let (memory_total, memory_sent, memory_left) =
            read.ok_or_else(|| self.connection.unknown(what))?;
        Ok(Job {
            memory_sent,
            memory_left,
            memory_total,
        })
    }

    /// Starts the machine as it is defined here, waiting for the memory of a migration at a socket that its QEMU makes. It must
    /// be off. When the connection ends before [`Self::arrived`], libvirt ends it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn receive(&self, memory: &Path) -> Result<(), HypervisorError> {
        let definition = self.definition().await?;
        let parameters = [
            ("destination_xml", definition),
            ("destination_name", self.name.clone()),
            ("migrate_uri", uri(memory)),
        ];
        let body = Writer::default()
            .parameters(&parameters)
            .bytes(&self.cookie(""))
            .number(INCOMING);
        let what = format!("start the machine {} for a migration", self.name);
        let prepare = Procedure::MigratePrepare;
        let call = self
            .connection
            .call_within(prepare, &what, body, START_LIMIT);
        call.await?;
        Ok(())
    }

    /// Waits until all of the machine has arrived. It is paused then, and no longer depends on the connection.
    ///
    /// # Errors
    /// When it does not arrive; then it is off again.
    pub async fn arrived(&self) -> Result<(), HypervisorError> {
        self.finish(false, "receive the machine").await
    }

    /// Ends a machine that was to be received, before [`Self::arrived`].
    ///
    /// # Errors
    /// When libvirt does not.
    pub async fn refuse(&self) -> Result<(), HypervisorError> {
        self.finish(true, "end the machine that was to be received")
            .await
    }

    async fn finish(&self, cancelled: bool, what: &str) -> Result<(), HypervisorError> {
        let parameters = [("destination_name", self.name.clone())];
        let body = Writer::default()
            .parameters(&parameters)
            .bytes(&[])
            .number(INCOMING)
            .number(u32::from(cancelled));
        let finish = Procedure::MigrateFinish;
        let call = self.connection.call_within(finish, what, body, START_LIMIT);
        call.await?;
        Ok(())
    }

    /// What the other side's libvirt would say of itself, made here: a peer's is not given to this one.
    fn cookie(&self, rest: &str) -> Vec<u8> {
        let mut id = [0; 16];
        // Any host but this one.
        let random = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
        if random.is_err() {
            id = self.uuid.map(|byte| !byte);
        }
        let cookie = format!(
            "<qemu-migration><name>{}</name><uuid>{}</uuid><hostname>drover</hostname><hostuuid>{}</hostuuid>{rest}</qemu-migration>\0",
            escaped(&self.name),
            uuid(&self.uuid),
            uuid(&id),
        );
        cookie.into_bytes()
    }
}

fn of_disks(disks: &[String]) -> Vec<(&'static str, String)> {
    disks
        .iter()
        .map(|disk| ("migrate_disks", disk.clone()))
        .collect()
}

fn uri(socket: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    let path = socket.as_os_str().as_encoded_bytes();
    let path: String = path
        .iter()
        .map(|byte| match plain(*byte) {
            true => char::from(*byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect();
    format!("unix://{path}")
}

fn uuid(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_named_by_a_uri() {
        assert_eq!(uri(Path::new("/a/.b c%é")), "unix:///a/.b%20c%25%C3%A9");
    }

    #[test]
    fn a_uuid_is_written_as_usual() {
        let bytes = std::array::from_fn(|n| n as u8 + 0xf0 - if n > 7 { 0x80 } else { 0 });
        assert_eq!(uuid(&bytes), "f0f1f2f3-f4f5-f6f7-7879-7a7b7c7d7e7f");
    }
}
