//! Values that several commands take.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use drover_agent::text;
use drover_core::ImageName;
use drover_store::domain;

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

/// The domain that a command is about.
#[derive(Debug, Args)]
pub struct DomainArg {
    /// Domain of the images
    #[arg(long, global = true, value_name = "NAME", value_parser = domain::check, default_value = domain::DEFAULT)]
    pub domain: String,
}

/// The disk space that a peer may take: a size, or `none` for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota(pub Option<u64>);

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Quota(None)),
            size => Ok(Quota(Some(text::parse_size(size)?))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_a_size_or_none() {
        assert_eq!("500G".parse(), Ok(Quota(Some(500 << 30))));
        assert_eq!("none".parse(), Ok(Quota(None)));
        assert!("much".parse::<Quota>().is_err());
    }
}
