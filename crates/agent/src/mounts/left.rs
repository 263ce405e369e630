//! What an unmount leaves behind: a cache here, and leases at sites that could not be notified.

use std::fmt;

use drover_device::backend::chunk_store::StoreAddress;
use serde::{Deserialize, Serialize};

use crate::text::clean;

/// What is left; empty after a complete unmount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// What is left on this machine, as text for the user.
    pub here: String,
    /// Leases of the mount that may remain at other sites.
    pub there: Vec<Unnotified>,
}

impl Left {
    /// Something is left on this machine, nothing at other sites.
    pub fn here(here: String) -> Left {
        Left {
            here,
            there: Vec::new(),
        }
    }

    /// One line per item.
    pub fn lines(&self) -> Vec<String> {
        let here = Some(self.here.clone()).filter(|here| !here.is_empty());
        here.into_iter()
            .chain(self.there.iter().map(Unnotified::to_string))
            .collect()
    }
}

/// A site that could not be notified of the unmount, where the mount may still hold a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unnotified {
    /// The peer's name; the URL of a disk in a store; none for this site.
    pub site: Option<String>,
    /// The domain of an image of this site; none for the default one.
    pub domain: Option<String>,
    /// The image's name there.
    pub image: String,
    /// The lease that remains.
    pub keeps: Keeps,
}

/// The lease of an ended mount that remains at a site that could not be notified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keeps {
    /// The write lease, until it is revoked.
    Write,
    /// A read lease, which keeps writers out until it expires.
    Read,
    /// Unknown: the site had already refused the mount, so there may be none.
    Unknown,
}

impl fmt::Display for Unnotified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let site = clean(self.site.as_deref().unwrap_or("this site"));
        let image = clean(&self.image);
        let option = self.domain.as_deref();
        let option =
            option.map_or_else(String::new, |domain| format!(" --domain {}", clean(domain)));
        if StoreAddress::is_one(&site) {
            return write!(
                f,
                "could not tell the store that this mount has ended: it may still hold the write lease of {site}; `drover mounts break '{site}'` ends it"
            );
        }
        match self.keeps {
            Keeps::Write => write!(
                f,
                "could not notify {site}: there, this mount still holds the write lease of {image}; revoke it with `drover mounts break {image}{option}` at {site}"
            ),
            // The site detects a dead connection after 30 s; then a reader has a minute to reconnect.
            Keeps::Read => write!(
                f,
                "could not notify {site}: {image} cannot be written there for up to two minutes"
            ),
            Keeps::Unknown => write!(
                f,
                "{site} had closed the connection; `drover mounts leases` there shows whether this mount still holds a lease of {image}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_names_the_site_and_the_way_out() {
        let mut left = Left::here(String::new());
        assert!(left.lines().is_empty());
        for (keeps, words) in [
            (Keeps::Write, "`drover mounts break web.raw` at lyon"),
            (Keeps::Read, "two minutes"),
            (Keeps::Unknown, "`drover mounts leases` there"),
        ] {
            left.there = vec![Unnotified {
                site: Some("lyon".into()),
                domain: None,
                image: "web.raw".into(),
                keeps,
            }];
            let lines = left.lines();
            assert_eq!(lines.len(), 1);
            assert!(lines[0].contains(words), "{lines:?}");
        }
    }
}
