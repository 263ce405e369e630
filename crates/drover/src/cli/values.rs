//! Values that several commands take.

use clap::ValueEnum;
use drover_core::ImageName;

/// What an image is turned into on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// The guest's disk, byte for byte
    Raw,
    /// A qcow2 image without backing file
    Qcow2,
}

impl From<Target> for drover_agent::changes::Target {
    fn from(target: Target) -> Self {
        match target {
            Target::Raw => Self::Raw,
            Target::Qcow2 => Self::Qcow2,
        }
    }
}

pub fn image_name(text: &str) -> Result<ImageName, String> {
    ImageName::new(text).map_err(|e| e.to_string())
}
