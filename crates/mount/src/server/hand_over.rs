//! The write lease of an image passes from one mount to another that stands by (`docs/decisions/0041-*`).

use std::sync::Arc;
use std::time::Instant;

use drover_core::ImageName;
use drover_net::{Code, Peer, PeerKey, Refusal};
use drover_store::lease::{Access, Holder, Loss, MountId, Who};

use super::blocking::blocking;
use super::image::{Happened, Image, WhyBroken};
use super::{Mount, Server};
use crate::protocol::{HandOverLease, LeaseSeen, LookAtLease};

impl Server {
    /// Tells a mount of `peer` that stands by, or holds the lease, how things stand.
    ///
    /// # Errors
    /// [`Code::OutOfOrder`]: it does neither; the site's refusal; or a disk error.
    pub async fn look_at_lease(
        self: &Arc<Self>,
        peer: &Peer,
        ask: LookAtLease,
    ) -> Result<LeaseSeen, Refusal> {
        self.may_write(&ask.image, peer).await?;
        let image = self.image(&ask.image).await?;
        let key = peer.key;
        let seen = blocking(move || image.look(key, ask.mount, ask.point)).await;
        self.tidy(None).await;
        seen
    }

    /// Hands the lease of a mount of `peer` over, or checks that this is possible; returns who gets it. When it returns, no
    /// request of the former holder is executed any more.
    ///
    /// # Errors
    /// [`Code::Lost`]: it does not hold the lease; [`Code::OutOfOrder`]: nobody stands by, or more than one; the site's
    /// refusal of either; or a disk error, and the lease stays.
    pub async fn hand_over(
        self: &Arc<Self>,
        peer: &Peer,
        ask: HandOverLease,
    ) -> Result<String, Refusal> {
        let (server, peer) = (Arc::clone(self), peer.clone());
        // Whatever becomes of the caller's connection: one that has got the lease is told.
        let done = tokio::spawn(async move { server.hand_over_now(peer, ask).await });
        let ended = |_| Refusal::new(Code::Failed, "the site is stopping");
        done.await.map_err(ended)?
    }

    async fn hand_over_now(
        self: Arc<Self>,
        peer: Peer,
        ask: HandOverLease,
    ) -> Result<String, Refusal> {
        if let Err(refusal) = self.may_write(&ask.image, &peer).await {
            // With its right its lease has gone: it is told that, and nothing that it does not know.
            return Err(self.lost_with_right(&ask, &peer).await.unwrap_or(refusal));
        }
        let image = self.image(&ask.image).await?;
        let (key, token) = ((peer.key, ask.mount), ask.token);
        let (to_site, to_mount) = (ask.to, ask.to_mount);
        let heir = {
            let image = Arc::clone(&image);
            blocking(move || image.heir(key.0, key.1, token, (to_site, to_mount))).await?
        };
        let Some(heir) = heir else {
            self.end_connections(key).await;
            return Ok(String::new());
        };
        let to = (heir.peer.key, heir.mount);
        if !self.state.lock().mounts.contains_key(&to) {
            let text = format!("{} has lost its connection; try again", heir.description());
            return Err(Refusal::new(Code::Unavailable, text));
        }
        self.may_write_now(&ask.image, &heir.peer).await?;
        let name = heir.description();
        if ask.commit {
            self.commit_hand_over(image, peer, &ask, heir).await?;
        }
        Ok(name)
    }

    /// The refusal for a mount that had the lease and has lost it.
    async fn lost_with_right(
        self: &Arc<Self>,
        ask: &HandOverLease,
        peer: &Peer,
    ) -> Option<Refusal> {
        let image = self.image(&ask.image).await.ok()?;
        let (key, mount) = (peer.key, ask.mount);
        let lost = blocking(move || Ok(image.has_lost(key, mount)));
        let text = format!(
            "your site may not write {} any more, and its lease has ended",
            ask.image
        );
        lost.await.ok()?.then(|| Refusal::new(Code::Lost, text))
    }

