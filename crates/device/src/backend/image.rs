//! A disk image (raw, qcow2, ...) as a read-only device.

use std::io;
use std::path::Path;
use std::sync::Arc;

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ReadAt, Zeroes, check_range,
};
use drover_image::{ImageError, VirtualDisk};

/// Maximum runs in one reply to an extents request.
const MAX_RUNS: usize = 1 << 16;

/// Maximum lookups in an image's tables for one extents request: one may be made so that every cluster takes one.
const MAX_LOOKUPS: u64 = 1 << 15;

/// Longest range that one extents request examines, so that each is quick.
const MAX_EXTENTS: u64 = 4 << 30;

/// The guest's view of a disk image, in however many files, read-only.
///
/// The files must not change meanwhile. Damage or truncation fails the affected requests with [`DeviceError::Corrupt`].
pub struct ImageDevice {
    disk: VirtualDisk,
    /// For messages.
    name: Option<String>,
}

impl ImageDevice {
    /// A device over `disk`.
    #[must_use]
    pub fn new(disk: VirtualDisk) -> Self {
        let name = disk
            .stamps()
            .first()
            .map(|(path, _)| path.display().to_string());
        Self { disk, name }
    }

    /// Opens the image at `path`, with backing files beside it.
    ///
    /// # Errors
    /// [`DeviceError::Corrupt`] when it is no image that can be read; what the medium reports.
    pub fn open(path: &Path) -> Result<Self, DeviceError> {
        match VirtualDisk::open(path) {
            Ok(disk) => Ok(Self::new(disk)),
            Err(error) => Err(from_image(error.in_file(path))),
        }
    }

    /// The image.
    #[must_use]
    pub fn disk(&self) -> &VirtualDisk {
        &self.disk
    }

    fn said(&self, error: &dyn std::fmt::Display) -> String {
        match &self.name {
            Some(name) => format!("{name}: {error}"),
            None => error.to_string(),
        }
    }

    fn medium(&self, error: io::Error) -> DeviceError {
        let kind = error.kind();
        match error.downcast::<ImageError>() {
            Ok(image) => match &self.name {
                Some(name) => from_image(image.in_file(Path::new(name))),
                None => from_image(image),
            },
            Err(_) if kind == io::ErrorKind::UnexpectedEof => {
                DeviceError::Corrupt(self.said(&"a file ends before what it must hold"))
            }
            Err(error) => DeviceError::Io(Arc::new(io::Error::new(kind, self.said(&error)))),
        }
    }
}

/// Trouble with the medium keeps its kind; everything else is damage.
fn from_image(error: ImageError) -> DeviceError {
    fn kind_of(error: &ImageError) -> Option<io::ErrorKind> {
        match error {
            ImageError::Io { source, .. } => Some(source.kind()),
            ImageError::In { source, .. } => kind_of(source),
            _ => None,
        }
    }
    match kind_of(&error) {
        Some(kind) if kind != io::ErrorKind::UnexpectedEof => {
            DeviceError::Io(Arc::new(io::Error::new(kind, error)))
        }
        _ => DeviceError::Corrupt(error.to_string()),
    }
}

impl BlockDevice for ImageDevice {
    fn size(&self) -> u64 {
        self.disk.len()
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
        check_range(offset, buffer.len() as u64, self.size())?;
        self.disk
            .read_exact_at(buffer, offset)
            .map_err(|error| self.medium(error))
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

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size())?;
        let mut runs = Vec::new();
        for run in self
            .disk
            .extents_in(offset..offset + length.min(MAX_EXTENTS))
            .at_most(MAX_LOOKUPS)
        {
            match run {
                Ok(run) => runs.push(run),
                // Extents before the damage are known.
                Err(_) if !runs.is_empty() => break,
                Err(error) => return Err(self.medium(error.into())),
            }
            if runs.len() == MAX_RUNS {
                break;
            }
        }
        Ok(runs)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size())
    }

    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Disk
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Disk
    }
}

