//! The calls of peers that are being served, and the rights they were made by.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use drover_core::ImageName;
use drover_mount::server::Server as DeviceServer;
use drover_net::{Peer, PeerKey, Right, Rights};
use drover_store::SiteCatalog;
use drover_teleport::Site;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::error::{Result, one_line};
use crate::mounts::break_at;
use crate::text::count;

/// The calls that are being served, by number.
#[derive(Default)]
pub struct Trust(Mutex<Calls>);

#[derive(Default)]
struct Calls {
    next: u64,
    /// The site stops: so do new calls.
    stopping: bool,
    open: BTreeMap<u64, Call>,
}

struct Call {
    peer: PeerKey,
    domain: String,
    right: Right,
    stop: watch::Sender<bool>,
}

/// A call that is being served, until it is dropped.
pub struct Trusted<'a> {
    trust: &'a Trust,
    number: u64,
}

impl Drop for Trusted<'_> {
    fn drop(&mut self) {
        self.trust.0.lock().open.remove(&self.number);
    }
}

impl Trust {
    /// Registers a call that a peer makes by a right. The receiver becomes true when it is to stop.
    pub fn enter(&self, peer: &Peer, right: Right) -> (Trusted<'_>, watch::Receiver<bool>) {
        let mut calls = self.0.lock();
        let (peer, domain) = (peer.key, peer.domain.clone());
        let number = calls.next;
        calls.next += 1;
        let (stop, stopped) = watch::channel(calls.stopping);
        calls.open.insert(
            number,
            Call {
                peer,
                domain,
                right,
                stop,
            },
        );
        let trusted = Trusted {
            trust: self,
            number,
        };
        (trusted, stopped)
    }

    /// Stops all calls, also those to come.
    pub fn stop(&self) {
        let mut calls = self.0.lock();
        calls.stopping = true;
        for call in calls.open.values() {
            call.stop.send_replace(true);
        }
    }

    /// The peers with calls.
    pub fn peers(&self) -> HashSet<PeerKey> {
        self.0.lock().open.values().map(|call| call.peer).collect()
    }

    /// Stops the calls of a peer for which it no longer has the right, or in another domain; returns how many.
    pub fn keep(&self, peer: PeerKey, rights: Rights, domain: &str) -> usize {
        let calls = self.0.lock();
        let keeps = |call: &Call| rights.has(call.right) && call.domain == domain;
        let lost = |call: &&Call| call.peer == peer && !keeps(call);
        let lost = calls.open.values().filter(lost);
        lost.inspect(|call| {
            call.stop.send_replace(true);
        })
        .count()
    }
}

/// Takes away what peers have in a domain that they may no longer have: write leases, and images that are shared with them.
pub async fn take_away(
    peers: &Arc<SiteCatalog>,
    own: PeerKey,
    domain: &str,
    site: &Arc<Site>,
    devices: &Arc<DeviceServer>,
) -> Result<()> {
    let (listed, site, of) = (Arc::clone(peers), Arc::clone(site), domain.to_owned());
    let end_shares = move || -> Result<usize> {
        let peers = listed.peers()?.into_iter();
        let here = peers.filter(|peer| peer.grant.domain == of);
        let here: HashSet<PeerKey> = here.map(|peer| peer.key).collect();
        Ok(site.share_only(&|key| here.contains(key))?)
    };
    match tokio::task::spawn_blocking(end_shares).await? {
        Ok(0) => {}
        Ok(images) => {
            let images = count(images, "image");
            tracing::info!(domain, "{images} no longer shared: the peer left");
        }
        // On a full disk, for example. What left cannot use it, and the next time it is tried again.
        Err(e) => tracing::warn!(domain, "{}", one_line(&e)),
    }
    break_leases(peers, own, domain, devices).await
}

/// Breaks the leases of peers that may no longer write in a domain.
async fn break_leases(
    peers: &Arc<SiteCatalog>,
    own: PeerKey,
    domain: &str,
    devices: &Arc<DeviceServer>,
) -> Result<()> {
    let listed = Arc::clone(devices);
    let leases = tokio::task::spawn_blocking(move || listed.leases()).await??;
    for leased in leases {
        let (Some(holder), Ok(name)) = (leased.holder, ImageName::new(leased.image)) else {
            continue;
        };
        let key = PeerKey(holder.peer);
        let (rights, its) = rights_now(peers, key).await?;
        if key == own || its == domain && rights.has(Right::Write) {
            continue;
        }
        break_at(devices, &name).await?;
        tracing::info!(image = %name, peer = key.short(), "broke the write lease of a peer that may no longer write");
    }
    Ok(())
}

/// The rights of a key, and its domain.
pub async fn rights_now(catalog: &Arc<SiteCatalog>, key: PeerKey) -> Result<(Rights, String)> {
    let catalog = Arc::clone(catalog);
    let peer = tokio::task::spawn_blocking(move || catalog.peer_by_key(&key)).await??;
    Ok(match peer {
        Some(peer) => (peer.grant.rights.of_peer(), peer.grant.domain),
        None => (Rights::STRANGER, String::new()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_lost_their_right_are_stopped() {
        let trust = Trust::default();
        let peer = |n, domain: &str| Peer {
            key: PeerKey([n; 32]),
            name: "a peer".into(),
            rights: Rights::DEFAULT,
            domain: domain.into(),
        };
        let (a, b) = (peer(1, "acme"), peer(2, "default"));
        let (_reads, reads) = trust.enter(&a, Right::Read);
        let (sends, sending) = trust.enter(&a, Right::Send);
        let (_other, other) = trust.enter(&b, Right::Send);
        assert_eq!(trust.peers(), [a.key, b.key].into());
        assert_eq!(trust.keep(a.key, Rights::of(&[Right::Read]), "acme"), 1);
        assert!(*sending.borrow() && !*reads.borrow() && !*other.borrow());
        drop(sends);
        assert_eq!(trust.keep(a.key, Rights::DEFAULT, "default"), 1);
        assert!(*reads.borrow() && !*other.borrow());
        trust.stop();
        assert!(*other.borrow());
        assert!(*trust.enter(&b, Right::Send).1.borrow(), "a call to come");
        assert_eq!(trust.0.lock().open.len(), 2, "who has left is forgotten");
    }
}
