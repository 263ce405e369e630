//! A WAN link in user space: two network namespaces joined through TUN devices, with a round-trip
//! time, a rate, loss, jitter and a queue, that can be cut and healed.
//!
//! The kernel's `netem` is not everywhere; this needs nothing but TUN devices and namespaces.

mod command;
mod namespaces;
mod offload;
mod pump;
mod queue;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use tun_rs::{DeviceBuilder, SyncDevice};

pub use command::{LinkArgs, RunArgs, run};
use namespaces::Namespaces;
use pump::Shared;
use queue::{Counters, Queue, Shape};

use crate::shell;

/// One end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// 10.77.0.1
    A,
    /// 10.77.0.2
    B,
}

impl Side {
    /// Both ends.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// The address of this end on the link.
    pub fn address(self) -> &'static str {
        match self {
            Self::A => "10.77.0.1",
            Self::B => "10.77.0.2",
        }
    }

    fn letter(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
        }
    }
}

/// What a link is like, the same in both directions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Options {
    /// The namespaces are called `NAME-a` and `NAME-b`.
    pub name: String,
    /// Round-trip time.
    pub rtt_ms: f64,
    /// Rate in Mbit/s of IP packets; 0 for no limit.
    pub rate_mbit: f64,
    /// Packets lost, in percent.
    pub loss_percent: f64,
    /// Greatest deviation of the one-way delay.
    pub jitter_ms: f64,
    /// Bytes that wait before the bottleneck; by default one round trip's worth, at least 64 KiB.
    pub queue_bytes: Option<u64>,
    /// Seed of loss and jitter.
    pub seed: u64,
    /// TCP's congestion control at both ends.
    pub congestion: String,
}

impl Options {
    /// In one line, for reports.
    pub fn describe(&self) -> String {
        let rate = if self.rate_mbit > 0.0 {
            format!("{} Mbit/s", self.rate_mbit)
        } else {
            "unlimited".to_owned()
        };
        format!(
            "{rate}, {} ms RTT, {} % loss, {} ms jitter, queue {} KiB, {}",
            self.rtt_ms,
            self.loss_percent,
            self.jitter_ms,
            self.shape().queue_bytes >> 10,
            self.congestion
        )
    }

    fn shape(&self) -> Shape {
        let rate = (self.rate_mbit * 125_000.0) as u64;
        let round_trip = (rate as f64 * self.rtt_ms / 1000.0) as u64;
        Shape {
            rate,
            delay_ns: (self.rtt_ms * 500_000.0) as u64,
            jitter_ns: (self.jitter_ms * 1_000_000.0) as u64,
            loss: self.loss_percent / 100.0,
            queue_bytes: self.queue_bytes.unwrap_or_else(|| round_trip.max(64 << 10)),
        }
    }

    /// The largest piece that the kernel hands over whole: half a millisecond's worth, so that a slow link sees
    /// packets and a fast one costs little. A lossy link loses packets one by one.
    fn piece_bytes(&self) -> u64 {
        match self.shape() {
            Shape { loss, .. } if loss > 0.0 => MTU,
            Shape { rate: 0, .. } => 65_536,
            Shape { rate, .. } => (rate / 2000).clamp(MTU, 65_536),
        }
    }
}

const MTU: u64 = 1500;
const NETWORK: &str = "10.77.0.0/24";
/// Pieces that wait in the kernel while the link's thread sleeps.
const DEVICE_QUEUE: u32 = 4000;

/// What passed a link, each way.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Traffic {
    /// From `a` to `b`.
    pub a_to_b: Counters,
    /// From `b` to `a`.
    pub b_to_a: Counters,
}

/// A link that is up until it is dropped.
pub struct Link {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    namespaces: Namespaces,
}

impl Link {
    /// Makes the namespaces, joins them, and starts to move packets.
    ///
    /// # Errors
    /// Without root, namespaces or TUN devices.
    pub fn up(options: &Options) -> Result<Self> {
        let namespaces = Namespaces::make(&options.name)?;
        let devices = [
            Arc::new(device(&namespaces, Side::A, options)?),
            Arc::new(device(&namespaces, Side::B, options)?),
        ];
        let shared = Arc::new(Shared::default());
        let mut threads = Vec::new();
        for direction in 0..2 {
            let (from, to) = (devices[direction].clone(), devices[1 - direction].clone());
            let queue = Queue::new(options.shape(), options.seed.wrapping_add(direction as u64));
            let shared = shared.clone();
            let delay = Duration::from_nanos(options.shape().delay_ns);
            let thread = std::thread::Builder::new()
                .name(format!("link-{direction}"))
                .spawn(move || pump::run(&from, &to, queue, &shared, direction, delay))?;
            threads.push(thread);
        }
        Ok(Self {
            shared,
            threads,
            namespaces,
        })
    }

    /// A command that runs at one end.
    pub fn command(&self, side: Side, program: &str) -> Command {
        self.namespaces.command(side, program)
    }

    /// Nothing passes any more; what is under way is lost.
    pub fn cut(&self) {
        self.shared.cut.store(true, Ordering::Relaxed);
    }

    /// Packets pass again.
    pub fn heal(&self) {
        self.shared.cut.store(false, Ordering::Relaxed);
    }

    /// What has passed so far.
    pub fn traffic(&self) -> Traffic {
        let of = |direction: usize| {
            self.shared.counters[direction]
                .lock()
                .map(|c| *c)
                .unwrap_or_default()
        };
        Traffic {
            a_to_b: of(0),
            b_to_a: of(1),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A TUN device in a side's namespace, addressed and up.
fn device(namespaces: &Namespaces, side: Side, options: &Options) -> Result<SyncDevice> {
    let name = format!("lab{}{}", std::process::id(), side.letter());
    let device = DeviceBuilder::new()
        .name(&name)
        .offload(true)
        .enable(false)
        .build_sync()
        .context("cannot make a TUN device")?;
    device.set_nonblocking(true)?;
    let namespace = namespaces.name(side);
    let ip = |args: &[&str]| shell::run(Command::new("ip").args(args));
    ip(&["link", "set", &name, "netns", &namespace, "name", "wan0"])?;
    let within = |args: &[&str]| {
        let mut all = vec!["-n", &namespace];
        all.extend(args);
        ip(&all)
    };
    let (mtu, queue) = (MTU.to_string(), DEVICE_QUEUE.to_string());
    let piece = options.piece_bytes();
    let (bytes, packets) = (piece.to_string(), (piece / (MTU - 40)).max(1).to_string());
    within(&[
        "link",
        "set",
        "wan0",
        "mtu",
        &mtu,
        "txqueuelen",
        &queue,
        "addrgenmode",
        "none",
    ])?;
    within(&[
        "link",
        "set",
        "wan0",
        "gso_max_size",
        &bytes,
        "gso_max_segs",
        &packets,
    ])?;
    within(&[
        "addr",
        "add",
        &format!("{}/24", side.address()),
        "dev",
        "wan0",
    ])?;
    within(&["link", "set", "wan0", "up"])?;
    let (source, congestion) = (side.address(), options.congestion.as_str());
    within(&[
        "route", "replace", NETWORK, "dev", "wan0", "src", source, "congctl", congestion,
    ])
    .context("cannot choose TCP's congestion control")?;
    Ok(device)
}

#[cfg(test)]
mod tests;
