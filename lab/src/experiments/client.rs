//! A plain NBD client, the same for all subjects: one connection, requests in order.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::shows::Shown;

/// Timeout for a disk to appear, and for a reply.
const PATIENCE: Duration = Duration::from_secs(60);

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// A connection to an NBD export.
pub struct Nbd {
    stream: UnixStream,
    size: u64,
    cookie: u64,
}

impl Nbd {
    /// Connects to the export `name`, as soon as a server listens on `socket`.
    fn connect(socket: &Path, name: &str) -> Result<Self> {
        let started = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(e) if started.elapsed() > PATIENCE => {
                    return Err(e)
                        .with_context(|| format!("nobody listens on {}", socket.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_micros(500)),
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut client = Self {
            stream,
            size: 0,
            cookie: 0,
        };
        client.negotiate(name).context("the NBD handshake")?;
        Ok(client)
    }

    fn negotiate(&mut self, name: &str) -> Result<()> {
        let mut hello = [0; 18];
        self.stream.read_exact(&mut hello)?;
        if &hello[..8] != b"NBDMAGIC" {
            bail!("no NBD server");
        }
        // Client flags: fixed newstyle, no zeroes.
        self.stream.write_all(&3u32.to_be_bytes())?;
        let mut go = Vec::new();
        go.extend((name.len() as u32).to_be_bytes());
        go.extend(name.as_bytes());
        go.extend(0u16.to_be_bytes());
        let mut option = Vec::new();
        option.extend(OPTION_MAGIC.to_be_bytes());
        option.extend(OPTION_GO.to_be_bytes());
        option.extend((go.len() as u32).to_be_bytes());
        option.extend(go);
        self.stream.write_all(&option)?;
        loop {
            let mut head = [0; 20];
            self.stream.read_exact(&mut head)?;
            let word = |at: usize| {
                u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
            };
            if head[..8] != REPLY_MAGIC.to_be_bytes() {
                bail!("not a reply to an option");
            }
            let (kind, length) = (word(12), word(16));
            if length > 4096 {
                bail!("a reply of {length} bytes");
            }
            let mut body = vec![0; length as usize];
            self.stream.read_exact(&mut body)?;
            match kind {
                REPLY_ACK => return Ok(()),
                REPLY_INFO if body.len() >= 12 && body[..2] == [0, 0] => {
                    let mut size = [0; 8];
                    size.copy_from_slice(&body[2..10]);
                    self.size = u64::from_be_bytes(size);
                }
                REPLY_INFO => {}
                other => bail!("refused: {other:#x} {}", String::from_utf8_lossy(&body)),
            }
        }
    }

    fn request(&mut self, command: u16, offset: u64, length: u32) -> Result<u64> {
        self.cookie += 1;
        let mut head = Vec::with_capacity(28);
        head.extend(REQUEST_MAGIC.to_be_bytes());
        head.extend(0u16.to_be_bytes());
        head.extend(command.to_be_bytes());
        head.extend(self.cookie.to_be_bytes());
        head.extend(offset.to_be_bytes());
        head.extend(length.to_be_bytes());
        self.stream.write_all(&head)?;
        Ok(self.cookie)
    }

    fn reply(&mut self, cookie: u64) -> Result<()> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        if head[..4] != SIMPLE_MAGIC.to_be_bytes() || head[8..] != cookie.to_be_bytes() {
            bail!("a reply to another request");
        }
        let error = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        if error != 0 {
            bail!("error {error}");
        }
        Ok(())
    }

    /// Reads, one request at a time.
    fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let cookie = self.request(READ, offset, u32::try_from(buffer.len())?)?;
        self.reply(cookie)
            .with_context(|| format!("reading {} bytes at {offset}", buffer.len()))?;
        self.stream.read_exact(buffer)?;
        Ok(())
    }

    /// Writes, one request at a time.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let cookie = self.request(WRITE, offset, u32::try_from(data.len())?)?;
        self.stream.write_all(data)?;
        self.reply(cookie)
            .with_context(|| format!("writing {} bytes at {offset}", data.len()))
    }

    /// Flushes: returns when earlier writes are durable, as far as the server promises.
    fn flush(&mut self) -> Result<()> {
        let cookie = self.request(FLUSH, 0, 0)?;
        self.reply(cookie).context("a flush")
    }
}

/// A disk from its user's view: an export, or a file.
pub enum Client {
    /// An NBD export.
    Nbd(Nbd),
    /// A file and its size.
    File(File, u64),
}

impl Client {
    /// Opens the file as soon as it is mounted.
    fn open(path: &Path) -> Result<Self> {
        let started = Instant::now();
        let around = path.parent().unwrap_or(path);
        loop {
            // Before the mount there is no file, or one of the surrounding file system.
            let device = std::fs::metadata(around).map(|meta| meta.dev()).ok();
            match std::fs::metadata(path) {
                Ok(meta) if device.is_some_and(|device| device != meta.dev()) => {
                    let file = File::options().read(true).write(true).open(path)?;
                    return Ok(Self::File(file, meta.len()));
                }
                _ if started.elapsed() > PATIENCE => bail!("no disk at {}", path.display()),
                _ => std::thread::sleep(Duration::from_micros(500)),
            }
        }
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Nbd(nbd) => nbd.size,
            Self::File(_, size) => *size,
        }
    }

    /// Reads, one request at a time.
    pub fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        match self {
            Self::Nbd(nbd) => nbd.read(offset, buffer),
            Self::File(file, _) => Ok(file.read_exact_at(buffer, offset)?),
        }
    }

    /// Writes, one request at a time.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        match self {
            Self::Nbd(nbd) => nbd.write(offset, data),
            Self::File(file, _) => Ok(file.write_all_at(data, offset)?),
        }
    }

    /// Flushes: returns when earlier writes are durable, as far as the server promises.
    pub fn flush(&mut self) -> Result<()> {
        match self {
            Self::Nbd(nbd) => nbd.flush(),
            Self::File(file, _) => Ok(file.sync_data()?),
        }
    }
}

/// Connects to a served disk as soon as it can be read.
pub fn connect(shown: &mut Shown) -> Result<Client> {
    let connected = match shown.file() {
        Some(file) => Client::open(file),
        None => Nbd::connect(shown.socket(), shown.name()).map(Client::Nbd),
    };
    // The server's own error message, if any, says more.
    connected.or_else(|e| shown.check().and(Err(e)))
}
