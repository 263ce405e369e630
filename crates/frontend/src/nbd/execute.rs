//! Executes a validated request on its device and builds its reply.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use drover_core::{BlockDevice, Capabilities, DeviceError, Extent, ExtentKind, Zeroes};

use super::buffer::{Buffer, Buffers};
use super::check::{Facts, Refusal};
use super::counters::{Counters, add};
use super::negotiate::Session;
use super::outbox::{Body, Head, Reply};
use super::wire::{self, Request, allocation, chunk, command, errno, flag};
use crate::budget::Permit;

/// Reads shorter than this are not examined for holes (bytes).
const HOLES_FROM: u32 = 32 << 10;
/// Holes shorter than this are sent as data, since a chunk header costs as much (bytes).
const SHORTEST_HOLE: u64 = 4096;
/// Maximum chunks of one read; a read with more is sent as data.
const MAX_PIECES: usize = 64;
/// Maximum range of one block status; clients continue where it ends (bytes).
pub(super) const MAX_STATUS: u32 = 256 << 20;
/// Maximum extents in one reply to a block status.
const MAX_RUNS: usize = 8192;
/// The longest error message (bytes).
const MAX_MESSAGE: usize = 512;

/// The state that requests of one connection share.
pub(super) struct Executor {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) can: Capabilities,
    pub(super) facts: Facts,
    pub(super) session: Session,
    pub(super) pool: Arc<Buffers>,
    pub(super) counters: Arc<Counters>,
}

/// Why a request failed.
struct Failure(u32, String);

impl Failure {
    fn device(error: &DeviceError, command: u16) -> Self {
        let number = match error {
            DeviceError::OutOfRange { .. } => match command {
                command::WRITE | command::WRITE_ZEROES => errno::ENOSPC,
                _ => errno::EINVAL,
            },
            DeviceError::Unaligned { .. } => errno::EINVAL,
            DeviceError::ReadOnly => errno::EPERM,
            DeviceError::Unsupported(_) => errno::ENOTSUP,
            DeviceError::NoSpace(_) => errno::ENOSPC,
            DeviceError::Closed => errno::ESHUTDOWN,
            DeviceError::Unavailable(_) | DeviceError::Corrupt(_) | DeviceError::Io(_) => {
                errno::EIO
            }
        };
        Self(number, error.to_string())
    }
}

impl Executor {
    /// Executes a request, whatever its device does, and builds the reply.
    pub(super) fn execute(
        &self,
        request: &Request,
        payload: Option<Buffer>,
        permit: Permit,
    ) -> Reply {
        let done = catch_unwind(AssertUnwindSafe(|| self.run(request, payload)));
        let result = done.unwrap_or_else(|_| {
            tracing::error!(?request, "nbd: a device panicked");
            Err(Failure(errno::EIO, "the device failed".into()))
        });
        match result {
            Ok((head, body)) => Reply::new(head, body, permit),
            Err(failure) => self.refuse(request, failure.0, &failure.1, permit),
        }
    }

    /// The reply to a request that is refused.
    pub(super) fn refused(&self, request: &Request, refusal: Refusal, permit: Permit) -> Reply {
        self.refuse(request, refusal.0, refusal.1, permit)
    }

    fn refuse(&self, request: &Request, error: u32, message: &str, permit: Permit) -> Reply {
        add(&self.counters.errors, 1);
        tracing::debug!(?request, error, message, "nbd: a request failed");
        if !self.session.structured {
            let head = Head::new(&[&wire::simple_reply(request.cookie, error)]);
            return Reply::new(head, Body::Nothing, permit);
        }
        let message = &message[..message.floor_char_boundary(MAX_MESSAGE)];
        let mut data = error.to_be_bytes().to_vec();
        data.extend_from_slice(&(message.len() as u16).to_be_bytes());
        data.extend_from_slice(message.as_bytes());
        let head = wire::chunk_head(request.cookie, chunk::ERROR, true, data.len() as u32);
        Reply::new(Head::new(&[&head]), Body::Small(data), permit)
    }

