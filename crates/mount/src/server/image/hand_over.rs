//! The write lease of an image passes from its holder to a mount that stands by.

use std::time::Instant;

use drover_net::{Code, PeerKey, Refusal};
use drover_store::lease::{HandOverToken, Identity, MountId, Who};

use super::Image;
use crate::protocol::{LeaseSeen, refusal_of};

impl Image {
    /// A mount that stood by does so no more.
    pub fn end_standby(&self, peer: PeerKey, mount: MountId, link: u64) {
        self.leases.lock().end_standby(peer, mount, link);
    }

    /// How things stand for a mount that stands by, or holds the lease; see [`crate::protocol::LookAtLease`].
    ///
    /// # Errors
    /// [`Code::OutOfOrder`]: it does neither; [`Code::Busy`]: its site asks for points too often; or a disk error.
    pub fn look(&self, peer: PeerKey, mount: MountId, point: bool) -> Result<LeaseSeen, Refusal> {
        let leases = self.leases_soon()?;
        if !leases.takes_part(peer, mount) {
            let text = format!("this mount does not stand by for {}", self.name);
            return Err(Refusal::new(Code::OutOfOrder, text));
        }
        let held = leases.is_held_by(peer, mount);
        let from = leases.handed_by();
        // Before the point: what is as old as this state is as old as the point.
        let identity = Identity {
            digest: self.base.digest,
            edition: leases.last_edition(),
            epoch: self.committed(),
        };
        let has_writer = leases.holder().is_some();
        let is_recorded = point && has_writer && self.through.is_none();
        if is_recorded && self.generations().is_none() {
            self.open_for_writing(identity, identity)?;
        }
        // Writers need them while the point waits for their writes.
        drop(leases);
        let summary = match self.generations().filter(|_| is_recorded) {
            Some(generations) => {
                if !held {
                    self.points.take(peer, Instant::now())?;
                }
                let summary = generations.point().map_err(|e| refusal_of(e.into()))?;
                // What was written before the point is read after it, and is not dropped: it must not change back when the site
                // loses power.
                self.device().flush().map_err(refusal_of)?;
                summary
            }
            None => None,
        };
        Ok(LeaseSeen {
            held,
            has_writer,
            identity,
            generations: summary.map(|summary| summary.encode()),
            from,
        })
    }

    /// Whether a mount had the lease, and lost it.
    pub fn has_lost(&self, peer: PeerKey, mount: MountId) -> bool {
        self.leases.lock().has_lost(peer, mount)
    }

    /// The mount that gets the lease of this holder; none if it has got it by this hand-over.
    ///
    /// # Errors
    /// [`Code::Lost`], [`Code::OutOfOrder`].
    pub fn heir(
        &self,
        peer: PeerKey,
        mount: MountId,
        token: HandOverToken,
        to: (Option<PeerKey>, Option<MountId>),
    ) -> Result<Option<Who>, Refusal> {
        let leases = self.leases_soon()?;
        if leases.was_handed_over(peer, mount, token) {
            return Ok(None);
        }
        self.lease_of(&leases, peer, mount)?;
        Ok(Some(leases.standby(to.0, to.1)?.clone()))
    }

    /// Hands the lease over, durably.
    ///
    /// # Errors
    /// As [`LeaseTable::hand_over`], the site's refusal of the mount that would get it, or the disk's.
    pub fn hand_over(
        &self,
        peer: PeerKey,
        mount: MountId,
        link: u64,
        token: HandOverToken,
        to: &Who,
    ) -> Result<(), Refusal> {
        self.settle();
        self.device().flush().map_err(refusal_of)?;
        let mut leases = self.leases_soon()?;
        self.images.allow_now(&self.name, &to.peer)?;
        leases.hand_over(peer, mount, link, token, to)?;
        // So that the map is believed after a crash of the site; if not, the next writer's cache is empty.
        if let Some(generations) = self.generations() {
            let now = Identity {
                digest: self.base.digest,
                edition: leases.last_edition(),
                epoch: self.committed(),
            };
            if let Err(error) = generations.begin(now.into()) {
                tracing::warn!(%error, image = %self.name, "the generations of an image whose lease was handed over");
            }
        }
        Ok(())
    }
}
