//! A connection to a Redis server.

use std::borrow::Cow;
use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::reply::{self, Reply};
use crate::backend::chunk_store::address::RedisServer;

/// For a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// For each part of a reply, or of what is sent.
const ANSWER: Duration = Duration::from_secs(60);
/// Bytes of a file with a password.
const MAX_PASSWORD: u64 = 4096;

/// Arguments of a command, the first being its name.
pub type Command<'a> = Vec<Cow<'a, [u8]>>;

/// Whether an error is one of TLS.
pub fn is_tls(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|error| error.is::<rustls::Error>())
}

/// A command of text.
pub fn command(words: &[&str]) -> Command<'static> {
    let words = words
        .iter()
        .map(|word| Cow::Owned(word.as_bytes().to_vec()));
    words.collect()
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.read(buffer),
            Stream::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.write(bytes),
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.flush(),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}

/// A connection; after an error it is of no use.
pub struct Connection(BufReader<Stream>);

impl Connection {
    /// Connects, and says who this is.
    ///
    /// # Errors
    /// Those of the connection; `PermissionDenied` with what the server says.
    pub fn open(server: &RedisServer) -> io::Result<Connection> {
        let tcp = connect(&server.host, server.port)?;
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(ANSWER))?;
        tcp.set_write_timeout(Some(ANSWER))?;
        let stream = match server.tls {
            true => Stream::Tls(Box::new(tls(&server.host, tcp)?)),
            false => Stream::Plain(tcp),
        };
        let mut connection = Connection(BufReader::with_capacity(64 << 10, stream));
        let mut greeting = Vec::new();
        match (password(server)?, &server.user) {
            (Some(password), Some(user)) => greeting.push(command(&["AUTH", user, &password])),
            (Some(password), None) => greeting.push(command(&["AUTH", &password])),
            (None, Some(user)) => {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!("there is no password for the user {user}"),
                ));
            }
            (None, None) => {}
        }
        if server.database > 0 {
            greeting.push(command(&["SELECT", &server.database.to_string()]));
        }
        for reply in connection.call(&greeting, 64)? {
            if let Reply::Error(why) = reply {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
        }
        Ok(connection)
    }

    /// Sends commands together; their replies, in order, have values of at most `most` bytes.
    ///
    /// # Errors
    /// Those of the connection; any of the commands may have been done.
    pub fn call(&mut self, commands: &[Command<'_>], most: usize) -> io::Result<Vec<Reply>> {
        let mut bytes = Vec::new();
        for command in commands {
            write!(bytes, "*{}\r\n", command.len())?;
            for word in command {
                write!(bytes, "${}\r\n", word.len())?;
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        let stream = self.0.get_mut();
        stream.write_all(&bytes)?;
        stream.flush()?;
        drop(bytes);
        let replies = commands.iter().map(|_| reply::read(&mut self.0, most));
        replies.collect()
    }
}

/// Tries each address of a host.
fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn tls(host: &str, tcp: TcpStream) -> io::Result<StreamOwned<ClientConnection, TcpStream>> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "this host has no certificates to check the server by (SSL_CERT_FILE names some)",
        ));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let session = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    Ok(StreamOwned::new(session, tcp))
}

/// The password, from its file or from where `redis-cli` looks for it.
fn password(server: &RedisServer) -> io::Result<Option<String>> {
    let Some(path) = &server.password_file else {
        let password = std::env::var("REDISCLI_AUTH").ok();
        return Ok(password.filter(|password| !password.is_empty()));
    };
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_PASSWORD).read_to_string(&mut text))
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    Ok(Some(text.lines().next().unwrap_or_default().to_owned()))
}
