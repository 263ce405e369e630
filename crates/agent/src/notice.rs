//! Notices on stderr, for events that the user should see although nothing failed.

use std::io::Write;

/// Prints a notice; a closed stderr is ignored.
pub(crate) fn notice(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "drover: {text}");
}
