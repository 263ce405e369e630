//! The audit log: who was let in, what they did to which image, and what they were refused.
//!
//! One JSON object per line in `audit.log` of the site's directory, for all its domains (`docs/format/audit.md`). Every
//! process of the site writes to it: the running site, and commands of its own user. Nothing waits for it: a line that
//! cannot be written is counted.
//!
//! - `record`: the events and their fields; `log`: the files; `limit`: how many lines a peer may cause; `read`: reading
//!   them back.

mod limit;
mod log;
mod read;
mod record;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;

use limit::Limits;
use log::Log;

pub use jiff::Timestamp;
pub use log::{MAX_FILE_BYTES, MAX_LINE_BYTES, OLD_FILES};
pub use read::{Entry, Filter, Lines, since};
pub use record::{Audited, By, Event, Migration, Outcome, Record, grant_text};

/// The audit log of a site, as this process writes to it.
#[derive(Debug)]
pub struct Audit {
    log: Log,
    limits: Mutex<Limits>,
    failed: AtomicU64,
}

impl Audit {
    /// The log of the site in this directory; nothing is created before the first event.
    #[must_use]
    pub fn new(dir: &Path) -> Arc<Audit> {
        Arc::new(Audit {
            log: Log::new(dir),
            limits: Mutex::default(),
            failed: AtomicU64::new(0),
        })
    }

    /// Reads the log.
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub fn lines(&self) -> std::io::Result<Lines> {
        Lines::of(self.log.clone())
    }

    /// Writes an event. Blocks on the disk, for about as long as one write to a file takes.
    pub fn write(&self, record: Record) {
        let line = record.line(Timestamp::now());
        let Err(e) = self.log.append(&line) else {
            return;
        };
        if self.failed.fetch_add(1, Relaxed) == 0 {
            let path = self.log.path().display();
            tracing::warn!(
                "cannot write to {path}: {e}: events are missing in the audit log until that is mended"
            );
        }
    }

    /// Writes an event that a peer can cause as often as it likes: only the first of a minute, and later how many more
    /// there were. Blocks as [`Audit::write`].
    pub fn write_limited(&self, record: Record) {
        let due = self.limits.lock().admit(record, Instant::now());
        due.into_iter().for_each(|record| self.write(record));
    }

    /// Writes how many events were only counted, of those whose minute is over. To be called now and then; blocks as
    /// [`Audit::write`].
    pub fn write_counts(&self) {
        let due = self.limits.lock().take(Some(Instant::now()));
        due.into_iter().for_each(|record| self.write(record));
    }

    /// The same for all, when the site stops.
    pub fn write_all_counts(&self) {
        let due = self.limits.lock().take(None);
        due.into_iter().for_each(|record| self.write(record));
    }

    /// Writes what a request of the site's own user did, in a process that is not the running site.
    pub fn done<R: Audited>(&self, domain: &str, request: &R, reply: &R::Reply) {
        if let Some(record) = request.told(Some(reply)) {
            self.write(record.in_domain(domain));
        }
    }

    /// Lines that could not be written since this process started.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }
}

#[cfg(test)]
mod tests;
