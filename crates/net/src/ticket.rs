//! Tickets: one word of text with all that is needed to pair two sites.

use std::fmt;
use std::str::FromStr;

use crc_fast::{CrcAlgorithm, checksum};
use data_encoding::BASE32_NOPAD;
use serde::{Deserialize, Serialize};

use crate::PeerKey;

/// What pairing needs: the site's key, where it may be reached, and a secret that is good once.
///
/// As text it is one word: `drover1`, then lower-case base32 of the fields and a checksum. Who
/// holds it can pair with the site while the site still honours the secret, so it is to be
/// handed over like a password; `Debug` leaves the secret out.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The site's key.
    pub key: PeerKey,
    /// Where it listens, `HOST:PORT`, best first.
    pub addresses: Vec<String>,
    /// Proves to the site that its ticket was used.
    pub secret: [u8; 16],
}

/// Why a text is not a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// It does not start with `drover1`.
    #[error("not a drover ticket: a ticket starts with `{PREFIX}`")]
    Prefix,
    /// Letters are missing or wrong.
    #[error("the ticket is damaged: it must be copied whole, as one word")]
    Damaged,
    /// The checksum is right but the content is not allowed.
    #[error("the ticket's addresses are not usable")]
    Addresses,
}

const PREFIX: &str = "drover1";

/// Longer than any ticket with [`Ticket::MAX_ADDRESSES`] of the longest addresses.
const MAX_TEXT: usize = 4096;

impl Ticket {
    /// Most addresses in a ticket.
    pub const MAX_ADDRESSES: usize = 8;
    /// Longest address, in bytes.
    pub const MAX_ADDRESS_BYTES: usize = 255;

    /// A ticket with a fresh secret. Repeated addresses, addresses that are empty, too long or
    /// have blanks in them, and those after the eighth are left out.
    ///
    /// # Panics
    /// When the system has no randomness to give, without which no secret may be made.
    #[must_use]
    pub fn new(key: PeerKey, addresses: impl IntoIterator<Item = String>) -> Self {
        let secret = random_id();
        let mut kept: Vec<String> = Vec::new();
        for address in addresses {
            if kept.len() < Self::MAX_ADDRESSES && usable(&address) && !kept.contains(&address) {
                kept.push(address);
            }
        }
        Ticket {
            key,
            addresses: kept,
            secret,
        }
    }
}

/// Sixteen unpredictable bytes from the kernel.
///
/// # Panics
/// When the system gives no randomness.
#[must_use]
pub fn random_id() -> [u8; 16] {
    let mut id = [0u8; 16];
    // So few bytes come whole, and are not interrupted.
    let got = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
    assert_eq!(got, Ok(id.len()), "the system gives randomness");
    id
}

/// Readies the cryptographic library beside whatever the program does first: it takes the jitter of
/// the processor for some 20 ms before its first random byte, once in a process.
pub fn warm_up() {
    // If no thread can be started, the first handshake takes so much longer.
    let _ = std::thread::Builder::new()
        .name("randomness".into())
        .spawn(|| aws_lc_rs::rand::fill(&mut [0u8; 1]));
}

/// Whether two secrets are equal, in a time that does not depend on where they differ.
#[must_use]
pub fn same_secret(a: &[u8; 16], b: &[u8; 16]) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(a, b).is_ok()
}

fn usable(address: &str) -> bool {
    !address.is_empty()
        && address.len() <= Ticket::MAX_ADDRESS_BYTES
        && !address.chars().any(|c| c.is_control() || c.is_whitespace())
}

