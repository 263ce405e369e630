//! A device that an NBD server exports: a user-space client of the protocol, for QEMU's and other servers.
//!
//! - Fixed newstyle negotiation with `GO`, structured replies, `base:allocation` and other metadata contexts, such as
//!   QEMU's dirty bitmaps. Without TLS.
//! - One connection with many requests in flight: each thread sends its own, one thread receives (`calls`).
//! - The server is not trusted: what it sends is checked against the request before it is read (`replies`), and has a
//!   limit. No request waits longer than its deadline. When the connection breaks, or the server breaks the protocol or
//!   misses a deadline, all requests fail at once and for good: nothing reconnects.

mod address;
mod calls;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod negotiate;
mod replies;
mod socket;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use drover_core::nbd::{Request, allocation, command, flag, transmission};
use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};

pub use self::address::{AddressError, NbdAddress, NbdSocket};
use self::calls::Calls;
pub use self::error::NbdError;
use self::error::{Fault, silent};
pub use self::negotiate::MAX_CONTEXTS;
use self::negotiate::{Context, Session, negotiate};
use self::replies::{Content, Replies};
use self::socket::{Socket, Until};

/// Maximum range of one trim or zeroing (bytes): a server may be slow to do it.
const MAX_CHANGE: u64 = 128 << 20;
/// Maximum range of one block status (bytes); servers stop earlier where there are many extents.
const MAX_STATUS: u64 = 1 << 30;
/// Zeros to write to a server that cannot zero a range.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];
/// The flag of a dirty extent in QEMU's contexts `qemu:dirty-bitmap:NAME`.
const DIRTY: u32 = 1;

/// How an export is opened.
#[derive(Debug, Clone)]
pub struct NbdOptions {
    /// Refuses writes, even if the server accepts them.
    pub read_only: bool,
    /// Metadata contexts that the server must have, such as `qemu:dirty-bitmap:NAME`; at most [`MAX_CONTEXTS`]. It is
    /// asked for `base:allocation` in any case.
    pub contexts: Vec<String>,
    /// How long connecting and negotiating may take together, and each request.
    pub deadline: Duration,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            contexts: Vec::new(),
            deadline: Duration::from_secs(30),
        }
    }
}

/// A run of a metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusRun {
    /// Its offset in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The context's flags: those of [`allocation`], 1 for dirty in QEMU's bitmaps.
    pub flags: u32,
}

/// An export of an NBD server as a device. Dropping it ends the connection.
///
/// Failures of the server's medium are errors of one request. Anything else ends the connection: from then on every
/// request fails with the same error, which is not transient; to try again, connect anew.
pub struct NbdDevice {
    calls: Calls,
    session: Session,
    read_only: bool,
}

