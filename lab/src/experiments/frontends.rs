//! Front end overhead: a memory device through each front end, measured with fio and compared with `nbdkit memory` and
//! a file in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::setup::Lab;
use crate::shell;
use crate::site::terminate;

/// Size of the disk in MiB.
const SIZE_MIB: u32 = 256;
/// Upper bound on rounds over everything: each takes 40 runs.
const ROUNDS: usize = 2;
/// Timeout of one fio run, in seconds.
const PATIENCE_S: &str = "60";
/// Timeout for a server to become ready, and to exit.
const READY: Duration = Duration::from_secs(20);
/// A tmpfs.
const TMPFS: &str = "/dev/shm";

pub const EXPERIMENT: Experiment = Experiment {
    name: "frontends",
    title: "What a front end costs",
    text: "A disk of 256 MiB in memory, written whole and verified by fio first, then read and written by fio for two seconds a run: 4 KiB \
at random places and 1 MiB in order, with 1 and with 32 requests under way. NBD is over a Unix socket on one connection (fio's nbd engine); the file of the FUSE \
mount and the loop device on it are used with direct I/O (libaio); the file on tmpfs cannot be, so it is a copy from the page cache, and its \
requests are served one after the other whatever the depth. `nbdkit memory` is beside drover's NBD server. Runs of all alternate.",
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
    ],
    cases: |_| {
        Ok(vec![Case::new(
            "memory",
            "a disk in memory through each front end",
            0,
            &[],
        )])
    },
    run,
};

/// The subjects: names in rows, the program, and its requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Tmpfs,
    Nbdkit,
    Nbd,
    Fuse,
    Loop,
}

impl By {
    const ALL: [Self; 5] = [Self::Tmpfs, Self::Nbdkit, Self::Nbd, Self::Fuse, Self::Loop];

    fn name(self) -> &'static str {
        match self {
            By::Tmpfs => "a file on tmpfs",
            By::Nbdkit => "nbdkit memory",
            By::Nbd => "drover, NBD",
            By::Fuse => "drover, FUSE",
            By::Loop => "drover, loop on FUSE",
        }
    }

    fn missing(self) -> Option<String> {
        let paths: &[&str] = match self {
            By::Nbdkit if !shell::have("nbdkit") => {
                return Some("nbdkit is not installed".to_owned());
            }
            By::Nbdkit | By::Nbd => &[],
            By::Tmpfs => &[TMPFS],
            By::Fuse => &["/dev/fuse"],
            By::Loop => &["/dev/fuse", "/dev/loop-control"],
        };
        let missing = paths.iter().find(|path| !Path::new(path).exists());
        missing.map(|path| format!("there is no {path} on this machine"))
    }
}

/// Jobs as arguments of fio: description, whether it writes, and the number of requests in flight.
const JOBS: [(&str, &str, &str); 4] = [
    ("4 KiB read", "randread", "4k"),
    ("4 KiB write", "randwrite", "4k"),
    ("1 MiB read", "read", "1M"),
    ("1 MiB write", "write", "1M"),
];
const DEPTHS: [&str; 2] = ["1", "32"];
/// The figures of a run, in the order of [`parse`].
const FIGURES: [&str; 4] = ["iops", "mib_s", "p50_us", "p99_us"];

