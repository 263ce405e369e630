//! A direct mount: every request goes to the site, and returns with the reply.
//!
//! Nothing that was written is lost when the site is killed: what it has not flushed is repeated when the link is up
//! again (`client::scheduler::unflushed`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};
use parking_lot::Mutex;

use crate::client::{Client, PendingReply};
use crate::compress::Unpacker;
use crate::protocol::{Coding, DirectCapabilities, MAX_DIRECT, Reply, Request};

mod changing;
mod near;

use changing::Changes;
pub use near::{Near, NearDevice};

/// Decompressors kept for reuse.
const SPARE_UNPACKERS: usize = 8;

/// Bytes of unflushed changes beyond which a writer flushes them first; beyond twice as many, all do. They are repeated
/// when the link was lost, and all requests wait for that.
pub const UNFLUSHED: u64 = 16 << 20;

/// An image of another site as a device without a cache: for a nearby network. Reads and writes may have any offset;
/// unaligned ones are handled at the site (r3map §1.6.6). Many threads may have requests in flight.
pub struct RemoteDevice {
    client: Arc<Client>,
    size: u64,
    capabilities: Capabilities,
    spare: Mutex<Vec<Unpacker>>,
    changes: Changes,
    /// Held by the writer that flushes for the others.
    flushing: Mutex<()>,
}

impl RemoteDevice {
    /// The device of the image mounted by `client`.
    #[must_use]
    pub fn new(client: Arc<Client>) -> Self {
        let opened = client.opened();
        let DirectCapabilities {
            fast_zeroes,
            trim,
            durable,
            extents,
        } = opened.direct;
        Self {
            size: opened.size,
            capabilities: Capabilities {
                read_only: opened.read_only,
                fast_zeroes,
                trim,
                durable,
                extents,
                alignment: 1,
                preferred: opened.chunk,
                longest: u32::MAX,
            },
            client,
            spare: Mutex::default(),
            changes: Changes::new(UNFLUSHED),
            flushing: Mutex::default(),
        }
    }

    /// Makes a change with so many bytes of data, of several requests perhaps.
    fn change(
        &self,
        range: (u64, u64),
        bytes: u64,
        ask: impl FnOnce(Duration) -> Vec<PendingReply>,
    ) -> Result<(), DeviceError> {
        let (offset, length) = range;
        check_range(offset, length, self.size)?;
        if self.capabilities.read_only {
            return Err(DeviceError::ReadOnly);
        }
        let changing = self.changes.begin(offset..offset + length, bytes);
        self.client.check_patience(changing.waited)?;
        let result = self.flush_early(changing.bytes()).and_then(|()| {
            // All of them, even if one fails: until then the range is being changed.
            let done: Vec<_> = ask(changing.waited).into_iter().map(done).collect();
            done.into_iter().collect()
        });
        if let Err(DeviceError::Unavailable(_)) = result {
            changing.failed();
        }
        result
    }

    /// Flushes when much is unflushed, together with the bytes that are being changed.
    fn flush_early(&self, changing: u64) -> Result<(), DeviceError> {
        let before = self.unflushed();
        let unflushed = before + changing;
        if before == 0 || unflushed < UNFLUSHED {
            return Ok(());
        }
        let flushing = self.flushing.try_lock();
        match flushing.is_none() && unflushed < 2 * UNFLUSHED {
            true => Ok(()),
            false => self.flush(),
        }
    }

    /// A change without data.
    fn done(&self, range: (u64, u64), request: Request) -> Result<(), DeviceError> {
        self.change(range, 0, |waited| {
            vec![self.client.direct_after(waited, request, Bytes::new())]
        })
    }
}

fn done(waiting: PendingReply) -> Result<(), DeviceError> {
    match waiting.wait()?.0 {
        Reply::Done { .. } => Ok(()),
        _ => Err(strange()),
    }
}

fn strange() -> DeviceError {
    DeviceError::Corrupt("the site sent the wrong kind of reply".into())
}

