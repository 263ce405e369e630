//! What a machine will probably read next comes next: parts of a launched image in an order, ahead of all that nobody waits
//! for.
//!
//! The order is that of the image's profile, which the source has sent along, then what the disk itself says that a machine
//! boots from. Blocks that are announced, and that the source is to send, are sent earlier than otherwise. Those that are not announced yet are
//! asked for only if the site has no other image: it may have them, and the announcement tells.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use drover_core::BlockDevice;
use drover_image::guest::boot_ranges;
use drover_net::Code;
use drover_store::profile::Profile;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::Launch;
use super::device::LaunchDevice;
use super::sessions::Readers;
use crate::TeleportError;

/// Bytes of the disk that are asked for together.
const PART: u64 = 128 << 10;

/// Parts that are looked at in one turn, which bounds the time that it takes.
const MAX_LOOKED: usize = 512;

/// Bounds on the blocks that are asked for and have not come, and how many it is at first.
const MAX_WINDOW: usize = 1024;
const MIN_WINDOW: usize = 32;
const FIRST_WINDOW: usize = 128;

/// A part takes so long from when it is asked for: if it takes longer, fewer are asked for, so that a reader who waits
/// meanwhile need not wait for them.
const SLOW: Duration = Duration::from_millis(250);

/// Where no machine waits, blocks that are not announced are asked for when no more have been for so long: what comes ahead of
/// its batch has the whole file compared.
const STALLED: Duration = Duration::from_secs(1);

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

/// Has the blocks of a profile sent first, from now on until they are here or this is dropped: for an image that is being
/// received, whether a machine runs from it or not.
pub(crate) struct SendsFirst(AbortHandle);

impl Drop for SendsFirst {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Begins with that. Must be called within a runtime.
pub(crate) fn send_first(launch: Launch, profile: Profile) -> SendsFirst {
    let launch = Arc::new(launch.only_orders());
    let task = tokio::spawn(async move {
        let _first = First::of(&launch);
        // The tables of a container may be a while in coming.
        let device = loop {
            let opened = Arc::clone(&launch);
            let open = tokio::task::spawn_blocking(move || LaunchDevice::open(&opened));
            match open.await {
                Ok(Ok(device)) => break Arc::new(device),
                Ok(Err(TeleportError::Refused(refusal))) if refusal.code == Code::Unavailable => {}
                Ok(Err(e)) => {
                    let image = launch.name().as_str();
                    tracing::debug!(image, error = %e, "its profile cannot be followed");
                    return;
                }
                Err(_) => return,
            }
        };
        let order = profile.order(device.size());
        drop(profile);
        follow(Arc::downgrade(&device), order).await;
    });
    SendsFirst(task.abort_handle())
}

/// The blocks of an image come in the order of a profile, until it is dropped.
struct First(Arc<Mutex<Readers>>);

impl First {
    fn of(launch: &Launch) -> Self {
        launch.readers.lock().profiles += 1;
        First(Arc::clone(&launch.readers))
    }
}

impl Drop for First {
    fn drop(&mut self) {
        self.0.lock().profiles -= 1;
    }
}

/// A part of the disk that is not here.
struct Part {
    range: Range<u64>,
    /// The blocks that reading it has missed first.
    missed: Vec<u64>,
    asked: Option<Instant>,
    /// When it was last asked for.
    again: Option<Instant>,
    /// How many were asked for.
    blocks: usize,
}

/// What is to come.
struct Order {
    parts: Vec<Part>,
    /// How many blocks may be on their way.
    window: usize,
    /// How many blocks are announced, since when.
    announced: (u64, Instant),
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
            again: None,
            blocks: 0,
        })
    });
    let mut order = Order {
        parts: parts.collect(),
        window: FIRST_WINDOW,
        announced: (0, Instant::now()),
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
    /// The blocks before this one may be asked for.
    fn askable(&mut self, launch: &Launch) -> u64 {
        let announced = launch.announced();
        if announced != self.announced.0 {
            self.announced = (announced, Instant::now());
        }
        let is_stalled = self.announced.1.elapsed() > STALLED;
        match launch.nothing_else && (is_stalled || !launch.only_orders) {
            true => u64::MAX,
            false => announced,
        }
    }

    /// Drops what is here, and asks for what comes next.
    fn turn(&mut self, device: &Arc<LaunchDevice>) {
        let launch = device.launch();
        let (gives_way, askable) = (launch.gives_way(), self.askable(launch));
        let window = self.window;
        let (mut looked, mut coming) = (0, 0);
        let (mut came, mut is_slow) = (0, false);
        self.parts.retain_mut(|part| {
            // What is known to be announced later costs nothing to pass by.
            let is_later = part.missed.first().is_some_and(|block| *block >= askable);
            if is_later || looked >= MAX_LOOKED {
                return true;
            }
            looked += 1;
            let mut lacking = launch.lacking(part.missed.iter().copied());
            if lacking.is_empty() {
                let length = part.range.end - part.range.start;
                lacking = device.lacking(part.range.start, length);
                part.missed.clone_from(&lacking);
            }
            if lacking.is_empty() {
                if let Some(asked) = part.asked {
                    came += part.blocks;
                    is_slow |= asked.elapsed() > SLOW;
                }
                return false;
            }
            lacking.retain(|block| *block < askable);
            if lacking.is_empty() || gives_way || coming >= window {
                return true;
            }
            coming += lacking.len();
            if part.again.is_none_or(|again| again.elapsed() > SLOW * 4) {
                launch.forget(&lacking);
                part.again = Some(Instant::now());
            }
            part.asked.get_or_insert_with(Instant::now);
            part.blocks = part.blocks.max(lacking.len());
            launch.ask(&lacking, 1, false);
            true
        });
        self.window = match is_slow {
            true => (window / 2).max(MIN_WINDOW),
            false => (window + came).min(MAX_WINDOW),
        };
    }
}
