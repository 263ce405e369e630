//! The hypervisor that waits for a machine.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::{Code, Refusal};

/// How long a command may take until the hypervisor that it starts waits.
pub(super) const START_LIMIT: Duration = Duration::from_secs(30);

/// How often its socket is tried.
pub(super) const START_POLL: Duration = Duration::from_millis(100);

pub(super) async fn is_listening(socket: &Path) -> bool {
    match tokio::net::UnixStream::connect(socket).await {
        Ok(_) => true,
        // Others are connected to it.
        Err(e) => e.kind() == ErrorKind::WouldBlock,
    }
}

/// What a hypervisor is started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// To receive a machine.
    Incoming,
    /// To boot one from its disks: it waits for nothing. The command is told by `DROVER_INCOMING`, which is empty.
    Boot,
}

/// That the hypervisor of a machine is to be started by a person, and was not.
pub(super) fn none_waits(machine: &ImageName, socket: &Path) -> Refusal {
    let text = format!(
        "no QEMU waits for the machine {machine} at {}: start it there with -S -incoming defer, or set `start` in config.toml",
        socket.display()
    );
    Refusal::new(Code::Unavailable, text)
}

/// Starts the hypervisor of a machine.
pub(super) async fn start(
    machine: &ImageName,
    path: &Path,
    command: &[String],
    why: Why,
) -> Result<(), Refusal> {
    let socket = path.display();
    let failed = |text: String| Err(Refusal::new(Code::Unavailable, text));
    let Some((program, arguments)) = command.split_first() else {
        return Err(none_waits(machine, path));
    };
    let command = Command::new(program)
        .args(arguments)
        .envs((why == Why::Boot).then_some(("DROVER_INCOMING", "")))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = match command {
        Ok(child) => child,
        Err(e) => {
            return failed(format!(
                "cannot start the QEMU for the machine {machine}: {program}: {e}"
            ));
        }
    };
    let begun = Instant::now();
    let mut ended = None;
    while begun.elapsed() < START_LIMIT {
        if is_listening(path).await {
            // It is reaped when it ends.
            std::thread::spawn(move || child.wait());
            return Ok(());
        }
        match child.try_wait() {
            Ok(Some(status)) if !status.success() => {
                return failed(format!(
                    "the QEMU for the machine {machine} was not started: {program} ended with {status}"
                ));
            }
            Ok(status) => ended = status.or(ended),
            Err(_) => {}
        }
        tokio::time::sleep(START_POLL).await;
    }
    // The next attempt starts another one.
    if ended.is_none() {
        let group = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        std::thread::spawn(move || child.wait());
    }
    failed(format!(
        "{program} has started no QEMU for the machine {machine} that listens at {socket} within {} s",
        START_LIMIT.as_secs()
    ))
}
