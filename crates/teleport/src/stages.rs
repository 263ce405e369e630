//! Time per stage of a transfer's pipeline, at both ends.
//!
//! A stage is work that some thread or task repeats: reading a batch, digesting it, writing a frame to its socket.
//! Its time is *busy* while it works (including waits for a disk), *waiting* while its input queue is empty or its
//! output queue is full, and *at the socket* while the peer sends nothing or accepts nothing. A thread with several
//! stages counts waits for input in its first and waits for output in its last. Several threads of one stage add up.
//!
//! The clock is read once per megabyte or frame, never per block. The roles' state machines are not involved.

use std::pin::pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Origin of the stages' timestamps.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A stage that is being timed.
#[derive(Debug, Default)]
pub struct Stage {
    busy_ns: AtomicU64,
    wait_ns: AtomicU64,
    socket_ns: AtomicU64,
    bytes: AtomicU64,
    /// Nanoseconds since [`EPOCH`]: earlier time belongs to another image.
    since: AtomicU64,
}

impl Stage {
    /// Resets it for the next image.
    pub fn reset(&self) {
        let now = EPOCH.elapsed().as_nanos() as u64;
        self.since.store(now, Relaxed);
        for counter in [&self.busy_ns, &self.wait_ns, &self.socket_ns, &self.bytes] {
            counter.store(0, Relaxed);
        }
    }

    /// Adds bytes that passed the stage.
    pub fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
    }

    /// The times so far.
    #[must_use]
    pub fn time(&self) -> StageTime {
        StageTime {
            busy_ns: self.busy_ns.load(Relaxed),
            wait_ns: self.wait_ns.load(Relaxed),
            socket_ns: self.socket_ns.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
        }
    }

    /// Drives a future that reads from or writes to a socket: busy while it is polled (encryption, checksums, copies
    /// to and from the kernel), at the socket in between.
    pub async fn at_socket<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut lap = Lap::start();
        std::future::poll_fn(|cx| {
            lap.charge(self, &self.socket_ns);
            let polled = future.as_mut().poll(cx);
            lap.charge(self, &self.busy_ns);
            polled
        })
        .await
    }
}

/// A thread's stopwatch: each reading adds the time since the previous one to a stage.
#[derive(Debug)]
pub struct Lap(Instant);

impl Lap {
    /// Starts it.
    #[must_use]
    pub fn start() -> Self {
        Lap(Instant::now())
    }

    /// Discards the time since the last reading.
    pub fn skip(&mut self) {
        self.0 = Instant::now();
    }

    /// Adds the time since the last reading as work.
    pub fn busy(&mut self, stage: &Stage) {
        self.charge(stage, &stage.busy_ns);
    }

    /// Adds the time since the last reading as waiting for a queue.
    pub fn wait(&mut self, stage: &Stage) {
        self.charge(stage, &stage.wait_ns);
    }

    /// Adds the time since the last reading as waiting for the peer.
    pub fn socket(&mut self, stage: &Stage) {
        self.charge(stage, &stage.socket_ns);
    }

    fn charge(&mut self, stage: &Stage, to: &AtomicU64) {
        let now = Instant::now();
        let elapsed = now - std::mem::replace(&mut self.0, now);
        let since = Duration::from_nanos(stage.since.load(Relaxed));
        let own = elapsed.min(now.saturating_duration_since(*EPOCH).saturating_sub(since));
        to.fetch_add(own.as_nanos() as u64, Relaxed);
    }
}

/// Times of a stage during one image's transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StageTime {
    /// Nanoseconds of work, including waits for a disk.
    pub busy_ns: u64,
    /// Nanoseconds of waiting for an adjacent stage.
    pub wait_ns: u64,
    /// Nanoseconds of waiting for the peer, where the stage has a socket.
    pub socket_ns: u64,
    /// Bytes that passed: of the image, or on the wire if the stage has a socket.
    pub bytes: u64,
}

