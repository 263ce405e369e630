//! Errors of hypervisors, each one line that names the socket, what was asked, and the way out.

use std::fmt;
use std::io;
use std::time::Duration;

/// Why a hypervisor could not be asked, or did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HypervisorError {
    /// Nobody can be reached at the socket.
    #[error("cannot connect to QEMU at {socket}: {reason}")]
    Connect {
        /// The socket's path.
        socket: String,
        /// Why not.
        reason: String,
        /// Whether there is no socket, or nobody listens at it: it has ended.
        is_gone: bool,
    },
    /// The other end speaks, but not QMP.
    #[error(
        "{socket} is not a QMP socket: {reason}; name the one that QEMU's option -qmp has made"
    )]
    NotQmp {
        /// The socket's path.
        socket: String,
        /// What was there instead.
        reason: String,
    },
    /// The other end accepted, and said nothing.
    #[error(
        "{socket}: no QMP greeting within {after:?}: another program is connected to it (QEMU serves one at a time), \
         or it is not a QMP socket"
    )]
    Silent {
        /// The socket's path.
        socket: String,
        /// How long was waited.
        after: Duration,
    },
    /// The connection ended, since QEMU did or because it broke.
    #[error("QEMU at {socket} closed the connection: {reason}")]
    Closed {
        /// The socket's path.
        socket: String,
        /// Why.
        reason: String,
    },
    /// What arrived is no message of QMP, or none that belongs here.
    #[error("QEMU at {socket} sent what is not QMP: {reason}")]
    Malformed {
        /// The socket's path.
        socket: String,
        /// What is wrong with it.
        reason: String,
    },
    /// QEMU answered with an error.
    #[error("QEMU at {socket} refused {command}: {description}")]
    Refused {
        /// The socket's path.
        socket: String,
        /// The command.
        command: String,
        /// The kind of error, which programs may look at.
        class: ErrorClass,
        /// QEMU's words, on one line.
        description: String,
    },
    /// No answer in time. What was asked may still happen.
    #[error("QEMU at {socket} has not answered {command} within {after:?}: it hangs or is busy")]
    TimedOut {
        /// The socket's path.
        socket: String,
        /// The command, or an older one that this one had to wait for.
        command: String,
        /// How long was waited.
        after: Duration,
    },
    /// What was waited for did not happen in time.
    #[error("QEMU at {socket}: no {what} within {after:?}")]
    NotSeen {
        /// The socket's path.
        socket: String,
        /// What was waited for.
        what: String,
        /// How long was waited.
        after: Duration,
    },
    /// More events arrived than are kept for who does not fetch them.
    #[error(
        "QEMU at {socket}: {lost} events were lost, since they came faster than they were used"
    )]
    EventsLost {
        /// The socket's path.
        socket: String,
        /// How many.
        lost: u64,
    },
    /// The answer does not have the fields that were expected.
    #[error("QEMU at {socket} answered {command} in an unknown way: {reason}")]
    Answer {
        /// The socket's path.
        socket: String,
        /// The command.
        command: String,
        /// What was missing.
        reason: String,
    },
    /// This QEMU cannot do it.
    #[error("QEMU at {socket} {reason}")]
    Unsupported {
        /// The socket's path.
        socket: String,
        /// What it lacks, and the way out.
        reason: String,
    },
    /// A migration ended otherwise than it was meant to.
    #[error("migration of QEMU at {socket} {reason}")]
    Migration {
        /// The socket's path.
        socket: String,
        /// How it ended, with QEMU's words.
        reason: String,
    },
    /// The libvirt daemon cannot be reached.
    #[error("cannot connect to libvirt ({uri}) at {socket}: {reason}")]
    NoLibvirt {
        /// Which libvirt.
        uri: String,
        /// The socket's path.
        socket: String,
        /// Why not.
        reason: String,
    },
    /// The libvirt daemon has no such machine.
    #[error("libvirt ({uri}) has no machine called {name}")]
    NoMachine {
        /// Which libvirt.
        uri: String,
        /// The machine.
        name: String,
    },
    /// The libvirt daemon ended, or what is at its socket is none.
    #[error("libvirt ({uri}) closed the connection")]
    LibvirtClosed {
        /// Which libvirt.
        uri: String,
    },
    /// The libvirt daemon did not do what it was asked.
    #[error("libvirt ({uri}) cannot {what}: {reason}")]
    Libvirt {
        /// Which libvirt.
        uri: String,
        /// What it was asked to do.
        what: String,
        /// Its words, on one line.
        reason: String,
    },
    /// A file or socket of ours could not be made.
    #[error("{path}: {reason}")]
    Local {
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },
}

