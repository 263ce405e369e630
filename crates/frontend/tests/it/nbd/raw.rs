//! A client that sends and receives raw bytes, and a device controlled by the test.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_frontend::nbd::wire::{self, Request, chunk, command, option, reply};

/// A connection that knows the protocol's bytes and keeps no rules.
pub struct Raw {
    pub stream: UnixStream,
    pub structured: bool,
    pub size: u64,
    pub flags: u16,
    /// Requests that are not answered.
    pub asked: HashMap<u64, Request>,
    cookie: u64,
}

/// An answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub request: Request,
    /// 0, or what is wrong.
    pub error: u32,
    pub message: String,
    /// What was read.
    pub data: Vec<u8>,
    /// Lengths and states.
    pub runs: Vec<(u32, u32)>,
    /// Chunks that said what a range holds.
    pub chunks: usize,
}

impl Raw {
    /// Connects and answers the greeting.
    pub fn connect(path: &Path) -> Self {
        let mut raw = Self::bare(UnixStream::connect(path).expect("a connection"));
        let greeting: [u8; 18] = raw.bytes();
        assert_eq!(greeting[..8], wire::GREETING.to_be_bytes());
        assert_eq!(greeting[8..16], wire::OPTION.to_be_bytes());
        assert_eq!(greeting[16..], [0, 3], "fixed newstyle, no zeroes");
        raw.stream.write_all(&3u32.to_be_bytes()).unwrap();
        raw
    }

    /// A connection on which nothing was said.
    pub fn bare(stream: UnixStream) -> Self {
        // No test waits for ever.
        let limit = Some(Duration::from_secs(60));
        stream.set_read_timeout(limit).unwrap();
        stream.set_write_timeout(limit).unwrap();
        Self {
            stream,
            structured: false,
            size: 0,
            flags: 0,
            asked: HashMap::new(),
            cookie: 0,
        }
    }

    /// Connects and goes to an export.
    pub fn go(path: &Path, name: &str, structured: bool) -> Self {
        let mut raw = Self::connect(path);
        raw.begin(name, structured);
        raw
    }