    async fn commit_hand_over(
        self: &Arc<Self>,
        image: Arc<Image>,
        peer: Peer,
        ask: &HandOverLease,
        heir: Who,
    ) -> Result<(), Refusal> {
        let (key, token, link) = ((peer.key, ask.mount), ask.token, ask.link);
        let heirs = heir.peer.clone();
        let to = (heir.peer.key, heir.mount);
        let (happened, taken) = (
            Happened::HandedOver {
                from: peer,
                to: heir.peer.clone(),
            },
            Arc::clone(&image),
        );
        // It counts as gone until it joins as the writer.
        self.config.absences.left(to, Instant::now());
        let handed = blocking(move || {
            image.hand_over(key.0, key.1, link, token, &heir)?;
            image.happened(&happened);
            Ok(())
        });
        let handed = handed.await;
        if !taken.is_held_by(to.0, to.1) {
            self.config.absences.forget(&to);
        }
        handed?;
        self.config.absences.forget(&key);
        self.end_connections(key).await;
        // Whoever took its right away before it got the lease had none to break.
        if self.may_write_now(&ask.image, &heirs).await.is_err() {
            let its = move |holder: &Holder| {
                ((PeerKey(holder.peer), holder.mount) == to).then_some(Loss::Revoked)
            };
            let why = WhyBroken::RightLost;
            self.end_lease(&ask.image, why, its).await?;
        }
        // Which tells it to look.
        self.end_connections(to).await;
        Ok(())
    }

    /// Ends all connections of a mount; their requests have ended when it returns.
    async fn end_connections(&self, key: (PeerKey, MountId)) {
        let connections = {
            let state = self.state.lock();
            let mount = state.mounts.get(&key);
            mount
                .map(|mount| mount.connections.clone())
                .unwrap_or_default()
        };
        for connection in connections {
            connection.close();
            connection.drained().await;
        }
    }

    /// The mounts that stand by, and for which images. Does no disk I/O.
    #[must_use]
    pub fn standbys(&self) -> Vec<(ImageName, PeerKey, MountId)> {
        let state = self.state.lock();
        let standing = |mount: &&Mount| mount.access == Access::Standby;
        let mounts = state.mounts.iter().filter(|(_, mount)| standing(mount));
        mounts
            .map(|((peer, id), mount)| (mount.image.name().clone(), *peer, *id))
            .collect()
    }

    /// A mount that stands by may do so no more: it is told, and its connections end.
    pub async fn refuse_standby(&self, peer: PeerKey, mount: MountId) {
        let (image, connections) = {
            let state = self.state.lock();
            let Some(mount) = state.mounts.get(&(peer, mount)) else {
                return;
            };
            (Arc::clone(&mount.image), mount.connections.clone())
        };
        // At once: nothing is handed over to it any more.
        let ended = blocking(move || {
            image.end_standby(peer, mount, u64::MAX);
            Ok(())
        });
        // Fails only when the runtime ends.
        let _ = ended.await;
        let standing = connections.into_iter();
        for connection in standing.filter(|connection| connection.access == Access::Standby) {
            let text = "your site may not write this image any more: it does not stand by for it";
            tokio::spawn(async move { connection.end(Refusal::new(Code::Denied, text)).await });
        }
    }

    /// Checks that a peer may write an image by the rights that it has now.
    async fn may_write_now(&self, name: &ImageName, peer: &Peer) -> Result<(), Refusal> {
        let images = Arc::clone(&self.config.images);
        let (name, peer) = (name.clone(), peer.clone());
        blocking(move || images.allow_now(&name, &peer)).await
    }

    /// Checks that a peer may write an image.
    async fn may_write(self: &Arc<Self>, name: &ImageName, peer: &Peer) -> Result<(), Refusal> {
        let images = Arc::clone(&self.config.images);
        let (name, peer) = (name.clone(), peer.clone());
        blocking(move || images.allow(&name, &peer, Access::ReadWrite)).await
    }
}
