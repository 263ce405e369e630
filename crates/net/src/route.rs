//! Which of the addresses of a site its connections go to: a site may run on several nodes, each with its own address, and
//! connections that belong together must reach the same one.

use std::net::SocketAddr;

use tokio::sync::Mutex;

use crate::connect::{ConnectOptions, connect_first};
use crate::connection::Connection;
use crate::{Identity, NetError, PeerKey};

/// The way to a site: the address that the first connection reached is that of the others, as long as it can be reached.
#[derive(Debug, Default)]
pub struct Route {
    way: Mutex<Way>,
}

#[derive(Debug, Default)]
struct Way {
    to: Option<SocketAddr>,
    /// Tried after all others.
    left: Option<SocketAddr>,
}

impl Route {
    /// Connects as [`crate::connect_any`] does, to the address that it reached before if that answers.
    ///
    /// # Errors
    /// As [`crate::connect_any`].
    pub async fn connect<A: AsRef<str>>(
        &self,
        addresses: &[A],
        identity: &Identity,
        expected: &PeerKey,
        options: &ConnectOptions,
    ) -> Result<Connection, NetError> {
        let known = self.way.lock().await.to;
        if let Some(known) = known {
            let only = [known.to_string()];
            let is_only = matches!(addresses, [one] if one.as_ref() == only[0]);
            match connect_first(&only, identity, expected, options, None).await {
                Ok((_, connection)) => return Ok(connection),
                Err(e) if is_only => return Err(e),
                Err(_) => {}
            }
        }
        // Whoever comes meanwhile waits, and takes the same way.
        let mut way = self.way.lock().await;
        if let Some(found) = way.to.filter(|to| Some(*to) != known) {
            drop(way);
            let only = [found.to_string()];
            let found = connect_first(&only, identity, expected, options, None).await;
            return Ok(found?.1);
        }
        way.to = None;
        let found = connect_first(addresses, identity, expected, options, way.left).await;
        let (to, connection) = found?;
        way.to = Some(to);
        Ok(connection)
    }

    /// Lets the next connection try the other addresses first: where it went before, it got nowhere.
    pub async fn leave(&self) {
        let mut way = self.way.lock().await;
        way.left = way.to.take().or(way.left);
    }
}
