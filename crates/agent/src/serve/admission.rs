//! Connection limits. Connections whose key is not known have slots of the listener ([`drover_net::Slot`]); those of
//! known peers have places here, and neither takes from the other.

use drover_net::{PeerKey, ShareLimits, Shares};

/// Upper bound on the connections of all peers, but each may have [`MIN_PER_PEER`].
pub const MAX_CONNECTIONS: u64 = 1024;

/// Upper bound on connections per peer: several sessions, each with its data connections.
pub const MAX_PER_PEER: u64 = 256;

/// Connections that a peer may have even if the others have taken all.
pub const MIN_PER_PEER: u64 = 16;

/// The places for connections of known peers.
pub fn places() -> Shares<PeerKey> {
    Shares::new(ShareLimits {
        all: MAX_CONNECTIONS,
        one: MAX_PER_PEER,
        sure: MIN_PER_PEER,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_that_take_all_they_get_leave_places_to_the_others() {
        let places = places();
        let mut taken = Vec::new();
        for peer in 0..10 {
            let own = (0..2000).map_while(|_| places.try_take(PeerKey([peer; 32]), 1));
            let own: Vec<_> = own.collect();
            let expected = if peer < 4 { MAX_PER_PEER } else { MIN_PER_PEER };
            assert_eq!(own.len() as u64, expected);
            taken.push(own);
        }
        taken.pop();
        assert!(places.try_take(PeerKey([9; 32]), 1).is_some());
    }
}
