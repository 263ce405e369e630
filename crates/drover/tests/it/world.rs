//! Test helpers: homes, running sites and commands.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Upper bound on any wait, after which a test fails.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A directory with homes and images.
pub struct World {
    dir: TempDir,
}

impl World {
    pub fn new() -> World {
        World {
            dir: TempDir::new().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command in the home of that name.
    pub fn drover(&self, home: &str, args: &[&str]) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("drover"));
        command
            .env("DROVER_HOME", self.path(home))
            .env_remove("DROVER_LOG")
            .env_remove("NOTIFY_SOCKET")
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .args(args);
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, home: &str, args: &[&str]) -> Ran {
        let output = self.drover(home, args).output().unwrap();
        Ran::of(home, args, output)
    }

    /// The same with this text on stdin.
    pub fn run_with(&self, home: &str, args: &[&str], stdin: &str) -> Ran {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(stdin.as_bytes()).unwrap();
        file.rewind().unwrap();
        let output = self.drover(home, args).stdin(file).output().unwrap();
        Ran::of(home, args, output)
    }

    /// Runs a site and waits until it is ready.
    pub fn serve(&self, home: &str, args: &[&str]) -> Site {
        self.process(
            home,
            &[&["serve", "--listen", "127.0.0.1:0"], args].concat(),
        )
    }

    /// Runs anything that prints a ticket when it is ready.
    pub fn process(&self, home: &str, args: &[&str]) -> Site {
        self.process_with(home, args, &[])
    }

    /// The same with environment variables.
    pub fn process_with(&self, home: &str, args: &[&str], variables: &[(&str, &str)]) -> Site {
        let log = self.path(&format!("{home}.log"));
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        let mut child = self
            .drover(home, args)
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut ticket = String::new();
        out.read_line(&mut ticket).unwrap();
        assert!(
            ticket.starts_with("drover1"),
            "{ticket:?}; {}",
            fs::read_to_string(&log).unwrap()
        );
        Site {
            child,
            ticket: ticket.trim().into(),
            log,
            out,
        }
    }

    /// A site called `far` and a home called `near` that is paired with it as `far`.
    pub fn pair(&self) -> Site {
        let site = self.serve("far", &[]);
        self.run("near", &["pair", &site.ticket, "--name", "far"])
            .ok();
        site
    }

    /// Creates an image of `blocks` blocks of pseudorandom data from `seed`, with a hole after them.
    pub fn image(&self, name: &str, seed: u64, blocks: usize) -> PathBuf {
        let path = self.path(name);
        let mut bytes = vec![0u8; blocks * 4096];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        fs::write(&path, bytes).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(blocks as u64 * 4096 + (1 << 20))
            .unwrap();
        path
    }

    /// The content of a home's delivered image.
    pub fn delivered(&self, home: &str, name: &str) -> Vec<u8> {
        let path = self.path(home).join("images").join(name);
        fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }
}

/// A serving process; killed when the test ends.
pub struct Site {
    child: Child,
    pub ticket: String,
    pub log: PathBuf,
    out: BufReader<std::process::ChildStdout>,
}

impl Site {
    /// Asks it to stop and waits; returns its exit code and the rest of its stdout.
    pub fn stop(mut self) -> (Option<i32>, String) {
        self.signal("TERM");
        let code = self.wait();
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut self.out, &mut rest).unwrap();
        (code, rest)
    }

    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    pub fn wait(&mut self) -> Option<i32> {
        wait(&mut self.child)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process.
pub fn signal(process: u32, name: &str) {
    let status = Command::new("kill")
        .args([format!("-{name}"), process.to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

/// Waits for a process, with a timeout.
pub fn wait(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(start.elapsed() < PATIENCE, "a process does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a condition holds.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    loop {
        let look = Instant::now();
        if is_so() {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "never happened: {what}");
        // A check may start processes: on a busy machine they must not delay what they wait for.
        std::thread::sleep(look.elapsed().max(Duration::from_millis(10)));
    }
}

/// An address for a process to listen on, now or later, used by this test only. A free port of 127.0.0.1 might be taken
/// by then, even as the source port of a connection.
pub fn own_address() -> SocketAddr {
    let host = Ipv4Addr::from((127 << 24) | fastrand::u32(1 << 16..(1 << 24) - 1));
    let listener = TcpListener::bind((host, 0)).unwrap();
    listener.local_addr().unwrap()
}

/// A command that ended.
#[derive(Debug)]
pub struct Ran {
    pub what: String,
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn of(home: &str, args: &[&str], output: Output) -> Ran {
        Ran {
            what: format!("{home}: drover {}", args.join(" ")),
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    #[track_caller]
    pub fn ok(self) -> Ran {
        self.code(0)
    }

    #[track_caller]
    pub fn code(self, code: i32) -> Ran {
        assert_eq!(self.code, Some(code), "{}: {self:#?}", self.what);
        self
    }

    /// Expects this exit code, one line on stderr with these words, and an empty stdout.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) -> Ran {
        let ran = self.code(code);
        let lines: Vec<&str> = ran
            .err
            .lines()
            .filter(|l| l.starts_with("drover: "))
            .collect();
        assert_eq!(lines.len(), 1, "{ran:#?}");
        for word in words {
            assert!(lines[0].contains(word), "{word:?} is not in {ran:#?}");
        }
        ran
    }

    /// The JSON objects on its stdout, one per line.
    #[track_caller]
    pub fn json(&self) -> Vec<Value> {
        self.out
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")))
            .collect()
    }
}

/// Whether two files are equal, without printing them.
#[track_caller]
pub fn same(a: &[u8], b: &Path) {
    assert!(a == fs::read(b).unwrap(), "{} differs", b.display());
}