    fn run(&self, request: &Request, payload: Option<Buffer>) -> Result<(Head, Body), Failure> {
        let Request { offset, length, .. } = *request;
        let long = u64::from(length);
        let result = match request.command {
            command::READ => return self.read(request),
            command::BLOCK_STATUS => return self.status(request),
            command::WRITE => {
                let data = payload.as_deref().unwrap_or_default();
                self.write(offset, data)
            }
            command::WRITE_ZEROES => self.zero(request),
            command::TRIM if length > 0 => self.device.trim(offset, long),
            command::CACHE if length > 0 => self.device.prefetch(offset, long),
            command::FLUSH => self.device.flush(),
            _ => Ok(()),
        };
        let changes = matches!(
            request.command,
            command::WRITE | command::WRITE_ZEROES | command::TRIM
        );
        result
            .and_then(|()| match changes && request.has(flag::FUA) {
                true => self.device.flush(),
                false => Ok(()),
            })
            .map_err(|error| Failure::device(&error, request.command))?;
        let head = Head::new(&[&wire::simple_reply(request.cookie, 0)]);
        Ok((head, Body::Nothing))
    }

    /// The device's limit of one read or write.
    fn longest(&self) -> usize {
        let unit = self.facts.minimum as usize;
        (self.can.longest as usize / unit * unit).max(unit)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let mut at = offset;
        for part in data.chunks(self.longest()) {
            self.device.write(at, part)?;
            at += part.len() as u64;
        }
        add(&self.counters.written_bytes, data.len() as u64);
        Ok(())
    }

    fn zero(&self, request: &Request) -> Result<(), DeviceError> {
        let zeroes = Zeroes {
            keep_allocated: request.has(flag::NO_HOLE),
            only_fast: request.has(flag::FAST_ZERO),
        };
        if zeroes.only_fast && !self.can.fast_zeroes {
            return Err(DeviceError::Unsupported(
                "zero faster than it writes".into(),
            ));
        }
        match request.length {
            0 => Ok(()),
            length => self
                .device
                .write_zeroes(request.offset, length.into(), zeroes),
        }
    }

