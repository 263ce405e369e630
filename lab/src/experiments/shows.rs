//! Servers of a remote image on a local NBD socket or as a file: drover in its modes, and its rivals.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::lines::Net;
use crate::site::{Sender, Site, end_within, terminate};
use crate::{rivals, shell};

/// The name of the export, and of the image at the far site.
pub const NAME: &str = "disk.raw";

/// Timeout for a process to exit by itself.
const END: Duration = Duration::from_secs(20);

/// The server of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// `drover export`.
    Managed,
    /// `drover export --sync remote`.
    ManagedRemote,
    /// `drover export --direct`.
    Direct,
    /// `drover mount`: a file, by FUSE.
    File,
    /// `qemu-storage-daemon`: copy-on-read into a qcow2 overlay, backed by NBD.
    Qsd,
    /// `nbdkit nbd` with its cache and readahead filters.
    Nbdkit,
}

impl By {
    /// All of them, in the order of the document.
    pub const ALL: [Self; 6] = [
        Self::Managed,
        Self::File,
        Self::ManagedRemote,
        Self::Direct,
        Self::Qsd,
        Self::Nbdkit,
    ];

    /// The name in rows.
    pub fn name(self) -> &'static str {
        match self {
            By::Managed => "drover, managed",
            By::ManagedRemote => "drover, managed, --sync remote",
            By::Direct => "drover, direct",
            By::File => "drover, managed, FUSE file",
            By::Qsd => "qemu-storage-daemon, copy-on-read",
            By::Nbdkit => "nbdkit, cache and readahead",
        }
    }

    /// The name in identifiers of cases.
    pub fn slug(self) -> &'static str {
        match self {
            By::Managed => "managed",
            By::ManagedRemote => "managed-remote",
            By::Direct => "direct",
            By::File => "file",
            By::Qsd => "qsd",
            By::Nbdkit => "nbdkit",
        }
    }

    /// Whether it is drover.
    pub fn is_drover(self) -> bool {
        !matches!(self, By::Qsd | By::Nbdkit)
    }

    /// What it requires and this machine lacks.
    pub fn missing(self) -> Option<String> {
        let programs: &[&str] = match self {
            By::Qsd => &["qemu-storage-daemon", "qemu-nbd", "qemu-img"],
            By::Nbdkit => &["nbdkit", "qemu-nbd"],
            _ => &[],
        };
        let lacks = programs.iter().find(|p| !shell::have(p))?;
        Some(format!("{lacks} is not installed"))
    }

    /// The rival's name and version, for the stored results.
    pub fn version(self) -> Option<String> {
        let program = match self {
            By::Qsd => "qemu-storage-daemon",
            By::Nbdkit => "nbdkit",
            _ => return None,
        };
        let version = rivals::tool_version(program).unwrap_or_else(|_| "absent".to_owned());
        Some(format!("{} {version}", self.slug()))
    }
}

/// The far end, which serves the image to the near end.
pub struct Far<'a> {
    net: &'a Net,
    drover: PathBuf,
    dir: PathBuf,
    image: PathBuf,
    site: Option<Site>,
    server: Option<Child>,
}

impl<'a> Far<'a> {
    /// Starts a far end that serves `image` to `by`, in `dir`.
    pub fn start(net: &'a Net, drover: &Path, dir: &Path, image: &Path, by: By) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let mut far = Self {
            net,
            drover: drover.to_owned(),
            dir: dir.canonicalize()?,
            image: image.canonicalize()?,
            site: None,
            server: None,
        };
        if by.is_drover() {
            let named = far.dir.join(NAME);
            let _ = std::fs::remove_file(&named);
            std::fs::hard_link(&far.image, &named)
                .or_else(|_| std::os::unix::fs::symlink(&far.image, &named))
                .context("cannot name the image")?;
            let site = Site::start(drover, &far.dir.join("far"), net.place())?;
            shell::run(
                Command::new(drover)
                    .args(["index"])
                    .arg(&named)
                    .env("DROVER_HOME", far.dir.join("far")),
            )?;
            far.site = Some(site);
        } else {
            let mut command = net.place().far(Path::new("qemu-nbd"));
            command
                .args(["--persistent", "--shared=16", "--read-only", "--format=raw"])
                .args(["--cache=writeback", "--aio=threads", "--export-name=far"])
                .args(["--bind", net.place().far_address(), "--port", PORT])
                .arg(&far.image)
                .stdin(Stdio::null())
                .stderr(Stdio::null());
            far.server = Some(command.spawn().context("qemu-nbd")?);
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(far)
    }

