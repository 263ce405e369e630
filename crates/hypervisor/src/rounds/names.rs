//! How what a series of rounds makes in QEMU is told from all else there.

use crate::error::HypervisorError;
use crate::machine::Machine;

/// The longest name of a series of rounds, in bytes: it is part of names of block nodes, which have 31 at most.
pub const MAX_NAME: usize = 20;

/// What bitmaps, exports and block nodes of a series are called.
#[derive(Debug, Clone)]
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
        number(self.rest(bitmap)?)
    }

    /// What follows the series' name.
    fn rest<'a>(&self, name: &'a str) -> Option<&'a str> {
        let rest = name.strip_prefix("drover-")?.strip_prefix(&self.name)?;
        rest.strip_prefix('-')
    }

    /// Of a disk in a round; round 0 is the whole disk.
    pub fn export(&self, number: u64, index: usize) -> String {
        format!("drover-{}-{number}-{index}", self.name)
    }

    pub fn number_of_export(&self, export: &str) -> Option<u64> {
        let (bitmap, index) = export.rsplit_once('-')?;
        number(index)?;
        self.number_of(bitmap)
    }

    /// Whether an export is of this series.
    pub fn is_export(&self, id: &str) -> bool {
        self.number_of_export(id).is_some() || self.is_held(id) || self.is_past(id)
    }

    /// Whether a bitmap is of this series.
    pub fn is_bitmap(&self, name: &str) -> bool {
        let is_kind = self.is_filter(name) || self.is_past(name) || self.noted(name).is_some();
        self.number_of(name).is_some() || is_kind || name == self.paused()
    }

    /// The bitmap that says that the machine was paused by us.
    pub fn paused(&self) -> String {
        format!("drover-{}-paused", self.name)
    }

    /// The node that copies aside what is overwritten, between a disk and its node; the latter has a bitmap of that name.
    pub fn filter(&self, index: usize) -> String {
        format!("drover-{}-f{index}", self.name)
    }

    /// The node for those copies.
    pub fn scratch(&self, index: usize) -> String {
        format!("drover-{}-s{index}", self.name)
    }

    /// The node and the export of the disk as it was.
    pub fn held(&self, index: usize) -> String {
        format!("drover-{}-h{index}", self.name)
    }

    /// The copy of a bitmap of others, and its export.
    pub fn past(&self, index: usize) -> String {
        format!("drover-{}-p{index}", self.name)
    }

    /// The bitmap that says what the state is called from which on is recorded.
    pub fn note(&self, note: &str) -> String {
        format!("drover-{}-v{note}", self.name)
    }

    /// What such a bitmap says.
    pub fn noted<'a>(&self, bitmap: &'a str) -> Option<&'a str> {
        let note = self.rest(bitmap)?.strip_prefix('v')?;
        let is_note = (1..=16).contains(&note.len())
            && note.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        is_note.then_some(note)
    }

    pub fn is_past(&self, name: &str) -> bool {
        self.is_kind(name, 'p')
    }

    pub fn is_filter(&self, name: &str) -> bool {
        self.is_kind(name, 'f')
    }

    pub fn is_scratch(&self, name: &str) -> bool {
        self.is_kind(name, 's')
    }

    pub fn is_held(&self, name: &str) -> bool {
        self.is_kind(name, 'h')
    }

    fn is_kind(&self, name: &str, kind: char) -> bool {
        let index = self.rest(name).and_then(|rest| rest.strip_prefix(kind));
        index.and_then(number).is_some()
    }
}

/// Digits only: what begins with a sign is not ours.
fn number(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
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
            "drover-web-+7",
            "drover-web-f7",
            "drover-web-paused",
        ] {
            assert_eq!(
                (web.number_of(other), web.number_of_export(other)),
                (None, None),
                "{other}"
            );
        }
    }

    #[test]
    fn names_of_nodes_fit_and_say_what_they_are() {
        let longest = Names {
            name: "n".repeat(MAX_NAME),
        };
        let last = 99;
        let [filter, scratch, held] = [
            longest.filter(last),
            longest.scratch(last),
            longest.held(last),
        ];
        let past = longest.past(last);
        assert!(longest.is_past(&past) && longest.is_bitmap(&past) && longest.is_export(&past));
        let note = longest.note("0123456789");
        assert!(longest.noted(&note) == Some("0123456789") && longest.is_bitmap(&note));
        assert!(longest.number_of(&note).is_none() && longest.noted(&longest.note("x")).is_none());
        assert!(!longest.is_held(&past) && longest.number_of(&past).is_none());
        for name in [&filter, &scratch, &held] {
            assert!(name.len() <= 31, "{name}");
            let kinds = [
                longest.is_filter(name),
                longest.is_scratch(name),
                longest.is_held(name),
            ];
            let wanted = [name == &filter, name == &scratch, name == &held];
            assert_eq!(kinds, wanted);
        }
    }
}
