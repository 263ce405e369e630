//! What is absent, after kills and power cuts at any moment.

use drover_storage::FakeDirectory;
use fastrand::Rng;

use super::*;

const BLOCKS: u64 = 24;
const SECTOR: u64 = 512;

/// What the device here had before the hand-over, and what its source has.
const STALE: u8 = 1;
const SOURCE: u8 = 2;

/// A disk whose unflushed writes survive the end of the process, and not a power cut.
struct Disk {
    live: MemoryDevice,
    durable: Mutex<Vec<u8>>,
}

impl Disk {
    fn with(content: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            live: MemoryDevice::from_bytes(&content),
            durable: Mutex::new(content),
        })
    }

    fn all(&self) -> Vec<u8> {
        let mut all = vec![0; (BLOCKS * BLOCK) as usize];
        self.live.read(0, &mut all).unwrap();
        all
    }

    /// Of each sector what was flushed, or what was written since.
    fn after_power_cut(&self, rng: &mut Rng) -> Arc<Self> {
        let (mut all, durable) = (self.all(), self.durable.lock());
        let sectors = all.chunks_mut(SECTOR as usize);
        for (live, flushed) in sectors.zip(durable.chunks(SECTOR as usize)) {
            if rng.bool() {
                live.copy_from_slice(flushed);
            }
        }
        Self::with(all)
    }
}

impl BlockDevice for Disk {
    fn size(&self) -> u64 {
        self.live.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.live.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.live.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.live.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> Result<(), DeviceError> {
        self.live.write_zeroes(offset, length, how)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.live.write_zeroes(offset, length, Zeroes::default())
    }
    fn flush(&self) -> Result<(), DeviceError> {
        *self.durable.lock() = self.all();
        Ok(())
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.live.extents(offset, length)
    }
    fn prefetch(&self, _: u64, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Memory
    }
    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Memory
    }
}

type Kept = Arriving<Arc<dyn BlockDevice>>;

fn open(disk: &Arc<Disk>, fake: &FakeDirectory, boot: u8) -> (Kept, ArrivalHandle) {
    let directory: Arc<dyn Directory> = Arc::new(fake.clone());
    let disk = Arc::clone(disk) as Arc<dyn BlockDevice>;
    Arriving::kept(disk, &directory, [boot; 16], Duration::ZERO).unwrap()
}

/// What a sector may have: what was flushed, and what was written since.
type Allowed = Vec<u8>;

fn run(seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let mut disk = Disk::with(vec![STALE; (BLOCKS * BLOCK) as usize]);
    let mut fake = FakeDirectory::new(512, seed);
    let (mut boot, mut version) = (0, SOURCE);
    let (mut device, mut handle) = open(&disk, &fake, boot);
    expect(&handle, 0..BLOCKS * BLOCK).unwrap();
    let mut allowed: Vec<Allowed> = vec![vec![SOURCE]; (BLOCKS * BLOCK / SECTOR) as usize];
    let fetch = |device: &Kept, block: u64| {
        device
            .arrive(block * BLOCK, &[SOURCE; BLOCK as usize])
            .unwrap();
    };
    for _ in 0..rng.usize(10..120) {
        match rng.u8(0..20) {
            0..8 => {
                let per = BLOCK / SECTOR;
                let whole = rng.bool();
                let unit = if whole { per } else { 1 };
                let count = BLOCKS * per / unit;
                let first = rng.u64(0..count);
                let last = rng.u64(first..count.min(first + 12));
                let sectors = first * unit..(last + 1) * unit;
                // What it covers in part must be there, which a reader asks for.
                for block in sectors.start / per..sectors.end.div_ceil(per) {
                    if !whole {
                        fetch(&device, block);
                    }
                }
                version = version.checked_add(1).unwrap_or(SOURCE + 1);
                let bytes = vec![version; ((sectors.end - sectors.start) * SECTOR) as usize];
                device.write(sectors.start * SECTOR, &bytes).unwrap();
                for sector in sectors {
                    allowed[sector as usize].push(version);
                }
            }
            8..13 => fetch(&device, rng.u64(0..BLOCKS)),
            13..16 => {
                device.flush().unwrap();
                allowed
                    .iter_mut()
                    .for_each(|sector| drop(sector.drain(..sector.len() - 1)));
            }
            16..18 => {
                // A kill: all that was answered is there.
                fake = fake.after_kill();
                let killed = Disk::with(disk.all());
                *killed.durable.lock() = disk.durable.lock().clone();
                disk = killed;
                (device, handle) = open(&disk, &fake, boot);
                allowed
                    .iter_mut()
                    .for_each(|sector| drop(sector.drain(..sector.len() - 1)));
            }
            _ => {
                boot += 1;
                fake = fake.after_crash(rng.u64(..));
                disk = disk.after_power_cut(&mut rng);
                (device, handle) = open(&disk, &fake, boot);
                let (mut found, absent) = (disk.all(), handle.absent());
                for range in absent {
                    found[range.start as usize..range.end as usize].fill(SOURCE);
                }
                for (sector, allowed) in found.chunks(SECTOR as usize).zip(&mut allowed) {
                    assert!(
                        allowed.contains(&sector[0]),
                        "seed {seed}: {} of {allowed:?}",
                        sector[0]
                    );
                    *allowed = vec![sector[0]];
                }
            }
        }
    }
    for block in 0..BLOCKS {
        fetch(&device, block);
    }
    device.flush().unwrap();
    assert_eq!(handle.left(), 0);
    let found = disk.all();
    for (sector, allowed) in found.chunks(SECTOR as usize).zip(&allowed) {
        let last = allowed.last().unwrap();
        assert_eq!(sector[0], *last, "seed {seed}");
    }
    assert!(fake.bytes(NAME_OF_LIST).is_none(), "nothing is left of it");
}