    /// Prepares the near end, which is not timed: pairing, an empty overlay.
    pub fn near(&self, by: By) -> Result<Near<'_>> {
        let socket = self.dir.join("near.sock");
        let _ = std::fs::remove_file(&socket);
        if let Some(site) = &self.site {
            let home = self.dir.join("near");
            let _ = std::fs::remove_dir_all(&home);
            // A ticket can be used only once: each new home is a copy of the one that was paired.
            let paired = self.dir.join("paired");
            if !paired.exists() {
                Sender::pair(&self.drover, &paired, self.net.place(), site)?;
            }
            shell::run(Command::new("cp").arg("-a").args([&paired, &home]))?;
        }
        if by == By::Qsd {
            let overlay = self.dir.join("overlay.qcow2");
            let _ = std::fs::remove_file(&overlay);
            let size = std::fs::metadata(&self.image)?.len();
            shell::run(
                Command::new("qemu-img")
                    .args(["create", "-q", "-f", "qcow2"])
                    .arg(&overlay)
                    .arg(size.to_string()),
            )?;
        }
        Ok(Near {
            far: self,
            by,
            socket,
            options: Vec::new(),
        })
    }
}

impl Drop for Far<'_> {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

const PORT: &str = "10809";

/// File name of a mount.
const FILE: &str = "mounted.raw";

/// The near end, ready to serve the image.
pub struct Near<'a> {
    far: &'a Far<'a>,
    by: By,
    socket: PathBuf,
    options: Vec<OsString>,
}

