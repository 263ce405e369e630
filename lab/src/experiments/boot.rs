//! Boots a virtual machine from a remote disk: the delay compared with a local disk, and the traffic on the link.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::client::connect;
use super::guest::{Disk, Guest, Kernel, PROGRAMS};
use super::lines::{Line, Net, line};
use super::shows::{By, Far, NAME, Shown};
use crate::bench::{Case, Column, Experiment, Figure, Need, Row, Verdict};
use crate::setup::Lab;
use crate::shell;

const MIB: f64 = (1u64 << 20) as f64;
/// The image: bookworm with nginx and php.
pub(super) const IMAGE: &str = "bookworm-web";
/// Offset of ext4's mount counter from the start of the disk.
const MOUNT_COUNT: u64 = 1024 + 52;
/// Timeouts of the parts of a boot.
const LOGIN: Duration = Duration::from_secs(300);
const SHUT_DOWN: Duration = Duration::from_secs(120);
const PUSH: Duration = Duration::from_secs(120);
const COPY_SECONDS: &str = "300";
const LINE: Line = line(400.0, 40.0, 0.0);

pub const EXPERIMENT: Experiment = Experiment {
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
    cases: |lab| {
        // A single case: boot times vary over the day, and all are compared with the local one.
        let what = format!("boots over {}, by everybody", LINE.describe());
        let case = Case::new(LINE.slug(), what, 0, &[Need::Link, Need::Library]);
        // The small set has no bootable image.
        Ok(lab.either(vec![case], Vec::new()))
    },
    run: |lab, _| measure(lab, ALL),
};

/// How the machine gets its disk: a name, and the server of the remote disk, if remote.
pub type Way = (&'static str, Option<By>);

pub const ALL: &[Way] = &[
    ("local, qemu-nbd", None),
    ("local, nbdkit", None),
    MANAGED,
    // In the order that the previous boot recorded.
    (ORDERED, Some(By::Managed)),
    (NO_PREFETCH, Some(By::Managed)),
    ("drover, direct", Some(By::Direct)),
    ("qemu-storage-daemon, copy-on-read", Some(By::Qsd)),
];
pub const MANAGED: Way = ("drover, managed", Some(By::Managed));
const ORDERED: &str = "drover, in the order of the first boot";
const NO_PREFETCH: &str = "drover, without prefetch";

fn missing((name, by): Way) -> Option<String> {
    let local = match by {
        None if name.ends_with("nbdkit") => "nbdkit",
        _ => "qemu-nbd",
    };
    let lacks = PROGRAMS
        .iter()
        .chain([&local])
        .find(|program| !shell::have(program));
    lacks
        .map(|program| format!("{program} is not installed"))
        .or_else(|| by?.missing())
}

/// The results of a boot.
pub(super) struct Booted {
    pub login: f64,
    /// Bytes to and from the remote site, over a link.
    pub crossed: Option<(u64, u64)>,
    pub disk: Disk,
}

/// The setup shared by all boots.
struct Bench<'a> {
    net: &'a Net,
    drover: PathBuf,
    work: PathBuf,
    /// A copy of the image, never written to.
    image: PathBuf,
    kernel: Kernel,
}

/// Boots each of `ways` in turn, as often as configured, and makes one row for each.
pub fn measure(lab: &Lab, ways: &[Way]) -> Result<Vec<Row>> {
    let guard = lab.work("boot")?;
    let work = guard.join("");
    let image = work.join("image.raw");
    copy(&lab.image(IMAGE)?, &image)?;
    let data = fs::metadata(&image)?.blocks() as f64 * 512.0;
    let net = Net::like(Some(LINE), 1)?;
    let kernel = Kernel::of(&image, &work)?;
    let bench = Bench {
        net: &net,
        drover: lab.binary()?,
        work,
        image,
        kernel,
    };
    let begin = |way: &Way| missing(*way).map_or(Ok(Vec::new()), |why| Err(Verdict::Skipped(why)));
    let mut boots: Vec<Result<Vec<Booted>, Verdict>> = ways.iter().map(begin).collect();
    for _ in 0..lab.repeat.max(1) {
        for (way, done) in ways.iter().zip(&mut boots) {
            let Ok(so_far) = done else { continue };
            match bench.boot(*way) {
                Ok(booted) => {
                    eprintln!("{}: {:.1} s", way.0, booted.login);
                    so_far.push(booted);
                }
                Err(error) => *done = Err(Verdict::failed(&error)),
            }
        }
    }
    let login = |boots: &[Booted]| Figure::of(&boots.iter().map(|b| b.login).collect::<Vec<_>>());
    let local = ways.iter().zip(&boots).filter(|(way, _)| way.1.is_none());
    let local = local
        .filter_map(|(_, boots)| Some(login(boots.as_ref().ok()?)?.median))
        .reduce(f64::min);
    let row = |((name, by), boots): (&Way, Result<Vec<Booted>, Verdict>)| {
        let link = by.map_or_else(|| "none".to_owned(), |_| LINE.describe());
        let mut row = Row::new([("link", link), ("by", (*name).to_owned())]);
        let boots = match boots {
            Ok(boots) => boots,
            Err(verdict) => return row.but(verdict),
        };
        let mut set = |key: &str, of: &dyn Fn(&Booted) -> Option<f64>| {
            row.set_all(key, &boots.iter().filter_map(of).collect::<Vec<_>>());
        };
        set("login_s", &|b| Some(b.login));
        set("times_local", &|b| Some(b.login / local?));
        set("fetched_mib", &|b| Some(b.crossed?.1 as f64 / MIB));
        set("sent_mib", &|b| Some(b.crossed?.0 as f64 / MIB));
        set("reads", &|b| Some(b.disk.reads));
        set("read_mib", &|b| Some(b.disk.read / MIB));
        set("written_mib", &|b| Some(b.disk.written / MIB));
        set("data_mib", &|_| Some(data / MIB));
        row
    };
    Ok(ways.iter().zip(boots).map(row).collect())
}

