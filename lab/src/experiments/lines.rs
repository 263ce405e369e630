//! The network conditions of the experiments, and the network of a run: an emulated link, or none.

use anyhow::Result;

use crate::link::{Link, Options};
use crate::site::Where;

/// The conditions of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Rate in Mbit/s.
    pub rate_mbit: f64,
    /// Round-trip time in milliseconds.
    pub rtt_ms: f64,
    /// Packet loss, in percent.
    pub loss_percent: f64,
}

/// The reference line, on which everything is measured; others are only used in addition.
pub const REFERENCE: Line = line(100.0, 40.0, 0.0);
/// The line of the smoke run: fast enough that the machine may be the bottleneck.
pub const FAST: Line = line(1000.0, 5.0, 0.0);

/// A line from Mbit/s, milliseconds and percent.
pub const fn line(rate_mbit: f64, rtt_ms: f64, loss_percent: f64) -> Line {
    Line {
        rate_mbit,
        rtt_ms,
        loss_percent,
    }
}

/// All lines, the reference first.
pub fn matrix() -> Vec<Line> {
    let mut lines = Vec::new();
    for loss in [0.0, 0.1] {
        for rate in [100.0, 20.0, 1000.0] {
            lines.extend([40.0, 5.0, 150.0].map(|rtt| line(rate, rtt, loss)));
        }
    }
    lines
}

impl Line {
    /// Description: `100 Mbit/s, 40 ms, 0.1 % loss`.
    pub fn describe(&self) -> String {
        let mut words = format!("{} Mbit/s, {} ms", self.rate_mbit, self.rtt_ms);
        if self.loss_percent > 0.0 {
            words += &format!(", {} % loss", self.loss_percent);
        }
        words
    }

    /// Identifier: `100mbit-40ms-loss0.1`.
    pub fn slug(&self) -> String {
        let mut slug = format!("{}mbit-{}ms", self.rate_mbit, self.rtt_ms);
        if self.loss_percent > 0.0 {
            slug += &format!("-loss{}", self.loss_percent);
        }
        slug
    }

    /// Rate in bytes per second.
    pub fn rate(&self) -> f64 {
        self.rate_mbit * 125_000.0
    }
}

/// Description, also without a line.
pub fn describe(line: Option<Line>) -> String {
    line.map_or_else(|| "loopback".to_owned(), |line| line.describe())
}

/// Identifier, also without a line.
pub fn slug(line: Option<Line>) -> String {
    line.map_or_else(|| "loopback".to_owned(), |line| line.slug())
}

/// The network of a run: a link, or loopback.
pub struct Net(Option<Link>);

impl Net {
    /// Sets up a link with the conditions of `line`; `seed` determines packet loss. Without a line, loopback.
    ///
    /// # Errors
    /// When this machine does not support links.
    pub fn like(line: Option<Line>, seed: u64) -> Result<Self> {
        let up = |line: Line| {
            Link::up(&Options {
                name: format!("lab-{}", std::process::id()),
                rtt_ms: line.rtt_ms,
                rate_mbit: line.rate_mbit,
                loss_percent: line.loss_percent,
                seed,
                ..Options::default()
            })
        };
        Ok(Self(line.map(up).transpose()?))
    }

    /// Where the two ends run.
    pub fn place(&self) -> Where<'_> {
        self.0.as_ref().map_or(Where::Loopback, Where::Over)
    }

    /// The link, if there is one.
    pub fn link(&self) -> Option<&Link> {
        self.0.as_ref()
    }

    /// IP bytes that have crossed the link from the near end, and from the far one; `None` without a link. Excludes
    /// packets dropped from the full queue, includes retransmissions.
    pub fn bytes(&self) -> Option<(u64, u64)> {
        let traffic = self.0.as_ref()?.traffic();
        Some((traffic.a_to_b.bytes_out, traffic.b_to_a.bytes_out))
    }

    /// IP bytes that have crossed since an earlier result of [`Net::bytes`].
    pub fn since(&self, before: Option<(u64, u64)>) -> Option<(u64, u64)> {
        let (now, before) = self.bytes().zip(before)?;
        Some((now.0 - before.0, now.1 - before.1))
    }
}
