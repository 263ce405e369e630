//! What callers and the task of a connection share: who waits for which answer, and how it ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, broadcast, oneshot};

use super::message::Event;
use crate::error::{ErrorClass, HypervisorError};

/// Events that are kept for who does not take them; then the oldest are lost, which is an error.
pub const MAX_EVENTS: usize = 256;

/// What a command returned, or QEMU's error.
pub type Answer = Result<Value, (ErrorClass, String)>;

/// A command without an answer.
#[derive(Debug)]
pub struct Pending {
    /// Its name.
    pub command: String,
    /// Whether it overtakes others.
    pub out_of_band: bool,
    /// Held until QEMU answers, whether or not somebody still waits for that.
    pub _permits: Vec<OwnedSemaphorePermit>,
}

#[derive(Debug)]
pub struct State {
    socket: String,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    next: u64,
    /// By number, which is by age.
    pending: BTreeMap<u64, (Pending, oneshot::Sender<Answer>)>,
    ended: Option<HypervisorError>,
    events: Option<broadcast::Sender<Arc<Event>>>,
}

impl State {
    pub fn new(socket: &str) -> Self {
        State {
            socket: socket.to_owned(),
            inner: Mutex::new(Inner {
                next: 1,
                pending: BTreeMap::new(),
                ended: None,
                events: Some(broadcast::Sender::new(MAX_EVENTS)),
            }),
        }
    }

    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// A number for a command, and where its answer will be.
    pub fn expect(
        &self,
        pending: Pending,
    ) -> Result<(u64, oneshot::Receiver<Answer>), HypervisorError> {
        let mut inner = self.inner.lock();
        if let Some(error) = &inner.ended {
            return Err(error.clone());
        }
        let (sender, receiver) = oneshot::channel();
        let id = inner.next;
        inner.next += 1;
        inner.pending.insert(id, (pending, sender));
        Ok((id, receiver))
    }

    /// The command was not sent.
    pub fn forget(&self, id: u64) {
        self.inner.lock().pending.remove(&id);
    }

    /// The command that has waited longest, of one kind.
    pub fn oldest(&self, out_of_band: bool) -> Option<String> {
        let inner = self.inner.lock();
        let mut waiting = inner.pending.values();
        let found = waiting.find(|(pending, _)| pending.out_of_band == out_of_band);
        found.map(|(pending, _)| pending.command.clone())
    }

    /// Hands an answer to who waits for it; false when nobody asked.
    pub fn answer(&self, id: u64, answer: Answer) -> bool {
        let found = self.inner.lock().pending.remove(&id);
        // Who asked may have gone.
        found.map(|(_, sender)| sender.send(answer)).is_some()
    }

    pub fn happened(&self, event: Event) {
        if let Some(events) = &self.inner.lock().events {
            // Nobody may be listening.
            let _ = events.send(Arc::new(event));
        }
    }

    /// The events from now on, or none any more.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        match &self.inner.lock().events {
            Some(events) => events.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    /// The connection is over: whoever waits gets this error.
    pub fn end(&self, error: HypervisorError) {
        let mut inner = self.inner.lock();
        inner.ended.get_or_insert(error);
        inner.pending.clear();
        inner.events = None;
    }

    pub fn ended(&self) -> Option<HypervisorError> {
        self.inner.lock().ended.clone()
    }
}