/// The stages of one end: a struct of [`Stage`]s, and one of their times.
macro_rules! stages {
    (
        $(#[$of_live:meta])* $live:ident, $(#[$of_times:meta])* $times:ident:
        $($(#[$about:meta])* $name:ident,)*
    ) => {
        $(#[$of_live])*
        #[derive(Debug, Default)]
        pub struct $live {
            $($(#[$about])* pub $name: Stage,)*
        }

        impl $live {
            /// Resets them for the next image.
            pub fn reset(&self) {
                $(self.$name.reset();)*
            }

            /// The times so far, without waits still in progress.
            #[must_use]
            pub fn times(&self) -> $times {
                $times { $($name: self.$name.time(),)* }
            }
        }

        $(#[$of_times])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
        pub struct $times {
            $($(#[$about])* pub $name: StageTime,)*
        }

        impl $times {
            /// Every stage with its name, in the order of the data flow.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, StageTime)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

stages! {
    /// The running stages at the source.
    SourceStages,
    /// The times of the stages at the source.
    SourceTimes:
    /// The walk reads a batch of the image.
    read,
    /// The walk looks for zeros and heads.
    scan,
    /// The walk digests the blocks that are not zero, and the file.
    digest,
    /// The data connections read requested blocks.
    fetch,
    /// The data connections compress them.
    compress,
    /// The data connections encrypt and write to their sockets: literals, and batches on the first.
    send,
}

stages! {
    /// The running stages at the destination.
    DestinationStages,
    /// The times of the stages at the destination.
    DestinationTimes:
    /// The data connections read from their sockets and decrypt.
    receive,
    /// Literals are decompressed.
    unpack,
    /// Literals are digested and compared with the announced digests.
    verify,
    /// Literals are written to the partial file.
    write,
    /// The teleporter matches batches.
    matching,
    /// Local blocks are copied into the partial file.
    copy,
    /// Local blocks are read in place and digested.
    check,
    /// The transfer's single driver: the state machine, the proofs of batches, the digest of the file.
    drive,
    /// Batches and plans are written to the transfer's log.
    log,
    /// The partial file and the log are synced, periodically and at the end.
    sync,
    /// The file is digested if that could not be done during the transfer, added to the catalog, and renamed.
    deliver,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_thread_is_shared_out() {
        let stages = SourceStages::default();
        stages.reset();
        let (mut lap, start) = (Lap::start(), Instant::now());
        std::thread::sleep(Duration::from_millis(20));
        lap.busy(&stages.read);
        std::thread::sleep(Duration::from_millis(10));
        lap.wait(&stages.read);
        lap.socket(&stages.send);
        let all = start.elapsed().as_nanos() as u64;
        let times = stages.times();
        let read = times.read;
        assert!(read.busy_ns >= 20_000_000 && read.wait_ns >= 10_000_000);
        assert!(read.busy_ns + read.wait_ns + times.send.socket_ns <= all + 1_000_000);
        assert_eq!((read.socket_ns, times.send.busy_ns), (0, 0));
    }

    #[test]
    fn a_wait_that_began_with_another_image_counts_from_the_reset() {
        let stage = Stage::default();
        let mut lap = Lap::start();
        std::thread::sleep(Duration::from_millis(50));
        stage.reset();
        lap.wait(&stage);
        assert!(stage.time().wait_ns < 40_000_000, "{:?}", stage.time());
    }

    #[tokio::test]
    async fn a_future_is_busy_while_polled_and_at_the_socket_between() {
        let stage = Stage::default();
        let (sleep, work) = (Duration::from_millis(30), Duration::from_millis(20));
        stage
            .at_socket(async {
                tokio::time::sleep(sleep).await;
                std::thread::sleep(work);
            })
            .await;
        let time = stage.time();
        assert!(time.socket_ns >= 25_000_000, "{time:?}");
        assert!(time.busy_ns >= 20_000_000, "{time:?}");
    }
}
