//! Where an export is: NBD URIs as QEMU and libnbd spell them (the NBD project's `doc/uri.md`).

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

use drover_core::nbd::{MAX_STRING, PORT, name};
use serde::{Deserialize, Serialize};

/// The server and the name of an export.
///
/// Read from `nbd://HOST[:PORT]/EXPORT` (also `nbd+tcp:`), `nbd+unix:///EXPORT?socket=PATH`, and QEMU's older
/// `nbd:HOST:PORT[:exportname=EXPORT]` and `nbd:unix:PATH[:exportname=EXPORT]`; shown as one of the first two.
///
/// ```
/// use drover_device::backend::nbd::NbdAddress;
///
/// let old: NbdAddress = "nbd:unix:/run/web.sock:exportname=sda".parse()?;
/// assert_eq!(old.to_string(), "nbd+unix:///sda?socket=/run/web.sock");
/// # Ok::<(), drover_device::backend::nbd::AddressError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NbdAddress {
    /// Where the server listens.
    pub socket: NbdSocket,
    /// The name of the export; empty for the server's default one.
    pub export: String,
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum NbdSocket {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host, by name or address (an IPv6 address without brackets), and a TCP port.
    Tcp(String, u16),
}

/// Why a text is no address of an export.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no NBD address: {why}; expected nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH"
)]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for NbdAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
        let parsed = match (scheme, rest.strip_prefix("//")) {
            ("nbd" | "nbd+tcp", Some(rest)) => tcp(rest),
            ("nbd+unix", Some(rest)) => unix(rest),
            ("nbd", None) => legacy(rest),
            ("nbds" | "nbds+tcp" | "nbds+unix", _) => Err("TLS is not supported"),
            _ => Err("it has another scheme"),
        };
        let checked = parsed.and_then(|address| match address.socket {
            NbdSocket::Unix(ref path) if path.as_os_str().is_empty() => Err("it names no socket"),
            NbdSocket::Tcp(ref host, _) if !is_host(host) => Err("it names no host"),
            _ if name(address.export.as_bytes()).is_none() => {
                Err("the name of the export is too long")
            }
            _ => Ok(address),
        });
        checked.map_err(|why| AddressError {
            text: text.chars().take(MAX_STRING).collect(),
            why,
        })
    }
}

fn is_host(host: &str) -> bool {
    let usual = |c: char| c.is_alphanumeric() || "-._:%".contains(c);
    !host.is_empty() && host.chars().all(usual)
}

/// What follows `nbd://`.
fn tcp(rest: &str) -> Result<NbdAddress, &'static str> {
    if rest.contains('?') {
        return Err("a TCP address takes no parameters");
    }
    let (server, export) = rest.split_once('/').unwrap_or((rest, ""));
    if server.contains('@') {
        return Err("a user name needs TLS, which is not supported");
    }
    let (host, port) = host_and_port(server)?;
    let host = match host {
        "" => "localhost",
        host => host,
    };
    Ok(NbdAddress {
        socket: NbdSocket::Tcp(host.into(), port.unwrap_or(PORT)),
        export: export_name(export)?,
    })
}

/// What follows `nbd+unix://`.
fn unix(rest: &str) -> Result<NbdAddress, &'static str> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (server, export) = path.split_once('/').unwrap_or((path, ""));
    if !server.is_empty() {
        return Err("a Unix socket has no host: write three slashes");
    }
    let mut socket = None;
    for parameter in query.split('&').filter(|part| !part.is_empty()) {
        match parameter.split_once('=') {
            Some(("socket", path)) if socket.is_none() => socket = Some(unescaped(path)?),
            _ => return Err("`socket` is its only parameter"),
        }
    }
    let socket = socket.ok_or("?socket=PATH is missing")?;
    Ok(NbdAddress {
        socket: NbdSocket::Unix(OsString::from_vec(socket).into()),
        export: export_name(export)?,
    })
}

/// What follows `nbd:` in QEMU's older addresses, in which nothing is escaped.
fn legacy(rest: &str) -> Result<NbdAddress, &'static str> {
    let (server, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    let socket = match server.strip_prefix("unix:") {
        Some(path) => NbdSocket::Unix(path.into()),
        None => match host_and_port(server)? {
            (host, Some(port)) => NbdSocket::Tcp(host.into(), port),
            (_, None) => return Err("the port is missing"),
        },
    };
    Ok(NbdAddress {
        socket,
        export: export.into(),
    })
}

/// `HOST[:PORT]`, with an IPv6 address in brackets.
fn host_and_port(server: &str) -> Result<(&str, Option<u16>), &'static str> {
    let (host, port) = match server.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("a bracket is missing")?;
            match rest.strip_prefix(':') {
                Some(port) => (host, port),
                None if rest.is_empty() => (host, ""),
                None => return Err("the port is not a number"),
            }
        }
        None => server.split_once(':').unwrap_or((server, "")),
    };
    match port {
        "" => Ok((host, None)),
        port => match port.parse() {
            Ok(port @ 1..) => Ok((host, Some(port))),
            _ => Err("the port is not a number"),
        },
    }
}

fn export_name(escaped: &str) -> Result<String, &'static str> {
    if escaped.contains('#') {
        return Err("a `#` is written %23");
    }
    String::from_utf8(unescaped(escaped)?).map_err(|_| "the name of the export is not UTF-8")
}

