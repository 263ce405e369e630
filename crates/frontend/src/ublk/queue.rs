//! One queue of a device: a thread with a ring on which every tag always has one command pending in the driver. The
//! command completes when a request arrives; its result is returned with the command that fetches the next one.
#![allow(unsafe_code)] // a ring's entries, memory shared with the driver

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::abi::{self, Descriptor, command};
use super::request::{Buffer, Target};
use super::workers::{Job, Mailbox, Workers, serve_writeback};

/// Marks a completion without a tag: the mailbox is not empty.
const BELL: u64 = u64::MAX;

/// A queue's descriptors, which the driver fills in.
struct Descriptors {
    start: NonNull<u8>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(target: &Target, queue: u16, depth: u16) -> io::Result<Self> {
        let bytes =
            (usize::from(depth) * Descriptor::SIZE).next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping at an address that the kernel chooses; nothing else refers to it.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                &target.channel,
                abi::descriptors_at(queue),
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self {
            start,
            bytes,
            depth,
        })
    }

    /// The request of a tag whose command has completed.
    fn get(&self, tag: u16) -> Option<Descriptor> {
        if tag >= self.depth {
            return None;
        }
        // SAFETY: `tag` is below `depth`, so the range is inside the mapping, which lives as long as `self`. The driver
        // writes a descriptor before it completes the tag's command and not again before the next one is given, so no
        // write meets this read; volatile, because the compiler knows of no writer.
        let bytes = unsafe {
            let at = self.start.as_ptr().add(usize::from(tag) * Descriptor::SIZE);
            at.cast::<[u8; Descriptor::SIZE]>().read_volatile()
        };
        Descriptor::decode(&bytes)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `map` made; no reference into it exists outside `get`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) } {
            tracing::error!(%error, "cannot unmap ublk descriptors");
        }
    }
}

/// One queue, on the thread that created it: the driver accepts a queue's commands from one thread only.
struct Queue {
    number: u16,
    ring: IoUring,
    descriptors: Descriptors,
    mailbox: Arc<Mailbox>,
    target: Arc<Target>,
    pool: Arc<Workers>,
    buffer: Buffer,
    /// Tags that are still ours.
    live: u16,
}

/// Serves a queue until the device is stopped. Signals `ready` when the driver has its commands.
pub(super) fn run(
    number: u16,
    depth: u16,
    target: Arc<Target>,
    pool: Arc<Workers>,
    ready: &SyncSender<io::Result<()>>,
) {
    serve_writeback();
    match Queue::start(number, depth, target, pool) {
        Ok(mut queue) => {
            let _ = ready.send(Ok(())); // whoever gave up waiting stops the device
            if let Err(error) = queue.serve() {
                tracing::error!(number, %error, "a ublk queue has failed");
            }
        }
        Err(error) => {
            let _ = ready.send(Err(error));
        }
    }
}

impl Queue {
    fn start(number: u16, depth: u16, target: Arc<Target>, pool: Arc<Workers>) -> io::Result<Self> {
        let descriptors = Descriptors::map(&target, number, depth)?;
        // A command for every tag, and the eventfd.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .build(u32::from(depth) + 1)?;
        let mut queue = Self {
            number,
            ring,
            descriptors,
            mailbox: Arc::new(Mailbox::new()?),
            target,
            pool,
            buffer: Buffer::new(),
            live: depth,
        };
        queue.watch_bell()?;
        for tag in 0..depth {
            queue.push_command(command::FETCH_REQ, tag, 0)?;
        }
        queue.ring.submit()?;
        // The driver refuses commands immediately or not at all.
        let refused = queue.ring.completion().find(|c| c.result() < 0);
        match refused {
            Some(completion) => Err(io::Error::from_raw_os_error(-completion.result())),
            None => Ok(queue),
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut came = Vec::with_capacity(usize::from(self.live) + 1);
        while self.live > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            came.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
            for (id, result) in came.drain(..) {
                match u16::try_from(id) {
                    Err(_) => self.answer_mail()?,
                    Ok(tag) => self.answer(tag, result)?,
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, tag: u16, result: i32) -> io::Result<()> {
        if result != 0 {
            // ENODEV: the device is stopping and the tag is not fetched again. Other errors also end the tag.
            if result != -Errno::NODEV.raw_os_error() {
                tracing::error!(
                    queue = self.number,
                    tag,
                    result,
                    "the ublk driver rejected a tag"
                );
            }
            self.live -= 1;
            return Ok(());
        }
        let Some(descriptor) = self.descriptors.get(tag) else {
            return self.commit(tag, -Errno::INVAL.raw_os_error());
        };
        if self.target.is_quick(&descriptor) {
            let result = self
                .target
                .perform(self.number, tag, &descriptor, &mut self.buffer);
            return self.commit(tag, result);
        }
        self.pool.submit(Job {
            queue: self.number,
            tag,
            descriptor,
            mailbox: self.mailbox.clone(),
        });
        Ok(())
    }

    fn answer_mail(&mut self) -> io::Result<()> {
        for (tag, result) in self.mailbox.take() {
            self.commit(tag, result)?;
        }
        self.watch_bell()
    }

    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.push_command(command::COMMIT_AND_FETCH_REQ, tag, result)
    }

    fn push_command(&mut self, command: u32, tag: u16, result: i32) -> io::Result<()> {
        let channel = types::Fd(self.target.channel.as_raw_fd());
        let entry = opcode::UringCmd16::new(channel, command)
            .cmd(abi::io_command(self.number, tag, result))
            .build()
            .user_data(tag.into());
        self.push(&entry)
    }

    fn watch_bell(&mut self) -> io::Result<()> {
        let bell = types::Fd(self.mailbox.bell.as_raw_fd());
        let readable = rustix::event::PollFlags::IN.bits();
        let entry = opcode::PollAdd::new(bell, readable.into())
            .build()
            .user_data(BELL);
        self.push(&entry)
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: both kinds of entries name no memory, only descriptors that `self` keeps open for longer than the
        // ring: the channel in `target`, the eventfd in `mailbox`.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }
}
