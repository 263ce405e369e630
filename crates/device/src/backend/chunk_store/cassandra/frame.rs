//! Frames of the native protocol of Cassandra, version 4, as far as a disk needs them. The server is not trusted: every length
//! is checked before it is allocated.

use std::io::{self, Read};

use bytes::{Buf, Bytes};

/// The version in requests; in replies its upper bit is set.
#[cfg(feature = "cassandra")]
const VERSION: u8 = 4;
const REPLY: u8 = 0x84;
/// Bytes of a header.
const HEADER: usize = 9;
/// Flags of a reply that put something before its body: tracing, warnings, a custom payload.
const TRACED: u8 = 2;
const PAYLOAD: u8 = 4;
const WARNED: u8 = 8;
const COMPRESSED: u8 = 1;
/// Columns of a result, and types within types.
const MAX_COLUMNS: u32 = 64;
const MAX_DEPTH: u32 = 4;
/// Rows of a result.
const MAX_ROWS: u32 = 4096;

/// Kinds of requests.
#[cfg(feature = "cassandra")]
pub mod op {
    pub const STARTUP: u8 = 0x01;
    pub const QUERY: u8 = 0x07;
    pub const PREPARE: u8 = 0x09;
    pub const EXECUTE: u8 = 0x0A;
    pub const AUTH_RESPONSE: u8 = 0x0F;
}

/// A reply as it comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Of which request.
    pub stream: i16,
    kind: u8,
    body: Bytes,
}

/// What a server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It is ready.
    Ready,
    /// It wants to know who this is.
    Authenticate,
    /// It knows.
    Authenticated,
    /// It was done, and there is nothing to say.
    Done,
    /// Rows, and where the next page begins if there is one.
    Rows(Vec<Vec<Option<Bytes>>>, Option<Bytes>),
    /// What a prepared statement is called.
    Prepared(Bytes),
    /// It was not done, or it is not known.
    Error(u32, String),
}

