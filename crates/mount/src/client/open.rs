//! Opening the connections of a link.

use std::sync::Arc;
use std::time::Duration;

use drover_net::service::{self, reply_in};
use drover_net::{Backoff, NetError, Refusal, Role, read_hello};
use drover_store::lease::Identity;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::debug;

use super::connector::{ConnectError, Connected, Connector};
use super::options::Options;
use crate::MountError;
use crate::protocol::{
    ConnectionKind, KEEP_ALIVE, MAX_MOUNT_FRAME, MAX_NAME, Open, Opened, Request, check_shape,
    encode_message, kind,
};

/// The initial and the maximum pause between connection attempts.
pub const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// Timeout for the site to open a connection.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// A connection opened by the site.
pub struct OpenConnection {
    /// Its number.
    pub number: usize,
    /// What it carries.
    pub kind: ConnectionKind,
    /// Its connection.
    pub connected: Connected,
    /// The site's reply.
    pub opened: Opened,
}

/// Connections being opened.
pub type OpeningConnections = JoinSet<Result<OpenConnection, ConnectError>>;

/// The first link, with its front connection open and the others being opened.
pub struct FirstLink {
    /// The site's reply.
    pub opened: Opened,
    /// Its number.
    pub link: u64,
    /// The front connection.
    pub front: OpenConnection,
    /// The other connections.
    pub others: OpeningConnections,
    /// Requests sent with the front connection's open.
    pub asked: Vec<Request>,
}

/// The number of the link after `before`: the current time, so that it also grows when a new process takes over a
/// mount.
pub fn next_link(before: u64) -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let micros = since.map_or(0, |since| since.as_micros());
    u64::try_from(micros).unwrap_or(0).max(before + 1)
}

/// Checks the site's reply to the open.
pub fn check(opened: &Opened, options: &Options) -> Result<(), String> {
    check_shape(opened.shape())?;
    match opened.chunk == options.chunk {
        true => Ok(()),
        false => Err(format!("chunks of {} bytes", opened.chunk)),
    }
}

/// Establishes the first link.
pub async fn first(
    connector: &Arc<dyn Connector>,
    options: &Options,
) -> Result<FirstLink, MountError> {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut link = 0;
    let mut last = None;
    let mut expected = options.expected;
    if expected.is_none() {
        expected = options.known.as_ref().map(|known| known.identity);
    }
    let asked = options.early();
    let tries = async {
        loop {
            link = next_link(link);
            let error = match attempt(connector, options, expected, link, &asked).await {
                Ok((front, others)) => {
                    check(&front.opened, options).map_err(|what| MountError::Protocol {
                        peer: front.connected.reader.peer_text().to_owned(),
                        what,
                    })?;
                    return Ok(FirstLink {
                        opened: front.opened.clone(),
                        link,
                        front,
                        others,
                        asked: asked.clone(),
                    });
                }
                Err(error) => error,
            };
            if error.fatal {
                return Err(match error.code {
                    Some(code) => MountError::Refused(Refusal::new(code, error.message)),
                    None => MountError::CannotConnect(error.message),
                });
            }
            debug!(image = %options.image, %error, "no link yet");
            last = Some(error.message);
            tokio::time::sleep(backoff.next_delay()).await;
        }
    };
    match timeout(options.first_contact, tries).await {
        Ok(made) => made,
        Err(_) => Err(MountError::Unreachable(last.unwrap_or_else(|| {
            format!("no answer within {:?}", options.first_contact)
        }))),
    }
}

/// Starts opening all connections and returns when the front one is open. If the site refuses that for now, the next attempt goes
/// to another of its addresses, if it has any: another of its nodes may have the image.
pub async fn attempt(
    connector: &Arc<dyn Connector>,
    options: &Options,
    expected: Option<Identity>,
    link: u64,
    requests: &[Request],
) -> Result<(OpenConnection, OpeningConnections), ConnectError> {
    let tried = open_all(connector, options, expected, link, requests).await;
    if let Err(error) = &tried
        && error.code.is_some()
        && !error.fatal
    {
        connector.leave().await;
    }
    tried
}

async fn open_all(
    connector: &Arc<dyn Connector>,
    options: &Options,
    expected: Option<Identity>,
    link: u64,
    requests: &[Request],
) -> Result<(OpenConnection, OpeningConnections), ConnectError> {
    let mut joining = OpeningConnections::new();
    for (number, connection) in options.connections().into_iter().enumerate() {
        let open = Open {
            mount: options.mount,
            connection,
            link,
            image: options.image.clone(),
            access: options.access,
            chunk: options.chunk,
            expected,
            note: options.note[..options.note.floor_char_boundary(MAX_NAME)].to_owned(),
            term: options.term,
        };
        let connector = connector.clone();
        let requests = match connection {
            ConnectionKind::Front => requests.iter().map(encode_message).collect(),
            _ => Vec::new(),
        };
        joining.spawn(async move {
            let opened = open_connection(connector.as_ref(), &open, requests);
            let (connected, opened) = timeout(OPEN_LIMIT, opened).await.map_err(|_| {
                let limit = OPEN_LIMIT;
                ConnectError::lost(format!("the site did not open the device within {limit:?}"))
            })??;
            Ok(OpenConnection {
                number,
                kind: connection,
                connected,
                opened,
            })
        });
    }
    let mut early = Vec::new();
    while let Some(joined) = joining.join_next().await {
        let connection = joined.map_err(|e| ConnectError::lost(e.to_string()))??;
        if connection.kind == ConnectionKind::Front {
            for connection in early {
                joining.spawn(std::future::ready(Ok(connection)));
            }
            return Ok((connection, joining));
        }
        early.push(connection);
    }
    Err(ConnectError::fatal("no connection was opened"))
}

async fn open_connection(
    connector: &dyn Connector,
    open: &Open,
    requests: Vec<Vec<u8>>,
) -> Result<(Connected, Opened), ConnectError> {
    let connection = connector.connect().await?;
    let wire = connection.wire();
    let (mut reader, mut writer) = connection.split();
    reader.set_max_frame(MAX_MOUNT_FRAME);
    writer.set_max_frame(MAX_MOUNT_FRAME);
    KEEP_ALIVE.apply(&mut reader, &mut writer);
    let greeted = async {
        // All in parallel: on a WAN each round trip is noticeable.
        service::open(&mut writer, open).await?;
        for request in &requests {
            writer.send(kind::REQUEST, request).await?;
        }
        writer.flush().await?;
        read_hello(&mut reader, Role::Client).await
    };
    // Unlike an error on an established link, a wrong greeting may come from something temporarily in the site's place.
    greeted.await.map_err(|e| ConnectError {
        fatal: e.refused(),
        ..ConnectError::lost(e.to_string())
    })?;
    let frame = reader.next().await?;
    let peer = reader.peer_text();
    let Some(frame) = frame else {
        return Err(ConnectError::lost(format!("{peer} closed the connection")));
    };
    let opened = reply_in::<Open>(&frame, peer).map_err(|e| match e {
        NetError::Refused(refusal) => ConnectError {
            fatal: !refusal.retry,
            message: refusal.message,
            code: Some(refusal.code),
        },
        e => ConnectError::fatal(format!("{peer} broke the mount protocol: {e}")),
    })?;
    let connected = Connected {
        reader,
        writer,
        wire,
    };
    Ok((connected, opened))
}
