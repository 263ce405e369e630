//! A connection to the server of a store, by TLS where that is asked for.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// For a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// For each part of a reply, or of what is sent.
const ANSWER: Duration = Duration::from_secs(60);
/// Bytes of a file with a password.
const MAX_SMALL_FILE: u64 = 4096;

/// Whether an error is one of TLS.
pub fn is_tls(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|error| error.is::<rustls::Error>())
}

/// The connection.
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// By TLS.
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Connects. With TLS, the server is checked by the certificates of this host.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn open(host: &str, port: u16, by_tls: bool) -> io::Result<Stream> {
        let tcp = connect(host, port)?;
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(ANSWER))?;
        tcp.set_write_timeout(Some(ANSWER))?;
        Ok(match by_tls {
            true => Stream::Tls(Box::new(tls(host, tcp)?)),
            false => Stream::Plain(tcp),
        })
    }
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

/// The text of a small file, one with a password.
///
/// # Errors
/// Those of the file, with its name.
pub fn small_file(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_SMALL_FILE).read_to_string(&mut text))
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    Ok(text)
}