impl Bench<'_> {
    fn boot(&self, (name, by): Way) -> Result<Booted> {
        let dir = self.work.join("ends");
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let booted = match by {
            None => self.boot_local(name, &dir),
            Some(by) => self.boot_far(name, by, &dir),
        };
        fs::remove_dir_all(&dir)?;
        booted.context(name)
    }

    fn boot_local(&self, name: &str, dir: &Path) -> Result<Booted> {
        let (disk, socket, said) = (
            dir.join("disk.raw"),
            dir.join("local.sock"),
            dir.join("local.log"),
        );
        copy(&self.image, &disk)?;
        let started = Instant::now();
        let mut shown = match name.ends_with("nbdkit") {
            true => nbdkit(&disk, &socket, &said)?,
            false => qemu_nbd(&disk, &socket, &said)?,
        };
        let booted = self.until_login(&mut shown, started, dir, false)?;
        drop(shown);
        must_be_clean(&disk, &self.image)?;
        Ok(booted)
    }

    fn boot_far(&self, name: &str, by: By, dir: &Path) -> Result<Booted> {
        let far = Far::start(self.net, &self.drover, dir, &self.image, by)?;
        let order = self.work.join("order").into_os_string();
        let near = far.near(by)?.with(match name {
            ORDERED => vec!["--prefetch".into(), order],
            NO_PREFETCH => vec!["--prefetch".into(), "none".into()],
            name if name == MANAGED.0 => vec!["--record".into(), order],
            _ => Vec::new(),
        });
        let started = Instant::now();
        let mut shown = near.start()?;
        let booted = self.until_login(&mut shown, started, dir, true)?;
        near.end(shown, PUSH)?;
        if by.is_drover() {
            let back = dir.join("back.raw");
            let near = far.near(By::Managed)?.with(["--read-only"]);
            let mut shown = near.start()?;
            drop(connect(&mut shown)?);
            let uri = format!("nbd+unix:///{NAME}?socket={}", shown.socket().display());
            shell::run(
                Command::new("timeout")
                    .args([COPY_SECONDS, "nbdcopy", &uri])
                    .arg(&back),
            )?;
            near.end(shown, PUSH)?;
            must_be_clean(&back, &self.image).context("what came back")?;
        }
        Ok(booted)
    }

    fn until_login(
        &self,
        shown: &mut Shown,
        started: Instant,
        dir: &Path,
        linked: bool,
    ) -> Result<Booted> {
        let before = self.net.bytes().filter(|_| linked);
        until_login(&self.kernel, self.net, shown, started, dir, before)
    }
}

/// Boots and shuts down; the machine has ended on return, also after a failure. What crosses the link is counted from
/// `before` on.
pub(super) fn until_login(
    kernel: &Kernel,
    net: &Net,
    shown: &mut Shown,
    started: Instant,
    dir: &Path,
    before: Option<(u64, u64)>,
) -> Result<Booted> {
    drop(connect(shown)?);
    let mut guest = Guest::start(kernel, shown.socket(), shown.name(), dir)?;
    guest.login(LOGIN)?;
    let login = started.elapsed().as_secs_f64();
    let crossed = net.since(before);
    let disk = guest.disk()?;
    guest.shut_down(SHUT_DOWN)?;
    shown.check()?;
    Ok(Booted {
        login,
        crossed,
        disk,
    })
}

fn nbdkit(disk: &Path, socket: &Path, said: &Path) -> Result<Shown> {
    let mut nbdkit = Command::new("nbdkit");
    nbdkit
        .args(["--foreground", "--threads=16"])
        .arg(format!("--unix={}", socket.display()));
    shown_here(nbdkit.arg("file").arg(disk), socket, said)
}

/// Shows an image with `qemu-nbd`.
pub(super) fn qemu_nbd(disk: &Path, socket: &Path, said: &Path) -> Result<Shown> {
    let mut qemu = Command::new("qemu-nbd");
    qemu.args([
        "--persistent",
        "--shared=16",
        "--format=raw",
        "--cache=writeback",
        "--aio=threads",
    ]);
    qemu.arg(format!("--export-name={NAME}"))
        .arg(format!("--socket={}", socket.display()));
    shown_here(qemu.arg(disk), socket, said)
}

fn shown_here(command: &mut Command, socket: &Path, said: &Path) -> Result<Shown> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(said)?);
    let child = command.spawn().context("cannot show the image here")?;
    Ok(Shown::new(child, socket.to_owned(), said.to_owned()))
}

/// Fails unless the disk, which was `image`, has been used by a machine and unmounted cleanly.
pub(super) fn must_be_clean(disk: &Path, image: &Path) -> Result<()> {
    if mounts(disk)? <= mounts(image)? {
        bail!("it was never mounted for writing");
    }
    shell::run(
        Command::new("timeout")
            .args([COPY_SECONDS, "e2fsck", "-fn"])
            .arg(disk),
    )
    .map(drop)
}

/// The mount counter of an ext4 file system.
fn mounts(disk: &Path) -> Result<u16> {
    let mut count = [0; 2];
    File::open(disk)?.read_exact_at(&mut count, MOUNT_COUNT)?;
    Ok(u16::from_le_bytes(count))
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut cp = Command::new("cp");
    shell::run(
        cp.args(["--sparse=always", "--reflink=auto"])
            .args([from, to]),
    )
    .map(drop)
}
