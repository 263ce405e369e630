//! What a site lets a peer do.

use drover_net::{Right, Rights};

use crate::domain;

/// What a peer may do at this site, in which domain, and how much space it may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// What it may do.
    pub rights: Rights,
    /// The domain that it sees: the name is valid by [`domain::check`].
    pub domain: String,
    /// Maximum number of bytes that it may take on this site's disks; `None` for no limit.
    pub quota_bytes: Option<u64>,
}

impl Default for Grant {
    /// One owner of both sites: sending, reading and writing in the default domain.
    fn default() -> Self {
        Grant::of(Rights::DEFAULT)
    }
}

impl Grant {
    /// These rights in the default domain, without a quota.
    #[must_use]
    pub fn of(rights: Rights) -> Grant {
        Grant {
            rights,
            domain: domain::DEFAULT.into(),
            quota_bytes: None,
        }
    }

    /// No rights.
    #[must_use]
    pub fn nothing() -> Grant {
        Grant::of(Rights::NONE)
    }

    /// Having digests matched, and nothing else.
    #[must_use]
    pub fn matching() -> Grant {
        Grant::of(Rights::of(&[Right::Match]))
    }

    /// Whether it gives no right.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.rights == Rights::NONE
    }

    /// Checks what a user chose.
    ///
    /// # Errors
    /// A message for the user.
    pub fn check(&self) -> Result<(), String> {
        domain::check(&self.domain).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_stored_is_refused() {
        for good in [Grant::default(), Grant::nothing(), Grant::matching()] {
            assert_eq!(good.check(), Ok(()));
        }
        assert!(Grant::nothing().is_nothing() && !Grant::matching().is_nothing());
        let grant = Grant {
            domain: "../x".into(),
            ..Grant::default()
        };
        assert!(grant.check().is_err());
    }
}
