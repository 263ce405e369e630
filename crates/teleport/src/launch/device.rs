//! An image in transit as a block device.

use std::cell::RefCell;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, ReadAt, Zeroes, check_range,
};
use drover_device::backend::ImageDevice;
use drover_image::{Format, ImageError, VirtualDisk};

use super::{Launch, TOGETHER};
use crate::TeleportError;

/// How long opening a container waits for its header and tables.
const OPEN_LIMIT: Duration = Duration::from_secs(10);

/// Interval at which that is tried again.
const OPEN_PAUSE: Duration = Duration::from_millis(20);

/// The parts of a request that are looked at one by one for what is missing.
const LOOK: u64 = 64 << 10;

thread_local! {
    /// The blocks that reads of this thread have missed.
    static MISSED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// A read-only device of a launched image, which becomes that of the delivered image. Requests never wait: those that
/// need what is not here fail with [`DeviceError::Unavailable`]. [`LaunchDevice::arrival`] waits.
pub struct LaunchDevice {
    launch: Arc<Launch>,
    size: u64,
    /// The guest's view of a container; `None` for a raw image.
    container: Option<VirtualDisk>,
    /// The delivered image.
    whole: OnceLock<ImageDevice>,
}

/// The file in transit. A read of what is not here fails, and is noted in [`MISSED`].
struct Content(Arc<Launch>);

impl ReadAt for Content {
    fn len(&self) -> u64 {
        self.0.layout.file_len()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let n = buffer.len().min(left);
        let lacking = self.0.lacking_in_file(offset, n as u64);
        if !lacking.is_empty() {
            MISSED.with_borrow_mut(|missed| missed.extend(lacking));
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.0.read_file(&mut buffer[..n], offset)?;
        Ok(n)
    }
}

impl Launch {
    /// The blocks of the walk that a range of the file needs and that are not here.
    fn lacking_in_file(&self, offset: u64, length: u64) -> Vec<u64> {
        if self.is_delivered() {
            return Vec::new();
        }
        let blocks = self.places.blocks(&self.layout, offset..offset + length);
        self.lacking(blocks.into_iter())
    }

    fn read_file(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }
}

/// What reads miss during `read`, and its result.
fn missed<T>(read: impl FnOnce() -> T) -> (T, Vec<u64>) {
    MISSED.with_borrow_mut(Vec::clear);
    let done = read();
    (done, MISSED.with_borrow_mut(std::mem::take))
}

impl LaunchDevice {
    /// Opens the device. A container's tables are waited for. Blocks the thread.
    ///
    /// # Errors
    /// When it is no image that can be read, or its tables do not arrive within `OPEN_LIMIT`.
    pub fn open(launch: &Arc<Launch>) -> Result<Self, TeleportError> {
        let container = match launch.format.parse() {
            Ok(Format::Raw) => None,
            _ => Some(open_container(launch)?),
        };
        let size = container
            .as_ref()
            .map_or(launch.layout.file_len(), ReadAt::len);
        Ok(LaunchDevice {
            launch: launch.clone(),
            size,
            container,
            whole: OnceLock::new(),
        })
    }

    /// The image that is launched.
    #[must_use]
    pub fn launch(&self) -> &Arc<Launch> {
        &self.launch
    }

    /// What a reader of the disk finds, and the blocks that it has missed.
    pub(super) fn looked<T>(&self, look: impl FnOnce(&dyn ReadAt) -> T) -> (T, Vec<u64>) {
        let (found, mut blocks) = match &self.container {
            None => missed(|| look(&Content(self.launch.clone()))),
            Some(container) => missed(|| look(container)),
        };
        blocks.sort_unstable();
        blocks.dedup();
        (found, blocks)
    }

    /// The blocks that reading a range misses first. May read tables of a container.
    pub(super) fn lacking(&self, offset: u64, length: u64) -> Vec<u64> {
        let length = length.min(self.size.saturating_sub(offset));
        match self.container {
            None => self.launch.lacking_in_file(offset, length),
            Some(_) => self.lacking_of_container(offset, length),
        }
    }

    /// Whether a range can be read at once, as far as that is known without reading tables.
    #[must_use]
    pub fn is_here(&self, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length).min(self.size);
        self.launch.is_delivered()
            || (self.container.is_none()
                && self
                    .launch
                    .lacking_in_file(offset, end.saturating_sub(offset))
                    .is_empty())
    }

    /// Whether a range can be read at once. May read tables of a container.
    #[must_use]
    pub fn has(&self, offset: u64, length: u64) -> bool {
        self.launch.is_delivered() || self.lacking(offset, length).is_empty()
    }

    /// Returns when a range can be read, which is asked for ahead of all else. Cancel safe.
    pub async fn arrival(self: Arc<Self>, offset: u64, length: u64) {
        let length = length.min(self.size.saturating_sub(offset));
        let launch = self.launch.clone();
        let lacking = || {
            let device = self.clone();
            async move {
                if device.container.is_none() {
                    return device.lacking(offset, length);
                }
                let look = move || device.lacking(offset, length);
                tokio::task::spawn_blocking(look).await.unwrap_or_default()
            }
        };
        launch.until_here(true, lacking).await;
    }

    /// The blocks that reading a range of a container misses first, in each part of the range.
    fn lacking_of_container(&self, offset: u64, length: u64) -> Vec<u64> {
        let Some(container) = self
            .container
            .as_ref()
            .filter(|_| !self.launch.is_delivered())
        else {
            return Vec::new();
        };
        let mut buffer = vec![0; LOOK as usize];
        let (_, mut blocks) = missed(|| {
            let (mut at, end) = (offset, offset + length);
            while at < end {
                let n = (LOOK - at % LOOK).min(end - at);
                // An error of another kind is one that the reader gets.
                let _ = container.read_exact_at(&mut buffer[..n as usize], at);
                at += n;
            }
        });
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// The delivered image, which the partial file has become.
    fn whole(&self) -> Option<&ImageDevice> {
        let path = self.launch.delivered.get()?;
        if let Some(whole) = self.whole.get() {
            return Some(whole);
        }
        let same = || -> io::Result<bool> {
            let (ours, theirs) = (self.launch.file.metadata()?, path.metadata()?);
            Ok((ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino()))
        };
        // Another may have its name by now; the open file is still the image.
        if !same().unwrap_or(false) {
            return None;
        }
        let whole = ImageDevice::open(path)
            .ok()
            .filter(|whole| whole.size() == self.size)?;
        Some(self.whole.get_or_init(|| whole))
    }
}

/// Opens the guest's view of a container, whose tables may have to come first.
fn open_container(launch: &Arc<Launch>) -> Result<VirtualDisk, TeleportError> {
    let began = Instant::now();
    loop {
        let content = Arc::new(Content(launch.clone()));
        let (opened, mut lacking) = missed(|| VirtualDisk::from_content(content));
        match opened {
            Ok(disk) => return Ok(disk),
            Err(e) if lacking.is_empty() => return Err(in_transit(launch, e)),
            Err(_) if began.elapsed() > OPEN_LIMIT => {
                let text = format!(
                    "the header and tables of {} have not arrived from {} yet; try again",
                    launch.name, launch.peer_name
                );
                return Err(TeleportError::refused(drover_net::Code::Unavailable, text));
            }
            Err(_) => {
                if launch.only_orders {
                    let announced = launch.announced();
                    lacking.retain(|block| *block < announced);
                }
                launch.ask(&lacking, TOGETHER, !launch.only_orders);
                std::thread::sleep(OPEN_PAUSE);
            }
        }
    }
}

fn in_transit(launch: &Launch, error: ImageError) -> TeleportError {
    let text = format!(
        "{}: {error}; it can be used when it has arrived completely",
        launch.name
    );
    TeleportError::refused(drover_net::Code::Unsupported, text)
}

impl BlockDevice for LaunchDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: true,
            fast_zeroes: false,
            trim: false,
            durable: true,
            extents: true,
            alignment: 1,
            preferred: 64 << 10,
            longest: u32::MAX,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        check_range(offset, buffer.len() as u64, self.size)?;
        if let Some(whole) = self.whole() {
            return whole.read(offset, buffer);
        }
        let away = || {
            DeviceError::Unavailable(format!(
                "{} has not arrived completely from {}",
                self.launch.name, self.launch.peer_name
            ))
        };
        match &self.container {
            None => {
                if !self
                    .launch
                    .lacking_in_file(offset, buffer.len() as u64)
                    .is_empty()
                {
                    return Err(away());
                }
                Ok(self.launch.read_file(buffer, offset)?)
            }
            Some(container) => {
                let (read, lacking) = missed(|| container.read_exact_at(buffer, offset));
                read.map_err(|e| match lacking.is_empty() {
                    true => DeviceError::Corrupt(format!("{}: {e}", self.launch.name)),
                    false => away(),
                })
            }
        }
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn write_zeroes(&self, _: u64, _: u64, _: Zeroes) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn trim(&self, _: u64, _: u64) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Until the image is delivered all of it may be data.
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size)?;
        match self.whole() {
            Some(whole) => whole.extents(offset, length),
            None => Ok(vec![Extent {
                offset,
                length,
                kind: ExtentKind::Data,
            }]),
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        match self.is_here(offset, length) {
            true => Cost::Disk,
            false => Cost::Network,
        }
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.cost(offset, length)
    }
}
