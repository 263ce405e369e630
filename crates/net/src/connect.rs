//! Connecting to a site at one of its addresses.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsConnector, TlsStream};

use crate::connection::Connection;
use crate::error::plain;
use crate::frame::MAX_FRAME;
use crate::stream::{Counted, WireCounters};
use crate::{Identity, NetError, PeerKey, tls};

/// Maximum socket addresses tried by one call.
pub const MAX_ATTEMPTS: usize = 16;

/// The next address is tried when the one before has not answered for this long (RFC 8305).
const STAGGER: Duration = Duration::from_millis(250);

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// A display name for the peer, for errors and [`Connection::remote`].
    pub name: Option<String>,
    /// Timeout of each step: name resolution, the TCP connection to one address, the TLS handshake after that.
    pub step_timeout: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            name: None,
            step_timeout: Duration::from_secs(10),
        }
    }
}

impl ConnectOptions {
    /// The default timeouts, and a name for the peer.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        ConnectOptions {
            name: Some(name.into()),
            ..Self::default()
        }
    }

    fn peer(&self, address: &str) -> String {
        match &self.name {
            Some(name) => format!("{name} at {address}"),
            None => address.to_owned(),
        }
    }
}

/// Connects to the site with the key `expected` at `address` (`HOST:PORT`), trying every address
/// that the host has.
///
/// # Errors
/// [`NetError::Resolve`], [`NetError::Unreachable`], [`NetError::TimedOut`],
/// [`NetError::Handshake`], or [`NetError::WrongPeer`] when another site answers.
pub async fn connect(
    address: &str,
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
) -> Result<Connection, NetError> {
    connect_any(&[address], identity, expected, options).await
}

/// Connects to the site with the key `expected` at whichever of `addresses` (`HOST:PORT` each)
/// proves that key first. Attempts start a quarter of a second apart, or at once when the one
/// before failed; at most [`MAX_ATTEMPTS`] addresses are tried.
///
/// # Errors
/// As [`connect`], about all the addresses when none answered.
pub async fn connect_any<A: AsRef<str>>(
    addresses: &[A],
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
) -> Result<Connection, NetError> {
    let found = connect_first(addresses, identity, expected, options, None).await;
    found.map(|(_, connection)| connection)
}

/// Why no address led to a connection.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NoConnection {
    /// What says most.
    pub error: NetError,
    /// Whether something took a connection at one of the addresses, and did not show who it is: it may be the site.
    pub may_be_there: bool,
}

/// The same, for whom it makes a difference whether the site may be there.
///
/// # Errors
/// As [`connect_any`].
pub async fn connect_or_tell<A: AsRef<str>>(
    addresses: &[A],
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
) -> Result<Connection, NoConnection> {
    match try_all(addresses, identity, expected, options, None).await {
        Ok((_, connection)) => Ok(connection),
        Err(failures) => Err(NoConnection {
            may_be_there: failures.is_silent,
            error: failures.into_error(&texts(addresses), options),
        }),
    }
}

fn texts<A: AsRef<str>>(addresses: &[A]) -> Vec<&str> {
    addresses.iter().map(AsRef::as_ref).collect()
}

/// As [`connect_any`], and which address it was; `last` is tried after all others.
pub(crate) async fn connect_first<A: AsRef<str>>(
    addresses: &[A],
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
    last: Option<SocketAddr>,
) -> Result<(SocketAddr, Connection), NetError> {
    let tried = try_all(addresses, identity, expected, options, last).await;
    tried.map_err(|failures| failures.into_error(&texts(addresses), options))
}

