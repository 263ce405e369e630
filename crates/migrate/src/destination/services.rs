//! The services of a site that takes machines.

use std::sync::Arc;

use drover_net::service::{BoxError, IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, Refusal, Right};
use drover_teleport::{Effort, Pace};
use tokio::net::UnixStream;

use super::{Moves, Pending, Prepared, Site};
use crate::measure;
use crate::memory::{self, Early};
use crate::protocol::{FetchDisks, Kind, MeasureLink, OpenMove, SendDisks, SendMemory};

/// The moves to a site, of each kind.
pub trait AllMoves: Send + Sync + 'static {
    /// What it gives to them.
    type Site: Site;

    /// Those of a kind that a peer may make.
    ///
    /// # Errors
    /// When it may make none.
    fn of<'a>(
        &'a self,
        peer: &'a Peer,
        kind: Kind,
    ) -> Pending<'a, Result<Arc<Moves<Self::Site>>, Refusal>>;
}

/// Serves [`OpenMove`].
pub struct Conversations<A>(pub Arc<A>);

impl<A: AllMoves> Service for Conversations<A> {
    fn id(&self) -> &'static str {
        OpenMove::SERVICE
    }

    fn right(&self) -> Right {
        OpenMove::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let offer: Arc<OpenMove> = Arc::new(call.request()?);
            let moves = match self.0.of(&peer, offer.kind).await {
                Ok(moves) => moves,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            let mut stop = call.stop.clone();
            tokio::select! {
                ended = moves.converse(&peer, offer, call) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
            }
        })
    }
}

/// Serves [`SendDisks`].
pub struct DiskWrites<A>(pub Arc<A>);

impl<A: AllMoves> Service for DiskWrites<A> {
    fn id(&self) -> &'static str {
        SendDisks::SERVICE
    }

    fn right(&self) -> Right {
        SendDisks::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: SendDisks = call.request()?;
            let found = async {
                let moves = self.0.of(&peer, request.kind).await?;
                let found = moves.transfer_of(&peer, &request.machine, request.token);
                found.await
            };
            let transfer = match found.await {
                Ok(transfer) => transfer,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<SendDisks>(&()).await?;
            call.writer.flush().await?;
            let (mut stop, writing) = (call.stop.clone(), transfer.writing.clone());
            tokio::select! {
                ended = transfer.receive(call.reader, call.writer) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
                () = writing.ended() => Ok(()),
            }
        })
    }
}

/// Serves [`FetchDisks`].
pub struct DiskFetches<A>(pub Arc<A>);

impl<A: AllMoves> Service for DiskFetches<A> {
    fn id(&self) -> &'static str {
        FetchDisks::SERVICE
    }

    fn right(&self) -> Right {
        FetchDisks::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: FetchDisks = call.request()?;
            let found = async {
                let moves = self.0.of(&peer, Kind::Machine).await?;
                let found = moves.transfer_of(&peer, &request.machine, request.token);
                found.await
            };
            let transfer = match found.await {
                Ok(transfer) => transfer,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<FetchDisks>(&()).await?;
            let (mut stop, writing) = (call.stop.clone(), transfer.writing.clone());
            tokio::select! {
                ended = transfer.name_and_ask(call.reader, call.writer) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
                () = writing.ended() => Ok(()),
            }
        })
    }
}

/// Serves [`MeasureLink`].
pub struct Measures;

impl Service for Measures {
    fn id(&self) -> &'static str {
        MeasureLink::SERVICE
    }

    fn right(&self) -> Right {
        MeasureLink::RIGHT
    }

    fn serve(&self, _: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let MeasureLink = call.request()?;
            call.accept::<MeasureLink>(&()).await?;
            call.writer.flush().await?;
            let mut stop = call.stop.clone();
            tokio::select! {
                ended = measure::answer(call.reader, call.writer) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
            }
        })
    }
}

/// Serves [`SendMemory`].
pub struct MemoryStreams<A>(pub Arc<A>);

impl<A: AllMoves> Service for MemoryStreams<A> {
    fn id(&self) -> &'static str {
        SendMemory::SERVICE
    }

    fn right(&self) -> Right {
        SendMemory::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: SendMemory = call.request()?;
            let (name, token) = (&request.machine, request.token);
            let moves = match self.0.of(&peer, Kind::Machine).await {
                Ok(moves) => moves,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            let mut early = Early::default();
            let prepared = match moves.prepared(&peer, name, token).await {
                Ok(prepared) => prepared,
                Err(refusal) => match moves.attempt(&peer, name, token).await {
                    Err(_) => return Ok(call.refuse(&refusal).await?),
                    Ok(attempt) => {
                        call.accept::<SendMemory>(&()).await?;
                        call.writer.flush().await?;
                        let mut stop = call.stop.clone();
                        let ready = moves.until_prepared(&peer, name, token, attempt);
                        let ready = tokio::select! {
                            ready = early.until(&mut call.reader, ready) => ready?,
                            _ = stop.wait_for(|stop| *stop) => return Ok(()),
                        };
                        let Some(prepared) = ready else {
                            return Ok(());
                        };
                        let local = prepared.hypervisor.receive_stream().await?;
                        return receive(call, local, early, &prepared).await;
                    }
                },
            };
            let local = match prepared.hypervisor.receive_stream().await {
                Ok(local) => local,
                Err(e) => {
                    let refusal = Refusal::new(Code::Failed, e.to_string());
                    return Ok(call.refuse(&refusal).await?);
                }
            };
            call.accept::<SendMemory>(&()).await?;
            call.writer.flush().await?;
            receive(call, local, early, &prepared).await
        })
    }
}

/// Carries a machine's memory to the hypervisor that reads it from this socket.
async fn receive(
    call: IncomingCall,
    local: UnixStream,
    early: Early,
    prepared: &Prepared,
) -> Result<(), BoxError> {
    let writing = prepared.transfer.writing.clone();
    let (mut stop, back) = (call.stop.clone(), Arc::default());
    let open = Arc::new(memory::Gate::new(false));
    // What comes back is little.
    let pace = Pace::fixed(Effort::None);
    let carried = memory::carry(local, early, call.reader, call.writer, pace, back, open);
    tokio::select! {
        ended = carried => Ok(ended?),
        _ = stop.wait_for(|stop| *stop) => Ok(()),
        () = writing.ended() => Ok(()),
    }
}
