//! A connection that is made while something else is waited for: a move needs several, and each takes two round trips before a call
//! can be made on it.

use std::time::{Duration, Instant};

use drover_net::{ConnectOptions, Connection, connect_any};
use drover_teleport::SendOptions;
use tokio::task::JoinHandle;

use crate::error::MigrateError;

/// How old a connection may be on which nothing was said yet: the other end waits for the call for some seconds only
/// ([`drover_net::HANDSHAKE_TIMEOUT`]).
const FRESH: Duration = Duration::from_secs(4);

/// Reaches the other site, which has proved its key.
///
/// # Errors
/// As of [`connect_any`].
pub(super) async fn connect(send: &SendOptions) -> Result<Connection, MigrateError> {
    let options = ConnectOptions::named(&send.peer_name);
    Ok(connect_any(&send.addresses, &send.identity, &send.peer, &options).await?)
}

/// A connection that is being made.
pub(super) struct Ahead {
    send: SendOptions,
    made: JoinHandle<Result<(Connection, Instant), MigrateError>>,
}

impl Ahead {
    /// Begins to make it. Only in a runtime.
    pub fn begin(send: &SendOptions) -> Self {
        let (send, to) = (send.clone(), send.clone());
        Self {
            send,
            made: tokio::spawn(async move { Ok((connect(&to).await?, Instant::now())) }),
        }
    }

    /// The connection; another one if this one failed, or it was wanted so late that the other end may have closed it.
    ///
    /// # Errors
    /// As of a connection that is made now.
    pub async fn made(mut self) -> Result<Connection, MigrateError> {
        match (&mut self.made).await {
            Ok(Ok((connection, made))) if made.elapsed() < FRESH => Ok(connection),
            _ => connect(&self.send).await,
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.made.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drover_net::{Identity, Listener};

    use super::*;

    fn send_to(address: &str, peer: &Identity) -> SendOptions {
        SendOptions {
            identity: Identity::generate(),
            peer: peer.key(),
            peer_name: "far".into(),
            addresses: vec![address.into()],
            route: Arc::default(),
            limit: None,
            dry_run: false,
            connections: None,
            compress: None,
            give_up_after: Duration::ZERO,
            profiles: None,
        }
    }

    #[tokio::test]
    async fn one_that_failed_or_is_old_is_made_anew() {
        let far = Identity::generate();
        let loopback = ([127, 0, 0, 1], 0).into();
        let listener = Listener::bind(loopback, &far).await.unwrap();
        let send = send_to(&listener.local_addr().to_string(), &far);
        let taken = tokio::spawn(async move {
            let mut taken = Vec::new();
            while taken.len() < 5 {
                let pending = listener.accept().await.unwrap();
                // Those that are given up meanwhile fail.
                taken.push(pending.handshake().await);
            }
        });
        Ahead::begin(&send).made().await.unwrap();
        // Nobody listens there.
        let mut failed = Ahead::begin(&send_to("127.0.0.1:1", &far));
        failed.send = send.clone();
        failed.made().await.unwrap();
        // One that was long in the making is as good as new; one that was long made is not.
        for (age, made_anew) in [(Duration::ZERO, false), (FRESH, true)] {
            let mut ahead = Ahead::begin(&send);
            ahead.made = tokio::spawn(async move {
                let (here, _there) = Connection::pair().unwrap();
                Ok((here, Instant::now().checked_sub(age).unwrap()))
            });
            let made = ahead.made().await.unwrap();
            assert_eq!(made.peer().is_some(), made_anew);
        }
        taken.abort();
    }
}
