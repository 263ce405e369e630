//! A machine that boots from a snapshot in an object store.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::bench::{Case, Column, Experiment, Figure, Need, Row, Verdict};
use crate::experiments::boot::{Booted, IMAGE, copy, must_be_clean, qemu_nbd, until_login};
use crate::experiments::guest::{Kernel, PROGRAMS};
use crate::experiments::lines::{Line, Net, line};
use crate::experiments::shows::Shown;
use crate::setup::Lab;
use crate::shell;
use crate::site::end_within;

const MIB: f64 = (1u64 << 20) as f64;
const LINE: Line = line(1000.0, 10.0, 0.0);
/// The server, and how long it may take to listen.
const SERVER: &str = "versitygw";
const PORT: u16 = 7070;
const PATIENCE: Duration = Duration::from_secs(30);
/// How long an export may take to end.
const END: Duration = Duration::from_secs(120);
const VAULT: &str = "s3://vaults/vault";

pub const EXPERIMENT: Experiment = Experiment {
    name: "snapshot-boot",
    title: "A machine that boots from a snapshot in an object store",
    text: "The library's bookworm with nginx and php under QEMU without KVM, with two cores and 1 GiB, from an NBD export on a Unix socket: of a local file by `qemu-nbd`, or of a snapshot in a vault on an S3 server (`versitygw`) that is \
at the other end of the link, by `drover export NAME@latest`. The clock starts at the command that shows the disk and ends at the login prompt on the serial console. Nothing is cached; the guest writes over the snapshot. *As is*: the rest of the disk is fetched in the background; \
*without prefetch*: only what is read; *by a profile*: first what the boot before read. *Fetched* are IP bytes until the prompt. Boots follow one another on one machine, which runs the guest and both ends; afterwards the guest must shut down cleanly.",
    columns: &[
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::figure("login_s", "login, s", 1),
        Column::optional("times_local", "times local", 2),
        Column::optional("fetched_mib", "fetched, MiB", 1),
        Column::figure("reads", "reads", 0),
        Column::figure("read_mib", "read, MiB", 1),
        Column::figure("written_mib", "written, MiB", 1),
    ],
    cases: |lab| {
        let what = format!("boots from a snapshot over {}", LINE.describe());
        let case = Case::new(LINE.slug(), what, 1, &[Need::Link, Need::Library]);
        // The small set has no bootable image.
        Ok(lab.either(vec![case], Vec::new()))
    },
    run: |lab, _| measure(lab),
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Local,
    Snapshot,
    NoPrefetch,
    Profile,
}

impl Way {
    const ALL: [Way; 4] = [Way::Local, Way::Snapshot, Way::NoPrefetch, Way::Profile];

    fn name(self) -> &'static str {
        match self {
            Way::Local => "local, qemu-nbd",
            Way::Snapshot => "snapshot, as is",
            Way::NoPrefetch => "snapshot, without prefetch",
            Way::Profile => "snapshot, by a profile",
        }
    }
}

/// The server of objects, at the far end.
struct Server(Child);

