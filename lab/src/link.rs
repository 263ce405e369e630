//! A WAN link: two network namespaces with a round-trip time, a rate, loss, jitter and a queue between them, that can
//! be cut and healed.
//!
//! Two engines make one. The user-space one needs nothing but TUN devices; the kernel's `netem` is taken instead
//! where it is there, because it costs less.

mod available;
pub mod check;
mod command;
mod namespaces;
mod netem;
mod offload;
mod pump;
mod queue;
mod schedule;
mod user;

use std::process::Command;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;

pub use available::{EXIT_UNAVAILABLE, Unavailable, available};
pub use command::{LinkArgs, RunArgs, run};
use namespaces::Namespaces;
use netem::NetemLink;
use queue::{Counters, Shape};
use schedule::Running;
pub use schedule::Schedule;
use user::UserLink;

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

    /// The end that this one is joined to.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    fn letter(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
        }
    }
}

/// What moves the packets of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The kernel's where it has all parts, else the lab's own.
    #[default]
    Auto,
    /// Two threads of the lab between TUN devices.
    User,
    /// The kernel: a veth pair with netem and tbf.
    Netem,
}

/// What a link is like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Options {
    /// The namespaces are called `NAME-a` and `NAME-b`.
    pub name: String,
    /// Round-trip time.
    pub rtt_ms: f64,
    /// Rate in Mbit/s of IP packets; 0 for no limit.
    pub rate_mbit: f64,
    /// Rate from `b` to `a` where it is another, as on a DSL line.
    pub rate_back_mbit: Option<f64>,
    /// Packets lost, in percent.
    pub loss_percent: f64,
    /// Greatest deviation of the one-way delay.
    pub jitter_ms: f64,
    /// Jitter may change the order of packets.
    pub reorder: bool,
    /// Bytes that wait before the bottleneck; by default one round trip's worth, at least 64 KiB.
    pub queue_bytes: Option<u64>,
    /// Seed of loss and jitter.
    pub seed: u64,
    /// TCP's congestion control at both ends.
    pub congestion: String,
    /// What moves the packets.
    pub engine: EngineKind,
}

impl Default for Options {
    /// 100 Mbit/s and 40 ms without loss.
    fn default() -> Self {
        Self {
            name: "drover".to_owned(),
            rtt_ms: 40.0,
            rate_mbit: 100.0,
            rate_back_mbit: None,
            loss_percent: 0.0,
            jitter_ms: 0.0,
            reorder: false,
            queue_bytes: None,
            seed: 1,
            congestion: "cubic".to_owned(),
            engine: EngineKind::Auto,
        }
    }
}

impl Options {
    /// In one line, for reports.
    pub fn describe(&self) -> String {
        let rate = |mbit: f64| match mbit {
            mbit if mbit > 0.0 => format!("{mbit} Mbit/s"),
            _ => "unlimited".to_owned(),
        };
        let back = self
            .rate_back_mbit
            .map(|back| format!(" ({} back)", rate(back)));
        format!(
            "{}{}, {} ms RTT, {} % loss, {} ms jitter{}, queue {} KiB, {}",
            rate(self.rate_mbit),
            back.unwrap_or_default(),
            self.rtt_ms,
            self.loss_percent,
            self.jitter_ms,
            if self.reorder { " (reordering)" } else { "" },
            self.shape(Side::A).queue_bytes >> 10,
            self.congestion
        )
    }

    /// Links like this one of each of the lab's rates, round-trip times and losses.
    pub fn matrix(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for rate_mbit in [20.0, 100.0, 1000.0] {
            for rtt_ms in [5.0, 40.0, 150.0] {
                for loss_percent in [0.0, 0.1] {
                    all.push(Self {
                        rate_mbit,
                        rtt_ms,
                        loss_percent,
                        ..self.clone()
                    });
                }
            }
        }
        all
    }

