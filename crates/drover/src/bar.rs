//! A progress bar, hidden when stderr is not a terminal.

use drover_agent::text::clean;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The progress of a long operation on a file, on stderr.
#[derive(Debug, Clone)]
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar labelled `label`; hidden if `quiet`.
    pub fn new(label: &str, quiet: bool) -> Bar {
        let style =
            "{prefix} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
        Bar::styled(label, style, quiet)
    }

    /// One that counts files.
    pub fn of_files(label: &str, quiet: bool) -> Bar {
        Bar::counting(label, "files", quiet)
    }

    /// One that counts what is called so.
    pub fn counting(label: &str, what: &str, quiet: bool) -> Bar {
        let style = format!("{{prefix}} {{wide_bar}} {{pos}}/{{len}} {what} {{eta}}");
        Bar::styled(label, &style, quiet)
    }

    fn styled(label: &str, style: &str, quiet: bool) -> Bar {
        let target = if quiet {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        bar.set_style(
            ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar.set_prefix(clean(label));
        Bar(bar)
    }

    /// Sets the position to `done` of `total`.
    pub fn at(&self, done: u64, total: u64) {
        if total > 0 {
            self.0.set_length(total);
            self.0.set_position(done);
        }
    }

    /// Removes the bar.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}