impl std::fmt::Debug for ImageDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageDevice")
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use drover_core::ExtentKind;

    use super::*;

    fn qemu(dir: &Path, program: &str, args: &[&str]) {
        let out = Command::new(program)
            .args(args)
            .current_dir(dir)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{program} {args:?}: {said}");
    }

    fn have_qemu() -> bool {
        let works = |program| {
            let out = Command::new(program).arg("--version").output();
            out.is_ok_and(|out| out.status.success())
        };
        works("qemu-img") && works("qemu-io")
    }

    /// A qcow2 image with a backing file, both partly written, and the raw bytes that QEMU reads from it.
    fn image() -> Option<(tempfile::TempDir, Vec<u8>)> {
        if !have_qemu() {
            eprintln!(
                "SKIP image device: qemu-img and qemu-io (Debian: qemu-utils) are not installed"
            );
            return None;
        }
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        qemu(
            dir,
            "qemu-img",
            &["create", "-f", "qcow2", "base.qcow2", "20M"],
        );
        let io = [
            "-c",
            "write -P 1 0 3M",
            "-c",
            "write -P 2 7M 1000k",
            "base.qcow2",
        ];
        qemu(dir, "qemu-io", &io);
        let args = [
            "create",
            "-f",
            "qcow2",
            "-b",
            "base.qcow2",
            "-F",
            "qcow2",
            "top.qcow2",
        ];
        qemu(dir, "qemu-img", &args);
        let io = [
            "-c",
            "write -P 3 1M 64k",
            "-c",
            "write -z 2M 128k",
            "-c",
            "write -P 4 15M 5M",
            "top.qcow2",
        ];
        qemu(dir, "qemu-io", &io);
        qemu(
            dir,
            "qemu-img",
            &["convert", "-O", "raw", "top.qcow2", "raw"],
        );
        let raw = std::fs::read(dir.join("raw")).unwrap();
        Some((temp, raw))
    }

    #[test]
    fn it_reads_what_qemu_reads_at_any_place() {
        let Some((dir, raw)) = image() else { return };
        let device = ImageDevice::open(&dir.path().join("top.qcow2")).unwrap();
        assert_eq!(device.size(), raw.len() as u64);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let at = random.usize(0..raw.len());
            let length = random.usize(1..=(raw.len() - at).min(300_000));
            let mut buffer = vec![0xA5; length];
            device.read(at as u64, &mut buffer).unwrap();
            assert!(buffer == raw[at..at + length], "{length} bytes at {at}");
            let runs = device.extents(at as u64, length as u64).unwrap();
            let mut next = at as u64;
            for run in runs {
                assert_eq!(run.offset, next);
                assert!(run.length > 0);
                next = run.end();
                let bytes = &raw[run.offset as usize..next as usize];
                let zero = drover_core::is_zero(bytes);
                assert!(run.kind == ExtentKind::Data || zero, "{run:?} is not zero");
            }
            assert_eq!(next, (at + length) as u64);
        }
        // Holes are known as such: of 20 MiB, 4 + 5 MiB were ever written.
        let runs = device.extents(0, device.size()).unwrap();
        let data: u64 = runs
            .iter()
            .filter(|run| run.kind == ExtentKind::Data)
            .map(|run| run.length)
            .sum();
        assert!((8 << 20..10 << 20).contains(&data), "{data}");
    }

    #[test]
    fn it_takes_no_writes_and_nothing_outside() {
        let disk = VirtualDisk::from_content(Arc::new(vec![7u8; 8192])).unwrap();
        let device = ImageDevice::new(disk);
        for result in [
            device.write(0, &[1]),
            device.write_zeroes(0, 1, Zeroes::default()),
            device.trim(0, 1),
        ] {
            assert!(matches!(result, Err(DeviceError::ReadOnly)), "{result:?}");
        }
        for result in [
            device.read(8192, &mut [0]),
            device.extents(8000, 193).map(drop),
            device.prefetch(u64::MAX, 1),
        ] {
            assert!(
                matches!(result, Err(DeviceError::OutOfRange { .. })),
                "{result:?}"
            );
        }
        device.flush().unwrap();
        let mut buffer = [0; 100];
        device.read(8092, &mut buffer).unwrap();
        assert_eq!(buffer, [7; 100]);
    }

    #[test]
    fn a_file_that_was_cut_short_is_damage_and_is_named() {
        let Some((dir, _)) = image() else { return };
        let path = dir.path().join("base.qcow2");
        let device = ImageDevice::open(&path).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let error = device.read(2 << 20, &mut [0; 4096]).unwrap_err();
        assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
        assert!(error.to_string().contains("base.qcow2"), "{error}");
        let gone = ImageDevice::open(&dir.path().join("none.qcow2")).unwrap_err();
        assert!(
            matches!(&gone, DeviceError::Io(e) if e.kind() == io::ErrorKind::NotFound),
            "{gone}"
        );
    }

    #[test]
    fn a_medium_that_fails_keeps_its_error() {
        struct Bad;
        impl ReadAt for Bad {
            fn len(&self) -> u64 {
                1 << 20
            }
            fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
                if (512 << 10..768 << 10).contains(&offset) {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "the disk sleeps"));
                }
                buffer.fill(0);
                Ok(buffer.len())
            }
        }
        let device = ImageDevice::new(VirtualDisk::from_content(Arc::new(Bad)).unwrap());
        device.read(0, &mut [0; 4096]).unwrap();
        let error = device.read(600 << 10, &mut [0; 4096]).unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert!(error.to_string().contains("sleeps"), "{error}");
    }

    #[test]
    fn damage_in_the_tables_is_met_by_those_who_read_there() {
        let Some((dir, raw)) = image() else { return };
        let path = dir.path().join("base.qcow2");
        // The first entry of the L2 table of guest cluster 112 (7 MiB): bytes 40..48 of the header say where L1 is.
        let mut bytes = std::fs::read(&path).unwrap();
        let number = |bytes: &[u8], at: usize| {
            u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
        };
        let l1 = number(&bytes, 40);
        let l2 = number(&bytes, l1) & 0x00ff_ffff_ffff_fe00;
        let far = (1u64 << 63 | 1 << 50).to_be_bytes();
        bytes[l2 + 112 * 8..l2 + 113 * 8].copy_from_slice(&far);
        std::fs::write(&path, &bytes).unwrap();
        match ImageDevice::open(&path) {
            Err(error) => assert!(matches!(error, DeviceError::Corrupt(_)), "{error}"),
            Ok(device) => {
                let mut buffer = vec![0; 4096];
                device.read(0, &mut buffer).unwrap();
                let error = device.read(7 << 20, &mut buffer).unwrap_err();
                assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
                device.read((7 << 20) + (64 << 10), &mut buffer).unwrap();
                assert_eq!(buffer, raw[(7 << 20) + (64 << 10)..][..4096]);
            }
        }
    }
}
