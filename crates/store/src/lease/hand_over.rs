//! A write lease passes from its holder to a mount that stands by, in one durable step.

use drover_net::{Code, PeerKey, Refusal};

use super::record::{HandOverToken, Loss, MountId};
use super::{LeaseTable, Who, describe};

/// Upper bound on mounts that stand by for an image.
const MAX_STANDBYS: usize = 16;

/// Upper bound on those of one peer.
const MAX_PEER_STANDBYS: usize = 4;

impl LeaseTable {
    /// Admits a mount that stands by. Nothing is recorded: it is known as long as it is connected.
    pub(super) fn stand_by(&mut self, who: &Who) -> Result<(), Refusal> {
        let key = (who.peer.key, who.mount);
        let of_peer = self.standbys.keys().filter(|(peer, _)| *peer == key.0);
        let is_full = self.standbys.len() >= MAX_STANDBYS || of_peer.count() >= MAX_PEER_STANDBYS;
        if !self.standbys.contains_key(&key) && is_full {
            let text = format!("too many mounts stand by for {}", self.image);
            return Err(Refusal::new(Code::Busy, text));
        }
        self.standbys.insert(key, who.clone());
        Ok(())
    }

    /// Whether a mount may take part in a hand-over: it stands by, or holds the lease.
    #[must_use]
    pub fn takes_part(&self, peer: PeerKey, mount: MountId) -> bool {
        self.standbys.contains_key(&(peer, mount)) || self.is_held_by(peer, mount)
    }

    /// The mount that stands by at the site with key `to`, or at any; with `mount`, that one.
    ///
    /// # Errors
    /// [`Code::OutOfOrder`]: there is none, or more than one.
    pub fn standby(&self, to: Option<PeerKey>, mount: Option<MountId>) -> Result<&Who, Refusal> {
        let refuse = |text: String| Err(Refusal::new(Code::OutOfOrder, text));
        let mut found = self.standbys.values().filter(|who| {
            to.is_none_or(|to| who.peer.key == to) && mount.is_none_or(|mount| who.mount == mount)
        });
        match (found.next(), found.next()) {
            (Some(who), None) => Ok(who),
            (None, _) if mount.is_some() => refuse(format!(
                "the mount of {} that is to get its write lease does not stand by: see `drover mounts` at its site",
                self.image
            )),
            (None, _) => refuse(format!(
                "no mount stands by for {0}: begin one with `drover mount PEER:{0} PATH --standby` where it should go",
                self.image
            )),
            (Some(one), Some(other)) => refuse(format!(
                "more than one mount stands by for {}: {} and {}; name the site, or end one of them",
                self.image,
                one.description(),
                other.description()
            )),
        }
    }

    /// The site that handed the lease over by which the holder has it; none if there is no holder, or it took the lease itself.
    #[must_use]
    pub fn handed_by(&self) -> Option<PeerKey> {
        let holder = self.record.holder.as_ref()?;
        let last = self.record.broken.last()?;
        // Whoever takes it later has another time, or another description.
        match &last.how {
            Loss::HandedOver { at_unix, to, .. }
                if *at_unix == holder.since_unix
                    && *to == describe(&holder.peer_name, &holder.note) =>
            {
                Some(PeerKey(last.peer))
            }
            _ => None,
        }
    }

    /// Whether a mount had the lease, and lost it.
    #[must_use]
    pub fn has_lost(&self, peer: PeerKey, mount: MountId) -> bool {
        let mut broken = self.record.broken.iter();
        broken.any(|broken| (broken.peer, broken.mount) == (peer.0, mount))
            && !self.is_held_by(peer, mount)
    }

    /// Whether this hand-over has taken place.
    #[must_use]
    pub fn was_handed_over(&self, peer: PeerKey, mount: MountId, token: HandOverToken) -> bool {
        self.record.broken.iter().any(|broken| {
            (broken.peer, broken.mount) == (peer.0, mount)
                && matches!(broken.how, Loss::HandedOver { token: of, .. } if of == token)
        })
    }

    /// The holder's lease passes to `to`, which stands by: durable when it returns. Does nothing when this hand-over, named by
    /// its token, has taken place already. `link` is the latest link of the process that asked for it: one that has come since may
    /// have written what the other knew nothing of.
    ///
    /// # Errors
    /// [`Code::Lost`]: the mount does not hold the lease; [`Code::Unavailable`]: it has come by a later link;
    /// [`Code::OutOfOrder`]: `to` does not stand by; or the lease cannot be written. It stays.
    pub fn hand_over(
        &mut self,
        peer: PeerKey,
        mount: MountId,
        link: u64,
        token: HandOverToken,
        to: &Who,
    ) -> Result<(), Refusal> {
        if self.was_handed_over(peer, mount, token) {
            return Ok(());
        }
        let mut record = self.record.clone();
        let Some(holder) = record
            .holder
            .take()
            .filter(|h| (h.peer, h.mount) == (peer.0, mount))
        else {
            let text = format!("this mount does not hold the write lease of {}", self.image);
            return Err(Refusal::new(Code::Lost, text));
        };
        if link < self.holder_link {
            let text = format!("the mount of {} has connected again meanwhile", self.image);
            return Err(Refusal::new(Code::Unavailable, text));
        }
        let key = (to.peer.key, to.mount);
        if !self.standbys.contains_key(&key) {
            let text = format!("{} does not stand by for {}", to.description(), self.image);
            return Err(Refusal::new(Code::OutOfOrder, text));
        }
        let next = to.holder();
        let how = Loss::HandedOver {
            token,
            at_unix: next.since_unix,
            to: to.description(),
        };
        record.lose(&holder, how);
        record.edition += 1;
        record.last_writer = Some((to.peer.key.0, to.mount));
        record.holder = Some(next);
        record.last = record.holder.clone();
        self.keep(record)?;
        self.holder_link = 0;
        self.standbys.remove(&key);
        Ok(())
    }

    /// A mount that stood by does so no more, unless it has come again by a later link. Its write lease, if it was handed over
    /// meanwhile, stays.
    pub fn end_standby(&mut self, peer: PeerKey, mount: MountId, link: u64) {
        let key = (peer, mount);
        if self.standbys.get(&key).is_some_and(|who| who.link <= link) {
            self.standbys.remove(&key);
        }
    }
}
