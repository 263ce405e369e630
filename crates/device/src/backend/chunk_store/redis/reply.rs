//! Replies of a Redis server (RESP2). The server is not trusted: every length is checked before it is allocated.

use std::io::{self, BufRead, Read};

use bytes::Bytes;

/// Bytes of a line: a status, an error, a number.
const MAX_LINE: u64 = 64 << 10;
/// Elements of an array.
const MAX_ELEMENTS: i64 = 1 << 14;
/// Arrays within arrays.
const MAX_DEPTH: u32 = 4;

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A status.
    Status(String),
    /// An error, beginning with its kind.
    Error(String),
    /// A number.
    Number(i64),
    /// A value; none if there is none.
    Value(Option<Bytes>),
    /// Several; none if there are none.
    Many(Option<Vec<Reply>>),
}

impl Reply {
    /// A value as text.
    #[cfg(feature = "redis")]
    pub fn text(&self) -> Option<&str> {
        match self {
            Reply::Status(text) => Some(text),
            Reply::Value(Some(bytes)) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The elements of an array; none for anything else.
    #[cfg(feature = "redis")]
    pub fn elements(&self) -> &[Reply] {
        match self {
            Reply::Many(Some(elements)) => elements,
            _ => &[],
        }
    }
}

fn strange(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads a reply whose values have at most `most` bytes.
///
/// # Errors
/// `InvalidData` for what is none; `UnexpectedEof`; those of the connection.
pub fn read(from: &mut impl BufRead, most: usize) -> io::Result<Reply> {
    read_at(from, most, 0)
}

fn read_at(from: &mut impl BufRead, most: usize, depth: u32) -> io::Result<Reply> {
    let line = line(from)?;
    let kind = line.chars().next().unwrap_or(' ');
    let rest = line.get(1..).unwrap_or_default();
    let number = || rest.parse::<i64>().map_err(|_| strange("a number is none"));
    match kind {
        '+' => Ok(Reply::Status(rest.to_owned())),
        '-' => Ok(Reply::Error(rest.to_owned())),
        ':' => Ok(Reply::Number(number()?)),
        '$' => match number()? {
            -1 => Ok(Reply::Value(None)),
            length => {
                let length = usize::try_from(length)
                    .ok()
                    .filter(|length| *length <= most);
                let length = length.ok_or_else(|| strange("a value is longer than was written"))?;
                let mut value = vec![0; length + 2];
                from.read_exact(&mut value)?;
                match value.split_off(length).as_slice() {
                    b"\r\n" => Ok(Reply::Value(Some(value.into()))),
                    _ => Err(strange("a value has another length than it says")),
                }
            }
        },
        '*' => match number()? {
            -1 => Ok(Reply::Many(None)),
            count if !(0..=MAX_ELEMENTS).contains(&count) || depth == MAX_DEPTH => {
                Err(strange("an array is too large"))
            }
            count => {
                let mut elements = Vec::new();
                for _ in 0..count {
                    elements.push(read_at(from, most, depth + 1)?);
                }
                Ok(Reply::Many(Some(elements)))
            }
        },
        _ => Err(strange("it is no reply of Redis")),
    }
}

fn line(from: &mut impl BufRead) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes)?;
    if bytes.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match bytes.strip_suffix(b"\r\n") {
        Some(line) => Ok(String::from_utf8_lossy(line).into_owned()),
        None => Err(strange("a line does not end")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> io::Result<Reply> {
        read(&mut io::Cursor::new(bytes), 8)
    }

    #[test]
    fn replies_and_what_is_none() {
        assert_eq!(parse(b"+OK\r\n").unwrap(), Reply::Status("OK".into()));
        assert_eq!(
            parse(b"-ERR no\r\n").unwrap(),
            Reply::Error("ERR no".into())
        );
        assert_eq!(parse(b":-7\r\n").unwrap(), Reply::Number(-7));
        assert_eq!(parse(b"$-1\r\n").unwrap(), Reply::Value(None));
        let value = parse(b"$4\r\na\r\nb\r\n").unwrap();
        assert_eq!(value, Reply::Value(Some(Bytes::from_static(b"a\r\nb"))));
        let many = parse(b"*2\r\n:1\r\n*1\r\n$1\r\nx\r\n").unwrap();
        assert_eq!(many.elements()[1].elements()[0].text(), Some("x"));
        for bad in [
            &b""[..],
            b"+OK",
            b"+OK\n",
            b"$9\r\n123456789\r\n",
            b"$2147483648\r\n",
            b"$99999999999999999999\r\n",
            b"$-2\r\n",
            b"$2\r\nabc\r\n",
            b"*2\r\n:1\r\n",
            b"*65537\r\n",
            b"*-2\r\n",
            b":x\r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        ] {
            assert!(parse(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
