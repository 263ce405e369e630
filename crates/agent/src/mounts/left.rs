//! What an unmount leaves behind: a cache here, and leases at sites that could not be notified.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::text::clean;

/// What is left; empty after a complete unmount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// What is left here, as text for the user.
    pub here: String,
    /// Leases that other sites still hold for the mount.
    pub there: Vec<Untold>,
}

impl Left {
    /// Something left here, nothing at other sites.
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
            .chain(self.there.iter().map(Untold::to_string))
            .collect()
    }
}

/// A site that could not be notified that the mount ended, and may still hold a lease for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Untold {
    /// The peer's name; none for this site.
    pub site: Option<String>,
    /// The image's name there.
    pub image: String,
    /// The lease it holds.
    pub keeps: Keeps,
}

/// The lease that a site holds for a mount that ended without notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keeps {
    /// The write lease, until it is broken.
    Write,
    /// A read lease, which expires soon and keeps writers out until then.
    Read,
    /// The site had refused the mount before, so perhaps it holds none.
    Unknown,
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let site = clean(self.site.as_deref().unwrap_or("this site"));
        let image = clean(&self.image);
        match self.keeps {
            Keeps::Write => write!(
                f,
                "could not notify {site}: there, this mount still holds the write lease of {image}; revoke it with `drover mounts break {image}` at {site}"
            ),
            // The site detects a dead connection after half a minute, and a reader has a minute to reconnect.
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
    fn each_says_where_and_what_helps() {
        let mut left = Left::here(String::new());
        assert!(left.lines().is_empty());
        for (keeps, words) in [
            (Keeps::Write, "`drover mounts break web.raw` at lyon"),
            (Keeps::Read, "two minutes"),
            (Keeps::Unknown, "`drover mounts leases` there"),
        ] {
            left.there = vec![Untold {
                site: Some("lyon".into()),
                image: "web.raw".into(),
                keeps,
            }];
            let lines = left.lines();
            assert_eq!(lines.len(), 1);
            assert!(lines[0].contains(words), "{lines:?}");
        }
    }
}
