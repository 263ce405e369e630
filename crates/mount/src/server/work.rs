//! Executes a request, on a thread of the pool.

use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::{BlockDevice, DeviceError, Digest, Extent, ExtentKind, Zeroes, is_zero};
use drover_device::remote::{Change, Shape};
use drover_net::{Code, PeerKey, Refusal};
use drover_store::lease::{Access, MountId};

use super::image::Image;
use super::pool::WorkerScratch;
use super::unit::Unit;
use crate::protocol::{Coding, MAX_DIGESTS, MAX_RUNS, Reply, Request, refusal_of};

/// Maximum extents examined for one presence reply.
const MAX_LOOKS: usize = 4096;

/// Time after which a presence reply is sent with what was examined so far: the tables of an image may be made so that
/// it takes long.
const MAX_PRESENCE_TIME: Duration = Duration::from_millis(20);

/// A reply waiting for the link.
#[derive(Debug)]
pub struct ReadyReply {
    /// Its head; the echo of [`Reply::Chunks`] is filled in when it is sent.
    pub head: Reply,
    /// Its body.
    pub body: Bytes,
    /// How many of the request's replies it stands for; `None` completes the request.
    pub replies: Option<u32>,
}

impl ReadyReply {
    fn head(head: Reply) -> Self {
        Self {
            head,
            body: Bytes::new(),
            replies: None,
        }
    }

    /// Its approximate size in memory, and on the link.
    pub fn bytes(&self) -> u64 {
        self.body.len() as u64 + 64
    }
}

/// The mount that a unit of work belongs to.
pub struct Client<'a> {
    /// The image it reads.
    pub image: &'a Image,
    /// The mount's identity.
    pub key: (PeerKey, MountId),
    /// The number of its link.
    pub link: u64,
    /// Device and chunk size.
    pub shape: Shape,
    /// Its access rights.
    pub access: Access,
    /// Whether compressing the reply delivers it sooner.
    pub pack: bool,
}

