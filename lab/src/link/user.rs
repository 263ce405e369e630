//! The link in user space: a TUN device at each end and two threads that move packets between them.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use tun_rs::{DeviceBuilder, SyncDevice};

use super::namespaces::Namespaces;
use super::pump::{self, Shared};
use super::queue::Queue;
use super::{Options, Side, Traffic, available};
use crate::shell;

/// Pieces that wait in the kernel while the link's thread sleeps.
const DEVICE_QUEUE: u32 = 4000;

/// Two threads and what they share; they end when this is dropped.
pub struct UserLink {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl UserLink {
    /// Makes a device in each namespace and starts to move packets.
    ///
    /// # Errors
    /// Without TUN devices.
    pub fn up(namespaces: &Namespaces, options: &Options) -> Result<Self> {
        available::tun()?;
        let devices = [
            Arc::new(device(namespaces, Side::A, options)?),
            Arc::new(device(namespaces, Side::B, options)?),
        ];
        let mut this = Self {
            shared: Arc::new(Shared::default()),
            threads: Vec::new(),
        };
        for from in Side::BOTH {
            let direction = from as usize;
            let (input, output) = (devices[direction].clone(), devices[1 - direction].clone());
            let seed = options.seed.wrapping_add(direction as u64);
            let queue = Queue::new(options.shape(from), seed);
            let shared = this.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("link-{direction}"))
                .spawn(move || pump::run(&input, &output, queue, &shared, direction))?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    /// Cuts the line, or heals it.
    pub fn set_cut(&self, cut: bool) {
        self.shared.cut.store(cut, Ordering::Relaxed);
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

impl Drop for UserLink {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Makes a TUN device in a namespace, to see whether that can be done.
///
/// # Errors
/// When it cannot.
pub fn probe(namespaces: &Namespaces) -> Result<()> {
    available::tun()?;
    device(namespaces, Side::A, &Options::default()).map(drop)
}

/// A TUN device in a side's namespace, addressed and up.
fn device(namespaces: &Namespaces, side: Side, options: &Options) -> Result<SyncDevice> {
    let name = format!("lab{:x}{}", fastrand::u32(..), side.letter());
    let device = DeviceBuilder::new()
        .name(&name)
        .offload(true)
        .enable(false)
        .build_sync()
        .context("cannot make a TUN device")?;
    device.set_nonblocking(true)?;
    let namespace = namespaces.name(side);
    shell::run(
        Command::new("ip").args(["link", "set", &name, "netns", &namespace, "name", "wan0"]),
    )?;
    let queue = DEVICE_QUEUE.to_string();
    namespaces.ip(side, &["link", "set", "wan0", "txqueuelen", &queue])?;
    namespaces.pieces(side, options)?;
    namespaces.address(side, options)?;
    Ok(device)
}
