//! How bitmaps and exports of a series of rounds are told from all others.

use crate::error::HypervisorError;
use crate::machine::Machine;

/// The longest name of a series of rounds, in bytes.
pub const MAX_NAME: usize = 64;

/// What bitmaps and exports of a series are called, so that they are told from all others.
#[derive(Debug)]
pub struct Names {
    name: String,
}

impl Names {
    /// Checks the series' name.
    pub fn new(machine: &Machine, name: &str) -> Result<Names, HypervisorError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(allowed) {
            return Err(machine
                .qmp()
                .unsupported(&format!("cannot call bitmaps {name:?}")));
        }
        Ok(Names {
            name: name.to_owned(),
        })
    }

    /// The series' name.
    pub fn series(&self) -> &str {
        &self.name
    }

    pub fn bitmap(&self, number: u64) -> String {
        format!("drover-{}-{number}", self.name)
    }

    pub fn number_of(&self, bitmap: &str) -> Option<u64> {
        let rest = bitmap.strip_prefix("drover-")?.strip_prefix(&self.name)?;
        rest.strip_prefix('-')?.parse().ok()
    }

    /// Of a disk in a round; round 0 is the whole disk.
    pub fn export(&self, number: u64, index: usize) -> String {
        format!("drover-{}-{number}-{index}", self.name)
    }

    pub fn number_of_export(&self, export: &str) -> Option<u64> {
        let (bitmap, index) = export.rsplit_once('-')?;
        index.parse::<usize>().ok()?;
        self.number_of(bitmap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_series_are_not_anothers() {
        let names = |name: &str| Names { name: name.into() };
        let (web, web1) = (names("web"), names("web-1"));
        assert_eq!(web.number_of(&web.bitmap(7)), Some(7));
        assert_eq!(web.number_of_export(&web.export(7, 1)), Some(7));
        assert_eq!(web.number_of(&web1.bitmap(7)), None);
        assert_eq!(web.number_of_export(&web1.export(7, 1)), None);
        assert_eq!(web1.number_of_export(&web.export(1, 7)), None);
        assert_eq!(web1.number_of(&web.bitmap(1)), None);
        for other in [
            "drover-web",
            "drover-web-",
            "drover-web-x",
            "backup-7",
            "drover-web-7-",
        ] {
            assert_eq!(
                (web.number_of(other), web.number_of_export(other)),
                (None, None),
                "{other}"
            );
        }
    }
}