/// Splits a range into parts of one request each.
fn parts(offset: u64, length: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let most = MAX_DIRECT as usize;
    (0..length)
        .step_by(most)
        .map(move |at| (offset + at as u64, at..length.min(at + most)))
}

impl BlockDevice for RemoteDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        check_range(offset, buffer.len() as u64, self.size)?;
        let asked: Vec<_> = parts(offset, buffer.len())
            .map(|(offset, range)| {
                let request = Request::DirectRead {
                    id: 0,
                    offset,
                    length: range.len() as u32,
                };
                (self.client.direct(request, Bytes::new()), range)
            })
            .collect();
        for (waiting, range) in asked {
            let (Reply::Bytes { coding, .. }, body) = waiting.wait()? else {
                return Err(strange());
            };
            let into = &mut buffer[range];
            if coding == Coding::Plain && body.len() == into.len() {
                into.copy_from_slice(&body);
                continue;
            }
            let spare = self.spare.lock().pop();
            let mut unpacker = match spare {
                Some(unpacker) => unpacker,
                None => Unpacker::new()?,
            };
            let bytes = unpacker
                .unpack(coding, &body, into.len())
                .map_err(|e| DeviceError::Corrupt(format!("a reply of the site: {e}")))?;
            into.copy_from_slice(&bytes);
            let mut spare = self.spare.lock();
            if spare.len() < SPARE_UNPACKERS {
                spare.push(unpacker);
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let bytes = data.len() as u64;
        self.change((offset, bytes), bytes, |waited| {
            parts(offset, data.len())
                .map(|(offset, range)| {
                    let length = range.len() as u32;
                    let (coding, body) = self.client.pack(Bytes::copy_from_slice(&data[range]));
                    let request = Request::DirectWrite {
                        id: 0,
                        offset,
                        length,
                        coding,
                    };
                    self.client.direct_after(waited, request, body)
                })
                .collect()
        })
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        let request = Request::DirectZero {
            id: 0,
            offset,
            length,
            keep_allocated: zeroes.keep_allocated,
            only_fast: zeroes.only_fast,
        };
        self.done((offset, length), request)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let request = Request::DirectTrim {
            id: 0,
            offset,
            length,
        };
        self.done((offset, length), request)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        if self.capabilities.read_only {
            return Ok(());
        }
        done(
            self.client
                .direct(Request::DirectFlush { id: 0 }, Bytes::new()),
        )
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size)?;
        let request = Request::DirectExtents {
            id: 0,
            offset,
            length,
        };
        let Reply::Extents { runs, .. } = self.client.direct(request, Bytes::new()).wait()?.0
        else {
            return Err(strange());
        };
        let mut at = offset;
        let mut out = Vec::new();
        for (length, kind) in runs {
            let kind = match kind {
                0 => ExtentKind::Data,
                1 => ExtentKind::Zero,
                2 => ExtentKind::Hole,
                _ => return Err(strange()),
            };
            let run = Extent {
                offset: at,
                length,
                kind,
            };
            at = run.end();
            out.push(run);
        }
        let end = offset + length;
        let empty = |run: &Extent| run.length == 0 && length > 0;
        if out.is_empty() || at > end || out.iter().any(empty) {
            return Err(strange());
        }
        Ok(out)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        // Without a cache there is nowhere to store it.
        check_range(offset, length, self.size)
    }

    fn cost(&self, _offset: u64, _length: u64) -> Cost {
        Cost::Network
    }

    fn write_cost(&self, _offset: u64, _length: u64) -> Cost {
        Cost::Network
    }
}

impl RemoteDevice {
    /// Bytes of memory of the changes that the site has made and not flushed: at most about twice [`UNFLUSHED`], and the
    /// longest change.
    #[must_use]
    pub fn unflushed(&self) -> u64 {
        self.client.unflushed()
    }

    /// As [`Client::close_now`].
    ///
    /// # Errors
    /// The site's refusal, or a timeout.
    pub fn close(&self) -> Result<(), DeviceError> {
        self.client.close_now()
    }
}
