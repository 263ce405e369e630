//! What a front end costs: a device in memory through each, by fio, beside `nbdkit memory` and a file in memory.

mod servers;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use self::servers::{By, Server};
use super::Lab;
use super::pictures::values;
use crate::bench::{About, Axis, Case, Column, Experiment, Kind, Plot, Row, Subject, Verdict};
use crate::{shell, watch};

/// The experiment.
pub struct Frontends;

static ABOUT: About = About {
    name: "frontends",
    title: "What a front end costs",
    text: "A disk of 256 MiB in memory, written whole and verified by fio first, then read and written by fio for two seconds a run: 4 KiB \
at random places and 1 MiB in order, with 1 and with 32 requests under way. NBD is over a Unix socket on one connection (fio's nbd engine); the file of the FUSE \
mount and the loop device on it are used with direct I/O (libaio); the file on tmpfs cannot be, so it is a copy from the page cache, and its \
requests are served one after the other whatever the depth. `nbdkit memory` is beside drover's NBD server. Runs of all alternate. *load* is the \
machine's load average before and after, fio's own work included.",
    columns: &[
        Column::label("request", "request"),
        Column::label("depth", "depth"),
        Column::label("by", "by"),
        Column::figure("iops", "requests/s", 0),
        Column::figure("mib_s", "MiB/s", 0),
        Column::figure("p50_us", "p50, us", 1),
        Column::figure("p99_us", "p99, us", 1),
        Column::optional("of_tmpfs_percent", "of tmpfs, %", 1),
        Column::optional("of_nbdkit_percent", "of nbdkit, %", 1),
        Column::figure("load", "load", 1),
    ],
};

/// Bytes of the disk in MiB.
const SIZE_MIB: u32 = 256;

/// Rounds over everything, at most: each takes 40 runs.
const ROUNDS: usize = 2;

/// How long one fio may take, in seconds, before it is ended.
const PATIENCE_S: &str = "60";

/// What fio asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    large: bool,
    writes: bool,
    depth: u32,
}

fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for large in [false, true] {
        for writes in [false, true] {
            jobs.extend([1, 32].map(|depth| Job {
                large,
                writes,
                depth,
            }));
        }
    }
    jobs
}

impl Job {
    fn request(self) -> String {
        let size = if self.large { "1 MiB" } else { "4 KiB" };
        format!("{size} {}", if self.writes { "write" } else { "read" })
    }

    /// As fio calls the order and the size.
    fn args(self) -> [String; 3] {
        let order = match (self.large, self.writes) {
            (false, false) => "randread",
            (false, true) => "randwrite",
            (true, false) => "read",
            (true, true) => "write",
        };
        let size = if self.large { "1M" } else { "4k" };
        [
            format!("--rw={order}"),
            format!("--bs={size}"),
            format!("--iodepth={}", self.depth),
        ]
    }
}

/// What fio said of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ran {
    iops: f64,
    mib_s: f64,
    p50_us: f64,
    p99_us: f64,
}

