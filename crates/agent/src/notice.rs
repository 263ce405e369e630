//! Notices, for events that the user should see although nothing failed: on stderr, and, while a mount daemon starts, to the
//! command that started it.

use std::io::Write;

use parking_lot::Mutex;

static STARTER: Mutex<Option<fn(&str)>> = Mutex::new(None);

/// Prints a notice; a closed stderr is ignored.
pub(crate) fn notice(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "drover: {text}");
    let starter = *STARTER.lock();
    if let Some(tell) = starter {
        tell(text);
    }
}

/// Notices of this process also go to whoever started it, until this is called without a way to do so.
pub(crate) fn tell_starter(tell: Option<fn(&str)>) {
    *STARTER.lock() = tell;
}
