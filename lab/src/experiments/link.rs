//! The link: whether it is what it claims to be, at every rate, round-trip time and loss that the lab measures at.

use anyhow::Result;

use super::Lab;
use crate::bench::{
    About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject, Verdict,
};
use crate::link::check::{Checked, Finding, check};
use crate::link::{EngineKind, Options, Unavailable};

/// What a check takes beside its round trips.
const SECONDS: f64 = 16.0;

/// The experiment.
pub struct LinkKeepsItsWord;

static ABOUT: About = About {
    name: "link",
    title: "The link: what it claims against what is measured through it",
    text: "Every experiment over a link takes its rate, round-trip time and loss for granted. Here they are measured, \
        by programs that know nothing of the link: `ping` on an idle line (round trip) and behind a stream of \
        datagrams a quarter faster than the line (the wait in a full queue: its bytes over the rate); `iperf3` with \
        4 to 16 connections each way (the rate times 1448/1500, what IP and TCP headers leave, is the most there can \
        be); 25,000 small datagrams each way (loss, which must lie where chance puts it in all but one of 10,000 \
        runs); and the link's own counters against what was sent. A row fails when any of them is off. With loss, \
        cubic does not fill fast or long links however many connections there are: that is TCP's doing, and there \
        the row asks for no more than 0.4 times what Mathis' formula gives 16 connections.",
    columns: &[
        Column::label("rate", "rate, Mbit/s"),
        Column::label("rtt", "RTT, ms"),
        Column::label("loss", "loss, %"),
        Column::label("engine", "engine"),
        Column::figure("rtt_min_ms", "least RTT, ms", 2),
        Column::figure("rtt_ms", "median RTT, ms", 2),
        Column::figure("tcp_there_mbit", "TCP there, Mbit/s", 1),
        Column::figure("tcp_back_mbit", "TCP back, Mbit/s", 1),
        Column::figure("claim_mbit", "at most, Mbit/s", 1),
        Column::figure("loss_there_percent", "lost there, %", 3),
        Column::figure("loss_back_percent", "lost back, %", 3),
        Column::optional("queue_ms", "full queue, ms", 1),
        Column::figure("queue_claim_ms", "claimed, ms", 1),
        Column::figure("heal_ms", "first ping after a cut, ms", 0),
    ],
};

impl Experiment for LinkKeepsItsWord {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let case = |options: Options| {
            let usual = options.rate_mbit == 100.0 && options.rtt_ms == 40.0;
            Case {
                id: id(&options),
                what: format!("a link of {}", options.describe()),
                // Slow start, filling the queue, and pings take round trips.
                seconds: SECONDS + options.rtt_ms * 0.06,
                rank: u8::from(!usual),
                subject: Subject::Lab,
                needs: &[Need::Link],
            }
        };
        let mut cases: Vec<Case> = settings().into_iter().map(case).collect();
        cases.sort_by_key(|case| case.rank);
        if lab.small {
            cases.truncate(1);
        }
        Ok(cases)
    }

    fn run(&self, _lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let Some(options) = settings()
            .into_iter()
            .find(|options| id(options) == case.id)
        else {
            anyhow::bail!("no case {}", case.id);
        };
        Ok(vec![row(&options, check(&options))])
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        vec![throughput(rows)]
    }
}

fn settings() -> Vec<Options> {
    let options = Options {
        name: format!("lab-word-{}", std::process::id()),
        engine: EngineKind::Auto,
        ..Options::default()
    };
    options.matrix()
}

fn id(options: &Options) -> String {
    let loss = if options.loss_percent > 0.0 {
        "-loss"
    } else {
        ""
    };
    format!("{}mbit-{}ms{loss}", options.rate_mbit, options.rtt_ms)
}

fn row(options: &Options, checked: Result<Checked>) -> Row {
    let mut row = Row::new([
        ("rate", options.rate_mbit.to_string()),
        ("rtt", options.rtt_ms.to_string()),
        ("loss", options.loss_percent.to_string()),
    ]);
    let checked = match checked {
        Ok(checked) => checked,
        Err(error) => {
            row.verdict = match error.downcast_ref() {
                Some(Unavailable(why)) => Verdict::Skipped(why.clone()),
                None => Verdict::Failed(format!("{error:#}")),
            };
            return row;
        }
    };
    row.labels
        .insert("engine".to_owned(), checked.engine.to_owned());
    for finding in &checked.findings {
        match finding.key {
            "queue_ms" => row.set("queue_claim_ms", finding.claim),
            // Where loss is the limit the line could carry more.
            "tcp_there_mbit" => row.set("claim_mbit", finding.ceiling),
            // They hold or they do not.
            "counters" | "cut" => continue,
            _ => {}
        }
        if finding.excuse.is_none() && finding.measured.is_finite() {
            row.set(finding.key, finding.measured);
        }
    }
    let broken: Vec<String> = checked
        .findings
        .iter()
        .filter(|f| !f.holds())
        .map(Finding::complaint)
        .collect();
    if !broken.is_empty() {
        row.verdict = Verdict::Failed(broken.join("; "));
    }
    row
}

