//! What a launch costs once its image is complete: the same reads and writes by fio from it, and from the plain file (figure 5 of
//! its issue).

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::super::boot::{copy, qemu_nbd};
use super::super::frontends;
use super::super::lines::Net;
use super::super::mover::deadline;
use super::super::shows::{NAME, Shown};
use super::{COMMAND, show, unmount};
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::setup::Lab;
use crate::shell;
use crate::site::{Sender, Site, end_within};

/// Size of the image.
const SIZE_MIB: u64 = 256;

/// The figures of a run, in the order of [`frontends::parse`].
const FIGURES: [&str; 4] = ["iops", "mib_s", "p50_us", "p99_us"];

pub const EXPERIMENT: Experiment = Experiment {
    name: "launch-io",
    title: "Reads and writes of a launched image that is complete",
    text: "An image of 256 MiB of random bytes is sent to a site and launched there while it arrives; once it is delivered, fio reads and writes it for two seconds a run over NBD, on one connection: 4 KiB at random places and 1 MiB in order, with 1 and with 32 requests under way. Beside it the same file by `qemu-nbd` \
(the cache of the host, as the launch has it) and by `drover export`, which writes in place. What is written to a launched image becomes changes over it. Reads come before writes; runs of all alternate.",
    columns: &[
        Column::label("request", "request"),
        Column::label("depth", "depth"),
        Column::label("by", "by"),
        Column::figure("iops", "requests/s", 0),
        Column::figure("mib_s", "MiB/s", 0),
        Column::figure("p50_us", "p50, us", 1),
        Column::figure("p99_us", "p99, us", 1),
        Column::optional("of_plain_percent", "of the file by qemu-nbd, %", 1),
        Column::optional("of_export_percent", "of the file by drover, %", 1),
    ],
    cases: |lab| {
        let what = "fio from a launched image and from the plain file";
        let case = Case::new("loopback", what, 1, &[]);
        Ok(lab.either(vec![case], Vec::new()))
    },
    run: |lab, _| run(lab),
};

/// What is read and written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Plain,
    Export,
    Launch,
}

impl By {
    const ALL: [By; 3] = [By::Plain, By::Export, By::Launch];

    fn name(self) -> &'static str {
        match self {
            By::Plain => "the file, qemu-nbd",
            By::Export => "the file, drover export",
            By::Launch => "launched, complete",
        }
    }
}

/// Jobs: description, fio's order and size.
const JOBS: [(&str, &str, &str); 4] = [
    ("4 KiB read", "randread", "4k"),
    ("1 MiB read", "read", "1M"),
    ("4 KiB write", "randwrite", "4k"),
    ("1 MiB write", "write", "1M"),
];
const DEPTHS: [&str; 2] = ["1", "32"];

fn run(lab: &Lab) -> Result<Vec<Row>> {
    let label = |(request, ..): (&str, &str, &str), depth: &str, by: By| {
        let labels = [("request", request), ("depth", depth), ("by", by.name())];
        Row::new(labels.map(|(key, value)| (key, value.to_owned())))
    };
    if let Some(lacks) = ["fio", "qemu-nbd"].iter().find(|p| !shell::have(p)) {
        let why = Verdict::Skipped(format!("{lacks} is not installed"));
        return Ok(vec![label(JOBS[0], DEPTHS[0], By::Launch).but(why)]);
    }
    let work = lab.work("launch-io")?;
    // The working directory is locked, and so is one in which a socket is made.
    let ends = Ends::start(&lab.binary()?, &work.join("ends"))?;
    let mut rows = Vec::new();
    for job in JOBS {
        for depth in DEPTHS {
            let mut runs = By::ALL.map(|_| Vec::new());
            for _ in 0..lab.repeat.max(1) {
                for (by, runs) in By::ALL.into_iter().zip(&mut runs) {
                    let one = ends.fio(by, job, depth);
                    runs.push(one.with_context(|| format!("{}, {}", by.name(), job.0))?);
                }
            }
            let [plain, export, _] = &runs;
            for (by, own) in By::ALL.into_iter().zip(&runs) {
                let mut row = label(job, depth, by);
                for (at, key) in FIGURES.into_iter().enumerate() {
                    row.set_all(key, &own.iter().map(|run| run[at]).collect::<Vec<_>>());
                }
                let others = [
                    ("of_plain_percent", By::Plain, plain),
                    ("of_export_percent", By::Export, export),
                ];
                // Within a round, so that other load on the machine affects both.
                for (key, _, other) in others.into_iter().filter(|(_, than, _)| *than != by) {
                    let parts = own.iter().zip(other).map(|(a, b)| 100.0 * a[0] / b[0]);
                    row.set_all(key, &parts.collect::<Vec<f64>>());
                }
                rows.push(row);
            }
        }
    }
    ends.end()?;
    Ok(rows)
}