impl Near<'_> {
    /// Adds options of `drover export`.
    #[must_use]
    pub fn with(mut self, options: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.options.extend(options.into_iter().map(Into::into));
        self
    }

    /// Shuts down cleanly within `patience`: drover pushes its dirty data.
    pub fn end(&self, mut shown: Shown, patience: Duration) -> Result<()> {
        if self.by.is_drover() {
            let mut unmount = self.far.net.place().near(&self.far.drover);
            unmount
                .arg("unmount")
                .arg(&self.socket)
                .env("DROVER_HOME", self.far.dir.join("near"))
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            let said = self.far.dir.join("unmount.log");
            let mut unmount = unmount.stderr(std::fs::File::create(&said)?).spawn()?;
            let status = end_within(&mut unmount, patience).context("drover unmount")?;
            if !status.success() {
                bail!(
                    "drover unmount: {status}: {}",
                    shell::tail(&std::fs::read(&said).unwrap_or_default())
                );
            }
            end_within(&mut shown.child, END).context("the export after drover unmount")?;
        }
        drop(shown);
        Ok(())
    }

    /// Starts the server. Callers start timing before this.
    pub fn start(&self) -> Result<Shown> {
        let mut command = self.command();
        let said = self.far.dir.join("near.log");
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&said)?)
            .spawn()
            .with_context(|| self.by.name())?;
        let mut shown = Shown::new(child, self.socket.clone(), said);
        if self.by == By::File {
            // `ip netns exec` runs the command in its own mount namespace.
            let root = format!("/proc/{}/root", shown.child.id());
            let file = self.far.dir.join(FILE);
            shown.file = Some(PathBuf::from(format!("{root}{}", file.display())));
        }
        Ok(shown)
    }

    /// Bytes of content that drover's mount reports as received; `None` for others, or without a reply.
    pub fn received(&self) -> Option<u64> {
        self.status()?["received"].as_u64()
    }

    /// Whether drover's mount reports that the whole disk is cached.
    pub fn is_whole(&self) -> bool {
        // Its size is unknown until the far site has replied.
        self.status().is_some_and(|disk| {
            let size = disk["size"].as_u64().filter(|size| *size > 0);
            size.is_some_and(|size| disk["local"].as_u64() >= Some(size))
        })
    }

    /// The status of the disk according to drover.
    fn status(&self) -> Option<Value> {
        if !self.by.is_drover() {
            return None;
        }
        let mut mounts = self.far.net.place().near(&self.far.drover);
        mounts
            .args(["mounts", "--json"])
            .env("DROVER_HOME", self.far.dir.join("near"));
        let said = shell::run(&mut mounts).ok()?.stdout;
        let line = said.split(|byte| *byte == b'\n').next()?;
        Some(serde_json::from_slice::<Value>(line).ok()?["disks"][0].clone())
    }

    fn command(&self) -> Command {
        let place = self.far.net.place();
        let address = place.far_address();
        let socket = self.socket.display();
        if self.by.is_drover() {
            let mut command = place.near(&self.far.drover);
            command.env("DROVER_HOME", self.far.dir.join("near"));
            if self.by == By::File {
                command
                    .arg("mount")
                    .arg(format!("far:{NAME}"))
                    .arg(self.far.dir.join(FILE))
                    .arg("--foreground");
                return command;
            }
            command
                .arg("export")
                .arg(format!("far:{NAME}"))
                .arg("--nbd")
                .arg(format!("unix:{socket}"));
            match self.by {
                By::Direct => {
                    command.arg("--direct");
                }
                By::ManagedRemote => {
                    command.args(["--sync", "remote"]);
                }
                _ => {}
            }
            command.args(&self.options);
            return command;
        }
        if self.by == By::Nbdkit {
            let mut command = place.near(Path::new("nbdkit"));
            command
                .args(["--foreground", "--threads=32", "--exportname", NAME])
                .arg(format!("--unix={socket}"))
                .args(["--filter=readahead", "--filter=cache", "nbd"])
                .arg(format!("uri=nbd://{address}:{PORT}/far"))
                .args(["shared=true", "cache=unsafe", "cache-on-read=true"]);
            return command;
        }
        let mut command = place.near(Path::new("qemu-storage-daemon"));
        let overlay = self.far.dir.join("overlay.qcow2");
        // Everything on its main thread: with an I/O thread for the export, version 7.2 aborts when a client
        // disconnects.
        command
            .arg("--blockdev")
            .arg(format!(
                "driver=nbd,node-name=far,read-only=on,server.type=inet,server.host={address},server.port={PORT},export=far"
            ))
            .arg("--blockdev")
            .arg(format!(
                "driver=qcow2,node-name=top,backing=far,file.driver=file,file.filename={}",
                overlay.display()
            ))
            .args(["--blockdev", "driver=copy-on-read,node-name=cor,file=top"])
            .arg("--nbd-server")
            .arg(format!("addr.type=unix,addr.path={socket}"))
            .arg("--export")
            .arg(format!(
                "type=nbd,id=e,node-name=cor,name={NAME},writable=on"
            ));
        command
    }
}

/// A running server of the image; killed when dropped.
pub struct Shown {
    pub(super) child: Child,
    socket: PathBuf,
    /// The name of the export.
    name: String,
    file: Option<PathBuf>,
    said: PathBuf,
}

impl Shown {
    /// A process that serves at `socket` and writes its messages to `said`.
    pub fn new(child: Child, socket: PathBuf, said: PathBuf) -> Self {
        Self {
            child,
            socket,
            name: NAME.to_owned(),
            file: None,
            said,
        }
    }

    /// With an export of another name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The name of its export.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file of the disk, for a mount.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Its PID.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Fails with its own error message if it has exited.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!(
                "it ended ({status}): {}",
                shell::tail(&std::fs::read(&self.said).unwrap_or_default())
            ),
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        terminate(&mut self.child, END);
    }
}
