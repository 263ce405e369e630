//! What a caller may do.

/// The right that a service requires of its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Show a ticket: also one whose key is not known.
    Pair,
    /// List images and transfers, and verify images.
    List,
    /// Send images.
    Send,
    /// Remove unfinished transfers; without [`Right::Manage`] only the caller's own.
    Cancel,
    /// Use images as devices.
    Mount,
    /// Have digests matched.
    Match,
    /// Run the site.
    Manage,
}

/// A set of rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u16);

impl Rights {
    /// Of an unknown key.
    pub const STRANGER: Rights = Rights::of(&[Right::Pair]);

    /// Of a paired site.
    pub const PEER: Rights = Rights::of(&[
        Right::Pair,
        Right::List,
        Right::Send,
        Right::Cancel,
        Right::Mount,
        Right::Match,
    ]);

    /// Of the site's own user on its own machine. What is for other sites is not among them.
    pub const OWNER: Rights =
        Rights::of(&[Right::List, Right::Cancel, Right::Mount, Right::Manage]);

    /// These.
    #[must_use]
    pub const fn of(rights: &[Right]) -> Rights {
        let (mut bits, mut at) = (0, 0);
        while at < rights.len() {
            bits |= 1 << rights[at] as u16;
            at += 1;
        }
        Rights(bits)
    }

    /// Whether it is among them.
    #[must_use]
    pub const fn has(self, right: Right) -> bool {
        self.0 & 1 << right as u16 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_may_only_pair_and_a_peer_may_not_manage() {
        let all = [
            Right::Pair,
            Right::List,
            Right::Send,
            Right::Cancel,
            Right::Mount,
            Right::Match,
            Right::Manage,
        ];
        for right in all {
            assert_eq!(Rights::STRANGER.has(right), right == Right::Pair);
            assert_eq!(Rights::PEER.has(right), right != Right::Manage);
        }
        assert!(Rights::OWNER.has(Right::Manage) && !Rights::OWNER.has(Right::Send));
        assert!(!Rights::of(&[]).has(Right::Pair));
    }
}
