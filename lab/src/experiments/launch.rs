//! Boots a virtual machine from an image that is still being sent (`vmflock` §3.5, figures 4 and 5 of its issue): from the
//! command that sends it to the login prompt.

pub mod io;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::boot::{Booted, IMAGE, copy, must_be_clean, qemu_nbd, until_login};
use super::guest::{Kernel, PROGRAMS};
use super::lines::{Line, Net, line};
use super::mover::deadline;
use super::shows::{NAME, Shown};
use crate::bench::{Case, Column, Experiment, Figure, Need, Row, Verdict};
use crate::files::identical;
use crate::setup::Lab;
use crate::shell;
use crate::site::{Sender, Site, end_within};

const MIB: f64 = (1u64 << 20) as f64;
/// Timeout of commands that only tell a site something.
const COMMAND: Duration = Duration::from_secs(60);
const LINES: [Line; 2] = [line(100.0, 40.0, 0.0), line(400.0, 40.0, 0.0)];

pub const EXPERIMENT: Experiment = Experiment {
    name: "launch",
    title: "A machine that boots from an image that is still being sent",
    text: "The library's bookworm with nginx and php is sent to a site that has nothing, and booted there under QEMU without KVM, with two cores and 1 GiB; kernel and initial file system are given to QEMU. The clock starts with `drover send` and ends at the login prompt on the \
serial console. *In transit* is `drover launch` as soon as the transfer has begun; *in transit, with a profile* the same with the profile of an earlier boot at the source, which is sent first; *after the transfer* waits for its end. *Local* is the same image beside the machine, by qemu-nbd; \
*launched, complete* the same boot by `drover launch` of the image that was delivered, from that command on. *Fetched* is what had crossed the link by the prompt, both ways. Then the guest is told to shut down and must; the transfer must end, and the delivered file be its original. \
One machine runs the guest and both ends, so a transfer under way slows the guest also by the processor time that it takes.",
    columns: &[
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure("login_s", "login, s", 1),
        Column::optional("times_local", "times local", 2),
        Column::optional("fetched_mib", "fetched, MiB", 1),
        Column::optional("sent_s", "sent, s", 1),
        Column::figure("reads", "reads", 0),
        Column::figure("read_mib", "read, MiB", 1),
        Column::figure("written_mib", "written, MiB", 1),
    ],
    cases: |lab| {
        // A case for a link: boot times vary over the day, and all are compared with the local one.
        let case = |line: Line| {
            let what = format!("boots from an image in transit over {}", line.describe());
            Case::new(line.slug(), what, 0, &[Need::Link, Need::Library])
        };
        // The small set has no bootable image.
        Ok(lab.either(LINES.map(case).into(), Vec::new()))
    },
    run: |lab, case| {
        let line = LINES.into_iter().find(|line| line.slug() == case.id);
        measure(lab, line.context("no such case")?)
    },
};

/// How the machine gets its image.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Local,
    Transit,
    Profiled,
    After,
    Complete,
}

impl Way {
    const ALL: [Way; 5] = [
        Way::Local,
        Way::Transit,
        Way::Profiled,
        Way::After,
        Way::Complete,
    ];

    fn name(self) -> &'static str {
        match self {
            Way::Local => "local",
            Way::Transit => "in transit",
            Way::Profiled => "in transit, with a profile",
            Way::After => "after the transfer",
            Way::Complete => "launched, complete",
        }
    }
}

/// A boot, and how long the transfer took.
struct Launched {
    booted: Booted,
    sent: Option<f64>,
}

struct Bench<'a> {
    net: &'a Net,
    drover: PathBuf,
    work: PathBuf,
    /// A copy of the image, never written to.
    image: PathBuf,
    kernel: Kernel,
    /// Recorded at a boot before all others.
    profile: PathBuf,
}

fn measure(lab: &Lab, line: Line) -> Result<Vec<Row>> {
    let label = |way: Way| {
        let link = match way {
            Way::Local | Way::Complete => "none".to_owned(),
            _ => line.describe(),
        };
        Row::new([("link", link), ("by", way.name().to_owned())])
    };
    if let Some(lacks) = PROGRAMS
        .iter()
        .chain(&["qemu-nbd"])
        .find(|p| !shell::have(p))
    {
        let why = Verdict::Skipped(format!("{lacks} is not installed"));
        return Ok(Way::ALL
            .into_iter()
            .map(|way| label(way).but(why.clone()))
            .collect());
    }
    let guard = lab.work("launch")?;
    let work = guard.join("");
    let image = work.join(NAME);
    copy(&lab.image(IMAGE)?, &image)?;
    let net = Net::like(Some(line), 1)?;
    let bench = Bench {
        net: &net,
        drover: lab.binary()?,
        kernel: Kernel::of(&image, &work)?,
        profile: work.join("boot.profile"),
        image,
        work,
    };
    bench.record().context("recording a boot")?;
    let mut boots: Vec<Result<Vec<Launched>>> = Way::ALL.map(|_| Ok(Vec::new())).into();
    for _ in 0..lab.repeat.max(1) {
        for (way, done) in Way::ALL.into_iter().zip(&mut boots) {
            let Ok(so_far) = done else { continue };
            match bench.boot(way).context(way.name()) {
                Ok(launched) => {
                    eprintln!("{}: {:.1} s", way.name(), launched.booted.login);
                    so_far.push(launched);
                }
                Err(error) => *done = Err(error),
            }
        }
    }
    let local = boots[0].as_ref().ok().and_then(|boots| {
        let logins: Vec<f64> = boots.iter().map(|b| b.booted.login).collect();
        Some(Figure::of(&logins)?.median)
    });
    let row = |(way, boots): (Way, Result<Vec<Launched>>)| {
        let mut row = label(way);
        let boots = match boots {
            Ok(boots) => boots,
            Err(error) => return row.but(Verdict::failed(&error)),
        };
        let mut set = |key: &str, of: &dyn Fn(&Launched) -> Option<f64>| {
            row.set_all(key, &boots.iter().filter_map(of).collect::<Vec<_>>());
        };
        set("login_s", &|b| Some(b.booted.login));
        set("times_local", &|b| Some(b.booted.login / local?));
        set("fetched_mib", &|b| {
            let (near, far) = b.booted.crossed?;
            Some((near + far) as f64 / MIB)
        });
        set("sent_s", &|b| b.sent);
        set("reads", &|b| Some(b.booted.disk.reads));
        set("read_mib", &|b| Some(b.booted.disk.read / MIB));
        set("written_mib", &|b| Some(b.booted.disk.written / MIB));
        row
    };
    Ok(Way::ALL.into_iter().zip(boots).map(row).collect())
}