/// The image in its three ways.
struct Ends {
    work: PathBuf,
    drover: PathBuf,
    shown: [Shown; 3],
    _site: Site,
}

impl Ends {
    fn start(drover: &Path, work: &Path) -> Result<Ends> {
        fs::create_dir_all(work)?;
        let image = work.join(NAME);
        let (mut file, mut bytes) = (File::create(&image)?, vec![0; 1 << 20]);
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..SIZE_MIB {
            rng.fill(&mut bytes);
            file.write_all(&bytes)?;
        }
        let socket = |by: &str| work.join(format!("{by}.sock"));
        let own_copy = |by: &str| -> Result<PathBuf> {
            let disk = work.join(by).join(NAME);
            fs::create_dir_all(work.join(by))?;
            copy(&image, &disk)?;
            Ok(disk)
        };
        let plain = qemu_nbd(
            &own_copy("plain")?,
            &socket("plain"),
            &work.join("plain.log"),
        )?;
        let (home, at) = (work.join("export-home"), socket("export"));
        shell::run(Command::new(drover).arg("init").env("DROVER_HOME", &home))?;
        let mut export = Command::new(drover);
        export
            .arg("export")
            .arg(format!("file:{}", own_copy("export")?.display()))
            .arg("--nbd")
            .arg(format!("unix:{}", at.display()));
        let export = show(&mut export, &home, &at, &work.join("export.log"))?;
        let net = Net::like(None, 0)?;
        let site = Site::start(drover, &work.join("site"), net.place())?;
        let sender = Sender::pair(drover, &work.join("sender"), net.place(), &site)?;
        let sending = sender.begin(&image, &[])?;
        // While it arrives: what is launched after its delivery is an image as any other.
        let at = socket("launch");
        let mut launch = Command::new(drover);
        launch
            .args(["launch", NAME, "--wait", "3m", "--nbd"])
            .arg(format!("unix:{}", at.display()));
        let launch = show(
            &mut launch,
            &work.join("site"),
            &at,
            &work.join("launch.log"),
        )?;
        sending.finish(deadline(&image)?)?;
        rustix::fs::sync();
        let mut shown = [plain, export, launch];
        for shown in &mut shown {
            super::super::client::connect(shown)?;
        }
        Ok(Ends {
            work: work.to_owned(),
            drover: drover.to_owned(),
            shown,
            _site: site,
        })
    }

    fn fio(&self, by: By, (_, order, size): (&str, &str, &str), depth: &str) -> Result<[f64; 4]> {
        let socket = self.shown[by as usize].socket();
        let mut fio = Command::new("timeout");
        fio.args([
            "60",
            "fio",
            "--name=lab",
            "--output-format=json",
            "--ioengine=nbd",
        ])
        .arg(format!(
            "--uri=nbd+unix:///{NAME}?socket={}",
            socket.display()
        ))
        .arg(format!("--size={SIZE_MIB}M"))
        .args([
            "--time_based",
            "--norandommap",
            "--randrepeat=1",
            "--lat_percentiles=1",
        ])
        .arg("--runtime=2s")
        .arg(format!("--rw={order}"))
        .arg(format!("--bs={size}"))
        .arg(format!("--iodepth={depth}"))
        .current_dir(&self.work);
        let said = shell::run(&mut fio)?;
        frontends::parse(&said.stdout, order.ends_with("write"))
    }

    fn end(mut self) -> Result<()> {
        for (by, home) in [(By::Export, "export-home"), (By::Launch, "site")] {
            let shown = &mut self.shown[by as usize];
            let socket = shown.socket().to_owned();
            unmount(
                &mut Command::new(&self.drover),
                &self.work.join(home),
                &socket,
            )?;
            end_within(&mut shown.child, COMMAND).with_context(|| by.name())?;
        }
        Ok(())
    }
}
