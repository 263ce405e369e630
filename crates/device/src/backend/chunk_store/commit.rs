//! Commits: the header is written, by a conditional write, and names everything else that is there from then on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use drover_core::DeviceError;

use super::format::{self, HEADER, Header, MAX_HEADER, Version};
use super::head::{Outcome, Seen, another, look_for, write_header};
use super::inner::{Committed, Inner};
use super::store::Tag;
use super::table::Changes;
use crate::remote::Epoch;

impl Inner {
    fn lose(&self, error: DeviceError) -> DeviceError {
        if self.gone.set(error.clone()).is_ok() {
            tracing::error!("{error}");
        }
        self.changed.notify_all();
        error
    }

    /// An error of a read, in the light of what the header says now. A commit that is under way is not waited for.
    pub(super) fn explain(&self, error: DeviceError) -> DeviceError {
        if !matches!(error, DeviceError::Corrupt(_)) {
            return error;
        }
        let ours = Arc::clone(&self.own.lock().header);
        let now = match self.store.look(HEADER, MAX_HEADER) {
            Ok(now) => now.map(|(bytes, _)| bytes),
            Err(_) => return error,
        };
        let decoded = now.as_deref().and_then(|now| Header::decode(now).ok());
        match decoded {
            Some(now) if self.own.lock().has(&now) && now.commits >= ours.commits => error,
            Some(now) if self.is_read_only() && now.id == ours.id && now.session > ours.session => {
                let text = format!(
                    "{}: another mount has written to the disk since it was opened here for reading: open it again",
                    self.store.describe()
                );
                self.lose(DeviceError::Io(Arc::new(std::io::Error::other(text))))
            }
            _ => self.lose(another(&*self.store, &ours, now.as_deref())),
        }
    }

