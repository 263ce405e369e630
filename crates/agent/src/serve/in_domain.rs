//! Services of a site, in the domain of the caller.

use std::marker::PhantomData;
use std::sync::Arc;

use drover_net::service::{Exchange, Handler, IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, DEFAULT_DOMAIN, Refusal, Right};

use super::audited::write;
use super::domains::{Domain, InUse};
use super::server::{Duty, OfSite, Server};
use crate::audit::{Audit, Record};
use crate::error::for_peer;

/// Handles the requests to a site in the domain of the caller.
#[derive(Clone)]
pub struct InDomain(pub Arc<Server>);

impl InDomain {
    /// The domain of that name.
    pub async fn of(&self, name: &str) -> Result<Arc<InUse>, Refusal> {
        let Duty::Site(default) = &self.0.duty else {
            return Err(Refusal::new(Code::Unsupported, "this is not a site"));
        };
        if name == DEFAULT_DOMAIN {
            return Ok(Arc::new(InUse::default(Arc::clone(default))));
        }
        let server = &self.0;
        let (home, identity, catalog) = (&server.home, &server.identity, &server.catalog);
        let found = server.domains.of(home, identity, catalog, name);
        Ok(Arc::new(found.await?))
    }
}

impl<R: Request> Handler<R> for InDomain
where
    OfSite: Handler<R>,
{
    async fn handle(
        &self,
        peer: &Peer,
        request: R,
        exchange: &mut Exchange<'_, R>,
    ) -> Result<R::Reply, Refusal> {
        let site = OfSite {
            server: Arc::clone(&self.0),
            domain: self.of(&peer.domain).await?,
        };
        let done = site.handle(peer, request, exchange).await;
        done.map_err(|refusal| match peer.rights.has(Right::Manage) {
            true => refusal,
            false => for_peer(refusal),
        })
    }
}

/// A conversation with a site, in the domain of the caller.
pub struct Conversation<R, S> {
    server: InDomain,
    service: fn(&Domain) -> S,
    request: PhantomData<fn(R)>,
}

impl<R: Request, S: Service> Conversation<R, S> {
    /// Conversations that `R` opens and `service` of a domain serves.
    pub fn new(server: &Arc<Server>, service: fn(&Domain) -> S) -> Self {
        Conversation {
            server: InDomain(Arc::clone(server)),
            service,
            request: PhantomData,
        }
    }
}

impl<R: Request, S: Service> Service for Conversation<R, S> {
    fn id(&self) -> &'static str {
        R::SERVICE
    }

    fn right(&self) -> Right {
        R::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let domain = match self.server.of(&peer.domain).await {
                Ok(domain) => domain,
                Err(refusal) => {
                    let record = Record::refused(R::SERVICE, &refusal, None).by(&peer);
                    let record = record.from(call.reader.peer_text());
                    write(self.server.0.home.audit(), record, Audit::write_limited).await;
                    return Ok(call.refuse(&refusal).await?);
                }
            };
            (self.service)(&domain).serve(peer, call).await
        })
    }
}
