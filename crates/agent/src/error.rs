//! The crate's error type, its classification, and how it is shown as one line.

use std::error::Error as StdError;
use std::fmt;

use drover_core::{DeviceError, ImageName, NameError};
use drover_device::builder::BuildError;
use drover_device::synced::SyncedError;
use drover_frontend::{fuse, kernel_nbd, loopdev, nbd};
use drover_image::ImageError;
use drover_mount::MountError;
use drover_net::{Code, NetError, Refusal};
use drover_store::profile::ProfileError;
use drover_store::{CatalogError, StoreError};
use drover_teleport::TeleportError;

use crate::text::clean;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Classification of failures. The numbers are the exit codes of `drover`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It failed; a retry may succeed.
    Failed = 1,
    /// The request is invalid.
    Usage = 2,
    /// Refused by a peer or this site: trust, space or policy, or there is no image of that name.
    Refused = 3,
    /// What this site sends has taken over at the peer: this site has the old copy.
    Fenced = 4,
}

impl Kind {
    /// The kind for an exit code of another drover process.
    pub fn of_code(code: u8) -> Kind {
        match code {
            2 => Kind::Usage,
            3 => Kind::Refused,
            4 => Kind::Fenced,
            _ => Kind::Failed,
        }
    }
}

/// Why an operation failed. The `{:#}` format includes the chain of causes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A failure detected by this crate itself.
    #[error("{message}")]
    Said {
        /// Its kind.
        kind: Kind,
        /// Message for the user.
        message: String,
    },
    /// A refusal of another process, or one of this process that callers distinguish by its code.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// A failure with its context.
    #[error(fmt = doing)]
    Doing {
        /// What was being done.
        what: String,
        /// The cause.
        source: Box<Error>,
    },
    /// The process that started a mount was gone before the mount was ready.
    #[error("the caller was gone before the mount was ready")]
    CallerGone,
    /// System I/O error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Invalid JSON in a record or in a message of another process.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A background task panicked.
    #[error("{0}")]
    Task(#[from] tokio::task::JoinError),
    /// A timeout.
    #[error("{0}")]
    Late(#[from] tokio::time::error::Elapsed),
    /// This process is shutting down.
    #[error("{0}")]
    Closed(#[from] tokio::sync::AcquireError),
    /// An invalid name.
    #[error("{0}")]
    Name(#[from] NameError),
    /// A block device.
    #[error("{0}")]
    Device(#[from] DeviceError),
    /// A cache.
    #[error("{0}")]
    Synced(#[from] SyncedError),
    /// Building the device stack of a disk.
    #[error("{0}")]
    Stack(#[from] BuildError),
    /// A profile of an image.
    #[error("{0}")]
    Profile(#[from] ProfileError),
    /// An image.
    #[error("{0}")]
    Image(#[from] ImageError),
    /// A FUSE file.
    #[error("{0}")]
    Fuse(#[from] fuse::FuseError),
    /// A loop device.
    #[error("{0}")]
    Loop(#[from] loopdev::LoopError),
    /// A block device of the kernel.
    #[error("{0}")]
    Kernel(#[from] kernel_nbd::Error),
    /// An NBD server.
    #[error("{0}")]
    Nbd(#[from] nbd::NbdError),
    /// A connection.
    #[error("{0}")]
    Net(#[from] NetError),
    /// A mount, or its server.
    #[error("{0}")]
    Mount(#[from] MountError),
    /// A transfer, or the site's state.
    #[error("{0}")]
    Teleport(#[from] TeleportError),
    /// The catalog.
    #[error("{0}")]
    Catalog(#[from] CatalogError),
    /// Another part of the site's state.
    #[error("{0}")]
    Store(#[from] StoreError),
}

fn doing(what: &str, source: &Error, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match f.alternate() {
        true => write!(f, "{what}: {source:#}"),
        false => f.write_str(what),
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(e: rustix::io::Errno) -> Error {
        Error::Io(e.into())
    }
}

impl Error {
    /// A plain failure with this message.
    pub fn msg(message: impl fmt::Display) -> Error {
        Error::of_kind(Kind::Failed, message.to_string())
    }

    /// A usage error.
    pub fn usage(message: impl Into<String>) -> Error {
        Error::of_kind(Kind::Usage, message)
    }

    /// A refusal by this site.
    pub fn refused(message: impl Into<String>) -> Error {
        Error::of_kind(Kind::Refused, message)
    }

    /// An error with a given kind.
    pub fn of_kind(kind: Kind, message: impl Into<String>) -> Error {
        Error::Said {
            kind,
            message: message.into(),
        }
    }

    /// A peer, or this site, has no image of that name.
    pub fn no_image(peer: Option<&str>, name: impl fmt::Display) -> Error {
        Error::refused(match peer {
            Some(peer) => {
                format!("{peer} has no image called {name}; `drover images {peer}` lists them")
            }
            None => format!("this site has no image called {name}; `drover images` lists them"),
        })
    }

    /// The error of a request about an image, here or at a peer, which may not have it.
    pub fn about_image(self, peer: Option<&str>, name: &ImageName) -> Error {
        match self.code() {
            Some(Code::NotFound) => Error::no_image(peer, name),
            _ => self,
        }
    }

    /// Maps a peer's refusal to an error of this process: a refusal or a failure.
    pub fn of_peer(peer: &str, refusal: &Refusal) -> Error {
        let message = format!("{}: {}", clean(peer), clean(&refusal.message));
        Error::coded(refusal.code, message)
    }

    /// A failure that callers distinguish by its code.
    pub fn coded(code: Code, message: impl Into<String>) -> Error {
        Error::Refused(Refusal::new(code, message.into()))
    }

    /// The code of the refusal in the chain of causes.
    pub fn code(&self) -> Option<Code> {
        chain(self).find_map(|cause| match cause.downcast_ref() {
            Some(Error::Refused(refusal)) => Some(refusal.code),
            _ => None,
        })
    }

    /// Adds what was being done.
    pub fn context(self, what: impl fmt::Display) -> Error {
        Error::Doing {
            what: what.to_string(),
            source: Box::new(self),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        kind_of(self)
    }

    /// The first cause of this type.
    pub fn cause<T: StdError + 'static>(&self) -> Option<&T> {
        chain(self).find_map(|cause| cause.downcast_ref())
    }
}

/// The refusal to send to a caller for a failure of any type.
pub(crate) fn failed(e: impl Into<Error>) -> Refusal {
    let e = e.into();
    let away = e.cause().is_some_and(CatalogError::may_pass);
    let away = away.then_some(Code::Unavailable);
    let code = away.or(e.code()).filter(|code| !code.is_decision());
    Refusal::new(code.unwrap_or(Code::Failed), one_line(&e))
}

/// The refusal to send to a caller for an error: failed or refused.
pub(crate) fn refusal_of(e: Error) -> Refusal {
    if e.kind() != Kind::Refused {
        return failed(e);
    }
    let code = e.cause().and_then(TeleportError::refusal).or(e.code());
    Refusal::new(code.unwrap_or(Code::Denied), one_line(&e))
}

/// A refusal as a peer may see it: it is told no path of this host, which then only goes to the log.
pub(crate) fn for_peer(refusal: Refusal) -> Refusal {
    if !refusal.message.contains('/') {
        return refusal;
    }
    tracing::warn!("{}", clean(&refusal.message));
    let message = "the site could not do it: the reason is in its log".into();
    Refusal { message, ..refusal }
}

/// Adds to an error what was being done.
pub(crate) trait Context<T> {
    /// Adds `what`.
    fn context(self, what: impl fmt::Display) -> Result<T>;

    /// Adds the result of `what`, which is called only on failure.
    fn with_context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|e| e.into().context(what))
    }

    fn with_context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| e.into().context(what()))
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Error::msg(what))
    }

    fn with_context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.ok_or_else(|| Error::msg(what()))
    }
}

/// Returns an error with a formatted message.
macro_rules! bail {
    ($($message:tt)*) => {
        return Err($crate::error::Error::msg(format!($($message)*)))
    };
}
pub(crate) use bail;

/// An error with a formatted message.
macro_rules! msg {
    ($($message:tt)*) => {
        $crate::error::Error::msg(format!($($message)*))
    };
}
pub(crate) use msg;

/// The error and its causes.
pub fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    let causes = std::iter::successors(Some(error), |e| (*e).source());
    // A boxed source appears as its box: unwrap it.
    causes.map(|e| match e.downcast_ref::<Box<Error>>() {
        Some(inner) => &**inner as &(dyn StdError + 'static),
        None => e,
    })
}

/// The kind of any error: that of the first cause that has one.
pub fn kind_of(error: &(dyn StdError + 'static)) -> Kind {
    let refused = |refused| match refused {
        true => Kind::Refused,
        false => Kind::Failed,
    };
    let kind = chain(error).find_map(|cause| {
        if let Some(Error::Said { kind, .. }) = cause.downcast_ref() {
            return Some(*kind);
        }
        if let Some(Error::Refused(refusal)) = cause.downcast_ref() {
            return Some(refused(refusal.code.is_decision()));
        }
        if let Some(e) = cause.downcast_ref::<TeleportError>() {
            return Some(refused(e.refusal().is_some()));
        }
        if let Some(e) = cause.downcast_ref::<MountError>() {
            return Some(refused(match e {
                MountError::Refused(_) | MountError::CannotConnect(_) => true,
                MountError::Net(e) => e.refused(),
                _ => false,
            }));
        }
        let e = cause.downcast_ref::<NetError>()?;
        Some(refused(e.refused()))
    });
    kind.unwrap_or(Kind::Failed)
}

/// The error and its causes on one line, safe to print to a terminal.
pub fn one_line(error: &(dyn StdError + 'static)) -> String {
    // Some errors already include their cause; do not repeat it.
    let mut line = String::new();
    for cause in chain(error) {
        let text = plain(&cause.to_string());
        if !says(&line, &text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
    }
    clean(&line)
}

/// Whether the line already contains the cause, perhaps without its initial capital.
fn says(line: &str, cause: &str) -> bool {
    line.to_lowercase().contains(&cause.to_lowercase())
}

/// The text without the numbers and the capitals of errors of the operating system.
fn plain(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let start = out.rfind(": ").map_or(0, |at| at + 2);
        if let Some(first) = out.get_mut(start..start + 1) {
            first.make_ascii_lowercase();
        }
        out += part.split_once(')').map_or(part, |(_, rest)| rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_survive_context() {
        let refusal = Refusal {
            code: Code::Untrusted,
            message: "ticket\twas used".into(),
            retry: false,
        };
        let e = Error::of_peer("lyon", &refusal).context("pairing");
        assert_eq!(e.kind(), Kind::Refused);
        assert_eq!(one_line(&e), "pairing: lyon: ticket\\twas used");
        assert_eq!(format!("{e:#}"), one_line(&e));
        assert_eq!(Error::usage("x").kind(), Kind::Usage);
        assert_eq!(Error::msg("x").kind(), Kind::Failed);
    }

    #[test]
    fn teleport_and_net_errors_have_kinds() {
        let space = TeleportError::Refused(Refusal::new(Code::NoSpace, "lyon has no space"));
        assert_eq!(kind_of(&space), Kind::Refused);
        assert_eq!(Error::from(space).kind(), Kind::Refused);
        assert_eq!(Error::from(TeleportError::Stopped).kind(), Kind::Failed);
        let cut = NetError::Truncated {
            peer: "lyon".into(),
        };
        assert_eq!(Error::from(cut).kind(), Kind::Failed);
        let e = NetError::Handshake {
            peer: "lyon".into(),
            reason: "no key".into(),
        };
        assert_eq!(Error::from(TeleportError::from(e)).kind(), Kind::Refused);
        let denied = Error::from(MountError::CannotConnect("lyon: no".into()));
        assert_eq!(denied.context("cannot show it").kind(), Kind::Refused);
        let away = MountError::Unreachable("lyon is away".into());
        assert_eq!(Error::from(away).kind(), Kind::Failed);
    }

    #[test]
    fn a_cause_is_said_once_and_without_control_characters() {
        let e = Error::msg("no\x1b[31m such\nfile").context("cannot read x: no\x1b[31m such\nfile");
        assert_eq!(one_line(&e), "cannot read x: no\\u{1b}[31m such\\nfile");
        let gone = std::io::Error::from_raw_os_error(2);
        let e = Error::msg(format!(
            "nofile: cannot open the image: {gone}; try another"
        ));
        assert_eq!(
            one_line(&e),
            "nofile: cannot open the image: no such file or directory; try another"
        );
        assert_eq!(one_line(&gone), "no such file or directory");
        let e = Error::from(std::io::Error::from_raw_os_error(98))
            .context("cannot listen on [::]:7377: address already in use");
        assert_eq!(
            one_line(&e),
            "cannot listen on [::]:7377: address already in use"
        );
    }
}
