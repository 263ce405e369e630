//! `ping` and `iperf3` over a link, with deadlines.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::link::{Link, Side};
use crate::shell;

/// In real time, as the link's threads are: a ping that waits for a processor tells nothing of the link.
const REAL_TIME: [&str; 3] = ["chrt", "-r", "1"];
/// How often a client knocks at a server that is not there yet, or busy ending a test.
const ATTEMPTS: u32 = 12;

/// Pings from `a` to `b`.
pub struct Ping {
    count: u64,
    every_s: f64,
    payload: u64,
    wait_s: f64,
}

impl Ping {
    /// So many, so far apart.
    pub fn new(count: u64, every_s: f64) -> Self {
        Self {
            count,
            every_s,
            payload: 56,
            wait_s: 2.0,
        }
    }

    /// Bytes in each.
    pub fn payload(mut self, bytes: u64) -> Self {
        self.payload = bytes;
        self
    }

    /// How long to wait for an answer to the last one.
    pub fn wait(mut self, seconds: f64) -> Self {
        self.wait_s = seconds;
        self
    }

    /// The times of those that were answered, in milliseconds.
    pub fn run(&self, link: &Link) -> Result<Vec<f64>> {
        let output = link
            .command(Side::A, "env")
            .args(REAL_TIME.iter().filter(|_| shell::have("chrt")))
            .args([
                "ping",
                "-n",
                "-W",
                &self.wait_s.to_string(),
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

/// What became of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrived {
    /// Sent.
    pub sent: u64,
    /// Not received.
    pub lost: u64,
    /// Of them: came, and found no room in the receiver's buffer.
    pub dropped: u64,
}

/// An `iperf3` server at each end; they end when this is dropped. The client is always at the receiving end, because
/// only there `iperf3` tells what was received second by second, without what it sends after its time.
pub struct Servers {
    _guards: [Guard; 2],
}

impl Servers {
    /// Starts them.
    pub fn start(link: &Link) -> Result<Self> {
        let server = |side| Guard::start(link.command(side, "iperf3").arg("-s"));
        Ok(Self {
            _guards: [server(Side::A)?, server(Side::B)?],
        })
    }

    /// What TCP receives from `from`, in Mbit/s.
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
        let result = client(link, from, &args, deadline)?;
        received_mbit(&result).context("iperf3 tells no received bytes")
    }

    /// How many datagrams were sent from `from`, and how many were lost.
    pub fn udp(&self, link: &Link, from: Side, load: &Udp) -> Result<Arrived> {
        let before = buffer_errors(link, from.other())?;
        let result = client(link, from, &args(load), load.seconds)?;
        let dropped = buffer_errors(link, from.other())?.saturating_sub(before);
        let sum = &result["end"]["sum"];
        let number = |key: &str| {
            let value = sum[key]
                .as_f64()
                .with_context(|| format!("iperf3 tells no {key}"))?;
            anyhow::Ok(value.max(0.0) as u64)
        };
        Ok(Arrived {
            sent: number("packets")?,
            lost: number("lost_packets")?,
            dropped,
        })
    }

    /// Datagrams from `a` until the guard is dropped or their time is over.
    pub fn load(&self, link: &Link, load: &Udp) -> Result<Guard> {
        let mut command = link.command(Side::A, "iperf3");
        command.args(["-c", Side::B.address()]);
        Guard::start(command.args(args(load).split(' ')))
    }
}

/// Runs a client at the end opposite to `from` until it has come to its end.
fn client(link: &Link, from: Side, args: &str, seconds: f64) -> Result<Value> {
    let deadline = (seconds + 15.0).to_string();
    let mut why = String::new();
    for _ in 0..ATTEMPTS {
        let mut command = link.command(from.other(), "timeout");
        command
            .args(["-k", "1", &deadline, "iperf3", "-J", "-R"])
            .args(["-c", from.address()])
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

/// Received bits of all intervals after the warm-up, over their time.
fn received_mbit(result: &Value) -> Option<f64> {
    let (mut bytes, mut seconds) = (0.0, 0.0);
    for interval in result["intervals"].as_array()? {
        let sum = &interval["sum"];
        if sum["omitted"] == false {
            bytes += sum["bytes"].as_f64()?;
            seconds += sum["seconds"].as_f64()?;
        }
    }
    (seconds > 0.0).then(|| bytes * 8e-6 / seconds)
}

/// Datagrams that came and found no room in their socket.
fn buffer_errors(link: &Link, side: Side) -> Result<u64> {
    let output = shell::run(link.command(side, "cat").arg("/proc/net/snmp"))?;
    udp_buffer_errors(&String::from_utf8_lossy(&output.stdout))
        .context("no RcvbufErrors in /proc/net/snmp")
}

fn udp_buffer_errors(snmp: &str) -> Option<u64> {
    let mut lines = snmp.lines().filter(|line| line.starts_with("Udp: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split(' ').position(|name| name == "RcvbufErrors")?;
    values.split(' ').nth(at)?.parse().ok()
}

/// A program that runs until this is dropped.
pub struct Guard(Child);

impl Guard {
    fn start(command: &mut Command) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Ok(Self(child.context("cannot start iperf3")?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn args(load: &Udp) -> String {
    format!(
        "-u -l {} -b {:.0} -t {:.0}",
        load.bytes,
        load.bits,
        load.seconds.ceil()
    )
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

    #[test]
    fn only_what_was_received_after_the_warm_up_counts() {
        let interval = |bytes: u64, seconds: f64, omitted: bool| {
            let sum = serde_json::json!({"bytes": bytes, "seconds": seconds, "omitted": omitted});
            serde_json::json!({ "sum": sum })
        };
        let result = serde_json::json!({"intervals": [
            interval(1, 1.0, true), interval(1_000_000, 1.0, false), interval(2_000_000, 2.0, false),
        ]});
        assert_eq!(received_mbit(&result), Some(8.0));
        assert_eq!(received_mbit(&serde_json::json!({"intervals": []})), None);
        assert_eq!(received_mbit(&serde_json::json!({})), None);
    }

    #[test]
    fn the_errors_of_full_buffers_are_found() {
        let snmp = "Tcp: A B\nTcp: 1 2\nUdp: InDatagrams NoPorts RcvbufErrors\nUdp: 5 6 7\n";
        assert_eq!(udp_buffer_errors(snmp), Some(7));
        assert_eq!(udp_buffer_errors("Udp: InDatagrams\n"), None);
    }
}