    fn fill(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let mut at = offset;
        for part in buffer.chunks_mut(self.longest()) {
            self.device.read(at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read(&self, request: &Request) -> Result<(Head, Body), Failure> {
        let Request {
            cookie,
            offset,
            length,
            ..
        } = *request;
        let failure = |error| Failure::device(&error, command::READ);
        if !self.session.structured {
            let mut data = self.pool.take(length as usize);
            self.fill(offset, &mut data).map_err(failure)?;
            add(&self.counters.read_bytes, length.into());
            let head = Head::new(&[&wire::simple_reply(cookie, 0)]);
            return Ok((head, Body::Data(data)));
        }
        if length == 0 {
            let head = wire::chunk_head(cookie, chunk::NONE, true, 0);
            return Ok((Head::new(&[&head]), Body::Nothing));
        }
        if length >= HOLES_FROM
            && self.can.extents
            && !request.has(flag::DF)
            && let Some(pieces) = self.pieces(offset, length.into()).map_err(failure)?
        {
            return self.sparse(cookie, &pieces).map_err(failure);
        }
        let mut data = self.pool.take(length as usize);
        self.fill(offset, &mut data).map_err(failure)?;
        add(&self.counters.read_bytes, length.into());
        let head = wire::chunk_head(cookie, chunk::OFFSET_DATA, true, 8 + length);
        let head = Head::new(&[&head, &offset.to_be_bytes()]);
        Ok((head, Body::Data(data)))
    }

    /// A range as data and holes worth reporting; none if it is all data, or too fragmented.
    fn pieces(&self, offset: u64, length: u64) -> Result<Option<Vec<Extent>>, DeviceError> {
        let end = offset + length;
        let mut pieces: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end {
            for run in self.extents(at, end - at)? {
                at = run.end();
                let kind = match run.kind {
                    ExtentKind::Data => ExtentKind::Data,
                    _ if run.length < SHORTEST_HOLE => ExtentKind::Data,
                    _ => ExtentKind::Hole,
                };
                match pieces.last_mut() {
                    Some(last) if last.kind == kind => last.length += run.length,
                    _ => pieces.push(Extent { kind, ..run }),
                }
                if pieces.len() > MAX_PIECES {
                    return Ok(None);
                }
            }
        }
        let unit = u64::from(self.facts.minimum) - 1;
        let all_data = pieces.iter().all(|p| p.kind == ExtentKind::Data);
        let aligned = pieces.iter().all(|p| (p.offset | p.length) & unit == 0);
        Ok((!all_data && aligned).then_some(pieces))
    }

    /// The device's extents of a range, checked: in order, without gaps, at least one.
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        let runs = self.device.extents(offset, length)?;
        let mut at = offset;
        for run in &runs {
            if run.offset != at || run.length == 0 || run.length > offset + length - at {
                return Err(DeviceError::Corrupt("the map of what is allocated".into()));
            }
            at = run.end();
        }
        match runs.is_empty() {
            true => Err(DeviceError::Corrupt("the map of what is allocated".into())),
            false => Ok(runs),
        }
    }

    fn sparse(&self, cookie: u64, pieces: &[Extent]) -> Result<(Head, Body), DeviceError> {
        let bytes = pieces
            .iter()
            .filter(|p| p.kind == ExtentKind::Data)
            .map(|p| p.length as usize)
            .sum();
        let mut data = self.pool.take(bytes);
        let mut heads = Vec::with_capacity(pieces.len() * (wire::CHUNK_BYTES + 12));
        let mut ranges = Vec::with_capacity(pieces.len());
        let mut filled = 0;
        for (index, piece) in pieces.iter().enumerate() {
            let done = index + 1 == pieces.len();
            let from = heads.len();
            let mut content = filled..filled;
            if piece.kind == ExtentKind::Data {
                content.end += piece.length as usize;
                self.fill(piece.offset, &mut data[content.clone()])?;
                filled = content.end;
                let length = 8 + piece.length as u32;
                heads.extend(wire::chunk_head(cookie, chunk::OFFSET_DATA, done, length));
                heads.extend(piece.offset.to_be_bytes());
            } else {
                heads.extend(wire::chunk_head(cookie, chunk::OFFSET_HOLE, done, 12));
                heads.extend(piece.offset.to_be_bytes());
                heads.extend((piece.length as u32).to_be_bytes());
            }
            ranges.push((from..heads.len(), content));
        }
        let length: u64 = pieces.iter().map(|p| p.length).sum();
        add(&self.counters.read_bytes, length);
        let body = Body::Sparse {
            heads,
            data,
            pieces: ranges,
        };
        Ok((Head::new(&[]), body))
    }

    fn status(&self, request: &Request) -> Result<(Head, Body), Failure> {
        let long = u64::from(request.length.min(MAX_STATUS));
        let runs = self
            .extents(request.offset, long)
            .map_err(|error| Failure::device(&error, request.command))?;
        let most = match request.has(flag::REQ_ONE) {
            true => 1,
            false => MAX_RUNS,
        };
        let mut descriptors: Vec<(u32, u32)> = Vec::new();
        for run in &runs {
            let state = match run.kind {
                ExtentKind::Data => 0,
                ExtentKind::Zero => allocation::ZERO,
                ExtentKind::Hole => allocation::HOLE | allocation::ZERO,
            };
            let full = descriptors.len() == most;
            match descriptors.last_mut() {
                Some(last) if last.1 == state => last.0 += run.length as u32,
                _ if full => break,
                _ => descriptors.push((run.length as u32, state)),
            }
        }
        let mut data = Vec::with_capacity(4 + descriptors.len() * 8);
        data.extend(allocation::ID.to_be_bytes());
        for (length, state) in descriptors {
            data.extend(length.to_be_bytes());
            data.extend(state.to_be_bytes());
        }
        let head = wire::chunk_head(request.cookie, chunk::BLOCK_STATUS, true, data.len() as u32);
        Ok((Head::new(&[&head]), Body::Small(data)))
    }
}
