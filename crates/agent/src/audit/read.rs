//! Reads the audit log: all its files, the oldest first, and on as lines are added.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use jiff::Timestamp;

use super::log::{Log, MAX_LINE_BYTES, OLD_FILES, identity};
use super::record::{Outcome, Record};
use crate::text::{clean, parse_duration};

/// Which events are wanted; all without any condition.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Those since then.
    pub since: Option<Timestamp>,
    /// Those of the peer of this name, or whose key begins with this.
    pub peer: Option<String>,
    /// Those about the image of this name.
    pub image: Option<String>,
    /// Those that were refused.
    pub refused: bool,
}

impl Filter {
    /// Whether an event is wanted.
    #[must_use]
    pub fn wants(&self, record: &Record) -> bool {
        let since = |since: &Timestamp| record.when().is_some_and(|when| when >= *since);
        let peer = |peer: &String| {
            record.peer.as_ref() == Some(peer)
                || record
                    .key
                    .is_some_and(|key| peer.len() >= 8 && key.to_string().starts_with(peer))
        };
        self.since.as_ref().is_none_or(since)
            && self.peer.as_ref().is_none_or(peer)
            && (self.image.is_none() || self.image == record.image)
            && (!self.refused || record.outcome == Outcome::Refused)
    }
}

/// Parses the beginning of a period: a time before now, such as `1h`, or a moment, such as `2026-11-23T18:00:00Z`.
///
/// # Errors
/// A message for the user.
pub fn since(text: &str) -> Result<Timestamp, String> {
    let ago = parse_duration(text).map(|ago| Timestamp::now().checked_sub(ago));
    match (ago, text.parse()) {
        (Ok(Ok(since)), _) | (_, Ok(since)) => Ok(since),
        _ => Err(format!(
            "{:?} is neither a duration, such as 90s, 1h30m or 7d, nor a moment, such as 2026-11-23T18:00:00Z",
            clean(text)
        )),
    }
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The event.
    pub record: Record,
    /// The line as it is in the file, without the newline.
    pub line: String,
}

/// The events of the log, the oldest first. Lines that are no events are skipped and counted.
#[derive(Debug)]
pub struct Lines {
    log: Log,
    /// The file that is read, and newer ones.
    files: VecDeque<BufReader<File>>,
    /// The beginning of a line whose end is not written yet.
    begun: Vec<u8>,
    /// The rest of the line is skipped: it is too long for an event.
    skips: bool,
    damaged: u64,
}

impl Lines {
    /// Opens the log, which need not exist yet.
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub(super) fn of(log: Log) -> io::Result<Lines> {
        Ok(Lines {
            files: files_after(&log, None)?,
            log,
            begun: Vec::new(),
            skips: false,
            damaged: 0,
        })
    }

    /// The next event that has been written; `None` when there is none yet: it can be called again.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        loop {
            if self.has_line()? {
                if let Some(entry) = self.entry() {
                    return Ok(Some(entry));
                }
            } else if self.files.len() > 1 {
                self.files.pop_front();
                self.damaged += u64::from(!self.begun.is_empty());
                self.begun.clear();
                self.skips = false;
            } else {
                let last = self.files.front().map(|file| file.get_ref().metadata());
                let last = last.transpose()?.map(|about| identity(&about));
                let newer = files_after(&self.log, last)?;
                if newer.is_empty() {
                    return Ok(None);
                }
                // Then the end of this one is read again: lines were added before it was renamed.
                self.files.extend(newer);
            }
        }
    }

    /// Lines so far that are no events: written in part when the disk was full or a process was killed, or changed by
    /// hand.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Reads on in the first file; whether `begun` is a complete line now.
    fn has_line(&mut self) -> io::Result<bool> {
        let Some(file) = self.files.front_mut() else {
            return Ok(false);
        };
        loop {
            let room = (MAX_LINE_BYTES - self.begun.len()) as u64;
            let read = file.take(room).read_until(b'\n', &mut self.begun)?;
            let complete = self.begun.last() == Some(&b'\n');
            if self.skips {
                self.begun.clear();
                self.skips = !complete;
            } else if complete {
                return Ok(true);
            } else if self.begun.len() == MAX_LINE_BYTES {
                self.damaged += 1;
                self.begun.clear();
                self.skips = true;
            }
            if read == 0 {
                return Ok(false);
            }
        }
    }

    /// The event of the line in `begun`, which is empty afterwards.
    fn entry(&mut self) -> Option<Entry> {
        let line = std::mem::take(&mut self.begun);
        let line = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
        if line.is_empty() {
            return None;
        }
        match serde_json::from_str(&line) {
            Ok(record) => Some(Entry { record, line }),
            Err(_) => {
                self.damaged += 1;
                None
            }
        }
    }
}

/// The files of the log after the one with this identity, the oldest first; all of them if it is no longer there.
fn files_after(log: &Log, last: Option<(u64, u64)>) -> io::Result<VecDeque<BufReader<File>>> {
    let mut files = VecDeque::new();
    let mut seen = Vec::new();
    // The newest first: one that is renamed meanwhile is seen twice, and none is missed.
    for age in 0..=OLD_FILES {
        let file = match File::open(log.old(age)) {
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            file => file?,
        };
        let identity = identity(&file.metadata()?);
        if last == Some(identity) {
            break;
        }
        if !seen.contains(&identity) {
            seen.push(identity);
            files.push_front(BufReader::new(file));
        }
    }
    Ok(files)
}
