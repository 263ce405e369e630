//! The matching service of a standalone teleporter.

use std::marker::PhantomData;
use std::sync::Arc;

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{DEFAULT_DOMAIN, Right};
use drover_teleport::serve_teleporter;
use drover_teleport::services::{BeginMatching, BeginMatchingFor};

use super::matchers::{InUse, Matchers};
use super::server::Server;
use super::sessions::counted;
use crate::error::{Result, for_peer, refusal_of};

/// The matching service, with a separate matcher per site and domain: by [`BeginMatching`], or by [`BeginMatchingFor`].
pub struct Matching<R>(pub Arc<Server>, pub Arc<Matchers>, pub PhantomData<fn(R)>);

/// The domain of the caller's site that a request is about.
pub trait OfDomain: Request {
    /// Its name.
    fn domain(self) -> String;
}

impl OfDomain for BeginMatching {
    fn domain(self) -> String {
        DEFAULT_DOMAIN.into()
    }
}

impl OfDomain for BeginMatchingFor {
    fn domain(self) -> String {
        self.domain
    }
}

impl<R: OfDomain> Service for Matching<R> {
    fn id(&self) -> &'static str {
        R::SERVICE
    }

    fn right(&self) -> Right {
        R::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: R = call.request()?;
            let matcher = match self.1.of(peer.key, request.domain()).await {
                Ok(matcher) => matcher,
                Err(e) => return Ok(call.refuse(&for_peer(refusal_of(e))).await?),
            };
            tracing::info!("matching for it");
            let what = format!("matching for {}", peer.name);
            counted(&self.0, what, async { Ok(matching(matcher, call).await?) }).await
        })
    }
}

async fn matching(matcher: InUse, call: IncomingCall) -> Result<()> {
    let ends_idle = |idle| matcher.ends_idle(idle);
    let ended = serve_teleporter(call, matcher.shared(), ends_idle).await;
    matcher.done().await?;
    Ok(ended?)
}
