//! Slots of connections whose peer is not known yet.
//!
//! There is a slot for every new connection: when all are taken, the oldest connection of the network that has most
//! loses its own. So an address may use all slots as long as nobody else needs one (many peers may be behind one
//! address), and a flood displaces itself: whoever else connects keeps its slot until it is admitted.

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

/// The slots of a listener.
#[derive(Debug, Clone)]
pub(super) struct Slots(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limit: usize,
    taken: usize,
    next: u64,
    /// By network, oldest first. A network without connections takes no memory.
    by_network: HashMap<IpAddr, BTreeMap<u64, watch::Sender<bool>>>,
}

/// The slot of a connection that is being set up, until it is dropped or released.
#[derive(Debug)]
pub struct Slot {
    of: Slots,
    network: IpAddr,
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
            taken: 0,
            next: 0,
            by_network: HashMap::new(),
        })))
    }

    /// A slot for a new connection from `address`, which must be set up `within` that time.
    pub(super) fn enter(&self, address: IpAddr, peer: String, within: Duration) -> Slot {
        let network = network_of(address);
        let (sender, displaced) = watch::channel(false);
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        let own = state.by_network.entry(network).or_default();
        own.insert(number, sender);
        state.taken += 1;
        if state.taken > state.limit {
            state.displace(number);
        }
        drop(state);
        Slot {
            of: self.clone(),
            network,
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
        let rank = |(network, own): (&IpAddr, &BTreeMap<u64, watch::Sender<bool>>)| {
            let (&oldest, _) = own.first_key_value()?;
            (oldest != newest).then_some((own.len(), std::cmp::Reverse(oldest), *network))
        };
        let most = self.by_network.iter().filter_map(rank).max();
        if let Some((_, std::cmp::Reverse(oldest), network)) = most
            && let Some(displaced) = self.remove(network, oldest)
        {
            displaced.send_replace(true);
        }
    }

    fn remove(&mut self, network: IpAddr, number: u64) -> Option<watch::Sender<bool>> {
        let own = self.by_network.get_mut(&network)?;
        let removed = own.remove(&number)?;
        if own.is_empty() {
            self.by_network.remove(&network);
        }
        self.taken -= 1;
        Some(removed)
    }
}

impl Slot {
    /// The peer is known: its connection needs no slot any more, and cannot be displaced. The deadline stands.
    pub fn release(&self) {
        self.of.0.lock().remove(self.network, self.number);
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
        assert!(state.by_network.is_empty() && state.taken == 0);
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
        assert_eq!(slots.0.lock().taken, 0);
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

    proptest! {
        /// Whatever comes and goes: no more slots than the limit are taken, and a network that has no more than its part
        /// of them (the limit divided by the networks) never loses one.
        #[test]
        fn whoever_has_little_keeps_it(
            steps in prop::collection::vec((0u8..5, any::<bool>(), any::<u8>()), 0..300),
        ) {
            let slots = Slots::new(10);
            let mut held: Vec<(u8, Slot)> = Vec::new();
            for (network, comes, which) in steps {
                if !comes {
                    if !held.is_empty() {
                        held.swap_remove(usize::from(which) % held.len());
                    }
                    continue;
                }
                let before: Vec<u64> = held.iter().map(|(_, s)| s.number).collect();
                let count = |n: u8| held.iter().filter(|(of, _)| *of == n).count();
                let counts: Vec<usize> = (0..5).map(count).collect();
                let slot = slots.enter([10, 0, 0, network].into(), String::new(), LONG);
                prop_assert!(!is_displaced(&slot));
                held.push((network, slot));
                for (of, slot) in &held {
                    if is_displaced(slot) && before.contains(&slot.number) {
                        prop_assert!(counts[usize::from(*of)] >= 2, "{counts:?}");
                    }
                }
                held.retain(|(_, slot)| !is_displaced(slot));
                prop_assert!(held.len() <= 10 && slots.0.lock().taken == held.len());
            }
        }
    }
}