impl NbdDevice {
    /// Connects and opens the export.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn connect(address: &NbdAddress, options: &NbdOptions) -> Result<Self, NbdError> {
        let server = address.to_string();
        let deadline = Instant::now() + options.deadline;
        let opened = || -> Result<_, Fault> {
            let socket = Socket::connect(&address.socket, deadline)?;
            let mut stream = Until(&socket, deadline);
            let session = negotiate(&mut stream, &address.export, &options.contexts)?;
            let ids = session.contexts.iter().map(|context| context.id).collect();
            let replies = Replies::new(session.structured, ids);
            let calls = Calls::start(socket, replies, server.clone(), options.deadline)?;
            Ok((calls, session))
        };
        let (calls, session) = opened().map_err(|fault| match fault {
            Fault::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
                Fault::Io(silent(options.deadline)).of(server)
            }
            fault => fault.of(server),
        })?;
        Ok(Self {
            calls,
            read_only: options.read_only || session.flags & transmission::READ_ONLY != 0,
            session,
        })
    }

    /// The metadata contexts that the server has, of those that it was asked for.
    pub fn contexts(&self) -> impl Iterator<Item = &str> {
        self.session.contexts.iter().map(|c| c.name.as_str())
    }

    /// What every request fails with, once the connection has ended.
    pub fn ended(&self) -> Option<DeviceError> {
        self.calls.ended()
    }

    /// What a metadata context says of a range: contiguous runs from `offset` on, at least one (of a range that is not
    /// empty), ending at or before `offset + length`. One request; may stop early.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::Unsupported`] for a context that is not one of [`NbdDevice::contexts`].
    pub fn status(
        &self,
        context: &str,
        offset: u64,
        length: u64,
    ) -> Result<Vec<StatusRun>, DeviceError> {
        self.check(offset, length)?;
        let Some(context) = self.context(context) else {
            let what = format!("tell {context}: it was not asked for when it was opened");
            return Err(DeviceError::Unsupported(what.into()));
        };
        if length == 0 {
            return Ok(Vec::new());
        }
        let length = length.min(MAX_STATUS);
        let content = self.call(command::BLOCK_STATUS, 0, offset, length, &[])?;
        let status = content.status.into_iter().find(|s| s.id == context.id);
        let Some(status) = status else {
            return Err(DeviceError::Corrupt(format!(
                "{}: the server told nothing of {}",
                self.calls.server(),
                context.name
            )));
        };
        let mut runs: Vec<StatusRun> = Vec::new();
        let (mut at, end) = (offset, offset + length);
        for (length, flags) in status.runs {
            // The last one may be longer than asked for.
            let length = u64::from(length).min(end - at);
            if length == 0 {
                break;
            }
            match runs.last_mut() {
                Some(last) if last.flags == flags => last.length += length,
                _ => runs.push(StatusRun {
                    offset: at,
                    length,
                    flags,
                }),
            }
            at += length;
        }
        Ok(runs)
    }

    /// The dirty ranges of a bitmap, `qemu:dirty-bitmap:NAME`, within a range of the device, in order and apart from each
    /// other. Asks the server bit by bit, so that memory does not grow with the device.
    pub fn dirty<'a>(&'a self, context: &'a str, offset: u64, length: u64) -> DirtyRanges<'a> {
        DirtyRanges {
            device: self,
            context,
            at: offset,
            end: offset.saturating_add(length),
            runs: VecDeque::new(),
            failed: false,
        }
    }

    fn context(&self, name: &str) -> Option<&Context> {
        self.session.contexts.iter().find(|c| c.name == name)
    }

    fn has(&self, flag: u16) -> bool {
        self.session.flags & flag != 0
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.session.size)?;
        let alignment = self.session.minimum;
        match (offset | length) & (u64::from(alignment) - 1) {
            0 => Ok(()),
            _ => Err(DeviceError::Unaligned {
                offset,
                length,
                alignment,
            }),
        }
    }

    fn check_short(&self, offset: u64, length: usize) -> Result<(), DeviceError> {
        self.check(offset, length as u64)?;
        match length > self.session.maximum as usize {
            true => Err(DeviceError::Unaligned {
                offset,
                length: length as u64,
                alignment: self.session.minimum,
            }),
            false => Ok(()),
        }
    }

    fn check_change(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        match self.read_only {
            true => Err(DeviceError::ReadOnly),
            false => self.check(offset, length),
        }
    }

    /// Does one request; `length` fits its 32 bits, as the callers split longer ones.
    fn call(
        &self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> Result<Content, DeviceError> {
        let request = Request {
            flags,
            command,
            cookie: 0,
            offset,
            length: length as u32,
        };
        self.calls.call(request, payload)
    }

    /// Does a request without data on each part of a range.
    fn change(
        &self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
    ) -> Result<(), DeviceError> {
        for (at, part) in parts(offset, length, MAX_CHANGE) {
            self.call(command, flags, at, part, &[])?;
        }
        Ok(())
    }
}

/// A range in parts of at most `longest` bytes.
fn parts(offset: u64, length: u64, longest: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset + length;
    let starts = (offset..end).step_by(longest as usize);
    starts.map(move |at| (at, longest.min(end - at)))
}

impl BlockDevice for NbdDevice {
    fn size(&self) -> u64 {
        self.session.size
    }

