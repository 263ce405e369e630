//! The lines of the matrix and the network of a run: a link that is like one of them, or none.

use anyhow::Result;

use crate::link::{Link, Options};
use crate::site::Where;

/// What a link of the matrix is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Megabits a second.
    pub rate_mbit: f64,
    /// Round-trip time.
    pub rtt_ms: f64,
    /// Packets lost, in percent.
    pub loss_percent: f64,
}

/// The line that everything is measured on; the others are beside it.
pub const REFERENCE: Line = line(100.0, 40.0, 0.0);
/// The line of the smoke run: fast enough for a machine to be the slower part.
pub const FAST: Line = line(1000.0, 5.0, 0.0);

/// Megabits a second, milliseconds, percent.
pub const fn line(rate_mbit: f64, rtt_ms: f64, loss_percent: f64) -> Line {
    Line {
        rate_mbit,
        rtt_ms,
        loss_percent,
    }
}

/// Every line of the matrix, the reference first.
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
    /// In words: `100 Mbit/s, 40 ms, 0.1 % loss`.
    pub fn describe(&self) -> String {
        let mut words = format!("{} Mbit/s, {} ms", self.rate_mbit, self.rtt_ms);
        if self.loss_percent > 0.0 {
            words += &format!(", {} % loss", self.loss_percent);
        }
        words
    }

    /// For identifiers: `100mbit-40ms-loss0.1`.
    pub fn slug(&self) -> String {
        let mut slug = format!("{}mbit-{}ms", self.rate_mbit, self.rtt_ms);
        if self.loss_percent > 0.0 {
            slug += &format!("-loss{}", self.loss_percent);
        }
        slug
    }

    /// Bytes a second.
    pub fn rate(&self) -> f64 {
        self.rate_mbit * 125_000.0
    }
}

/// In words, where there may be no line.
pub fn describe(line: Option<Line>) -> String {
    line.map_or_else(|| "loopback".to_owned(), |line| line.describe())
}

/// For identifiers, where there may be no line.
pub fn slug(line: Option<Line>) -> String {
    line.map_or_else(|| "loopback".to_owned(), |line| line.slug())
}

/// The network of a run: a link or none.
pub struct Net(Option<Link>);

impl Net {
    /// A link like `line`; `seed` decides which packets are lost. No line is loopback.
    ///
    /// # Errors
    /// When this machine cannot have one.
    pub fn like(line: Option<Line>, seed: u64) -> Result<Self> {
        let up = |line: Line| {
            Link::up(&Options {
                name: format!("lab-{}", std::process::id()),
                rtt_ms: line.rtt_ms,
                rate_mbit: line.rate_mbit,
                loss_percent: line.loss_percent,
                seed,
            })
        };
        Ok(Self(line.map(up).transpose()?))
    }

    /// Where the two ends are.
    pub fn place(&self) -> Where<'_> {
        self.0.as_ref().map_or(Where::Loopback, Where::Over)
    }

    /// The link, if there is one.
    pub fn link(&self) -> Option<&Link> {
        self.0.as_ref()
    }

    /// IP bytes that have crossed the link from the near end, and from the far one; none without a link. What its full
    /// queue dropped never was on the wire; what was sent again was.
    pub fn bytes(&self) -> Option<(u64, u64)> {
        let traffic = self.0.as_ref()?.traffic();
        Some((traffic.a_to_b.bytes_out, traffic.b_to_a.bytes_out))
    }

    /// What has crossed since [`Net::bytes`] said `before`.
    pub fn since(&self, before: Option<(u64, u64)>) -> Option<(u64, u64)> {
        let (now, before) = self.bytes().zip(before)?;
        Some((now.0 - before.0, now.1 - before.1))
    }
}