impl Server {
    fn start(net: &Net, program: &Path, dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir.join("vaults"))?;
        let address = format!("{}:{PORT}", net.place().far_address());
        let mut command = net.place().far(program);
        command
            .args(["--port", &address, "--quiet", "posix"])
            .arg(dir)
            .env("ROOT_ACCESS_KEY", "test")
            .env("ROOT_SECRET_KEY", "testsecret");
        let output = || Stdio::null();
        let child = command.stdin(output()).stdout(output()).stderr(output());
        let mut server = Server(child.spawn().context(SERVER)?);
        // As its own network has it: in state 0A it listens.
        let listening = format!(":{PORT:04X} 00000000:0000 0A");
        let (began, sockets) = (Instant::now(), format!("/proc/{}/net/tcp", server.0.id()));
        while !fs::read_to_string(&sockets).is_ok_and(|list| list.contains(&listening)) {
            if let Some(status) = server.0.try_wait()? {
                bail!("{SERVER} ended: {status}");
            }
            if began.elapsed() > PATIENCE {
                bail!("{SERVER} does not listen");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where it may be: Go installs programs there.
fn program() -> Option<PathBuf> {
    if shell::have(SERVER) {
        return Some(SERVER.into());
    }
    let home = std::env::var_os("HOME")?;
    Some(Path::new(&home).join("go/bin").join(SERVER)).filter(|program| program.is_file())
}

struct Bench<'a> {
    net: &'a Net,
    drover: PathBuf,
    work: PathBuf,
    /// A copy of the image, never written to.
    image: PathBuf,
    kernel: Kernel,
    /// The snapshot, by name and time.
    snapshot: String,
}

fn measure(lab: &Lab) -> Result<Vec<Row>> {
    let label = |way: Way| {
        let link = match way {
            Way::Local => "none".to_owned(),
            _ => LINE.describe(),
        };
        Row::new([("link", link), ("by", way.name().to_owned())])
    };
    let lacks = PROGRAMS
        .iter()
        .chain(&["qemu-nbd"])
        .find(|p| !shell::have(p));
    let (server, lacks) = (program(), lacks.copied());
    let Some(server) = server.filter(|_| lacks.is_none()) else {
        let why = format!("{} is not installed", lacks.unwrap_or(SERVER));
        let skipped = |way: Way| label(way).but(Verdict::Skipped(why.clone()));
        return Ok(Way::ALL.into_iter().map(skipped).collect());
    };
    let guard = lab.work("snapshot-boot")?;
    let work = guard.join("");
    let image = work.join("web.raw");
    copy(&lab.image(IMAGE)?, &image)?;
    let net = Net::like(Some(LINE), 1)?;
    let _server = Server::start(&net, &server, &work.join("objects"))?;
    let mut bench = Bench {
        net: &net,
        drover: lab.binary()?,
        kernel: Kernel::of(&image, &work)?,
        snapshot: String::new(),
        image,
        work,
    };
    bench.snapshot = bench.store().context("making the snapshot")?;
    let mut boots: Vec<Result<Vec<Booted>>> = Way::ALL.map(|_| Ok(Vec::new())).into();
    for _ in 0..lab.repeat.max(1) {
        for (way, done) in Way::ALL.into_iter().zip(&mut boots) {
            let Ok(so_far) = done else { continue };
            match bench.boot(way).context(way.name()) {
                Ok(booted) => {
                    eprintln!("  {}: {:.1} s", way.name(), booted.login);
                    so_far.push(booted);
                }
                Err(error) => *done = Err(error),
            }
        }
    }
    let local = boots[0].as_ref().ok().and_then(|boots| {
        let logins: Vec<f64> = boots.iter().map(|b| b.login).collect();
        Some(Figure::of(&logins)?.median)
    });
    let row = |(way, boots): (Way, Result<Vec<Booted>>)| {
        let mut row = label(way);
        let boots = match boots {
            Ok(boots) => boots,
            Err(error) => return row.but(Verdict::failed(&error)),
        };
        let mut set = |key: &str, of: &dyn Fn(&Booted) -> Option<f64>| {
            row.set_all(key, &boots.iter().filter_map(of).collect::<Vec<_>>());
        };
        set("login_s", &|b| Some(b.login));
        set("times_local", &|b| Some(b.login / local?));
        set("fetched_mib", &|b| Some(b.crossed?.1 as f64 / MIB));
        set("reads", &|b| Some(b.disk.reads));
        set("read_mib", &|b| Some(b.disk.read / MIB));
        set("written_mib", &|b| Some(b.disk.written / MIB));
        row
    };
    Ok(Way::ALL.into_iter().zip(boots).map(row).collect())
}

impl Bench<'_> {
    /// A command at the near end.
    fn drover(&self, home: &Path) -> Command {
        let mut command = self.net.place().near(&self.drover);
        let address = self.net.place().far_address();
        command
            .env("DROVER_HOME", home)
            .env("AWS_ENDPOINT_URL", format!("http://{address}:{PORT}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "testsecret")
            .env("AWS_REGION", "us-east-1");
        command
    }

    /// Makes the snapshot.
    fn store(&self) -> Result<String> {
        let home = self.work.join("host");
        shell::run(self.drover(&home).args(["vault", "init", VAULT]))?;
        let mut snapshot = self.drover(&home);
        snapshot.arg("snapshot").arg(&self.image);
        let said = shell::run(snapshot.args(["--as", "web", "--json"]))?.stdout;
        let last = said.trim_ascii_end().rsplit(|byte| *byte == b'\n').next();
        let said: Value = serde_json::from_slice(last.unwrap_or_default())?;
        let name = said["snapshot"].as_str().context("no name of a snapshot")?;
        Ok(name.to_owned())
    }

    fn boot(&self, way: Way) -> Result<Booted> {
        let dir = self.work.join("ends");
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let booted = match way {
            Way::Local => self.local(&dir),
            _ => self.snapshot(way, &dir),
        };
        fs::remove_dir_all(&dir)?;
        booted
    }

    fn local(&self, dir: &Path) -> Result<Booted> {
        let (disk, socket) = (dir.join("local.raw"), dir.join("local.sock"));
        copy(&self.image, &disk)?;
        let started = Instant::now();
        let mut shown = qemu_nbd(&disk, &socket, &dir.join("local.log"))?;
        let booted = until_login(&self.kernel, self.net, &mut shown, started, dir, None)?;
        drop(shown);
        must_be_clean(&disk, &self.image)?;
        Ok(booted)
    }

    fn snapshot(&self, way: Way, dir: &Path) -> Result<Booted> {
        let (home, socket, said) = (dir.join("home"), dir.join("s"), dir.join("export.log"));
        let profile = self.work.join("boot.profile");
        shell::run(self.drover(&home).arg("init"))?;
        let mut export = self.drover(&home);
        export
            .args(["export", "web@latest", "--vault", VAULT, "--nbd"])
            .arg(format!("unix:{}", socket.display()));
        match way {
            Way::NoPrefetch => {
                export
                    .args(["--prefetch", "none", "--record"])
                    .arg(&profile);
            }
            Way::Profile => {
                export.arg("--prefetch").arg(&profile);
            }
            _ => {}
        }
        export
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&said)?);
        let (before, started) = (self.net.bytes(), Instant::now());
        let shown = Shown::new(export.spawn()?, socket.clone(), said);
        let mut shown = shown.named(&self.snapshot);
        let booted = until_login(&self.kernel, self.net, &mut shown, started, dir, before)?;
        shell::run(self.drover(&home).arg("unmount").arg(&socket))?;
        end_within(&mut shown.child, END).context("the export after drover unmount")?;
        Ok(booted)
    }
}
