//! The table of a disk: the version of each object, as of now and as of the last commit.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

use super::format::{PER_PAGE, Version};

/// Versions by object, in pages; no page is all zeros.
pub struct Table {
    pages: Vec<Option<Box<[Version]>>>,
    /// What has changed since the last commit, with the version that was committed.
    changed: HashMap<u64, Version>,
    /// The pages of these.
    dirty: BTreeSet<u64>,
    /// Versions that were written and overtaken since the last commit: no commit names them.
    strays: Vec<(u64, Version)>,
}

/// What a commit writes, and what it was before.
#[derive(Debug, Default)]
pub struct Changes {
    /// The pages, with their content; none for one without objects.
    pub pages: Vec<(u64, Option<Box<[Version]>>)>,
    changed: HashMap<u64, Version>,
    strays: Vec<(u64, Version)>,
}

impl Changes {
    /// The objects that nothing names after the commit.
    pub fn replaced(&self) -> impl Iterator<Item = (u64, Version)> {
        let changed = self
            .changed
            .iter()
            .map(|(index, version)| (*index, *version));
        let changed = changed.filter(|(_, version)| version.is_some());
        changed.chain(self.strays.iter().copied())
    }
}

impl Table {
    /// From pages that were read.
    pub fn new(pages: Vec<Option<Box<[Version]>>>) -> Self {
        Table {
            pages,
            changed: HashMap::new(),
            dirty: BTreeSet::new(),
            strays: Vec::new(),
        }
    }

    /// The version of an object.
    pub fn get(&self, index: u64) -> Version {
        let page = self.pages.get((index / PER_PAGE) as usize);
        match page {
            Some(Some(page)) => page[(index % PER_PAGE) as usize],
            _ => Version::NONE,
        }
    }

    fn put(&mut self, index: u64, version: Version) {
        let at = (index / PER_PAGE) as usize;
        let Some(page) = self.pages.get_mut(at) else {
            return;
        };
        if page.is_none() && !version.is_some() {
            return;
        }
        let content = page.get_or_insert_with(|| vec![Version::NONE; PER_PAGE as usize].into());
        content[(index % PER_PAGE) as usize] = version;
        if content.iter().all(|version| !version.is_some()) {
            *page = None;
        }
    }

    /// Notes the new version of an object, or that it is gone.
    pub fn set(&mut self, index: u64, version: Version) {
        let now = self.get(index);
        if now == version {
            return;
        }
        match self.changed.entry(index) {
            Entry::Vacant(first) => {
                first.insert(now);
            }
            Entry::Occupied(_) if now.is_some() => self.strays.push((index, now)),
            Entry::Occupied(_) => {}
        }
        self.put(index, version);
        self.dirty.insert(index / PER_PAGE);
    }

    /// Notes a version that may have been written, and that nothing will name.
    pub fn stray(&mut self, index: u64, version: Version) {
        self.strays.push((index, version));
    }

    /// Whether something has changed since the last commit.
    pub fn is_changed(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Whether nothing was written in vain.
    pub fn is_tidy(&self) -> bool {
        self.strays.is_empty()
    }

    /// What has changed, for a commit.
    pub fn take(&mut self) -> Changes {
        let dirty = std::mem::take(&mut self.dirty);
        let pages = dirty.into_iter().map(|page| {
            let content = self.pages.get(page as usize).cloned().flatten();
            (page, content)
        });
        Changes {
            pages: pages.collect(),
            changed: std::mem::take(&mut self.changed),
            strays: std::mem::take(&mut self.strays),
        }
    }

    /// A commit has failed: its changes are those of the next one, too.
    pub fn put_back(&mut self, changes: Changes) {
        for (index, committed) in changes.changed {
            // What the failed commit would have committed is named by none.
            if let Some(overtaken) = self.changed.insert(index, committed)
                && overtaken.is_some()
            {
                self.strays.push((index, overtaken));
            }
        }
        self.strays.extend(changes.strays);
        self.dirty
            .extend(changes.pages.iter().map(|(page, _)| *page));
    }

    /// Returns to what was committed last.
    pub fn revert(&mut self) {
        for (index, committed) in std::mem::take(&mut self.changed) {
            let now = self.get(index);
            if now.is_some() && now != committed {
                self.strays.push((index, now));
            }
            self.put(index, committed);
        }
        // The pages are what they were, and are written once more only if something changes in them.
        self.dirty.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(changes: &Changes) -> Vec<(u64, u128)> {
        let mut all: Vec<_> = changes.replaced().map(|(i, v)| (i, v.0)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn what_a_commit_replaces() {
        let mut table = Table::new(vec![None, None]);
        table.set(3, Version(10));
        table.set(3, Version(11));
        table.set(PER_PAGE, Version(12));
        table.set(PER_PAGE, Version::NONE);
        table.set(7, Version::NONE);
        let first = table.take();
        assert_eq!(replaced(&first), [(3, 10), (PER_PAGE, 12)]);
        assert_eq!(first.pages.len(), 2);
        assert!(first.pages[0].1.is_some() && first.pages[1].1.is_none());
        assert!(!table.is_changed());

        // Of the next, which fails, and the one after it.
        table.set(3, Version(20));
        let failed = table.take();
        table.set(3, Version(21));
        table.put_back(failed);
        let second = table.take();
        assert_eq!(replaced(&second), [(3, 11), (3, 20)]);
        assert_eq!(table.get(3), Version(21));

        table.set(3, Version::NONE);
        table.set(4, Version(30));
        table.revert();
        assert_eq!((table.get(3), table.get(4)), (Version(21), Version::NONE));
        assert!(!table.is_changed());
        // What was written in vain goes with the next commit.
        table.set(5, Version(40));
        assert_eq!(replaced(&table.take()), [(4, 30)]);
        // An object outside of the disk.
        table.set(5 * PER_PAGE, Version(1));
        assert_eq!(table.get(5 * PER_PAGE), Version::NONE);
    }
}
