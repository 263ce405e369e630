//! What nodes of a site are told of a flock that they send together, and what they tell of it: the contents of the work table.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_image::Conversion;
use drover_net::{PeerKey, decode, encode};
use drover_store::nodes::MAX_ORDER_BYTES;
use drover_store::profile::Profile;
use drover_teleport::progress::ImageReport;
use drover_teleport::{Effort, SendItem};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A flock that is sent by nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobOrder {
    /// The flock's name.
    pub flock: ImageName,
    /// The number of this sending.
    pub id: [u8; 16],
    /// Where it goes.
    pub peer: PeerKey,
    /// The name of that site here.
    pub peer_name: String,
    /// Its addresses.
    pub addresses: Vec<String>,
    /// Bytes a second of each node.
    pub limit: Option<u64>,
    /// See `SendOptions`.
    pub connections: Option<u16>,
    /// See `SendOptions`.
    pub compress: Option<Effort>,
    /// See `SendOptions`.
    pub give_up_after: Duration,
    /// Images that a node sends at once.
    pub at_once: u32,
}

impl JobOrder {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads [`JobOrder::encode`].
    ///
    /// # Errors
    /// When it is something else.
    pub fn decode(bytes: &[u8]) -> Result<JobOrder> {
        decode(bytes).map_err(|_| unknown())
    }
}

/// An image of a flock that is sent by nodes.
#[derive(Serialize, Deserialize)]
struct UnitItem {
    path: Vec<u8>,
    name: ImageName,
    conversion: u8,
    profile: Option<Vec<u8>>,
}

/// Upper bound on the bytes of a profile that is sent along; without it the image is as good.
const MAX_PROFILE: usize = MAX_ORDER_BYTES / 2;

const CONVERSIONS: [Conversion; 4] = [
    Conversion::AsIs,
    Conversion::Opaque,
    Conversion::Raw,
    Conversion::Qcow2,
];

/// An image as a unit of work.
#[must_use]
pub fn encode_item(item: &SendItem) -> Vec<u8> {
    let conversion = CONVERSIONS.iter().position(|c| *c == item.conversion);
    let profile = item.profile.as_ref().map(|profile| profile.encode());
    encode(&UnitItem {
        path: item.path.as_os_str().as_bytes().to_vec(),
        name: item.name.clone(),
        conversion: conversion.unwrap_or(0) as u8,
        profile: profile.filter(|bytes| bytes.len() <= MAX_PROFILE),
    })
}

/// Reads [`encode_item`].
///
/// # Errors
/// When it is something else.
pub fn decode_item(bytes: &[u8]) -> Result<SendItem> {
    let item: UnitItem = decode(bytes).map_err(|_| unknown())?;
    let conversion = CONVERSIONS.get(usize::from(item.conversion));
    let profile = item.profile.map(|bytes| Profile::decode(&bytes));
    Ok(SendItem {
        path: PathBuf::from(OsString::from_vec(item.path)),
        name: item.name,
        conversion: *conversion.ok_or_else(unknown)?,
        snapshot: None,
        profile: profile.transpose().map_err(|_| unknown())?.map(Arc::new),
    })
}

/// Whether a file is in the directory of images.
#[must_use]
pub fn is_in(images: &Path, file: &Path) -> bool {
    let (Ok(images), Ok(file)) = (images.canonicalize(), file.canonicalize()) else {
        return false;
    };
    file.starts_with(images)
}

fn unknown() -> Error {
    Error::msg("the work table of this site has what another version of drover wrote")
}

/// Upper bound on the bytes of the name of a node of the other site.
const MAX_TO: usize = 63;

/// Upper bound on the bytes of why an image is not sent.
const MAX_WHY: usize = 1000;

/// A text from elsewhere: at most `most` bytes, and no control characters.
fn clipped(text: &str, most: usize) -> String {
    let harmless = |c: char| if c.is_control() { ' ' } else { c };
    let mut out = String::new();
    for c in text.chars().map(harmless) {
        if out.len() + c.len_utf8() > most {
            break;
        }
        out.push(c);
    }
    out
}

