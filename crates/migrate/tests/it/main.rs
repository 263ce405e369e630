//! A key-value server of two processes: its table moves while a client writes.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use drover_core::ImageName;
use drover_store::machine::Machines;

/// The example; none where it was not built, or the kernel has no regions.
fn program() -> Option<PathBuf> {
    let this = std::env::current_exe().unwrap();
    let program = this.parent()?.parent()?.join("examples/move_kv");
    if !program.is_file() {
        eprintln!("SKIP: no {}: cargo build --examples", program.display());
        return None;
    }
    if let Err(error) = drover_frontend::region::support() {
        eprintln!("SKIP: {error}");
        return None;
    }
    Some(program)
}

fn address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// A process, killed at the end.
struct Running {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(program: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said }
    }

    fn line(&mut self) -> String {
        self.said.next().expect("it says something").unwrap()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Both servers, and where they listen: for clients, and for moves.
fn servers(program: &Path, directory: &Path) -> (Running, Running, [String; 3]) {
    let addresses = [address(), address(), address()];
    let dir = directory.to_str().unwrap();
    let mut here = Running::start(program, &["serve", dir, &addresses[0]]);
    assert_eq!(here.line(), "ready");
    let arguments = ["take", dir, &addresses[1], &addresses[2]];
    let mut there = Running::start(program, &arguments);
    assert_eq!(there.line(), "ready");
    (here, there, addresses)
}

/// Says one line to a server.
fn ask(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    writeln!(stream, "{request}").unwrap();
    BufReader::new(stream).lines().next().unwrap().unwrap()
}

#[test]
fn no_acknowledged_write_is_lost() {
    let Some(program) = program() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (mut here, mut there, addresses) = servers(&program, directory.path());
    let both = format!("{},{}", addresses[0], addresses[1]);
    let mut client = Running::start(&program, &["client", &both, "2.5"]);
    std::thread::sleep(Duration::from_millis(700));
    here.tell(&addresses[2]);
    assert_eq!(there.line(), "here");
    let moved = here.line();
    assert!(moved.starts_with("moved"), "{moved}");
    assert_eq!(there.line(), "complete");
    let said = client.line();
    assert!(said.contains(" 0 lost"), "{said}");
    eprintln!("{moved}; client: {said}");
    assert!(client.child.wait().unwrap().success());
}

#[test]
fn a_process_that_is_killed_takes_the_table_with_it_only_if_it_had_it() {
    let Some(program) = program() else { return };
    let mut stayed = 0_u32;
    for after_ms in [0, 4, 8, 16, 32] {
        let directory = tempfile::tempdir().unwrap();
        let (mut here, mut there, addresses) = servers(&program, directory.path());
        let both = format!("{},{}", addresses[0], addresses[1]);
        let mut client = Running::start(&program, &["client", &both, "1.0"]);
        std::thread::sleep(Duration::from_millis(200));
        here.tell(&addresses[2]);
        std::thread::sleep(Duration::from_millis(after_ms));
        there.child.kill().unwrap();
        there.child.wait().unwrap();
        let records = Machines::new(directory.path().join("there"));
        let record = records.load(&ImageName::new("table").unwrap()).unwrap();
        if record.is_some_and(|record| record.may_run()) {
            // What it had is lost with it, and the other one does not run it any more.
            let set = ask(&addresses[0], "SET a b");
            assert!(set == "MOVED" || there.said.all(|line| line.unwrap() != "here"));
            continue;
        }
        // It was killed before it was asked, or between: another process says that it refuses, or takes it anew.
        let dir = directory.path().to_str().unwrap();
        let arguments = ["take", dir, &addresses[1], &addresses[2]];
        let mut again = Running::start(&program, &arguments);
        assert_eq!(again.line(), "ready");
        let outcome = here.line();
        stayed += u32::from(outcome.starts_with("stayed"));
        if outcome.starts_with("moved") {
            assert_eq!(again.line(), "here");
        }
        let said = client.line();
        assert!(said.contains(" 0 lost"), "{after_ms} ms: {said}");
    }
    eprintln!("it stayed {stayed} of 5 times");
}
