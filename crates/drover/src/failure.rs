//! Errors of the command line itself.

use drover_agent::error::Error;

/// A usage error: exit code 2.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Error::usage(message).into()
}

/// A refusal, or something that does not exist: exit code 3.
pub fn refused(message: impl Into<String>) -> anyhow::Error {
    Error::refused(message).into()
}

/// This site has no image of that name.
pub fn no_image(name: &drover_core::ImageName) -> anyhow::Error {
    Error::no_image(name).into()
}
