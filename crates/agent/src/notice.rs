//! What whoever reads the process's stderr is to hear though nothing failed.

use std::io::Write;

/// Says it; a stderr that is gone is no reason to stop.
pub(crate) fn notice(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "drover: {text}");
}
