//! A device in memory as a block device of the kernel. What the test in a machine with both drivers runs, and a small
//! example of how the pieces go together.
//!
//! ```text
//! attach_memory nbd  [--ioctl] [--device /dev/nbd3] [--connections N] [--dead SECONDS] [--size MIB] [--read-only]
//! attach_memory ublk [--device /dev/ublkb3] [--size MIB] [--read-only]
//! attach_memory detach [--force] PATH
//! ```
//!
//! Attaches, says where, and serves until the device is detached by another process or a signal asks to end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_frontend::nbdclient::{self, Detach, Interface};
use drover_frontend::ublk;

type Failure = Box<dyn std::error::Error>;

fn main() {
    if let Err(error) = run() {
        println!("attach_memory: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Failure> {
    let mut words = std::env::args().skip(1);
    let mode = words.next().ok_or("nbd, ublk or detach?")?;
    let mut flags = Vec::new();
    let mut values = Vec::new();
    let mut path = None;
    while let Some(word) = words.next() {
        match word.as_str() {
            "--ioctl" | "--read-only" | "--force" => flags.push(word),
            "--device" | "--connections" | "--dead" | "--size" => {
                values.push((word, words.next().ok_or("a value is missing")?));
            }
            _ => path = Some(PathBuf::from(word)),
        }
    }
    let is = |flag: &str| flags.iter().any(|f| f == flag);
    let text = |name: &str| values.iter().find(|(n, _)| n == name).map(|(_, v)| v);
    let number = |name: &str| text(name).map(|v| v.parse::<u64>()).transpose();
    let how = if is("--force") {
        Detach::Force
    } else {
        Detach::IfUnused
    };

    let size = number("--size")?.unwrap_or(64) << 20;
    match (mode.as_str(), path) {
        ("nbd", None) => {
            let device = Arc::new(MemoryDevice::new(size));
            let options = nbdclient::Options {
                device: text("--device").map(PathBuf::from),
                read_only: is("--read-only"),
                flags: nbdclient::FLAG_SEND_FLUSH
                    | nbdclient::FLAG_SEND_FUA
                    | nbdclient::FLAG_SEND_TRIM
                    | nbdclient::FLAG_CAN_MULTI_CONN,
                dead_conn_timeout: number("--dead")?.map(Duration::from_secs),
                identifier: Some("drover example".into()),
                interface: if is("--ioctl") {
                    Interface::Ioctl
                } else {
                    Interface::Any
                },
                ..nbdclient::Options::new(size)
            };
            nbd(&device, &options, number("--connections")?.unwrap_or(1))
        }
        ("ublk", None) => {
            let options = ublk::Options {
                device: text("--device").map(PathBuf::from),
                read_only: is("--read-only"),
                ..ublk::Options::default()
            };
            serve_ublk(Arc::new(MemoryDevice::new(size)), &options)
        }
        ("detach", Some(path)) if path.to_string_lossy().starts_with("/dev/ublk") => {
            Ok(ublk::detach_path(&path, how)?)
        }
        ("detach", Some(path)) => Ok(nbdclient::detach_path(&path, how)?),
        _ => Err("what is asked for is not clear".into()),
    }
}

fn nbd(
    device: &Arc<MemoryDevice>,
    options: &nbdclient::Options,
    connections: u64,
) -> Result<(), Failure> {
    let asked = asked_to_end()?;
    let mut sockets = Vec::new();
    let mut servers = Vec::new();
    for _ in 0..connections {
        let (kernel, server) = UnixStream::pair()?;
        sockets.push(kernel.into());
        let device = device.clone();
        servers.push(thread::spawn(move || serve(&*device, server)));
    }
    let begin = Instant::now();
    let mut attached = nbdclient::attach(sockets, options)?;
    let millis = begin.elapsed().as_millis();
    println!("attached {} after {millis} ms", attached.path().display());
    while !servers.iter().all(thread::JoinHandle::is_finished) {
        if asked.swap(false, Ordering::Relaxed) {
            match attached.detach(Detach::IfUnused) {
                Ok(()) => break,
                Err(error) => println!("attach_memory: {error}"),
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    for server in servers {
        server.join().map_err(|_| "a server panicked")??;
    }
    println!("detached, {} KiB in use", device.allocated() >> 10);
    Ok(())
}

fn serve_ublk(device: Arc<MemoryDevice>, options: &ublk::Options) -> Result<(), Failure> {
    let asked = asked_to_end()?;
    let begin = Instant::now();
    let mut attached = ublk::attach(device.clone(), options)?;
    let millis = begin.elapsed().as_millis();
    println!("attached {} after {millis} ms", attached.path().display());
    while !attached.is_gone() {
        if asked.swap(false, Ordering::Relaxed) {
            match attached.detach(Detach::IfUnused) {
                Ok(()) => break,
                Err(error) => println!("attach_memory: {error}"),
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    attached.detach(Detach::IfUnused)?;
    println!("detached, {} KiB in use", device.allocated() >> 10);
    Ok(())
}

fn asked_to_end() -> Result<Arc<AtomicBool>, Failure> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, asked.clone())?;
    }
    Ok(asked)
}

fn serve(device: &impl BlockDevice, mut stream: UnixStream) -> std::io::Result<()> {
    let mut header = [0; 28];
    loop {
        if stream.read_exact(&mut header).is_err() {
            return Ok(());
        }
        let flags = u16::from_be_bytes([header[4], header[5]]);
        let kind = u16::from_be_bytes([header[6], header[7]]);
        let offset = u64::from_be_bytes(header[16..24].try_into().unwrap());
        let length = u32::from_be_bytes(header[24..28].try_into().unwrap());
        let mut data = vec![0; if kind < 2 { length as usize } else { 0 }];
        let result = match kind {
            0 => device.read(offset, &mut data),
            1 => {
                stream.read_exact(&mut data)?;
                device.write(offset, &data)
            }
            2 => return Ok(()),
            3 => device.flush(),
            4 => device.trim(offset, length.into()),
            _ => device.write_zeroes(offset, length.into(), Zeroes::default()),
        };
        let _ = flags;
        let mut reply = Vec::new();
        reply.extend(0x6744_6698u32.to_be_bytes());
        reply.extend(if result.is_ok() { 0u32 } else { 5 }.to_be_bytes());
        reply.extend(&header[8..16]);
        if kind == 0 && result.is_ok() {
            reply.extend(&data);
        }
        stream.write_all(&reply)?;
    }
}
