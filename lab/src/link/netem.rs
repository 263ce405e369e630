//! The link in the kernel: a veth pair between the namespaces, and at each end `netem` for the line and `tbf` under
//! it for the bottleneck and its queue (tc-netem(8), tc-tbf(8)).
//!
//! A packet leaves its end so: a filter counts it; netem loses or delays it; tbf queues it at the rate; the veth
//! brings it to the other end, where a second filter drops it while the link is cut. The line comes before the
//! bottleneck, unlike in the user-space engine: together they do the same, and the queue can be counted in bytes.

use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::namespaces::Namespaces;
use super::queue::{Counters, Shape};
use super::{MTU, Options, Side, Traffic, Unavailable};
use crate::shell;

/// Bytes of an Ethernet header, which the kernel counts on a veth and this lab does not.
const ETHERNET: u64 = 14;
/// Packets on the line at most: 512 MiB of full ones, as in the user-space engine.
const LINE_PACKETS: u64 = (512 << 20) / MTU;

/// A link of the kernel's; its devices go with the namespaces.
#[derive(Debug)]
pub struct NetemLink {
    namespaces: [String; 2],
    cut: Mutex<bool>,
    /// Whether loss follows the seed: since Linux 6.7 and iproute2 6.6.
    pub seeded: bool,
}

impl NetemLink {
    /// Joins the namespaces by a veth pair and shapes both ends.
    ///
    /// # Errors
    /// [`Unavailable`] when the kernel or `tc` lacks a part.
    pub fn up(namespaces: &Namespaces, options: &Options) -> Result<Self> {
        if !shell::have("tc") {
            return Err(Unavailable("`tc` is not installed (iproute2)".to_owned()).into());
        }
        let names = Side::BOTH.map(|side| namespaces.name(side));
        let [a, b] = [names[0].as_str(), names[1].as_str()];
        shell::run(Command::new("ip").args([
            "-n",
            a,
            "link",
            "add",
            "wan0",
            "address",
            mac(Side::A),
            "type",
            "veth",
            "peer",
            "name",
            "wan0",
            "address",
            mac(Side::B),
            "netns",
            b,
        ]))
        .map_err(|error| Unavailable(format!("no veth pair: {error}")))?;
        let mut this = Self {
            namespaces: names,
            cut: Mutex::new(false),
            seeded: true,
        };
        for side in Side::BOTH {
            namespaces.pieces(side, options)?;
            namespaces.address(side, options)?;
            let other = side.other();
            // Nobody asks who has an address: that would be counted, and cost a round trip.
            namespaces.ip(
                side,
                &[
                    "neigh",
                    "replace",
                    other.address(),
                    "lladdr",
                    mac(other),
                    "dev",
                    "wan0",
                    "nud",
                    "permanent",
                ],
            )?;
            this.shape(side, options)
                .map_err(|error| Unavailable(format!("no netem: {error}")))?;
        }
        Ok(this)
    }

    fn shape(&mut self, side: Side, options: &Options) -> Result<()> {
        let shape = options.shape(side);
        let seed = options.seed.wrapping_add(side as u64);
        let seeded = line(&shape, Some(seed));
        // A tc or a kernel that knows no seed loses as many packets, only not the same ones each time.
        if !(self.seeded && self.tc(side, &seeded).is_ok()) {
            self.seeded = false;
            self.tc(side, &line(&shape, None))?;
        }
        if let Some(bottleneck) = bottleneck(&shape, options.piece_bytes(side)) {
            self.tc(side, &bottleneck)?;
        }
        for command in FILTERS {
            self.tc(side, &words(command))?;
        }
        Ok(())
    }

    /// Cuts the line at its far ends, or heals it: what is under way is lost.
    pub fn set_cut(&self, cut: bool) -> Result<()> {
        let mut is_cut = self
            .cut
            .lock()
            .map_err(|_| anyhow::anyhow!("a cut failed before"))?;
        if *is_cut != cut {
            for side in Side::BOTH {
                self.tc(side, &words(if cut { CUT } else { HEAL }))?;
            }
            *is_cut = cut;
        }
        Ok(())
    }

    /// What has passed so far, by the statistics of qdiscs and filters.
    pub fn traffic(&self) -> Result<Traffic> {
        let of = |from: Side| -> Result<Counters> {
            counters(
                &self.json(from, SHOW[0])?,
                &self.json(from, SHOW[1])?,
                &self.json(from.other(), SHOW[2])?,
            )
        };
        Ok(Traffic {
            a_to_b: of(Side::A)?,
            b_to_a: of(Side::B)?,
        })
    }

    fn tc(&self, side: Side, args: &[String]) -> Result<()> {
        let namespace = &self.namespaces[side as usize];
        shell::run(Command::new("tc").args(["-n", namespace]).args(args)).map(drop)
    }