    /// What happens to packets that come from `from`.
    fn shape(&self, from: Side) -> Shape {
        let mbit = match from {
            Side::A => self.rate_mbit,
            Side::B => self.rate_back_mbit.unwrap_or(self.rate_mbit),
        };
        let rate = (mbit * 125_000.0) as u64;
        let round_trip = (rate as f64 * self.rtt_ms / 1000.0) as u64;
        Shape {
            rate,
            delay_ns: (self.rtt_ms * 500_000.0) as u64,
            jitter_ns: (self.jitter_ms * 1_000_000.0) as u64,
            reorder: self.reorder,
            loss: self.loss_percent / 100.0,
            queue_bytes: self.queue_bytes.unwrap_or_else(|| round_trip.max(64 << 10)),
        }
    }

    /// The largest piece that the kernel hands over whole: half a millisecond's worth, so that a slow link sees
    /// packets and a fast one costs little. A lossy link loses packets one by one.
    fn piece_bytes(&self, from: Side) -> u64 {
        match self.shape(from) {
            Shape { loss, .. } if loss > 0.0 => MTU,
            Shape { rate: 0, .. } => 65_536,
            Shape { rate, .. } => (rate / 2000).clamp(MTU, 65_536),
        }
    }
}

const MTU: u64 = 1500;
const NETWORK: &str = "10.77.0.0/24";

/// What passed a link, each way.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Traffic {
    /// From `a` to `b`.
    pub a_to_b: Counters,
    /// From `b` to `a`.
    pub b_to_a: Counters,
}

/// What moves packets.
enum Engine {
    User(UserLink),
    Netem(NetemLink),
}

impl Engine {
    fn up(namespaces: &Namespaces, options: &Options) -> Result<Self> {
        let user = || Ok(Self::User(UserLink::up(namespaces, options)?));
        match options.engine {
            EngineKind::User => user(),
            EngineKind::Netem => Ok(Self::Netem(NetemLink::up(namespaces, options)?)),
            EngineKind::Auto if netem::probe(namespaces).is_err() => user(),
            EngineKind::Auto => Ok(Self::Netem(NetemLink::up(namespaces, options)?)),
        }
    }

    fn set_cut(&self, cut: bool) -> Result<()> {
        match self {
            Self::User(link) => link.set_cut(cut),
            Self::Netem(link) => link.set_cut(cut)?,
        }
        Ok(())
    }
}

/// A link that is up until it is dropped.
pub struct Link {
    // In the order in which they end: what cuts, what moves packets, where they are moved.
    schedule: Option<Running>,
    engine: Arc<Engine>,
    namespaces: Namespaces,
}

impl Link {
    /// Makes the namespaces, joins them, and starts to move packets.
    ///
    /// # Errors
    /// [`Unavailable`] where there can be no link: no root, no namespaces, no TUN devices, a name in use.
    pub fn up(options: &Options) -> Result<Self> {
        let namespaces = Namespaces::make(&options.name)?;
        Ok(Self {
            schedule: None,
            engine: Arc::new(Engine::up(&namespaces, options)?),
            namespaces,
        })
    }

    /// What moves the packets, in words.
    pub fn engine(&self) -> &'static str {
        match &*self.engine {
            Engine::User(_) => "in user space",
            Engine::Netem(link) if link.seeded => "by netem",
            Engine::Netem(_) => "by netem, whose loss takes no seed here",
        }
    }

    /// A command that runs at one end.
    pub fn command(&self, side: Side, program: &str) -> Command {
        self.namespaces.command(side, program)
    }

    /// Nothing passes any more; what is under way is lost.
    ///
    /// # Errors
    /// When the kernel does not obey.
    pub fn cut(&self) -> Result<()> {
        self.engine.set_cut(true)
    }

    /// Packets pass again.
    ///
    /// # Errors
    /// When the kernel does not obey.
    pub fn heal(&self) -> Result<()> {
        self.engine.set_cut(false)
    }

    /// Cuts and heals by the clock, which starts now; a schedule that runs already ends.
    ///
    /// # Errors
    /// Without a thread for it.
    pub fn schedule(&mut self, schedule: &Schedule) -> Result<()> {
        self.schedule = None;
        self.schedule = Some(Running::start(self.engine.clone(), schedule)?);
        Ok(())
    }

    /// What has passed so far.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn traffic(&self) -> Result<Traffic> {
        match &*self.engine {
            Engine::User(link) => Ok(link.traffic()),
            Engine::Netem(link) => link.traffic(),
        }
    }
}

#[cfg(test)]
mod tests;
