//! A machine that boots while its disk is still elsewhere: how much later it is there than with the disk beside it, and
//! what it took over the link.

mod guest;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::guest::{Disk, Guest, Kernel, PROGRAMS};
use super::lines::{Line, Net};
use super::mount::connect;
use super::shows::{By, Far, NAME, Shown};
use super::{Lab, pictures};
use crate::bench::{About, Axis, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};
use crate::shell;

const MIB: f64 = (1u64 << 20) as f64;

/// The image: bookworm with nginx and php.
const IMAGE: &str = "bookworm-web";

/// Where ext4 counts how often it was mounted for writing, from the start of the disk.
const MOUNT_COUNT: u64 = 1024 + 52;

/// How long the parts of a boot may take.
const LOGIN: Duration = Duration::from_secs(300);
const SHUT_DOWN: Duration = Duration::from_secs(120);
const PUSH: Duration = Duration::from_secs(120);
const COPY_SECONDS: &str = "300";

/// The experiment.
pub struct Boot;

static ABOUT: About = About {
    name: "boot",
    title: "A machine that boots from a disk that is elsewhere",
    text: "The library's bookworm with nginx and php under QEMU without KVM, with two cores and 1 GiB, from an NBD export on a Unix \
socket. The clock starts at the command that shows the disk, process and handshakes included, and ends at the login prompt on \
the serial console; kernel and initial file system are given to QEMU, as a boot loader would have read them. *Local* is the \
same image beside the machine. All that is shown over the link starts with an empty cache. *In the order of the first boot* pulls \
in the order that the boot before it recorded; *without prefetch* fetches only what is read. *Fetched* and *sent* are IP \
bytes that crossed the link until the prompt, *read* and *written* what the guest asked of its disk by then; *fetched* of all that \
pull in the background is the image sooner or later, and the image's data are beside it. Then the guest is told to shut down \
by Ctrl-Alt-Delete and must; drover must bring back what it wrote, and the far disk, fetched anew, must have been mounted \
and be clean for `e2fsck -fn`. `qemu-storage-daemon` (qcow2 overlay, copy-on-read) keeps writes on this side, so its far disk is not looked at. \
Boots follow one another on one machine, which runs the guest and both ends.",
    columns: &[
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure("login_s", "login, s", 1),
        Column::optional("times_local", "times local", 2),
        Column::optional("fetched_mib", "fetched, MiB", 1),
        Column::optional("sent_mib", "sent, MiB", 1),
        Column::figure("reads", "reads", 0),
        Column::figure("read_mib", "read, MiB", 1),
        Column::figure("written_mib", "written, MiB", 1),
        Column::figure("data_mib", "data of the image, MiB", 0),
    ],
};

const LINE: Line = Line {
    rate_mbit: 400.0,
    rtt_ms: 40.0,
    loss_percent: 0.0,
};

/// Who shows the disk to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    LocalQemu,
    LocalNbdkit,
    /// `drover export`; it records the order in which it is read.
    Managed,
    /// The same by the order that [`Way::Managed`] recorded.
    Ordered,
    NoPrefetch,
    Direct,
    Qsd,
}

const ALL: [Way; 7] = [
    Way::LocalQemu,
    Way::LocalNbdkit,
    Way::Managed,
    Way::Ordered,
    Way::NoPrefetch,
    Way::Direct,
    Way::Qsd,
];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::LocalQemu => "local, qemu-nbd",
            Way::LocalNbdkit => "local, nbdkit",
            Way::Managed => "drover, managed",
            Way::Ordered => "drover, in the order of the first boot",
            Way::NoPrefetch => "drover, without prefetch",
            Way::Direct => "drover, direct",
            Way::Qsd => "qemu-storage-daemon, copy-on-read",
        }
    }

    fn slug(self) -> &'static str {
        match self {
            Way::LocalQemu => "local-qemu",
            Way::LocalNbdkit => "local-nbdkit",
            Way::Managed => "managed",
            Way::Ordered => "ordered",
            Way::NoPrefetch => "no-prefetch",
            Way::Direct => "direct",
            Way::Qsd => "qsd",
        }
    }

    /// By whom over the link; `None` without a link.
    fn by(self) -> Option<By> {
        match self {
            Way::LocalQemu | Way::LocalNbdkit => None,
            Way::Managed | Way::Ordered | Way::NoPrefetch => Some(By::Managed),
            Way::Direct => Some(By::Direct),
            Way::Qsd => Some(By::Qsd),
        }
    }

    /// What `drover export` is told, with the file of the order.
    fn options(self, order: &Path) -> Vec<OsString> {
        match self {
            Way::Managed => vec!["--record".into(), order.into()],
            Way::Ordered => vec!["--prefetch".into(), order.into()],
            Way::NoPrefetch => vec!["--prefetch".into(), "none".into()],
            _ => Vec::new(),
        }
    }

    fn missing(self) -> Option<String> {
        let mut programs = PROGRAMS.to_vec();
        match self {
            Way::LocalQemu => programs.push("qemu-nbd"),
            Way::LocalNbdkit => programs.push("nbdkit"),
            _ => {}
        }
        let lacks = programs.iter().find(|p| !shell::have(p));
        let lacks = lacks.map(|p| format!("{p} is not installed"));
        lacks.or_else(|| self.by()?.missing())
    }
}

