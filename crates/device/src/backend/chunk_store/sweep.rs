//! Removing what no header names any more: at once what a commit has replaced, and after a crash whatever is there.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

use super::error::OpenError;
use super::format::{OBJECTS, PAGES, Version, parse_key};
use super::store::{ChunkStore, Wanted};
use super::table::Table;

/// Keys that wait to be removed. More are left to the next sweep.
const MAX_DOOMED: usize = 1 << 16;
/// Keys that are removed in one call.
const MAX_AT_ONCE: usize = 256;

/// Keys that wait to be removed.
#[derive(Default)]
pub struct Doomed {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    keys: VecDeque<String>,
    /// Something may be left that nothing will remove but the sweep of the next session.
    is_untidy: bool,
    /// What former sessions left is not removed yet.
    is_unswept: bool,
    finishing: bool,
}

impl Doomed {
    /// Adds keys.
    pub fn add(&self, keys: impl Iterator<Item = String>) {
        let mut state = self.state.lock();
        for key in keys {
            match state.keys.len() < MAX_DOOMED {
                true => state.keys.push_back(key),
                false => state.is_untidy = true,
            }
        }
        self.changed.notify_all();
    }

    /// Notes that this session may have left something that it will not remove.
    pub fn set_untidy(&self) {
        self.state.lock().is_untidy = true;
    }

    /// Notes that former sessions have left something, or that all of it was removed.
    pub fn set_unswept(&self, is_unswept: bool) {
        self.state.lock().is_unswept = is_unswept;
    }

    /// Whether nothing is left.
    pub fn is_tidy(&self) -> bool {
        let state = self.state.lock();
        state.keys.is_empty() && !state.is_untidy && !state.is_unswept
    }

    /// Lets [`Doomed::remove_always`] end when it has removed what there is.
    pub fn finish(&self) {
        self.state.lock().finishing = true;
        self.changed.notify_all();
    }

    /// Whether it is to end.
    pub fn is_finishing(&self) -> bool {
        self.state.lock().finishing
    }

    /// Removes keys as they come, until the end.
    pub fn remove_always(&self, store: &dyn ChunkStore) {
        let mut state = self.state.lock();
        loop {
            let count = state.keys.len().min(MAX_AT_ONCE);
            let some: Vec<_> = state.keys.drain(..count).collect();
            if some.is_empty() {
                if state.finishing {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            }
            drop(state);
            let removed = store.remove(&some);
            state = self.state.lock();
            if let Err(error) = removed {
                tracing::debug!("{error}");
                state.is_untidy = true;
                if state.finishing {
                    // A store that is away is not waited for.
                    return;
                }
            }
        }
    }
}

/// Removes every object and page of former sessions that neither `table` nor `pages` names: a session that was cut off left
/// them. `table` is as the disk was opened.
pub fn sweep(
    store: &dyn ChunkStore,
    doomed: &Doomed,
    session: u32,
    table: &Table,
    pages: &[Version],
) {
    let mut found: u64 = 0;
    let mut failed = None;
    for prefix in [OBJECTS, PAGES] {
        let mut some = Vec::new();
        let mut remove = |some: &mut Vec<String>| {
            if doomed.is_finishing() || failed.is_some() {
                some.clear();
                return;
            }
            match store.remove(some) {
                Ok(()) => found += some.len() as u64,
                Err(error) => failed = Some(error),
            }
            some.clear();
        };
        let listed = store.list(prefix, &mut |key| {
            let Some((is_object, index, version)) = parse_key(key) else {
                return;
            };
            let named = match is_object {
                true => table.get(index),
                false => pages.get(index as usize).copied().unwrap_or_default(),
            };
            if version.session() < session && version != named {
                some.push(key.to_owned());
            }
            if some.len() == MAX_AT_ONCE {
                remove(&mut some);
            }
        });
        remove(&mut some);
        failed = failed.or(listed.err());
    }
    match failed {
        Some(error) => tracing::info!("{}: cannot tidy up: {error}", store.describe()),
        None if doomed.is_finishing() => {}
        None => {
            doomed.set_unswept(false);
            tracing::info!("{}: {found} unused objects removed", store.describe());
        }
    }
}

/// Reads the pages of a table; the first that is lost or damaged instead.
pub fn read_table(
    store: &dyn ChunkStore,
    id: &[u8; 16],
    versions: &[Version],
) -> Result<Table, OpenError> {
    /// Pages asked for at once.
    const MAX_ASKED: usize = 512;
    let mut pages = vec![None; versions.len()];
    let there: Vec<_> = (0u64..)
        .zip(versions)
        .filter(|(_, version)| version.is_some())
        .collect();
    for some in there.chunks(MAX_ASKED) {
        let wanted: Vec<_> = some
            .iter()
            .map(|(page, version)| Wanted {
                key: super::format::page_key(*page, **version),
                range: 0..super::format::PAGE_LENGTH as u64,
            })
            .collect();
        for ((page, version), bytes) in some.iter().zip(store.get(&wanted)) {
            let lost = |what| OpenError::Lost {
                place: store.describe(),
                what,
            };
            let bytes = bytes?.ok_or_else(|| lost("part of its table is missing"))?;
            let content = super::format::decode_page(id, *page, **version, &bytes);
            let content = content.ok_or_else(|| lost("part of its table is damaged"))?;
            pages[*page as usize] = Some(content);
        }
    }
    Ok(Table::new(pages))
}
