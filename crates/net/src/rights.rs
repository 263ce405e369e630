//! What a caller may do.

use std::fmt;
use std::str::FromStr;

/// The right that a service requires of its callers.
///
/// Those of [`Right::GIVEN`] are given to peers, by a ticket or later; the others follow from them, or from where the
/// caller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Send images.
    Send,
    /// Read images, as devices, and verify them.
    Read,
    /// Write to images, as devices.
    Write,
    /// Have machines taken in.
    Host,
    /// Add snapshots; not remove them.
    Backup,
    /// Have digests matched.
    Match,
    /// Keep files and directories in step.
    Sync,
    /// Use memory or disk as swap.
    Swap,
    /// Be a node of this site, for who has its key; of no use to other peers.
    Node,
    /// Change what other peers own.
    Admin,
    /// Show a ticket: also a key that is not known.
    Pair,
    /// List images and transfers: whoever may send, read or write them.
    List,
    /// Remove images and unfinished transfers, of one's own without [`Right::Admin`]: whoever may send or change everything.
    Cancel,
    /// Run the site: its own user, on its own machine.
    Manage,
}

impl Right {
    /// The rights that can be given to a peer.
    pub const GIVEN: [Right; 10] = [
        Right::Send,
        Right::Read,
        Right::Write,
        Right::Host,
        Right::Backup,
        Right::Match,
        Right::Sync,
        Right::Swap,
        Right::Node,
        Right::Admin,
    ];

    /// Its name: of one in [`Right::GIVEN`], as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Right::Send => "send",
            Right::Read => "read",
            Right::Write => "write",
            Right::Host => "host",
            Right::Backup => "backup",
            Right::Match => "match",
            Right::Sync => "sync",
            Right::Swap => "swap",
            Right::Node => "node",
            Right::Admin => "admin",
            Right::Pair => "pair",
            Right::List => "list",
            Right::Cancel => "cancel",
            Right::Manage => "manage",
        }
    }
}

/// A set of rights.
///
/// As text: the names of those in [`Right::GIVEN`], joined by commas, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u16);

impl Rights {
    /// None at all.
    pub const NONE: Rights = Rights::of(&[]);

    /// Of an unknown key.
    pub const STRANGER: Rights = Rights::of(&[Right::Pair]);

    /// What a ticket gives unless it says otherwise.
    pub const DEFAULT: Rights = Rights::of(&[Right::Send, Right::Read, Right::Write]);

    /// Of the site's own user on its own machine. What is for other sites is not among them.
    pub const OWNER: Rights = Rights::of(&[
        Right::List,
        Right::Cancel,
        Right::Read,
        Right::Write,
        Right::Admin,
        Right::Manage,
    ]);

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

    /// All rights of a peer that was given these: also those that follow from them.
    #[must_use]
    pub fn of_peer(self) -> Rights {
        use Right::*;
        let some = |of: &[Right]| of.iter().any(|right| self.has(*right));
        let mut all = Rights(self.0 | Rights::STRANGER.0);
        if some(&[Send, Read, Write, Admin]) {
            all.0 |= Rights::of(&[List]).0;
        }
        if some(&[Send, Admin]) {
            all.0 |= Rights::of(&[Cancel]).0;
        }
        all
    }

    /// Whether it is among them.
    #[must_use]
    pub const fn has(self, right: Right) -> bool {
        self.0 & 1 << right as u16 != 0
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = Right::GIVEN.into_iter().filter(|right| self.has(*right));
        let names = Vec::from_iter(given.map(Right::name));
        f.write_str(if names.is_empty() { "none" } else { "" })?;
        f.write_str(&names.join(","))
    }
}

/// A text that names no right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a right; there are {all}, and none", all = all_names())]
pub struct UnknownRight(pub String);

fn all_names() -> String {
    Vec::from_iter(Right::GIVEN.map(Right::name)).join(", ")
}

impl FromStr for Rights {
    type Err = UnknownRight;

    fn from_str(text: &str) -> Result<Rights, UnknownRight> {
        if text.trim() == "none" {
            return Ok(Rights::NONE);
        }
        let right = |name: &str| {
            let found = Right::GIVEN.into_iter().find(|right| right.name() == name);
            found.ok_or_else(|| UnknownRight(name.to_owned()))
        };
        let rights: Result<Vec<Right>, _> =
            text.split(',').map(|name| right(name.trim())).collect();
        Ok(Rights::of(&rights?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Right; 14] = {
        use Right::*;
        [
            Send, Read, Write, Host, Backup, Match, Sync, Swap, Node, Admin, Pair, List, Cancel,
            Manage,
        ]
    };

    #[test]
    fn a_peer_has_what_it_was_given_and_what_follows() {
        for right in ALL {
            assert_eq!(Rights::STRANGER.has(right), right == Right::Pair);
            assert_eq!(Rights::NONE.of_peer().has(right), right == Right::Pair);
            assert!(!Rights::NONE.has(right));
        }
        for given in Right::GIVEN {
            let rights = Rights::of(&[given]).of_peer();
            for right in ALL {
                let follows = match right {
                    Right::Pair => true,
                    Right::List => matches!(
                        given,
                        Right::Send | Right::Read | Right::Write | Right::Admin
                    ),
                    Right::Cancel => matches!(given, Right::Send | Right::Admin),
                    _ => right == given,
                };
                assert_eq!(rights.has(right), follows, "{given:?}: {right:?}");
            }
        }
        let owner = Rights::OWNER;
        assert!(owner.has(Right::Manage) && !owner.has(Right::Send) && !owner.has(Right::Match));
    }

    #[test]
    fn as_text_and_back() {
        for bits in 0..1 << Right::GIVEN.len() {
            let some = (0..)
                .zip(Right::GIVEN)
                .filter(|(at, _)| bits & 1 << at != 0);
            let rights = Rights::of(&Vec::from_iter(some.map(|(_, right)| right)));
            assert_eq!(rights.to_string().parse(), Ok(rights));
        }
        assert_eq!(Rights::DEFAULT.to_string(), "send,read,write");
        assert_eq!(Rights::NONE.to_string(), "none");
        assert_eq!(
            " read, send ".parse(),
            Ok(Rights::of(&[Right::Send, Right::Read]))
        );
        for bad in [
            "",
            "send,",
            "manage",
            "pair",
            "Send",
            "send read",
            "none,send",
        ] {
            let why = bad.parse::<Rights>().unwrap_err().to_string();
            assert!(why.contains("there are send, read, write, host"), "{why}");
        }
    }
}