impl Experiment for Boot {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        // The small set has nothing that boots.
        if lab.small {
            return Ok(Vec::new());
        }
        // One case for all: what a boot takes depends on the hour, and all are held against the local one.
        Ok(vec![Case {
            id: LINE.slug(),
            what: format!("boots over {}, by everybody", LINE.describe()),
            seconds: 420.0 * lab.repeat.max(1) as f64,
            rank: 0,
            subject: Subject::Drover,
            needs: &[Need::Link, Need::Library],
        }])
    }

    fn images(&self, lab: &Lab, _case: &Case) -> Option<Vec<PathBuf>> {
        Some(vec![lab.image(IMAGE).ok()?])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        measure(lab, &ALL)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let rows: Vec<&Row> = rows.iter().collect();
        let login = |row: &Row| row.value("login_s");
        let words = pictures::Words {
            name: "boot-login",
            title: format!("Until the login prompt, {}", LINE.describe()),
            y: Axis::linear("seconds from the command"),
        };
        pictures::ranking(&rows, "by", login, words)
            .into_iter()
            .collect()
    }
}

/// What a boot took.
struct Booted {
    login: f64,
    /// Bytes from the far side and to it, over a link.
    crossed: Option<(f64, f64)>,
    disk: Disk,
}

/// What all boots have in common.
struct Bench<'a> {
    net: &'a Net,
    drover: PathBuf,
    work: PathBuf,
    /// A copy of the image, which is never written.
    image: PathBuf,
    kernel: Kernel,
}

/// Boots each of `ways` as often as the lab says, in turn, and makes a row of each.
fn measure(lab: &Lab, ways: &[Way]) -> Result<Vec<Row>> {
    let guard = lab.work("boot")?;
    let work = guard.join("");
    let image = work.join("image.raw");
    copy(&lab.image(IMAGE)?, &image)?;
    let data = fs::metadata(&image)?.blocks() as f64 * 512.0;
    let net = Net::like(Some(LINE), 1)?;
    let bench = Bench {
        net: &net,
        drover: lab.binary()?,
        kernel: Kernel::of(&image, &work)?,
        work,
        image,
    };
    let mut boots: Vec<Result<Vec<Booted>, Verdict>> = ways
        .iter()
        .map(|way| {
            way.missing()
                .map_or(Ok(Vec::new()), |why| Err(Verdict::Skipped(why)))
        })
        .collect();
    for _ in 0..lab.repeat.max(1) {
        for (way, done) in ways.iter().zip(&mut boots) {
            let Ok(so_far) = done else { continue };
            match bench.boot(*way) {
                Ok(booted) => {
                    eprintln!("{}: {:.1} s", way.name(), booted.login);
                    so_far.push(booted);
                }
                Err(e) => *done = Err(Verdict::Failed(format!("{e:#}"))),
            }
        }
    }
    let logins = |boots: &[Booted]| boots.iter().map(|b| b.login).collect::<Vec<f64>>();
    let local = ways
        .iter()
        .zip(&boots)
        .filter(|(way, _)| way.by().is_none())
        .filter_map(|(_, boots)| crate::report::Spread::of(&logins(boots.as_ref().ok()?)))
        .map(|spread| spread.median)
        .reduce(f64::min);
    let row = |(way, boots): (&Way, Result<Vec<Booted>, Verdict>)| {
        let mut row = Row::new([
            (
                "link",
                way.by().map_or_else(|| "none".into(), |_| LINE.describe()),
            ),
            ("by", way.name().to_owned()),
        ]);
        match boots {
            Err(verdict) => row.verdict = verdict,
            Ok(boots) => fill(&mut row, &boots, local, data),
        }
        row
    };
    Ok(ways.iter().zip(boots).map(row).collect())
}

fn fill(row: &mut Row, boots: &[Booted], local: Option<f64>, data: f64) {
    let mut set = |key: &str, of: &dyn Fn(&Booted) -> Option<f64>| {
        let values: Vec<f64> = boots.iter().filter_map(of).collect();
        row.set_all(key, &values);
    };
    set("login_s", &|b| Some(b.login));
    set("times_local", &|b| Some(b.login / local?));
    set("fetched_mib", &|b| Some(b.crossed?.0 / MIB));
    set("sent_mib", &|b| Some(b.crossed?.1 / MIB));
    set("reads", &|b| Some(b.disk.reads));
    set("read_mib", &|b| Some(b.disk.read / MIB));
    set("written_mib", &|b| Some(b.disk.written / MIB));
    set("data_mib", &|_| Some(data / MIB));
}