    /// Whether the header is one of this process, as long as it has the lease. A commit that is under way is not waited for.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.alive()?;
        let ours = Arc::clone(&self.own.lock().header);
        let now = self.store.look(HEADER, MAX_HEADER)?.map(|(bytes, _)| bytes);
        if self.is_read_only() || self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let decoded = now.as_deref().and_then(|now| Header::decode(now).ok());
        match decoded {
            Some(now) if self.own.lock().has(&now) && now.commits >= ours.commits => Ok(()),
            _ => Err(self.lose(another(&*self.store, &ours, now.as_deref()))),
        }
    }

    /// Whether the store answers.
    pub(super) fn reach(&self) -> Result<(), DeviceError> {
        self.store.look(HEADER, MAX_HEADER).map(drop)
    }

    /// Finds out whether a header was written of which that is not known.
    fn resolve(&self, committed: &mut Committed) -> Result<(), DeviceError> {
        let Some((header, changes, pages)) = committed.unsure.take() else {
            return Ok(());
        };
        let bytes = header.encode();
        match look_for(
            &*self.store,
            &committed.tag,
            &committed.header,
            &bytes,
            Some(&self.own),
        ) {
            Ok(Seen::New(tag)) => self.is_committed(committed, header, tag, &changes),
            Ok(seen) => {
                if let Seen::Late(tag) = seen {
                    committed.tag = tag;
                }
                committed.stale.extend(pages);
                self.state.lock().table.put_back(changes);
            }
            Err(Outcome::Refused(error)) => return Err(self.lose(error)),
            Err(Outcome::Unsure(error)) => {
                committed.unsure = Some((header, changes, pages));
                return Err(error);
            }
            // Not said by it.
            Err(Outcome::Written(_)) => {}
        }
        Ok(())
    }

    /// The header was written: what it does not name any more can go.
    fn is_committed(&self, committed: &mut Committed, header: Header, tag: Tag, changes: &Changes) {
        self.own.lock().header = Arc::new(header.clone());
        let was = std::mem::replace(&mut committed.header, header);
        let pages = (0..).zip(was.pages.iter().zip(&committed.header.pages));
        let pages = pages.filter(|(_, (was, now))| was != now && was.is_some());
        let pages: Vec<_> = pages.map(|(page, (was, _))| (page, *was)).collect();
        (committed.tag, committed.is_unsettled) = (tag, true);
        let objects = changes
            .replaced()
            .map(|(index, version)| format::object_key(index, version));
        self.doomed.add(objects);
        let stale = std::mem::take(&mut committed.stale);
        self.doomed
            .add(pages.into_iter().chain(stale).map(page_key));
    }

    /// Makes all that was written before durable, as far as the store does that, and visible; as this epoch, if it is one.
    pub(super) fn commit(&self, epoch: Option<Epoch>) -> Result<(), DeviceError> {
        let mut committed = self.committed.lock();
        self.alive()?;
        self.resolve(&mut committed)?;
        if epoch.is_some_and(|epoch| epoch.0 == committed.header.epoch) {
            // It was tried before, and perhaps was not made durable.
            return self.settle(&mut committed);
        }
        self.write_back_all().map_err(|error| self.explain(error))?;
        if let Some(error) = self.lost().filter(|_| epoch.is_some()) {
            return Err(self.explain(error));
        }
        self.commit_table(&mut committed, epoch, |_| {})?;
        self.settle(&mut committed)?;
        // The rest is there.
        match self.lost() {
            Some(error) => Err(self.explain(error)),
            None => Ok(()),
        }
    }

    /// Why something that was written is lost.
    pub(super) fn lost(&self) -> Option<DeviceError> {
        self.state.lock().lost.clone()
    }

    /// Whether the header is that of an epoch.
    pub(super) fn has_epoch(&self, epoch: Epoch) -> Result<bool, DeviceError> {
        let mut committed = self.committed.lock();
        self.alive()?;
        self.resolve(&mut committed)?;
        Ok(committed.header.epoch == epoch.0)
    }

    fn settle(&self, committed: &mut Committed) -> Result<(), DeviceError> {
        if committed.is_unsettled {
            self.store.settle()?;
            committed.is_unsettled = false;
        }
        let epoch = committed.header.epoch;
        self.settled.store(epoch, Ordering::Release);
        Ok(())
    }

    /// Writes the pages that have changed, and a header, if something has changed or `change` changes it.
    fn commit_table(
        &self,
        committed: &mut Committed,
        epoch: Option<Epoch>,
        change: impl Fn(&mut Header),
    ) -> Result<(), DeviceError> {
        let mut header = committed.header.clone();
        let nonce = format::random()?;
        if let Some(epoch) = epoch {
            header.epoch = epoch.0;
        }
        change(&mut header);
        let (changes, versions) = {
            let mut state = self.state.lock();
            if !state.table.is_changed() && header == committed.header {
                return Ok(());
            }
            if epoch.is_none() && state.table.is_changed() {
                // For caches of a managed device: this is none of theirs.
                header.epoch = Epoch(header.epoch).after(fastrand::u32(..)).0;
            }
            let changes = state.table.take();
            let versions = changes.pages.iter().map(|(_, content)| match content {
                Some(_) => state.version(header.session),
                None => Ok(Version::NONE),
            });
            match versions.collect::<Result<Vec<_>, _>>() {
                Ok(versions) => (changes, versions),
                Err(error) => {
                    state.table.put_back(changes);
                    return Err(error);
                }
            }
        };
        header.nonce = nonce;
        let mut values = Vec::new();
        let mut pages = Vec::new();
        for ((page, content), version) in changes.pages.iter().zip(versions) {
            if let Some(content) = content {
                let bytes = format::encode_page(&header.id, *page, version, content);
                values.push((format::page_key(*page, version), bytes));
                pages.push((*page, version));
            }
            if let Some(now) = header.pages.get_mut(*page as usize) {
                *now = version;
            }
        }
        if let Err(error) = self.put_pages(values) {
            committed.stale.extend(pages);
            // One that arrives after it was removed.
            self.doomed.set_untidy();
            self.state.lock().table.put_back(changes);
            return Err(error);
        }
        header.commits = header.commits.saturating_add(1);
        self.own.lock().note(&header);
        match write_header(
            &*self.store,
            &committed.tag,
            &committed.header,
            &header,
            Some(&self.own),
        ) {
            Outcome::Written(tag) => {
                self.is_committed(committed, header, tag, &changes);
                Ok(())
            }
            Outcome::Refused(error) => Err(self.lose(error)),
            Outcome::Unsure(error) => {
                committed.unsure = Some((header, changes, pages));
                Err(error)
            }
        }
    }

    fn put_pages(&self, mut values: Vec<(String, Bytes)>) -> Result<(), DeviceError> {
        /// Pages that are sent at once.
        const MAX_PAGES_AT_ONCE: usize = 512;
        while !values.is_empty() {
            let rest = values.split_off(values.len().min(MAX_PAGES_AT_ONCE));
            for done in self.store.put(std::mem::replace(&mut values, rest)) {
                done?;
            }
        }
        Ok(())
    }

    /// Gives the lease back, after the last commit and when its threads have ended.
    pub(super) fn release(&self) -> Result<(), DeviceError> {
        let mut committed = self.committed.lock();
        self.alive()?;
        self.resolve(&mut committed)?;
        let is_clean = self.doomed.is_tidy()
            && committed.stale.is_empty()
            && self.state.lock().table.is_tidy();
        self.commit_table(&mut committed, None, |header| {
            header.holder = None;
            header.is_clean = is_clean;
        })?;
        self.settle(&mut committed)
    }

    /// Returns to what was committed last.
    pub(super) fn revert(&self) -> Result<(), DeviceError> {
        let mut committed = self.committed.lock();
        self.alive()?;
        self.resolve(&mut committed)?;
        let mut state = self.state.lock();
        while state.buffer.any_busy() {
            self.changed.wait(&mut state);
        }
        state.revert();
        drop(state);
        self.changed.notify_all();
        Ok(())
    }
}

fn page_key((page, version): (u64, Version)) -> String {
    format::page_key(page, version)
}
