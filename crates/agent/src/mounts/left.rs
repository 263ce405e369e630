//! What a mount leaves when it has ended: here, and at sites that could not be told.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::text::clean;

/// What is left; nothing of it when all ended well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Of what is here, for a person.
    pub here: String,
    /// What other sites keep for the mount.
    pub there: Vec<Untold>,
}

impl Left {
    /// That, and no site keeps anything.
    pub fn here(here: String) -> Left {
        Left {
            here,
            there: Vec::new(),
        }
    }

    /// All of it, a line each.
    pub fn lines(&self) -> Vec<String> {
        let here = Some(self.here.clone()).filter(|here| !here.is_empty());
        here.into_iter()
            .chain(self.there.iter().map(Untold::to_string))
            .collect()
    }
}

/// A site that was not told that the mount has ended, and so keeps its image for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Untold {
    /// What the site is called here; none for this one.
    pub site: Option<String>,
    /// The image's name there.
    pub image: String,
    /// What it keeps.
    pub keeps: Keeps,
}

/// What a site keeps for a mount of which it does not know that it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keeps {
    /// The right to write, until it is broken.
    Write,
    /// Writers out, for a short time.
    Read,
    /// It refused the mount before that: perhaps nothing.
    Unknown,
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let site = clean(self.site.as_deref().unwrap_or("this site"));
        let image = clean(&self.image);
        match self.keeps {
            Keeps::Write => write!(
                f,
                "{site} could not be told, and keeps the right to write {image} for this mount; it does not lapse: `drover mounts break {image}` at {site} ends it"
            ),
            // The site finds a dead link after half a minute, and a reader has a minute to come back.
            Keeps::Read => write!(
                f,
                "{site} could not be told, and lets nobody write {image} for two minutes at most"
            ),
            Keeps::Unknown => write!(
                f,
                "{site} had ended the link; `drover mounts leases` there says whether it keeps {image} for this mount"
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