impl Experiment for Frontends {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        Ok(vec![Case {
            id: "memory".to_owned(),
            what: "a disk in memory through each front end".to_owned(),
            seconds: if lab.small { 40.0 } else { 200.0 },
            rank: 0,
            subject: Subject::Drover,
            needs: &[],
        }])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        if !shell::have("fio") {
            let mut row = Row::new([("by", "fio".to_owned())]);
            row.verdict = Verdict::Skipped("fio is not installed".to_owned());
            return Ok(vec![row]);
        }
        let load = watch::load();
        let work = lab.work(ABOUT.name)?;
        let mut servers = Vec::new();
        let mut bad = Vec::new();
        for by in By::ALL {
            let started = match by.missing() {
                Some(why) => Err(Verdict::Skipped(why)),
                None => start(lab, by, &work.join(by.slug()))
                    .map_err(|error| Verdict::Failed(format!("{error:#}"))),
            };
            match started {
                Ok(server) => servers.push(server),
                Err(verdict) => {
                    let mut row = Row::new([("by", by.name().to_owned())]);
                    row.verdict = verdict;
                    bad.push(row);
                }
            }
        }
        let time = if lab.small { "300ms" } else { "2s" };
        let mut ran: BTreeMap<(Job, usize), Vec<Ran>> = BTreeMap::new();
        for _ in 0..lab.repeat.clamp(1, ROUNDS) {
            for job in jobs() {
                for (number, server) in servers.iter().enumerate() {
                    let one = measure(server, job, time)
                        .with_context(|| format!("{}, {job:?}", server.by().name()))?;
                    ran.entry((job, number)).or_default().push(one);
                }
            }
        }
        let load: Vec<f64> = load.into_iter().chain(watch::load()).collect();
        let bys: Vec<By> = servers.iter().map(Server::by).collect();
        let mut rows = rows(&bys, &ran, &load);
        rows.extend(bad);
        Ok(rows)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let plot = |name: &str, title: &str, size: &str, figure: &str, y: Axis| {
            let good: Vec<&Row> = rows
                .iter()
                .filter(|row| row.verdict == Verdict::Good)
                .filter(|row| row.label("request").starts_with(size))
                .collect();
            bars(&good, name, title, figure, y)
        };
        [
            plot(
                "frontends-small",
                "Requests of 4 KiB to a disk in memory",
                "4 KiB",
                "iops",
                Axis::log("requests a second"),
            ),
            plot(
                "frontends-large",
                "Requests of 1 MiB to a disk in memory",
                "1 MiB",
                "mib_s",
                Axis::linear("MiB a second"),
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// An example of the front ends, built beside the drover that is measured.
///
/// # Errors
/// When it is not built; says how to.
pub fn example(lab: &Lab, name: &str) -> Result<PathBuf> {
    let drover = lab.binary()?;
    let file = drover
        .parent()
        .unwrap_or(Path::new("."))
        .join("examples")
        .join(name);
    if !file.is_file() {
        bail!(
            "no {}: cargo build --release -p drover-frontend --examples",
            file.display()
        );
    }
    Ok(file)
}

/// Starts it, writes its disk whole and verifies that.
fn start(lab: &Lab, by: By, dir: &Path) -> Result<Server> {
    std::fs::create_dir_all(dir)?;
    let program = by.example().map(|name| example(lab, name)).transpose()?;
    let server = Server::start(by, program.as_deref(), dir, SIZE_MIB)?;
    let mut fill = fio(&server);
    fill.args(["--rw=write", "--bs=1M", "--iodepth=4"]).args([
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
    ]);
    shell::run(&mut fill).context("what was written is not what is read")?;
    Ok(server)
}

fn fio(server: &Server) -> Command {
    let mut command = Command::new("timeout");
    command
        .args([PATIENCE_S, "fio", "--name=lab", "--output-format=json"])
        .arg(format!("--size={SIZE_MIB}M"))
        .args(server.fio_args())
        // Of verifying, and of the loop device's lock.
        .current_dir(server.dir());
    command
}

fn measure(server: &Server, job: Job, time: &str) -> Result<Ran> {
    let mut command = fio(server);
    command
        .args(job.args())
        .args([
            "--time_based",
            "--norandommap",
            "--randrepeat=1",
            "--lat_percentiles=1",
        ])
        .arg(format!("--runtime={time}"));
    parse(&shell::run(&mut command)?.stdout, job.writes)
}

fn parse(printed: &[u8], writes: bool) -> Result<Ran> {
    // Warnings may stand before it.
    let at = printed.iter().position(|&b| b == b'{');
    let at = at.context("fio printed no JSON")?;
    let all: serde_json::Value = serde_json::from_slice(&printed[at..])?;
    let side = &all["jobs"][0][if writes { "write" } else { "read" }];
    let number = |value: &serde_json::Value| value.as_f64().filter(|n| *n > 0.0);
    let wait = |share: &str| number(&side["lat_ns"]["percentile"][share]).map(|ns| ns / 1e3);
    let ran = || {
        Some(Ran {
            iops: number(&side["iops"])?,
            mib_s: number(&side["bw_bytes"])? / f64::from(1 << 20),
            p50_us: wait("50.000000")?,
            p99_us: wait("99.000000")?,
        })
    };
    ran().context("fio tells of no request")
}

/// A row for each kind of request and each server.
fn rows(bys: &[By], ran: &BTreeMap<(Job, usize), Vec<Ran>>, load: &[f64]) -> Vec<Row> {
    let row = |(&(job, number), own): (&(Job, usize), &Vec<Ran>)| {
        let mut row = Row::new([
            ("request", job.request()),
            ("depth", job.depth.to_string()),
            ("by", bys[number].name().to_owned()),
        ]);
        let all = |of: fn(&Ran) -> f64| own.iter().map(of).collect::<Vec<f64>>();
        row.set_all("iops", &all(|r| r.iops));
        row.set_all("mib_s", &all(|r| r.mib_s));
        row.set_all("p50_us", &all(|r| r.p50_us));
        row.set_all("p99_us", &all(|r| r.p99_us));
        row.set_all("load", load);
        for (key, than) in [
            ("of_tmpfs_percent", By::Tmpfs),
            ("of_nbdkit_percent", By::Nbdkit),
        ] {
            let other = bys.iter().position(|&by| by == than);
            let other = other.and_then(|number| ran.get(&(job, number)));
            if let Some(other) = other.filter(|_| bys[number] != than) {
                // Of the same round, so that what else the machine does touches both.
                let pairs = own.iter().zip(other);
                let shares: Vec<f64> = pairs.map(|(a, b)| 100.0 * a.iops / b.iops).collect();
                row.set_all(key, &shares);
            }
        }
        row
    };
    ran.iter().map(row).collect()
}

fn bars(rows: &[&Row], name: &str, title: &str, figure: &str, y: Axis) -> Option<Plot> {
    let group = |row: &Row| {
        let request = row.label("request").rsplit(' ').next().unwrap_or("");
        format!("{request}, depth {}", row.label("depth"))
    };
    let mut groups: Vec<String> = Vec::new();
    for row in rows {
        if !groups.contains(&group(row)) {
            groups.push(group(row));
        }
    }
    let series: Vec<(String, Vec<Option<f64>>)> = values(rows, "by")
        .into_iter()
        .map(|by| {
            let of = |name: &String| {
                let found = |row: &&&Row| row.label("by") == by && group(row) == *name;
                rows.iter().find(found).and_then(|row| row.value(figure))
            };
            let bars = groups.iter().map(of).collect();
            (by, bars)
        })
        .collect();
    (!series.is_empty()).then(|| Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        x: Axis::linear(""),
        y,
        kind: Kind::Bars {
            groups,
            series,
            stacked: false,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &[u8] = br#"fio: a warning
{"jobs": [{"read": {"iops": 1000.0, "bw_bytes": 4194304,
  "lat_ns": {"percentile": {"50.000000": 900000, "99.000000": 2000000}}}, "write": {"iops": 0.0}}]}"#;

    #[test]
    fn what_fio_says_is_read() {
        let ran = parse(SAID, false).unwrap();
        let expected = Ran {
            iops: 1000.0,
            mib_s: 4.0,
            p50_us: 900.0,
            p99_us: 2000.0,
        };
        assert_eq!(ran, expected);
        assert!(parse(SAID, true).is_err(), "no request was written");
        assert!(parse(b"fio: no such engine", false).is_err());
    }

    #[test]
    fn rows_are_compared_with_the_same_request_by_others() {
        let ran = |iops| Ran {
            iops,
            mib_s: iops,
            p50_us: 1.0,
            p99_us: 1.0,
        };
        let mut all = BTreeMap::new();
        for job in jobs() {
            all.insert((job, 0), vec![ran(400.0), ran(200.0)]);
            all.insert((job, 1), vec![ran(100.0), ran(100.0)]);
        }
        let rows = rows(&[By::Tmpfs, By::Nbd], &all, &[1.0]);
        assert_eq!(rows.len(), 2 * jobs().len());
        assert_eq!(rows[0].value("of_tmpfs_percent"), None);
        assert_eq!(rows[1].value("of_tmpfs_percent"), Some(37.5));
        assert_eq!(rows[1].value("of_nbdkit_percent"), None);
        let plots = Frontends.plots(&rows);
        assert_eq!(plots.len(), 2);
        let Kind::Bars { groups, series, .. } = &plots[0].kind else {
            panic!("no bars");
        };
        assert_eq!((groups.len(), series.len()), (4, 2));
    }
}
