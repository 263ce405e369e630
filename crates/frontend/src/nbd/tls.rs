//! TLS 1.3 over a blocking socket, with receiving and sending at the same time.
//!
//! One lock protects the TLS state; it is never held while the socket blocks. Ciphertext must be sent in the order in
//! which it was produced, so only one thread at a time sends (ensured by the outbox).

use std::io::{self, IoSlice, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::error::NbdError;
use super::socket::Socket;

/// Ciphertext produced, or received, at a time (bytes).
const PORTION: usize = 256 << 10;

/// A server's certificate, and its authorities for clients.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    clients_proven: bool,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls")
            .field("clients_proven", &self.clients_proven)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// From PEM files: a certificate chain, its private key, and, if clients must present a certificate, the
    /// authorities that may have signed it. TLS 1.3 only.
    ///
    /// # Errors
    /// [`NbdError::Tls`], which names the file.
    pub fn from_files(
        certificate: &Path,
        key: &Path,
        client_ca: Option<&Path>,
    ) -> Result<Self, NbdError> {
        let chain = certificates(certificate)?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| bad(key, e))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| bad(certificate, e))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(path)? {
                    roots.add(authority).map_err(|e| bad(path, e))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                        .build()
                        .map_err(|e| bad(path, e))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder
            .with_single_cert(chain, private)
            .map_err(|e| bad(certificate, e))?;
        // A client that only writes never reads tickets, and closing with them unread would reset the connection.
        config.send_tls13_tickets = 0;
        Ok(Self {
            config: Arc::new(config),
            clients_proven: client_ca.is_some(),
        })
    }

    /// Whether clients must present a certificate.
    #[must_use]
    pub fn clients_proven(&self) -> bool {
        self.clients_proven
    }
}

fn bad(path: &Path, why: impl std::fmt::Display) -> NbdError {
    NbdError::Tls {
        path: PathBuf::from(path),
        why: why.to_string(),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, NbdError> {
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|e| bad(path, e))?;
    match found.is_empty() {
        true => Err(bad(path, "no certificate in it")),
        false => Ok(found),
    }
}

/// A socket with TLS.
pub(super) struct TlsStream {
    socket: Arc<Socket>,
    state: Mutex<ServerConnection>,
    /// Ciphertext received and not yet decrypted; used by the receiver only.
    received: Mutex<Received>,
    /// Ciphertext about to be sent; used by the sender only.
    outgoing: Mutex<Vec<u8>>,
}

struct Received {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl TlsStream {
    /// Performs the TLS handshake within a deadline. `early`: bytes received after the option that requested TLS.
    pub(super) fn accept(
        socket: Arc<Socket>,
        tls: &Tls,
        early: &[u8],
        deadline: Instant,
    ) -> io::Result<Self> {
        let mut connection =
            ServerConnection::new(Arc::clone(&tls.config)).map_err(io::Error::other)?;
        connection.set_buffer_limit(None);
        let mut received = Received {
            bytes: vec![0; PORTION.max(early.len())],
            start: 0,
            end: early.len(),
        };
        received.bytes[..early.len()].copy_from_slice(early);
        let flush = |connection: &mut ServerConnection| -> io::Result<()> {
            let mut out = Vec::new();
            while connection.wants_write() {
                connection.write_tls(&mut out)?;
            }
            socket.send(&mut [IoSlice::new(&out)])
        };
        while connection.is_handshaking() {
            if received.start == received.end {
                let left = deadline.saturating_duration_since(Instant::now());
                if left == Duration::ZERO {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                socket.receive_within(left)?;
                received.start = 0;
                received.end = socket.receive(&mut received.bytes)?;
                if received.end == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            let taken = received.give(&mut connection);
            // Send the alert, which says for example what is wrong with the peer's certificate.
            flush(&mut connection)?;
            taken?;
        }
        Ok(Self {
            socket,
            state: Mutex::new(connection),
            received: Mutex::new(received),
            outgoing: Mutex::default(),
        })
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut received = self.received.lock();
        loop {
            {
                let mut state = self.state.lock();
                match state.reader().read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return done,
                }
                if received.start < received.end {
                    received.give(&mut state)?;
                    continue;
                }
            }
            received.start = 0;
            received.end = 0;
            let count = self.socket.receive(&mut received.bytes)?;
            if count == 0 {
                // No close_notify: no matter, since every request has a length.
                return Ok(0);
            }
            received.end = count;
        }
    }

    pub(super) fn send(&self, slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut outgoing = self.outgoing.lock();
        for slice in slices.iter() {
            for portion in slice.chunks(PORTION) {
                let mut state = self.state.lock();
                state.writer().write_all(portion)?;
                while state.wants_write() {
                    state.write_tls(&mut *outgoing)?;
                }
                drop(state);
                if outgoing.len() >= PORTION {
                    self.socket.send(&mut [IoSlice::new(&outgoing)])?;
                    outgoing.clear();
                }
            }
        }
        self.socket.send(&mut [IoSlice::new(&outgoing)])?;
        outgoing.clear();
        outgoing.shrink_to(PORTION);
        Ok(())
    }

    pub(super) fn close_notify(&self) {
        let mut out = Vec::new();
        {
            let mut state = self.state.lock();
            state.send_close_notify();
            while state.wants_write() && state.write_tls(&mut out).is_ok() {}
        }
        let _ = self.socket.send(&mut [IoSlice::new(&out)]);
    }
}

impl Received {
    /// Passes the received bytes to the TLS state.
    fn give(&mut self, connection: &mut ServerConnection) -> io::Result<()> {
        let mut rest = &self.bytes[self.start..self.end];
        let count = connection.read_tls(&mut rest)?;
        self.start += count;
        connection
            .process_new_packets()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(())
    }
}
