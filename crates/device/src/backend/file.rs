//! A device stored in a file or a block device of the host.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};
use parking_lot::Mutex;
use rustix::fs::{Advice, FallocateFlags, SeekFrom};
use rustix::io::Errno;

/// Maximum runs in one reply to an extents request.
const MAX_RUNS: usize = 1 << 16;

/// Zeros to write where the file system cannot zero a range.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A file as a device. The kernel's page cache is its cache; holes stay holes.
pub struct FileDevice {
    file: File,
    size: u64,
    read_only: bool,
    /// Block devices do not support `SEEK_DATA`.
    regular: bool,
    /// The kernel reports lost writes once, to one caller of sync: all later flushes, and concurrent ones, fail with
    /// the same error.
    lost: Mutex<Option<DeviceError>>,
}

impl FileDevice {
    /// A device over `file`, with the file's current size.
    ///
    /// # Errors
    /// If its size cannot be read, or it is neither a regular file nor a block device.
    pub fn new(file: File, read_only: bool) -> Result<Self, DeviceError> {
        let metadata = file.metadata()?;
        let regular = metadata.is_file();
        if !regular && !metadata.file_type().is_block_device() {
            return Err(DeviceError::Unsupported(
                "be stored in anything but a regular file or a block device".into(),
            ));
        }
        let size = match regular {
            true => metadata.len(),
            // The size of a block device is its end offset.
            false => rustix::fs::seek(&file, SeekFrom::End(0)).map_err(std::io::Error::from)?,
        };
        Ok(Self {
            file,
            size,
            read_only,
            regular,
            lost: Mutex::default(),
        })
    }

    fn change(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        if self.read_only {
            return Err(DeviceError::ReadOnly);
        }
        check_range(offset, length, self.size)
    }

    /// `true` if the file system did it, `false` if it is not supported.
    fn allocate(
        &self,
        flags: FallocateFlags,
        offset: u64,
        length: u64,
    ) -> Result<bool, DeviceError> {
        let done =
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, flags, offset, length));
        match done {
            Ok(()) => Ok(true),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::NODEV) => Ok(false),
            Err(error) => Err(std::io::Error::from(error).into()),
        }
    }

    /// One at a time: of two concurrent syncs the kernel reports lost writes to only one.
    fn sync_with(&self, sync: impl FnOnce() -> std::io::Result<()>) -> Result<(), DeviceError> {
        let mut lost = self.lost.lock();
        if let Some(error) = &*lost {
            return Err(error.clone());
        }
        sync().map_err(|error| lost.insert(error.into()).clone())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<bool, DeviceError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.allocate(flags, offset, length)
    }

    fn write_plain_zeros(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let mut at = offset;
        while at < offset + length {
            let take = (offset + length - at).min(ZEROS.len() as u64) as usize;
            self.file.write_all_at(&ZEROS[..take], at)?;
            at += take as u64;
        }
        Ok(())
    }
}