async fn try_all<A: AsRef<str>>(
    addresses: &[A],
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
    last: Option<SocketAddr>,
) -> Result<(SocketAddr, Connection), Failures> {
    let mut failures = Failures::default();
    let mut targets: Vec<SocketAddr> = Vec::new();
    for address in addresses.iter().map(AsRef::as_ref) {
        match resolve(address, options).await {
            Ok(found) => {
                for target in found {
                    if targets.len() < MAX_ATTEMPTS && !targets.contains(&target) {
                        targets.push(target);
                    }
                }
            }
            Err(e) => failures.other = Some(e),
        }
    }

    targets.sort_by_key(|target| Some(*target) == last);
    let mut waiting = targets.into_iter();
    let mut running = JoinSet::new();
    loop {
        if let Some(target) = waiting.next() {
            let (identity, expected) = (identity.clone(), *expected);
            let options = options.clone();
            running.spawn(async move {
                let result = attempt(target, &identity, &expected, &options).await;
                (target, result)
            });
        } else if running.is_empty() {
            return Err(failures);
        }
        // Wait for a result, but not longer than it is polite when another address is left.
        let done = if waiting.len() == 0 {
            running.join_next().await
        } else {
            tokio::select! {
                done = running.join_next() => done,
                () = sleep(STAGGER) => None,
            }
        };
        match done {
            Some(Ok((target, Ok(connection)))) => return Ok((target, connection)),
            Some(Ok((target, Err(failure)))) => failures.add(target, failure),
            // A panic in an attempt is a bug of ours: propagate it.
            Some(Err(e)) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Some(Err(_)) | None => {}
        }
    }
}

async fn resolve(address: &str, options: &ConnectOptions) -> Result<Vec<SocketAddr>, NetError> {
    let peer = || options.peer(address);
    let bad = |reason: String| NetError::Resolve {
        peer: peer(),
        reason,
    };
    if let Ok(direct) = address.parse() {
        return Ok(vec![direct]);
    }
    match address.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {}
        _ => return Err(bad("an address is HOST:PORT".into())),
    }
    let found: Vec<SocketAddr> = timeout(options.step_timeout, tokio::net::lookup_host(address))
        .await
        .map_err(|_| NetError::TimedOut {
            peer: peer(),
            what: "finding its address",
            after: options.step_timeout,
        })?
        .map_err(|e| {
            let text = plain(&e);
            bad(
                match text.strip_prefix("failed to lookup address information: ") {
                    Some(short) => short.to_lowercase(),
                    None => text,
                },
            )
        })?
        .collect();
    if found.is_empty() {
        return Err(bad("the name has no address".into()));
    }
    Ok(found)
}

/// Why an address did not lead to a connection.
enum Failure {
    /// No answer; the text is one entry of a list.
    Unreachable(String),
    /// It answered, and is something else.
    Other(NetError),
    /// It answered, but something else is wrong.
    Final(NetError),
}

async fn attempt(
    target: SocketAddr,
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
) -> Result<Connection, Failure> {
    let peer = options.peer(&target.to_string());
    let started = Instant::now();
    let tcp = match timeout(options.step_timeout, TcpStream::connect(target)).await {
        Ok(Ok(tcp)) => tcp,
        Ok(Err(e)) => return Err(Failure::Unreachable(plain(&e))),
        Err(_) => {
            let text = format!("no answer within {:?}", options.step_timeout);
            return Err(Failure::Unreachable(text));
        }
    };
    let round_trip = started.elapsed();
    prepare(&tcp).map_err(|e| Failure::Unreachable(plain(&e)))?;
    secure(tcp, identity, expected, options, peer)
        .await
        .map(|connection| connection.with_round_trip(round_trip))
        .map_err(|(e, refuses)| match e {
            NetError::Handshake { .. } if !refuses => Failure::Other(e),
            e => Failure::Final(e),
        })
}

async fn secure(
    tcp: TcpStream,
    identity: &Identity,
    expected: &PeerKey,
    options: &ConnectOptions,
    peer: String,
) -> Result<Connection, (NetError, bool)> {
    let of_other = |e| (e, false);
    let (config, found) =
        tls::client_config(identity, expected).map_err(|e| of_other(handshake_error(&peer, &e)))?;
    let io = Counted::new(tcp, Arc::new(WireCounters::default()));
    let handshake = TlsConnector::from(config).connect(tls::server_name(), io);
    let stream = match timeout(options.step_timeout, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => {
            return Err(match found.lock().take() {
                Some(found) => of_other(NetError::WrongPeer {
                    peer,
                    expected: *expected,
                    found,
                }),
                None => {
                    let refuses = is_alert(&e);
                    (handshake_failure(peer, e), refuses)
                }
            });
        }
        Err(_) => {
            return Err(of_other(NetError::TimedOut {
                peer,
                what: "the handshake",
                after: options.step_timeout,
            }));
        }
    };
    let stream = TlsStream::from(stream);
    let key = agreed(&stream, &peer).map_err(of_other)?;
    if key != *expected {
        return Err(of_other(NetError::WrongPeer {
            peer,
            expected: *expected,
            found: key,
        }));
    }
    Ok(Connection::tls(stream, key, peer, MAX_FRAME))
}

