//! The events of the audit log, and their fields.

use std::net::SocketAddr;
use std::time::Duration;

use drover_core::ImageName;
use drover_migrate::MoveReport;
use drover_net::service::Request;
use drover_net::{DEFAULT_DOMAIN, Peer, PeerKey, Refusal, Right};
use drover_store::Grant;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::log::MAX_LINE_BYTES;
use crate::text::{bytes, clean};

/// The version of the lines.
const VERSION: u32 = 1;

/// Upper bounds on the bytes of texts: the detail, the name of an image, and any other. Even if JSON doubles each byte, a
/// line is shorter than [`MAX_LINE_BYTES`].
const MAX_DETAIL_BYTES: usize = 300;
const MAX_IMAGE_BYTES: usize = 256;
const MAX_TEXT_BYTES: usize = 150;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// A site became a peer, or a peer used another ticket.
    Paired,
    /// A peer that had no connection has one.
    Connected,
    /// A peer begins to send an image.
    SendBegun,
    /// An image was delivered.
    SendDelivered,
    /// A peer asked how much of an image would have to be sent.
    SendEstimated,
    /// The sending of an image failed, or was given up; it may be resumed.
    SendFailed,
    /// A mount was opened.
    MountOpened,
    /// A mount was closed, or its connection was lost.
    MountClosed,
    /// A write lease was handed over to another site's mount.
    LeaseHandedOver,
    /// A write lease was broken.
    LeaseBroken,
    /// An image was shared with a peer.
    Shared,
    /// An image is no longer shared with a peer.
    Unshared,
    /// The file of an image was compared with its digest.
    Verified,
    /// An image file was indexed.
    Indexed,
    /// An image was removed.
    Removed,
    /// An unfinished transfer was removed.
    TransferRemoved,
    /// What mounts wrote over an image became part of it, or of a new one.
    Merged,
    /// What mounts wrote over an image was dropped.
    ChangesDropped,
    /// The profile of an image was changed.
    ProfileChanged,
    /// A peer made a snapshot in the vault of this site.
    BackedUp,
    /// What a peer may do was changed.
    RightsChanged,
    /// A peer was forgotten.
    Forgotten,
    /// A domain was made.
    DomainAdded,
    /// A domain was removed.
    DomainRemoved,
    /// An image was moved to another domain.
    ImageMoved,
    /// A machine is being migrated to this site.
    MachineComing,
    /// A machine was migrated to this site.
    MachineArrived,
    /// A machine that was being migrated to this site stays where it is.
    MachineRefused,
    /// A machine was migrated from this site.
    MachineLeft,
    /// A machine that was being migrated from this site stays here.
    MachineStayed,
    /// The QEMU of a machine that was built here has ended.
    MachineEnded,
    /// A disk that a program uses is being moved to this site.
    DiskComing,
    /// A disk was moved to this site: it is an image here.
    DiskArrived,
    /// A disk that was being moved to this site stays where it is.
    DiskRefused,
    /// A disk was moved from this site.
    DiskLeft,
    /// A replica has taken over at this site.
    ReplicaFailedOver,
    /// A replica at this site was forgotten.
    ReplicaForgotten,
    /// A ticket was made.
    TicketMade,
    /// A ticket was made invalid.
    TicketRevoked,
    /// A request, or a connection, was refused.
    Refused,
    /// An event of a later version.
    #[serde(other)]
    Unknown,
}

impl Event {
    /// Its name in the log.
    #[must_use]
    pub fn name(self) -> String {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::String(name)) => name,
            _ => String::new(),
        }
    }
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It was done.
    Ok,
    /// It was not permitted.
    Refused,
    /// It was tried and failed.
    Failed,
}

/// Who did it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// A peer.
    Peer,
    /// Somebody whose key is not known.
    Stranger,
    /// The site's own user, on its host.
    User,
    /// The site by itself.
    Site,
}

