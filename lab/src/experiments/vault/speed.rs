//! How fast snapshots are made and restored, by what is new: on one image, in an empty vault or repository.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{ALL, By, Tool, Version};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::experiments::qmp::Qmp;
use crate::limit::each_piece;
use crate::setup::{Lab, must_be_same};
use crate::site::{end_within, terminate};
use crate::{shell, watch};

const SECONDS: &str = "seconds";
const CPU: &str = "cpu_seconds";
const SPEED: &str = "mb_per_cpu_second";
const MEMORY: &str = "peak_mb";
const READ: &str = "read_mb";
const RATE: &str = "mb_per_second";

pub const EXPERIMENT: Experiment = Experiment {
    name: "snapshot-speed",
    title: "The speed of snapshots",
    text: "One image, in a local directory. *New*: into an empty vault or repository. *As before*: once more, as the same machine, without a look at the file's times (`restic --force`, \
`borg --files-cache disabled`). *As another machine*: the same content under another name, so that every block is looked up. *2 % changed*: as the same machine, one block of 4 KiB in \
fifty written anew, at random places. *Running, nothing written*: the disk of a QEMU that stands still, the second time. *Restored*: the first snapshot, to a new file. *Random*: 4,000 blocks of 4 KiB with data at random places, one after the other, of a file by FUSE (`drover mount --read-only`, `restic mount`), nothing cached by the program; \
MB/s and MB a CPU second are of those blocks. *MB a CPU second*: the image's data without holes over user and system time of all cores, start of the program included; *MB/s* over seconds. Of peak memory the largest process counts.",
    columns: &[
        Column::label("by", "by"),
        Column::label("what", "what"),
        Column::figure(SECONDS, "seconds", 2),
        Column::figure(CPU, "CPU seconds", 2),
        Column::optional(RATE, "MB/s", 1),
        Column::figure(SPEED, "MB a CPU second", 0),
        Column::optional(MEMORY, "MB of memory, peak", 0),
        Column::optional(READ, "MB read", 1),
    ],
    cases: |lab| {
        let image = image(lab);
        let needs = &[Need::Library];
        Ok(vec![Case::new(
            image,
            format!("the image {image}"),
            1,
            needs,
        )])
    },
    run,
};

fn image(lab: &Lab) -> &'static str {
    lab.either("bookworm-dev", "small-one")
}

fn run(lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
    let image = lab.image(image(lab))?.canonicalize()?;
    let mut rows = Vec::new();
    for by in ALL
        .into_iter()
        .filter(|by| !matches!(by, By::Drover("popular")))
    {
        let mut measured = Vec::new();
        let done = match by.program().filter(|program| !shell::have(program)) {
            Some(program) => Err(Verdict::Skipped(format!("no {program} here"))),
            None => measure(lab, by, &image, &mut measured).map_err(|e| Verdict::failed(&e)),
        };
        rows.extend(measured);
        if let Err(verdict) = done {
            rows.push(Row::new([("by", by.name()), ("what", "all".to_owned())]).but(verdict));
        }
    }
    Ok(rows)
}

/// What a command cost.
struct Cost {
    seconds: f64,
    cpu: f64,
    peak: u64,
    said: Vec<u8>,
    /// What was read, if it is not the whole.
    bytes: Option<u64>,
}

fn timed(command: &mut Command) -> Result<Cost> {
    let (began, cpu) = (Instant::now(), watch::cpu_of_children());
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start it")?;
    let watched = watch::Watch::start(child.id());
    let output = child.wait_with_output()?;
    let seconds = began.elapsed().as_secs_f64();
    if !output.status.success() {
        bail!("{}: {}", shell::show(command), shell::tail(&output.stderr));
    }
    Ok(Cost {
        seconds,
        cpu: watch::cpu_of_children() - cpu,
        peak: watched.cost().peak_rss_bytes,
        said: output.stdout,
        bytes: None,
    })
}