fn run(lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
    let named = |by: &str| Row::new([("by", by.to_owned())]);
    if !shell::have("fio") {
        return Ok(vec![
            named("fio").but(Verdict::Skipped("fio is not installed".to_owned())),
        ]);
    }
    let work = lab.work("frontends")?;
    let (mut servers, mut bad) = (Vec::new(), Vec::new());
    for by in By::ALL {
        let started = match by.missing() {
            Some(why) => Err(Verdict::Skipped(why)),
            None => start(lab, by, &work.join(&format!("{by:?}")))
                .map_err(|error| Verdict::failed(&error)),
        };
        match started {
            Ok(server) => servers.push(server),
            Err(verdict) => bad.push(named(by.name()).but(verdict)),
        }
    }
    let time = lab.either("--runtime=2s", "--runtime=300ms");
    let mut ran: BTreeMap<(usize, usize, usize), Vec<[f64; 4]>> = BTreeMap::new();
    for _ in 0..lab.repeat.clamp(1, ROUNDS) {
        for (job, (request, order, size)) in JOBS.into_iter().enumerate() {
            for (depth, requests) in DEPTHS.into_iter().enumerate() {
                for (number, server) in servers.iter().enumerate() {
                    let mut fio = fio(server);
                    fio.args([
                        "--time_based",
                        "--norandommap",
                        "--randrepeat=1",
                        "--lat_percentiles=1",
                        time,
                    ]);
                    fio.arg(format!("--rw={order}"))
                        .arg(format!("--bs={size}"))
                        .arg(format!("--iodepth={requests}"));
                    let one = shell::run(&mut fio)
                        .and_then(|said| parse(&said.stdout, order.ends_with("write")));
                    let one = one.with_context(|| format!("{}, {request}", server.by.name()))?;
                    ran.entry((job, depth, number)).or_default().push(one);
                }
            }
        }
    }
    let row = |(&(job, depth, number), own): (&(usize, usize, usize), &Vec<[f64; 4]>)| {
        let by = servers[number].by;
        let labels = [
            ("request", JOBS[job].0),
            ("depth", DEPTHS[depth]),
            ("by", by.name()),
        ];
        let mut row = Row::new(labels.map(|(key, value)| (key, value.to_owned())));
        for (at, key) in FIGURES.into_iter().enumerate() {
            row.set_all(key, &own.iter().map(|run| run[at]).collect::<Vec<_>>());
        }
        for (key, than) in [
            ("of_tmpfs_percent", By::Tmpfs),
            ("of_nbdkit_percent", By::Nbdkit),
        ] {
            let other = servers
                .iter()
                .position(|server| server.by == than && by != than);
            // Compare within a round, so that other load on the machine affects both.
            let pairs = other
                .and_then(|other| ran.get(&(job, depth, other)))
                .into_iter()
                .flatten()
                .zip(own);
            row.set_all(
                key,
                &pairs.map(|(b, a)| 100.0 * a[0] / b[0]).collect::<Vec<_>>(),
            );
        }
        row
    };
    Ok(ran.iter().map(row).chain(bad).collect())
}

/// Path of an example program of the crates that are measured without drover, built next to the drover under test.
///
/// # Errors
/// When it is not built; says how to build it.
pub fn example(lab: &Lab, name: &str) -> Result<PathBuf> {
    let file = lab.binary()?.with_file_name("examples").join(name);
    if !file.is_file() {
        bail!(
            "no {}: cargo build --release -p drover-frontend -p drover-migrate --examples",
            file.display()
        );
    }
    Ok(file)
}

fn fio(server: &Server) -> Command {
    let mut command = Command::new("timeout");
    command
        .args([PATIENCE_S, "fio", "--name=lab", "--output-format=json"])
        .arg(format!("--size={SIZE_MIB}M"));
    let at = server.at.display();
    match server.by {
        By::Nbd | By::Nbdkit => command
            .arg("--ioengine=nbd")
            .arg(format!("--uri=nbd+unix:///?socket={at}")),
        By::Tmpfs => command
            .arg("--ioengine=libaio")
            .arg(format!("--filename={at}")),
        By::Fuse | By::Loop => command
            .args(["--ioengine=libaio", "--direct=1"])
            .arg(format!("--filename={at}")),
    };
    // fio leaves its verification state and the loop device's lock file there.
    command.current_dir(&server.dir);
    command
}

