//! Throughput where the link is no limit, and where the time goes: one image over loopback, and over a link in user
//! space without a rate. Repetitions are alternated, so that what the machine does meanwhile hits all alike.

mod tools;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::Result;

use self::tools::{Carried, Job, Tool};
use super::lines::Net;
use super::pictures::{Words, bars};
use super::{Lab, file_name};
use crate::bench::{About, Axis, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};
use crate::link::Options;
use crate::same::identical;
use crate::site::Stage;

const MIB: f64 = (1u64 << 20) as f64;
const LOOPBACK: &str = "loopback";
const LINK: &str = "link";
/// What is sent, and what the site has that is like it.
const FULL: [&str; 2] = ["bookworm-app", "bookworm-web"];
const SMALL: [&str; 2] = ["small-one", "small-two"];
/// Stages in the order in which data goes through them.
const STAGES: &[(&str, &[&str])] = &[
    (
        "source",
        &["read", "scan", "digest", "fetch", "compress", "send"],
    ),
    (
        "destination",
        &[
            "receive", "unpack", "verify", "write", "matching", "copy", "check", "drive", "log",
            "sync", "deliver",
        ],
    ),
];

/// The experiment.
pub struct Throughput;

static ABOUT: About = About {
    name: "throughput",
    title: "Throughput without a limit, and where the time goes",
    text: "One image over loopback, and over a link in user space without rate and delay: by drover to an empty site \
(*first*), the same image once more (*again*), and to a site that has a similar one (*similar*); by `rsync --whole-file` to a \
daemon, bare and with `--sparse --fsync`; by zstd over a socket; and by `cp` and `dd conv=fsync`, which use no network and are what \
the machine's memory and disk allow. drover's copy is synced when it says that it is done, and so are those of the tools \
with `fsync`. Everyone reads the image from memory; dirty pages are written out before each measurement; the tools take turns. \
Data is what the image takes on disk. Cores are the processor time of both ends over the time. In user space the link \
itself takes up to a core.\n\n\
The rows of stages say what drover's pipeline did, by its own clocks: *busy* is work, disk included, as a share of the time; \
what is above 100 % is more than one thread. *Waiting* is for the stage before or behind, *socket* for the other end.",
    columns: &[
        Column::label("place", "over"),
        Column::label("by", "by"),
        Column::label("stage", "stage"),
        Column::figure("seconds", "seconds", 2),
        Column::optional("data_mb_s", "data MB/s", 0),
        Column::optional("size_mb_s", "size MB/s", 0),
        Column::optional("wire_mb", "wire MB", 1),
        Column::optional("cores", "cores", 2),
        Column::optional("sender_mib", "sender MiB", 1),
        Column::optional("site_mib", "site MiB", 1),
        Column::optional("busy_percent", "busy %", 1),
        Column::optional("wait_percent", "waiting %", 1),
        Column::optional("socket_percent", "socket %", 1),
        Column::optional("stage_mb", "through it, MB", 1),
    ],
};

impl Experiment for Throughput {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let case = |id: &str, what: &str, needs| Case {
            id: id.to_owned(),
            what: what.to_owned(),
            seconds: if lab.small { 12.0 } else { 45.0 } * lab.repeat.max(1) as f64,
            rank: 0,
            subject: Subject::Drover,
            needs,
        };
        Ok(vec![
            case(
                LOOPBACK,
                "one image over loopback, by everyone",
                &[Need::Library],
            ),
            case(
                LINK,
                "one image over a link without a rate",
                &[Need::Library, Need::Link],
            ),
        ])
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let link = case.id == LINK;
        let net = if link {
            Net::over(&Options {
                name: format!("flow-{}", std::process::id()),
                rtt_ms: 0.0,
                rate_mbit: 0.0,
                ..Options::default()
            })?
        } else {
            Net::loopback()
        };
        let mut series = all_series(Tool::all(link, lab.small));
        rounds(lab, &net, &mut series)?;
        let image = lab.image(names(lab)[0])?;
        let meta = fs::metadata(&image)?;
        let (data, size) = (meta.blocks() * 512, meta.len());
        let place = if link { "link, no rate" } else { LOOPBACK };
        Ok(series
            .iter()
            .flatten()
            .flat_map(|s| s.rows(place, data as f64 / 1e6, size as f64 / 1e6))
            .collect())
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let all: Vec<&Row> = rows.iter().collect();
        let tools = bars(
            &all,
            "by",
            "place",
            "data_mb_s",
            Words {
                name: "throughput",
                title: "Throughput without a limit".to_owned(),
                y: Axis::linear("MB of data a second"),
            },
        );
        let local: Vec<&Row> = rows
            .iter()
            .filter(|row| row.label("place") == LOOPBACK)
            .collect();
        let stages = bars(
            &local,
            "stage",
            "by",
            "busy_percent",
            Words {
                name: "stages",
                title: "Where drover's time goes, over loopback".to_owned(),
                y: Axis::linear("busy, % of the time"),
            },
        );
        tools.into_iter().chain(stages).collect()
    }

    fn images(&self, lab: &Lab, _case: &Case) -> Option<Vec<PathBuf>> {
        Some(
            names(lab)
                .iter()
                .filter_map(|n| lab.image(n).ok())
                .collect(),
        )
    }
}

