//! The bars of a flock on a terminal: one for each image, and one for all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drover_agent::text::{bytes, clean, count};
use drover_teleport::progress::WireTotals;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How many bars of images that have ended stay.
const MAX_ENDED: usize = 16;

/// The bars.
pub struct Bars {
    all: MultiProgress,
    sum: ProgressBar,
    wire: Arc<WireTotals>,
    images: Mutex<HashMap<String, ProgressBar>>,
    of: usize,
}

impl Bars {
    /// Bars for that many images, together of so many bytes.
    pub fn new(name: &str, images: usize, total: u64, wire: Arc<WireTotals>) -> Arc<Bars> {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let sum = all.add(ProgressBar::new(total));
        sum.set_style(style());
        sum.set_prefix(clean(name));
        Arc::new(Bars {
            all,
            sum,
            wire,
            images: Mutex::default(),
            of: images,
        })
    }

    /// Shows an image's progress in bytes.
    pub fn at(&self, name: &str, done: u64, total: u64, message: String) {
        let bar = self.bar(name);
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(message);
        self.show_sum();
    }

    /// Shows that an image has ended.
    pub fn ended(&self, name: &str, message: &'static str) {
        let bar = self.bar(name);
        bar.set_position(bar.length().unwrap_or(0));
        match self.of <= MAX_ENDED {
            true => bar.finish_with_message(message),
            false => bar.finish_and_clear(),
        }
        self.show_sum();
    }

    fn bar(&self, name: &str) -> ProgressBar {
        let mut images = self.images();
        let new = || {
            let bar = self.all.insert_before(&self.sum, ProgressBar::new(0));
            bar.set_style(style());
            bar.set_prefix(clean(name));
            bar
        };
        images.entry(name.to_owned()).or_insert_with(new).clone()
    }

    fn images(&self) -> MutexGuard<'_, HashMap<String, ProgressBar>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show_sum(&self) {
        let images = self.images();
        let done: u64 = images.values().map(ProgressBar::position).sum();
        let ended = images.values().filter(|bar| bar.is_finished()).count();
        self.sum
            .set_position(done.min(self.sum.length().unwrap_or(done)));
        self.sum.set_message(format!(
            "{ended} of {}, sent {}",
            count(self.of, "image"),
            bytes(self.wire.sent())
        ));
    }

    /// Prints while the bars are away.
    pub fn suspend(&self, print: impl FnOnce()) {
        self.all.suspend(print);
    }

    /// Removes the bars.
    pub fn clear(&self) {
        // Fails when there is no terminal any more.
        let _ = self.all.clear();
    }
}

fn style() -> ProgressStyle {
    let template = "{prefix} {bar:16} {percent:>3}% {wide_msg}";
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
