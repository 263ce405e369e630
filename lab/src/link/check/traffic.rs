//! `ping` and `iperf3` over a link, with deadlines.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::link::{Link, Side};
use crate::shell;

/// How often a client knocks at a server that is not there yet, or busy ending a test.
const ATTEMPTS: u32 = 12;

/// Pings from `a` to `b`.
pub struct Ping {
    count: u64,
    every_s: f64,
    payload: u64,
}

impl Ping {
    /// So many, so far apart.
    pub fn new(count: u64, every_s: f64) -> Self {
        Self {
            count,
            every_s,
            payload: 56,
        }
    }

    /// Bytes in each.
    pub fn payload(mut self, bytes: u64) -> Self {
        self.payload = bytes;
        self
    }

    /// The times of those that were answered within two seconds, in milliseconds.
    pub fn run(&self, link: &Link) -> Result<Vec<f64>> {
        let output = link
            .command(Side::A, "ping")
            .args([
                "-n",
                "-W",
                "2",
                "-c",
                &self.count.to_string(),
                "-i",
                &self.every_s.to_string(),
            ])
            .args(["-s", &self.payload.to_string(), Side::B.address()])
            .stdin(Stdio::null())
            .output()
            .context("cannot start ping")?;
        // 1 is for pings without an answer.
        if output.status.code().is_none_or(|code| code > 1) {
            bail!("ping: {}: {}", output.status, shell::tail(&output.stderr));
        }
        Ok(times(&String::from_utf8_lossy(&output.stdout)))
    }
}

fn times(text: &str) -> Vec<f64> {
    let after = |line: &str| line.split_once("time=")?.1.split(' ').next()?.parse().ok();
    text.lines().filter_map(after).collect()
}

/// A stream of datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Udp {
    /// Payload of each.
    pub bytes: u32,
    /// How long.
    pub seconds: f64,
    /// Payload bits a second.
    pub bits: f64,
}

/// An `iperf3` server at `b`; ends when it is dropped.
pub struct Server(Child);

impl Server {
    /// Starts it.
    pub fn start(link: &Link) -> Result<Self> {
        let mut command = link.command(Side::B, "iperf3");
        Ok(Self(
            quiet(command.arg("-s"))
                .spawn()
                .context("cannot start iperf3")?,
        ))
    }

    /// What TCP receives at the end opposite to `from`, in Mbit/s.
    pub fn tcp(
        &self,
        link: &Link,
        from: Side,
        streams: u32,
        seconds: u32,
        warm_up: u32,
    ) -> Result<f64> {
        let args = format!("-P {streams} -t {seconds} -O {warm_up}");
        let deadline = f64::from(seconds + warm_up);
        let result = self.client(link, from, &args, deadline)?;
        let bits = result["end"]["sum_received"]["bits_per_second"].as_f64();
        Ok(bits.context("iperf3 tells no received bits")? / 1e6)
    }

    /// How many datagrams were sent from `from`, and how many did not arrive.
    pub fn udp(&self, link: &Link, from: Side, load: &Udp) -> Result<(u64, u64)> {
        let result = self.client(link, from, &args(load), load.seconds)?;
        let sum = &result["end"]["sum"];
        let number = |key: &str| {
            let value = sum[key]
                .as_f64()
                .with_context(|| format!("iperf3 tells no {key}"))?;
            anyhow::Ok(value.max(0.0) as u64)
        };
        Ok((number("packets")?, number("lost_packets")?))
    }

    /// Datagrams from `a` until the guard is dropped or their time is over.
    pub fn load(&self, link: &Link, load: &Udp) -> Result<Self> {
        let mut command = link.command(Side::A, "iperf3");
        command
            .args(["-c", Side::B.address()])
            .args(args(load).split(' '));
        Ok(Self(
            quiet(&mut command).spawn().context("cannot start iperf3")?,
        ))
    }

    fn client(&self, link: &Link, from: Side, args: &str, seconds: f64) -> Result<Value> {
        let deadline = (seconds + 15.0).to_string();
        let mut why = String::new();
        for _ in 0..ATTEMPTS {
            let mut command = link.command(Side::A, "timeout");
            command.args([
                "-k",
                "1",
                &deadline,
                "iperf3",
                "-J",
                "-c",
                Side::B.address(),
            ]);
            command
                .args((from == Side::B).then_some("-R"))
                .args(args.split(' '));
            let output = command
                .stdin(Stdio::null())
                .output()
                .context("cannot start iperf3")?;
            let result: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if output.status.success() && result["error"].is_null() {
                return Ok(result);
            }
            why = match result["error"].as_str() {
                Some(error) => error.to_owned(),
                None => format!("{}: {}", output.status, shell::tail(&output.stderr)),
            };
            if output.status.code() == Some(124) {
                why = format!("no end after {deadline} s");
                break;
            }
            std::thread::sleep(Duration::from_millis(250));
        }
        bail!("iperf3 {args}: {why}")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn args(load: &Udp) -> String {
    format!(
        "-u -l {} -b {:.0} -t {:.0} -w 2M",
        load.bytes,
        load.bits,
        load.seconds.ceil()
    )
}

fn quiet(command: &mut Command) -> &mut Command {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_a_silent_ping_has_none() {
        let text = "64 bytes from 10.77.0.2: icmp_seq=1 ttl=64 time=40.3 ms\n\
            64 bytes from 10.77.0.2: icmp_seq=2 ttl=64 time=41 ms\n\n--- 10.77.0.2 ping statistics ---\n\
            3 packets transmitted, 2 received, 33% packet loss, time 400ms\n";
        assert_eq!(times(text), [40.3, 41.0]);
        assert!(times("--- 10.77.0.2 ping statistics ---\n").is_empty());
    }
}
