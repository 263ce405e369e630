//! Write overhead of recording what changed: generations of drover, and a dirty bitmap of QEMU, each beside the same without.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::frontends::{example, parse};
use super::qmp::Qmp;
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::setup::Lab;
use crate::shell;

/// The program of QEMU that serves a disk without a machine.
const QEMU: &str = "qemu-storage-daemon";
/// Timeout of one fio run, in seconds.
const PATIENCE_S: &str = "120";
/// Timeout for a server to become ready.
const READY: Duration = Duration::from_secs(20);
/// Rounds over everything, unless more are asked for: a percent is less than what two runs differ by.
const ROUNDS: usize = 11;

pub const EXPERIMENT: Experiment = Experiment {
    name: "tracking",
    title: "What it costs to record what is written",
    text: "A file of 1 GiB, allocated before, served over NBD on a Unix socket, and written by fio (its nbd engine, flushed at the end of each run): 256 MiB in \
requests of 1 MiB in order, 4 of them under way, or 16,384 of 4 KiB at random places, 16 under way. `drover` is its NBD server over a file, and with *generations* the stage that records \
them, durably and before the write; with *a new generation* before each run, as after each move, so that all regions are recorded again. `QEMU` is qemu-storage-daemon with a raw file, \
without and with a *dirty bitmap* of 64 KiB. All run by turns; *slower* compares with the same without tracking in the same turn. The paper states 8 %.",
    columns: &[
        Column::label("request", "request"),
        Column::label("by", "by"),
        Column::figure("mib_s", "MiB/s", 0),
        Column::figure("iops", "requests/s", 0),
        Column::figure("p50_us", "p50, us", 1),
        Column::figure("p99_us", "p99, us", 1),
        Column::optional("slower_percent", "slower, %", 1),
    ],
    cases: |_| {
        Ok(vec![Case::new(
            "file",
            "writes to a file with and without tracking",
            0,
            &[],
        )])
    },
    run,
};

/// What is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Plain,
    Recorded,
    NewGeneration,
    Qemu,
    Bitmap,
}

impl By {
    const ALL: [Self; 5] = [
        Self::Plain,
        Self::Recorded,
        Self::NewGeneration,
        Self::Qemu,
        Self::Bitmap,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "drover",
            Self::Recorded => "drover, generations",
            Self::NewGeneration => "drover, a new generation",
            Self::Qemu => "QEMU",
            Self::Bitmap => "QEMU, dirty bitmap",
        }
    }

    /// The same without tracking.
    fn without(self) -> Option<Self> {
        match self {
            Self::Recorded | Self::NewGeneration => Some(Self::Plain),
            Self::Bitmap => Some(Self::Qemu),
            Self::Plain | Self::Qemu => None,
        }
    }
}

/// Description, and arguments of fio.
const JOBS: [(&str, [&str; 3]); 2] = [
    ("1 MiB in order", ["--rw=write", "--bs=1M", "--iodepth=4"]),
    (
        "4 KiB at random",
        ["--rw=randwrite", "--bs=4k", "--iodepth=16"],
    ),
];
/// The figures of a run, in the order of [`parse`].
const FIGURES: [&str; 4] = ["iops", "mib_s", "p50_us", "p99_us"];

/// MiB of the file, and how much of it a run writes.
struct Sizes {
    file: u64,
    runs: [String; 2],
}

fn run(lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
    let named = |by: &str| Row::new([("by", by.to_owned())]);
    if !shell::have("fio") {
        let why = "fio is not installed".to_owned();
        return Ok(vec![named("fio").but(Verdict::Skipped(why))]);
    }
    let sizes = Sizes {
        file: lab.either(1024, 64),
        runs: lab
            .either(["256M", "64M"], ["16M", "1M"])
            .map(|size| format!("--io_size={size}")),
    };
    let rounds = lab.either(lab.repeat.max(ROUNDS), 1);
    let work = lab.work("tracking")?;
    let (mut servers, mut bad) = (Vec::new(), Vec::new());
    for by in By::ALL {
        if by.name().starts_with("QEMU") && !shell::have(QEMU) {
            let why = format!("{QEMU} is not installed");
            bad.push(named(by.name()).but(Verdict::Skipped(why)));
            continue;
        }
        match Server::start(lab, by, &work.join(&format!("{by:?}")), sizes.file) {
            Ok(server) => servers.push(server),
            Err(error) => bad.push(named(by.name()).but(Verdict::failed(&error))),
        }
    }
    let mut ran: BTreeMap<(usize, usize), Vec<[f64; 4]>> = BTreeMap::new();
    for round in 0..rounds {
        for (job, (request, how)) in JOBS.into_iter().enumerate() {
            for number in 0..servers.len() {
                // Who is first differs from turn to turn.
                let number = (number + round) % servers.len();
                let server = &mut servers[number];
                if server.by == By::NewGeneration {
                    server.begin_generation()?;
                }
                let mut fio = server.fio(sizes.file);
                fio.args(how).arg(&sizes.runs[job]);
                fio.arg(format!("--randseed={}", round + 1));
                let one = shell::run(&mut fio).and_then(|said| parse(&said.stdout, true));
                let one = one.with_context(|| format!("{}, {request}", server.by.name()))?;
                ran.entry((job, number)).or_default().push(one);
            }
        }
    }
    let row = |(&(job, number), own): (&(usize, usize), &Vec<[f64; 4]>)| {
        let by = servers[number].by;
        let labels = [("request", JOBS[job].0), ("by", by.name())];
        let mut row = Row::new(labels.map(|(key, value)| (key, value.to_owned())));
        for (at, key) in FIGURES.into_iter().enumerate() {
            row.set_all(key, &own.iter().map(|run| run[at]).collect::<Vec<_>>());
        }
        let other = by.without();
        let other = other.and_then(|other| servers.iter().position(|server| server.by == other));
        let pairs = other
            .and_then(|other| ran.get(&(job, other)))
            .into_iter()
            .flatten()
            .zip(own);
        let slower = |(plain, own): (&[f64; 4], &[f64; 4])| 100.0 * (plain[0] / own[0] - 1.0);
        row.set_all("slower_percent", &pairs.map(slower).collect::<Vec<_>>());
        row
    };
    Ok(ran.iter().map(row).chain(bad).collect())
}

