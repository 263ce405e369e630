//! What pauses a program before its disk is handed over, and lets it go on if it stays.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a command or an answer may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// What says that a command is a socket.
const SOCKET: &str = "unix:";

/// Maximum length of an answer by a socket, in bytes.
const MAX_ANSWER: u64 = 512;

/// How often that is looked at.
const COMMAND_POLL: Duration = Duration::from_millis(5);

/// Pauses a program, and lets it go on. One is called at a time, where it may wait.
pub trait Hooks: Send + Sync {
    /// Called before the disk is frozen: it can still write. What it writes from now on may be lost to it if the disk moves,
    /// since nobody answers it. Once the move `is_given_up` it ends soon: [`Hooks::resume`] waits for it.
    ///
    /// # Errors
    /// Why it cannot be paused: its disk stays.
    fn pause(&self, is_given_up: &dyn Fn() -> bool) -> Result<(), String>;

    /// Called when the disk stays after [`Hooks::pause`], when it can be used again.
    ///
    /// # Errors
    /// Why the program does not go on: for a person.
    fn resume(&self) -> Result<(), String>;
}

/// Commands for the shell, or Unix sockets on which the program listens, as `unix:PATH`: it is sent the line `pause` or `resume`, and
/// answers with the line `ok`, or with why it does not. Without one, nothing is done.
#[derive(Clone, Debug, Default)]
pub struct Commands {
    /// Pauses the program.
    pub pause: Option<String>,
    /// Lets it go on.
    pub resume: Option<String>,
}

impl Hooks for Commands {
    fn pause(&self, is_given_up: &dyn Fn() -> bool) -> Result<(), String> {
        run(self.pause.as_deref(), "pause", is_given_up)
    }

    fn resume(&self) -> Result<(), String> {
        run(self.resume.as_deref(), "resume", &|| false)
    }
}

fn run(command: Option<&str>, word: &str, is_given_up: &dyn Fn() -> bool) -> Result<(), String> {
    let Some(command) = command else {
        return Ok(());
    };
    match command.strip_prefix(SOCKET) {
        Some(path) => ask(path, word, is_given_up),
        None => run_to_the_end(command, is_given_up),
    }
    .map_err(|e| format!("{command}: {e}"))
}

/// Sends a program a line, and waits for its answer.
fn ask(path: &str, word: &str, is_given_up: &dyn Fn() -> bool) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    socket.set_write_timeout(Some(COMMAND_LIMIT))?;
    socket.set_read_timeout(Some(COMMAND_POLL))?;
    writeln!(socket, "{word}")?;
    let begun = Instant::now();
    let mut answers = BufReader::new(socket.take(MAX_ANSWER));
    let mut answer = Vec::new();
    loop {
        match answers.read_until(b'\n', &mut answer) {
            Ok(_) => break,
            Err(e) if is_waiting(&e) => {}
            Err(e) => return Err(e),
        }
        if is_given_up() {
            return Err(io::Error::other("the move was given up"));
        }
        if begun.elapsed() > COMMAND_LIMIT {
            let text = format!("no answer within {} s", COMMAND_LIMIT.as_secs());
            return Err(io::Error::other(text));
        }
    }
    if !answer.ends_with(b"\n") {
        return Err(io::Error::other("no whole line came as an answer"));
    }
    match String::from_utf8_lossy(&answer).trim() {
        "ok" => Ok(()),
        other => Err(io::Error::other(format!("it answered: {other}"))),
    }
}

fn is_waiting(e: &io::Error) -> bool {
    let kinds = [
        ErrorKind::WouldBlock,
        ErrorKind::TimedOut,
        ErrorKind::Interrupted,
    ];
    kinds.contains(&e.kind())
}

fn run_to_the_end(command: &str, is_given_up: &dyn Fn() -> bool) -> io::Result<()> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()?;
    let begun = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(io::Error::other(format!("it ended with {status}"))),
            None if is_given_up() => {
                kill(&mut child);
                return Err(io::Error::other("the move was given up"));
            }
            None if begun.elapsed() > COMMAND_LIMIT => {
                kill(&mut child);
                let text = format!("it did not end within {} s", COMMAND_LIMIT.as_secs());
                return Err(io::Error::other(text));
            }
            None => std::thread::sleep(COMMAND_POLL),
        }
    }
}

/// Kills it, with all that it has started.
fn kill(child: &mut Child) {
    let group = rustix::process::Pid::from_child(child);
    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_fails_is_named() {
        let hooks = Commands {
            pause: Some("exit 3".into()),
            resume: None,
        };
        let failed = hooks.pause(&|| false).unwrap_err();
        assert!(failed.starts_with("exit 3: it ended with"), "{failed}");
        hooks.resume().unwrap();
    }

    #[test]
    fn a_program_is_asked_by_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hooks.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let program = std::thread::spawn(move || {
            // The last one is half an answer.
            ["ok\n", "not now\n", "", "ok"].map(|answer| {
                let (mut socket, _) = listener.accept().unwrap();
                let mut line = String::new();
                let asked = BufReader::new(&socket).read_line(&mut line);
                asked.unwrap();
                socket.write_all(answer.as_bytes()).unwrap();
                line
            })
        });
        let at = format!("unix:{}", path.display());
        let hooks = Commands {
            pause: Some(at.clone()),
            resume: Some(at),
        };
        hooks.pause(&|| false).unwrap();
        let refused = hooks.pause(&|| false).unwrap_err();
        assert!(refused.ends_with("it answered: not now"), "{refused}");
        let closed = hooks.resume().unwrap_err();
        assert!(
            closed.ends_with("no whole line came as an answer"),
            "{closed}"
        );
        hooks.resume().unwrap_err();
        assert_eq!(
            program.join().unwrap(),
            ["pause\n", "pause\n", "resume\n", "resume\n"]
        );
        std::fs::remove_file(&path).unwrap();
        assert!(hooks.resume().unwrap_err().contains("hooks.sock"));
    }

    #[test]
    fn a_program_that_does_not_answer_is_not_waited_for_when_the_move_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hooks.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let hooks = Commands {
            pause: Some(format!("unix:{}", path.display())),
            resume: None,
        };
        let failed = hooks.pause(&|| true).unwrap_err();
        assert!(failed.ends_with("the move was given up"), "{failed}");
    }

    #[test]
    fn a_command_is_killed_when_the_move_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let begun = directory.path().join("begun");
        let hooks = Commands {
            pause: Some(format!("touch {}; sleep 600", begun.display())),
            resume: None,
        };
        let failed = hooks.pause(&|| begun.exists()).unwrap_err();
        assert!(failed.ends_with("the move was given up"), "{failed}");
    }
}