    fn capabilities(&self) -> Capabilities {
        let Session {
            minimum,
            preferred,
            maximum,
            ..
        } = self.session;
        Capabilities {
            read_only: self.read_only,
            fast_zeroes: !self.read_only && self.has(transmission::SEND_FAST_ZERO),
            trim: !self.read_only && self.has(transmission::SEND_TRIM),
            durable: self.has(transmission::SEND_FLUSH),
            extents: self.context(allocation::NAME).is_some(),
            alignment: minimum,
            preferred,
            longest: maximum,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.check_short(offset, buffer.len())?;
        if buffer.is_empty() {
            return Ok(());
        }
        let content = self.call(command::READ, 0, offset, buffer.len() as u64, &[])?;
        buffer.copy_from_slice(&content.data);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.check_change(offset, data.len() as u64)?;
        self.check_short(offset, data.len())?;
        if !data.is_empty() {
            self.call(command::WRITE, 0, offset, data.len() as u64, data)?;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.check_change(offset, length)?;
        let quick = self.has(transmission::SEND_WRITE_ZEROES);
        if zeroes.only_fast && !(quick && self.has(transmission::SEND_FAST_ZERO)) {
            return Err(DeviceError::Unsupported("zero a range quickly".into()));
        }
        if quick {
            let mut flags = 0;
            if zeroes.keep_allocated {
                flags |= flag::NO_HOLE;
            }
            if zeroes.only_fast {
                flags |= flag::FAST_ZERO;
            }
            return self.change(command::WRITE_ZEROES, flags, offset, length);
        }
        let longest = self.session.maximum.min(ZEROS.len() as u32);
        for (at, part) in parts(offset, length, longest.into()) {
            self.write(at, &ZEROS[..part as usize])?;
        }
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.check_change(offset, length)?;
        match self.has(transmission::SEND_TRIM) {
            true => self.change(command::TRIM, 0, offset, length),
            // The old bytes stay, which a trim allows.
            false => Ok(()),
        }
    }

    fn flush(&self) -> Result<(), DeviceError> {
        // Without writes there is nothing to flush, not even when the server is gone.
        match !self.read_only && self.has(transmission::SEND_FLUSH) {
            true => self.call(command::FLUSH, 0, 0, 0, &[]).map(drop),
            false => Ok(()),
        }
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.check(offset, length)?;
        let all = |flags| StatusRun {
            offset,
            length,
            flags,
        };
        let runs = match self.context(allocation::NAME) {
            Some(context) => self.status(&context.name, offset, length)?,
            None => Vec::from_iter((length > 0).then(|| all(0))),
        };
        let mut extents: Vec<Extent> = Vec::with_capacity(runs.len());
        for run in runs {
            let kind = match (
                run.flags & allocation::ZERO != 0,
                run.flags & allocation::HOLE != 0,
            ) {
                (true, true) => ExtentKind::Hole,
                (true, false) => ExtentKind::Zero,
                // A hole need not read as zeros.
                (false, _) => ExtentKind::Data,
            };
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.length += run.length,
                _ => extents.push(Extent {
                    offset: run.offset,
                    length: run.length,
                    kind,
                }),
            }
        }
        Ok(extents)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        // The protocol's `CACHE` is answered when it is done, and nobody waits here.
        self.check(offset, length)
    }

    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Network
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Network
    }
}

/// The dirty ranges of a bitmap, from [`NbdDevice::dirty`]. Ends after an error.
pub struct DirtyRanges<'a> {
    device: &'a NbdDevice,
    context: &'a str,
    /// Where the next request starts.
    at: u64,
    end: u64,
    runs: VecDeque<StatusRun>,
    failed: bool,
}

impl DirtyRanges<'_> {
    /// The next run, of any flags.
    fn run(&mut self) -> Result<Option<StatusRun>, DeviceError> {
        if self.runs.is_empty() && self.at < self.end {
            let runs = self
                .device
                .status(self.context, self.at, self.end - self.at)?;
            self.at = runs
                .last()
                .map_or(self.end, |last| last.offset + last.length);
            self.runs = runs.into();
        }
        Ok(self.runs.pop_front())
    }

    fn range(&mut self) -> Result<Option<Range<u64>>, DeviceError> {
        let mut found: Option<Range<u64>> = None;
        while let Some(run) = self.run()? {
            let dirty = run.flags & DIRTY != 0;
            match &mut found {
                // A range can span requests.
                Some(range) if dirty => range.end = run.offset + run.length,
                Some(_) => break,
                None if dirty => found = Some(run.offset..run.offset + run.length),
                None => {}
            }
        }
        Ok(found)
    }
}

impl Iterator for DirtyRanges<'_> {
    type Item = Result<Range<u64>, DeviceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let range = self.range().transpose();
        self.failed = matches!(range, Some(Err(_)));
        range
    }
}

#[cfg(test)]
mod tests;
