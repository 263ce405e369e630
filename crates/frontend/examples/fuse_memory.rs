//! A disk in memory as a file: `fuse_memory SIZE MOUNTPOINT [--device] [--read-only] [--page-cache] [--threads N]`.
//!
//! Prints the path of the file, and with `--device` that of a loop device on it, then serves until a line or the end
//! of its input, and unmounts.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::Arc;

use drover_device::backend::MemoryDevice;
use drover_frontend::fuse::{self, FileMount};
use drover_frontend::loopdev::{self, LoopDevice};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = Vec::new();
    let mut options = fuse::Options {
        name: "memory".into(),
        ..fuse::Options::default()
    };
    let mut device = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--device" => device = true,
            "--read-only" => options.read_only = true,
            "--page-cache" => options.page_cache = true,
            "--threads" => options.threads = arguments.next().ok_or("--threads N")?.parse()?,
            _ => words.push(argument),
        }
    }
    let [size, at] = words.as_slice() else {
        return Err(
            "fuse_memory SIZE MOUNTPOINT [--device] [--read-only] [--page-cache] [--threads N]"
                .into(),
        );
    };
    let read_only = options.read_only;
    let memory = Arc::new(MemoryDevice::new(bytes(size)?));
    let mut mount = FileMount::mount(&PathBuf::from(at), memory, options)?;
    println!("{}", mount.path().display());
    let mut attached = None;
    if device {
        let options = loopdev::Options {
            read_only,
            ..loopdev::Options::default()
        };
        let disk = LoopDevice::attach(mount.path(), options)?;
        println!("{}", disk.path().display());
        attached = Some(disk);
    }
    std::io::stdin().lock().read_line(&mut String::new())?;
    if let Some(mut disk) = attached {
        disk.detach()?;
    }
    mount.unmount()?;
    Ok(())
}

/// `4096`, `64K`, `3M`, `2G`.
fn bytes(text: &str) -> Result<u64, Box<dyn std::error::Error>> {
    let (digits, shift) = match text.chars().last() {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let count: u64 = digits.parse()?;
    count
        .checked_mul(1 << shift)
        .ok_or_else(|| "too large".into())
}
