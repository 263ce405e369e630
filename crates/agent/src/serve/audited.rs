//! Requests that the audit log tells of.

use std::sync::Arc;
use std::time::Instant;

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Refusal, Right};

use crate::audit::{Audit, Audited, Record};

/// A handler whose requests go to the audit log: what was done, and what peers were refused.
pub struct Told<H>(pub Arc<Audit>, pub H);

impl<R: Audited, H: Handler<R>> Handler<R> for Told<H> {
    async fn handle(
        &self,
        peer: &Peer,
        request: R,
        exchange: &mut Exchange<'_, R>,
    ) -> Result<R::Reply, Refusal> {
        let (asked, began) = (request.clone(), Instant::now());
        let done = self.1.handle(peer, request, exchange).await;
        let from = exchange.remote();
        match &done {
            Ok(reply) => {
                if let Some(record) = asked.told(Some(reply)) {
                    let record = record.by(peer).from(from).took(began.elapsed());
                    write(&self.0, record, Audit::write).await;
                }
            }
            // The site's own user is told on the terminal.
            Err(refusal) if refusal.code.is_decision() && !peer.rights.has(Right::Manage) => {
                let refused = Record::refused(R::SERVICE, refusal, None);
                let image = asked.told(None).and_then(|about| about.image);
                let record = Record { image, ..refused }.by(peer).from(from);
                write(&self.0, record, Audit::write_limited).await;
            }
            Err(_) => {}
        }
        done
    }

    fn reply_sent(&self) {
        self.1.reply_sent();
    }
}

/// Writes an event on a thread that may block.
pub async fn write(audit: &Arc<Audit>, record: Record, how: fn(&Audit, Record)) {
    let audit = Arc::clone(audit);
    // A panic was logged.
    let _ = tokio::task::spawn_blocking(move || how(&audit, record)).await;
}
