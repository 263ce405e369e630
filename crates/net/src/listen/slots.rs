//! Slots of connections whose peer is not known yet.
//!
//! There is a slot for every new connection: when all are taken, the oldest connection of the network that has most
//! loses its own. So an address may use all slots as long as nobody else needs one (many peers may be behind one
//! address), and a flood displaces itself: whoever else connects keeps its slot until it is admitted. A network is an
//! address; for IPv6 first a /48, which is what one customer of a provider may have, within it a /56, then a /64.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::NetError;

/// What an address counts as: itself, or for IPv6 its /64, all of which a host can use.
#[must_use]
pub fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let s = v6.segments();
            Ipv6Addr::new(s[0], s[1], s[2], s[3], 0, 0, 0, 0).into()
        }
        v4 => v4,
    }
}

/// The networks of an address that may take part in a flood together, the largest first.
fn networks_of(address: IpAddr) -> [IpAddr; LEVELS] {
    match network_of(address) {
        IpAddr::V6(v6) => {
            [80, 72, 64].map(|host| Ipv6Addr::from_bits(v6.to_bits() >> host << host).into())
        }
        v4 => [v4; LEVELS],
    }
}

/// Sizes of networks.
const LEVELS: usize = 3;

/// The slots of a listener.
#[derive(Debug, Clone)]
pub(super) struct Slots(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limit: usize,
    next: u64,
    /// By number, so the oldest first.
    taken: BTreeMap<u64, Taken>,
    /// How many are taken from each network. One without connections takes no memory.
    counts: [HashMap<IpAddr, usize>; LEVELS],
}

/// A slot that is taken.
#[derive(Debug)]
struct Taken {
    networks: [IpAddr; LEVELS],
    displaced: watch::Sender<bool>,
}

/// The slot of a connection that is being set up, until it is dropped or released.
#[derive(Debug)]
pub struct Slot {
    of: Slots,
    number: u64,
    displaced: watch::Receiver<bool>,
    deadline: Instant,
    within: Duration,
    peer: String,
}

impl Slots {
    /// This many slots, at least one.
    pub(super) fn new(limit: usize) -> Self {
        Slots(Arc::new(Mutex::new(State {
            limit: limit.max(1),
            next: 0,
            taken: BTreeMap::new(),
            counts: Default::default(),
        })))
    }

    /// A slot for a new connection from `address`, which must be set up `within` that time.
    pub(super) fn enter(&self, address: IpAddr, peer: String, within: Duration) -> Slot {
        let networks = networks_of(address);
        let (sender, displaced) = watch::channel(false);
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        for (counts, network) in state.counts.iter_mut().zip(networks) {
            *counts.entry(network).or_default() += 1;
        }
        let taken = Taken {
            networks,
            displaced: sender,
        };
        state.taken.insert(number, taken);
        if state.taken.len() > state.limit {
            state.displace(number);
        }
        drop(state);
        Slot {
            of: self.clone(),
            number,
            displaced,
            deadline: Instant::now() + within,
            within,
            peer,
        }
    }
}

impl State {
    /// Takes the slot from the oldest connection of the network that has most; of several, from the oldest of all. Never
    /// from `newest`.
    fn displace(&mut self, newest: u64) {
        let rank = |(number, taken): (&u64, &Taken)| {
            let counts: [usize; LEVELS] =
                std::array::from_fn(|level| self.counts[level][&taken.networks[level]]);
            (*number != newest).then_some((counts, std::cmp::Reverse(*number)))
        };
        let most = self.taken.iter().filter_map(rank).max();
        if let Some((_, std::cmp::Reverse(oldest))) = most
            && let Some(taken) = self.remove(oldest)
        {
            taken.displaced.send_replace(true);
        }
    }

    fn remove(&mut self, number: u64) -> Option<Taken> {
        let removed = self.taken.remove(&number)?;
        for (counts, network) in self.counts.iter_mut().zip(removed.networks) {
            if let Entry::Occupied(mut count) = counts.entry(network) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        Some(removed)
    }
}

impl Slot {
    /// The peer is known: its connection needs no slot any more, and cannot be displaced. The deadline stands.
    pub fn release(&self) {
        self.of.0.lock().remove(self.number);
    }

