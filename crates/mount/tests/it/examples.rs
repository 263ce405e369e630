//! The examples do what they say: each checks itself, and is small.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use drover_frontend::region;

/// An example, beside this program; none, said loudly, where it was not built.
fn example(name: &str) -> Option<PathBuf> {
    let this = std::env::current_exe().unwrap();
    let program = this.ancestors().nth(2)?.join("examples").join(name);
    if !program.is_file() {
        eprintln!("SKIP: no {}: cargo build --examples", program.display());
        return None;
    }
    Some(program)
}

/// Runs one to its end.
fn streams(name: &str) {
    let Some(program) = example(name) else { return };
    if !Path::new("/dev/fuse").exists() {
        return eprintln!("SKIP {name}: no /dev/fuse");
    }
    let ran = Command::new(program).output().unwrap();
    let (said, why) = (
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr),
    );
    assert!(ran.status.success(), "{said}{why}");
    eprint!("{said}");
}

#[test]
fn a_database_is_queried_when_a_twentieth_of_it_is_here() {
    streams("stream_sqlite");
}

#[test]
fn a_film_is_played_whose_index_stands_at_its_end() {
    streams("stream_film");
}

#[test]
fn an_application_starts_from_an_image_that_is_elsewhere() {
    streams("stream_app");
}

/// A process that reads commands, killed at the end.
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
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said }
    }

    fn line(&mut self) -> String {
        self.said.next().expect("it says something").unwrap()
    }

    /// A command, and the lines that it answers with.
    fn ask(&mut self, command: &str, lines: usize) -> Vec<String> {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        (0..lines).map(|_| self.line()).collect()
    }

    /// The end of its input; its last line.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        let line = self.line();
        assert!(self.child.wait().unwrap().success());
        line
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_list_in_memory_is_mounted_by_two_machines_in_turn() {
    let Some(program) = example("todo") else {
        return;
    };
    if let Err(error) = region::support() {
        return eprintln!("SKIP todo: {error}");
    }
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let address = address.unwrap().to_string();
    let start = |what: &str| {
        let mut process = Running::start(&program, &[what, dir, &address]);
        assert_eq!(process.line(), "ready");
        process
    };
    let site = start("serve");

    let mut phone = start("edit");
    assert_eq!(phone.ask("add buy milk", 1), ["50000"]);
    assert_eq!(phone.ask("add call mum", 1), ["50001"]);
    // Two at a time would lose what the other writes.
    let mut second = Running::start(&program, &["edit", dir, &address]);
    assert!(!second.child.wait().unwrap().success());
    let mut why = String::new();
    let mut stderr = second.child.stderr.take().unwrap();
    std::io::Read::read_to_string(&mut stderr, &mut why).unwrap();
    assert!(why.contains("holds the write lease of list"), "{why}");
    eprintln!("todo: {}", phone.end());

    let mut desk = start("edit");
    let old = [
        "[x] 49997 something of long ago, number 49997",
        "[x] 49998 something of long ago, number 49998",
    ];
    let listed = desk.ask("list", 5);
    assert_eq!(listed[..2], old);
    assert_eq!(listed[3..], ["[ ] 50000 buy milk", "[ ] 50001 call mum"]);
    assert_eq!(desk.ask("done 50000", 1), ["done"]);
    assert_eq!(desk.ask("done 50002", 1), ["there is no such item"]);
    let said = desk.end();
    eprintln!("todo: {said}");
    let share = said
        .split_once('(')
        .and_then(|(_, rest)| rest.split_once(' '));
    let share: f64 = share.unwrap().0.parse().unwrap();
    assert!(share < 2.0, "{said}");

    // What was given back is safe.
    drop(site);
    let _site = start("serve");
    let mut phone = start("edit");
    let listed = phone.ask("list", 5);
    assert_eq!(listed[3..], ["[x] 50000 buy milk", "[ ] 50001 call mum"]);
    assert_eq!(phone.ask("save", 1), ["saved"]);
    phone.end();
}

/// A reader begins with these: they stay small, and the page that shows them says how small.
#[test]
fn each_is_small_and_its_page_says_how_many_lines_it_has() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = own.join("../../docs/tasks/stream-what-a-program-needs.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in [
        "stream_sqlite.rs",
        "stream_film.rs",
        "stream_app.rs",
        "todo.rs",
        "far/mod.rs",
    ] {
        let text = std::fs::read_to_string(own.join("examples").join(name)).unwrap();
        let lines = text.lines().count();
        assert!(lines < 300, "{name} has {lines} lines");
        let row = page
            .lines()
            .find(|line| line.contains(&format!("mount/examples/{name}")));
        let row = row.unwrap_or_else(|| panic!("{name} is not on the page"));
        assert!(
            row.contains(&format!("| {lines} |")),
            "{name} has {lines} lines: {row}"
        );
    }
}