/// IOPS, MiB per second, and two latency percentiles in microseconds.
pub fn parse(printed: &[u8], writes: bool) -> Result<[f64; 4]> {
    // Warnings may precede it.
    let at = printed
        .iter()
        .position(|&b| b == b'{')
        .context("fio printed no JSON")?;
    let all: Value = serde_json::from_slice(&printed[at..])?;
    let side = &all["jobs"][0][if writes { "write" } else { "read" }];
    let wait = &side["lat_ns"]["percentile"];
    let of = |value: &Value, unit: f64| {
        value
            .as_f64()
            .filter(|n| *n > 0.0)
            .map(|n| n / unit)
            .context("fio reports no request")
    };
    Ok([
        of(&side["iops"], 1.0)?,
        of(&side["bw_bytes"], f64::from(1 << 20))?,
        of(&wait["50.000000"], 1e3)?,
        of(&wait["99.000000"], 1e3)?,
    ])
}

/// A running server; killed when dropped.
struct Server {
    by: By,
    child: Option<Child>,
    dir: PathBuf,
    /// Its file, device, or socket.
    at: PathBuf,
}

/// Starts a server, writes its whole disk and verifies it.
fn start(lab: &Lab, by: By, dir: &Path) -> Result<Server> {
    std::fs::create_dir_all(dir.join("disk"))?;
    let (socket, size) = (dir.join("disk.sock"), format!("{SIZE_MIB}M"));
    let mut server = Server {
        by,
        child: None,
        dir: dir.to_owned(),
        at: socket.clone(),
    };
    let said = dir.join("said.log");
    let command = match by {
        By::Tmpfs => {
            server.at = Path::new(TMPFS).join(format!("drover-lab-{}", std::process::id()));
            File::create(&server.at)?.set_len(u64::from(SIZE_MIB) << 20)?;
            None
        }
        By::Nbdkit => {
            let mut nbdkit = Command::new("nbdkit");
            nbdkit
                .args(["--foreground", "--exit-with-parent"])
                .arg(format!("--unix={}", socket.display()));
            nbdkit.args(["memory", &size]);
            Some(nbdkit)
        }
        By::Nbd => {
            let mut nbd = Command::new(example(lab, "nbd_memory")?);
            nbd.arg(format!("unix:{}", socket.display())).arg(&size);
            Some(nbd)
        }
        By::Fuse | By::Loop => {
            let mut fuse = Command::new(example(lab, "fuse_memory")?);
            fuse.arg(&size)
                .arg(dir.join("disk"))
                .args((by == By::Loop).then_some("--device"));
            Some(fuse)
        }
    };
    if let Some(mut command) = command {
        let out = dir.join("out.log");
        command
            .stdin(Stdio::piped())
            .stdout(File::create(&out)?)
            .stderr(File::create(&said)?);
        server.child = Some(command.spawn().with_context(|| by.name())?);
        // File front ends print their paths: the file, and then the loop device.
        let lines = match by {
            By::Fuse => 1,
            By::Loop => 2,
            _ => 0,
        };
        let began = Instant::now();
        loop {
            let printed = std::fs::read_to_string(&out)?;
            if lines > 0 && printed.lines().count() >= lines && printed.ends_with('\n') {
                server.at = PathBuf::from(printed.lines().last().unwrap_or_default().trim());
                break;
            }
            if lines == 0 && server.at.exists() {
                break;
            }
            if began.elapsed() > READY {
                bail!(
                    "{} does not serve: {}",
                    by.name(),
                    shell::tail(&std::fs::read(&said)?)
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let mut fill = fio(&server);
    fill.args([
        "--rw=write",
        "--bs=1M",
        "--iodepth=4",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
    ]);
    shell::run(&mut fill).context("what was written is not what is read")?;
    Ok(server)
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.by == By::Tmpfs {
            let _ = std::fs::remove_file(&self.at);
        }
        if let Some(child) = &mut self.child {
            // The examples unmount when their stdin is closed.
            drop(child.stdin.take());
            if self.by == By::Nbdkit {
                terminate(child, READY);
            } else {
                let _ = crate::site::end_within(child, READY);
            }
        }
    }
}