    fn json(&self, side: Side, args: &str) -> Result<Value> {
        let namespace = &self.namespaces[side as usize];
        let output = shell::run(
            Command::new("tc")
                .args(["-n", namespace])
                .args(args.split(' ')),
        )?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("tc {args}: no JSON"))
    }
}

/// Whether a link of the kernel's can be made in these namespaces, which it leaves as they are.
///
/// # Errors
/// When it cannot.
pub fn probe(namespaces: &Namespaces) -> Result<()> {
    // With all parts, as a kernel may have netem and lack the filters.
    let made = NetemLink::up(namespaces, &Options::default());
    let _ = namespaces.ip(Side::A, &["link", "del", "wan0"]);
    made.map(drop)
}

fn mac(side: Side) -> &'static str {
    match side {
        Side::A => "02:00:0a:4d:00:01",
        Side::B => "02:00:0a:4d:00:02",
    }
}

/// A filter at the sending end that counts all, and an action for the receiving end that counts what a cut loses and
/// stays when its filter goes.
const FILTERS: [&str; 3] = [
    "qdisc add dev wan0 clsact",
    "filter add dev wan0 egress protocol all pref 1 matchall action pass",
    "actions replace action drop index 7",
];
const CUT: &str = "filter add dev wan0 ingress protocol all pref 1 matchall action gact index 7";
const HEAL: &str = "filter del dev wan0 ingress protocol all pref 1";
const SHOW: [&str; 3] = [
    "-s -j qdisc show dev wan0",
    "-s -j filter show dev wan0 egress",
    "-s -j actions get action gact index 7",
];

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// The command for the line: delay, jitter and loss.
fn line(shape: &Shape, seed: Option<u64>) -> Vec<String> {
    let us = |ns: u64| format!("{:.3}us", ns as f64 / 1000.0);
    let mut args = format!("qdisc add dev wan0 root handle 1: netem limit {LINE_PACKETS}");
    args += &format!(" delay {}", us(shape.delay_ns));
    let jitter_ns = shape.jitter_ns.min(shape.delay_ns);
    if jitter_ns > 0 {
        args += &format!(" {}", us(jitter_ns));
    }
    if shape.loss > 0.0 {
        args += &format!(" loss random {}%", shape.loss * 100.0);
        args += &seed.map(|seed| format!(" seed {seed}")).unwrap_or_default();
    }
    if jitter_ns > 0 && !shape.reorder {
        // With a rate of its own, however great, netem lets no packet leave before the one that came before it.
        args += " rate 100gbit";
    }
    words(&args)
}

/// The command for the bottleneck, unless there is none. Rate and queue are those of full packets.
fn bottleneck(shape: &Shape, piece_bytes: u64) -> Option<Vec<String>> {
    let framed = |bytes: u64| bytes * (MTU + ETHERNET) / MTU;
    if shape.rate == 0 {
        return None;
    }
    // A piece must fit, with headers; two milliseconds' worth let a late timer catch up.
    let burst = framed(piece_bytes + piece_bytes / 20 + MTU).max(shape.rate / 500);
    Some(words(&format!(
        "qdisc add dev wan0 parent 1:1 handle 10: tbf rate {}bit burst {burst} limit {}",
        framed(shape.rate * 8),
        framed(shape.queue_bytes),
    )))
}

/// What one direction has counted, by what `tc` says of its qdiscs, of its first filter, and of the action that drops.
fn counters(qdiscs: &Value, filter: &Value, dropped: &Value) -> Result<Counters> {
    let qdisc = |kind: &str| {
        qdiscs
            .as_array()
            .into_iter()
            .flatten()
            .find(|qdisc| qdisc["kind"] == kind)
    };
    let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or(0);
    let (Some(netem), Some(came), Some(cut)) = (qdisc("netem"), stats(filter), stats(dropped))
    else {
        bail!("tc shows no statistics of this link");
    };
    let overflowed = qdisc("tbf").map_or(0, |tbf| number(tbf, "drops"));
    let ip_bytes =
        |of: &Value| number(of, "bytes").saturating_sub(ETHERNET * number(of, "packets"));
    let cut_packets = number(cut, "packets");
    Ok(Counters {
        packets_in: number(came, "packets"),
        bytes_in: ip_bytes(came),
        packets_out: number(netem, "packets").saturating_sub(cut_packets),
        // Behind the veth the Ethernet header is not counted any more.
        bytes_out: ip_bytes(netem).saturating_sub(number(cut, "bytes")),
        // netem's drops are its own and those of the queue under it.
        lost: number(netem, "drops").saturating_sub(overflowed),
        overflowed,
        cut: cut_packets,
    })
}

/// The first `stats` in what `tc` printed.
fn stats(value: &Value) -> Option<&Value> {
    match value {
        Value::Object(map) => map.get("stats").or_else(|| map.values().find_map(stats)),
        Value::Array(items) => items.iter().find_map(stats),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
