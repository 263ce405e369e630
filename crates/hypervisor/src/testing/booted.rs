//! A guest that has booted, kept as the state of its machine: without KVM a boot takes seconds of a processor, and most tests begin with
//! one. A machine with such a state goes on from there, as one that has just arrived from another host; its disks are the test's own,
//! which the guest has not looked at by then.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::PATIENCE;

/// QEMU.
pub(super) const PROGRAM: &str = "qemu-system-x86_64";

/// What the guest says before it looks at its disks.
const BOOTED: &str = "guest: booted";

/// What it says afterwards.
const STARTED: &str = "guest: start";

/// How often something is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A directory for what tests share from one run to the next.
pub(super) fn shared() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let directory = target.canonicalize().ok()?.join("tmp/guests");
    fs::create_dir_all(&directory).ok()?;
    Some(directory)
}

/// A name for what follows from these things.
pub(super) fn name_of(things: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    things.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The state of a machine that has these arguments, in which the guest has booted; it is made, unless there is one. None where that
/// does not succeed: then it boots.
pub(super) fn state_of(arguments: &[String]) -> Option<PathBuf> {
    let version = Command::new(PROGRAM).arg("--version").output().ok()?;
    let directory = shared()?;
    let path = directory.join(name_of(&(arguments, version.stdout)));
    // One makes it, the others wait.
    let lock = File::create(path.with_extension("lock")).ok()?;
    lock.lock().ok()?;
    let there = path.exists() || make(arguments, &path).is_ok();
    there.then_some(path)
}

/// The arguments with which a machine goes on from a state.
pub(super) fn goes_on(state: &Path) -> [String; 2] {
    [
        "-incoming".into(),
        format!("exec:cat '{}'", state.display()),
    ]
}

fn make(arguments: &[String], path: &Path) -> io::Result<()> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str| directory.path().join(name);
    let (socket, log) = (file("qmp"), file("log"));
    let mut arguments = arguments.to_vec();
    if let Some(at) = arguments.iter().position(|argument| argument == "-append") {
        // Long enough for it to be stopped.
        arguments[at + 1].push_str(" rest=300");
    }
    let child = Command::new(PROGRAM)
        .args(&arguments)
        .args([
            "-qmp",
            &format!("unix:{},server=on,wait=off", socket.display()),
        ])
        .args([
            "-chardev",
            &format!("file,id=console,path={}", log.display()),
        ])
        .args(["-serial", "chardev:console"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let _ends = Ends(child);
    let begun = Instant::now();
    let mut monitor = loop {
        match Monitor::connect(&socket) {
            Ok(monitor) => break monitor,
            Err(e) if begun.elapsed() > PATIENCE => return Err(e),
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    };
    let has_said = |what: &str| fs::read_to_string(&log).is_ok_and(|said| said.contains(what));
    while !has_said(BOOTED) {
        if begun.elapsed() > PATIENCE {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    monitor.ask("stop", &json!({}))?;
    if has_said(STARTED) {
        // It has looked at disks that are none.
        return Err(io::Error::other("it was stopped too late"));
    }
    let saved = file("state");
    let uri = format!("exec:cat > '{}'", saved.display());
    monitor.ask("migrate-set-parameters", &json!({"max-bandwidth": 0}))?;
    monitor.ask("migrate", &json!({"uri": uri}))?;
    loop {
        let told = monitor.ask("query-migrate", &json!({}))?;
        match told["status"].as_str() {
            Some("completed") => break,
            Some("failed" | "cancelled") => return Err(io::Error::other(told.to_string())),
            _ if begun.elapsed() > PATIENCE => return Err(io::ErrorKind::TimedOut.into()),
            _ => std::thread::sleep(LOOK_EVERY),
        }
    }
    let beside = path.with_extension("new");
    fs::copy(&saved, &beside)?;
    fs::rename(&beside, path)
}

/// Lets a machine that goes on from a state run, as soon as it has read that.
pub(super) fn let_run(socket: &Path, mut is_there: impl FnMut() -> bool) {
    let begun = Instant::now();
    let runs = || {
        let mut monitor = Monitor::connect(socket).ok()?;
        let told = monitor.ask("query-status", &json!({})).ok()?;
        // As it was when its state was kept.
        let has_read = told["status"] == "paused";
        has_read.then(|| monitor.ask("cont", &json!({})).ok())?
    };
    while runs().is_none() {
        assert!(
            is_there() && begun.elapsed() < PATIENCE,
            "it does not go on from the state of a guest that has booted"
        );
        std::thread::sleep(LOOK_EVERY);
    }
}

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// QEMU's monitor, where nothing else happens meanwhile.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.0.read_line(&mut String::new())?;
        monitor.ask("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        let asked = json!({"execute": command, "arguments": arguments});
        writeln!(self.0.get_mut(), "{asked}")?;
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let said: Value = serde_json::from_str(&line)?;
            if let Some(answer) = said.get("return") {
                return Ok(answer.clone());
            }
            if said.get("error").is_some() {
                return Err(io::Error::other(line));
            }
        }
    }
}
