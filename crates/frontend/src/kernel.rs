//! What the kernel's two block devices in user space, [`nbdclient`](crate::nbdclient) and [`ublk`](crate::ublk),
//! have in common: loading a module, waiting with a deadline, and telling whether a device is in use.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

/// Between two looks at something that is about to change; short, since readiness is a matter of milliseconds
/// (r3map §1.4.4.4 found polling to be faster than udev).
const POLL: Duration = Duration::from_millis(1);
/// For `modprobe`, which reads a few files.
const MODPROBE_DEADLINE: Duration = Duration::from_secs(20);

/// Looks until `done` says so; false when it has not by the deadline.
pub(crate) fn wait_until(deadline: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(POLL);
    }
}

/// Does `work`, which may sit in the kernel for long, on a thread of its own and waits for it until the deadline;
/// `None` when it has not returned by then. The thread is then left behind: nobody can call it back.
pub(crate) fn within<T: Send + 'static>(
    deadline: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new().name(name.into()).spawn(move || {
        // Nobody listens after the deadline.
        let _ = sender.send(work());
    })?;
    Ok(receiver.recv_timeout(deadline).ok())
}

/// Makes `present` true by loading a module, when it is not and this process may.
pub(crate) fn load_module(name: &'static str, present: impl Fn() -> bool) -> bool {
    if present() {
        return true;
    }
    for program in ["/sbin/modprobe", "/usr/sbin/modprobe"] {
        if Path::new(program).exists() {
            modprobe(program, name);
            break;
        }
    }
    // The nodes in /dev come a moment after the module.
    wait_until(Duration::from_millis(200), present)
}

fn modprobe(program: &str, name: &str) {
    let child = Command::new(program)
        .args(["-q", name])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    match child {
        Ok(mut child) => {
            if !wait_until(MODPROBE_DEADLINE, || !matches!(child.try_wait(), Ok(None))) {
                // Neither failure is worth more than the caller's own second look.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        Err(error) => tracing::debug!(program, name, %error, "modprobe does not run"),
    }
}

/// Whether somebody has the device for himself (mounted, in an array, swapped to). Writes what the kernel still holds
/// back for it on the way.
///
/// # Errors
/// Of opening or flushing the device.
pub(crate) fn settle(path: &Path) -> io::Result<InUse> {
    let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or(0);
    let opened = std::fs::File::options()
        .read(true)
        .custom_flags(exclusive)
        .open(path);
    match opened {
        Ok(file) => file.sync_all().map(|()| InUse::No),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
            Ok(InUse::Yes)
        }
        Err(error) => Err(error),
    }
}

/// What [`settle`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InUse {
    /// Nobody holds it exclusively.
    No,
    /// Somebody does.
    Yes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_ends_a_wait_and_a_call() {
        let begin = Instant::now();
        assert!(!wait_until(Duration::from_millis(20), || false));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        let mut looks = 0;
        assert!(wait_until(Duration::from_secs(60), || {
            looks += 1;
            looks == 3
        }));
        assert_eq!(looks, 3);
        let late = within(Duration::from_millis(10), "late", || {
            thread::sleep(Duration::from_millis(200));
        });
        assert!(late.unwrap().is_none());
        let soon = within(Duration::from_secs(60), "soon", || 5);
        assert_eq!(soon.unwrap(), Some(5));
    }

    #[test]
    fn a_module_that_does_not_exist_is_not_there_after_loading() {
        assert!(!load_module("drover_no_such_module", || false));
        assert!(load_module("drover_no_such_module", || true));
    }

    #[test]
    fn a_file_that_nobody_holds_is_settled() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(settle(file.path()).unwrap(), InUse::No);
        assert!(settle(Path::new("/nonexistent/device")).is_err());
    }
}
