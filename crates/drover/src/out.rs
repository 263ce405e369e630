//! Output: results go to stdout, everything else to stderr.

use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use drover_agent::error::Error;
use rustix::fs::{FileType, fstat};
use serde::Serialize;

/// The reader of stdout closed the pipe. Not reported: the work itself succeeded.
#[derive(Debug)]
pub struct ReaderGone;

impl std::fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stdout was closed")
    }
}

impl std::error::Error for ReaderGone {}

/// Whether the command ended because stdout was closed.
pub fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.is::<ReaderGone>() || matches!(error.downcast_ref(), Some(Error::CallerGone))
}

/// Prints a line to stdout.
///
/// # Errors
/// [`ReaderGone`], or when stdout cannot be written for another reason.
pub fn line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        other => other.context("cannot write to stdout"),
    }
}

/// Whether stdout is a regular file that other users may read, which is no place for a secret.
pub fn is_readable_by_others() -> bool {
    fstat(io::stdout()).is_ok_and(|found| {
        FileType::from_raw_mode(found.st_mode).is_file() && found.st_mode & 0o044 != 0
    })
}

/// Whether stdout is `/dev/null`, as in a service.
pub fn is_null() -> bool {
    let null = std::fs::metadata("/dev/null");
    match (fstat(io::stdout()), null) {
        (Ok(found), Ok(null)) => found.st_rdev == null.rdev() && null.rdev() != 0,
        _ => false,
    }
}

/// Prints one JSON object on a line.
///
/// # Errors
/// As [`line()`].
pub fn json(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string(value)?)
}

/// Prints a line to stderr; errors are ignored.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// A text table with headings; the columns in `numbers` are aligned to the right.
pub fn table(heading: &[&str], rows: Vec<Vec<String>>, numbers: &[usize]) -> String {
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(heading.iter().map(|h| h.to_uppercase()).collect::<Vec<_>>());
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for &column in numbers {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let text = table.to_string();
    text.lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n")
}
