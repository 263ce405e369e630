//! Errors of the command line itself.

use drover_agent::error::{Error, one_line};
use drover_net::Code;
use drover_teleport::TeleportError;

/// A usage error: exit code 2.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Error::usage(message).into()
}

/// A refusal, or something that does not exist: exit code 3.
pub fn refused(message: impl Into<String>) -> anyhow::Error {
    Error::refused(message).into()
}

/// Adds the option that helps to an error with this code.
pub fn hint(e: Error, code: Code, hint: &str) -> anyhow::Error {
    match e.code() == Some(code) {
        true => Error::of_kind(e.kind(), format!("{}; {hint}", one_line(&e))).into(),
        false => e.into(),
    }
}

/// This site has no image of that name.
pub fn no_image(name: &drover_core::ImageName) -> anyhow::Error {
    Error::no_image(name).into()
}

/// A failure to send. If the file could be sent without interpreting its format, the message ends with that hint.
pub fn of_sending(error: impl Into<TeleportError>) -> anyhow::Error {
    let error = error.into();
    match &error {
        TeleportError::Image(image) if image.opaque_helps() => {
            let line = one_line(&error);
            Error::msg(format!("{line}; --opaque sends the file as it is")).into()
        }
        _ => error.into(),
    }
}
