//! Random requests against a block device of the kernel, past its cache and from several threads, each with a share of
//! the device and a plain copy of what must be in it.
//!
//! ```text
//! torture_device PATH SEED STEPS
//! ```
//!
//! What is on the device is lost.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::{FallocateFlags, OFlags, fallocate};

const SECTOR: usize = 512;
const THREADS: u64 = 4;
const LONGEST: usize = 1 << 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [path, seed, steps] = &words[..] else {
        return Err("torture_device PATH SEED STEPS".into());
    };
    let (seed, steps): (u64, usize) = (seed.parse()?, steps.parse()?);
    let direct = i32::try_from(OFlags::DIRECT.bits())?;
    let mut options = File::options();
    let mut device = options
        .read(true)
        .write(true)
        .custom_flags(direct)
        .open(path)?;
    let size = device.seek(SeekFrom::End(0))?;
    let share = size / THREADS / SECTOR as u64 * SECTOR as u64;
    let device = &device;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|n| {
                scope.spawn(move || {
                    let mut torture = Torture {
                        device,
                        start: n * share,
                        model: vec![0; share as usize],
                        random: fastrand::Rng::with_seed(seed + n),
                        memory: vec![0; LONGEST + 4096],
                    };
                    let result = (0..=steps).try_for_each(|step| {
                        let done = match step {
                            0 => torture.begin(),
                            _ => torture.step(),
                        };
                        done.map_err(|error| format!("thread {n}, step {step}: {error}"))
                    });
                    result?;
                    torture.check_all()
                })
            })
            .collect();
        let ended = threads.into_iter().map(|t| t.join().expect("a thread"));
        ended.collect::<Result<Vec<()>, Failure>>()
    })?;
    println!("{THREADS} threads, {steps} steps each, seed {seed}: all as it must be");
    Ok(())
}

struct Torture<'a> {
    device: &'a File,
    start: u64,
    model: Vec<u8>,
    random: fastrand::Rng,
    memory: Vec<u8>,
}

impl Torture<'_> {
    fn begin(&mut self) -> Result<(), Failure> {
        let whole = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(
            self.device,
            whole,
            self.start,
            self.model.len() as u64,
        )?)
    }

    fn step(&mut self) -> Result<(), Failure> {
        let sectors = self.model.len() / SECTOR;
        let at = self.random.usize(..sectors);
        // Mostly short, now and then as long as can be.
        let most = if self.random.u8(..8) == 0 {
            LONGEST / SECTOR
        } else {
            16
        };
        let length = self.random.usize(1..=most.min(sectors - at)) * SECTOR;
        let at = at * SECTOR;
        let offset = self.start + at as u64;
        match self.random.u8(..10) {
            0..4 => {
                let fill: u8 = self.random.u8(..);
                let buffer = aligned(&mut self.memory, length);
                buffer.fill(fill);
                self.random.fill(&mut buffer[..SECTOR]);
                self.device.write_all_at(buffer, offset)?;
                self.model[at..at + length].copy_from_slice(buffer);
            }
            4 => self.device.sync_data()?,
            5 => {
                let how = if self.random.bool() {
                    FallocateFlags::PUNCH_HOLE
                } else {
                    FallocateFlags::ZERO_RANGE
                };
                let how = how | FallocateFlags::KEEP_SIZE;
                match fallocate(self.device, how, offset, length as u64) {
                    Ok(()) => self.model[at..at + length].fill(0),
                    // A driver that cannot punch says so, every time.
                    Err(rustix::io::Errno::OPNOTSUPP) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            _ => self.check(at, length)?,
        }
        Ok(())
    }

    fn check(&mut self, at: usize, length: usize) -> Result<(), Failure> {
        let buffer = aligned(&mut self.memory, length);
        self.device.read_exact_at(buffer, self.start + at as u64)?;
        match *buffer == self.model[at..at + length] {
            true => Ok(()),
            false => Err(format!("{length} bytes at {at} differ").into()),
        }
    }

    fn check_all(&mut self) -> Result<(), Failure> {
        for at in (0..self.model.len()).step_by(LONGEST) {
            self.check(at, LONGEST.min(self.model.len() - at))?;
        }
        Ok(())
    }
}

/// Memory that begins at a page, as requests past the cache must.
fn aligned(memory: &mut [u8], length: usize) -> &mut [u8] {
    let skip = memory.as_ptr().align_offset(4096);
    &mut memory[skip..skip + length]
}
