//! What happens in a QEMU, in order.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use tokio::time::timeout;

use super::driver::Outgoing;
use super::message::Event;
use super::state::State;
use crate::error::HypervisorError;

/// The events since [`Qmp::events`](super::Qmp::events) was called. Ask before the command that causes what is waited for.
#[derive(Debug)]
pub struct Events {
    state: Arc<State>,
    /// Keeps the connection.
    _queue: mpsc::Sender<Outgoing>,
    receiver: broadcast::Receiver<Arc<Event>>,
}

impl Events {
    pub(super) fn new(state: Arc<State>, queue: mpsc::Sender<Outgoing>) -> Self {
        Events {
            receiver: state.subscribe(),
            _queue: queue,
            state,
        }
    }

    /// The next event. Cancel safe.
    ///
    /// # Errors
    /// [`HypervisorError::EventsLost`], after which the next call goes on, or how the connection ended.
    pub async fn next(&mut self) -> Result<Arc<Event>, HypervisorError> {
        let socket = || self.state.socket().to_owned();
        self.receiver.recv().await.map_err(|e| match e {
            RecvError::Lagged(lost) => HypervisorError::EventsLost {
                socket: socket(),
                lost,
            },
            RecvError::Closed => self
                .state
                .ended()
                .unwrap_or_else(|| HypervisorError::Closed {
                    socket: socket(),
                    reason: "it has ended".into(),
                }),
        })
    }

    /// Waits for the first event from which `pick` takes something; `what` names it in errors. Events before it are gone.
    ///
    /// # Errors
    /// [`HypervisorError::NotSeen`] after `within`, and those of [`Self::next`].
    pub async fn wait_for<T>(
        &mut self,
        what: &str,
        within: Duration,
        mut pick: impl FnMut(&Event) -> Option<T>,
    ) -> Result<T, HypervisorError> {
        let search = async {
            loop {
                if let Some(found) = pick(&*self.next().await?) {
                    return Ok(found);
                }
            }
        };
        match timeout(within, search).await {
            Ok(found) => found,
            Err(_) => Err(HypervisorError::NotSeen {
                socket: self.state.socket().to_owned(),
                what: what.to_owned(),
                after: within,
            }),
        }
    }
}
