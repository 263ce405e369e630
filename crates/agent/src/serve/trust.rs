//! The calls of peers that are being served, and the rights they were made by.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use drover_net::{Peer, PeerKey, Right, Rights};
use drover_store::SiteCatalog;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::error::Result;

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
    /// Whether it may change what others own.
    admin: bool,
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
        let (key, domain) = (peer.key, peer.domain.clone());
        let admin = peer.rights.has(Right::Admin);
        let number = calls.next;
        calls.next += 1;
        let (stop, stopped) = watch::channel(calls.stopping);
        calls.open.insert(
            number,
            Call {
                peer: key,
                domain,
                right,
                admin,
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
        let keeps = |call: &Call| {
            let admin = !call.admin || rights.has(Right::Admin);
            admin && rights.has(call.right) && call.domain == domain
        };
        let lost = |call: &&Call| call.peer == peer && !keeps(call);
        let lost = calls.open.values().filter(lost);
        lost.inspect(|call| {
            call.stop.send_replace(true);
        })
        .count()
    }
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

    #[test]
    fn a_call_by_which_an_admin_changes_what_others_own_ends_with_that_right() {
        let trust = Trust::default();
        let (send, admin) = (Rights::of(&[Right::Send]), &[Right::Send, Right::Admin]);
        let peer = Peer {
            key: PeerKey([1; 32]),
            name: "a peer".into(),
            rights: Rights::of(admin),
            domain: "default".into(),
        };
        let (_call, call) = trust.enter(&peer, Right::Send);
        assert_eq!(trust.keep(peer.key, peer.rights, "default"), 0);
        assert_eq!(trust.keep(peer.key, send, "default"), 1);
        assert!(*call.borrow());
    }
}
