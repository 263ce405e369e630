//! Asking a site something: a peer over the network, or the running site of this home over its socket.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drover_net::{
    ConnectOptions, Connection, FrameReader, FrameWriter, Identity, Role, connect_any,
    connect_unix, decode, encode, greet,
};
use drover_store::{Peer, SiteCatalog};
use drover_teleport::protocol::{Reply, Request, kind};

use crate::failure::refused_by_peer;
use crate::home::Home;

/// How long a site may be silent in the middle of answering.
const SILENCE: Duration = Duration::from_secs(120);

/// Longest path that fits into a Unix socket's address, with room for a temporary suffix.
const MAX_SOCKET_PATH: usize = 90;

/// A conversation with a site: one request, and its replies.
pub struct Call {
    reader: FrameReader,
    writer: FrameWriter,
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
                "{0} is paired but has told no address to call; make a ticket there and `drover pair TICKET --name {0}`",
                peer.name
            );
        }
        let options = ConnectOptions::named(&peer.name);
        let connection = connect_any(&peer.addresses, identity, &peer.key, &options).await?;
        Call::begin(connection, &peer.name).await
    }

    /// Connects to the running site of this home; `None` when none runs.
    ///
    /// # Errors
    /// When one runs but does not answer.
    pub async fn local(home: &Home) -> Result<Option<Call>> {
        let socket = SocketPath::of(&home.socket())?;
        if let Ok(connection) = connect_unix(socket.path()).await {
            return Ok(Some(Call::begin(connection, "the running site").await?));
        }
        // The lock tells a site that does not answer from one that is not there.
        match home.used_by()? {
            None => Ok(None),
            Some(holder) => bail!(
                "another drover process{holder} is at work in {} and takes no calls; try again when it is done",
                home.dir().display()
            ),
        }
    }

    async fn begin(connection: Connection, who: &str) -> Result<Call> {
        let (mut reader, mut writer) = connection.split();
        greet(&mut reader, &mut writer, Role::Client).await?;
        reader.set_idle_timeout(Some(SILENCE));
        Ok(Call {
            reader,
            writer,
            who: who.into(),
        })
    }

    /// Starts a conversation on a connection made elsewhere.
    ///
    /// # Errors
    /// When the other end is not a drover site.
    pub async fn on(connection: Connection, who: &str) -> Result<Call> {
        Call::begin(connection, who).await
    }

    /// Sends the request.
    ///
    /// # Errors
    /// When the connection broke.
    pub async fn ask(&mut self, request: &Request) -> Result<()> {
        self.writer.send(kind::REQUEST, &encode(request)).await?;
        self.writer.flush().await?;
        Ok(())
    }

    /// The next reply; a refusal is an error here.
    ///
    /// # Errors
    /// When the site refuses, breaks off, or says something else than a reply.
    pub async fn reply(&mut self) -> Result<Reply> {
        let Some(frame) = self.reader.next().await? else {
            bail!("{} ended the conversation without an answer", self.who);
        };
        if frame.kind != kind::REPLY {
            bail!(
                "{} answered with something that is not a reply (frame kind {:#04x})",
                self.who,
                frame.kind
            );
        }
        match decode(&frame.payload)? {
            Reply::Refused(refusal) => Err(refused_by_peer(&self.who, &refusal)),
            reply => Ok(reply),
        }
    }

    /// Asks for what is answered by one text.
    ///
    /// # Errors
    /// As [`Call::reply`].
    pub async fn text(mut self, request: &Request) -> Result<String> {
        self.ask(request).await?;
        let Reply::Text(text) = self.reply().await? else {
            return Err(self.confused());
        };
        self.close().await;
        Ok(text)
    }

    /// What to say when the reply does not answer the question.
    pub fn confused(&self) -> anyhow::Error {
        anyhow::anyhow!(
            "{} gave an answer to another question; the two drovers do not fit",
            self.who
        )
    }

    /// Ends the conversation in good order.
    pub async fn close(self) {
        drover_net::close(self.reader, self.writer, Duration::from_secs(2))
            .await
            .ok();
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
        [] => "none is paired yet".to_string(),
        some => format!("paired are: {}", some.join(", ")),
    };
    bail!("no peer is called {name:?} ({known}); `drover pair TICKET --name NAME` adds one")
}
