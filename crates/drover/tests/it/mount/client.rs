//! A plain NBD client: one request at a time, errors as numbers.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Request timeout, after which the test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// An NBD connection in its transmission phase.
pub struct Client {
    stream: UnixStream,
    pub size: u64,
    cookie: u64,
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut hello = [0; 18];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle, no zeroes; EXPORT_NAME.
        let mut ask = vec![0, 0, 0, 3];
        ask.extend(b"IHAVEOPT");
        ask.extend(1u32.to_be_bytes());
        ask.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
        ask.extend(export.as_bytes());
        stream.write_all(&ask).unwrap();
        let mut facts = [0; 10];
        stream.read_exact(&mut facts).unwrap();
        Client {
            stream,
            size: u64::from_be_bytes(facts[..8].try_into().unwrap()),
            cookie: 0,
        }
    }

    /// Waits for replies as a kernel or a hypervisor does.
    pub fn wait_for_ever(&mut self) {
        self.stream.set_read_timeout(None).unwrap();
    }

    fn ask(&mut self, kind: u16, offset: u64, length: u32, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        assert_eq!(reply[8..], self.cookie.to_be_bytes());
        match u32::from_be_bytes(reply[4..8].try_into().unwrap()) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code.cast_signed())),
        }
    }

    pub fn read(&mut self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        self.ask(0, offset, u32::try_from(length).unwrap(), &[])?;
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.ask(1, offset, u32::try_from(data.len()).unwrap(), data)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.ask(3, 0, 0, &[])
    }

    pub fn zero(&mut self, offset: u64, length: u32) -> io::Result<()> {
        self.ask(6, offset, length, &[])
    }
}