/// What a migration took, in its parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    /// The pause, in milliseconds.
    pub pause_ms: u64,
    /// Of that the last writes to the disks,
    pub pause_disks_ms: u64,
    /// the last of the memory,
    pub pause_memory_ms: u64,
    /// and the hand-over.
    pub pause_hand_over_ms: u64,
    /// Bytes on the wire for the images of the disks,
    pub image_bytes: u64,
    /// for what was written to them meanwhile,
    pub disk_bytes: u64,
    /// and for the memory.
    pub memory_bytes: u64,
    /// Rounds over the disks.
    pub rounds: u32,
}

impl From<&MoveReport> for Migration {
    fn from(report: &MoveReport) -> Self {
        Migration {
            pause_ms: report.pause.total_ms,
            pause_disks_ms: report.pause.disks_ms,
            pause_memory_ms: report.pause.memory_ms,
            pause_hand_over_ms: report.pause.hand_over_ms,
            image_bytes: report.image_wire_bytes,
            disk_bytes: report.disk_wire_bytes,
            memory_bytes: report.memory_wire_bytes,
            rounds: report.rounds,
        }
    }
}

/// One event. Texts are as their source sent them until [`Record::line`] makes them harmless.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The version of the format.
    #[serde(rename = "v")]
    pub version: u32,
    /// When: RFC 3339, UTC, milliseconds.
    pub time: String,
    /// What.
    pub event: Event,
    /// How it ended.
    pub outcome: Outcome,
    /// Who did it.
    pub by: By,
    /// The peer that did it or that it was done to, by its name here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The key of that peer, or of a stranger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PeerKey>,
    /// The address of the connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The domain in which it happened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The service that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// The right that was missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right: Option<String>,
    /// The identifier of the ticket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<String>,
    /// Bytes of the image, or that a mount wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// How long it took, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
    /// What a migration took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// This line stands for so many events like it, which have no lines of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more: Option<u64>,
    /// Anything else, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Record {
    /// An event of the site's own user, in no domain yet.
    #[must_use]
    pub fn new(event: Event) -> Record {
        Record {
            version: VERSION,
            time: String::new(),
            event,
            outcome: match event {
                Event::Refused => Outcome::Refused,
                Event::SendFailed
                | Event::MachineRefused
                | Event::MachineStayed
                | Event::DiskRefused => Outcome::Failed,
                _ => Outcome::Ok,
            },
            by: By::User,
            peer: None,
            key: None,
            address: None,
            domain: None,
            image: None,
            machine: None,
            request: None,
            right: None,
            ticket: None,
            bytes: None,
            ms: None,
            migration: None,
            more: None,
            detail: None,
        }
    }

    /// A refused request. A missing right says it all; other refusals have a text.
    #[must_use]
    pub fn refused(request: &str, refusal: &Refusal, right: Option<Right>) -> Record {
        let record = Record {
            request: Some(request.to_owned()),
            right: right.map(|right| right.name().to_owned()),
            ..Record::new(Event::Refused)
        };
        match right {
            Some(_) => record,
            None => record.detail(refusal.message.as_str()),
        }
    }

    /// Done by this caller, in its domain.
    #[must_use]
    pub fn by(self, caller: &Peer) -> Record {
        let record = self.in_domain(&caller.domain);
        match caller.rights.has(Right::Manage) {
            true => record,
            false => record.by_peer(&caller.name, caller.key),
        }
    }

    /// Done by the peer of this name and key.
    #[must_use]
    pub fn by_peer(self, name: &str, key: PeerKey) -> Record {
        Record {
            by: By::Peer,
            ..self.about(name, key)
        }
    }

    /// Done by somebody whose key, if it showed one, is not known.
    #[must_use]
    pub fn by_stranger(self, key: Option<PeerKey>) -> Record {
        Record {
            by: By::Stranger,
            key,
            ..self
        }
    }

    /// Done by the site by itself.
    #[must_use]
    pub fn by_site(self) -> Record {
        Record {
            by: By::Site,
            ..self
        }
    }

    /// Done to this peer.
    #[must_use]
    pub fn about(self, name: &str, key: PeerKey) -> Record {
        Record {
            peer: Some(name.to_owned()),
            key: Some(key),
            ..self
        }
    }

    /// From there, if that is an address of a network.
    #[must_use]
    pub fn from(self, remote: &str) -> Record {
        let address = remote.parse::<SocketAddr>().ok();
        Record {
            address: address.map(|address| address.to_string()).or(self.address),
            ..self
        }
    }

    /// In this domain.
    #[must_use]
    pub fn in_domain(self, domain: &str) -> Record {
        let domain = Some(domain.to_owned()).filter(|domain| !domain.is_empty());
        Record {
            domain: self.domain.or(domain),
            ..self
        }
    }

    /// To this image.
    #[must_use]
    pub fn image(self, name: &ImageName) -> Record {
        Record {
            image: Some(name.to_string()),
            ..self
        }
    }

    /// To this machine.
    #[must_use]
    pub fn machine(self, name: &ImageName) -> Record {
        Record {
            machine: Some(name.to_string()),
            ..self
        }
    }

    /// So many bytes.
    #[must_use]
    pub fn bytes(self, bytes: u64) -> Record {
        Record {
            bytes: Some(bytes),
            ..self
        }
    }

    /// It took so long.
    #[must_use]
    pub fn took(self, time: Duration) -> Record {
        Record {
            ms: Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
            ..self
        }
    }

    /// A migration that took this.
    #[must_use]
    pub fn migration(self, migration: Migration) -> Record {
        Record {
            migration: Some(migration),
            ..self
        }
    }

    /// With this ticket.
    #[must_use]
    pub fn ticket(self, id: &str) -> Record {
        Record {
            ticket: Some(id.to_owned()),
            ..self
        }
    }

    /// With this text for people.
    #[must_use]
    pub fn detail(self, text: impl Into<String>) -> Record {
        Record {
            detail: Some(text.into()).filter(|text| !text.is_empty()),
            ..self
        }
    }

    /// The event as a line of the log, at most [`MAX_LINE_BYTES`], with the newline.
    #[must_use]
    pub fn line(mut self, now: Timestamp) -> Vec<u8> {
        self.time = now.strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string();
        let texts = [
            (&mut self.peer, MAX_TEXT_BYTES),
            (&mut self.address, MAX_TEXT_BYTES),
            (&mut self.domain, MAX_TEXT_BYTES),
            (&mut self.image, MAX_IMAGE_BYTES),
            (&mut self.machine, MAX_IMAGE_BYTES),
            (&mut self.request, MAX_TEXT_BYTES),
            (&mut self.right, MAX_TEXT_BYTES),
            (&mut self.ticket, MAX_TEXT_BYTES),
            (&mut self.detail, MAX_DETAIL_BYTES),
        ];
        for (text, max) in texts {
            if let Some(text) = text {
                *text = short(&clean(text), max);
            }
        }
        let mut line = serde_json::to_vec(&self).unwrap_or_default();
        debug_assert!(line.len() < MAX_LINE_BYTES, "{} bytes", line.len());
        line.push(b'\n');
        line
    }

    /// When it happened; `None` when the time is damaged.
    #[must_use]
    pub fn when(&self) -> Option<Timestamp> {
        self.time.parse().ok()
    }
}

/// The text, or its beginning.
fn short(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(max - "...".len());
    format!("{}...", &text[..end])
}

/// What a grant gives, in one line.
#[must_use]
pub fn grant_text(grant: &Grant) -> String {
    let mut text = format!("can {}", grant.rights);
    if grant.domain != DEFAULT_DOMAIN {
        text += &format!(", domain {}", grant.domain);
    }
    if let Some(quota) = grant.quota_bytes {
        text += &format!(", quota {}", bytes(quota));
    }
    text
}

/// A request that the audit log tells of.
pub trait Audited: Request + Clone {
    /// What it did, or, without a reply, what it is about. `None` when it did nothing.
    fn told(&self, reply: Option<&Self::Reply>) -> Option<Record>;
}