fn strange(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads a frame of at most `most` bytes.
///
/// # Errors
/// `InvalidData` for what is none; `UnexpectedEof`; those of the connection.
pub fn read(from: &mut impl Read, most: usize) -> io::Result<Frame> {
    let mut head = [0; HEADER];
    from.read_exact(&mut head)?;
    let [version, flags, high, low, kind, length @ ..] = head;
    if version != REPLY {
        return Err(strange("it is no server of the native protocol, version 4"));
    }
    if flags & COMPRESSED != 0 {
        return Err(strange("a reply is compressed, which was not asked for"));
    }
    let length = u32::from_be_bytes(length) as usize;
    if length > most {
        return Err(strange("a reply is longer than what was written"));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    let mut body = Body(body.into());
    if flags & TRACED != 0 {
        body.take(16)?;
    }
    if flags & WARNED != 0 {
        let count = body.short()?;
        for _ in 0..count {
            body.string()?;
        }
    }
    if flags & PAYLOAD != 0 {
        let count = body.short()?;
        for _ in 0..count {
            body.string()?;
            body.value()?;
        }
    }
    Ok(Frame {
        stream: i16::from_be_bytes([high, low]),
        kind,
        body: body.0,
    })
}

/// What a frame says.
///
/// # Errors
/// `InvalidData` for what is no answer.
pub fn answer(frame: &Frame) -> io::Result<Answer> {
    let mut body = Body(frame.body.clone());
    Ok(match frame.kind {
        0x00 => Answer::Error(body.int()?, body.string()?),
        0x02 => Answer::Ready,
        0x03 => Answer::Authenticate,
        0x08 => match body.int()? {
            2 => rows(&mut body)?,
            4 => {
                let length = body.short()?;
                Answer::Prepared(body.take(length.into())?)
            }
            1 | 3 | 5 => Answer::Done,
            _ => return Err(strange("a result is of a kind that is not known")),
        },
        0x10 => Answer::Authenticated,
        _ => return Err(strange("an answer is of a kind that was not asked for")),
    })
}

fn rows(body: &mut Body) -> io::Result<Answer> {
    let flags = body.int()?;
    let columns = body.int()?;
    if columns > MAX_COLUMNS {
        return Err(strange("a result has too many columns"));
    }
    let next = match flags & 2 != 0 {
        true => body.value()?,
        false => None,
    };
    if flags & 4 == 0 {
        if flags & 1 != 0 {
            body.string()?;
            body.string()?;
        }
        for _ in 0..columns {
            if flags & 1 == 0 {
                body.string()?;
                body.string()?;
            }
            body.string()?;
            body.skip_type(0)?;
        }
    }
    let count = body.int()?;
    if count > MAX_ROWS {
        return Err(strange("a result has too many rows"));
    }
    let mut rows = Vec::new();
    for _ in 0..count {
        let row = (0..columns).map(|_| body.value());
        rows.push(row.collect::<io::Result<_>>()?);
    }
    Ok(Answer::Rows(rows, next))
}

/// What is left of a body.
struct Body(Bytes);

impl Body {
    fn take(&mut self, length: usize) -> io::Result<Bytes> {
        match length <= self.0.len() {
            true => Ok(self.0.split_to(length)),
            false => Err(strange("a reply ends early")),
        }
    }

    fn short(&mut self) -> io::Result<u16> {
        Ok(self.take(2)?.get_u16())
    }

    fn int(&mut self) -> io::Result<u32> {
        Ok(self.take(4)?.get_u32())
    }

    fn string(&mut self) -> io::Result<String> {
        let length = self.short()?;
        let bytes = self.take(length.into())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A value; none for null.
    fn value(&mut self) -> io::Result<Option<Bytes>> {
        let length = self.int()?;
        match i32::from_be_bytes(length.to_be_bytes()) {
            ..0 => Ok(None),
            length => Ok(Some(
                self.take(usize::try_from(length).unwrap_or(usize::MAX))?,
            )),
        }
    }

    /// The type of a column.
    fn skip_type(&mut self, depth: u32) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(strange("a type has too many types within it"));
        }
        match self.short()? {
            0x00 => drop(self.string()?),
            0x20 | 0x22 => self.skip_type(depth + 1)?,
            0x21 => {
                self.skip_type(depth + 1)?;
                self.skip_type(depth + 1)?;
            }
            0x01..=0x14 => {}
            _ => return Err(strange("a column has a type that was not asked for")),
        }
        Ok(())
    }
}

/// A map of texts, as a value.
#[cfg(feature = "cassandra")]
pub fn map(value: &Bytes) -> io::Result<Vec<(String, String)>> {
    let mut body = Body(value.clone());
    let count = body.int()?;
    let mut entries = Vec::new();
    for _ in 0..count.min(MAX_COLUMNS) {
        let text =
            |value: Option<Bytes>| String::from_utf8_lossy(&value.unwrap_or_default()).into_owned();
        entries.push((text(body.value()?), text(body.value()?)));
    }
    Ok(entries)
}

/// Requests, as they are written.
#[cfg(feature = "cassandra")]
pub struct Request(Vec<u8>);

#[cfg(feature = "cassandra")]
impl Request {
    /// One of a kind, for the reply with this number.
    pub fn new(kind: u8, stream: i16) -> Request {
        let [high, low] = stream.to_be_bytes();
        Request(vec![VERSION, 0, high, low, kind, 0, 0, 0, 0])
    }

    pub fn byte(mut self, value: u8) -> Request {
        self.0.push(value);
        self
    }

    pub fn short(mut self, value: u16) -> Request {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub fn int(mut self, value: i32) -> Request {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// With a length of two bytes.
    pub fn string(mut self, bytes: &[u8]) -> Request {
        let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_be_bytes());
        self.0.extend(&bytes[..length.into()]);
        self
    }

    /// With a length of four bytes.
    pub fn value(mut self, bytes: &[u8]) -> Request {
        let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        self.0.extend(length.to_be_bytes());
        self.0.extend_from_slice(bytes);
        self
    }

    /// The bytes, with the length in the header.
    pub fn bytes(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - HEADER).unwrap_or(u32::MAX);
        self.0[5..HEADER].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(flags: u8, kind: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![REPLY, flags, 0, 7, kind];
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend(body);
        bytes
    }

    fn parse(bytes: &[u8]) -> io::Result<Answer> {
        let frame = read(&mut io::Cursor::new(bytes), 256)?;
        assert_eq!(frame.stream, 7);
        answer(&frame)
    }

    #[test]
    fn answers_and_what_is_none() {
        assert_eq!(parse(&frame(0, 2, b"")).unwrap(), Answer::Ready);
        let error = [&[0, 0, 0x10, 0][..], b"\0\x02no"].concat();
        let refused = Answer::Error(0x1000, "no".into());
        assert_eq!(parse(&frame(0, 0, &error)).unwrap(), refused);
        // A warning before it.
        let warned = [&b"\0\x01\0\x01w"[..], &error].concat();
        assert_eq!(parse(&frame(WARNED, 0, &warned)).unwrap(), refused);
        // Two columns of one table, one row, a next page.
        let rows = [
            &[0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2][..],
            &[0, 0, 0, 1, 9],
            b"\0\x01k\0\x01t",
            b"\0\x01a\0\x0d",
            b"\0\x01b\0\x21\0\x0d\0\x20\0\x03",
            &[0, 0, 0, 1],
            &[0, 0, 0, 2, 5, 6],
            &[255, 255, 255, 255],
        ]
        .concat();
        let row = vec![Some(Bytes::from_static(&[5, 6])), None];
        let next = Some(Bytes::from_static(&[9]));
        assert_eq!(
            parse(&frame(0, 8, &rows)).unwrap(),
            Answer::Rows(vec![row], next)
        );
        for cut in 0..rows.len() {
            assert!(parse(&frame(0, 8, &rows[..cut])).is_err(), "{cut}");
        }
        let many = [&[0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 0][..], &[255; 4]].concat();
        for bad in [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            &frame(COMPRESSED, 2, b""),
            &frame(0, 1, b""),
            &frame(0, 8, &[0, 0, 0, 9]),
            &frame(0, 8, &many),
            &frame(0, 8, &[0, 0, 0, 2, 0, 0, 0, 1, 127, 0, 0, 0]),
            &[REPLY, 0, 0, 7, 2, 127, 255, 255, 255],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
