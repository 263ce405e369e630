//! The matching service of a standalone teleporter.

use std::sync::Arc;

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, Refusal, Right};
use drover_teleport::serve_teleporter;
use drover_teleport::services::BeginMatching;

use super::matchers::{InUse, Matchers};
use super::server::Server;
use super::sessions::counted;
use crate::error::{Result, one_line};
use crate::signals::stopped;

/// The matching service, with a separate matcher per site.
pub struct Matching(pub Arc<Server>, pub Arc<Matchers>);

impl Service for Matching {
    fn id(&self) -> &'static str {
        BeginMatching::SERVICE
    }

    fn right(&self) -> Right {
        BeginMatching::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let matcher = match self.1.of(peer.key).await {
                Ok(matcher) => matcher,
                Err(e) => {
                    let refusal = Refusal::new(Code::Failed, one_line(&e));
                    return Ok(call.refuse(&refusal).await?);
                }
            };
            tracing::info!("matching for it");
            let what = format!("matching for {}", peer.name);
            counted(&self.0, what, async { Ok(matching(matcher, call).await?) }).await
        })
    }
}

async fn matching(matcher: InUse, call: IncomingCall) -> Result<()> {
    let mut stop = call.stop.clone();
    let ended = tokio::select! {
        ended = serve_teleporter(call, matcher.shared()) => ended,
        () = stopped(&mut stop) => Ok(()),
    };
    matcher.done().await?;
    Ok(ended?)
}
