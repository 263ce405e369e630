//! Sends raw images in order through a matcher with an empty index, carries out every plan and compares each block:
//!
//! ```text
//! cargo run --release -p drover-index --example library -- IMAGE...
//! ```
//!
//! For each image and for all: its blocks, which of them are heads, what exact deduplication with unbounded memory
//! matches, what of that the matcher loses, pages read for a hundred blocks, and processor time.
//! Strong heads are found by a table that `scripts/derive-magic` made from Debian bookworm and trixie: what is said of head
//! recognition is measured on images of other systems (`bullseye-plain` of the lab's library).

mod images;

use std::time::Duration;

use drover_core::Head;
use drover_index::testing::{Destination, ExactDedup};
use drover_index::{ImageId, Matcher, MatcherConfig};
use drover_storage::HostDirectory;
use images::{Result, percent};
use rustix::time::{ClockId, clock_gettime};

#[derive(Clone, Copy, Default)]
struct Sum {
    blocks: u64,
    strong: u64,
    weak: u64,
    exact: u64,
    matched: u64,
    pages: u64,
    seconds: f64,
}

fn main() -> Result<()> {
    let paths: Vec<_> = std::env::args_os().skip(1).map(Into::into).collect();
    let images = images::all(&paths)?;
    let dir = tempfile::tempdir()?;
    let (mut matcher, _) =
        Matcher::open(HostDirectory::open(dir.path())?, MatcherConfig::default())?;
    let (mut destination, mut known) = (Destination::new(), ExactDedup::new());
    let mut all = Sum::default();
    println!(
        "{:<24} {:>9} {:>8} {:>8} {:>9} {:>9} {:>7} {:>9} {:>7}",
        "image", "blocks", "strong %", "weak %", "exact", "matched", "lost %", "reads/100", "CPU s"
    );
    for (id, image) in (0..).map(ImageId).zip(&images) {
        let before = matcher.stats();
        let count = |head| image.heads.iter().filter(|h| **h == head).count() as u64;
        let mut sum = Sum {
            blocks: image.digests.len() as u64,
            strong: count(Head::Strong),
            weak: count(Head::Weak),
            exact: image.digests.iter().filter(|d| known.seen(d)).count() as u64,
            ..Sum::default()
        };
        let mut spent = Duration::ZERO;
        let mut cursor = matcher.begin(id)?;
        for (digests, heads) in image.batches() {
            let start = cpu_time();
            let plan = matcher.batch(&mut cursor, digests, heads)?;
            spent += cpu_time() - start;
            let applied = destination
                .apply(id, digests, &plan)
                .map_err(|why| format!("{}: no plan: {why}", image.name))?;
            assert_eq!(applied.refetched, 0, "{}: planned wrong", image.name);
        }
        matcher.finish(cursor)?;
        let after = matcher.stats();
        sum.matched = after.matched - before.matched;
        sum.pages = after.pages_read - before.pages_read;
        sum.seconds = spent.as_secs_f64();
        print(&image.name, &sum);
        all = Sum {
            blocks: all.blocks + sum.blocks,
            strong: all.strong + sum.strong,
            weak: all.weak + sum.weak,
            exact: all.exact + sum.exact,
            matched: all.matched + sum.matched,
            pages: all.pages + sum.pages,
            seconds: all.seconds + sum.seconds,
        };
    }
    print("all", &all);
    Ok(())
}

fn print(name: &str, sum: &Sum) {
    println!(
        "{name:<24} {:>9} {:>8.2} {:>8.2} {:>9} {:>9} {:>7.2} {:>9.2} {:>7.2}",
        sum.blocks,
        percent(sum.strong, sum.blocks),
        percent(sum.weak, sum.blocks),
        sum.exact,
        sum.matched,
        100.0 - percent(sum.matched, sum.exact),
        percent(sum.pages, sum.blocks),
        sum.seconds
    );
}

/// Time that this thread has spent on a processor: what other programs do meanwhile does not count.
fn cpu_time() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}
