//! Calls of a mount about its write lease, to the site that has the image.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_mount::client::Connector;
use drover_mount::protocol::{ChangesSeen, HandOverLease, LeaseSeen, LookAtChanges, LookAtLease};
use drover_net::service::Request;
use drover_net::{Code, PeerKey};
use drover_store::lease::{HandOverToken, MountId};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::control::HandTo;
use super::target::Target;
use crate::error::{Error, Result, one_line};
use crate::remote::Call;

/// Timeout of one call.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How long a hand-over whose outcome is not known is asked about.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(60);

/// The pause before it is asked again.
const AGAIN: Duration = Duration::from_millis(250);

/// The lease of a mount at the site that has the image.
pub struct Lease {
    connector: Arc<dyn Connector>,
    runtime: Handle,
    peer: Option<String>,
    image: ImageName,
    mount: MountId,
    /// Of the one hand-over that there can be.
    token: HandOverToken,
    handed_over: AtomicBool,
}

impl Lease {
    /// The lease under which `mount` has an image open. Must be called within a runtime.
    ///
    /// # Errors
    /// When it is no image.
    pub fn new(connector: &Arc<dyn Connector>, image: &Target, mount: MountId) -> Result<Lease> {
        Ok(Lease {
            connector: Arc::clone(connector),
            runtime: Handle::current(),
            peer: image.peer.clone(),
            image: ImageName::new(&image.image)?,
            mount,
            token: drover_net::random_id(),
            handed_over: AtomicBool::new(false),
        })
    }

    async fn ask<R: Request>(&self, request: &R) -> Result<R::Reply> {
        let unavailable = |text: String| Error::coded(Code::Unavailable, text);
        let asked = async {
            let connection = self.connector.connect().await;
            let connection = connection.map_err(|e| unavailable(e.to_string()))?;
            let call = Call::on(connection, self.peer.as_deref());
            call.ask(request, |_| {}).await
        };
        let asked = timeout(CALL_LIMIT, asked).await;
        asked.unwrap_or_else(|_| Err(unavailable("the site did not reply".into())))
    }

    /// How things stand; `point` as in [`LookAtLease`].
    ///
    /// # Errors
    /// The site's refusal, or it cannot be reached.
    pub async fn look(&self, point: bool) -> Result<LeaseSeen> {
        let look = LookAtLease {
            image: self.image.clone(),
            mount: self.mount,
            point,
        };
        self.ask(&look).await
    }

    /// What was written over the image.
    ///
    /// # Errors
    /// The site's refusal, or it cannot be reached.
    pub async fn changes(&self) -> Result<ChangesSeen> {
        let look = LookAtChanges {
            image: self.image.clone(),
            mount: self.mount,
        };
        self.ask(&look).await
    }

    /// Hands the lease over, or only checks that this is possible; returns who gets it, nothing if that has taken place already.
    /// `link` is the number of the mount's latest link, which may change meanwhile. Blocks.
    ///
    /// # Errors
    /// When it stays, or, with [`Code::Unavailable`], when it is not known whether it does: then it may be called again.
    pub fn hand_over(&self, to: HandTo, commit: bool, link: &dyn Fn() -> u64) -> Result<String> {
        if self.was_handed_over() {
            return Ok(String::new());
        }
        let ask = |link| HandOverLease {
            image: self.image.clone(),
            mount: self.mount,
            link,
            token: match to {
                HandTo::Heir(heir) => heir.token,
                _ => self.token,
            },
            to: match to {
                HandTo::Any => None,
                HandTo::Site(key) => Some(PeerKey(key)),
                HandTo::Heir(heir) => Some(PeerKey(heir.site)),
            },
            to_mount: match to {
                HandTo::Heir(heir) => Some(MountId(heir.mount)),
                _ => None,
            },
            commit,
        };
        let began = Instant::now();
        loop {
            let answered = self.runtime.block_on(self.ask(&ask(link())));
            match answered {
                Ok(who) => {
                    // Without a name it has taken place before.
                    if commit || who.is_empty() {
                        self.handed_over.store(true, Ordering::Release);
                    }
                    return Ok(who);
                }
                // The reply may be what was lost.
                Err(e) if commit && may_be_done(&e) && began.elapsed() < HAND_OVER_LIMIT => {
                    std::thread::sleep(AGAIN);
                }
                Err(e) if commit && may_be_done(&e) => {
                    let text = format!(
                        "it is not known whether the write lease of {} was handed over ({}): try again",
                        self.image,
                        one_line(&e)
                    );
                    return Err(Error::coded(Code::Unavailable, text));
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether the lease was handed over.
    pub fn was_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Acquire)
    }
}

/// Whether what was asked for may have been done, or may be done when it is asked for again.
pub(super) fn may_be_done(error: &Error) -> bool {
    matches!(error.code(), None | Some(Code::Unavailable))
}
