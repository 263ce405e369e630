//! What can go wrong, whether it was a refusal, and the one line that a person reads.

use std::error::Error as StdError;
use std::fmt;

use drover_core::{DeviceError, ImageName, NameError};
use drover_device::builder::BuildError;
use drover_device::synced::{OrderError, SyncedError};
use drover_frontend::{fuse, kernel_nbd, loopdev, nbd};
use drover_image::ImageError;
use drover_mount::MountError;
use drover_net::{Code, NetError, Refusal};
use drover_store::CatalogError;
use drover_teleport::TeleportError;

use crate::text::clean;

/// What an agent's function returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure it was. The numbers are the exit codes of `drover`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It did not work; it may when it is tried again.
    Failed = 1,
    /// What was asked for makes no sense.
    Usage = 2,
    /// A peer or this site will not do it: trust, space or policy; or it has no image of that name.
    Refused = 3,
}

impl Kind {
    /// The meaning of another drover process's exit code.
    pub fn of_code(code: u8) -> Kind {
        match code {
            2 => Kind::Usage,
            3 => Kind::Refused,
            _ => Kind::Failed,
        }
    }
}

/// Why an agent's function failed. Displayed with `#`, what was being done comes with its cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What this crate itself found.
    #[error("{message}")]
    Said {
        /// Of what kind it is.
        kind: Kind,
        /// For a person.
        message: String,
    },
    /// What another process refused, or what this one refuses for a reason that callers tell apart by its code.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// What was being done, and why it failed.
    #[error(fmt = doing)]
    Doing {
        /// What.
        what: String,
        /// Why.
        source: Box<Error>,
    },
    /// Whoever was to hear that it is ready went away.
    #[error("nobody hears that it is ready")]
    Unheard,
    /// The system.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A record, or what another process says.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A task that panicked.
    #[error("{0}")]
    Task(#[from] tokio::task::JoinError),
    /// An answer that took too long.
    #[error("{0}")]
    Late(#[from] tokio::time::error::Elapsed),
    /// The end of this process.
    #[error("{0}")]
    Closed(#[from] tokio::sync::AcquireError),
    /// A name.
    #[error("{0}")]
    Name(#[from] NameError),
    /// A device.
    #[error("{0}")]
    Device(#[from] DeviceError),
    /// A cache.
    #[error("{0}")]
    Synced(#[from] SyncedError),
    /// The stack of a disk.
    #[error("{0}")]
    Stack(#[from] BuildError),
    /// An order to fetch in.
    #[error("{0}")]
    Order(#[from] OrderError),
    /// An image.
    #[error("{0}")]
    Image(#[from] ImageError),
    /// A file that is a disk.
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
    /// A mount, or what serves it.
    #[error("{0}")]
    Mount(#[from] MountError),
    /// A transfer, or the site.
    #[error("{0}")]
    Teleport(#[from] TeleportError),
    /// The catalog.
    #[error("{0}")]
    Catalog(#[from] CatalogError),
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
    /// It did not work, for this reason.
    pub fn msg(message: impl fmt::Display) -> Error {
        Error::of_kind(Kind::Failed, message.to_string())
    }

    /// What was asked for makes no sense.
    pub fn usage(message: impl Into<String>) -> Error {
        Error::of_kind(Kind::Usage, message)
    }

    /// This site will not do it.
    pub fn refused(message: impl Into<String>) -> Error {
        Error::of_kind(Kind::Refused, message)
    }

    /// A failure whose kind was decided elsewhere.
    pub fn of_kind(kind: Kind, message: impl Into<String>) -> Error {
        Error::Said {
            kind,
            message: message.into(),
        }
    }

    /// This site has no image of that name: refused, as when a peer has none.
    pub fn no_image(name: &ImageName) -> Error {
        Error::refused(format!(
            "this site has no image called {name}; `drover images` lists them"
        ))
    }

    /// What a peer's refusal means here: a decision, or a failure.
    pub fn of_peer(peer: &str, refusal: &Refusal) -> Error {
        let message = format!("{}: {}", clean(peer), clean(&refusal.message));
        Error::coded(refusal.code, message)
    }

    /// A failure that callers tell apart by its code.
    pub fn coded(code: Code, message: impl Into<String>) -> Error {
        Error::Refused(Refusal::new(code, message.into()))
    }

    /// The code of a refusal among the causes.
    pub fn code(&self) -> Option<Code> {
        chain(self).find_map(|cause| match cause.downcast_ref() {
            Some(Error::Refused(refusal)) => Some(refusal.code),
            _ => None,
        })
    }

    /// This, with what was being done.
    pub fn context(self, what: impl fmt::Display) -> Error {
        Error::Doing {
            what: what.to_string(),
            source: Box::new(self),
        }
    }

    /// Of what kind it is.
    pub fn kind(&self) -> Kind {
        kind_of(self)
    }

    /// The first of the causes that is of this type.
    pub fn cause<T: StdError + 'static>(&self) -> Option<&T> {
        chain(self).find_map(|cause| cause.downcast_ref())
    }
}

/// What whoever asked is told of a failure, whatever it was.
pub(crate) fn failed(e: impl Into<Error>) -> Refusal {
    let e = e.into();
    let code = e.code().filter(|code| !code.is_decision());
    Refusal::new(code.unwrap_or(Code::Failed), one_line(&e))
}

/// What whoever asked is told of an error: that it failed, or was refused.
pub(crate) fn refusal_of(e: Error) -> Refusal {
    if e.kind() != Kind::Refused {
        return failed(e);
    }
    let code = e.cause().and_then(TeleportError::refusal).or(e.code());
    Refusal::new(code.unwrap_or(Code::Denied), one_line(&e))
}

/// Says of what went wrong what was being done.
pub(crate) trait Context<T> {
    /// With `what`.
    fn context(self, what: impl fmt::Display) -> Result<T>;

    /// With what `what` says, which is asked only when it failed.
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

/// Fails with a message.
macro_rules! bail {
    ($($message:tt)*) => {
        return Err($crate::error::Error::msg(format!($($message)*)))
    };
}
pub(crate) use bail;

/// An error that says a message.
macro_rules! msg {
    ($($message:tt)*) => {
        $crate::error::Error::msg(format!($($message)*))
    };
}
pub(crate) use msg;

/// The error and its causes.
pub(crate) fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    let causes = std::iter::successors(Some(error), |e| (*e).source());
    // A boxed source is seen as its box.
    causes.map(|e| match e.downcast_ref::<Box<Error>>() {
        Some(inner) => &**inner as &(dyn StdError + 'static),
        None => e,
    })
}

/// The kind of any error: the first cause that has one decides.
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

/// The error and its causes in one line that cannot disturb a terminal.
pub fn one_line(error: &(dyn StdError + 'static)) -> String {
    // Several of the errors name their cause themselves; do not say it twice.
    let mut line = String::new();
    for cause in chain(error) {
        let text = cause.to_string();
        if !says(&line, &text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
    }
    clean(&line)
}

/// Whether a cause is named in the line already, perhaps without its capital and its number.
fn says(line: &str, cause: &str) -> bool {
    let words = cause.split(" (os error ").next().unwrap_or(cause);
    line.to_lowercase().contains(&words.to_lowercase())
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
        let e = Error::from(std::io::Error::from_raw_os_error(98))
            .context("cannot listen on [::]:7377: address already in use");
        assert_eq!(
            one_line(&e),
            "cannot listen on [::]:7377: address already in use"
        );
    }
}