fn names(lab: &Lab) -> [&'static str; 2] {
    if lab.small { SMALL } else { FULL }
}

/// What has been measured under one name.
struct Series {
    tool: Tool,
    name: &'static str,
    /// Which of the tool's carryings.
    nth: usize,
    carried: Vec<Carried>,
    verdict: Verdict,
}

fn all_series(tools: Vec<Tool>) -> Vec<Vec<Series>> {
    let of = |tool: Tool| {
        let series = |(nth, name)| Series {
            tool,
            name,
            nth,
            carried: Vec::new(),
            verdict: match tool.missing() {
                None => Verdict::Good,
                Some(why) => {
                    eprintln!("SKIP {name}: {why}");
                    Verdict::Skipped(why)
                }
            },
        };
        tool.names().into_iter().enumerate().map(series).collect()
    };
    tools.into_iter().map(of).collect()
}

/// Everyone in turn, and another first in each round: what one leaves to the disk is not always paid by the same.
fn rounds(lab: &Lab, net: &Net, series: &mut [Vec<Series>]) -> Result<()> {
    let [image, similar] = names(lab);
    let (image, similar) = (lab.image(image)?, lab.image(similar)?);
    let (drover, work) = (lab.binary()?, lab.work("throughput")?);
    let dir = work.join("round");
    // Once for nothing: everyone reads the images from memory.
    for path in [&image, &similar] {
        identical(path, path)?;
    }
    let job = Job {
        drover: &drover,
        image: &image,
        similar: &similar,
        dir: &dir,
        net,
    };
    for round in 0..lab.repeat.max(1) {
        for turn in 0..series.len() {
            let at = (round + turn) % series.len();
            measure(&mut series[at], &job);
            let _ = fs::remove_dir_all(&dir);
        }
    }
    Ok(())
}

fn measure(series: &mut [Series], job: &Job<'_>) {
    let Some(tool) = series.first().map(|s| s.tool) else {
        return;
    };
    if series
        .iter()
        .any(|s| matches!(s.verdict, Verdict::Skipped(_) | Verdict::Failed(_)))
    {
        return;
    }
    match tool.carry(job) {
        Ok(carried) => {
            for of in series {
                let Some(one) = carried.get(of.nth) else {
                    continue;
                };
                if !one.same {
                    let name = file_name(job.image);
                    of.verdict = Verdict::Wrong(format!("{name}: the copy is not the original"));
                }
                eprintln!("  {}: {:.2} s", of.name, one.seconds);
                of.carried.push(one.clone());
            }
        }
        Err(error) => {
            for of in series {
                of.verdict = Verdict::Failed(format!("{error:#}"));
            }
        }
    }
}

impl Series {
    /// A row of it all, and one for each stage that said something.
    fn rows(&self, place: &str, data_mb: f64, size_mb: f64) -> Vec<Row> {
        let labels = |stage: String| {
            Row::new([
                ("place", place.to_owned()),
                ("by", self.name.to_owned()),
                ("stage", stage),
            ])
        };
        let mut row = labels(String::new());
        row.verdict = self.verdict.clone();
        let all = |of: &dyn Fn(&Carried) -> Option<f64>| -> Vec<f64> {
            self.carried.iter().filter_map(of).collect()
        };
        row.set_all("seconds", &all(&|c| Some(c.seconds)));
        row.set_all("data_mb_s", &all(&|c| Some(data_mb / c.seconds)));
        row.set_all("size_mb_s", &all(&|c| Some(size_mb / c.seconds)));
        row.set_all("cores", &all(&|c| Some(c.cpu_seconds / c.seconds)));
        row.set_all("sender_mib", &all(&|c| Some(c.peaks?.0 as f64 / MIB)));
        row.set_all("site_mib", &all(&|c| Some(c.peaks?.1 as f64 / MIB)));
        let wire = |c: &Carried| Some(c.sent.as_ref()?.wire_bytes() as f64 / 1e6);
        row.set_all("wire_mb", &all(&wire));
        let mut rows = vec![row];
        for (end, stages) in STAGES {
            for stage in *stages {
                let said: Vec<(f64, Stage)> = self
                    .carried
                    .iter()
                    .filter_map(|c| {
                        let sent = c.sent.as_ref()?;
                        Some((sent.seconds, *sent.stages.get(*end)?.get(*stage)?))
                    })
                    .collect();
                if !said.is_empty() {
                    rows.push(of_stage(labels(format!("{end} {stage}")), &said));
                }
            }
        }
        rows
    }
}

