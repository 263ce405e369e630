//! The machine moves between two processes: its count never goes back, and memory and disk are what it wrote.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A process, killed at the end, and what it says.
struct Running(Child, BufReader<std::process::ChildStdout>);

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_drover-wasm-machine"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut running = Self(child, said);
        let mut line = String::new();
        running.1.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        running
    }

    fn end(mut self) -> Vec<String> {
        let lines: Vec<String> = (&mut self.1).lines().map(Result::unwrap).collect();
        assert!(self.0.wait().unwrap().success(), "{lines:?}");
        lines
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn its_count_never_goes_back() {
    if let Err(error) = drover_frontend::region::support() {
        eprintln!("SKIP: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let mut here = Running::start(&["run", dir]);
    let there = Running::start(&["take", dir, &address]);
    std::thread::sleep(Duration::from_secs(1));
    writeln!(here.0.stdin.as_mut().unwrap(), "{address}").unwrap();
    let here = std::thread::spawn(move || here.end());
    let there = there.end();
    let here = here.join().unwrap();
    let counts = |lines: &[String], of: &str| -> Vec<i64> {
        let counts = lines.iter().filter_map(|line| line.strip_prefix(of));
        counts.map(|count| count.trim().parse().unwrap()).collect()
    };
    let all = [counts(&here, "here "), counts(&there, "there ")].concat();
    assert!(all.is_sorted(), "{all:?}");
    assert!(!counts(&here, "here ").is_empty() && !counts(&there, "there ").is_empty());
    let checked = there.last().unwrap();
    assert!(checked.ends_with(": 0 wrong"), "{checked}");
    let moved = here.last().unwrap();
    assert!(moved.starts_with("moved: paused "), "{moved}");
    eprintln!("{moved}; {checked}");
}