impl Client<'_> {
    /// Executes a unit.
    pub fn work(&self, unit: Unit, scratch: &mut WorkerScratch) -> ReadyReply {
        let (id, result) = match unit {
            Unit::Read { id, first, count } => (id, self.chunks(id, first, count, scratch)),
            Unit::Other(request, body) => {
                let id = request.id().unwrap_or(0);
                (id, self.other(id, request, &body, scratch))
            }
        };
        result.unwrap_or_else(|refusal| ReadyReply::head(Reply::Error { id, refusal }))
    }

    fn device(&self) -> &dyn BlockDevice {
        self.image.device()
    }

    /// The byte range of a run of chunks.
    fn range(&self, first: u64, count: u32) -> Result<(u64, u64), Refusal> {
        let outside = || {
            let text = format!("{count} chunks from {first} on are not inside the device");
            Refusal::new(Code::OutOfRange, text)
        };
        let end = first.checked_add(u64::from(count)).ok_or_else(outside)?;
        if count == 0 || end > self.shape.chunks() {
            return Err(outside());
        }
        let chunk = u64::from(self.shape.chunk);
        Ok((first * chunk, (end * chunk).min(self.shape.size)))
    }

    fn chunks(
        &self,
        id: u64,
        first: u64,
        count: u32,
        scratch: &mut WorkerScratch,
    ) -> Result<ReadyReply, Refusal> {
        let (start, end) = self.range(first, count)?;
        let length = (end - start) as usize;
        scratch.buffer.resize(length, 0);
        self.device()
            .read(start, &mut scratch.buffer)
            .map_err(refusal_of)?;
        let chunk = self.shape.chunk as usize;
        let mut zeros = vec![0u8; (count as usize).div_ceil(8)];
        let mut digests = Vec::new();
        let mut data = 0;
        for (n, bytes) in scratch.buffer.chunks(chunk).enumerate() {
            if is_zero(bytes) {
                zeros[n / 8] |= 1 << (n % 8);
            } else {
                digests.extend(blake3::hash(bytes).as_bytes());
                data += bytes.len();
            }
        }
        let mut body = digests;
        body.reserve_exact(data);
        for (n, bytes) in scratch.buffer.chunks(chunk).enumerate() {
            if zeros[n / 8] >> (n % 8) & 1 == 0 {
                body.extend_from_slice(bytes);
            }
        }
        let (coding, body) = self.pack(body, scratch);
        Ok(ReadyReply {
            head: Reply::Chunks {
                id,
                first,
                count,
                zeros,
                coding,
                echo: 0,
                last: false,
            },
            body,
            replies: Some(count),
        })
    }

    fn pack(&self, body: Vec<u8>, scratch: &mut WorkerScratch) -> (Coding, Bytes) {
        if self.pack {
            let (coding, packed) = scratch.packer.pack(&body);
            if coding != Coding::Plain {
                return (coding, Bytes::copy_from_slice(packed));
            }
        }
        (Coding::Plain, body.into())
    }

    fn other(
        &self,
        id: u64,
        request: Request,
        body: &Bytes,
        scratch: &mut WorkerScratch,
    ) -> Result<ReadyReply, Refusal> {
        let head = match request {
            Request::Presence { first, count, .. } => self.presence(id, first, count)?,
            Request::Digests { first, count, .. } => self.digests(id, first, count, scratch)?,
            Request::DirectRead { offset, length, .. } => {
                drover_core::check_range(offset, u64::from(length), self.shape.size)
                    .map_err(refusal_of)?;
                let mut bytes = vec![0; length as usize];
                self.device().read(offset, &mut bytes).map_err(refusal_of)?;
                let (coding, body) = self.pack(bytes, scratch);
                let head = Reply::Bytes { id, coding };
                return Ok(ReadyReply {
                    body,
                    ..ReadyReply::head(head)
                });
            }
            Request::DirectExtents { offset, length, .. } => {
                let found = self.device().extents(offset, length).map_err(refusal_of)?;
                let runs = found.iter().take(MAX_RUNS).map(extent_code);
                Reply::Extents {
                    id,
                    runs: runs.collect(),
                }
            }
            Request::Staged { epoch, from, .. } => {
                self.image.check_lease(self.key.0, self.key.1)?;
                let (epoch, runs, end) = self.image.staged(epoch, from);
                Reply::Staged {
                    id,
                    epoch,
                    runs,
                    end,
                }
            }
            _ => {
                self.change(&request, body, scratch)?;
                match request {
                    Request::Commit { epoch, .. } => Reply::Committed { id, epoch },
                    _ => Reply::Done { id },
                }
            }
        };
        Ok(ReadyReply::head(head))
    }

    /// Executes a change, for the holder of the lease only.
    fn change(
        &self,
        request: &Request,
        body: &[u8],
        scratch: &mut WorkerScratch,
    ) -> Result<(), Refusal> {
        if let Request::Close { .. } = request {
            return match self.access {
                // The write lease may be its own meanwhile, and stays.
                Access::Standby => {
                    self.image.end_standby(self.key.0, self.key.1, self.link);
                    Ok(())
                }
                _ => self.image.close(self.key.0, self.key.1, self.link),
            };
        }
        if self.access != Access::ReadWrite {
            if matches!(request, Request::DirectFlush { .. }) {
                return Ok(());
            }
            return Err(refusal_of(DeviceError::ReadOnly));
        }
        let (peer, mount) = self.key;
        if let Request::Commit { epoch, covers, .. } = *request {
            return self.image.commit(epoch, covers, peer, mount);
        }
        self.image.check_lease(peer, mount)?;
        // Kept until the change is made. What is staged asks by itself.
        let _room = self.image.room(&peer, |overlay| match *request {
            Request::DirectWrite { offset, length, .. } => {
                overlay.space_for_write(offset, length.into())
            }
            Request::DirectZero {
                offset,
                length,
                keep_allocated,
                ..
            } => overlay.space_for_zeroes(offset, length, keep_allocated),
            Request::DirectTrim { offset, length, .. } => overlay.space_for_trim(offset, length),
            _ => 0,
        })?;
        let mut unpacked = |coding: Coding, length: u32| {
            scratch
                .unpacker
                .unpack(coding, body, length as usize)
                .map_err(|e| Refusal::new(Code::Protocol, format!("a write: {e}")))
        };
        let device = self.device();
        if let Request::DirectWrite { .. }
        | Request::DirectZero { .. }
        | Request::DirectTrim { .. } = request
        {
            // A mount that writes directly has abandoned what it staged.
            self.image.abandon()?;
        }
        match *request {
            Request::Write {
                epoch,
                offset,
                length,
                coding,
                ..
            } => {
                let bytes = Bytes::from(unpacked(coding, length)?);
                self.image
                    .stage(&peer, epoch, &[Change::Write(offset, bytes)])
            }
            Request::Zero {
                epoch,
                offset,
                length,
                ..
            } => self
                .image
                .stage(&peer, epoch, &[Change::Zero(offset, length)]),
            Request::DirectWrite {
                offset,
                length,
                coding,
                ..
            } => device
                .write(offset, &unpacked(coding, length)?)
                .map_err(refusal_of),
            Request::DirectZero {
                offset,
                length,
                keep_allocated,
                only_fast,
                ..
            } => {
                let zeroes = Zeroes {
                    keep_allocated,
                    only_fast,
                };
                device
                    .write_zeroes(offset, length, zeroes)
                    .map_err(refusal_of)
            }
            Request::DirectTrim { offset, length, .. } => {
                device.trim(offset, length).map_err(refusal_of)
            }
            Request::DirectFlush { .. } => device.flush().map_err(refusal_of),
            _ => Err(Refusal::new(Code::Protocol, "an unexpected request")),
        }
    }

    /// Chunks that the device's extents report as entirely zero; data extents may contain zeros too.
    fn presence(&self, id: u64, first: u64, count: u32) -> Result<Reply, Refusal> {
        let (start, end) = self.range(first, count)?;
        let chunk = u64::from(self.shape.chunk);
        let mut runs: Vec<(u64, u32)> = Vec::new();
        let mut at = start;
        // Start of the zeros that contain `at`.
        let mut zeros_from: Option<u64> = None;
        let (mut looks, began) = (0, Instant::now());
        let whole = |from: u64, to: u64| {
            // A short last chunk is complete at the device's end.
            let to = if to == self.shape.size {
                self.shape.chunks()
            } else {
                to / chunk
            };
            (from.div_ceil(chunk), to)
        };
        'all: while at < end {
            for run in self.device().extents(at, end - at).map_err(refusal_of)? {
                looks += 1;
                let zero = run.kind != ExtentKind::Data;
                match (zero, zeros_from) {
                    (true, None) => zeros_from = Some(run.offset),
                    (false, Some(from)) => {
                        push_run(&mut runs, whole(from, run.offset));
                        zeros_from = None;
                    }
                    _ => {}
                }
                at = run.end();
                if runs.len() + 1 >= MAX_RUNS || looks >= MAX_LOOKS {
                    break 'all;
                }
            }
            if began.elapsed() >= MAX_PRESENCE_TIME {
                break;
            }
        }
        if let Some(from) = zeros_from {
            push_run(&mut runs, whole(from, at));
        }
        // A partially examined chunk is examined again, but progress is always made.
        let (_, settled) = whole(0, at.min(end));
        let end_chunk = if at >= end {
            first + u64::from(count)
        } else {
            settled.max(first + 1)
        };
        runs.retain(|run| run.0 < end_chunk);
        Ok(Reply::Presence {
            id,
            runs,
            end: end_chunk,
        })
    }

    fn digests(
        &self,
        id: u64,
        first: u64,
        count: u32,
        scratch: &mut WorkerScratch,
    ) -> Result<Reply, Refusal> {
        let (start, end) = self.range(first, count.min(MAX_DIGESTS))?;
        // As much as one read may take, which bounds the work with large chunks.
        let chunk = u64::from(self.shape.chunk);
        let most = (u64::from(crate::protocol::MAX_READ) / chunk).max(1) * chunk;
        let length = (end - start).min(most) as usize;
        scratch.buffer.resize(length, 0);
        self.device()
            .read(start, &mut scratch.buffer)
            .map_err(refusal_of)?;
        let digests = scratch.buffer.chunks(chunk as usize).map(|bytes| {
            if is_zero(bytes) {
                Digest::default()
            } else {
                Digest(*blake3::hash(bytes).as_bytes())
            }
        });
        Ok(Reply::Digests {
            id,
            digests: digests.collect(),
        })
    }
}

fn push_run(runs: &mut Vec<(u64, u32)>, (from, to): (u64, u64)) {
    if to > from {
        // At most 2^28 chunks.
        runs.push((from, u32::try_from(to - from).unwrap_or(u32::MAX)));
    }
}

fn extent_code(extent: &Extent) -> (u64, u8) {
    let kind = match extent.kind {
        ExtentKind::Data => 0,
        ExtentKind::Zero => 1,
        ExtentKind::Hole => 2,
    };
    (extent.length, kind)
}
