//! The thread that holds a loop device open, in its own table of open files (see the parent module for why).
//!
//! It must not log: in its table, the log file's descriptor does not exist, or is another file's.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use super::backing::node;
use super::error::LoopError;
use super::options::{DEADLINE, Options};
use super::sys;
use super::users::{claim, users_of};
use crate::retry::retry_for;

/// Maximum attempts, as other processes may take a free device first.
const TRIES: u32 = 64;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// Handle of the thread. When dropped, it releases the device without waiting.
pub(super) struct Holder {
    orders: Sender<Order>,
    /// Disconnected when the thread has closed the device.
    ended: Receiver<()>,
}

/// The result of attaching.
pub(super) struct Attached {
    pub(super) number: u32,
    pub(super) direct_io: bool,
}

/// A request to detach: the timeout for processes that have it open, and the channel for the reply.
struct Order(Duration, Sender<Result<(), LoopError>>);

impl Holder {
    /// Starts the thread, which attaches `file`.
    pub(super) fn start(file: &Path, options: Options) -> Result<(Self, Attached), LoopError> {
        let (orders, ordered) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let (answer, answered) = mpsc::channel();
        let theirs = file.to_owned();
        std::thread::Builder::new()
            .name("loop-holder".into())
            .spawn(move || {
                let _end: Sender<()> = end;
                match attach(&theirs, options) {
                    Ok((device, attached)) => {
                        let path = node(attached.number);
                        if answer.send(Ok(attached)).is_ok() {
                            hold(device, &path, &ordered);
                        }
                    }
                    Err(error) => drop(answer.send(Err(error))),
                }
            })
            .map_err(|source| LoopError::Attach {
                file: file.to_owned(),
                source,
            })?;
        let attached = answered.recv_timeout(DEADLINE).map_err(|_| hung(file))??;
        Ok((Self { orders, ended }, attached))
    }

    /// Flushes and detaches, or keeps the device and returns the reason.
    pub(super) fn detach(&self, device: &Path, timeout: Duration) -> Result<(), LoopError> {
        let (answer, answered) = mpsc::channel();
        if self.orders.send(Order(timeout, answer)).is_err() {
            return Ok(());
        }
        answered
            .recv_timeout(DEADLINE)
            .unwrap_or_else(|_| Err(hung(device)))
    }

    /// Closes the device, which detaches it if it is not open elsewhere. Whether that was done within `deadline`.
    pub(super) fn let_go(self, deadline: Duration) -> bool {
        let Self { orders, ended } = self;
        drop(orders);
        ended.recv_timeout(deadline) == Err(RecvTimeoutError::Disconnected)
    }
}

fn hung(device: &Path) -> LoopError {
    LoopError::Hung {
        device: device.to_owned(),
        waited: DEADLINE,
    }
}

fn attach(file: &Path, options: Options) -> Result<(File, Attached), LoopError> {
    let failed = |source| LoopError::Attach {
        file: file.to_owned(),
        source,
    };
    sys::leave_files_behind().map_err(failed)?;
    let backing = File::options()
        .read(true)
        .write(!options.read_only)
        .open(file)
        .map_err(failed)?;
    let control = File::options()
        .read(true)
        .write(true)
        .open("/dev/loop-control")
        .map_err(LoopError::Missing)?;
    for _ in 0..TRIES {
        let number = sys::free(&control).map_err(LoopError::Missing)?;
        let opened = File::options()
            .read(true)
            .write(!options.read_only)
            .open(node(number));
        let device = match opened {
            Ok(device) => device,
            // Its node does not exist yet, or another process took it.
            Err(error) if is_passing(&error) || error.kind() == io::ErrorKind::NotFound => {
                std::thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(failed(error)),
        };
        match sys::configure(&device, &backing, options) {
            Ok(()) => {
                let direct_io = sys::has_direct_io(&device).map_err(failed)?;
                return Ok((device, Attached { number, direct_io }));
            }
            Err(error) if is_passing(&error) => std::thread::sleep(PAUSE),
            Err(error) => return Err(failed(error)),
        }
    }
    Err(LoopError::Contended {
        file: PathBuf::from(file),
    })
}

fn is_passing(error: &io::Error) -> bool {
    let passing = [libc::EBUSY, libc::ENXIO, libc::EAGAIN];
    error.raw_os_error().is_some_and(|n| passing.contains(&n))
}

fn hold(device: File, path: &Path, orders: &Receiver<Order>) {
    while let Ok(Order(timeout, answer)) = orders.recv() {
        match settle(path, timeout) {
            Ok(exclusive) => {
                // Marks it for detach even if the kernel lost AUTOCLEAR; closing both files completes it.
                let cleared = sys::clear(&device).map_err(|source| LoopError::Detach {
                    device: path.to_owned(),
                    source,
                });
                drop((device, exclusive));
                let _ = answer.send(cleared);
                return;
            }
            Err(error) => drop(answer.send(Err(error))),
        }
    }
}

/// Claims an unused device, so that it cannot be mounted, and flushes it to its file. A process that has it open gets a
/// moment to close it.
fn settle(path: &Path, timeout: Duration) -> Result<File, LoopError> {
    let exclusive = retry_for(timeout, || unused(path), LoopError::may_pass)?;
    rustix::fs::fsync(&exclusive).map_err(|error| LoopError::Unflushed {
        device: path.to_owned(),
        source: error.into(),
    })?;
    Ok(exclusive)
}

/// The device, claimed, if it is not open elsewhere.
fn unused(path: &Path) -> Result<File, LoopError> {
    let exclusive = claim(path)?;
    let users = users_of(path);
    if users.is_empty() {
        return Ok(exclusive);
    }
    Err(LoopError::Busy {
        device: path.to_owned(),
        users,
    })
}