fn checksum_of(bytes: &[u8]) -> [u8; 4] {
    (checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32).to_le_bytes()
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = crate::encode(self);
        bytes.extend(checksum_of(&bytes));
        let text = BASE32_NOPAD.encode(&bytes).to_ascii_lowercase();
        write!(f, "{PREFIX}{text}")
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("key", &self.key)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(s: &str) -> Result<Self, TicketError> {
        let s = s.trim();
        let head = s.get(..PREFIX.len()).ok_or(TicketError::Prefix)?;
        if !head.eq_ignore_ascii_case(PREFIX) {
            return Err(TicketError::Prefix);
        }
        if s.len() > MAX_TEXT {
            return Err(TicketError::Damaged);
        }
        let bytes = BASE32_NOPAD
            .decode(s[PREFIX.len()..].to_ascii_uppercase().as_bytes())
            .map_err(|_| TicketError::Damaged)?;
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or(TicketError::Damaged)?;
        if *sum != checksum_of(body) {
            return Err(TicketError::Damaged);
        }
        let ticket: Ticket = crate::decode(body).map_err(|_| TicketError::Damaged)?;
        let few = ticket.addresses.len() <= Self::MAX_ADDRESSES;
        if few && ticket.addresses.iter().all(|a| usable(a)) {
            Ok(ticket)
        } else {
            Err(TicketError::Addresses)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Ticket {
        Ticket::new(
            PeerKey([7; 32]),
            ["10.0.0.2:7777".to_owned(), "[fe80::1]:7777".to_owned()],
        )
    }

    #[test]
    fn a_new_ticket_is_bounded_and_secret() {
        let long = "x".repeat(256);
        let given = (0..20).map(|n| format!("host{}:1", n / 2)).chain([
            long,
            "a b:1".into(),
            String::new(),
        ]);
        let t = Ticket::new(PeerKey([1; 32]), given);
        assert_eq!(t.addresses.len(), 8);
        assert_eq!(t.addresses[7], "host7:1");
        assert_eq!(t.to_string().parse(), Ok(t.clone()));
        assert_ne!(sample().secret, sample().secret);
        let widest = Ticket::new(
            PeerKey([1; 32]),
            (0..8).map(|n| format!("{n}{}", "x".repeat(254))),
        );
        assert_eq!(widest.addresses.len(), 8);
        assert_eq!(widest.to_string().parse(), Ok(widest));
        let hex = format!("{:?}", t.secret);
        assert!(!format!("{t:?}").contains(hex.trim_matches(['[', ']'])));
        assert!(same_secret(&t.secret, &t.secret.clone()));
        assert!(!same_secret(&t.secret, &[0; 16]));
    }

    #[test]
    fn the_documented_bytes() {
        // Made from docs/format/wire.md by other means.
        let word = concat!(
            "drover1a4dqobyha4dqobyha4dqobyha4dqobyha4dqobyha4dqobyha4",
            "dqcdjrgaxdalrqfyzdunzxg43qscijbeeqscijbeeqscijbeeqt6fpxo7q",
        );
        let ticket = Ticket {
            key: PeerKey([7; 32]),
            addresses: vec!["10.0.0.2:7777".into()],
            secret: [9; 16],
        };
        assert_eq!(ticket.to_string(), word);
    }

    #[test]
    fn what_people_do_to_words() {
        let t = sample();
        let text = t.to_string();
        assert!(text.bytes().all(|b| b.is_ascii_alphanumeric()));
        assert_eq!(format!(" {text}\n").parse(), Ok(t.clone()));
        assert_eq!(text.to_ascii_uppercase().parse(), Ok(t));
        assert_eq!(
            text[..text.len() - 1].parse::<Ticket>(),
            Err(TicketError::Damaged)
        );
        assert_eq!("drover".parse::<Ticket>(), Err(TicketError::Prefix));
        assert_eq!("drover1".parse::<Ticket>(), Err(TicketError::Damaged));
        assert_eq!("éééééééé".parse::<Ticket>(), Err(TicketError::Prefix));
        assert_eq!(
            format!("drover1{}", "a".repeat(1 << 20)).parse::<Ticket>(),
            Err(TicketError::Damaged)
        );
    }

    #[test]
    fn a_forged_ticket_has_no_odd_addresses() {
        for addresses in [vec!["a\nb".to_owned()], vec!["a:1".to_owned(); 9]] {
            let forged = Ticket {
                addresses,
                ..sample()
            };
            assert_eq!(
                forged.to_string().parse::<Ticket>(),
                Err(TicketError::Addresses)
            );
        }
    }

    proptest! {
        #[test]
        fn there_and_back(key: [u8; 32], addresses in proptest::collection::vec("[a-z0-9.:]{1,255}", 0..9)) {
            let t = Ticket::new(PeerKey(key), addresses);
            prop_assert_eq!(t.to_string().parse(), Ok(t));
        }

        #[test]
        fn any_text_parses_or_fails(s in any::<String>()) {
            let _ = s.parse::<Ticket>();
            let prefixed = ["drover1", &s].concat();
            prop_assert!(prefixed.parse::<Ticket>().is_err());
        }

        #[test]
        fn one_wrong_letter_is_noticed(at in 7usize..100, letter in proptest::sample::select(b"abcdefghijklmnopqrstuvwxyz234567".to_vec())) {
            let text = sample().to_string();
            let mut bytes = text.clone().into_bytes();
            bytes[at] = letter;
            let changed = String::from_utf8(bytes).unwrap();
            prop_assert_eq!(changed.parse::<Ticket>().is_ok(), changed == text);
        }
    }
}
