//! Takes away what peers have in a domain and may no longer have.

use std::collections::HashSet;
use std::sync::Arc;

use drover_core::ImageName;
use drover_mount::server::WhyBroken;
use drover_net::{PeerKey, Right};
use drover_store::{Catalog, SiteCatalog};

use super::audited::write;
use super::domains::Domain;
use super::trust::rights_now;
use crate::audit::{Audit, Event, Record};
use crate::error::{Error, Result};
use crate::home::CleanUp;
use crate::mounts::{Broken, break_at};
use crate::text::count;

impl Domain {
    /// Takes away what those of `peers` have here that may no longer have it: images that are shared with them, and write
    /// leases. `own` is the site's key. What fails keeps nothing else.
    ///
    /// # Errors
    /// The first.
    pub async fn take_away(&self, peers: &Arc<SiteCatalog>, own: PeerKey) -> Result<()> {
        let ended = self.end_shares(peers).await;
        let refused = self.refuse_standbys(peers, own).await;
        let broken = self.break_leases(peers, own).await;
        ended.and(refused).and(broken)
    }

    /// Ends mounts that stand by for images that their peers may no longer change; `own` is the site's key.
    ///
    /// # Errors
    /// The first.
    async fn refuse_standbys(&self, peers: &Arc<SiteCatalog>, own: PeerKey) -> Result<()> {
        let mut done = Ok(());
        for (name, key, mount) in self.devices.standbys() {
            if key == own {
                continue;
            }
            match self.may_change(peers, key, &name).await {
                Ok(true) => {}
                Ok(false) => {
                    self.devices.refuse_standby(key, mount).await;
                    tracing::info!(image = %name, peer = key.short(), "ended a mount that stood by, of a peer that may no longer write");
                }
                Err(e) => done = done.and(Err(e)),
            }
        }
        done
    }

    /// Ends the sharing of images with peers that have left.
    async fn end_shares(&self, peers: &Arc<SiteCatalog>) -> Result<()> {
        let (listed, site) = (Arc::clone(peers), Arc::clone(&self.site));
        let domain = self.home.domain_name().to_owned();
        let ended = tokio::task::spawn_blocking(move || {
            let peers = listed.peers()?.into_iter();
            let here = peers.filter(|peer| peer.grant.domain == domain);
            let here: HashSet<PeerKey> = here.map(|peer| peer.key).collect();
            Ok::<_, Error>(site.share_only(&|key| here.contains(key))?)
        });
        let images = ended.await??;
        if images > 0 {
            let (images, domain) = (count(images, "image"), self.home.domain_name());
            let text = format!("{images} no longer shared: the peer left");
            tracing::info!(domain, "{text}");
            let record = Record::new(Event::Unshared).by_site();
            let record = record.in_domain(domain).detail(text);
            write(self.home.audit(), record, Audit::write).await;
        }
        Ok(())
    }

    /// Revokes the write lease of an image, also on a full disk.
    ///
    /// # Errors
    /// When its state cannot be changed.
    pub async fn break_lease(&self, name: &ImageName, why: WhyBroken) -> Result<Broken> {
        let mut room = CleanUp::of(&self.home);
        let broken = room
            .run_async(|| break_at(&self.home, &self.devices, name, why))
            .await;
        tokio::task::spawn_blocking(move || drop(room)).await?;
        broken
    }

    /// Revokes the write leases of those of `peers` that may no longer change the image; `own` is the site's key. One that
    /// cannot be revoked does not keep the others.
    ///
    /// # Errors
    /// The first.
    async fn break_leases(&self, peers: &Arc<SiteCatalog>, own: PeerKey) -> Result<()> {
        let devices = Arc::clone(&self.devices);
        let leases = tokio::task::spawn_blocking(move || devices.leases()).await??;
        let mut done = Ok(());
        for leased in leases {
            let (Some(holder), Ok(name)) = (leased.holder, ImageName::new(leased.image)) else {
                continue;
            };
            let key = PeerKey(holder.peer);
            let checked = async {
                if key == own || self.may_change(peers, key, &name).await? {
                    return Ok(());
                }
                self.break_lease(&name, WhyBroken::RightLost).await?;
                tracing::info!(image = %name, peer = key.short(), "broke the write lease of a peer that may no longer write");
                Ok(())
            };
            done = done.and(checked.await);
        }
        done
    }

    /// Whether a peer may change the image; one that is not in the catalog was removed.
    async fn may_change(
        &self,
        peers: &Arc<SiteCatalog>,
        key: PeerKey,
        name: &ImageName,
    ) -> Result<bool> {
        let (rights, its) = rights_now(peers, key).await?;
        let (catalog, name) = (Arc::clone(&self.catalog), name.clone());
        let image = tokio::task::spawn_blocking(move || catalog.by_name(&name)).await??;
        let is_its = image.is_none_or(|image| image.may_be_changed_by(&key, rights));
        Ok(its == self.home.domain_name() && rights.has(Right::Write) && is_its)
    }
}
