//! The control connection of a session at the destination: frames from the source, and replies.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drover_net::{Code, Frame, encode};
use drover_store::profile::Profile;
use tokio::sync::{mpsc, watch};

use crate::TeleportError;
use crate::frames::wait_true;
use crate::protocol::kind;
use crate::session::SessionShared;
use crate::site::Site;

/// Frames from the source: those of the control connection, and those of the first data connection about the current
/// image.
pub struct Frames {
    pub control: mpsc::Receiver<Result<Frame, TeleportError>>,
    /// A source sends the first batches before its image is accepted, so they may arrive before the offer.
    pub first_data: mpsc::Receiver<Frame>,
    /// The source's name, for messages.
    pub peer: String,
    /// Whether an image is being received, of which blocks may be wanted. Those that still come afterwards are ignored.
    pub wants: bool,
}

impl Frames {
    /// The next frame about an image from either connection; order is kept within each. Cancel safe.
    pub async fn next(&mut self) -> Result<Frame, TeleportError> {
        loop {
            let frame = tokio::select! {
                frame = self.control.recv() => said(frame, &self.peer)?,
                Some(frame) = self.first_data.recv() => frame,
            };
            if frame.kind != kind::GIVEN || self.wants {
                return Ok(frame);
            }
        }
    }

    /// The next frame of the control connection. Cancel safe.
    pub async fn next_control(&mut self) -> Result<Frame, TeleportError> {
        loop {
            let frame = said(self.control.recv().await, &self.peer)?;
            if frame.kind != kind::GIVEN || self.wants {
                return Ok(frame);
            }
        }
    }
}

/// Checks for the end of the connection: a source ends a session with GOODBYE, so an end without it is an error.
fn said(frame: Option<Result<Frame, TeleportError>>, peer: &str) -> Result<Frame, TeleportError> {
    frame.unwrap_or_else(|| {
        let peer = peer.to_owned();
        Err(drover_net::NetError::Truncated { peer }.into())
    })
}

/// A session's control connection.
pub struct Session {
    pub site: Arc<Site>,
    pub shared: Arc<SessionShared>,
    pub out: mpsc::Sender<Frame>,
    pub stop: watch::Receiver<bool>,
    /// Of the disk that is offered next, encoded.
    pub generations: Option<Bytes>,
    /// Of the image that is offered next, encoded.
    pub likeness: Option<Bytes>,
    /// Of the image that is offered next, what has come of it.
    pub profile_parts: Vec<u8>,
    /// Of the image that is offered.
    pub profile: Option<Profile>,
}

impl Session {
    pub async fn send(&self, kind: u8, payload: Vec<u8>) -> Result<(), TeleportError> {
        self.shared.activity.touch();
        self.out
            .send(Frame::new(kind, payload))
            .await
            .map_err(|_| TeleportError::Lost("source"))
    }

    /// Refuses the current image. The source adds its name.
    pub async fn refuse(&self, error: &TeleportError) -> Result<(), TeleportError> {
        self.send(kind::REFUSE, encode(&error.for_peer())).await
    }

    /// Returns when the session should end in favor of others: nothing has moved for [`Supplies::max_idle`], and in that
    /// time a session was turned away. Keep-alives do not count; the site's own work does.
    ///
    /// [`Supplies::max_idle`]: crate::Supplies::max_idle
    pub async fn idle_while_others_wait(&self) -> TeleportError {
        let supplies = &self.site.config.supplies;
        let max = supplies.max_idle;
        loop {
            tokio::time::sleep(max / 4).await;
            if supplies.others_wait() && self.shared.activity.idle_for() >= max {
                return idle(
                    max,
                    " while others waited for a session; the transfer can be resumed by sending again",
                );
            }
        }
    }

    /// Runs an operation without side effects, unless the session is idle while others wait.
    pub async fn unless_idle<T>(
        &self,
        work: impl Future<Output = Result<T, TeleportError>>,
    ) -> Result<T, TeleportError> {
        tokio::select! {
            biased;
            done = work => done,
            e = self.idle_while_others_wait() => Err(e),
        }
    }

    /// Runs an operation without side effects until it completes or the site stops.
    pub async fn unless_stopped<T>(
        &self,
        work: impl Future<Output = Result<T, TeleportError>>,
    ) -> Result<T, TeleportError> {
        tokio::select! {
            biased;
            () = wait_true(self.stop.clone()) => Err(TeleportError::Stopped),
            done = work => done,
        }
    }
}

/// The refusal that ends an idle session.
pub fn idle(after: Duration, why: &str) -> TeleportError {
    let message = format!("the session was idle for {after:?}{why}");
    TeleportError::refused(Code::Busy, message)
}

pub fn stopped() -> TeleportError {
    TeleportError::Failed("the site stopped".into())
}
