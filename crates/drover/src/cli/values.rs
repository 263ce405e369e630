//! Values that several commands take.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use drover_agent::home::disk_name;
use drover_agent::mounts::StoreAddress;
use drover_agent::text;
use drover_core::ImageName;
use drover_store::{domain, peer_name};

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

/// A disk in a store and the name that it is served under: `NAME=URL`.
pub fn parse_served_disk(text: &str) -> Result<(ImageName, StoreAddress), String> {
    let (name, url) = text
        .split_once('=')
        .ok_or("expected NAME=URL, as big=s3://bucket/big")?;
    let store = url.parse().map_err(|e| format!("{e}"))?;
    Ok((disk_name(name)?, store))
}

/// An image of this site, or of a peer: `[PEER:]IMAGE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageAt {
    /// The peer; `None` for this site.
    pub peer: Option<String>,
    /// The image's name.
    pub name: ImageName,
}

impl FromStr for ImageAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Images of earlier versions may have a name with a colon, after what no peer can be called.
        let at_peer = text
            .split_once(':')
            .filter(|(peer, _)| peer_name::check(peer).is_ok());
        let (peer, name) = match at_peer {
            Some((peer, name)) => (Some(peer.to_owned()), name),
            None => (None, text),
        };
        let name = image_name(name)?;
        Ok(ImageAt { peer, name })
    }
}

impl fmt::Display for ImageAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.peer {
            Some(peer) => write!(f, "{} at {peer}", self.name),
            None => self.name.fmt(f),
        }
    }
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
    fn an_image_is_here_or_at_a_peer() {
        let read = |text: &str| {
            let at: Result<ImageAt, _> = text.parse();
            at.map(|at| (at.peer.unwrap_or_default(), at.name.to_string()))
        };
        let pair = |peer: &str, name: &str| Ok((peer.to_owned(), name.to_owned()));
        assert_eq!(read("web.img"), pair("", "web.img"));
        assert_eq!(read("lyon:web.img"), pair("lyon", "web.img"));
        assert_eq!(read("file:web.img"), pair("", "file:web.img"));
        for bad in ["", "lyon:", "lyon:../x", "a/b"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_quota_is_a_size_or_none() {
        assert_eq!("500G".parse(), Ok(Quota(Some(500 << 30))));
        assert_eq!("none".parse(), Ok(Quota(None)));
        assert!("much".parse::<Quota>().is_err());
    }
}