impl Bench<'_> {
    fn boot(&self, way: Way) -> Result<Booted> {
        let dir = self.work.join(way.slug());
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let booted = match way.by() {
            None => self.boot_local(way, &dir),
            Some(by) => self.boot_far(way, by, &dir),
        };
        fs::remove_dir_all(&dir)?;
        booted.with_context(|| way.name())
    }

    fn boot_local(&self, way: Way, dir: &Path) -> Result<Booted> {
        let disk = dir.join("disk.raw");
        copy(&self.image, &disk)?;
        let socket = dir.join("local.sock");
        let mut command = match way {
            Way::LocalNbdkit => {
                let mut command = Command::new("nbdkit");
                command
                    .args(["--foreground", "--threads=16"])
                    .arg(format!("--unix={}", socket.display()))
                    .arg("file")
                    .arg(&disk);
                command
            }
            _ => {
                let mut command = Command::new("qemu-nbd");
                command
                    .args(["--persistent", "--shared=16", "--format=raw"])
                    .args(["--cache=writeback", "--aio=threads"])
                    .arg(format!("--export-name={NAME}"))
                    .arg(format!("--socket={}", socket.display()))
                    .arg(&disk);
                command
            }
        };
        let said = dir.join("local.log");
        let started = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&said)?)
            .spawn()
            .context("cannot show the image here")?;
        let mut shown = Shown::new(child, socket, said);
        let booted = self.until_login(&mut shown, started, dir, false)?;
        drop(shown);
        self.is_clean(&disk)?;
        Ok(booted)
    }

    fn boot_far(&self, way: Way, by: By, dir: &Path) -> Result<Booted> {
        let far = Far::start(self.net, &self.drover, dir, &self.image, by)?;
        let near = far.near(by)?.with(way.options(&self.work.join("order")));
        let started = Instant::now();
        let mut shown = near.start()?;
        let booted = self.until_login(&mut shown, started, dir, true)?;
        near.end(shown, PUSH)?;
        if by.is_drover() {
            let back = dir.join("back.raw");
            let near = far.near(By::Managed)?.with(["--read-only"]);
            let mut shown = near.start()?;
            drop(connect(&mut shown)?);
            shell::run(
                Command::new("timeout")
                    .args([COPY_SECONDS, "nbdcopy"])
                    .arg(format!(
                        "nbd+unix:///{NAME}?socket={}",
                        shown.socket().display()
                    ))
                    .arg(&back),
            )?;
            near.end(shown, PUSH)?;
            self.is_clean(&back).context("what came back")?;
        }
        Ok(booted)
    }

    /// Boots and shuts down; the machine has ended when this returns, whatever happened.
    fn until_login(
        &self,
        shown: &mut Shown,
        started: Instant,
        dir: &Path,
        linked: bool,
    ) -> Result<Booted> {
        let before = self.net.bytes()?;
        drop(connect(shown)?);
        let mut guest = Guest::start(&self.kernel, shown.socket(), NAME, dir)?;
        guest.login(LOGIN)?;
        let login = started.elapsed().as_secs_f64();
        let crossed = self.net.since(before)?.filter(|_| linked);
        let disk = guest.disk()?;
        guest.shut_down(SHUT_DOWN)?;
        shown.check()?;
        Ok(Booted {
            login,
            crossed: crossed.map(|(sent, fetched)| (fetched as f64, sent as f64)),
            disk,
        })
    }

    /// Fails when a disk is not one that a machine has used and left in good order.
    fn is_clean(&self, disk: &Path) -> Result<()> {
        if mounts(disk)? <= mounts(&self.image)? {
            bail!("it was never mounted for writing");
        }
        shell::run(
            Command::new("timeout")
                .args([COPY_SECONDS, "e2fsck", "-fn"])
                .arg(disk),
        )?;
        Ok(())
    }
}

/// How often an ext4 was mounted for writing since it was last looked through.
fn mounts(disk: &Path) -> Result<u16> {
    let mut count = [0; 2];
    fs::File::open(disk)?.read_exact_at(&mut count, MOUNT_COUNT)?;
    Ok(u16::from_le_bytes(count))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut cp = Command::new("cp");
    cp.args(["--sparse=always", "--reflink=auto"]).arg(from);
    shell::run(cp.arg(to))?;
    Ok(())
}

#[cfg(test)]
mod tests;
