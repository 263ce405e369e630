//! What the command line itself finds wrong.

use drover_agent::error::Error;

/// The command line asks for something that makes no sense.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Error::usage(message).into()
}

/// It will not be done, or there is nothing of that name.
pub fn refused(message: impl Into<String>) -> anyhow::Error {
    Error::refused(message).into()
}

/// This site has no image of that name.
pub fn no_image(name: &drover_core::ImageName) -> anyhow::Error {
    Error::no_image(name).into()
}
