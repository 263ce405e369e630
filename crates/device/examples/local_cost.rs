//! What a managed device costs when everything is local: reads and writes of 4 KiB and 1 MiB through `Synced`, and the
//! same with `pread` and `pwrite` on a plain file beside its cache. Give a directory on the file system to measure.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::MemoryDevice;
use drover_device::local_remote::LocalRemote;
use drover_device::synced::{Order, Sync, Synced, SyncedOptions};
use drover_storage::HostDirectory;

const SIZE: u64 = 256 << 20;
const CHUNK: u32 = 64 << 10;
const TIME: Duration = Duration::from_millis(700);

/// Microseconds for each request, of random places.
fn each(
    length: usize,
    mut request: impl FnMut(u64, &mut [u8]) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut buffer = vec![7; length];
    let (began, mut count) = (Instant::now(), 0u32);
    while began.elapsed() < TIME {
        for _ in 0..16 {
            let at = random.u64(0..SIZE / length as u64) * length as u64;
            request(at, &mut buffer)?;
            count += 1;
        }
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(count))
}

fn main() -> Result<(), Box<dyn Error>> {
    let above = std::env::args_os().nth(1).unwrap_or_else(|| ".".into());
    let directory = tempfile::tempdir_in(above)?;
    let mut bytes = vec![0; SIZE as usize];
    fastrand::Rng::with_seed(2).fill(&mut bytes);
    let plain = directory.path().join("plain");
    std::fs::write(&plain, &bytes)?;
    let plain = File::options().read(true).write(true).open(plain)?;

    for all in [true, false] {
        let far = Arc::new(MemoryDevice::from_bytes(&bytes));
        let cache = HostDirectory::open_or_create(&directory.path().join(format!("cache-{all}")))?;
        let remote = LocalRemote::new(far, CHUNK, 2, None)?;
        let device = Synced::open(SyncedOptions {
            // So that what is written stays here while it is measured.
            sync: Sync::Local,
            push_interval: Duration::from_secs(3600),
            high_water: u64::MAX,
            prefetch: if all { Order::Sequential } else { Order::None },
            ..SyncedOptions::new(Arc::new(cache), remote, b"measured")
        })?;
        if all && !device.puller().wait(Duration::from_secs(60))? {
            return Err("not everything was pulled within 60 s".into());
        }
        if !all {
            // All but one chunk, read by a reader: what a device without a puller mostly is.
            let mut part = vec![0; 1 << 20];
            for at in (1 << 20..SIZE).step_by(part.len()) {
                device.read(at, &mut part)?;
            }
            device.read(0, &mut part[..CHUNK as usize])?;
        }
        println!("all local: {all}");
        for length in [4096, 1 << 20] {
            let read = each(length, |at, buffer| device.read(at, buffer))?;
            let pread = each(length, |at, buffer| Ok(plain.read_exact_at(buffer, at)?))?;
            let write = each(length, |at, buffer| device.write(at, buffer))?;
            let pwrite = each(length, |at, buffer| Ok(plain.write_all_at(buffer, at)?))?;
            println!(
                "{length:>8} bytes: read {read:.2} us, pread {pread:.2} us; write {write:.2} us, pwrite {pwrite:.2} us"
            );
        }
        device.close(false)?;
    }
    Ok(())
}
