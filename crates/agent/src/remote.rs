//! Requests to a site: to a peer over the network, or to the running site of this home over its socket.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use drover_net::service::{self, Request};
use drover_net::{ConnectOptions, Connection, Identity, NetError, connect_any, connect_unix};
use drover_store::Peer;
use tokio::sync::Notify;

use crate::error::{Context, Error, Result, bail};
use crate::home::Home;
use crate::site::{self, find_peer};
use crate::text::clean;

/// Longest path that fits into a Unix socket address, with room for a temporary suffix.
const MAX_SOCKET_PATH: usize = 90;

/// A connection to a site, for one request.
pub struct Call {
    connection: Connection,
    /// A peer's name, for messages.
    peer: Option<String>,
}

impl Call {
    /// Connects to a peer.
    ///
    /// # Errors
    /// When it cannot be reached or has another identity than the pinned one.
    pub async fn peer(identity: &Identity, peer: &Peer) -> Result<Call> {
        if peer.addresses.is_empty() {
            bail!(
                "{0} is paired but has no known address; make a ticket there and use it here with `drover pair`",
                peer.name
            );
        }
        let options = ConnectOptions::named(&peer.name);
        let connection = connect_any(&peer.addresses, identity, &peer.key, &options).await?;
        Ok(Call::on(connection, Some(&peer.name)))
    }

    /// Connects to the peer of that name, or, without one, to the running site of this home; `None` when none runs.
    ///
    /// # Errors
    /// As [`Call::peer`] and [`Call::local`], or when there is no such peer.
    pub async fn at(home: &Home, peer: Option<&str>) -> Result<Option<Call>> {
        let Some(name) = peer else {
            return Call::local(home).await;
        };
        let peer = find_peer(&site::look_at_catalog(home)?, name)?;
        Ok(Some(Call::peer(&home.identity()?, &peer).await?))
    }

    /// Connects to the running site of this home; `None` when none runs.
    ///
    /// # Errors
    /// When one runs but accepts no connections.
    pub async fn local(home: &Home) -> Result<Option<Call>> {
        let socket = SocketPath::of(&home.socket())?;
        if let Ok(connection) = connect_unix(socket.path()).await {
            return Ok(Some(Call::on(connection, None)));
        }
        // The lock distinguishes a site that does not reply from one that is not running.
        match home.used_by()? {
            None => Ok(None),
            Some(holder) => bail!(
                "another drover process{holder} is using {} and accepts no requests; try again when it is done",
                home.dir().display()
            ),
        }
    }

    /// Uses a connection to a peer or to the running site that was made elsewhere.
    pub fn on(connection: Connection, peer: Option<&str>) -> Call {
        Call {
            connection,
            peer: peer.map(str::to_owned),
        }
    }

    /// The connection, for a call with progress of its own.
    pub fn into_connection(self) -> Connection {
        self.connection
    }

    /// Sends a request and waits for the reply; `progress` receives progress messages.
    ///
    /// # Errors
    /// When the other end is not a drover site, refuses, closes the connection, or sends an invalid reply.
    pub async fn ask<R: Request>(
        self,
        request: &R,
        progress: impl FnMut(R::Progress),
    ) -> Result<R::Reply> {
        let reply = service::call(self.connection, request, progress).await;
        reply.map_err(|e| match (e, &self.peer) {
            (NetError::Refused(refusal), Some(peer)) => Error::of_peer(peer, &refusal),
            (NetError::Refused(refusal), None) => {
                Error::coded(refusal.code, clean(&refusal.message))
            }
            (e, _) => e.into(),
        })
    }

    /// Collects a list that arrives in parts; `None` when it has more than `max` items.
    ///
    /// # Errors
    /// As [`Call::ask`].
    pub async fn list<T, R>(self, request: &R, max: usize) -> Result<Option<Vec<T>>>
    where
        R: Request<Progress = Vec<T>, Reply = ()>,
    {
        let mut list = Vec::new();
        let too_much = Notify::new();
        let more = |some: Vec<T>| match list.len() + some.len() > max {
            true => too_much.notify_one(),
            false => list.extend(some),
        };
        // Bounds the time that a peer can keep sending.
        tokio::select! {
            biased;
            () = too_much.notified() => return Ok(None),
            done = self.ask(request, more) => done?,
        }
        Ok(Some(list))
    }
}

/// A socket's path in a form that fits into a socket address.
///
/// Such paths are limited to 107 bytes, and a home may have a longer one; its directory is then addressed by an open
/// file descriptor.
pub struct SocketPath {
    path: PathBuf,
    _dir: Option<File>,
}

impl SocketPath {
    /// Shortens `path` if necessary.
    ///
    /// # Errors
    /// When its directory cannot be opened.
    pub fn of(path: &Path) -> Result<SocketPath> {
        if path.as_os_str().len() <= MAX_SOCKET_PATH {
            return Ok(SocketPath {
                path: path.into(),
                _dir: None,
            });
        }
        let parent = path.parent().unwrap_or(Path::new("/"));
        let dir =
            File::open(parent).with_context(|| format!("cannot open {}", parent.display()))?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
        Ok(SocketPath {
            path: short.join(path.file_name().unwrap_or_default()),
            _dir: Some(dir),
        })
    }

    /// The path to use, valid while this lives.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
