//! The services of a site that takes machines.

use std::sync::Arc;

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, Refusal, Right};
use drover_teleport::{Effort, Pace};

use super::hypervisor::receive_stream;
use super::{Moves, Site};
use crate::protocol::{OpenMove, SendDisks, SendMemory};
use crate::{disks, memory};

/// Serves [`OpenMove`].
pub struct Conversations<S>(pub Arc<Moves<S>>);

impl<S: Site> Service for Conversations<S> {
    fn id(&self) -> &'static str {
        OpenMove::SERVICE
    }

    fn right(&self) -> Right {
        OpenMove::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let mut stop = call.stop.clone();
            tokio::select! {
                ended = self.0.converse(&peer, call) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
            }
        })
    }
}

/// Serves [`SendDisks`].
pub struct DiskWrites<S>(pub Arc<Moves<S>>);

impl<S: Site> Service for DiskWrites<S> {
    fn id(&self) -> &'static str {
        SendDisks::SERVICE
    }

    fn right(&self) -> Right {
        SendDisks::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: SendDisks = call.request()?;
            let found = self.0.prepared(&peer, &request.machine, request.token);
            let prepared = match found.await {
                Ok(prepared) => prepared,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<SendDisks>(&()).await?;
            call.writer.flush().await?;
            let devices = prepared.disks.into_iter().map(|disk| disk.device).collect();
            let (mut stop, writing) = (call.stop.clone(), prepared.writing);
            tokio::select! {
                ended = disks::receive(devices, writing.clone(), call.reader, call.writer) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
                () = writing.ended() => Ok(()),
            }
        })
    }
}

/// Serves [`SendMemory`].
pub struct MemoryStreams<S>(pub Arc<Moves<S>>);

impl<S: Site> Service for MemoryStreams<S> {
    fn id(&self) -> &'static str {
        SendMemory::SERVICE
    }

    fn right(&self) -> Right {
        SendMemory::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: SendMemory = call.request()?;
            let found = self.0.prepared(&peer, &request.machine, request.token);
            let opened = match found.await {
                Ok(prepared) => match receive_stream(&prepared.hypervisor).await {
                    Ok(local) => Ok((local, prepared.writing)),
                    Err(e) => Err(Refusal::new(Code::Failed, e.to_string())),
                },
                Err(refusal) => Err(refusal),
            };
            let (local, writing) = match opened {
                Ok(opened) => opened,
                Err(refusal) => return Ok(call.refuse(&refusal).await?),
            };
            call.accept::<SendMemory>(&()).await?;
            call.writer.flush().await?;
            let (mut stop, back) = (call.stop.clone(), Arc::default());
            // What comes back is little.
            let pace = Pace::fixed(Effort::None);
            tokio::select! {
                ended = memory::carry(local, call.reader, call.writer, pace, back) => Ok(ended?),
                _ = stop.wait_for(|stop| *stop) => Ok(()),
                () = writing.ended() => Ok(()),
            }
        })
    }
}
