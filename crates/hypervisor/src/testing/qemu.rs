//! A QEMU process of a test.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::booted::{PROGRAM, goes_on, let_run, state_of};
use super::{Guest, PATIENCE, skip};
use crate::machine::{Machine, Node};

/// Whether QEMU is installed; if not, says SKIP for `test` and returns `None`.
#[must_use]
pub fn program(test: &str) -> Option<()> {
    match Command::new(PROGRAM).arg("--version").output() {
        Ok(_) => Some(()),
        Err(e) => skip(test, &format!("no {PROGRAM} (qemu-system-x86): {e}")),
    }
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Launch {
    arguments: Vec<String>,
    nodes: Vec<Node>,
    kernel: String,
    /// Whether the guest may have booted before.
    booted: bool,
}

impl Default for Launch {
    fn default() -> Self {
        Launch::new()
    }
}

impl Launch {
    /// A machine without disks: 96 MiB, one processor, a console. Both sides of a migration get the same.
    #[must_use]
    pub fn new() -> Self {
        Launch::with_memory(96)
    }

    /// The same with so many MiB, and a little more: see [`Machine::check_migratable`].
    #[must_use]
    pub fn with_memory(mib: u32) -> Self {
        let memory = mib * 1024 + 8;
        let fixed = format!(
            "-M pc-i440fx-7.2 -cpu qemu64 -accel tcg -m {memory}K -nodefaults -no-user-config -display none"
        );
        Launch {
            arguments: fixed.split(' ').map(str::to_owned).collect(),
            nodes: Vec::new(),
            booted: false,
            kernel: "console=ttyS0 quiet panic=-1 mitigations=off".into(),
        }
    }

    /// With more of QEMU's arguments, separated by spaces.
    #[must_use]
    pub fn with(mut self, arguments: &str) -> Self {
        self.arguments
            .extend(arguments.split_whitespace().map(str::to_owned));
        self
    }

    /// With a block node.
    #[must_use]
    pub fn node(mut self, node: &Node) -> Self {
        self.arguments
            .extend(["-blockdev".into(), node.options().to_string()]);
        self.nodes.push(node.clone());
        self
    }

    /// With a virtio disk `id` on block node `node`. The first is the guest's `/dev/vda`.
    #[must_use]
    pub fn disk(self, id: &str, node: &str) -> Self {
        // With a geometry QEMU does not look for one on the disk.
        self.with(&format!(
            "-device virtio-blk-pci,drive={node},id={id},cyls=16,heads=16,secs=63"
        ))
    }

    /// Booting the guest, which makes a record every `pace_ms` and with each changes `dirty_mib` of its memory.
    #[must_use]
    pub fn guest(mut self, guest: &Guest, pace_ms: u32, dirty_mib: u32) -> Self {
        let parts = [("-kernel", &guest.kernel), ("-initrd", &guest.initrd)];
        for (option, path) in parts {
            self.arguments
                .extend([option.into(), path.display().to_string()]);
        }
        let kernel = format!("{} pace={pace_ms} dirty={dirty_mib}", self.kernel);
        self.arguments.extend(["-append".into(), kernel]);
        self
    }

    /// With the guest writing each record to its second disk, too, after the first.
    #[must_use]
    pub fn both(mut self) -> Self {
        if let Some(line) = self.arguments.last_mut() {
            line.push_str(" both=1");
        }
        self
    }

    /// With so much of the guest's memory that does not compress, and does not change.
    #[must_use]
    pub fn noise(mut self, mib: u32) -> Self {
        if let Some(line) = self.arguments.last_mut() {
            *line += &format!(" noise={mib}");
        }
        self
    }

    /// Waiting for a migration, paused.
    #[must_use]
    pub fn incoming(self) -> Self {
        let waits = self.with("-S -incoming defer");
        Launch {
            booted: false,
            ..waits
        }
    }

    /// Where a guest with such a machine has booted before, in this test or another, it goes on from there: what is to be tested begins
    /// later. Its disks are raw.
    #[must_use]
    pub fn booted(self) -> Self {
        Launch {
            booted: true,
            ..self
        }
    }

    /// The arguments of the same machine with disks that are nothing; none where that is another machine.
    fn without_disks(&self) -> Option<Vec<String>> {
        let mut arguments = self.arguments.clone();
        for node in &self.nodes {
            let null = match node {
                Node::Raw { .. } | Node::Null { .. } => continue,
                Node::File { name, path } => Node::Null {
                    name: name.clone(),
                    size: fs::metadata(path).ok()?.len(),
                },
                _ => return None,
            };
            let (it, null) = (node.options().to_string(), null.options().to_string());
            let found = arguments.iter_mut().filter(|argument| **argument == it);
            found.for_each(|argument| argument.clone_from(&null));
        }
        Some(arguments)
    }

    /// The arguments of QEMU, for what starts it by other means.
    #[must_use]
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Starts it in `directory` under a name of its own there.
    ///
    /// # Panics
    /// When the process cannot be started.
    #[must_use]
    pub fn start(&self, directory: &Path, name: &str) -> Qemu {
        let file = |kind: &str| directory.join(format!("{name}.{kind}"));
        let listening = "server=on,wait=off";
        let errors = fs::File::create(file("err")).expect("a directory to write to");
        let same = self.without_disks().filter(|_| self.booted);
        let state = same.and_then(|arguments| state_of(&arguments));
        let child = Command::new(PROGRAM)
            .args(&self.arguments)
            .args(state.iter().flat_map(|state| goes_on(state)))
            .args(["-name", name])
            .args([
                "-qmp",
                &format!("unix:{},{listening}", file("qmp").display()),
            ])
            .args([
                "-chardev",
                &format!(
                    "socket,id=console,path={},{listening},logfile={}",
                    file("console").display(),
                    file("log").display()
                ),
            ])
            .args(["-serial", "chardev:console"])
            .stdin(Stdio::null())
            .stdout(errors.try_clone().expect("a file"))
            .stderr(errors)
            .spawn()
            .expect("a QEMU that starts");
        let mut qemu = Qemu {
            child: Some(child),
            socket: file("qmp"),
            console: file("console"),
            log: file("log"),
            errors: file("err"),
        };
        if state.is_some() {
            let_run(&file("qmp"), || qemu.running());
        }
        qemu
    }
}

/// A running QEMU. It is killed when this is dropped.
#[derive(Debug)]
pub struct Qemu {
    /// None where another program runs it.
    child: Option<Child>,
    socket: PathBuf,
    console: PathBuf,
    log: PathBuf,
    errors: PathBuf,
}

impl Qemu {
    /// One that another program runs, of whom there is the console `NAME.console` and all that was said there in `NAME.log`.
    #[must_use]
    pub fn of_another(directory: &Path, name: &str) -> Qemu {
        let file = |kind: &str| directory.join(format!("{name}.{kind}"));
        Qemu {
            child: None,
            socket: file("qmp"),
            console: file("console"),
            log: file("log"),
            errors: file("err"),
        }
    }

    /// Its QMP socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Connects to it, when it is ready for that.
    ///
    /// # Panics
    /// When it does not get ready.
    pub async fn machine(&mut self) -> Machine {
        let begun = Instant::now();
        loop {
            match Machine::connect(&self.socket).await {
                Ok(machine) => return machine,
                Err(e) => assert!(
                    self.running() && begun.elapsed() < PATIENCE,
                    "{e}; it says: {}",
                    self.errors()
                ),
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Whether the process has not ended.
    ///
    /// # Panics
    /// When the system does not tell.
    pub fn running(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_none_or(|child| child.try_wait().expect("a child").is_none())
    }

    /// Waits until the process has ended.
    ///
    /// # Panics
    /// When it does not.
    pub async fn ended(&mut self) {
        let begun = Instant::now();
        while self.running() {
            assert!(begun.elapsed() < PATIENCE, "QEMU does not end");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Kills the process, as a machine that loses its power.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// What QEMU has complained about.
    #[must_use]
    pub fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// All that the guest has said here.
    ///
    /// # Panics
    /// When it said that something went wrong.
    #[must_use]
    pub fn console(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(!text.contains("BAD"), "{text}");
        text
    }

    /// The newest number that the guest has said after `word`: `start`, `beat` or `verified`.
    #[must_use]
    pub fn said(&self, word: &str) -> Option<u64> {
        self.all_said(word).last().copied()
    }

    /// All numbers that the guest has said here after `word`. Of a line that began elsewhere there is only the end: not counted.
    #[must_use]
    pub fn all_said(&self, word: &str) -> Vec<u64> {
        let text = self.console();
        let prefix = format!("guest: {word} ");
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole
            .lines()
            .filter_map(|line| line.trim().strip_prefix(&prefix)?.parse().ok())
            .collect()
    }

    /// Waits until the guest has said a number of at least `least` after `word`, and returns it.
    ///
    /// # Panics
    /// When it does not.
    pub async fn wait_said(&mut self, word: &str, least: u64) -> u64 {
        let begun = Instant::now();
        loop {
            if let Some(number) = self.said(word).filter(|number| *number >= least) {
                return number;
            }
            let going = self.running() && begun.elapsed() < PATIENCE;
            assert!(
                going,
                "no {word} {least}: {}{}",
                self.console(),
                self.errors()
            );
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Has the guest compare all its records with the disk; returns how many it has.
    ///
    /// # Panics
    /// When one is missing or wrong.
    pub async fn verify(&mut self) -> u64 {
        let before = self.all_said("verified").len();
        let mut console = UnixStream::connect(&self.console).expect("a console");
        console.write_all(b"v\n").expect("a console");
        let begun = Instant::now();
        loop {
            if let Some(number) = self.all_said("verified").get(before) {
                return *number;
            }
            let going = self.running() && begun.elapsed() < PATIENCE;
            assert!(going, "not verified: {}{}", self.console(), self.errors());
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}
