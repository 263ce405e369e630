//! The services of a process that takes a program.

use std::sync::Arc;

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture, Services};
use drover_net::{
    Code, Connection, DEFAULT_DOMAIN, Listener, LocalListener, PeerKey, Refusal, Right, Rights,
    encode,
};
use tokio::sync::watch;

use super::super::protocol::{FetchPages, OpenProgram, SendPages};
use super::{Host, Leecher};
use crate::error::MigrateError;
use crate::protocol::{Ask, kind};
use crate::talk::Talk;

impl<H: Host> Leecher<H> {
    /// Adds its services. Callers need the right `host`.
    pub fn add_to(self: &Arc<Self>, services: &mut Services) {
        services.add(Conversation(Arc::clone(self)));
        services.add(Pages(Arc::clone(self)));
        services.add(Fetches(Arc::clone(self)));
    }

    /// Serves the seeder with the key `from`, and nobody else, until it is dropped.
    ///
    /// # Errors
    /// When the listener is broken.
    pub async fn listen(
        self: &Arc<Self>,
        listener: Listener,
        from: PeerKey,
    ) -> Result<(), MigrateError> {
        let mut services = Services::new(Refusal::new(Code::Unsupported, "no such service"));
        self.add_to(&mut services);
        let services = Arc::new(services);
        let mut calls = tokio::task::JoinSet::new();
        let (_stop, stopped) = watch::channel(false);
        loop {
            let pending = listener.accept().await?;
            let (services, stopped) = (Arc::clone(&services), stopped.clone());
            calls.spawn(async move {
                let Ok(connection) = pending.handshake().await else {
                    return;
                };
                if connection.peer() != Some(from) {
                    tracing::warn!(peer = connection.remote(), "an unknown key is not served");
                    return;
                }
                serve(connection, from, "the seeder", &services, stopped).await;
            });
            while calls.try_join_next().is_some() {}
        }
    }

    /// Serves processes of the same user at a Unix socket, until it is dropped.
    ///
    /// # Errors
    /// When the socket is broken.
    pub async fn listen_local(
        self: &Arc<Self>,
        listener: LocalListener,
    ) -> Result<(), MigrateError> {
        let mut services = Services::new(Refusal::new(Code::Unsupported, "no such service"));
        self.add_to(&mut services);
        let services = Arc::new(services);
        let mut calls = tokio::task::JoinSet::new();
        let (_stop, stopped) = watch::channel(false);
        loop {
            let connection = listener.accept().await?;
            let (services, stopped) = (Arc::clone(&services), stopped.clone());
            calls.spawn(async move {
                let key = PeerKey([0; 32]);
                serve(connection, key, "a local process", &services, stopped).await;
            });
            while calls.try_join_next().is_some() {}
        }
    }
}

async fn serve(
    connection: Connection,
    key: PeerKey,
    name: &str,
    services: &Services,
    stopped: watch::Receiver<bool>,
) {
    let peer = Peer {
        key,
        name: name.to_owned(),
        rights: Rights::of(&[Right::Host]),
        domain: DEFAULT_DOMAIN.to_owned(),
    };
    let served = async {
        let call = IncomingCall::receive(connection, stopped).await?;
        services.serve(peer, call).await
    };
    if let Err(e) = served.await {
        tracing::debug!("a call about a program: {e}");
    }
}

/// Serves [`OpenProgram`].
struct Conversation<H>(Arc<Leecher<H>>);

impl<H: Host> Service for Conversation<H> {
    fn id(&self) -> &'static str {
        OpenProgram::SERVICE
    }

    fn right(&self) -> Right {
        OpenProgram::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        let this = Arc::clone(&self.0);
        Box::pin(async move {
            let offer: OpenProgram = call.request()?;
            let token = offer.token;
            let opened = {
                let this = Arc::clone(&this);
                // To its end, also when the seeder hangs up.
                tokio::spawn(async move { this.open(&peer, &offer).await }).await?
            };
            let (number, answer) = match opened {
                Ok(opened) => opened,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<OpenProgram>(&()).await?;
            call.writer.send(kind::ANSWER, &encode(&answer)).await?;
            call.writer.flush().await?;
            let mut talk = Talk::new(call.reader, call.writer);
            loop {
                let Ok(ask) = talk.hear::<Ask>(kind::ASK).await else {
                    return Ok(());
                };
                let this = Arc::clone(&this);
                let asked = tokio::spawn(async move { this.asked(token, number, ask).await });
                let Some(answer) = asked.await?? else {
                    return Ok(());
                };
                talk.say(kind::ANSWER, &answer).await?;
            }
        })
    }
}

/// Serves [`SendPages`].
struct Pages<H>(Arc<Leecher<H>>);

impl<H: Host> Service for Pages<H> {
    fn id(&self) -> &'static str {
        SendPages::SERVICE
    }

    fn right(&self) -> Right {
        SendPages::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: SendPages = call.request()?;
            let transfer = match self.0.transfer(&peer, request.token).await {
                Ok(transfer) => transfer,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<SendPages>(&()).await?;
            call.writer.flush().await?;
            let writing = transfer.writing.clone();
            let ended = tokio::select! {
                ended = transfer.clone().receive(call.reader, call.writer) => ended,
                () = writing.ended() => Ok(()),
            };
            self.0.hung_up(request.token, &transfer).await;
            Ok(ended?)
        })
    }
}

/// Serves [`FetchPages`].
struct Fetches<H>(Arc<Leecher<H>>);

impl<H: Host> Service for Fetches<H> {
    fn id(&self) -> &'static str {
        FetchPages::SERVICE
    }

    fn right(&self) -> Right {
        FetchPages::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: FetchPages = call.request()?;
            let transfer = match self.0.transfer(&peer, request.token).await {
                Ok(transfer) => transfer,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<FetchPages>(&()).await?;
            call.writer.flush().await?;
            let writing = transfer.writing.clone();
            tokio::select! {
                ended = transfer.ask(call.reader, call.writer) => Ok(ended?),
                () = writing.ended() => Ok(()),
            }
        })
    }
}
