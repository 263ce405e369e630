//! A device whose writes survive the end of this process even before they are flushed.
//!
//! A client that reconnects, such as QEMU's of NBD, does not write again what was answered before: after the next flush it
//! counts on all of it. A device may forget what was not flushed when its process is killed. So every change since the last
//! flush is also in a journal, which is not synced: it is in the kernel's memory, where the end of a process does not reach
//! it. A power cut does, and takes the client along; a journal of another boot is ignored.
//!
//! Two files take turns: a flush makes the other one current, flushes the device, and empties the first one.
//! `docs/format/journal.md`.

use std::io;
use std::sync::Arc;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes, check_range};
use drover_storage::{Access, Directory, File};
use parking_lot::{Mutex, RwLock};

/// What a journal begins with.
const MAGIC: [u8; 8] = *b"DRVRJRN1";

/// Bytes of the head of a journal: magic, boot, number.
const HEAD: usize = 32;

/// Bytes of the head of a change: kind, offset, length, check.
const CHANGE: usize = 32;

/// Bytes of a journal after which the device is flushed.
const LIMIT: u64 = 64 << 20;

/// The longest piece of a write that is read back at once.
const PIECE: usize = 1 << 20;

const NAMES: [&str; 2] = ["journal-0", "journal-1"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write = 1,
    Zero = 2,
    Trim = 3,
}

/// See the module documentation.
pub struct Journaled<D> {
    inner: D,
    boot: [u8; 16],
    /// Shared by changes, exclusive for a turn.
    turn: RwLock<Turn>,
    /// One flush at a time.
    flushing: Mutex<()>,
}

struct Turn {
    files: [Journal; 2],
    current: usize,
    /// The number of the current one.
    number: u64,
}

struct Journal {
    file: Box<dyn File>,
    end: Mutex<u64>,
}

impl<D: BlockDevice> Journaled<D> {
    /// Puts a journal in front of a device, in a directory of its own. What an earlier process of the same boot of this
    /// machine has left there is written to the device first. `boot` identifies the boot.
    ///
    /// # Errors
    /// When the journal cannot be read or made, or the device cannot be written.
    pub fn open(
        inner: D,
        directory: &Arc<dyn Directory>,
        boot: [u8; 16],
    ) -> Result<Journaled<D>, DeviceError> {
        let open = |name: &str| match directory.open(name, Access::Write) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => directory.create(name),
            opened => opened,
        };
        let failed = |e: io::Error| broken(&e);
        let files = [
            open(NAMES[0]).map_err(failed)?,
            open(NAMES[1]).map_err(failed)?,
        ];
        let mut left = Vec::new();
        for file in &files {
            if let Some(number) = number_of(&**file, boot).map_err(failed)? {
                left.push((number, file));
            }
        }
        left.sort_by_key(|(number, _)| *number);
        let number = left.last().map_or(0, |(number, _)| *number);
        for (_, file) in &left {
            replay(&inner, &***file)?;
        }
        if !left.is_empty() {
            inner.flush()?;
        }
        for file in &files {
            file.set_len(0).map_err(failed)?;
        }
        let journal = |file| Journal {
            file,
            end: Mutex::new(0),
        };
        let [first, second] = files;
        Ok(Journaled {
            inner,
            boot,
            turn: RwLock::new(Turn {
                files: [journal(first), journal(second)],
                current: 0,
                number: number + 1,
            }),
            flushing: Mutex::new(()),
        })
    }

    /// Makes a change that is in the journal first.
    fn change(
        &self,
        kind: Kind,
        offset: u64,
        length: u64,
        data: &[u8],
        make: impl FnOnce(&D) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        check_range(offset, length, self.inner.size())?;
        let (made, flush) = {
            let turn = self.turn.read();
            let noted = turn.note(self.boot, kind, offset, length, data);
            let is_full = noted.as_ref().map_or(true, |end| *end > LIMIT);
            (make(&self.inner), is_full)
        };
        made?;
        match flush {
            // Nor does a full disk lose it.
            true => self.flush(),
            false => Ok(()),
        }
    }
}

impl Turn {
    /// Appends a change to the current journal; its new end.
    fn note(
        &self,
        boot: [u8; 16],
        kind: Kind,
        offset: u64,
        length: u64,
        data: &[u8],
    ) -> io::Result<u64> {
        let journal = &self.files[self.current];
        let mut end = journal.end.lock();
        let mut note = Vec::with_capacity(HEAD + CHANGE + data.len());
        if *end == 0 {
            note.extend_from_slice(&MAGIC);
            note.extend_from_slice(&boot);
            note.extend_from_slice(&self.number.to_le_bytes());
        }
        let head = [kind as u64, offset, length];
        let head: Vec<u8> = head.iter().flat_map(|field| field.to_le_bytes()).collect();
        note.extend_from_slice(&head);
        note.extend_from_slice(&check(&head));
        note.extend_from_slice(data);
        // Nothing follows one that is cut short, by the end of the process or of the space.
        journal.file.write_at(&note, *end)?;
        *end += note.len() as u64;
        Ok(*end)
    }
}