/// What TCP gets, over what it can get at most, by round trip; a line a rate and loss.
fn throughput(rows: &[Row]) -> Plot {
    let mut lines: Vec<(String, Vec<Point>)> = Vec::new();
    for row in rows {
        let both = [row.value("tcp_there_mbit"), row.value("tcp_back_mbit")];
        let ([Some(there), Some(back)], Some(most), Ok(x)) =
            (both, row.value("claim_mbit"), row.label("rtt").parse())
        else {
            continue;
        };
        let percent = |mbit: f64| 100.0 * mbit / most;
        let name = match row.label("loss") {
            "0" => format!("{} Mbit/s", row.label("rate")),
            loss => format!("{} Mbit/s, {loss} % loss", row.label("rate")),
        };
        let point = Point {
            x,
            y: percent(f64::midpoint(there, back)),
            range: Some((percent(there.min(back)), percent(there.max(back)))),
        };
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    Plot {
        name: "throughput".to_owned(),
        title: "TCP through the link, of what its rate leaves after headers".to_owned(),
        x: Axis::log("round-trip time, ms"),
        y: Axis::linear("throughput, % of the claim"),
        kind: Kind::Lines(lines),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(key: &'static str, measured: f64, most: f64) -> Finding {
        Finding {
            key,
            what: key.to_owned(),
            unit: "x",
            claim: 96.0,
            measured,
            least: 80.0,
            most,
            ceiling: 96.5,
            excuse: None,
        }
    }

    fn checked(findings: Vec<Finding>) -> Result<Checked> {
        Ok(Checked {
            link: "a link".to_owned(),
            engine: "in user space",
            findings,
        })
    }

    #[test]
    fn every_case_is_found_again_and_the_usual_link_comes_first() {
        let ids: Vec<String> = settings().iter().map(id).collect();
        assert_eq!(ids.len(), 18);
        let mut unique = ids.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), 18);
        assert!(ids.contains(&"1000mbit-150ms-loss".to_owned()));
    }

    #[test]
    fn a_broken_claim_is_a_failed_row_with_its_figures() {
        let options = Options::default();
        let good = row(
            &options,
            checked(vec![finding("tcp_there_mbit", 95.0, 98.0)]),
        );
        assert_eq!(good.verdict, Verdict::Good);
        assert_eq!(good.value("claim_mbit"), Some(96.5));
        let bad = row(
            &options,
            checked(vec![finding("tcp_there_mbit", 99.0, 98.0)]),
        );
        assert!(matches!(&bad.verdict, Verdict::Failed(why) if why.contains("99.000")));
        assert_eq!(bad.value("tcp_there_mbit"), Some(99.0));
        let none = row(&options, Err(Unavailable("no root".to_owned()).into()));
        assert_eq!(none.verdict, Verdict::Skipped("no root".to_owned()));
    }

    #[test]
    fn the_plot_is_in_percent_of_what_can_be() {
        let with = |rtt: &str, there: f64, back: f64| {
            Row::new([
                ("rate", "100".to_owned()),
                ("rtt", rtt.to_owned()),
                ("loss", "0".to_owned()),
            ])
            .with("tcp_there_mbit", there)
            .with("tcp_back_mbit", back)
            .with("claim_mbit", 50.0)
        };
        let skipped = Row::new([("rate", "20".to_owned())]);
        let plot = throughput(&[with("40", 45.0, 50.0), skipped, with("5", 50.0, 50.0)]);
        let Kind::Lines(lines) = plot.kind else {
            panic!("lines");
        };
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].0, "100 Mbit/s");
        assert_eq!(lines[0].1[0].x, 5.0);
        assert_eq!(
            (lines[0].1[1].y, lines[0].1[1].range),
            (95.0, Some((90.0, 100.0)))
        );
    }
}
