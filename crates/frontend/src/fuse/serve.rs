//! The file system of one file: translates requests of the kernel into requests to the device.

use std::ffi::OsStr;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use drover_core::{BlockDevice, Cost, Zeroes};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use parking_lot::Mutex;

use super::options::{MAX_WAITING_THREADS, Options};
use super::request::{read, reported, seek, write};
use crate::budget::{Budget, Permit};
use crate::pool::Pool;

/// The longest read or write that the kernel sends (at most 256 pages by default).
const MAX_REQUEST: u32 = 1 << 20;
/// Maximum asynchronous requests (read-ahead, direct I/O) that the kernel has in flight.
const BACKGROUND: u16 = 256;
/// How long the kernel may cache attributes: the size never changes, and the rest only through the kernel.
const KEEP: Duration = Duration::from_secs(60);
/// The inode number of the file below a directory.
const INNER: INodeNo = INodeNo(2);
/// Maximum requests queued or running on waiting threads; beyond it the submitter blocks.
const MAX_WAITING: usize = 4096;
/// Maximum bytes of those requests.
const MAX_WAITING_BYTES: usize = 128 << 20;

type Job = (Box<dyn FnOnce() + Send>, Permit);

/// Threads for requests that wait, bounded in number and bytes.
struct Waiting {
    threads: Pool<Job>,
    budget: Arc<Budget>,
}

impl Waiting {
    fn new(threads: usize) -> Self {
        Self {
            threads: Pool::new("fuse-wait", threads, || |(job, _permit): Job| job()),
            budget: Budget::new(MAX_WAITING, MAX_WAITING_BYTES),
        }
    }

    /// Runs `job`, which carries `bytes` bytes, on a thread. Blocks while the limits are reached.
    fn submit(&self, bytes: usize, job: impl FnOnce() + Send + 'static) {
        let permit = self.budget.admit(bytes);
        self.threads.submit((Box::new(job), permit));
    }
}

/// The one file.
pub(super) struct Disk {
    device: Arc<dyn BlockDevice>,
    size: u64,
    /// The device's maximum request.
    longest: usize,
    name: String,
    read_only: bool,
    page_cache: bool,
    /// The root is a directory that contains the file.
    below_directory: bool,
    owned: Mutex<Owned>,
    waiting: Waiting,
    /// For changes and flushes, which may wait for a network, or for cache room that needs the network.
    changes: Waiting,
}

/// The attributes changed by chmod, chown and writes.
#[derive(Clone, Copy)]
struct Owned {
    mode: u16,
    uid: u32,
    gid: u32,
    modified: SystemTime,
    changed: SystemTime,
}

impl Disk {
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        options: &Options,
        below_directory: bool,
    ) -> Self {
        let capabilities = device.capabilities();
        let read_only = options.read_only;
        let mode = match options.allow_other {
            true => 0o666,
            false => 0o600,
        };
        let now = SystemTime::now();
        Self {
            size: device.size(),
            longest: capabilities.longest as usize,
            name: options.name.clone(),
            read_only,
            page_cache: options.page_cache,
            below_directory,
            owned: Mutex::new(Owned {
                mode: if read_only { mode & 0o444 } else { mode },
                uid: rustix::process::getuid().as_raw(),
                gid: rustix::process::getgid().as_raw(),
                modified: now,
                changed: now,
            }),
            waiting: Waiting::new(MAX_WAITING_THREADS),
            changes: Waiting::new(MAX_WAITING_THREADS),
            device,
        }
    }

    fn file(&self) -> INodeNo {
        match self.below_directory {
            true => INNER,
            false => INodeNo::ROOT,
        }
    }

    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let owned = *self.owned.lock();
        let is_file = ino == self.file();
        FileAttr {
            ino,
            size: if is_file { self.size } else { 0 },
            blocks: if is_file { self.size.div_ceil(512) } else { 0 },
            atime: owned.modified,
            mtime: owned.modified,
            ctime: owned.changed,
            crtime: owned.changed,
            kind: match is_file {
                true => FileType::RegularFile,
                false => FileType::Directory,
            },
            perm: match is_file {
                true => owned.mode,
                // Everyone who may read the file may look it up.
                false => owned.mode | ((owned.mode & 0o444) >> 2),
            },
            nlink: if is_file { 1 } else { 2 },
            uid: owned.uid,
            gid: owned.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// Runs `job` on this thread or, if it would wait for a network, on one of the pool, which keeps threads available
    /// for requests that need not wait.
    fn go(&self, waits: bool, threads: &Waiting, job: impl FnOnce() + Send + 'static) {
        match waits {
            true => threads.submit(0, job),
            // A reply dropped by a panic returns EIO; this thread continues.
            false => drop(std::panic::catch_unwind(AssertUnwindSafe(job))),
        }
    }

    fn waits(&self, offset: u64, length: u64) -> bool {
        self.device.cost(offset, length) == Cost::Network
    }

    /// Whether a write may wait: to fetch partially covered chunks, or for cache room until more is pushed.
    fn write_waits(&self, offset: u64, length: u64) -> bool {
        self.device.write_cost(offset, length) == Cost::Network
    }

    fn touched(&self) {
        self.owned.lock().modified = SystemTime::now();
    }

    /// The part of `offset, length` inside the device.
    fn inside(&self, offset: u64, length: u64) -> u64 {
        length.min(self.size.saturating_sub(offset))
    }
}