fn unescaped(text: &str) -> Result<Vec<u8>, &'static str> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let [high, low, tail @ ..] = rest else {
            return Err("a % is written %25");
        };
        let (Some(high), Some(low)) = (digit(*high), digit(*low)) else {
            return Err("a % is written %25");
        };
        bytes.push((high << 4 | low) as u8);
        rest = tail;
    }
    match bytes.contains(&0) {
        true => Err("a name has no NUL"),
        false => Ok(bytes),
    }
}

fn escape(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                write!(f, "{}", char::from(*byte))?;
            }
            _ => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = self.export.as_bytes();
        match &self.socket {
            NbdSocket::Unix(path) => {
                f.write_str("nbd+unix:///")?;
                escape(export, f)?;
                f.write_str("?socket=")?;
                escape(path.as_os_str().as_bytes(), f)
            }
            NbdSocket::Tcp(host, port) => {
                match host.contains(':') {
                    true => write!(f, "nbd://[{host}]:{port}/")?,
                    false => write!(f, "nbd://{host}:{port}/")?,
                }
                escape(export, f)
            }
        }
    }
}

impl TryFrom<String> for NbdAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<NbdAddress> for String {
    fn from(address: NbdAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdAddress {
        NbdAddress {
            socket: NbdSocket::Tcp(host.into(), port),
            export: export.into(),
        }
    }

    fn unix(path: &str, export: &str) -> NbdAddress {
        NbdAddress {
            socket: NbdSocket::Unix(path.into()),
            export: export.into(),
        }
    }

    #[test]
    fn addresses_are_read_as_qemu_and_libnbd_spell_them() {
        for (text, expected) in [
            ("nbd://lyon", tcp("lyon", 10809, "")),
            ("nbd://lyon/", tcp("lyon", 10809, "")),
            ("nbd://lyon:7/sda", tcp("lyon", 7, "sda")),
            ("nbd+tcp://lyon:7/a/b", tcp("lyon", 7, "a/b")),
            ("nbd:///sda", tcp("localhost", 10809, "sda")),
            ("nbd://[::1]:7/sda", tcp("::1", 7, "sda")),
            ("nbd://[fe80::1]//x", tcp("fe80::1", 10809, "/x")),
            (
                "nbd://10.0.0.1/my%20disk",
                tcp("10.0.0.1", 10809, "my disk"),
            ),
            ("nbd+unix:///?socket=/run/a.sock", unix("/run/a.sock", "")),
            ("nbd+unix://?socket=a.sock", unix("a.sock", "")),
            ("nbd+unix:///web?socket=/a%26b", unix("/a&b", "web")),
            ("nbd:lyon:7", tcp("lyon", 7, "")),
            ("nbd:lyon:7:exportname=sda", tcp("lyon", 7, "sda")),
            ("nbd:[::1]:7", tcp("::1", 7, "")),
            ("nbd:unix:/run/a.sock", unix("/run/a.sock", "")),
            ("nbd:unix:/a:exportname=b c", unix("/a", "b c")),
        ] {
            let read: NbdAddress = text.parse().unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(read, expected, "{text}");
            assert_eq!(read.to_string().parse().as_ref(), Ok(&expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused_in_one_line() {
        for (text, why) in [
            ("nbds://lyon/a", "TLS"),
            ("nbd://user@lyon/a", "TLS"),
            ("nbd+unix:///a", "?socket=PATH is missing"),
            ("nbd+unix:///a?socket=", "names no socket"),
            ("nbd+unix://lyon/a?socket=/x", "three slashes"),
            ("nbd+unix:///a?socket=/x&tls=1", "only parameter"),
            ("nbd+unix:///a?socket=/x&socket=/y", "only parameter"),
            ("nbd+unix:///a?socket=/x%00", "no NUL"),
            ("nbd://lyon/a?socket=/x", "no parameters"),
            ("nbd://lyon:0/a", "port"),
            ("nbd://lyon:99999/a", "port"),
            ("nbd://[::1/a", "bracket"),
            ("nbd://[::1]7/a", "port"),
            ("nbd://ly on/a", "names no host"),
            ("nbd://lyon/a%2", "%25"),
            ("nbd://lyon/%ff", "UTF-8"),
            ("nbd://lyon/a#b", "%23"),
            ("nbd:lyon", "port is missing"),
            ("nbd:unix:", "names no socket"),
            ("http://lyon", "scheme"),
            ("", "scheme"),
        ] {
            let error = text.parse::<NbdAddress>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let long = format!("nbd://lyon/{}", "x".repeat(MAX_STRING + 1));
        assert!(long.parse::<NbdAddress>().is_err());
    }

    proptest! {
        #[test]
        fn any_address_is_read_back_as_it_is_shown(
            path in "[^\0]{1,20}", host in "[a-z0-9.-]{1,12}", port in 1u16.., export in "[^\0]{0,20}",
        ) {
            for address in [unix(&path, &export), tcp(&host, port, &export)] {
                let shown = address.to_string();
                prop_assert!(!shown.chars().any(char::is_control), "{}", shown);
                prop_assert_eq!(shown.parse(), Ok(address));
            }
        }

        #[test]
        fn no_text_is_too_odd(text in "(nbd(\\+unix|\\+tcp)?:(//)?)?.{0,30}") {
            let _ = text.parse::<NbdAddress>();
        }
    }
}
