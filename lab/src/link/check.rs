//! `lab link --check`: whether a link is what it claims to be, by programs that know nothing of it.

pub mod traffic;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use serde::Serialize;

use super::queue::Counters;
use super::{Link, MTU, Options, Side, Unavailable};
use crate::report::{self, Spread};
use crate::shell;
use traffic::{Arrived, Ping, Servers, Udp};

/// Headers of a full TCP packet with time stamps, as Linux sends it: 20 of IP, 32 of TCP.
const TCP_HEADERS: u64 = 52;
/// A standard normal deviate beyond which one of 10,000 draws lies: how wide intervals are.
const Z: f64 = 3.89;
/// TCP's packets in steady state: `MSS / RTT * 1.22 / sqrt(loss)` (Mathis et al. 1997); cubic is at least as fast.
const MATHIS: f64 = 1.22;

/// How long TCP is measured.
const TCP_SECONDS: u32 = 3;

/// One claim and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// A short name of it, for programs.
    pub key: &'static str,
    /// What is claimed.
    pub what: String,
    /// The unit of all numbers of this.
    pub unit: &'static str,
    /// The claim.
    pub claim: f64,
    /// What was measured.
    pub measured: f64,
    /// The least that holds.
    pub least: f64,
    /// The most that holds.
    pub most: f64,
    /// What could be at the very most: more than the claim where something else is the limit.
    pub ceiling: f64,
    /// Why this machine cannot tell, if it cannot.
    pub excuse: Option<&'static str>,
}

impl Finding {
    fn new(key: &'static str, what: impl Into<String>, unit: &'static str) -> Self {
        Self {
            key,
            what: what.into(),
            unit,
            claim: 0.0,
            measured: f64::NAN,
            least: 0.0,
            most: 0.0,
            ceiling: 0.0,
            excuse: None,
        }
    }

    fn claims(mut self, claim: f64, least: f64, most: f64) -> Self {
        (self.claim, self.least, self.most) = (claim, least, most);
        self.ceiling = claim;
        self
    }

    fn measured(mut self, measured: f64) -> Self {
        self.measured = measured;
        self
    }

    /// Whether the link keeps its word in this.
    pub fn holds(&self) -> bool {
        match self.excuse {
            // What is too much is so even on a slow machine.
            Some(_) => self.measured.is_nan() || self.measured <= self.most,
            None => (self.least..=self.most).contains(&self.measured),
        }
    }

    /// In words, for a row that says what is wrong.
    pub fn complaint(&self) -> String {
        format!(
            "{}: {:.3} {} instead of {:.3} to {:.3}",
            self.what, self.measured, self.unit, self.least, self.most
        )
    }
}

/// What a check found.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// The link, in words.
    pub link: String,
    /// What moved the packets, in words.
    pub engine: &'static str,
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Checked {
    /// Whether all findings hold.
    pub fn holds(&self) -> bool {
        self.findings.iter().all(Finding::holds)
    }

    /// For people.
    pub fn table(&self) -> Table {
        let head = [
            "what",
            "unit",
            "claim",
            "measured",
            "holds from",
            "to",
            "verdict",
        ];
        let mut table = report::table(&head);
        for finding in &self.findings {
            let number = |value: f64| format!("{value:.3}");
            table.add_row(vec![
                finding.what.clone(),
                finding.unit.to_owned(),
                number(finding.claim),
                number(finding.measured),
                number(finding.least),
                number(finding.most),
                match (finding.holds(), finding.excuse) {
                    (true, None) => "holds",
                    (true, Some(why)) => why,
                    (false, _) => "BROKEN",
                }
                .to_owned(),
            ]);
        }
        table
    }
}

