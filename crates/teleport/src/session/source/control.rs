//! The connection that carries the control frames of a session.

use std::time::Duration;

use drover_net::service::reply_in;
use drover_net::{Frame, Refusal, decode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::TeleportError;
use crate::protocol::kind;
use crate::services::OpenSession;

/// How long to wait for the destination's reason after it ended a data connection.
const WHY_LIMIT: Duration = Duration::from_secs(2);

/// The connection that carries control frames.
pub struct Control {
    pub frames: Frames,
    pub out: mpsc::Sender<Frame>,
    pub written: JoinHandle<Result<(), TeleportError>>,
    /// Whether the destination has accepted the session.
    pub open: bool,
}

pub type Frames = mpsc::Receiver<Result<Frame, TeleportError>>;

impl Control {
    pub async fn send(&self, kind: u8, payload: Vec<u8>) -> Result<(), TeleportError> {
        self.out
            .send(Frame::new(kind, payload))
            .await
            .map_err(|_| broken())
    }

    /// Receives the next frame; a refusal is an error. The first frame answers the request. Cancel safe.
    pub async fn next(&mut self) -> Result<Frame, TeleportError> {
        let mut frame = self.frames.recv().await.ok_or_else(broken)??;
        if !self.open {
            reply_in::<OpenSession>(&frame, "the destination")?;
            self.open = true;
            frame = self.frames.recv().await.ok_or_else(broken)??;
        }
        if frame.kind == kind::REFUSE {
            let refusal: Refusal = decode(&frame.payload)?;
            return Err(TeleportError::Refused(refusal.tidy()));
        }
        Ok(frame)
    }

    /// Finds why the session broke. A destination that fails an image also closes the data connections, and one of
    /// them may show the failure first; this waits for the reason on the control connection.
    pub async fn why(&mut self, broke: TeleportError) -> TeleportError {
        let refused = async {
            loop {
                match self.next().await {
                    Ok(_) => {}
                    Err(e @ TeleportError::Refused(_)) => {
                        return Some(e);
                    }
                    Err(_) => return None,
                }
            }
        };
        let refused = tokio::time::timeout(WHY_LIMIT, refused).await;
        refused.ok().flatten().unwrap_or(broke)
    }
}

/// The error for a broken control connection.
pub fn broken() -> TeleportError {
    TeleportError::Net(drover_net::NetError::Truncated {
        peer: "the destination".into(),
    })
}
