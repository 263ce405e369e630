//! Disks that are mounts of third sites' images: their write leases are handed over when the other site has taken the machine.
//!
//! Not before: as long as it may refuse, this site needs them. Not at the same time: the decision who may run the machine stays the
//! one record, and whatever dies after it, the same command hands over what is left, since the move stays committed until then. The
//! machine runs there meanwhile, and waits for these disks (`docs/decisions/0045-a-mounted-disk-is-handed-over.md`).

use std::sync::Arc;

use drover_net::Code;
use tokio::task::JoinSet;

use super::copy::FEW_DIRTY;
use super::report::{Heir, Mounted, Mounts, MoveEvent, OnMove};
use super::{Driver, pauses};
use crate::error::MigrateError;
use crate::hold::hold;
use crate::protocol::heir;

/// How often what was written to a mount is pushed before the switch.
const MAX_PUSHES: u32 = 10;

/// The hand-overs of a move, which need nothing of it any more.
pub(super) struct Leases {
    known: Option<Arc<dyn Mounts>>,
    mounts: Vec<(Mounted, Heir)>,
    on_event: OnMove,
}

impl Leases {
    /// Hands all of them over at once, however long that takes; those that this site had lost, with the reasons.
    pub(super) async fn hand_over(self) -> Result<Vec<String>, MigrateError> {
        if self.mounts.is_empty() {
            return Ok(Vec::new());
        }
        hold("leases").await;
        let no_mounts = || MigrateError::Unsupported("this program has no mounts".into());
        let known = self.known.ok_or_else(no_mounts)?;
        let mut all = JoinSet::new();
        for (mounted, heir) in self.mounts {
            let (known, on_event) = (Arc::clone(&known), Arc::clone(&self.on_event));
            all.spawn(async move { hand_over(&*known, &mounted, heir, &on_event).await });
        }
        let lost = all.join_all().await;
        Ok(lost.into_iter().flatten().collect())
    }
}

/// Hands one over; why it was lost, if it was.
async fn hand_over(
    known: &dyn Mounts,
    mounted: &Mounted,
    heir: Heir,
    on_event: &OnMove,
) -> Option<String> {
    let mut backoff = pauses();
    while let Err(refusal) = known.hand_over(mounted, heir).await {
        if matches!(refusal.code, Code::Lost | Code::NotFound | Code::Untrusted) {
            // Revoked, returned, or gone with the image or the pairing: nothing of this site can be pushed any more.
            return Some(format!("{mounted}: {}", refusal.message));
        }
        on_event(MoveEvent::Reconnecting {
            error: format!("{mounted}: {}", refusal.message),
        });
        tokio::time::sleep(backoff.next_delay()).await;
    }
    None
}

impl Driver<'_> {
    fn heir(&self, disk: usize) -> Heir {
        let (mount, token) = heir(self.seeder.token(), disk);
        Heir {
            site: self.options.send.peer,
            mount,
            token,
        }
    }

    /// Checks that the leases can be handed over, and pushes what was written to the mounts until little is written meanwhile, or
    /// it does not become less.
    pub(super) async fn prepare_leases(&self) -> Result<(), MigrateError> {
        let Some(known) = &self.options.mounts else {
            return Ok(());
        };
        for (disk, mounted) in self.disks.mounts.iter().enumerate() {
            let mut before = u64::MAX;
            for _ in 0..MAX_PUSHES {
                let left = known.prepare(mounted, self.heir(disk)).await?;
                if left < FEW_DIRTY || left > before / 5 * 4 {
                    break;
                }
                before = left;
            }
        }
        Ok(())
    }

    /// The leases that are to be handed over.
    pub(super) fn leases(&self, mounts: &[Mounted]) -> Leases {
        let with_heirs = mounts.iter().enumerate();
        let with_heirs = with_heirs.map(|(disk, mounted)| (mounted.clone(), self.heir(disk)));
        Leases {
            known: self.options.mounts.clone(),
            mounts: with_heirs.collect(),
            on_event: Arc::clone(&self.on_event),
        }
    }
}
