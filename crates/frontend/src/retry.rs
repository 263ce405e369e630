//! Retries for conditions that pass quickly: a child process holds its parent's files open between fork and exec, udev
//! and blkid probe devices, and the kernel closes some files asynchronously.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::fuse::User;

/// How long a busy file or device is retried, if it is held only by processes or by no visible user.
pub(crate) const RETRY_LIMIT: Duration = Duration::from_secs(2);
/// The pause after the first attempt; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// The longest pause between two attempts: each may scan all processes.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// Retries until it succeeds, fails with an error that is not `passing`, or [`RETRY_LIMIT`] has passed.
pub(crate) fn retry<T, E>(
    attempt: impl FnMut() -> Result<T, E>,
    passing: impl Fn(&E) -> bool,
) -> Result<T, E> {
    retry_for(RETRY_LIMIT, attempt, passing)
}

/// The same with another limit; zero means one attempt.
pub(crate) fn retry_for<T, E>(
    timeout: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
    passing: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + timeout;
    let mut pause = FIRST_PAUSE;
    loop {
        // Checked before the attempt, so that one is made after the time is over, however slow the machine is.
        let last = Instant::now() >= end;
        match attempt() {
            Err(error) if passing(&error) && !last => {}
            done => return done,
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Whether the users may be gone soon: processes, or no visible user. Mounts and devices built on it stay.
pub(crate) fn may_pass(users: &[User]) -> bool {
    users
        .iter()
        .all(|user| matches!(user, User::Process { .. }))
}

/// The result of `ask`, unless it takes longer than `deadline`.
pub(crate) fn within<T: Send + 'static>(
    deadline: Duration,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, answered) = mpsc::channel();
    let asking = std::thread::Builder::new().spawn(move || {
        let _ = answer.send(ask());
    });
    asking.ok()?;
    answered.recv_timeout(deadline).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_tried_again_and_what_stays_is_not() {
        let mut tries = 0;
        let mut third = || {
            tries += 1;
            if tries == 3 { Ok(tries) } else { Err(tries) }
        };
        assert_eq!(retry(&mut third, |_| true), Ok(3));
        let mut tries = 0;
        let mut never = || -> Result<(), u32> {
            tries += 1;
            Err(tries)
        };
        assert_eq!(retry(&mut never, |_| false), Err(1));
        let error = retry(&mut never, |_| true).unwrap_err();
        assert!(error > 3, "tried {error} times");
        let once = retry_for(Duration::ZERO, &mut never, |_| true);
        assert_eq!(once, Err(error + 1), "who does not wait tries once");
    }

    #[test]
    fn a_file_system_or_a_device_stays() {
        let process = User::process(1);
        assert!(may_pass(&[]));
        assert!(may_pass(std::slice::from_ref(&process)));
        assert!(!may_pass(&[process.clone(), User::Mounted("/mnt".into())]));
        assert!(!may_pass(&[User::Device("/dev/loop9".into()), process]));
    }
}
