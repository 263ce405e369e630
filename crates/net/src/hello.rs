//! The first frame each way: are we both drover, and which protocol do we both speak.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::frame::{FrameReader, FrameWriter, HELLO, MAX_FRAME_BEFORE_TRUST};
use crate::{NetError, encode};

/// The oldest protocol this drover speaks.
pub const PROTOCOL_MIN: u16 = 3;
/// The newest protocol this drover speaks. From 4 on, both ends of a conversation about a migration send something every second.
pub const PROTOCOL_MAX: u16 = 4;
/// How long the peer may take for its hello.
pub const GREET_TIMEOUT: Duration = Duration::from_secs(10);

const MAGIC: [u8; 8] = *b"drover\r\n";
/// A program's name and version are short.
const MAX_SOFTWARE: usize = 64;

/// Which end of the connection a side is. The two must differ, so that no side is made to talk to
/// an echo of themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// The side that connected.
    Client,
    /// The side that listened.
    Server,
}

/// These fields stay as they are for ever; later versions may add some after them.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    magic: [u8; 8],
    role: Role,
    protocol_min: u16,
    protocol_max: u16,
    software: String,
}

/// The outcome of the hellos.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// The newest protocol that both ends speak.
    pub protocol: u16,
    /// The peer's program and version, as it says; printable and short.
    pub software: String,
}

/// Sends a hello and reads the peer's, within [`GREET_TIMEOUT`]. Both ends send at once.
///
/// # Errors
/// [`NetError::Hello`] when the other end is not drover, [`NetError::Version`] when the two
/// have no protocol in common, [`NetError::TimedOut`], or that the connection broke.
pub async fn greet(
    reader: &mut FrameReader,
    writer: &mut FrameWriter,
    role: Role,
) -> Result<Greeting, NetError> {
    meet(reader, Some(writer), our_hello(role)).await
}

/// The same for a program that speaks other protocols.
///
/// # Errors
/// As [`greet`].
pub async fn greet_as(
    reader: &mut FrameReader,
    writer: &mut FrameWriter,
    role: Role,
    software: &str,
    protocols: std::ops::RangeInclusive<u16>,
) -> Result<Greeting, NetError> {
    let ours = Hello {
        protocol_min: *protocols.start(),
        protocol_max: *protocols.end(),
        software: tidy(software),
        ..our_hello(role)
    };
    meet(reader, Some(writer), ours).await
}

/// The first half of [`greet`], for a client that has more to say in the same flight: says hello
/// without waiting for the peer's. [`read_hello`] must follow.
///
/// # Errors
/// That the connection broke.
pub async fn send_hello(writer: &mut FrameWriter, role: Role) -> Result<(), NetError> {
    writer.send_hello(&encode(&our_hello(role))).await
}

/// The second half: reads the peer's hello, within [`GREET_TIMEOUT`].
///
/// # Errors
/// As [`greet`].
pub async fn read_hello(reader: &mut FrameReader, role: Role) -> Result<Greeting, NetError> {
    meet(reader, None, our_hello(role)).await
}

fn our_hello(role: Role) -> Hello {
    Hello {
        magic: MAGIC,
        role,
        protocol_min: PROTOCOL_MIN,
        protocol_max: PROTOCOL_MAX,
        software: concat!("drover ", env!("CARGO_PKG_VERSION")).into(),
    }
}

/// Sends our hello, if there is a writer, and reads the peer's.
async fn meet(
    reader: &mut FrameReader,
    writer: Option<&mut FrameWriter>,
    ours: Hello,
) -> Result<Greeting, NetError> {
    let talk = async {
        if let Some(writer) = writer {
            writer.send_hello(&encode(&ours)).await?;
            writer.flush().await?;
        }
        hear(reader).await
    };
    match timeout(GREET_TIMEOUT, talk).await {
        Ok(theirs) => agree(&ours, &theirs?, reader.peer_text()),
        Err(_) => Err(NetError::TimedOut {
            peer: reader.peer_text().to_owned(),
            what: "its hello",
            after: GREET_TIMEOUT,
        }),
    }
}

async fn hear(reader: &mut FrameReader) -> Result<Hello, NetError> {
    let usual = reader.max_frame();
    reader.set_max_frame(usual.min(MAX_FRAME_BEFORE_TRUST));
    let frame = reader.next_raw().await;
    reader.set_max_frame(usual);
    let peer = reader.peer_text();
    let bad = |reason| NetError::Hello {
        peer: peer.to_owned(),
        reason,
    };
    let Some(frame) = frame? else {
        return Err(bad("it closed the connection at once"));
    };
    if frame.kind != HELLO {
        return Err(bad("its first frame is no hello"));
    }
    // Not `decode`: what follows the fields belongs to a later version.
    let (hello, _) = postcard::take_from_bytes::<Hello>(&frame.payload)
        .map_err(|_| bad("its hello is malformed"))?;
    if hello.magic != MAGIC {
        return Err(bad("its hello is not of drover"));
    }
    Ok(hello)
}

fn agree(ours: &Hello, theirs: &Hello, peer: &str) -> Result<Greeting, NetError> {
    let bad = |reason| NetError::Hello {
        peer: peer.to_owned(),
        reason,
    };
    if theirs.role == ours.role {
        return Err(bad("it claims to be our end of the connection"));
    }
    if theirs.protocol_min > theirs.protocol_max {
        return Err(bad("its range of protocols is empty"));
    }
    let software = tidy(&theirs.software);
    let protocol = ours.protocol_max.min(theirs.protocol_max);
    if protocol < ours.protocol_min || protocol < theirs.protocol_min {
        return Err(NetError::Version {
            peer: peer.to_owned(),
            software,
            their_min: theirs.protocol_min,
            their_max: theirs.protocol_max,
            our_min: ours.protocol_min,
            our_max: ours.protocol_max,
            older: if theirs.protocol_max < ours.protocol_min {
                "the drover there"
            } else {
                "the drover here"
            },
        });
    }
    Ok(Greeting { protocol, software })
}

/// Text from a stranger that goes into a log: short and without control characters.
fn tidy(software: &str) -> String {
    software
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_SOFTWARE)
        .collect()
}