fn of_stage(mut row: Row, said: &[(f64, Stage)]) -> Row {
    let mut set = |key: &str, of: &dyn Fn(&(f64, Stage)) -> f64| {
        let values: Vec<f64> = said.iter().map(of).collect();
        row.set_all(key, &values);
    };
    set("seconds", &|(seconds, _)| *seconds);
    set("busy_percent", &|(s, stage)| 100.0 * stage.busy_seconds / s);
    set("wait_percent", &|(s, stage)| 100.0 * stage.wait_seconds / s);
    set("socket_percent", &|(s, stage)| {
        100.0 * stage.socket_seconds / s
    });
    set("stage_mb", &|(_, stage)| stage.bytes as f64 / 1e6);
    row
}

#[cfg(test)]
mod tests {
    use super::super::stand_in;
    use super::*;
    use crate::bench::Kind;

    fn run(damage: &str) -> Vec<Row> {
        let dir = tempfile::tempdir().unwrap();
        let images = dir.path().join("cache/images");
        fs::create_dir_all(&images).unwrap();
        fs::create_dir(dir.path().join("out")).unwrap();
        for (name, byte) in [("small-one", 1), ("small-two", 2)] {
            let content = [vec![byte; 5000], vec![9; 8192]].concat();
            fs::write(images.join(format!("{name}.raw")), content).unwrap();
        }
        let mut lab = stand_in::lab(dir.path(), damage);
        lab.small = true;
        let case = Throughput.cases(&lab).unwrap().remove(0);
        let rows = Throughput.run(&lab, &case).unwrap();
        assert_eq!(
            fs::read_dir(dir.path().join("out")).unwrap().count(),
            0,
            "something stays"
        );
        rows
    }

    #[test]
    fn everyone_is_measured_in_turn() {
        let rows = run("");
        let by: Vec<&str> = rows.iter().map(|row| row.label("by")).collect();
        assert_eq!(
            by[..3],
            ["drover, first", "drover, again", "drover, similar"]
        );
        assert_eq!(by[by.len() - 2..], ["cp", "dd conv=fsync"]);
        for row in rows
            .iter()
            .filter(|r| !matches!(r.verdict, Verdict::Skipped(_)))
        {
            assert_eq!(row.verdict, Verdict::Good, "{row:?}");
            assert_eq!(row.figures["seconds"].runs, 2, "{row:?}");
            assert!(row.value("data_mb_s").unwrap() > 0.0);
        }
    }

    #[test]
    fn what_goes_wrong_is_a_row_and_the_others_go_on() {
        let wrong = run(r#"echo x >> "$to""#);
        assert!(matches!(wrong[0].verdict, Verdict::Wrong(_)), "{wrong:?}");
        assert_eq!(wrong.last().unwrap().verdict, Verdict::Good);
        let failed = run("echo no space there >&2; exit 3");
        let Verdict::Failed(why) = &failed[1].verdict else {
            panic!("{failed:?}")
        };
        assert!(why.contains("no space there"), "{why}");
        assert_eq!(failed.last().unwrap().verdict, Verdict::Good);
    }

    #[test]
    fn stages_are_rows_and_bars() {
        let stage = Stage {
            busy_seconds: 1.5,
            wait_seconds: 0.5,
            socket_seconds: 0.0,
            bytes: 3_000_000,
        };
        let mut sent = crate::site::Sent {
            seconds: 2.0,
            ..Default::default()
        };
        let source = sent.stages.entry("source".to_owned()).or_default();
        source.insert("digest".to_owned(), stage);
        let series = Series {
            tool: Tool::Drover,
            name: "drover, first",
            nth: 0,
            carried: vec![Carried {
                seconds: 2.5,
                sent: Some(sent),
                ..Carried::default()
            }],
            verdict: Verdict::Good,
        };
        let rows = series.rows(LOOPBACK, 10.0, 20.0);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].value("data_mb_s"), Some(4.0));
        assert_eq!(rows[1].label("stage"), "source digest");
        assert_eq!(rows[1].value("busy_percent"), Some(75.0));
        let plots = Throughput.plots(&rows);
        let Kind::Bars { groups, series, .. } = &plots[1].kind else {
            panic!("{plots:?}")
        };
        assert_eq!(groups[..], ["source digest"]);
        assert_eq!(series[0].1[..], [Some(75.0)]);
    }
}
