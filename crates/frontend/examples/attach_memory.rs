//! A device in memory as a block device of the kernel: what the test in a machine with both drivers runs, and a small
//! example of how the pieces go together.
//!
//! ```text
//! attach_memory nbd [--ioctl] [--connections N] [--timeout SECONDS] [--dead SECONDS] [--reconnect PATH] [COMMON]
//! attach_memory ublk [--queues N] [COMMON]
//! attach_memory detach [--force] PATH
//! attach_memory status PATH
//! attach_memory list
//! COMMON: [--device PATH] [--size MIB] [--read-only] [--slow MILLISECONDS] [--file FILE]
//! ```
//!
//! Attaches, says where, and serves until the device is detached by another process, or SIGTERM asks to end: then it is
//! detached if it is not in use.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::BlockDevice;
use drover_device::backend::{FileDevice, MemoryDevice};
use drover_device::testing::Delay;
use drover_frontend::kernel_nbd::{self, Detach, Error, Interface, Local};
use drover_frontend::nbd::{Export, Server, ServerOptions};
use drover_frontend::ublk;

type Failure = Box<dyn std::error::Error>;

fn main() {
    if let Err(error) = run() {
        println!("attach_memory: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Failure> {
    let words = Words::parse(std::env::args().skip(1))?;
    let how = if words.has("--force") {
        Detach::Force
    } else {
        Detach::IfUnused
    };
    match (words.mode.as_str(), &words.path) {
        ("nbd", None) => serve(nbd(&words)?),
        ("ublk", None) => serve(ublk(&words)?),
        ("detach", Some(path)) if is_ublk(path) => Ok(ublk::detach_path(path, how)?),
        ("detach", Some(path)) => Ok(kernel_nbd::detach_path(path, how)?),
        ("status", Some(path)) => {
            let attached = if is_ublk(path) {
                ublk::is_attached(path)?
            } else {
                kernel_nbd::is_attached(path)?
            };
            let state = if attached { "attached" } else { "free" };
            println!("{} is {state}", path.display());
            Ok(())
        }
        ("list", None) => {
            for found in kernel_nbd::list() {
                let name = found.identifier.unwrap_or_default();
                println!("{} {name}", found.path.display());
            }
            Ok(())
        }
        _ => Err("say nbd, ublk, list, detach PATH or status PATH".into()),
    }
}

fn is_ublk(path: &Path) -> bool {
    path.to_string_lossy().starts_with("/dev/ublk")
}

/// The command line.
struct Words {
    mode: String,
    flags: Vec<String>,
    values: Vec<(String, String)>,
    path: Option<PathBuf>,
}

impl Words {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut parsed = Self {
            mode: words.next().unwrap_or_default(),
            flags: Vec::new(),
            values: Vec::new(),
            path: None,
        };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--ioctl" | "--read-only" | "--force" => parsed.flags.push(word),
                _ if word.starts_with("--") => {
                    let value = words.next().ok_or(format!("{word} wants a value"))?;
                    parsed.values.push((word, value));
                }
                _ => parsed.path = Some(word.into()),
            }
        }
        Ok(parsed)
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|f| f == flag)
    }

    fn value(&self, name: &str) -> Option<&str> {
        let found = self.values.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    fn number(&self, name: &str) -> Result<Option<u64>, Failure> {
        Ok(self.value(name).map(str::parse).transpose()?)
    }

    fn device(&self) -> Result<Arc<dyn BlockDevice>, Failure> {
        let size = self.number("--size")?.unwrap_or(64) << 20;
        if let Some(path) = self.value("--file") {
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)?;
            file.set_len(size)?;
            return Ok(Arc::new(FileDevice::new(file, self.has("--read-only"))?));
        }
        let memory = MemoryDevice::new(size);
        Ok(match self.number("--slow")? {
            Some(millis) => {
                let latency = Duration::from_millis(millis);
                Arc::new(Delay::new(memory, latency, Duration::ZERO))
            }
            None => Arc::new(memory),
        })
    }
}

fn nbd(words: &Words) -> Result<Box<dyn Device>, Failure> {
    let export = Export {
        name: "memory".into(),
        description: String::new(),
        device: words.device()?,
        read_only: words.has("--read-only"),
    };
    let server = Server::new(vec![export], ServerOptions::default())?;
    let connections = words.number("--connections")?.unwrap_or(1);
    let connections = usize::try_from(connections)?;
    if let Some(path) = words.value("--reconnect") {
        let local = kernel_nbd::reconnect_local(Path::new(path), &server, "memory", connections)?;
        return Ok(Box::new(local));
    }
    let dead = words.number("--dead")?;
    let timeout = words.number("--timeout")?.map(Duration::from_secs);
    let local = kernel_nbd::attach_local(&server, "memory", connections, |mut options| {
        options.device = words.value("--device").map(PathBuf::from);
        options.dead_conn_timeout = dead.map(Duration::from_secs);
        options.timeout = timeout.or(options.timeout);
        options.identifier = Some("drover example".into());
        if words.has("--ioctl") {
            options.interface = Interface::Ioctl;
        }
        options
    })?;
    Ok(Box::new(local))
}

fn ublk(words: &Words) -> Result<Box<dyn Device>, Failure> {
    let mut options = ublk::Options {
        device: words.value("--device").map(PathBuf::from),
        read_only: words.has("--read-only"),
        ..ublk::Options::default()
    };
    if let Some(queues) = words.number("--queues")? {
        options.queues = u16::try_from(queues)?;
    }
    Ok(Box::new(ublk::attach(words.device()?, &options)?))
}

/// What both kinds of devices can be asked.
trait Device {
    fn path(&self) -> &Path;
    fn is_gone(&self) -> bool;
    fn detach(&mut self, how: Detach) -> Result<(), Error>;
}

impl Device for Local {
    fn path(&self) -> &Path {
        self.path()
    }
    fn is_gone(&self) -> bool {
        self.is_gone()
    }
    fn detach(&mut self, how: Detach) -> Result<(), Error> {
        self.detach(how)
    }
}

impl Device for ublk::Attached {
    fn path(&self) -> &Path {
        self.path()
    }
    fn is_gone(&self) -> bool {
        self.is_gone()
    }
    fn detach(&mut self, how: Detach) -> Result<(), Error> {
        self.detach(how)
    }
}

fn serve(mut device: Box<dyn Device>) -> Result<(), Failure> {
    let asked = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, asked.clone())?;
    println!("attached {}", device.path().display());
    while !device.is_gone() {
        if asked.swap(false, Ordering::Relaxed) {
            match device.detach(Detach::IfUnused) {
                Ok(()) => break,
                Err(error) => println!("attach_memory: {error}"),
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let begin = Instant::now();
    device.detach(Detach::IfUnused)?;
    println!("detached after {} s", begin.elapsed().as_secs());
    Ok(())
}