fn measure(lab: &Lab, by: By, image: &Path, rows: &mut Vec<Row>) -> Result<()> {
    let tool = Tool::new(lab, by)?;
    let copy = tool.work.join("disk.raw");
    shell::run(
        Command::new("cp")
            .arg("--sparse=always")
            .arg(image)
            .arg(&copy),
    )?;
    let mut data = 0;
    let file = File::options().read(true).write(true).open(&copy)?;
    let size = file.metadata()?.len();
    let mut places = Vec::new();
    each_piece(&file, size, 4096, |at, piece| {
        data += piece.len() as u64;
        places.push(at);
        Ok(())
    })?;
    let mut add = |what: &str, cost: &Cost| {
        let mut row = Row::new([("by", by.name()), ("what", what.to_owned())]);
        row.set(SECONDS, cost.seconds);
        row.set(CPU, cost.cpu);
        row.set(RATE, cost.bytes.unwrap_or(data) as f64 / 1e6 / cost.seconds);
        row.set(
            SPEED,
            cost.bytes.unwrap_or(data) as f64 / 1e6 / cost.cpu.max(1e-3),
        );
        if cost.peak > 0 {
            row.set(MEMORY, cost.peak as f64 / 1e6);
        }
        // The last line is the result.
        let last = cost
            .said
            .trim_ascii_end()
            .rsplit(|byte| *byte == b'\n')
            .next();
        let said: Value = serde_json::from_slice(last.unwrap_or_default()).unwrap_or_default();
        if let Some(read) = said["read_bytes"].as_u64() {
            row.set(READ, read as f64 / 1e6);
        }
        rows.push(row);
    };
    let store = |number: usize, machine: &str| -> Result<Cost> {
        let version = Version {
            machine: machine.to_owned(),
            image: copy.clone(),
        };
        let mut args = tool.args_to_store(number, &version);
        let all: &[&str] = match by {
            By::Drover(_) => &["--json"],
            By::Restic => &["--force"],
            By::Borg(_) => &["--files-cache", "disabled"],
        };
        // After the name of the subcommand.
        args.splice(1..1, all.iter().map(|arg| (*arg).to_owned()));
        timed(tool.command().args(args))
    };
    add("new", &store(0, "one")?);
    add("as before", &store(1, "one")?);
    add("as another machine", &store(2, "two")?);
    let first = Version {
        machine: "two".to_owned(),
        image: copy.clone(),
    };
    let (began, cpu) = (Instant::now(), watch::cpu_of_children());
    let restored = tool.restore(2, &first)?;
    let cost = Cost {
        seconds: began.elapsed().as_secs_f64(),
        cpu: watch::cpu_of_children() - cpu,
        peak: 0,
        said: Vec::new(),
        bytes: None,
    };
    must_be_same(&copy, &restored)?;
    fs::remove_file(restored)?;
    add("restored", &cost);
    if let Some(cost) = random(&tool, &copy, &file, &places)? {
        add("random", &cost);
    }
    let mut rng = fastrand::Rng::with_seed(2);
    for place in places
        .into_iter()
        .filter(|_| rng.u8(..50) == 0)
        .collect::<Vec<_>>()
    {
        let mut block = [0; 4096];
        rng.fill(&mut block[..2048]);
        file.write_all_at(&block, place)?;
    }
    file.sync_all()?;
    // Of a machine's disk that somebody else has open for writing, no snapshot is made.
    drop(file);
    add("2 % changed", &store(3, "one")?);
    if matches!(by, By::Drover("all")) && shell::have("qemu-system-x86_64") {
        let mut machine = Machine::start(&tool.work.join("qmp"), &copy)?;
        let source = format!("qmp:{}", machine.socket.display());
        let again = || {
            let mut command = tool.command();
            command.args([
                "snapshot", &source, "--as", "one", "--freeze", "never", "--json",
            ]);
            timed(&mut command)
        };
        again()?;
        let cost = again()?;
        machine.qmp.ask("quit", json!({}))?;
        add("running, nothing written", &cost);
    }
    Ok(())
}

