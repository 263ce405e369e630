//! Exit codes, and errors as the one line that a person reads.

use std::fmt;

use drover_mount::MountError;
use drover_net::{Code, NetError, Refusal};
use drover_teleport::TeleportError;

use crate::text::clean;

/// What the process's exit code says. Scripts rely on the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It did not work.
    Failed = 1,
    /// The command line asks for something that makes no sense.
    Usage = 2,
    /// A peer or this site will not do it: trust, space or policy; or it has no image of that name.
    Refused = 3,
}

impl Exit {
    /// The meaning of another drover process's exit code.
    pub fn of_code(code: u8) -> Exit {
        match code {
            2 => Exit::Usage,
            3 => Exit::Refused,
            _ => Exit::Failed,
        }
    }
}

/// An error that knows its exit code.
#[derive(Debug)]
pub struct Failure {
    exit: Exit,
    message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// An error of the command line: exit code 2.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Failure {
        exit: Exit::Usage,
        message: message.into(),
    }
    .into()
}

/// An error with an exit code that was decided elsewhere.
pub fn failure(exit: Exit, message: impl Into<String>) -> anyhow::Error {
    Failure {
        exit,
        message: message.into(),
    }
    .into()
}

/// This site has no image of that name: the same code as when a peer has none.
pub fn no_image(name: &drover_core::ImageName) -> anyhow::Error {
    failure(
        Exit::Refused,
        format!("this site has no image called {name}; `drover images` lists them"),
    )
}

/// What a peer's refusal means here: a decision, or a failure.
pub fn refused_by_peer(peer: &str, refusal: &Refusal) -> anyhow::Error {
    let exit = match refusal.code.is_decision() {
        true => Exit::Refused,
        false => Exit::Failed,
    };
    let message = format!("{}: {}", clean(peer), clean(&refusal.message));
    Failure { exit, message }.into()
}

/// What whoever asked is told of a failure, whatever it was.
pub fn failed(e: impl Into<anyhow::Error>) -> Refusal {
    Refusal::new(Code::Failed, one_line(&e.into()))
}

/// What whoever asked is told of an error: that it failed, or was refused.
pub fn refusal_of(e: anyhow::Error) -> Refusal {
    let cause = e.chain().find_map(|c| c.downcast_ref::<TeleportError>());
    let code = match exit_of(&e) {
        Exit::Refused => cause
            .and_then(TeleportError::refusal)
            .unwrap_or(Code::Denied),
        _ => Code::Failed,
    };
    Refusal::new(code, one_line(&e))
}

/// The exit code of an error: the first cause that has one decides.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    for cause in error.chain() {
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return failure.exit;
        }
        if let Some(e) = cause.downcast_ref::<TeleportError>() {
            return if e.refusal().is_some() {
                Exit::Refused
            } else {
                Exit::Failed
            };
        }
        if let Some(e) = cause.downcast_ref::<MountError>() {
            match e {
                MountError::Refused(_) | MountError::Denied(_) => return Exit::Refused,
                MountError::Net(e) if e.refused() => return Exit::Refused,
                _ => return Exit::Failed,
            }
        }
        if let Some(e) = cause.downcast_ref::<NetError>() {
            return if e.refused() {
                Exit::Refused
            } else {
                Exit::Failed
            };
        }
    }
    Exit::Failed
}

/// The error and its causes in one line that cannot disturb a terminal.
pub fn one_line(error: &anyhow::Error) -> String {
    // Several of the errors name their cause themselves; do not say it twice.
    let mut line = String::new();
    for cause in error.chain() {
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
    use anyhow::Context;

    #[test]
    fn codes_survive_context() {
        let refusal = Refusal {
            code: Code::Untrusted,
            message: "ticket\twas used".into(),
            retry: false,
        };
        let e = Err::<(), _>(refused_by_peer("lyon", &refusal))
            .context("pairing")
            .unwrap_err();
        assert_eq!(exit_of(&e), Exit::Refused);
        assert_eq!(one_line(&e), "pairing: lyon: ticket\\twas used");
        assert_eq!(exit_of(&usage("x")), Exit::Usage);
        assert_eq!(exit_of(&anyhow::anyhow!("x")), Exit::Failed);
    }

    #[test]
    fn teleport_and_net_errors_have_codes() {
        let space = TeleportError::Refused(Refusal::new(Code::NoSpace, "lyon has no space"));
        assert_eq!(exit_of(&space.into()), Exit::Refused);
        assert_eq!(exit_of(&TeleportError::Stopped.into()), Exit::Failed);
        let cut = NetError::Truncated {
            peer: "lyon".into(),
        };
        assert_eq!(exit_of(&cut.into()), Exit::Failed);
        let e = NetError::Handshake {
            peer: "lyon".into(),
            reason: "no key".into(),
        };
        assert_eq!(exit_of(&TeleportError::from(e).into()), Exit::Refused);
        let denied = anyhow::Error::from(MountError::Denied("lyon: no".into()));
        assert_eq!(exit_of(&denied.context("cannot show it")), Exit::Refused);
        let away = MountError::Unreachable("lyon is away".into());
        assert_eq!(exit_of(&away.into()), Exit::Failed);
    }

    #[test]
    fn a_cause_is_said_once_and_without_control_characters() {
        let e = anyhow::anyhow!("no\x1b[31m such\nfile")
            .context("cannot read x: no\x1b[31m such\nfile");
        assert_eq!(one_line(&e), "cannot read x: no\\u{1b}[31m such\\nfile");
        let e = anyhow::Error::from(std::io::Error::from_raw_os_error(98))
            .context("cannot listen on [::]:7377: address already in use");
        assert_eq!(
            one_line(&e),
            "cannot listen on [::]:7377: address already in use"
        );
    }
}