    /// When the connection must have been set up.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Sets another deadline, from now on.
    pub(super) fn set_deadline(&mut self, within: Duration) {
        self.deadline = Instant::now() + within;
        self.within = within;
    }

    /// Runs a part of setting the connection up; `what` names it, as in "the handshake".
    ///
    /// # Errors
    /// [`NetError::TimedOut`] at the deadline, [`NetError::Displaced`] when another connection needed the slot.
    pub async fn hold<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = T>,
    ) -> Result<T, NetError> {
        let mut displaced = self.displaced.clone();
        let lost = async {
            // A slot that was released has no sender.
            if displaced.wait_for(|displaced| *displaced).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            () = lost => Err(NetError::Displaced { peer: self.peer.clone() }),
            done = work => Ok(done),
            () = sleep_until(self.deadline) => Err(NetError::TimedOut {
                peer: self.peer.clone(),
                what,
                after: self.within,
            }),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn enter(slots: &Slots, address: &str) -> Slot {
        slots.enter(address.parse().unwrap(), address.into(), LONG)
    }

    fn is_displaced(slot: &Slot) -> bool {
        *slot.displaced.borrow()
    }

    #[test]
    fn a_flood_displaces_itself_and_leaves_everybody_else() {
        let slots = Slots::new(8);
        let peer = enter(&slots, "10.0.0.9");
        let mut flood = Vec::new();
        for n in 0..1000 {
            flood.push(enter(&slots, ["10.0.0.1", "10.0.0.2"][n % 2]));
        }
        assert!(!is_displaced(&peer));
        assert_eq!(flood.iter().filter(|s| !is_displaced(s)).count(), 7);
        assert!(!is_displaced(&flood[999]), "the newest of them");
        // So does whoever comes now.
        let late = enter(&slots, "10.0.0.8");
        for _ in 0..1000 {
            flood.push(enter(&slots, "10.0.0.1"));
        }
        assert!(!is_displaced(&peer) && !is_displaced(&late));
        drop((flood, peer, late));
        let state = slots.0.lock();
        assert!(state.counts.iter().all(HashMap::is_empty) && state.taken.is_empty());
    }

    #[test]
    fn one_address_may_have_all_slots_while_nobody_else_needs_one() {
        let slots = Slots::new(8);
        let nat: Vec<_> = (0..8).map(|_| enter(&slots, "10.0.0.1")).collect();
        assert!(nat.iter().all(|s| !is_displaced(s)));
        let _other = enter(&slots, "10.0.0.2");
        assert!(is_displaced(&nat[0]));
        assert!(nat[1..].iter().all(|s| !is_displaced(s)));
    }

    #[test]
    fn a_slot_that_was_released_is_not_displaced() {
        let slots = Slots::new(2);
        let known = enter(&slots, "10.0.0.1");
        known.release();
        let flood: Vec<_> = (0..10).map(|_| enter(&slots, "10.0.0.1")).collect();
        assert!(!is_displaced(&known));
        drop((known, flood));
        assert!(slots.0.lock().taken.is_empty());
    }

    #[test]
    fn a_host_has_one_network_by_whatever_name() {
        let network = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        assert_eq!(network("2001:db8:1:2::5"), network("2001:db8:1:2:3::4"));
        assert_ne!(network("2001:db8:1:2::5"), network("2001:db8:1:3::5"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_one_deadline_for_everything() {
        let slots = Slots::new(1);
        let within = Duration::from_secs(10);
        let slot = slots.enter([10, 0, 0, 1].into(), "one".into(), within);
        let step = Duration::from_secs(4);
        for _ in 0..2 {
            slot.hold("a step", tokio::time::sleep(step)).await.unwrap();
        }
        let e = slot.hold("the last step", tokio::time::sleep(step)).await;
        assert!(matches!(e, Err(NetError::TimedOut { .. })), "{e:?}");
        let slot = slots.enter([10, 0, 0, 1].into(), "one".into(), within);
        let _other = slots.enter([10, 0, 0, 2].into(), "two".into(), within);
        let e = slot.hold("a step", std::future::pending::<()>()).await;
        assert!(matches!(e, Err(NetError::Displaced { .. })), "{e:?}");
    }

    #[test]
    fn a_flood_of_single_connections_from_one_prefix_displaces_itself() {
        for flood in [
            // Each from a /64 of its own, in one /48, and in one /56.
            |n: u16| format!("2001:db8:1:{n:x}::1"),
            |n: u16| format!("2001:db8:1:{:x}::1", 0xab00 | n & 0xff),
        ] {
            let slots = Slots::new(16);
            let peers = [
                "10.0.0.9",
                "10.0.0.8",
                "2001:db8:2::1",
                "2001:db8:1:ffff::1",
            ];
            let peers = peers.map(|address| enter(&slots, address));
            let flood: Vec<_> = (0..1000).map(|n| enter(&slots, &flood(n))).collect();
            let kept = |peer: &&Slot| !is_displaced(peer);
            assert_eq!(peers[..3].iter().filter(kept).count(), 3);
            assert!(!is_displaced(&flood[999]));
            assert_eq!(peers.iter().chain(&flood).filter(kept).count(), 16);
        }
    }

    #[test]
    fn within_a_prefix_the_network_with_most_loses() {
        let slots = Slots::new(8);
        let single = enter(&slots, "2001:db8:1:100::1");
        let flood: Vec<_> = (0..100)
            .map(|n| enter(&slots, &format!("2001:db8:1:2{:02x}::1", n % 4)))
            .collect();
        assert!(!is_displaced(&single), "a /56 of its own");
        assert_eq!(flood.iter().filter(|s| !is_displaced(s)).count(), 7);
    }

    /// Hosts of a /64, a /56, a /48, and of one address each.
    fn some_address(kind: u8, n: u8) -> IpAddr {
        match kind % 4 {
            0 => [10, 0, 0, n % 5].into(),
            1 => Ipv6Addr::new(0x2001, 0xdb8, u16::from(n % 3), 0, 0, 0, 0, 1).into(),
            2 => Ipv6Addr::new(0x2001, 0xdb8, 7, u16::from(n), 0, 0, 0, 1).into(),
            _ => Ipv6Addr::new(0x2001, 0xdb8, 7, u16::from(n) << 8, 0, 0, 0, 1).into(),
        }
    }

    proptest! {
        /// Whatever comes and goes: no more slots than the limit are taken, and who loses one is of the network that has
        /// most, whichever size of networks is looked at within the one before.
        #[test]
        fn whoever_has_little_keeps_it(
            steps in prop::collection::vec((any::<(u8, u8)>(), any::<bool>(), any::<u8>()), 0..300),
        ) {
            let slots = Slots::new(10);
            let mut held: Vec<([IpAddr; LEVELS], Slot)> = Vec::new();
            for ((kind, n), comes, which) in steps {
                if !comes && !held.is_empty() {
                    held.swap_remove(usize::from(which) % held.len());
                    continue;
                }
                let address = some_address(kind, n);
                let slot = slots.enter(address, String::new(), LONG);
                prop_assert!(!is_displaced(&slot));
                let newest = slot.number;
                held.push((networks_of(address), slot));
                if let Some(at) = held.iter().position(|(_, slot)| is_displaced(slot)) {
                    prop_assert_eq!(held.len(), 11);
                    let lost = held[at].0;
                    let mut among: Vec<_> = held.iter().collect();
                    for level in 0..LEVELS {
                        let has = |network| among.iter().filter(|(of, _)| of[level] == network).count();
                        // The newest never loses its own.
                        let others = among.iter().filter(|(_, slot)| slot.number != newest);
                        let most = others.map(|(of, _)| has(of[level])).max();
                        prop_assert_eq!(Some(has(lost[level])), most);
                        among.retain(|(of, _)| of[level] == lost[level]);
                    }
                    held.remove(at);
                }
                prop_assert!(held.len() <= 10 && slots.0.lock().taken.len() == held.len());
            }
            drop(held);
            prop_assert!(slots.0.lock().counts.iter().all(HashMap::is_empty));
        }
    }
}