/// Blocks that are read at random.
const RANDOM: usize = 4000;
/// How long a mount may take to show its file, and to end.
const MOUNT: Duration = Duration::from_secs(60);

/// Reads some blocks of the snapshot of the machine `two`, which is the file `copy`, as a mounted file. None of a program
/// that cannot mount here.
fn random(tool: &Tool, copy: &Path, original: &File, places: &[u64]) -> Result<Option<Cost>> {
    let at = tool.work.join("mounted");
    fs::create_dir_all(&at)?;
    let mut command = tool.command();
    let file = match tool.by {
        By::Drover(_) => {
            let file = at.join("disk.raw");
            command.args(["mount", "two@latest"]).arg(&file);
            command.args(["--foreground", "--read-only"]);
            file
        }
        By::Restic => {
            command.args(["mount", "--quiet", "--host", "two"]).arg(&at);
            at.join("hosts/two/latest").join(copy.strip_prefix("/")?)
        }
        // Debian's borg has no FUSE without packages of its own.
        By::Borg(_) => return Ok(None),
    };
    let used = watch::cpu_of_children();
    let null = || Stdio::null();
    let child = command.stdin(null()).stdout(null()).stderr(null());
    let mut child = child.spawn().context("cannot start a mount")?;
    let read = || -> Result<f64> {
        let (began, len) = (Instant::now(), original.metadata()?.len());
        while !file.metadata().is_ok_and(|meta| meta.len() == len) {
            if began.elapsed() > MOUNT {
                bail!("it shows no file");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let mounted = File::open(&file)?;
        let mut rng = fastrand::Rng::with_seed(4);
        let (mut block, mut same) = ([0; 4096], [0; 4096]);
        let mut seconds = 0.0;
        for _ in 0..RANDOM {
            let place = places[rng.usize(..places.len())];
            let began = Instant::now();
            mounted.read_exact_at(&mut block, place)?;
            seconds += began.elapsed().as_secs_f64();
            original.read_exact_at(&mut same, place)?;
            if block != same {
                bail!("it shows another content at {place}");
            }
        }
        Ok(seconds)
    };
    let seconds = read();
    let ended = match tool.by {
        By::Drover(_) => shell::run(tool.command().arg("unmount").arg(&file)),
        _ => shell::run(Command::new("fusermount").arg("-u").arg(&at)),
    };
    if ended.is_err() {
        terminate(&mut child, MOUNT);
    }
    end_within(&mut child, MOUNT).context("the mount")?;
    ended.context("ending the mount")?;
    Ok(Some(Cost {
        seconds: seconds.context("reading what is mounted")?,
        cpu: watch::cpu_of_children() - used,
        peak: 0,
        said: Vec::new(),
        bytes: Some((RANDOM * 4096) as u64),
    }))
}

/// A QEMU that stands still, with a disk.
struct Machine {
    child: Child,
    qmp: Qmp,
    socket: PathBuf,
}

impl Machine {
    /// QEMU takes one client a socket: it has a second one for this.
    fn start(socket: &Path, disk: &Path) -> Result<Self> {
        let own = socket.with_extension("own");
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args([
                "-nodefaults",
                "-display",
                "none",
                "-S",
                "-m",
                "32",
                "-machine",
                "q35",
            ])
            .args([
                "-qmp",
                &format!("unix:{},server=on,wait=off", socket.display()),
            ])
            .args([
                "-qmp",
                &format!("unix:{},server=on,wait=off", own.display()),
            ])
            .args([
                "-blockdev",
                &format!(
                    "driver=raw,node-name=disk,file.driver=file,file.filename={}",
                    disk.display()
                ),
            ])
            .args(["-device", "virtio-blk-pci,drive=disk,id=disk0"]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start QEMU")?;
        let qmp = match Qmp::connect(&own, &mut child) {
            Ok(qmp) => qmp,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        Ok(Machine {
            child,
            qmp,
            socket: socket.to_path_buf(),
        })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