/// A server of a disk of its own; killed when dropped.
struct Server {
    by: By,
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
    socket: PathBuf,
    dir: PathBuf,
}

impl Server {
    /// Starts it in a directory of its own, with an allocated file of so many MiB.
    fn start(lab: &Lab, by: By, dir: &Path, mib: u64) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let (disk, socket) = (dir.join("disk.raw"), dir.join("disk.sock"));
        let mut file = File::create(&disk)?;
        let noise: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 251) as u8).collect();
        for _ in 0..mib {
            file.write_all(&noise)?;
        }
        file.sync_all()?;
        let control = dir.join("qmp.sock");
        let mut command = match by {
            By::Plain | By::Recorded | By::NewGeneration => {
                let mut command = Command::new(example(lab, "tracked_disk")?);
                let is_plain = by == By::Plain;
                command.arg(if is_plain { "plain" } else { "recorded" });
                command.args([&socket, &disk]);
                if !is_plain {
                    let map = dir.join("map");
                    fs::create_dir(&map)?;
                    command.arg(map);
                }
                command
            }
            By::Qemu | By::Bitmap => {
                let mut command = Command::new(QEMU);
                let node = json!({"driver": "file", "node-name": "disk", "filename": disk});
                command.arg("--blockdev").arg(node.to_string());
                let listen = format!("addr.type=unix,addr.path={}", socket.display());
                command.arg("--nbd-server").arg(listen);
                command.args([
                    "--export",
                    "type=nbd,id=disk,node-name=disk,name=,writable=on",
                ]);
                let path = control.display();
                let chardev = format!("socket,id=qmp,server=on,wait=off,path={path}");
                command.args(["--chardev", &chardev, "--monitor", "chardev=qmp"]);
                command
            }
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(dir.join("said.log"))?)
            .spawn()
            .with_context(|| by.name())?;
        let (input, output) = (child.stdin.take(), child.stdout.take().map(BufReader::new));
        let mut server = Self {
            by,
            child,
            input,
            output,
            socket,
            dir: dir.to_owned(),
        };
        let began = Instant::now();
        while !server.socket.exists() {
            if began.elapsed() > READY || server.child.try_wait()?.is_some() {
                let said = fs::read(dir.join("said.log"))?;
                bail!("{} does not serve: {}", by.name(), shell::tail(&said));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        match by {
            By::Qemu | By::Plain => {}
            // The first line is where it listens.
            By::Recorded | By::NewGeneration => drop(server.line()?),
            By::Bitmap => {
                let mut qmp = Qmp::connect(&control, &mut server.child)?;
                let bitmap = json!({"node": "disk", "name": "written", "granularity": 65536});
                qmp.ask("block-dirty-bitmap-add", bitmap)?;
            }
        }
        Ok(server)
    }

    fn begin_generation(&mut self) -> Result<()> {
        let input = self.input.as_mut().context("no input")?;
        input.write_all(b"\n")?;
        input.flush()?;
        self.line().map(drop)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let output = self.output.as_mut().context("no output")?;
        match output.read_line(&mut line)? {
            0 => bail!("{} has ended", self.by.name()),
            _ => Ok(line),
        }
    }

    fn fio(&self, mib: u64) -> Command {
        let mut command = Command::new("timeout");
        command
            .args([PATIENCE_S, "fio", "--name=lab", "--output-format=json"])
            .args(["--ioengine=nbd", "--norandommap", "--lat_percentiles=1"])
            .args(["--end_fsync=1", &format!("--size={mib}M")])
            .arg(format!(
                "--uri=nbd+unix:///?socket={}",
                self.socket.display()
            ))
            .current_dir(&self.dir);
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The example ends with its input, and leaves nothing that would have to be undone.
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
