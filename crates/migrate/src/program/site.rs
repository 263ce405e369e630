//! The process that a program goes to, as its seeder reaches it.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use drover_net::service::{self, Request};
use drover_net::{
    ConnectOptions, Connection, FrameReader, FrameWriter, Identity, NetError, PeerKey, connect_any,
    connect_unix,
};

use crate::error::MigrateError;

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = Result<Connection, NetError>> + Send + 'a>>;

/// The process that a program goes to.
pub trait Site: Send + Sync + 'static {
    /// Makes one more connection to it.
    fn connect(&self) -> Connecting<'_>;

    /// Its key, by which it is known when it is asked again; any that stays the same.
    fn key(&self) -> [u8; 32];

    /// Its name, for messages.
    fn name(&self) -> String;
}

/// A process with an identity, over TLS.
#[derive(Clone, Debug)]
pub struct RemoteSite {
    /// Its addresses, `HOST:PORT` each.
    pub addresses: Vec<String>,
    /// The seeder's own identity.
    pub identity: Identity,
    /// Its key.
    pub key: PeerKey,
    /// Its name, for messages.
    pub name: String,
}

impl Site for RemoteSite {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            let options = ConnectOptions::named(&self.name);
            connect_any(&self.addresses, &self.identity, &self.key, &options).await
        })
    }

    fn key(&self) -> [u8; 32] {
        self.key.0
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

/// A process of the same user at the same host, at a Unix socket.
#[derive(Clone, Debug)]
pub struct LocalSite {
    path: PathBuf,
}

impl LocalSite {
    /// The process that listens there.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

impl Site for LocalSite {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(connect_unix(&self.path))
    }

    fn key(&self) -> [u8; 32] {
        *blake3::hash(self.path.as_os_str().as_encoded_bytes()).as_bytes()
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// Makes a call that stays open after its reply.
pub(super) async fn call<R: Request<Reply = ()>>(
    site: &Arc<dyn Site>,
    request: &R,
) -> Result<(FrameReader, FrameWriter), MigrateError> {
    let (mut reader, mut writer) = site.connect().await?.split();
    service::open(&mut writer, request).await?;
    writer.flush().await?;
    service::read_reply::<R>(&mut reader).await?;
    Ok((reader, writer))
}