    /// Goes to an export, with `base:allocation` where that can be.
    pub fn begin(&mut self, name: &str, structured: bool) {
        self.structured = structured;
        if structured {
            assert_eq!(
                self.option(option::STRUCTURED_REPLY, &[]),
                [(reply::ACK, vec![])]
            );
            let mut data = string(name);
            data.extend(1u32.to_be_bytes());
            data.extend(string("base:allocation"));
            let replies = self.option(option::SET_META_CONTEXT, &data);
            assert_eq!(replies[0].0, reply::META_CONTEXT);
        }
        let mut data = string(name);
        data.extend(0u16.to_be_bytes());
        let replies = self.option(option::GO, &data);
        assert_eq!(replies.last().unwrap().0, reply::ACK, "{replies:?}");
        let export = &replies[0].1;
        assert_eq!(export[..2], [0, 0]);
        self.size = u64::from_be_bytes(export[2..10].try_into().unwrap());
        self.flags = u16::from_be_bytes(export[10..12].try_into().unwrap());
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream
            .read_exact(&mut bytes)
            .expect("bytes of the server");
        bytes
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes())
    }

    pub fn send_option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = wire::OPTION.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Sends an option and takes the replies to it, up to the one that ends them.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(option, data);
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.u64(), wire::OPTION_REPLY);
            assert_eq!(self.u32(), option);
            let kind = self.u32();
            let mut data = vec![0; self.u32() as usize];
            self.stream.read_exact(&mut data).unwrap();
            replies.push((kind, data));
            if kind == reply::ACK || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    /// Sends a request without waiting.
    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let request = Request {
            flags,
            command,
            cookie: self.cookie,
            offset,
            length,
        };
        self.asked.insert(self.cookie, request);
        let mut bytes = request.encode().to_vec();
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    /// Takes the next answer, to whichever request.
    pub fn answer(&mut self) -> Answer {
        let mut answer: Option<Answer> = None;
        let mut received = Vec::new();
        loop {
            let magic = self.u32();
            if magic == wire::SIMPLE_REPLY {
                assert!(answer.is_none(), "a simple reply among chunks");
                let error = self.u32();
                let cookie = self.u64();
                let mut answer = self.find(cookie);
                answer.error = error;
                let reads = answer.request.command == command::READ;
                assert!(
                    !(reads && self.structured),
                    "a simple reply to a structured read"
                );
                if reads && error == 0 {
                    answer.data = vec![0; answer.request.length as usize];
                    self.stream.read_exact(&mut answer.data).unwrap();
                }
                return answer;
            }
            assert_eq!(magic, wire::STRUCTURED_REPLY);
            assert!(self.structured, "a chunk that was not agreed on");
            let (flags, kind, cookie, length) = (self.u16(), self.u16(), self.u64(), self.u32());
            let current = match answer.as_mut() {
                Some(answer) => {
                    assert_eq!(answer.request.cookie, cookie, "chunks interleave");
                    answer
                }
                None => {
                    let found = self.find(cookie);
                    answer.insert(found)
                }
            };
            let mut data = vec![0; length as usize];
            self.stream.read_exact(&mut data).unwrap();
            take(current, &mut received, kind, &data);
            if flags & chunk::DONE != 0 {
                let answer = answer.unwrap();
                if answer.request.command == command::READ && answer.error == 0 {
                    received.sort_unstable();
                    let mut at = 0;
                    for (from, to) in received {
                        assert_eq!(from, at, "chunks overlap or leave gaps");
                        at = to;
                    }
                    assert_eq!(at, answer.data.len(), "chunks leave the end");
                }
                return answer;
            }
        }
    }

    fn find(&mut self, cookie: u64) -> Answer {
        let request = self.asked.remove(&cookie).expect("a cookie that was asked");
        Answer {
            request,
            error: 0,
            message: String::new(),
            data: Vec::new(),
            runs: Vec::new(),
            chunks: 0,
        }
    }

    /// A request and the answer to it.
    pub fn does(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> Answer {
        let cookie = self.ask(command, flags, offset, length, data);
        let answer = self.answer();
        assert_eq!(answer.request.cookie, cookie);
        answer
    }

    /// Whether the server has hung up, as it should within some seconds. What it still says is thrown away.
    pub fn is_hung_up(&mut self) -> bool {
        let mut scrap = [0; 4096];
        loop {
            match self.stream.read(&mut scrap) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}

fn take(answer: &mut Answer, received: &mut Vec<(usize, usize)>, kind: u16, data: &[u8]) {
    let request = answer.request;
    let place = |data: &[u8]| {
        let offset = u64::from_be_bytes(data[..8].try_into().unwrap());
        assert!(offset >= request.offset, "before what was asked for");
        (offset - request.offset) as usize
    };
    if matches!(kind, chunk::OFFSET_DATA | chunk::OFFSET_HOLE) {
        answer.data.resize(request.length as usize, 0xEE);
    }
    match kind {
        chunk::NONE => assert!(data.is_empty()),
        chunk::OFFSET_DATA => {
            let at = place(data);
            let data = &data[8..];
            answer.data[at..at + data.len()].copy_from_slice(data);
            received.push((at, at + data.len()));
            answer.chunks += 1;
        }
        chunk::OFFSET_HOLE => {
            let at = place(data);
            let length = u32::from_be_bytes(data[8..12].try_into().unwrap()) as usize;
            answer.data[at..at + length].fill(0);
            received.push((at, at + length));
            answer.chunks += 1;
        }
        chunk::BLOCK_STATUS => {
            assert_eq!(data[..4], 1u32.to_be_bytes(), "the context's id");
            let (runs, rest) = data[4..].as_chunks::<8>();
            assert!(rest.is_empty() && !runs.is_empty());
            for run in runs {
                let (length, state) = run.split_at(4);
                answer.runs.push((
                    u32::from_be_bytes(length.try_into().unwrap()),
                    u32::from_be_bytes(state.try_into().unwrap()),
                ));
            }
        }
        chunk::ERROR => {
            answer.error = u32::from_be_bytes(data[..4].try_into().unwrap());
            let length = u16::from_be_bytes([data[4], data[5]]) as usize;
            assert_eq!(data.len(), 6 + length);
            answer.message = String::from_utf8(data[6..].to_vec()).unwrap();
        }
        other => panic!("chunk {other}"),
    }
}

/// A counted string.
pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

type Before = dyn Fn(&'static str, u64, u64) -> Result<(), DeviceError> + Send + Sync;

/// A memory device that says of itself what a test wants, and asks it before it does anything.
pub struct Odd {
    pub inner: MemoryDevice,
    pub can: Capabilities,
    pub cost: Cost,
    pub before: Box<Before>,
}

impl Odd {
    pub fn new(size: u64, cost: Cost) -> Self {
        let inner = MemoryDevice::new(size);
        Self {
            can: inner.capabilities(),
            inner,
            cost,
            before: Box::new(|_, _, _| Ok(())),
        }
    }

    pub fn before(
        mut self,
        before: impl Fn(&'static str, u64, u64) -> Result<(), DeviceError> + Send + Sync + 'static,
    ) -> Self {
        self.before = Box::new(before);
        self
    }
}

impl BlockDevice for Odd {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.can
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        (self.before)("read", offset, buffer.len() as u64)?;
        self.inner.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        (self.before)("write", offset, data.len() as u64)?;
        self.inner.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        (self.before)("zeroes", offset, length)?;
        self.inner.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        (self.before)("trim", offset, length)?;
        self.inner.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        (self.before)("flush", 0, 0)?;
        self.inner.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        (self.before)("extents", offset, length)?;
        self.inner.extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        (self.before)("prefetch", offset, length)?;
        self.inner.prefetch(offset, length)
    }
    fn cost(&self, _: u64, _: u64) -> Cost {
        self.cost
    }
    fn write_cost(&self, _: u64, _: u64) -> Cost {
        self.cost
    }
}
