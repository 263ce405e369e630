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

const RATES_MBIT: [f64; 3] = [100.0, 20.0, 1000.0];
const RTTS_MS: [f64; 3] = [40.0, 5.0, 150.0];
const LOSSES_PERCENT: [f64; 2] = [0.0, 0.1];

/// What a connection has on its way at most with the kernel's default buffers.
const WINDOW_BYTES: f64 = 3e6;
/// The largest segment on a line with packets of 1500 bytes.
const SEGMENT_BYTES: f64 = 1448.0;

const fn line(rate_mbit: f64, rtt_ms: f64, loss_percent: f64) -> Line {
    Line {
        rate_mbit,
        rtt_ms,
        loss_percent,
    }
}

/// Every line of the matrix, the reference first.
pub fn matrix() -> Vec<Line> {
    let mut lines = Vec::new();
    for loss in LOSSES_PERCENT {
        for rate in RATES_MBIT {
            lines.extend(RTTS_MS.map(|rtt| line(rate, rtt, loss)));
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

    /// Bytes a second that so many connections of TCP get about, for estimates: the rate, what their windows allow,
    /// and what losses leave them (Mathis et al., "The macroscopic behavior of the TCP congestion avoidance
    /// algorithm", 1997).
    pub fn goodput(&self, connections: u32) -> f64 {
        let rtt = self.rtt_ms / 1000.0;
        let mut one = WINDOW_BYTES / rtt;
        if self.loss_percent > 0.0 {
            let loss = self.loss_percent / 100.0;
            one = one.min(SEGMENT_BYTES / rtt * (1.5 / loss).sqrt());
        }
        self.rate().min(one * f64::from(connections))
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
pub struct Net {
    link: Option<Link>,
}

impl Net {
    /// No link.
    pub fn loopback() -> Self {
        Self { link: None }
    }

    /// A link of its own name.
    ///
    /// # Errors
    /// When this machine cannot have one.
    pub fn over(options: &Options) -> Result<Self> {
        Ok(Self {
            link: Some(Link::up(options)?),
        })
    }

    /// A link like `line`; `seed` decides which packets are lost. No line is loopback.
    ///
    /// # Errors
    /// When this machine cannot have one.
    pub fn like(line: Option<Line>, seed: u64) -> Result<Self> {
        let Some(line) = line else {
            return Ok(Self::loopback());
        };
        Self::over(&Options {
            name: format!("lab-{}", std::process::id()),
            rtt_ms: line.rtt_ms,
            rate_mbit: line.rate_mbit,
            loss_percent: line.loss_percent,
            seed,
            ..Options::default()
        })
    }

    /// Where the two ends are.
    pub fn place(&self) -> Where<'_> {
        self.link.as_ref().map_or(Where::Loopback, Where::Over)
    }

    /// The link, if there is one.
    pub fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// IP bytes that have crossed the link from the near end, and from the far one; none without a link. What its full
    /// queue dropped never was on the wire; what was sent again was.
    ///
    /// # Errors
    /// When the link does not tell.
    pub fn bytes(&self) -> Result<Option<(u64, u64)>> {
        let Some(link) = self.link.as_ref() else {
            return Ok(None);
        };
        let traffic = link.traffic()?;
        Ok(Some((traffic.a_to_b.bytes_out, traffic.b_to_a.bytes_out)))
    }

    /// What has crossed since [`Net::bytes`] said `before`.
    ///
    /// # Errors
    /// When the link does not tell.
    pub fn since(&self, before: Option<(u64, u64)>) -> Result<Option<(u64, u64)>> {
        let now = self.bytes()?.zip(before);
        Ok(now.map(|(now, before)| (now.0 - before.0, now.1 - before.1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_has_every_line_once_and_the_reference_first() {
        let lines = matrix();
        assert_eq!((lines[0], lines.len()), (REFERENCE, 18));
        let slugs: std::collections::BTreeSet<_> = lines.iter().map(Line::slug).collect();
        assert_eq!(slugs.len(), 18);
        assert_eq!(REFERENCE.describe(), "100 Mbit/s, 40 ms");
        assert_eq!(line(20.0, 150.0, 0.1).slug(), "20mbit-150ms-loss0.1");
    }

    #[test]
    fn windows_and_losses_slow_a_connection() {
        assert_eq!(REFERENCE.goodput(1), 12.5e6);
        assert_eq!(line(1000.0, 150.0, 0.0).goodput(1), 20e6);
        let lossy = line(100.0, 150.0, 0.1);
        assert!((300e3..500e3).contains(&lossy.goodput(1)));
        assert!((lossy.goodput(4) / lossy.goodput(1) - 4.0).abs() < 1e-9);
    }
}
