//! Values that several commands take.

use clap::ValueEnum;
use drover_core::ImageName;

/// The format that an image is converted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The guest's disk, byte for byte
    Raw,
    /// A qcow2 image without a backing file
    Qcow2,
}

impl From<Format> for drover_agent::changes::Target {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
        }
    }
}

pub fn image_name(text: &str) -> Result<ImageName, String> {
    ImageName::new(text).map_err(|e| e.to_string())
}