/// What a finished handshake must have led to on either side: our protocol, and a key.
pub(crate) fn agreed(
    stream: &TlsStream<Counted<TcpStream>>,
    peer: &str,
) -> Result<PeerKey, NetError> {
    let (_, session) = stream.get_ref();
    let refuse = |reason: &str| NetError::Handshake {
        peer: peer.to_owned(),
        reason: reason.to_owned(),
    };
    if session.alpn_protocol() != Some(tls::ALPN) {
        return Err(refuse("the other end is not a drover site"));
    }
    match session.peer_certificates() {
        Some([only]) => tls::peer_key(only),
        _ => None,
    }
    .ok_or_else(|| refuse("the other end showed no key"))
}

pub(crate) fn handshake_error(peer: &str, e: &rustls::Error) -> NetError {
    NetError::Handshake {
        peer: peer.to_owned(),
        reason: tls::explain(e),
    }
}

/// Whether the other end refused the handshake by an alert: it speaks TLS, and has not shown who it is.
fn is_alert(e: &io::Error) -> bool {
    let complaint = e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
    matches!(complaint, Some(rustls::Error::AlertReceived(_)))
}

/// A failed handshake: TLS's complaint, or a socket that broke under it.
pub(crate) fn handshake_failure(peer: String, e: io::Error) -> NetError {
    if let Some(tls) = e.get_ref().and_then(|i| i.downcast_ref::<rustls::Error>()) {
        return handshake_error(&peer, tls);
    }
    if e.kind() == io::ErrorKind::UnexpectedEof {
        return NetError::Truncated { peer };
    }
    NetError::Io {
        peer,
        doing: "setting up TLS",
        source: e,
    }
}

/// Frames must leave at once, and a dead peer must be detected even on an idle connection. Buffer sizes are left to the
/// kernel, whose tuning follows the path's delay.
pub(crate) fn prepare(tcp: &TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(6);
    SockRef::from(tcp).set_tcp_keepalive(&keepalive)
}

/// The failures of several addresses.
#[derive(Default)]
struct Failures {
    unreachable: Vec<(SocketAddr, String)>,
    wrong: Option<NetError>,
    other: Option<NetError>,
    /// Something took a connection, and then said nothing, or nothing more.
    is_silent: bool,
}

impl Failures {
    fn add(&mut self, target: SocketAddr, failure: Failure) {
        match failure {
            Failure::Unreachable(reason) => self.unreachable.push((target, reason)),
            // What is no drover, or another one, has shown it; who only refuses has not.
            Failure::Other(e) => self.other = Some(e),
            Failure::Final(e @ NetError::WrongPeer { .. }) => self.wrong = Some(e),
            Failure::Final(e) => {
                self.is_silent = true;
                self.other = Some(e);
            }
        }
    }

    /// The failure that says most: another site answered, something answered, nothing did.
    fn into_error(self, addresses: &[&str], options: &ConnectOptions) -> NetError {
        if let Some(e) = self.wrong {
            return e;
        }
        // A name that is not found says less than an address that does not answer.
        match self.other {
            Some(e @ NetError::Resolve { .. }) if self.unreachable.is_empty() => return e,
            Some(NetError::Resolve { .. }) | None => {}
            Some(e) => return e,
        }
        let reason = match self.unreachable.as_slice() {
            [] => "no address is known".to_owned(),
            [(target, reason)] if addresses == [target.to_string()] => reason.clone(),
            all => {
                let list: Vec<String> = all.iter().map(|(t, r)| format!("{t}: {r}")).collect();
                list.join(", ")
            }
        };
        NetError::Unreachable {
            peer: match (addresses, &options.name) {
                ([one], _) => options.peer(one),
                (_, Some(name)) => name.clone(),
                (_, None) => "the site".to_owned(),
            },
            reason,
        }
    }
}
