//! Memory that is sent beside images, where the other site has an old copy of them: it works on that, and the link has time.
//!
//! The hypervisor's stream is kept from its end until the disks have arrived and are proved; the other site keeps what has come until
//! its hypervisor has the disks. So a link that breaks meanwhile ends no hypervisor there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_hypervisor::machine::{Machine, MigrationStatus};
use drover_hypervisor::qmp::Events;
use drover_hypervisor::{Hypervisor, HypervisorError};
use drover_teleport::SendItem;
use drover_teleport::progress::SendEvent;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::ahead::Ahead;
use super::images::ImagesSent;
use super::resume::resume;
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
}

impl Sending {
    pub fn new(events: Events, carried: AbortOnDrop, gate: Arc<Gate>) -> Self {
        Self {
            events,
            carried,
            gate,
        }
    }

    /// From now on others admit memory to the gate, and open it.
    pub fn into_parts(self) -> (Events, AbortOnDrop, Arc<Gate>) {
        (self.events, self.carried, self.gate)
    }

    /// Admits what cannot be the end of the memory, until something goes wrong.
    async fn admit(&mut self, machine: &Machine) -> MigrateError {
        loop {
            let switch = MigrationStatus::PreSwitchover;
            let waited = machine.wait_migration(&mut self.events, &switch, PROOF_POLL);
            match waited.await {
                Ok(()) => return MigrateError::TooEarly,
                Err(HypervisorError::NotSeen { .. }) => {}
                Err(e) => return e.into(),
            }
            if !self.is_open() {
                return MigrateError::Lost;
            }
            match machine.migration().await {
                Ok(info) => self.gate.admit(info.ram.map_or(0, |ram| ram.remaining)),
                Err(e) => return e.into(),
            }
        }
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
    /// The other site has an old copy of the last one: all before it are there.
    skips: Notify,
}

impl Happened {
    /// Notes what `on_event` is told.
    pub fn noted(items: &[SendItem], on_event: OnMove) -> (Arc<Self>, OnMove) {
        let last = items.last().map(|item| item.name.to_string());
        let happened = Arc::<Self>::default();
        let noted = Arc::clone(&happened);
        let on_event = move |event: MoveEvent| {
            match &event {
                MoveEvent::Send(SendEvent::Reconnecting { .. }) => {
                    noted.cut.store(true, Ordering::Relaxed);
                }
                MoveEvent::Send(SendEvent::Skips { name }) if last.as_ref() == Some(name) => {
                    noted.skips.notify_one();
                }
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
        let over = Notify::new();
        let images = async {
            let sent = images.await;
            over.notify_one();
            sent
        };
        let memory = async {
            let gate = Arc::new(Gate::new(true));
            let connection = Ahead::begin(&self.options.send);
            let mut sending = match self.begin_memory(machine, connection, gate).await {
                Ok(sending) => sending,
                // An earlier drover, or a link that is cut: it is tried again when it is due.
                Err(e) => {
                    tracing::info!("memory does not go beside images: {e}");
                    return Ok(None);
                }
            };
            let failed = tokio::select! {
                () = over.notified() => return Ok(Some(sending)),
                failed = sending.admit(machine) => failed,
            };
            if matches!(failed, MigrateError::TooEarly) {
                return Err(failed);
            }
            give_up(machine, sending, &failed).await?;
            Ok(None)
        };
        tokio::try_join!(images, memory)
    }
}

/// Ends memory that was begun early: it is begun again when it is due, and what was wrong with it is told then.
pub(super) async fn give_up(
    machine: &Machine,
    sending: Sending,
    why: &MigrateError,
) -> Result<(), MigrateError> {
    tracing::info!("memory that went beside images is begun anew: {why}");
    drop(sending);
    resume(machine).await
}