impl HypervisorError {
    /// Whether the same may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            HypervisorError::Connect { .. }
                | HypervisorError::NoLibvirt { .. }
                | HypervisorError::Silent { .. }
                | HypervisorError::TimedOut { .. }
                | HypervisorError::NotSeen { .. }
                | HypervisorError::EventsLost { .. }
        )
    }

    /// Whether QEMU may have done what was asked, although that was not confirmed.
    #[must_use]
    pub fn undecided(&self) -> bool {
        matches!(
            self,
            HypervisorError::TimedOut { .. }
                | HypervisorError::Closed { .. }
                | HypervisorError::LibvirtClosed { .. }
                | HypervisorError::Malformed { .. }
                | HypervisorError::Answer { .. }
        )
    }

    /// QEMU's kind of error, where it answered with one.
    #[must_use]
    pub fn class(&self) -> Option<&ErrorClass> {
        match self {
            HypervisorError::Refused { class, .. } => Some(class),
            _ => None,
        }
    }
}

/// The kinds of QEMU's errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorClass {
    /// Nearly all of them.
    Generic,
    /// This QEMU does not have the command, or not now.
    CommandNotFound,
    /// The device has not been activated.
    DeviceNotActive,
    /// There is no such device or node.
    DeviceNotFound,
    /// One that was not known when this was written.
    Other(String),
}

impl ErrorClass {
    pub(crate) fn from_name(name: &str) -> Self {
        match name {
            "GenericError" => ErrorClass::Generic,
            "CommandNotFound" => ErrorClass::CommandNotFound,
            "DeviceNotActive" => ErrorClass::DeviceNotActive,
            "DeviceNotFound" => ErrorClass::DeviceNotFound,
            other => ErrorClass::Other(one_line(other)),
        }
    }
}

/// Characters of another program's text that an error repeats.
const MAX_QUOTED: usize = 300;

/// Another program's text as part of one line: no control characters, not endless.
pub(crate) fn one_line(text: &str) -> String {
    let clean = text.trim().trim_end_matches('.');
    let mut out: String = clean
        .chars()
        .take(MAX_QUOTED)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if out.len() < clean.len() {
        out.push_str("...");
    }
    out
}

/// Whether connecting to a socket failed since whoever had it has ended.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// An I/O error without the operating system's number and capital.
pub(crate) fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "there is no such socket".into(),
        io::ErrorKind::ConnectionRefused => "no process is listening there".into(),
        io::ErrorKind::InvalidInput => "the path is too long for a socket".into(),
        _ => {
            let text = error.to_string();
            match text.find(" (os error") {
                Some(at) => text[..at].to_lowercase(),
                None => text,
            }
        }
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorClass::Generic => "GenericError",
            ErrorClass::CommandNotFound => "CommandNotFound",
            ErrorClass::DeviceNotActive => "DeviceNotActive",
            ErrorClass::DeviceNotFound => "DeviceNotFound",
            ErrorClass::Other(name) => name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_say_stays_on_one_line() {
        assert_eq!(one_line(" a\nb\u{1b}[1mc.\n"), "a b [1mc");
        let long = one_line(&"é".repeat(10_000));
        assert!(long.chars().count() == MAX_QUOTED + 3 && long.ends_with("..."));
    }
}