impl Bench<'_> {
    fn boot(&self, way: Way) -> Result<Launched> {
        let dir = self.work.join("ends");
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let launched = match way {
            Way::Local => self.local(&dir),
            _ => self.launched(way, &dir),
        };
        fs::remove_dir_all(&dir)?;
        launched
    }

    fn local(&self, dir: &Path) -> Result<Launched> {
        let (disk, socket) = (dir.join("local.raw"), dir.join("local.sock"));
        copy(&self.image, &disk)?;
        let started = Instant::now();
        let mut shown = qemu_nbd(&disk, &socket, &dir.join("local.log"))?;
        let booted = self.until_login(&mut shown, started, dir, None)?;
        drop(shown);
        must_be_clean(&disk, &self.image)?;
        Ok(Launched { booted, sent: None })
    }

    /// Records what a boot reads, of a copy of the image.
    fn record(&self) -> Result<()> {
        let dir = self.work.join("record");
        fs::create_dir_all(&dir)?;
        let disk = dir.join(NAME);
        copy(&self.image, &disk)?;
        let (socket, home) = (dir.join("s"), dir.join("home"));
        told(Command::new(&self.drover).arg("init"), &home)?;
        let mut export = Command::new(&self.drover);
        export
            .arg("export")
            .arg(format!("file:{}", disk.display()))
            .arg("--nbd")
            .arg(format!("unix:{}", socket.display()))
            .arg("--record")
            .arg(&self.profile);
        let mut shown = show(&mut export, &home, &socket, &dir.join("export.log"))?;
        self.until_login(&mut shown, Instant::now(), &dir, None)?;
        unmount(&mut Command::new(&self.drover), &home, &socket)?;
        end_within(&mut shown.child, COMMAND).context("the export after drover unmount")?;
        fs::remove_dir_all(&dir)?;
        Ok(())
    }

    fn launched(&self, way: Way, dir: &Path) -> Result<Launched> {
        let place = self.net.place();
        let site = Site::start(&self.drover, &dir.join("site"), place)?;
        let sender = Sender::pair(&self.drover, &dir.join("sender"), place, &site)?;
        if way == Way::Profiled {
            let mut index = Command::new(&self.drover);
            told(index.arg("index").arg(&self.image), &dir.join("sender"))?;
            let mut import = Command::new(&self.drover);
            let import = import.args(["profile", "import", NAME]).arg(&self.profile);
            told(import, &dir.join("sender"))?;
        }
        rustix::fs::sync();
        let (home, socket) = (dir.join("site"), dir.join("launch.sock"));
        let before = self.net.bytes();
        let mut started = Instant::now();
        let mut sending = Some(sender.begin(&self.image, &[])?);
        let mut sent = None;
        let mut end = |sending: &mut Option<crate::site::Sending>| -> Result<()> {
            if let Some(sending) = sending.take() {
                sent = Some(sending.finish(deadline(&self.image)?)?.seconds);
            }
            Ok(())
        };
        if matches!(way, Way::After | Way::Complete) {
            end(&mut sending)?;
        }
        if way == Way::Complete {
            started = Instant::now();
        }
        let mut launch = place.far(&self.drover);
        launch
            .args(["launch", NAME, "--wait", "3m", "--nbd"])
            .arg(format!("unix:{}", socket.display()));
        let mut shown = show(&mut launch, &home, &socket, &dir.join("launch.log"))?;
        let before = before.filter(|_| way != Way::Complete);
        let booted = self.until_login(&mut shown, started, dir, before)?;
        end(&mut sending)?;
        ensure!(
            identical(&self.image, &site.image(NAME))?,
            "the delivered file is not its original"
        );
        unmount(&mut place.far(&self.drover), &home, &socket)?;
        end_within(&mut shown.child, COMMAND).context("the launch after drover unmount")?;
        Ok(Launched { booted, sent })
    }

    fn until_login(
        &self,
        shown: &mut Shown,
        started: Instant,
        dir: &Path,
        before: Option<(u64, u64)>,
    ) -> Result<Booted> {
        until_login(&self.kernel, self.net, shown, started, dir, before)
    }
}

fn show(command: &mut Command, home: &Path, socket: &Path, said: &Path) -> Result<Shown> {
    let child = command
        .env("DROVER_HOME", home)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(said)?)
        .spawn()?;
    Ok(Shown::new(child, socket.to_owned(), said.to_owned()))
}

fn unmount(drover: &mut Command, home: &Path, socket: &Path) -> Result<()> {
    told(drover.arg("unmount").arg(socket), home)
}

fn told(command: &mut Command, home: &Path) -> Result<()> {
    shell::run(command.env("DROVER_HOME", home)).map(drop)
}
