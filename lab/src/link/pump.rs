//! The thread that moves packets in one direction: reads from one device, lets the queue decide, writes to the other.

use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::SyncDevice;

use super::offload::{MAX_READ, wire_size};
use super::queue::{Counters, Queue};

/// While packets are under way the thread wakes this often at most: batches cost less than packets.
const TICK: Duration = Duration::from_micros(200);
/// How long an idle thread sleeps before it looks whether it shall stop.
const IDLE: Duration = Duration::from_millis(50);
/// Packets read in one go before those that are due are written.
const BATCH: usize = 128;

/// What the threads of a link share.
#[derive(Default)]
pub struct Shared {
    /// The threads end.
    pub stop: AtomicBool,
    /// Nothing passes.
    pub cut: AtomicBool,
    /// What each direction has counted, `a` to `b` first.
    pub counters: [Mutex<Counters>; 2],
}

/// Moves packets until told to stop.
pub fn run(
    from: &SyncDevice,
    to: &SyncDevice,
    mut queue: Queue<Box<[u8]>>,
    shared: &Arc<Shared>,
    direction: usize,
) {
    hurry();
    let epoch = Instant::now();
    let now = || epoch.elapsed().as_nanos() as u64;
    // A line shorter than some ticks is timed more finely; one without delay is not batched at all.
    let tick = TICK.min(queue.delay() / 10);
    let mut buffer = vec![0; MAX_READ];
    let mut was_cut = false;
    while !shared.stop.load(Ordering::Relaxed) {
        let cut = shared.cut.load(Ordering::Relaxed);
        if cut && !was_cut {
            queue.cut();
        }
        was_cut = cut;
        let mut read = 0;
        while read < BATCH {
            match from.recv(&mut buffer) {
                Ok(len) => {
                    read += 1;
                    let Some(size) = wire_size(&buffer[..len]) else {
                        continue;
                    };
                    if cut {
                        queue.refuse(size);
                    } else {
                        queue.offer(now(), size, buffer[..len].into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The device is down for a moment, or gone: then the stop flag comes.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(5));
                    break;
                }
            }
        }
        while let Some(packet) = queue.take(now()) {
            // A device that takes nothing drops, as a network card would.
            let _ = to.send(&packet);
        }
        if let Ok(mut counters) = shared.counters[direction].lock() {
            *counters = queue.counters();
        }
        if read == BATCH {
            continue;
        }
        match queue.next_due_ns() {
            Some(_) if !tick.is_zero() && read > 0 => std::thread::sleep(tick),
            Some(due) => {
                let wait = Duration::from_nanos(due.saturating_sub(now()));
                wait_readable(from, wait.max(tick).min(IDLE));
            }
            None => wait_readable(from, IDLE),
        }
    }
}

/// What is measured competes for the same cores, and a real link does not wait for them. Among the kernel's automatic
/// groups a nice value counts for little, so the thread runs in real time where that can be had.
fn hurry() {
    let _ = rustix::process::setpriority_process(None, -15);
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let _ = Command::new("chrt")
        .args(["--rr", "--pid", "1", &thread])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

fn wait_readable(device: &SyncDevice, timeout: Duration) {
    let timeout = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    let mut fds = [PollFd::new(device, PollFlags::IN)];
    // A failed or interrupted wait is a short one.
    let _ = poll(&mut fds, Some(&timeout));
}
