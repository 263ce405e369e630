//! Asking a site something: a peer over the network, or the running site of this home over its socket.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use drover_net::service::{self, Request};
use drover_net::{ConnectOptions, Connection, Identity, NetError, connect_any, connect_unix};
use drover_store::{Peer, SiteCatalog};
use tokio::sync::Notify;

use crate::error::{Context, Error, Result, bail};
use crate::home::Home;

/// Longest path that fits into a Unix socket's address, with room for a temporary suffix.
const MAX_SOCKET_PATH: usize = 90;

/// A connection to a site, for one request.
pub struct Call {
    connection: Connection,
    who: String,
}

impl Call {
    /// Connects to a peer.
    ///
    /// # Errors
    /// When it cannot be reached or is not who it was.
    pub async fn peer(identity: &Identity, peer: &Peer) -> Result<Call> {
        if peer.addresses.is_empty() {
            bail!(
                "{0} is paired but has no known address; make a ticket there and use it here with `drover pair`",
                peer.name
            );
        }
        let options = ConnectOptions::named(&peer.name);
        let connection = connect_any(&peer.addresses, identity, &peer.key, &options).await?;
        Ok(Call::on(connection, &peer.name))
    }

    /// Connects to the running site of this home; `None` when none runs.
    ///
    /// # Errors
    /// When one runs but takes no calls.
    pub async fn local(home: &Home) -> Result<Option<Call>> {
        let socket = SocketPath::of(&home.socket())?;
        if let Ok(connection) = connect_unix(socket.path()).await {
            return Ok(Some(Call::on(connection, "the running site")));
        }
        // The lock tells a site that does not answer from one that is not there.
        match home.used_by()? {
            None => Ok(None),
            Some(holder) => bail!(
                "another drover process{holder} is using {} and accepts no requests; try again when it is done",
                home.dir().display()
            ),
        }
    }

    /// Calls on a connection made elsewhere; `who` is at the other end.
    pub fn on(connection: Connection, who: &str) -> Call {
        Call {
            connection,
            who: who.into(),
        }
    }

    /// Asks and waits for the reply; `progress` hears how far it is.
    ///
    /// # Errors
    /// When the site is not a drover site, refuses, breaks off, or says something else.
    pub async fn ask<R: Request>(
        self,
        request: &R,
        progress: impl FnMut(R::Progress),
    ) -> Result<R::Reply> {
        let reply = service::call(self.connection, request, progress).await;
        reply.map_err(|e| match e {
            NetError::Refused(refusal) => Error::of_peer(&self.who, &refusal),
            e => e.into(),
        })
    }

    /// What is listed, some at a time; `None` when it is more than `max`.
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
        // Whoever never stops is not listened to for ever.
        tokio::select! {
            biased;
            () = too_much.notified() => return Ok(None),
            done = self.ask(request, more) => done?,
        }
        Ok(Some(list))
    }
}

/// A socket's path in a form that fits into a socket's address.
///
/// Paths there end at 107 bytes; a home may lie deeper, so then its directory is named by a handle.
pub struct SocketPath {
    path: PathBuf,
    _dir: Option<File>,
}

impl SocketPath {
    /// The usable form of `path`.
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

    /// The path to use while this lives.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The peer of that name.
///
/// # Errors
/// When there is none; says which there are.
pub fn find_peer(catalog: &SiteCatalog, name: &str) -> Result<Peer> {
    if let Some(peer) = catalog.peer(name)? {
        return Ok(peer);
    }
    let known: Vec<String> = catalog.peers()?.into_iter().map(|p| p.name).collect();
    let known = match known.as_slice() {
        [] => "there are no peers".to_string(),
        some => format!("peers: {}", some.join(", ")),
    };
    bail!("no peer is called {name:?} ({known}); `drover pair TICKET` adds one")
}