/// Brings a link up and checks all that it claims; takes about ten seconds.
///
/// # Errors
/// [`Unavailable`] without a link, `ping` or `iperf3`; others when one of them does not come to its end.
pub fn check(options: &Options) -> Result<Checked> {
    for program in ["ping", "iperf3"] {
        if !shell::have(program) {
            let why = format!("`{program}` is not installed, and the check needs it");
            return Err(Unavailable(why).into());
        }
    }
    let link = Link::up(options)?;
    let check = Check {
        options,
        link: &link,
    };
    let mut findings = check.counters()?;
    let (idle_ms, found) = check.idle()?;
    findings.extend(found);
    let servers = Servers::start(&link)?;
    for from in Side::BOTH {
        findings.extend(check.tcp(&servers, from)?);
        findings.push(check.loss(&servers, from)?);
    }
    findings.extend(check.queue(&servers, idle_ms)?);
    drop(servers);
    findings.extend(check.cut()?);
    Ok(Checked {
        link: options.describe(),
        engine: link.engine(),
        findings,
    })
}

struct Check<'a> {
    options: &'a Options,
    link: &'a Link,
}

impl Check<'_> {
    /// What the link counts is what was sent, to the byte.
    fn counters(&self) -> Result<Vec<Finding>> {
        const COUNT: u64 = 40;
        const PAYLOAD: u64 = 1000;
        // An IP and an ICMP header.
        let size = PAYLOAD + 28;
        let before = self.link.traffic()?;
        Ping::new(COUNT, 0.01).payload(PAYLOAD).run(self.link)?;
        let after = self.settled()?;
        let (there, back) = (
            difference(after.a_to_b, before.a_to_b),
            difference(after.b_to_a, before.b_to_a),
        );
        let exactly = |what: &str, claim: u64, measured: u64| {
            let claim = claim as f64;
            Finding::new("counters", what, "count")
                .claims(claim, claim, claim)
                .measured(measured as f64)
        };
        let fate = |c: Counters| c.packets_out + c.lost + c.overflowed + c.cut;
        Ok(vec![
            exactly("packets counted of a ping", COUNT, there.packets_in),
            exactly("bytes counted of a ping", COUNT * size, there.bytes_in),
            exactly("packets delivered or lost of those", COUNT, fate(there)),
            exactly(
                "bytes delivered, of packets delivered",
                there.packets_out * size,
                there.bytes_out,
            ),
            exactly(
                "answers counted, of packets delivered",
                there.packets_out,
                back.packets_in,
            ),
            exactly("answers delivered or lost", back.packets_in, fate(back)),
        ])
    }

    /// The traffic once nothing is under way any more.
    fn settled(&self) -> Result<super::Traffic> {
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            let traffic = self.link.traffic()?;
            let under_way =
                |c: Counters| c.packets_in != c.packets_out + c.lost + c.overflowed + c.cut;
            if !(under_way(traffic.a_to_b) || under_way(traffic.b_to_a))
                || Instant::now() > deadline
            {
                return Ok(traffic);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The round-trip time and its spread; returns the median too.
    fn idle(&self) -> Result<(f64, Vec<Finding>)> {
        let (rtt, jitter) = (
            self.options.rtt_ms,
            self.options.jitter_ms.min(self.options.rtt_ms / 2.0),
        );
        // So far apart that none has to wait for the one before it.
        let every = if jitter > 0.0 {
            2.0 * jitter / 1000.0
        } else {
            0.0
        };
        let count = if jitter > 0.0 { 60 } else { 30 };
        let times = Ping::new(count, every.max(0.02)).run(self.link)?;
        let spread = Spread::of(&times).context("no ping came back")?;
        // Two ways, each up to the jitter off. The machine may be late, never early.
        let (early, late) = (2.0 * jitter + 0.05, 2.0 * jitter + 2.0);
        let mut findings = vec![
            Finding::new("rtt_min_ms", "least round trip", "ms")
                .claims(rtt - 2.0 * jitter, rtt - early, rtt + late)
                .measured(spread.min),
            Finding::new("rtt_ms", "median round trip", "ms")
                .claims(rtt, rtt - early / 2.0, rtt + late + 5.0)
                .measured(spread.median),
        ];
        if jitter > 0.0 {
            // Two even spreads add up to a triangle of width 4; its middle nine tenths have a width of 2.74. A few
            // that a busy machine delays do not show there.
            findings.push(
                Finding::new("jitter_ms", "spread of nine tenths of round trips", "ms")
                    .claims(2.74 * jitter, 1.5 * jitter, 3.5 * jitter + 3.0)
                    .measured(middle(&times)),
            );
        }
        Ok((spread.median, findings))
    }

    /// What TCP gets through, of what the rate leaves after headers.
    fn tcp(&self, servers: &Servers, from: Side) -> Result<Option<Finding>> {
        let shape = self.options.shape(from);
        if shape.rate == 0 {
            return Ok(None);
        }
        let after_headers = (MTU - TCP_HEADERS) as f64 / MTU as f64;
        let unlost = shape.rate as f64 * 8e-6 * after_headers;
        let goodput = unlost * (1.0 - shape.loss);
        let rtt_s = (self.options.rtt_ms / 1000.0).max(0.001);
        let in_flight = shape.rate as f64 * rtt_s + shape.queue_bytes as f64;
        // One window with the kernel's buffers holds some megabytes; several smaller ones share a queue more evenly.
        let streams = if shape.loss > 0.0 {
            16
        } else {
            (in_flight / 1.5e6).ceil().clamp(4.0, 16.0) as u32
        };
        let warm_up = (1.0 + 12.0 * rtt_s).ceil() as u32;
        let measured = servers.tcp(self.link, from, streams, TCP_SECONDS, warm_up)?;
        let by_loss = match shape.loss {
            loss if loss > 0.0 => {
                let one = (MTU - TCP_HEADERS) as f64 * 8e-6 / rtt_s * MATHIS / loss.sqrt();
                f64::from(streams) * one
            }
            _ => f64::INFINITY,
        };
        let claim = goodput.min(by_loss);
        // Loss hits some runs harder; what a shaped link carries is nearly constant.
        let least = if by_loss.is_finite() { 0.4 } else { 0.9 } * claim;
        // iperf3 counts blocks of 128 KiB: one that begins before the time may end in it.
        let most = unlost * 1.02 + 128.0 * 1024.0 * 8e-6 / f64::from(TCP_SECONDS);
        let key = way("tcp_there_mbit", "tcp_back_mbit", from);
        let mut finding = Finding::new(key, format!("TCP {}", direction(from)), "Mbit/s")
            .claims(claim, least, most)
            .measured(measured);
        finding.ceiling = goodput;
        Ok(Some(finding))
    }

    /// The share of small datagrams that are lost.
    fn loss(&self, servers: &Servers, from: Side) -> Result<Finding> {
        let rate = self.options.shape(from).rate as f64 * 8.0;
        let mut load = Udp {
            bytes: 100,
            seconds: 2.0,
            bits: 10e6,
        };
        if rate > 0.0 {
            // With 28 bytes of headers, well below the rate.
            load.bits = load.bits.min(rate * 0.4 * 100.0 / 128.0);
        }
        // A busy machine lets a sender sleep, which then sends more at once than the queue has room for, and a
        // receiver, whose buffer runs full. What is dropped so is not lost on the line: it is measured once more.
        let overflowed = || -> Result<u64> {
            let traffic = self.link.traffic()?;
            Ok(traffic.a_to_b.overflowed + traffic.b_to_a.overflowed)
        };
        let (mut arrived, mut dropped) = (Arrived::default(), 0);
        for _ in 0..3 {
            let before = overflowed()?;
            arrived = servers.udp(self.link, from, &load)?;
            dropped = arrived.dropped + overflowed()? - before;
            if dropped == 0 {
                break;
            }
            load.bits /= 2.0;
        }
        let claim = self.options.loss_percent;
        let (least, most) = interval(claim / 100.0, arrived.sent);
        let lost = arrived.lost.saturating_sub(dropped);
        let mut finding = Finding::new(
            way("loss_there_percent", "loss_back_percent", from),
            format!("UDP loss {}, of {}", direction(from), arrived.sent),
            "%",
        )
        .claims(claim, least * 100.0, most * 100.0)
        .measured(100.0 * lost as f64 / arrived.sent.max(1) as f64);
        if dropped > 0 {
            finding.excuse = Some("machine too busy to tell");
        }
        Ok(finding)
    }

    /// How long packets wait behind a queue that is kept full.
    fn queue(&self, servers: &Servers, idle_ms: f64) -> Result<Option<Finding>> {
        let shape = self.options.shape(Side::A);
        if shape.rate == 0 {
            return Ok(None);
        }
        let claim = shape.queue_bytes as f64 / shape.rate as f64 * 1000.0;
        let excess = 0.25;
        let fill_s = claim / 1000.0 / excess;
        let load = Udp {
            // Six full packets: fragments cost the sender less than datagrams.
            bytes: 6 * 1480 - 8,
            seconds: fill_s * 1.5 + 2.0,
            bits: shape.rate as f64 * 8.0 * (1.0 + excess) * 1480.0 / 1500.0,
        };
        let before = self.link.traffic()?.a_to_b.overflowed;
        let loading = servers.load(self.link, &load)?;
        std::thread::sleep(Duration::from_secs_f64(fill_s * 1.5 + 0.7));
        let times = Ping::new(60, 0.01).run(self.link)?;
        drop(loading);
        let filled = self.link.traffic()?.a_to_b.overflowed > before;
        let loaded = Spread::of(&times).context("no ping came back under load")?;
        let mut finding = Finding::new("queue_ms", "wait in a full queue", "ms")
            .claims(
                claim,
                claim * 0.85 - 2.0,
                claim * 1.1 + 3.0 + self.options.jitter_ms,
            )
            .measured(loaded.median - idle_ms);
        if !filled && finding.measured < finding.least {
            finding.excuse = Some("machine too slow to fill it");
        }
        Ok(Some(finding))
    }

    /// A cut link carries nothing, a healed one does, at once.
    fn cut(&self) -> Result<Vec<Finding>> {
        self.link.cut()?;
        let passed = Ping::new(5, 0.02).wait(0.5).run(self.link)?.len() as f64;
        self.link.heal()?;
        let healed = Instant::now();
        let mut resumed = f64::INFINITY;
        while healed.elapsed() < Duration::from_secs(5) {
            if !Ping::new(1, 0.01).run(self.link)?.is_empty() {
                resumed = healed.elapsed().as_secs_f64() * 1000.0;
                break;
            }
        }
        let most = self.options.rtt_ms + 2.0 * self.options.jitter_ms + 500.0;
        // A first ping that the line loses costs its whole wait.
        let lost = if self.options.loss_percent > 0.0 {
            2000.0
        } else {
            0.0
        };
        Ok(vec![
            Finding::new("cut", "pings over a cut link", "count").measured(passed),
            Finding::new("heal_ms", "first ping after healing", "ms")
                .claims(self.options.rtt_ms, 0.0, most + lost)
                .measured(resumed),
        ])
    }
}

/// The width of the middle nine tenths of some times.
fn middle(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let out = sorted.len() / 20;
    match sorted.get(out..sorted.len() - out) {
        Some([first, .., last]) => last - first,
        _ => 0.0,
    }
}

fn way(there: &'static str, back: &'static str, from: Side) -> &'static str {
    match from {
        Side::A => there,
        Side::B => back,
    }
}

fn direction(from: Side) -> &'static str {
    way("a to b", "b to a", from)
}

fn difference(after: Counters, before: Counters) -> Counters {
    Counters {
        packets_in: after.packets_in - before.packets_in,
        bytes_in: after.bytes_in - before.bytes_in,
        packets_out: after.packets_out - before.packets_out,
        bytes_out: after.bytes_out - before.bytes_out,
        lost: after.lost - before.lost,
        overflowed: after.overflowed - before.overflowed,
        cut: after.cut - before.cut,
    }
}

/// Where the share of successes of `draws` draws of that probability lies, but for one time in 10,000.
fn interval(probability: f64, draws: u64) -> (f64, f64) {
    // The values whose own Wilson interval would touch the probability are these two, to a good approximation.
    let half = Z * (probability * (1.0 - probability) / draws.max(1) as f64).sqrt();
    ((probability - half).max(0.0), (probability + half).min(1.0))
}

#[cfg(test)]
mod tests;
