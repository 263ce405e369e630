//! A disk at the other site, as a device that is written here: what libvirt's QEMU copies to an NBD server goes the way of
//! all that is written to the disks of a machine that moves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes};
use tokio::sync::{mpsc, oneshot};

use crate::disks::{DiskWriter, Sent, pack_write, pack_zeros};
use crate::error::MigrateError;
use crate::protocol::MAX_WRITE;

/// Writes between the NBD server and the connection: what waits here counts as copied, and makes the pause longer.
const QUEUE: usize = 2;

/// What is to be sent.
pub enum Order {
    /// A write.
    Write(Vec<u8>),
    /// All before it is to be durable there, and then this is told.
    Flush(oneshot::Sender<()>),
}

/// Where the orders of all disks go, and where they come from.
#[must_use]
pub fn channel() -> (mpsc::Sender<Order>, mpsc::Receiver<Order>) {
    mpsc::channel(QUEUE)
}

/// Sends what is ordered, until nobody orders any more.
///
/// # Errors
/// When the connection breaks, or the other site could not write.
pub async fn send(
    writer: &mut DiskWriter,
    mut orders: mpsc::Receiver<Order>,
) -> Result<(), MigrateError> {
    while let Some(order) = orders.recv().await {
        match order {
            Order::Write(payload) => writer.send_packed(&payload).await?,
            Order::Flush(done) => {
                writer.flush().await?;
                writer.flushed().await?;
                // It may not wait any more.
                let _ = done.send(());
            }
        }
    }
    Ok(())
}

/// Returns when all that was ordered before is durable at the other site.
///
/// # Errors
/// When the connection has broken.
pub async fn flush(orders: &mpsc::Sender<Order>) -> Result<(), MigrateError> {
    let (done, flushed) = oneshot::channel();
    let asked = orders.send(Order::Flush(done)).await;
    asked.map_err(|_| MigrateError::Lost)?;
    flushed.await.map_err(|_| MigrateError::Lost)
}

/// A disk that is only written.
pub struct Forwarded {
    /// Its place in the offer.
    pub disk: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Where its writes go.
    pub orders: mpsc::Sender<Order>,
    /// What is counted.
    pub sent: Arc<Sent>,
}

impl Forwarded {
    fn check(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(DeviceError::OutOfRange {
                offset,
                length,
                size: self.size,
            }),
        }
    }

    fn order(&self, order: Order) -> Result<(), DeviceError> {
        let sent = self.orders.blocking_send(order);
        sent.map_err(|_| DeviceError::Unavailable("the connection was lost".into()))
    }
}

impl BlockDevice for Forwarded {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: false,
            fast_zeroes: true,
            trim: true,
            durable: true,
            extents: false,
            alignment: 1,
            preferred: 64 << 10,
            longest: 32 << 20,
        }
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("be read".into()))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, data.len() as u64)?;
        for (n, part) in data.chunks(MAX_WRITE).enumerate() {
            let at = offset + (n * MAX_WRITE) as u64;
            self.order(Order::Write(pack_write(self.disk, at, part)))?;
        }
        let length = data.len() as u64;
        self.sent.disk.fetch_add(length, Ordering::Relaxed);
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, _: Zeroes) -> Result<(), DeviceError> {
        self.check(offset, length)?;
        self.order(Order::Write(pack_zeros(self.disk, offset, length)))
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.write_zeroes(offset, length, Zeroes::default())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let (done, flushed) = oneshot::channel();
        self.order(Order::Flush(done))?;
        let flushed = flushed.blocking_recv();
        flushed.map_err(|_| DeviceError::Unavailable("the connection was lost".into()))
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.check(offset, length)?;
        Ok(vec![Extent {
            offset,
            length,
            kind: ExtentKind::Data,
        }])
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.check(offset, length)
    }

    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Network
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Network
    }
}