const NAME_OF_LIST: &str = "absent";

#[test]
fn no_write_is_lost_or_overwritten_and_nothing_stale_is_read_whatever_dies() {
    for seed in 0..3000 {
        run(seed);
    }
}

/// Arrivals, with a flush after each but the last ones; the longest that the list was.
fn arrive_all(device: &Kept, fake: &FakeDirectory, blocks: impl Iterator<Item = u64>) -> usize {
    let length = |block: u64| {
        device
            .arrive(block * BLOCK, &[SOURCE; BLOCK as usize])
            .unwrap();
        device.flush().unwrap();
        fake.bytes(NAME_OF_LIST).map_or(0, |list| list.len())
    };
    blocks.map(length).max().unwrap_or(0)
}

#[test]
fn the_list_is_written_anew_when_it_has_grown_long() {
    const MANY: u64 = 40_000;
    let fake = FakeDirectory::new(512, 1);
    let directory: Arc<dyn Directory> = Arc::new(fake.clone());
    let disk: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(MANY * BLOCK));
    let open = |directory: &Arc<dyn Directory>, boot| {
        let disk = Arc::clone(&disk);
        Arriving::kept(disk, directory, [boot; 16], Duration::ZERO).unwrap()
    };
    let (device, handle) = open(&directory, 0);
    expect(&handle, 0..MANY * BLOCK).unwrap();
    let longest = arrive_all(&device, &fake, 0..MANY - 100);
    assert!(longest < 5 << 18, "{longest}");
    // A flush that changes nothing writes nothing.
    let before = fake.bytes(NAME_OF_LIST);
    device.flush().unwrap();
    assert_eq!(fake.bytes(NAME_OF_LIST), before);
    // What is not flushed is known after a kill, and not after a power cut.
    device
        .arrive((MANY - 50) * BLOCK, &[SOURCE; BLOCK as usize])
        .unwrap();
    let after = |boot, fake: FakeDirectory| {
        let directory: Arc<dyn Directory> = Arc::new(fake);
        open(&directory, boot).1.left() / BLOCK
    };
    assert_eq!(after(0, fake.after_kill()), 99);
    assert_eq!(after(1, fake.after_crash(3)), 100);
}

#[test]
fn what_is_not_flushed_is_kept_apart_when_the_list_is_written_anew() {
    let fake = FakeDirectory::new(512, 1);
    let directory: Arc<dyn Directory> = Arc::new(fake.clone());
    let (mut log, _) = AbsentLog::open(&directory, [0; 16], 100).unwrap();
    log.expect(std::slice::from_ref(&(0..100))).unwrap();
    let mut absent = RoaringBitmap::new();
    absent.insert_range(0..100);
    let present = |log: &mut AbsentLog, absent: &mut RoaringBitmap, run: Range<u32>| {
        log.present(&run).unwrap();
        absent.remove_range(run);
    };
    present(&mut log, &mut absent, 10..20);
    let said = log.said(false).unwrap();
    // Between the flush of the device and the note of it.
    present(&mut log, &mut absent, 30..35);
    log.flushed(&said, &absent).unwrap();
    log.rewrite(&absent);
    present(&mut log, &mut absent, 50..51);
    let left = |boot: u8, fake: FakeDirectory| {
        let directory: Arc<dyn Directory> = Arc::new(fake);
        AbsentLog::open(&directory, [boot; 16], 100).unwrap().1
    };
    assert_eq!(left(0, fake.after_kill()), absent);
    let mut flushed = RoaringBitmap::new();
    flushed.insert_range(0..100);
    flushed.remove_range(10..20);
    assert_eq!(left(1, fake.after_kill()), flushed);
    // Numbers of records count from the new beginning.
    let said = log.said(false).unwrap();
    present(&mut log, &mut absent, 60..61);
    log.flushed(&said, &absent).unwrap();
    flushed.remove_range(30..35);
    flushed.remove_range(50..51);
    assert_eq!(left(1, fake.after_kill()), flushed);
    assert_eq!(left(0, fake.after_kill()), absent);
}

/// A device of zeros that takes no memory.
struct Large(u64);

impl BlockDevice for Large {
    fn size(&self) -> u64 {
        self.0
    }
    fn capabilities(&self) -> Capabilities {
        MemoryDevice::new(BLOCK).capabilities()
    }
    fn read(&self, _: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        buffer.fill(0);
        Ok(())
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
        let kind = ExtentKind::Zero;
        Ok(vec![Extent {
            offset,
            length,
            kind,
        }])
    }
    fn prefetch(&self, _: u64, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Memory
    }
    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Memory
    }
}

#[test]
fn of_a_device_that_is_too_large_nothing_is_absent() {
    let last = |size: u64| {
        let (_device, handle) = Arriving::new(Large(size), Duration::ZERO);
        expect(&handle, size - BLOCK..size).map(|()| (handle.left(), handle.absent()))
    };
    let size = super::super::MAX_ARRIVING;
    let range = size - BLOCK..size;
    assert_eq!(last(size).unwrap(), (BLOCK, vec![range]));
    assert!(matches!(last(16 << 40), Err(DeviceError::Unsupported(_))));
}

#[test]
fn a_list_of_another_device_is_refused() {
    let fake = FakeDirectory::new(512, 1);
    let disk = Disk::with(vec![STALE; (BLOCKS * BLOCK) as usize]);
    let (_device, handle) = open(&disk, &fake, 0);
    expect(&handle, 0..BLOCK).unwrap();
    let other: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(BLOCK));
    let directory: Arc<dyn Directory> = Arc::new(fake.after_kill());
    let opened = Arriving::kept(other, &directory, [0; 16], Duration::ZERO);
    assert!(opened.is_err());
}