/// What a node tells of an image that it sends.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitSaid {
    /// The node of the other site that it is sent to; empty if that has none.
    pub to: String,
    /// When it was offered: blocks to walk, bytes of the file and of its data, blocks that an earlier session sent.
    pub started: Option<[u64; 4]>,
    /// See `Counters::values`.
    pub counters: [u64; 11],
    /// Bytes sent and received by the node for it.
    pub wire: (u64, u64),
    /// Why it is not being sent at the moment; else empty.
    pub trouble: String,
    /// Once it is over: how it was sent, or why not.
    pub ended: Option<std::result::Result<ImageReport, String>>,
}

impl UnitSaid {
    /// It is sent to that node of the other site.
    pub fn go_to(&mut self, node: &str) {
        self.to = clipped(node, MAX_TO);
    }

    /// It is not being sent at the moment.
    pub fn trouble(&mut self, why: &str) {
        self.trouble = clipped(why, MAX_WHY);
    }

    /// It could not be sent.
    pub fn fail(&mut self, why: &str) {
        self.ended = Some(Err(clipped(why, MAX_WHY)));
    }

    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads [`UnitSaid::encode`]; nothing was said if it is something else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> UnitSaid {
        decode(bytes).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use drover_core::Digest;
    use drover_store::nodes::MAX_SAID_BYTES;
    use drover_teleport::progress::{Stages, WireByKind};

    use super::*;

    #[test]
    fn what_nodes_are_told_and_tell_comes_back() {
        let name = |text: &str| ImageName::new(text).unwrap();
        let order = JobOrder {
            flock: name("shop"),
            id: [3; 16],
            peer: PeerKey([4; 32]),
            peer_name: "lyon".into(),
            addresses: vec!["192.0.2.1:7377".into()],
            limit: Some(5),
            connections: None,
            compress: Some(Effort::Zstd(3)),
            give_up_after: Duration::from_secs(600),
            at_once: 2,
        };
        let bytes = order.encode();
        assert_eq!(JobOrder::decode(&bytes).unwrap(), order);
        assert!(JobOrder::decode(&bytes[1..]).is_err());
        for conversion in CONVERSIONS {
            let item = SendItem {
                path: PathBuf::from(OsString::from_vec(b"/srv/\xff.img".to_vec())),
                name: name("a.img"),
                conversion,
                snapshot: None,
                profile: None,
            };
            let back = decode_item(&encode_item(&item)).unwrap();
            assert_eq!((back.path, back.name), (item.path, item.name));
            assert_eq!(back.conversion, conversion);
        }
        assert!(decode_item(b"").is_err());
        let report = ImageReport {
            name: "a.img".into(),
            digest: Digest([7; 32]),
            size_bytes: 1,
            data_bytes: 2,
            wire_sent_bytes: 3,
            wire_received_bytes: 4,
            matched_blocks: 5,
            sent_blocks: 6,
            zero_blocks: 7,
            resumed_blocks: 8,
            unread_blocks: 0,
            origins: Some(Default::default()),
            waits: false,
            matched: Default::default(),
            wire: WireByKind::default(),
            seconds: 1.5,
            stages: Stages::default(),
        };
        for ended in [None, Some(Ok(report)), Some(Err("no".into()))] {
            let said = UnitSaid {
                to: "lyon-2".into(),
                started: Some([1, 2, 3, 4]),
                counters: std::array::from_fn(|n| n as u64),
                wire: (9, 10),
                trouble: String::new(),
                ended,
            };
            assert_eq!(UnitSaid::decode(&said.encode()), said);
        }
        assert_eq!(UnitSaid::decode(b""), UnitSaid::default());
    }

    #[test]
    fn what_the_other_site_says_does_not_fill_the_table() {
        let long = "\u{1b}ä\n".repeat(1 << 20);
        let mut said = UnitSaid::default();
        said.go_to(&long);
        said.trouble(&long);
        said.fail(&long);
        assert!(said.to.starts_with(" ä  ä ") && (MAX_TO - 1..=MAX_TO).contains(&said.to.len()));
        assert_eq!(said.trouble.len(), MAX_WHY);
        assert!(said.encode().len() < MAX_SAID_BYTES / 2);
    }
}
