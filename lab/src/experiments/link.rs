//! Verifies the emulated link with independent programs.

use std::process::Command;

use anyhow::{Context, Result, bail};

use super::lines::{self, Line, Net, REFERENCE};
use super::pull::Iperf;
use crate::bench::{Case, Column, Experiment, Figure, Need, Row, Verdict};
use crate::link::{Link, Side};
use crate::setup::Lab;
use crate::shell;

pub const EXPERIMENT: Experiment = Experiment {
    name: "link",
    title: "The link: what it claims against what is measured through it",
    text: "Every experiment over a link takes its rate and its round-trip time for granted. Here they are measured by programs that know \
nothing of the link: `ping` on an idle line, and `iperf3` with 16 connections each way, of which the rate times 1448/1500, what IP and TCP headers \
leave, is the most there can be. Without loss a row fails when a round trip is more than 2 ms off, or TCP gets less than nine tenths of that or more \
than all.",
    columns: &[
        Column::label("link", "link"),
        Column::figure("rtt_ms", "round trip, ms", 2),
        Column::figure("tcp_there_mbit", "TCP there, Mbit/s", 1),
        Column::figure("tcp_back_mbit", "TCP back, Mbit/s", 1),
        Column::figure("claim_mbit", "at most, Mbit/s", 1),
    ],
    cases: |lab| {
        let all = lines::matrix()
            .into_iter()
            .filter(|line| !lab.small || *line == REFERENCE);
        let case = |line: Line| {
            Case::new(
                line.slug(),
                line.describe(),
                u8::from(line != REFERENCE),
                &[Need::Link],
            )
        };
        Ok(all.map(case).collect())
    },
    run,
};

fn run(_lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let line = lines::matrix()
        .into_iter()
        .find(|line| line.slug() == case.id);
    let line = line.context("no such case")?;
    let row = Row::new([("link", line.describe())]);
    if let Some(missing) = ["ping", "iperf3"]
        .into_iter()
        .find(|program| !shell::have(program))
    {
        return Ok(vec![
            row.but(Verdict::Skipped(format!("{missing} is not installed"))),
        ]);
    }
    let net = Net::like(Some(line), 1)?;
    let link = net.link().context("no link")?;
    let claim = line.rate_mbit * 1448.0 / 1500.0;
    let (rtt, there, back) = (ping(link)?, tcp(link, &[])?, tcp(link, &["-R"])?);
    let mut row = row;
    row.set_all("rtt_ms", &rtt);
    row.set("tcp_there_mbit", there);
    row.set("tcp_back_mbit", back);
    row.set("claim_mbit", claim);
    let off = Figure::of(&rtt).is_none_or(|rtt| (rtt.median - line.rtt_ms).abs() > 2.0);
    let kept = |rate: f64| (0.9 * claim..=1.03 * claim).contains(&rate);
    if line.loss_percent == 0.0 && (off || !kept(there) || !kept(back)) {
        row.verdict = Verdict::Failed("the link does not keep its word".to_owned());
    }
    Ok(vec![row])
}

/// Round-trip times in ms.
fn ping(link: &Link) -> Result<Vec<f64>> {
    let mut ping: Command = link.command(Side::A, "ping");
    let said = shell::run(ping.args(["-n", "-c", "20", "-i", "0.05", Side::B.address()]))?.stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    let time = |line: &str| line.split_once("time=")?.1.split(' ').next()?.parse().ok();
    Ok(said.lines().filter_map(time).collect())
}

/// Throughput of 16 connections in steady state, in Mbit/s.
fn tcp(link: &Link, way: &[&str]) -> Result<f64> {
    let _server = Iperf::start(link, Side::B, &["-s", "-1"])?;
    for _ in 0..20 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let mut client = link.command(Side::A, "iperf3");
        client
            .args([
                "-J",
                "-P",
                "16",
                "-t",
                "4",
                "-O",
                "3",
                "-c",
                Side::B.address(),
            ])
            .args(way);
        let Ok(output) = shell::run(&mut client) else {
            continue;
        };
        let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rate = said["end"]["sum_received"]["bits_per_second"].as_f64();
        return Ok(rate.context("iperf3 reports no rate")? / 1e6);
    }
    bail!("iperf3 does not answer")
}
