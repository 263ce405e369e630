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
