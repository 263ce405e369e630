//! A WAN emulator in user space: two network namespaces joined by a link with a round-trip time, a rate, loss and a
//! queue, which can be cut and healed. Needs root and TUN devices.

mod namespaces;
mod pump;
mod queue;

use std::io::BufRead;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use clap::Args;
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::shell;
use namespaces::Namespaces;
pub use namespaces::{Side, Unavailable};
use pump::Shared;
use queue::{Counters, Queue, Shape};

/// Exit code of `lab link` when this machine does not support links.
const EXIT_UNAVAILABLE: u8 = 4;
/// Length of the kernel's queue, for packets that arrive while the link's thread sleeps.
const DEVICE_QUEUE: &str = "4000";
const MTU: u64 = 1500;

/// What a link is like.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct Options {
    /// Name of the link: its namespaces are NAME-a (10.77.0.1) and NAME-b (10.77.0.2).
    #[arg(long, default_value = "drover")]
    pub name: String,
    /// Round-trip time in milliseconds.
    #[arg(long, default_value_t = 40.0)]
    pub rtt_ms: f64,
    /// Rate in Mbit/s, IP headers included; 0 for no limit.
    #[arg(long, default_value_t = 100.0)]
    pub rate_mbit: f64,
    /// Packets lost on the line, in percent.
    #[arg(long, default_value_t = 0.0)]
    pub loss_percent: f64,
    /// Seed of the losses.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Its number among links to one far end: its addresses are 10.77.NUMBER.1 and .2.
    #[arg(skip)]
    pub number: u8,
}

impl Default for Options {
    /// 100 Mbit/s and 40 ms without loss.
    fn default() -> Self {
        let name = "drover".to_owned();
        Self {
            name,
            rtt_ms: 40.0,
            rate_mbit: 100.0,
            loss_percent: 0.0,
            seed: 1,
            number: 0,
        }
    }
}

impl Options {
    /// The parameters of one direction. The queue before the bottleneck holds one bandwidth-delay product, at least 64
    /// KiB.
    fn shape(&self) -> Shape {
        let rate = (self.rate_mbit.max(0.0) * 125_000.0) as u64;
        Shape {
            rate,
            delay_ns: (self.rtt_ms.max(0.0) * 500_000.0) as u64,
            loss: self.loss_percent.clamp(0.0, 100.0) / 100.0,
            queue_bytes: ((rate as f64 * self.rtt_ms / 1000.0) as u64).max(64 << 10),
        }
    }

    /// The address of an end.
    pub fn address(&self, side: Side) -> String {
        format!("10.77.{}.{}", self.number, side.host())
    }

    /// Upper bound on the size of segments that the kernel passes unsplit (GSO): half a millisecond's worth, so that a
    /// slow link handles packets and a fast one has little overhead. A lossy link handles single packets.
    fn piece_bytes(&self) -> u64 {
        match self.shape() {
            Shape { loss, .. } if loss > 0.0 => MTU,
            Shape { rate: 0, .. } => 65_536,
            Shape { rate, .. } => (rate / 2000).clamp(MTU, 65_536),
        }
    }
}

/// The traffic of a link, per direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    /// From `a` to `b`.
    pub a_to_b: Counters,
    /// From `b` to `a`.
    pub b_to_a: Counters,
}

/// A running link; shut down when dropped.
pub struct Link {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    namespaces: Namespaces,
}

impl Link {
    /// Creates the namespaces with a device in each, and starts forwarding.
    ///
    /// # Errors
    /// [`Unavailable`] where links are not supported: no root, no namespaces, no TUN devices, or the name is in use.
    pub fn up(options: &Options) -> Result<Self> {
        Self::between(options, None)
    }

    /// The same to the far end of this link, which has to be shut down after it. The near end reaches all addresses of the far one.
    ///
    /// # Errors
    /// As [`Link::up`].
    pub fn up_beside(&self, options: &Options) -> Result<Self> {
        Self::between(options, Some(self.namespaces.name(Side::B)))
    }

    fn between(options: &Options, far: Option<String>) -> Result<Self> {
        namespaces::tun()?;
        let namespaces = Namespaces::make(&options.name, far)?;
        let device = |side| anyhow::Ok(Arc::new(device(&namespaces, side, options)?));
        let devices = [device(Side::A)?, device(Side::B)?];
        let mut link = Self {
            shared: Arc::new(Shared::default()),
            threads: Vec::new(),
            namespaces,
        };
        for from in 0..2 {
            let (input, output) = (devices[from].clone(), devices[1 - from].clone());
            let queue = Queue::new(options.shape(), options.seed.wrapping_add(from as u64));
            let shared = link.shared.clone();
            let thread = std::thread::Builder::new().name(format!("link-{from}"));
            link.threads
                .push(thread.spawn(move || pump::run(&input, &output, queue, &shared, from))?);
        }
        Ok(link)
    }

    /// A command that runs at one end.
    pub fn command(&self, side: Side, program: &str) -> Command {
        self.namespaces.command(side, program)
    }

    /// Cuts the link; packets in flight are lost.
    pub fn cut(&self) {
        self.shared.cut.store(true, Ordering::Relaxed);
    }

