//! The system calls of loop devices.
// ioctls and close_range have no safe wrapper; each is wrapped here.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use linux_raw_sys::loop_device as raw;

use super::options::Options;

/// A file to attach, and the device.
pub(super) fn configure(device: &File, file: &File, options: Options) -> io::Result<()> {
    let mut flags = raw::LO_FLAGS_AUTOCLEAR as u32;
    if options.read_only {
        flags |= raw::LO_FLAGS_READ_ONLY as u32;
    }
    if options.direct_io {
        flags |= raw::LO_FLAGS_DIRECT_IO as u32;
    }
    if options.partitions {
        flags |= raw::LO_FLAGS_PARTSCAN as u32;
    }
    let config = raw::loop_config {
        fd: file.as_raw_fd() as u32,
        block_size: options.block_size,
        info: raw::loop_info64 {
            lo_flags: flags,
            ..no_info()
        },
        __reserved: [0; 8],
    };
    // SAFETY: LOOP_CONFIGURE reads one `loop_config`, which lives until the call returns; both files are open.
    let result = unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            libc::Ioctl::from(raw::LOOP_CONFIGURE),
            &config,
        )
    };
    done(result)
}

/// The number of a loop device that is free at this moment.
pub(super) fn free(control: &File) -> io::Result<u32> {
    // SAFETY: LOOP_CTL_GET_FREE takes no argument and touches no memory of ours.
    let number = unsafe {
        libc::ioctl(
            control.as_raw_fd(),
            libc::Ioctl::from(raw::LOOP_CTL_GET_FREE),
        )
    };
    u32::try_from(number).map_err(|_| io::Error::last_os_error())
}

/// Whether a device bypasses the page cache of its file.
pub(super) fn has_direct_io(device: &File) -> io::Result<bool> {
    let mut info = no_info();
    // SAFETY: LOOP_GET_STATUS64 fills one `loop_info64`, which is ours alone during the call.
    let result = unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            libc::Ioctl::from(raw::LOOP_GET_STATUS64),
            &mut info,
        )
    };
    done(result)?;
    Ok(info.lo_flags & raw::LO_FLAGS_DIRECT_IO as u32 != 0)
}

/// Detaches a device: now if `device` is its only open file, else when the others are closed.
pub(super) fn clear(device: &File) -> io::Result<()> {
    // SAFETY: LOOP_CLR_FD takes no argument and touches no memory of ours.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::Ioctl::from(raw::LOOP_CLR_FD)) };
    done(result)
}

/// Opens a block device, and fails with `EBUSY` if a file system or the like has claimed it.
pub(super) fn open_exclusively(device: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(device)
}

/// Gives the calling thread its own table of open files, with only the three standard ones, all `/dev/null`.
///
/// From then on the thread must not use a file that was opened before, nor hand one out.
pub(super) fn leave_files_behind() -> io::Result<()> {
    // SAFETY: with CLOSE_RANGE_UNSHARE the table is copied first: files of other threads stay open. The caller, the
    // holder of a loop device, starts with this call and owns no file.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3u32,
            u32::MAX,
            libc::CLOSE_RANGE_UNSHARE,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    Ok(())
}

fn no_info() -> raw::loop_info64 {
    raw::loop_info64 {
        lo_device: 0,
        lo_inode: 0,
        lo_rdevice: 0,
        lo_offset: 0,
        lo_sizelimit: 0,
        lo_number: 0,
        lo_encrypt_type: 0,
        lo_encrypt_key_size: 0,
        lo_flags: 0,
        lo_file_name: [0; 64],
        lo_crypt_name: [0; 64],
        lo_encrypt_key: [0; 32],
        lo_init: [0; 2],
    }
}

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
