//! What a machine will probably read next comes next: parts of a launched image in an order, ahead of all that nobody waits
//! for.
//!
//! Blocks that are announced, and that the source is to send, are sent earlier than otherwise. Those that are not announced yet are
//! asked for only if the site has no other image: it may have them, and the announcement tells.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use drover_image::guest::boot_ranges;

use super::device::LaunchDevice;

/// Bytes of the disk that are asked for together.
const PART: u64 = 128 << 10;

/// Parts that are looked at in one turn, which bounds the time that it takes.
const MAX_LOOKED: usize = 512;

/// Upper bound on the parts that are asked for and have not come, and how many it is at first.
const MAX_WINDOW: usize = 32;
const FIRST_WINDOW: usize = 4;

/// A part takes so long from when it is asked for: if it takes longer, fewer are asked for, so that a reader who waits
/// meanwhile need not wait for them.
const SLOW: Duration = Duration::from_millis(250);

/// Shortest and longest pause between turns.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Upper bound on the rounds in which what a machine boots from is looked up.
const MAX_ROUNDS: usize = 1000;

/// Has what a machine boots from sent first, as far as the disk itself says what that is: the partition table, the boot
/// loader, and by the metadata of its file systems the kernel and the initial RAM disk. Ends when that is here, or nobody uses the
/// device.
pub async fn boot(device: Weak<LaunchDevice>) {
    for _ in 0..MAX_ROUNDS {
        let Some(open) = device.upgrade() else {
            return;
        };
        let look = move || {
            let (ranges, missed) = open.looked(|disk| boot_ranges(disk));
            let is_delivered = open.launch().is_delivered();
            (ranges, missed, is_delivered)
        };
        let Ok((ranges, missed, is_delivered)) = tokio::task::spawn_blocking(look).await else {
            return;
        };
        if missed.is_empty() || is_delivered {
            return follow(device, ranges).await;
        }
        // The way to it is short, and each step of it depends on the one before.
        loop {
            // Only as long as the device itself is in use: what waits here must not keep the launch, for which
            // others like it may wait as well.
            let Some(open) = device.upgrade() else {
                return;
            };
            let launch = open.launch().clone();
            drop(open);
            let here =
                launch.until_here(false, || async { launch.lacking(missed.iter().copied()) });
            if tokio::time::timeout(PAUSES.1, here).await.is_ok() {
                break;
            }
        }
    }
}

/// A part of the disk that is not here.
struct Part {
    range: Range<u64>,
    /// The blocks that reading it has missed first.
    missed: Vec<u64>,
    asked: Option<Instant>,
}

/// What is to come.
struct Order {
    parts: Vec<Part>,
    window: usize,
}

/// Has the parts of a disk sent in this order, until they are here or nobody uses the device.
pub async fn follow(device: Weak<LaunchDevice>, order: Vec<Range<u64>>) {
    let parts = order.into_iter().flat_map(|range| {
        let end = range.end;
        let starts = range.step_by(PART as usize);
        starts.map(move |start| Part {
            range: start..(start + PART).min(end),
            missed: Vec::new(),
            asked: None,
        })
    });
    let mut order = Order {
        parts: parts.collect(),
        window: FIRST_WINDOW,
    };
    loop {
        let Some(open) = device
            .upgrade()
            .filter(|open| !open.launch().is_delivered())
        else {
            return;
        };
        let changes = open.launch().changes();
        let changed = changes.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let turn = tokio::task::spawn_blocking(move || {
            order.turn(&open);
            order
        });
        match turn.await {
            Ok(turned) if !turned.parts.is_empty() => order = turned,
            _ => return,
        }
        tokio::time::sleep(PAUSES.0).await;
        let _ = tokio::time::timeout(PAUSES.1, changed).await;
    }
}

impl Order {
    /// Drops what is here, and asks for what comes next.
    fn turn(&mut self, device: &Arc<LaunchDevice>) {
        let launch = device.launch();
        let is_waited_for = launch.has_readers();
        let mut looked = 0;
        let (mut coming, mut window) = (0, self.window);
        self.parts.retain_mut(|part| {
            looked += 1;
            if looked > MAX_LOOKED {
                return true;
            }
            let mut lacking = launch.lacking(part.missed.iter().copied());
            if lacking.is_empty() {
                let length = part.range.end - part.range.start;
                lacking = device.lacking(part.range.start, length);
                part.missed.clone_from(&lacking);
            }
            if lacking.is_empty() {
                if let Some(asked) = part.asked {
                    window = match asked.elapsed() > SLOW {
                        true => (window / 2).max(1),
                        false => (window + 1).min(MAX_WINDOW),
                    };
                }
                return false;
            }
            launch.keep_announced(&mut lacking);
            if lacking.is_empty() || is_waited_for || coming >= window {
                return true;
            }
            coming += 1;
            if part.asked.is_none_or(|asked| asked.elapsed() > SLOW * 4) {
                launch.forget(&lacking);
            }
            part.asked.get_or_insert_with(Instant::now);
            launch.ask(&lacking);
            true
        });
        self.window = window;
    }
}
