//! `ioctl` calls that pass a structure and whose result matters.
#![allow(unsafe_code)] // The kernel's calls take addresses.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};

/// The direction bits of a structure that is read and written.
pub(super) const READ_WRITE: u32 = 3;

/// `_IOC(direction, group, number, size)`.
pub(super) const fn code(direction: u32, group: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | group << 8 | number
}

struct Call<'a> {
    code: u32,
    argument: *mut c_void,
    borrowed: PhantomData<&'a mut ()>,
}

// SAFETY: code and argument are passed on unchanged, and so is the result.
unsafe impl Ioctl for Call<'_> {
    type Output = u32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.code as Opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> Result<u32, Errno> {
        Ok(out as u32)
    }
}

/// Calls with a structure; returns the call's result.
///
/// # Safety
/// `code` must take a `T`, and its side effects on memory must be sound.
pub(super) unsafe fn ioctl<T>(
    fd: BorrowedFd<'_>,
    code: u32,
    argument: &mut T,
) -> Result<u32, Errno> {
    let call = Call {
        code,
        argument: std::ptr::from_mut(argument).cast(),
        borrowed: PhantomData,
    };
    // SAFETY: the caller's.
    unsafe { rustix::ioctl::ioctl(fd, call) }
}

/// Calls with a number; returns a new descriptor.
///
/// # Safety
/// `code` must take a number and return a descriptor owned by the caller.
pub(super) unsafe fn new_fd(
    fd: BorrowedFd<'_>,
    code: u32,
    argument: usize,
) -> Result<OwnedFd, Errno> {
    let call = Call {
        code,
        argument: std::ptr::without_provenance_mut(argument),
        borrowed: PhantomData,
    };
    // SAFETY: the caller's.
    unsafe { Ok(OwnedFd::from_raw_fd(rustix::ioctl::ioctl(fd, call)? as i32)) }
}
