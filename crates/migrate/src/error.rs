//! Errors of a migration.

use std::io;

use drover_core::{DeviceError, ImageName};
use drover_device::backend::nbd::NbdError;
use drover_hypervisor::HypervisorError;
use drover_net::{Code, NetError, Refusal};
use drover_teleport::TeleportError;

/// Why a migration failed, or a step of it.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The connection with the other site.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The other site, or a record of this one, does not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The hypervisor.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// An image could not be sent.
    #[error(transparent)]
    Teleport(#[from] TeleportError),
    /// A disk.
    #[error("disk {disk}: {error}")]
    Disk {
        /// Its name.
        disk: String,
        /// Why.
        error: DeviceError,
    },
    /// The hypervisor's NBD server.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// The socket of the hypervisor's stream.
    #[error("the hypervisor's stream: {0}")]
    Stream(#[source] io::Error),
    /// A file or directory of ours.
    #[error("{what}: {error}")]
    File {
        /// What was being done to which.
        what: String,
        /// Why.
        error: io::Error,
    },
    /// The other site sent what it must not.
    #[error("protocol error in {0}")]
    Protocol(&'static str),
    /// The machine did not move, and runs on.
    #[error("{machine} stays here: {why}")]
    Stayed {
        /// Its name.
        machine: String,
        /// Why.
        why: String,
        /// The other site's refusal, if that is why.
        code: Option<Code>,
    },
    /// The machine was taken there, and does not run.
    #[error(
        "{machine} is at {peer} now, but does not run there: {why}; here it is paused and must not continue"
    )]
    NotStarted {
        /// Its name there.
        machine: String,
        /// The other site.
        peer: String,
        /// Why.
        why: String,
    },
    /// The machine runs there, and waits for disks whose write leases this site did not have any more.
    #[error(
        "{machine} runs at {peer}, and waits there for a disk whose write lease this site had lost ({why}): at {peer}, end the mount that stands by for it (`drover mounts`), and export the image at the same socket again"
    )]
    LeaseLost {
        /// Its name there.
        machine: String,
        /// The other site.
        peer: String,
        /// Which, and why.
        why: String,
    },
    /// A person there has given up what had not followed it of its disks: it is here only.
    #[error(
        "{machine} is at {peer}: {why}; the disks here still have it, as of when {machine} was handed over: here it is paused and must not continue"
    )]
    GivenUp {
        /// Its name there.
        machine: String,
        /// The other site.
        peer: String,
        /// What the other site says.
        why: String,
    },
    /// The machine runs there, and some of its disks is still here only.
    #[error(
        "{machine} runs at {peer}, and what it reads of its disks that is still here waits there: {why}; run the same command again"
    )]
    Unfinished {
        /// Its name there.
        machine: String,
        /// The other site.
        peer: String,
        /// Why the rest does not follow now.
        why: String,
        /// Whether the same command may succeed without a change.
        again: bool,
    },
    /// The program that uses a disk.
    #[error("the program was not {what}: {why}")]
    Hook {
        /// What was to be done with it.
        what: &'static str,
        /// Why it was not.
        why: String,
    },
    /// What cannot move.
    #[error("{0}")]
    Unsupported(String),
    /// A step took too long.
    #[error("{what} took longer than {seconds} s")]
    TooLong {
        /// The step.
        what: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// The conversation with the other site broke.
    #[error("the connection with the other site was lost")]
    Lost,
    /// An image differs from the state that was sent: an old copy there was not what its generations said.
    #[error(
        "the old copy of {0} at the other site is not what its generations say: the disks are compared by digests, also when the same \
         command is run again"
    )]
    OldCopy(ImageName),
    /// The hypervisor paused the machine before what was delivered was compared.
    #[error("its memory was sent before its disks were compared: they are compared by digests")]
    TooEarly,
    /// The machine writes to its disks faster than they are copied.
    #[error(
        "the machine writes to its disks faster than the link carries: the copy begins anew, and its writes wait for the link"
    )]
    TooFast,
    /// It was stopped.
    #[error("stopped")]
    Stopped,
}

impl MigrateError {
    /// The other site has refused a machine whose record cannot be written: its disks refuse its writes as long as that says that
    /// it was handed over.
    pub(crate) fn paused(machine: &ImageName, why: &Refusal) -> Self {
        let text = format!(
            "{why}; {machine} stays paused here, since its record says that it was handed over: make that file writable, then run the same command again"
        );
        Refusal::new(why.code, text).into()
    }

    /// The refusal that it is.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused(refusal)
            | Self::Net(NetError::Refused(refusal))
            | Self::Teleport(TeleportError::Refused(refusal)) => Some(refusal.code),
            Self::Stayed { code, .. } => *code,
            _ => None,
        }
    }

    /// Whether the same step may succeed later without a change.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Net(e) => e.retryable(),
            Self::Teleport(e) => e.retryable(),
            Self::Lost | Self::OldCopy(_) | Self::TooEarly | Self::TooFast => true,
            Self::Unfinished { again, .. } => *again,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_run_there_may_be_a_program() {
        let error = MigrateError::NotStarted {
            machine: "kv".into(),
            peer: "lyon".into(),
            why: "its port is in use".into(),
        };
        assert_eq!(
            error.to_string(),
            "kv is at lyon now, but does not run there: its port is in use; here it is paused and must not continue"
        );
    }
}
