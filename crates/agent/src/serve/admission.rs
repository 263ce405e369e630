//! Connection limits: in total, per peer, and per address before authentication.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use drover_net::PeerKey;

/// Upper bound on connections, in total.
pub const MAX_CONNECTIONS: usize = 1024;

/// Upper bound on connections per peer: several sessions, each with its data connections.
pub const MAX_PER_PEER: usize = 256;

/// Upper bound on connections per address that have not authenticated with a trusted key.
pub const MAX_STRANGERS_PER_ADDRESS: usize = 16;

/// Upper bound on connections that have not authenticated with a trusted key.
pub const MAX_STRANGERS: usize = 128;

/// Counts connections.
#[derive(Debug, Clone, Default)]
pub struct Admission {
    all: Counter<()>,
    strangers: Counter<()>,
    by_address: Counter<IpAddr>,
    by_peer: Counter<PeerKey>,
}

/// A connection's share of the total limit, until it is dropped.
#[derive(Debug)]
pub struct Place {
    _all: Held<()>,
}

/// A connection's share of the limits for unauthenticated connections.
#[derive(Debug)]
pub struct StrangerPlace {
    _strangers: Held<()>,
    _address: Held<IpAddr>,
}

/// A connection's share of its peer's limit.
#[derive(Debug)]
pub struct PeerPlace(#[expect(dead_code, reason = "held until it is dropped")] Held<PeerKey>);

impl Admission {
    /// Admits a new connection, unauthenticated as yet; `None` when a limit is reached.
    pub fn enter(&self, address: IpAddr) -> Option<(Place, StrangerPlace)> {
        // An IPv6 host can use a whole /64, so count by that.
        let address = match address.to_canonical() {
            IpAddr::V6(v6) => {
                let s = v6.segments();
                std::net::Ipv6Addr::new(s[0], s[1], s[2], s[3], 0, 0, 0, 0).into()
            }
            v4 => v4,
        };
        let all = self.all.take((), MAX_CONNECTIONS)?;
        let strangers = self.strangers.take((), MAX_STRANGERS)?;
        let by_address = self.by_address.take(address, MAX_STRANGERS_PER_ADDRESS)?;
        Some((
            Place { _all: all },
            StrangerPlace {
                _strangers: strangers,
                _address: by_address,
            },
        ))
    }

    /// Admits a connection of this peer; `None` when the peer's limit is reached.
    pub fn trust(&self, peer: PeerKey) -> Option<PeerPlace> {
        self.by_peer.take(peer, MAX_PER_PEER).map(PeerPlace)
    }
}

/// Counts by key; a key that counts zero takes no memory.
#[derive(Debug)]
struct Counter<K>(Arc<Mutex<HashMap<K, usize>>>);

impl<K> Clone for Counter<K> {
    fn clone(&self) -> Self {
        Counter(Arc::clone(&self.0))
    }
}

impl<K> Default for Counter<K> {
    fn default() -> Self {
        Counter(Arc::default())
    }
}

impl<K: Eq + Hash + Copy> Counter<K> {
    fn take(&self, key: K, limit: usize) -> Option<Held<K>> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(key).or_insert(0);
        if *count >= limit {
            return None;
        }
        *count += 1;
        drop(counts);
        Some(Held {
            counter: self.clone(),
            key,
        })
    }
}

#[derive(Debug)]
struct Held<K: Eq + Hash + Copy> {
    counter: Counter<K>,
    key: K,
}

impl<K: Eq + Hash + Copy> Drop for Held<K> {
    fn drop(&mut self) {
        let mut counts = self
            .counter
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut entry) = counts.entry(self.key) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_cannot_take_every_place() {
        let admission = Admission::default();
        let here: IpAddr = "10.0.0.1".parse().unwrap();
        let taken: Vec<_> = (0..MAX_STRANGERS_PER_ADDRESS)
            .map(|_| admission.enter(here).unwrap())
            .collect();
        assert!(admission.enter(here).is_none());
        assert!(admission.enter("10.0.0.2".parse().unwrap()).is_some());
        assert!(
            admission
                .enter("::ffff:10.0.0.1".parse().unwrap())
                .is_none(),
            "the same host by another name"
        );
        drop(taken);
        assert!(admission.enter(here).is_some());
        assert!(
            admission.by_address.0.lock().unwrap().is_empty(),
            "nothing is kept of who left"
        );
    }

    #[test]
    fn strangers_leave_room_for_peers() {
        let admission = Admission::default();
        let strangers: Vec<_> = (0..=255u8)
            .filter_map(|i| admission.enter(IpAddr::from([10, 0, 1, i])))
            .collect();
        assert_eq!(strangers.len(), MAX_STRANGERS);
        // Once trusted, a connection still counts in total but not as unauthenticated.
        let places: Vec<_> = strangers.into_iter().map(|(place, _)| place).collect();
        assert!(admission.enter(IpAddr::from([10, 0, 2, 1])).is_some());
        drop(places);
    }

    #[test]
    fn a_peer_has_its_limit() {
        let admission = Admission::default();
        let peer = PeerKey([1; 32]);
        let places: Vec<_> = (0..MAX_PER_PEER)
            .map(|_| admission.trust(peer).unwrap())
            .collect();
        assert!(admission.trust(peer).is_none());
        assert!(admission.trust(PeerKey([2; 32])).is_some());
        drop(places);
        assert!(admission.trust(peer).is_some());
    }
}
