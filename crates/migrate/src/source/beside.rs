//! Memory that is sent beside images, where the other site has an old copy of them: it works on that, and the link has time.
//!
//! The hypervisor's stream is kept from its end until the disks have arrived and are proved; the other site keeps what has come until
//! its hypervisor has the disks. So a link that breaks meanwhile ends no hypervisor there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_hypervisor::Hypervisor;
use drover_hypervisor::machine::Machine;
use drover_hypervisor::qmp::Events;
use drover_net::Code;
use drover_teleport::SendItem;
use drover_teleport::progress::SendEvent;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::ahead::Ahead;
use super::images::ImagesSent;
use super::{Driver, MoveEvent, OnMove};
use crate::error::MigrateError;
use crate::memory::{self, Gate};

/// Interval of looking how far memory is that is kept from its end.
pub(super) const PROOF_POLL: Duration = Duration::from_millis(5);

/// Carries the hypervisor's stream. When it ends the hypervisor finds its socket closed, and does not wait for a link that is
/// dead.
pub(super) struct AbortOnDrop(pub JoinHandle<Result<(), MigrateError>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Memory that is being sent.
pub(super) struct Sending {
    events: Events,
    carried: AbortOnDrop,
    gate: Arc<Gate>,
    /// What admits memory to the gate meanwhile.
    admits: Option<Admits>,
}

/// A task that ends when this is dropped.
struct Admits(JoinHandle<()>);

impl Drop for Admits {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Sending {
    pub fn new(events: Events, carried: AbortOnDrop, gate: Arc<Gate>) -> Self {
        Self {
            events,
            carried,
            gate,
            admits: None,
        }
    }

    /// From now on others admit memory to the gate, and open it.
    pub fn into_parts(self) -> (Events, AbortOnDrop, Arc<Gate>) {
        drop(self.admits);
        (self.events, self.carried, self.gate)
    }

    /// Whether its connection has not broken, as far as is known here.
    pub fn is_open(&self) -> bool {
        !self.carried.0.is_finished()
    }
}

/// What happens to images that are sent.
#[derive(Default)]
pub(super) struct Happened {
    /// A connection broke.
    cut: AtomicBool,
    /// The other site has an old copy of one.
    skips: Notify,
}

impl Happened {
    /// Notes what `on_event` is told.
    pub fn noted(on_event: OnMove) -> (Arc<Self>, OnMove) {
        let happened = Arc::<Self>::default();
        let noted = Arc::clone(&happened);
        let on_event = move |event: MoveEvent| {
            match &event {
                MoveEvent::Send(SendEvent::Reconnecting { .. }) => {
                    noted.cut.store(true, Ordering::Relaxed);
                }
                MoveEvent::Send(SendEvent::Skips { .. }) => noted.skips.notify_one(),
                _ => {}
            }
            on_event(event);
        };
        (happened, Arc::new(on_event))
    }

    /// Whether a connection broke.
    pub fn was_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }
}

impl Driver<'_> {
    /// The machine whose memory may go beside these images: it has more than is kept back, and all of its disks may be there.
    pub(super) fn may_go_beside(&self, items: &[SendItem]) -> Option<Machine> {
        let mut states = items.iter().map(|item| item.snapshot.as_ref());
        let are_known = states.all(|state| state.is_some_and(|state| state.generations.is_some()));
        let is_large = self.disks.memory_bytes > memory::BUFFERED_MEMORY;
        match &self.hypervisor {
            Some(Hypervisor::Qemu(machine)) if are_known && is_large => Some(machine.clone()),
            _ => None,
        }
    }

    /// Sends images, and memory beside them from when the other site says that it has an old copy.
    pub(super) async fn send_beside(
        &self,
        machine: &Machine,
        happened: &Happened,
        images: impl Future<Output = Result<ImagesSent, MigrateError>>,
    ) -> Result<(ImagesSent, Option<Sending>), MigrateError> {
        tokio::pin!(images);
        tokio::select! {
            biased;
            sent = &mut images => return Ok((sent?, None)),
            () = happened.skips.notified() => {}
        }
        let memory = async {
            let gate = Arc::new(Gate::new(true));
            let connection = Ahead::begin(&self.options.send);
            match self.begin_memory(machine, connection, gate).await {
                Ok(mut sending) => {
                    sending.admits = Some(admit(machine.clone(), Arc::clone(&sending.gate)));
                    Ok(Some(sending))
                }
                // An earlier drover has its hypervisor read it at once, which it cannot yet.
                Err(e) if e.code() == Some(Code::OutOfOrder) => Ok(None),
                Err(e) => Err(e),
            }
        };
        tokio::try_join!(images, memory)
    }
}

/// Admits what cannot be the end of the memory, until it is aborted or the hypervisor does not say.
fn admit(machine: Machine, gate: Arc<Gate>) -> Admits {
    Admits(tokio::spawn(async move {
        while let Ok(info) = machine.migration().await {
            if let Some(ram) = info.ram {
                gate.admit(ram.remaining);
            }
            tokio::time::sleep(PROOF_POLL).await;
        }
    }))
}