impl BlockDevice for FileDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.read_only,
            fast_zeroes: !self.read_only,
            trim: !self.read_only,
            durable: true,
            extents: self.regular,
            alignment: 1,
            preferred: 4096,
            longest: u32::MAX,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        check_range(offset, buffer.len() as u64, self.size)?;
        self.file.read_exact_at(buffer, offset).map_err(|error| {
            // The file was truncated after it was opened.
            match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    DeviceError::Corrupt("the file is shorter than when it was opened".into())
                }
                _ => error.into(),
            }
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.change(offset, data.len() as u64)?;
        Ok(self.file.write_all_at(data, offset)?)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let done = match zeroes.keep_allocated {
            true => self.allocate(
                FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                offset,
                length,
            )?,
            false => self.punch(offset, length)?,
        };
        match (done, zeroes.only_fast) {
            (true, _) => Ok(()),
            (false, true) => Err(DeviceError::Unsupported("zero a range quickly".into())),
            (false, false) => self.write_plain_zeros(offset, length),
        }
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(offset, length)?;
        if length > 0 {
            // If unsupported, the old bytes stay, which a trim allows.
            self.punch(offset, length)?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        if self.read_only {
            return Ok(());
        }
        self.sync_with(|| self.file.sync_data())
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size)?;
        let end = offset + length;
        let run = |from: u64, to: u64, kind| Extent {
            offset: from,
            length: to - from,
            kind,
        };
        if !self.regular {
            return Ok(vec![run(offset, end, ExtentKind::Data)]);
        }
        let mut runs = Vec::new();
        let mut at = offset;
        while at < end && runs.len() < MAX_RUNS {
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(error) => return Err(std::io::Error::from(error).into()),
            };
            if data > at {
                runs.push(run(at, data, ExtentKind::Hole));
            }
            if data < end {
                let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(data))
                    .map_err(std::io::Error::from)?
                    .clamp(data + 1, end);
                runs.push(run(data, hole, ExtentKind::Data));
                at = hole;
            } else {
                at = end;
            }
        }
        Ok(runs)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)?;
        let length = std::num::NonZeroU64::new(length);
        // A hint: a file system that ignores it is not an error.
        let _ = rustix::fs::fadvise(&self.file, offset, length, Advice::WillNeed);
        Ok(())
    }

    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Disk
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(size: u64) -> FileDevice {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        FileDevice::new(file, false).unwrap()
    }

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| Box::new(device(size)));
    }

    #[test]
    fn a_read_only_file_is_not_changed() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 100], 0).unwrap();
        let device = FileDevice::new(file, true).unwrap();
        assert!(device.capabilities().read_only);
        for result in [
            device.write(0, &[1]),
            device.write_zeroes(0, 1, Zeroes::default()),
            device.trim(0, 1),
        ] {
            assert!(matches!(result, Err(DeviceError::ReadOnly)), "{result:?}");
        }
        let mut buffer = [0; 100];
        device.read(0, &mut buffer).unwrap();
        assert_eq!(buffer, [7; 100]);
    }

    #[test]
    fn a_file_that_was_cut_short_is_an_error_and_not_zeros() {
        let device = device(8192);
        device.file.set_len(100).unwrap();
        let result = device.read(0, &mut [0; 4096]);
        assert!(matches!(result, Err(DeviceError::Corrupt(_))), "{result:?}");
    }

    #[test]
    fn a_sync_that_lost_writes_fails_every_flush_from_then_on() {
        let device = device(8192);
        device.flush().unwrap();
        let failed = device.sync_with(|| Err(std::io::Error::other("lost")));
        assert!(matches!(failed, Err(DeviceError::Io(_))), "{failed:?}");
        // The kernel reports success here.
        assert!(device.file.sync_data().is_ok());
        assert!(matches!(device.flush(), Err(DeviceError::Io(_))));
    }

    #[test]
    fn one_answer_has_a_bound_however_torn_the_file_is() {
        let count = MAX_RUNS as u64;
        let device = device(count * 8192);
        for n in 0..count {
            device.write(n * 8192, &[1]).unwrap();
        }
        let (mut at, mut runs, mut answers) = (0, 0, 0);
        while at < device.size() {
            let answer = device.extents(at, device.size() - at).unwrap();
            assert!(answer.len() <= MAX_RUNS + 1, "{} runs", answer.len());
            (runs, answers) = (runs + answer.len(), answers + 1);
            at = answer.last().unwrap().end();
        }
        if runs as u64 != 2 * count {
            eprintln!("SKIP a torn file: its file system keeps holes in another size");
            return;
        }
        assert_eq!(answers, 2);
    }

    #[test]
    fn a_directory_is_no_device() {
        let dir = tempfile::tempdir().unwrap();
        let result = FileDevice::new(File::open(dir.path()).unwrap(), true);
        assert!(matches!(result, Err(DeviceError::Unsupported(_))));
    }
}