impl Journal {
    fn empty(&self) -> io::Result<()> {
        let mut end = self.end.lock();
        self.file.set_len(0)?;
        *end = 0;
        Ok(())
    }
}

fn broken(error: &io::Error) -> DeviceError {
    DeviceError::Unavailable(format!("journal: {error}"))
}

fn check(head: &[u8]) -> [u8; 8] {
    let digest = blake3::hash(head);
    let mut check = [0; 8];
    check.copy_from_slice(&digest.as_bytes()[..8]);
    check
}

/// The number of a journal that was written in this boot.
fn number_of(file: &dyn File, boot: [u8; 16]) -> io::Result<Option<u64>> {
    let mut head = [0; HEAD];
    let is_ours = read_whole(file, &mut head, 0)? && head[..8] == MAGIC && head[8..24] == boot;
    Ok(is_ours.then(|| word(&head[24..])))
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// Whether all of the buffer was there.
fn read_whole(file: &dyn File, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
    let mut at = 0;
    while at < buffer.len() {
        match file.read_at(&mut buffer[at..], offset + at as u64)? {
            0 => return Ok(false),
            n => at += n,
        }
    }
    Ok(true)
}

/// Makes all changes of a journal, up to one that is not whole.
fn replay(device: &impl BlockDevice, file: &dyn File) -> Result<(), DeviceError> {
    let failed = |e: io::Error| broken(&e);
    let mut at = HEAD as u64;
    let whole = file.len().map_err(failed)?;
    let mut head = [0; CHANGE];
    let mut piece = vec![0; PIECE];
    while read_whole(file, &mut head, at).map_err(failed)? && head[24..] == check(&head[..24]) {
        at += CHANGE as u64;
        let (kind, offset, length) = (word(&head), word(&head[8..]), word(&head[16..]));
        check_range(offset, length, device.size())?;
        match kind {
            kind if kind == Kind::Write as u64 => {
                if at.checked_add(length).is_none_or(|end| end > whole) {
                    return Ok(());
                }
                let mut done = 0;
                while done < length {
                    let n = (length - done).min(PIECE as u64);
                    let bytes = &mut piece[..n as usize];
                    if !read_whole(file, bytes, at + done).map_err(failed)? {
                        return Ok(());
                    }
                    device.write(offset + done, bytes)?;
                    done += n;
                }
                at += length;
            }
            kind if kind == Kind::Zero as u64 => {
                device.write_zeroes(offset, length, Zeroes::default())?;
            }
            _ => device.trim(offset, length)?,
        }
    }
    Ok(())
}

impl<D: BlockDevice> BlockDevice for Journaled<D> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let length = data.len() as u64;
        self.change(Kind::Write, offset, length, data, |inner| {
            inner.write(offset, data)
        })
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(Kind::Zero, offset, length, &[], |inner| {
            inner.write_zeroes(offset, length, zeroes)
        })
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(Kind::Trim, offset, length, &[], |inner| {
            inner.trim(offset, length)
        })
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let _flushing = self.flushing.lock();
        let former = {
            // No change is under way now, so all that the former journal has is made.
            let mut turn = self.turn.write();
            let other = 1 - turn.current;
            if *turn.files[other].end.lock() > 0 {
                // A flush has failed: the device is flushed for both, while nothing changes.
                self.inner.flush()?;
                let emptied = turn.files.iter().try_for_each(Journal::empty);
                return emptied.map_err(|e| broken(&e));
            }
            let former = turn.current;
            (turn.current, turn.number) = (other, turn.number + 1);
            former
        };
        self.inner.flush()?;
        let emptied = self.turn.read().files[former].empty();
        emptied.map_err(|e| broken(&e))
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.inner.extents(offset, length)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.write_cost(offset, length).max(Cost::Disk)
    }
}

#[cfg(test)]
mod tests {
    use drover_storage::FakeDirectory;

    use super::*;
    use crate::backend::MemoryDevice;

    const SIZE: usize = 1 << 20;
    const BOOT: [u8; 16] = [7; 16];

    /// Forgets what was not flushed when it is killed.
    struct Forgetful {
        now: MemoryDevice,
        flushed: Mutex<Vec<u8>>,
        /// Whether flushes fail.
        broken: Mutex<bool>,
    }

    impl Forgetful {
        fn new(content: &[u8]) -> Self {
            Forgetful {
                now: MemoryDevice::from_bytes(content),
                flushed: Mutex::new(content.to_vec()),
                broken: Mutex::new(false),
            }
        }

        fn content(&self) -> Vec<u8> {
            let mut content = vec![0; SIZE];
            self.now.read(0, &mut content).unwrap();
            content
        }
    }

