//! What pauses a program before its disk is handed over, and lets it go on if it stays.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a command may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

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

/// Commands for the shell; without one, nothing is done.
#[derive(Clone, Debug, Default)]
pub struct Commands {
    /// Pauses the program.
    pub pause: Option<String>,
    /// Lets it go on.
    pub resume: Option<String>,
}

impl Hooks for Commands {
    fn pause(&self, is_given_up: &dyn Fn() -> bool) -> Result<(), String> {
        run(self.pause.as_deref(), is_given_up)
    }

    fn resume(&self) -> Result<(), String> {
        run(self.resume.as_deref(), &|| false)
    }
}

fn run(command: Option<&str>, is_given_up: &dyn Fn() -> bool) -> Result<(), String> {
    let Some(command) = command else {
        return Ok(());
    };
    run_to_the_end(command, is_given_up).map_err(|e| format!("{command}: {e}"))
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