impl Filesystem for Disk {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let longest = MAX_REQUEST.min(u32::try_from(self.longest).unwrap_or(u32::MAX));
        let _ = config.set_max_write(longest.max(4096));
        if let Err(most) = config.set_max_readahead(MAX_REQUEST) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND);
        for wanted in [
            InitFlags::FUSE_ASYNC_READ,
            // Without it a loop device has only one direct request in flight.
            InitFlags::FUSE_ASYNC_DIO,
            // Shared mappings with direct I/O; older kernels refuse such mappings instead.
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_PARALLEL_DIROPS,
        ] {
            let _ = config.add_capabilities(wanted);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.below_directory && parent == INodeNo::ROOT && name == self.name.as_str() {
            true => reply.entry(&KEEP, &self.attributes(INNER), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match ino == INodeNo::ROOT || ino == self.file() {
            true => reply.attr(&KEEP, &self.attributes(ino)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // The size is fixed. (The kernel has checked the permissions for the rest.)
        if ino != self.file() || size.is_some_and(|size| size != self.size) {
            return reply.error(Errno::EPERM);
        }
        {
            let mut owned = self.owned.lock();
            owned.mode = mode.map_or(owned.mode, |mode| (mode & 0o777) as u16);
            owned.uid = uid.unwrap_or(owned.uid);
            owned.gid = gid.unwrap_or(owned.gid);
            owned.changed = SystemTime::now();
            owned.modified = match mtime {
                Some(TimeOrNow::SpecificTime(time)) => time,
                Some(TimeOrNow::Now) => owned.changed,
                None => owned.modified,
            };
        }
        reply.attr(&KEEP, &self.attributes(ino));
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if ino != self.file() {
            return reply.error(Errno::EISDIR);
        }
        let reads = flags.acc_mode() == OpenAccMode::O_RDONLY;
        if self.read_only && !reads {
            return reply.error(Errno::EROFS);
        }
        let mut how = match self.page_cache {
            true => FopenFlags::FOPEN_KEEP_CACHE,
            false => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
        };
        if reads {
            // A read-only handle has nothing to flush on close.
            how |= FopenFlags::FOPEN_NOFLUSH;
        }
        reply.opened(FileHandle(0), how);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let length = self.inside(offset, u64::from(size));
        let (device, longest) = (self.device.clone(), self.longest);
        let waits = self.waits(offset, length);
        self.go(waits, &self.waiting, move || {
            read(device.as_ref(), offset, length as usize, longest, reply);
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.read_only {
            return reply.error(Errno::EROFS);
        }
        let length = self.inside(offset, data.len() as u64) as usize;
        if length == 0 && !data.is_empty() {
            // The same error as from a block device.
            return reply.error(Errno::ENOSPC);
        }
        self.touched();
        let data = &data[..length];
        // With direct I/O the kernel leaves O_SYNC and O_DSYNC to us.
        let synced = flags.0 & libc::O_DSYNC != 0;
        if synced || self.write_waits(offset, length as u64) {
            let (device, longest, data) = (self.device.clone(), self.longest, data.to_vec());
            self.changes.submit(length, move || {
                write(device.as_ref(), offset, &data, longest, synced, reply);
            });
        } else {
            let job = || {
                write(
                    self.device.as_ref(),
                    offset,
                    data,
                    self.longest,
                    false,
                    reply,
                )
            };
            drop(std::panic::catch_unwind(AssertUnwindSafe(job)));
        }
    }

    fn flush(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.fsync(request, ino, handle, false, reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if self.read_only {
            return reply.ok();
        }
        let device = self.device.clone();
        // Whether a flush waits for a disk or a remote is not known beforehand.
        self.go(true, &self.changes, move || match device.flush() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(reported("flush", 0, 0, &error)),
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if self.read_only {
            return reply.error(Errno::EROFS);
        }
        // Both must read as zeros afterwards, which a trim does not guarantee.
        let zeroes = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE => Zeroes::default(),
            libc::FALLOC_FL_ZERO_RANGE => Zeroes {
                keep_allocated: true,
                only_fast: false,
            },
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        let grows = offset.checked_add(length).is_none_or(|end| end > self.size);
        if grows && mode & libc::FALLOC_FL_KEEP_SIZE == 0 {
            return reply.error(Errno::ENOSPC);
        }
        let length = self.inside(offset, length);
        self.touched();
        let device = self.device.clone();
        let waits = self.write_waits(offset, length);
        self.go(waits, &self.changes, move || {
            match device.write_zeroes(offset, length, zeroes) {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(reported("write zeroes", offset, length, &error)),
            }
        });
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return reply.error(Errno::EINVAL),
        };
        let from = match u64::try_from(offset) {
            Ok(from) if from < self.size => from,
            _ => return reply.error(Errno::ENXIO),
        };
        let (device, size) = (self.device.clone(), self.size);
        let waits = self.waits(from, size - from);
        self.go(waits, &self.waiting, move || {
            match seek(device.as_ref(), from, data) {
                Ok(Some(at)) => reply.offset(at as i64),
                // The end of a file counts as a hole.
                Ok(None) if !data => reply.offset(size as i64),
                Ok(None) => reply.error(Errno::ENXIO),
                Err(error) => reply.error(reported("extents", from, size - from, &error)),
            }
        });
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if !self.below_directory || ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (INNER, FileType::RegularFile, self.name.as_str()),
        ];
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (n, (ino, kind, name)) in entries.into_iter().enumerate().skip(from) {
            if reply.add(ino, n as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        // Loop devices take the block size as their discard granularity.
        reply.statfs(self.size.div_ceil(4096), 0, 0, 1, 0, 4096, 255, 4096);
    }
}