    impl BlockDevice for Forgetful {
        fn size(&self) -> u64 {
            self.now.size()
        }
        fn capabilities(&self) -> Capabilities {
            self.now.capabilities()
        }
        fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
            self.now.read(offset, buffer)
        }
        fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
            self.now.write(offset, data)
        }
        fn write_zeroes(
            &self,
            offset: u64,
            length: u64,
            zeroes: Zeroes,
        ) -> Result<(), DeviceError> {
            self.now.write_zeroes(offset, length, zeroes)
        }
        fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
            self.now.trim(offset, length)
        }
        fn flush(&self) -> Result<(), DeviceError> {
            if *self.broken.lock() {
                return Err(DeviceError::Unavailable("broken".into()));
            }
            *self.flushed.lock() = self.content();
            Ok(())
        }
        fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
            self.now.extents(offset, length)
        }
        fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
            self.now.prefetch(offset, length)
        }
        fn cost(&self, offset: u64, length: u64) -> Cost {
            self.now.cost(offset, length)
        }
        fn write_cost(&self, offset: u64, length: u64) -> Cost {
            self.now.write_cost(offset, length)
        }
    }

    fn open(
        device: &Arc<Forgetful>,
        directory: &FakeDirectory,
        boot: [u8; 16],
    ) -> Journaled<Arc<Forgetful>> {
        let directory: Arc<dyn Directory> = Arc::new(directory.clone());
        Journaled::open(Arc::clone(device), &directory, boot).unwrap()
    }

    fn act(device: &impl BlockDevice, rng: &mut fastrand::Rng) {
        let offset = rng.u64(..SIZE as u64 - 70_000);
        let length = rng.u64(1..70_000);
        match rng.u8(..10) {
            0 => {
                let _ = device.flush();
            }
            1 => device
                .write_zeroes(offset, length, Zeroes::default())
                .unwrap(),
            2 => device.trim(offset, length).unwrap(),
            _ => device
                .write(offset, &vec![rng.u8(..); length as usize])
                .unwrap(),
        }
    }

    #[test]
    fn whatever_was_answered_is_there_after_a_kill() {
        for seed in 0..200 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut directory = FakeDirectory::new(512, seed);
            let mut device = Arc::new(Forgetful::new(&vec![1; SIZE]));
            for _ in 0..rng.usize(1..5) {
                let journaled = open(&device, &directory, BOOT);
                for _ in 0..rng.usize(..30) {
                    *device.broken.lock() = rng.u8(..8) == 0;
                    act(&journaled, &mut rng);
                }
                let before = device.content();
                drop(journaled);
                let flushed = device.flushed.lock().clone();
                device = Arc::new(Forgetful::new(&flushed));
                directory = directory.after_kill();
                let again = open(&device, &directory, BOOT);
                assert!(device.content() == before, "seed {seed}");
                assert!(*device.flushed.lock() == before, "seed {seed}");
                drop(again);
            }
        }
    }

    #[test]
    fn a_journal_of_another_boot_is_ignored() {
        let directory = FakeDirectory::new(512, 1);
        let device = Arc::new(Forgetful::new(&vec![1; SIZE]));
        open(&device, &directory, BOOT)
            .write(0, &[2; 4096])
            .unwrap();
        let device = Arc::new(Forgetful::new(&device.flushed.lock()));
        let directory = directory.after_crash(1);
        open(&device, &directory, [8; 16]);
        assert!(device.content() == vec![1; SIZE]);
        open(&device, &directory, BOOT);
        assert!(device.content() == vec![1; SIZE], "nor later");
    }

    #[test]
    fn a_full_disk_flushes_instead() {
        let directory = FakeDirectory::new(512, 1);
        let device = Arc::new(Forgetful::new(&vec![1; SIZE]));
        let journaled = open(&device, &directory, BOOT);
        directory.set_capacity(Some(0));
        journaled.write(0, &[2; 4096]).unwrap();
        assert_eq!(device.flushed.lock()[..4096], [2; 4096]);
    }

    #[test]
    fn one_that_is_cut_short_or_rubbish_ends_there() {
        for cut in 0..200 {
            let directory = FakeDirectory::new(512, 1);
            let device = Arc::new(Forgetful::new(&vec![1; SIZE]));
            let journaled = open(&device, &directory, BOOT);
            journaled.write(0, &[2; 64]).unwrap();
            journaled.write(64, &[3; 64]).unwrap();
            drop(journaled);
            directory.edit(NAMES[0], |bytes| bytes.truncate(bytes.len() - cut));
            let device = Arc::new(Forgetful::new(&vec![1; SIZE]));
            open(&device, &directory, BOOT);
            let content = device.content();
            assert!(content[..64] == [2; 64] || content[..64] == [1; 64] && cut >= 96);
            assert!(content[64..128] == [3; 64] || content[64..128] == [1; 64] && cut > 0);
        }
    }
}