    /// Heals the link.
    pub fn heal(&self) {
        self.shared.cut.store(false, Ordering::Relaxed);
    }

    /// The traffic so far.
    pub fn traffic(&self) -> Traffic {
        let of = |way: usize| {
            self.shared.counters[way]
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

/// Whether links are supported here.
///
/// # Errors
/// The reason, in one line.
pub fn available() -> Result<(), String> {
    let name = format!("lab-probe-{}", fastrand::u32(..));
    let probe = Link::up(&Options {
        name,
        ..Options::default()
    });
    probe
        .map(drop)
        .map_err(|error| match error.downcast_ref::<Unavailable>() {
            Some(Unavailable(why)) => why.clone(),
            None => format!("{error:#}"),
        })
}

/// Creates a TUN device in a side's namespace, with an address and up.
fn device(namespaces: &Namespaces, side: Side, options: &Options) -> Result<SyncDevice> {
    let name = format!("lab{:x}{}", fastrand::u32(..), side.letter());
    let device = DeviceBuilder::new()
        .name(&name)
        .offload(true)
        .enable(false)
        .build_sync();
    let device = device.context("cannot make a TUN device")?;
    device.set_nonblocking(true)?;
    let namespace = namespaces.name(side);
    let wan = &*format!("wan{}", options.number);
    shell::run(Command::new("ip").args(["link", "set", &name, "netns", &namespace, "name", wan]))?;
    let own = options.address(side);
    let (piece, address) = (options.piece_bytes(), format!("{own}/24"));
    let (bytes, packets) = (piece.to_string(), (piece / (MTU - 40)).max(1).to_string());
    let ip = |words: &str| namespaces.ip(side, &words.split(' ').collect::<Vec<_>>());
    ip(&format!("link set {wan} txqueuelen {DEVICE_QUEUE}"))?;
    ip(&format!(
        "link set {wan} gso_max_size {bytes} gso_max_segs {packets}"
    ))?;
    ip(&format!("link set {wan} mtu {MTU} addrgenmode none"))?;
    ip(&format!("addr add {address} dev {wan}"))?;
    ip(&format!("link set {wan} up"))?;
    // Independent of the host's settings.
    let net = format!("10.77.{}.0/24", options.number);
    ip(&format!(
        "route replace {net} dev {wan} src {own} congctl cubic"
    ))?;
    if side == Side::A {
        // The other addresses of the far end.
        ip(&format!(
            "route replace 10.77.0.0/16 dev {wan} src {own} congctl cubic"
        ))?;
    }
    Ok(device)
}

/// `lab link`: a link for a person or a script.
#[derive(Args)]
pub struct LinkArgs {
    #[command(flatten)]
    options: Options,
    /// A shell command to run at the far end (NAME-b) as long as the near one runs.
    #[arg(long, value_name = "COMMAND")]
    far: Option<String>,
    /// A command to run at the near end (NAME-a); without one, the link is up until standard input ends and takes
    /// `cut`, `heal` and `stats` there, one a line.
    #[arg(last = true, value_name = "COMMAND")]
    near: Vec<String>,
}

/// Sets up a link, runs commands over it, and shuts it down.
///
/// # Errors
/// When the link cannot be created or a command cannot be started. Exit code 4 means that links are not supported.
pub fn run(args: &LinkArgs) -> Result<ExitCode> {
    let link = match Link::up(&args.options) {
        Err(error) if error.is::<Unavailable>() => {
            eprintln!("lab: {error:#}");
            return Ok(ExitCode::from(EXIT_UNAVAILABLE));
        }
        link => link?,
    };
    eprintln!("{0}-a (10.77.0.1) - {0}-b (10.77.0.2)", args.options.name);
    let far = args
        .far
        .as_ref()
        .map(|words| link.command(Side::B, "sh").args(["-c", words]).spawn());
    let far = far.transpose().context("cannot start the far command")?;
    let mut code = ExitCode::SUCCESS;
    if let Some((program, words)) = args.near.split_first() {
        let status = link.command(Side::A, program).args(words).status();
        let status = status.context("cannot start the command")?;
        code = ExitCode::from(status.code().map_or(1, |code| code as u8));
    } else {
        for line in std::io::stdin().lock().lines() {
            match line?.trim() {
                "cut" => link.cut(),
                "heal" => link.heal(),
                "stats" => print_traffic(&link),
                "" => {}
                other => eprintln!("{other:?}: not one of cut, heal, stats"),
            }
        }
    }
    if let Some(mut far) = far {
        let _ = far.kill();
        let _ = far.wait();
    }
    print_traffic(&link);
    Ok(code)
}

fn print_traffic(link: &Link) {
    let traffic = link.traffic();
    for (way, c) in [("a to b", traffic.a_to_b), ("b to a", traffic.b_to_a)] {
        eprintln!(
            "{way}: in {} packets {} bytes, out {} packets {} bytes, lost {}, overflowed {}, cut {}",
            c.packets_in, c.bytes_in, c.packets_out, c.bytes_out, c.lost, c.overflowed, c.cut
        );
    }
}

#[cfg(test)]
mod tests;
