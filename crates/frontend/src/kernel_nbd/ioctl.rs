//! The older interface of the kernel's NBD client: ioctls on the device's node, the last of which does not return until
//! the device is detached (r3map §1.4.4.3 and §1.4.4.4). For kernels whose driver has no netlink family.
#![allow(unsafe_code)] // ioctls

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use rustix::io::{Errno, Result};
use rustix::ioctl::{IntegerSetter, NoArg, ioctl};

use super::{Error, Options};
use crate::kernel::DEADLINE;

const SET_SOCK: u32 = 0xab00;
const SET_BLKSIZE: u32 = 0xab01;
const DO_IT: u32 = 0xab03;
const CLEAR_SOCK: u32 = 0xab04;
const SET_SIZE_BLOCKS: u32 = 0xab07;
const DISCONNECT: u32 = 0xab08;
const SET_TIMEOUT: u32 = 0xab09;
const SET_FLAGS: u32 = 0xab0a;

/// An ioctl of the NBD driver that takes a number.
fn set<const OPCODE: u32>(device: impl AsFd, value: u64) -> Result<()> {
    let value = usize::try_from(value).map_err(|_| Errno::OVERFLOW)?;
    // SAFETY: called with this module's SET_ opcodes only, which NBD's driver takes with an integer as argument: it
    // reads and writes no memory of this process. Another kind of file refuses them (0xab is NBD's type).
    unsafe { ioctl(device, IntegerSetter::<OPCODE>::new_usize(value)) }
}

/// An ioctl of the NBD driver that takes nothing.
fn call<const OPCODE: u32>(device: impl AsFd) -> Result<()> {
    // SAFETY: called with DO_IT, CLEAR_SOCK and DISCONNECT only, which take no argument and touch no memory of this
    // process. Another kind of file refuses them.
    unsafe { ioctl(device, NoArg::<OPCODE>::new()) }
}

/// The thread blocked in `DO_IT`.
pub(super) struct Session {
    thread: Option<JoinHandle<()>>,
}

impl Session {
    /// Configures `path` and starts it. Returns when all but the last ioctl are done; the caller must poll until the
    /// device is ready.
    pub(super) fn start(
        path: PathBuf,
        sockets: Vec<OwnedFd>,
        options: &Options,
    ) -> std::result::Result<Self, Error> {
        let wanted = options.clone();
        let (sender, receiver) = mpsc::sync_channel(1);
        let at = path.clone();
        // All on one thread: the driver accepts later calls only from the task that set the first socket.
        let thread = thread::Builder::new()
            .name("nbd-client".into())
            .spawn(move || {
                let device = match configure(&path, &sockets, &wanted) {
                    Ok(device) => device,
                    Err(error) => return drop(sender.send(Err(error))),
                };
                drop(sockets); // the driver has its own references
                if sender.send(Ok(())).is_err() {
                    let _ = call::<CLEAR_SOCK>(&device);
                    return;
                }
                let ended = call::<DO_IT>(&device);
                tracing::debug!(?path, ?ended, "the kernel's NBD client has ended");
                if let Err(error) = call::<CLEAR_SOCK>(&device) {
                    tracing::warn!(?path, %error, "the NBD device keeps its sockets");
                }
            })
            .map_err(|error| Error::kernel("start a thread for", &at, error))?;
        match receiver.recv_timeout(DEADLINE) {
            Ok(Ok(())) => Ok(Self {
                thread: Some(thread),
            }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::deadline("take its settings", &at)),
        }
    }

    /// Whether the device has ended by itself.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Joins the thread if it has ended.
    pub(super) fn finish(&mut self) {
        if self.has_ended()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of an NBD device panicked");
        }
    }
}

fn configure(
    path: &Path,
    sockets: &[OwnedFd],
    options: &Options,
) -> std::result::Result<File, Error> {
    let device = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| Error::kernel("open", path, error))?;
    // The sockets first: the driver refuses a second task that sets one, so another's device is never touched.
    for (count, socket) in sockets.iter().enumerate() {
        let number = u64::from(socket.as_raw_fd().unsigned_abs());
        if let Err(error) = set::<SET_SOCK>(&device, number) {
            if count > 0 {
                let _ = call::<CLEAR_SOCK>(&device);
            }
            return Err(match error {
                Errno::BUSY => Error::Taken { path: path.into() },
                other => Error::kernel("hand a socket to", path, other.into()),
            });
        }
    }
    match set_up(&device, options) {
        Ok(()) => Ok(device),
        Err((what, error)) => {
            let _ = call::<CLEAR_SOCK>(&device);
            Err(Error::kernel(what, path, error.into()))
        }
    }
}

fn set_up(device: &File, options: &Options) -> std::result::Result<(), (&'static str, Errno)> {
    let block = u64::from(options.block_size);
    set::<SET_BLKSIZE>(device, block).map_err(|e| ("set the block size of", e))?;
    set::<SET_SIZE_BLOCKS>(device, options.size / block).map_err(|e| ("set the size of", e))?;
    set::<SET_FLAGS>(device, options.transmission_flags()).map_err(|e| ("set the flags of", e))?;
    if let Some(timeout) = options.timeout {
        set::<SET_TIMEOUT>(device, super::seconds(timeout))
            .map_err(|e| ("set the timeout of", e))?;
    }
    Ok(())
}

/// Ends what is attached at `path`, whoever attached it.
pub(super) fn disconnect(path: &Path) -> std::result::Result<(), Error> {
    let device = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| Error::kernel("open", path, error))?;
    call::<DISCONNECT>(&device).map_err(|error| match error {
        Errno::INVAL => Error::NotAttached { path: path.into() },
        other => Error::kernel("disconnect", path, other.into()),
    })?;
    // Needed where the thread in DO_IT no longer exists.
    call::<CLEAR_SOCK>(&device).map_err(|error| Error::kernel("clear", path, error.into()))
}
