//! The server: listeners, open connections, and shutdown.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::check::Facts;
use super::connection::{self, Ended};
use super::counters::{Counts, add};
use super::error::NbdError;
use super::negotiate::{Offer, Session};
use super::options::{Export, Served, ServerOptions};
use super::outbox::left;
use super::socket::Socket;
use super::unix;
use super::wire::{MAX_STRING, name};

/// Maximum exports of one server.
const MAX_EXPORTS: usize = 1024;
/// How long a severed connection has to notice.
const CUT: Duration = Duration::from_millis(500);
/// Pause of the listener when accept fails.
const REST: Duration = Duration::from_millis(100);

/// State shared by the threads of a server.
struct Shared {
    served: Served,
    connections: Mutex<HashMap<u64, Arc<Control>>>,
    next: AtomicU64,
}

/// Control of a connection from outside.
struct Control {
    /// The listener that accepted it; 0: none.
    listener: u64,
    socket: Arc<Socket>,
    stopping: AtomicBool,
    done: Mutex<bool>,
    ended: Condvar,
}

impl Control {
    /// Asks it to end once requests in flight are done.
    fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.socket.stop_receiving();
    }

    fn wait(&self, deadline: Instant) -> bool {
        let mut done = self.done.lock();
        while !*done && !left(deadline).is_zero() {
            self.ended.wait_for(&mut done, left(deadline));
        }
        *done
    }
}

/// An NBD server: its exports and connections. Clones refer to the same server.
///
/// It serves until it is stopped, even when the last clone is dropped: connections keep the state alive.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

/// What was negotiated for a connection that has no handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Negotiated {
    /// Reads are answered in chunks (the kernel's client does not support them).
    pub structured_replies: bool,
    /// The client may request `BLOCK_STATUS` for `base:allocation`, with context id 1.
    pub allocation: bool,
}

impl Server {
    /// A server of these exports. It is idle until it is given a socket to listen on, or a connection.
    ///
    /// # Errors
    /// [`NbdError::Export`]: a duplicate or invalid name, a device that cannot be exported, too many exports.
    pub fn new(exports: Vec<Export>, options: ServerOptions) -> Result<Self, NbdError> {
        let mut offers: Vec<Offer> = Vec::new();
        for export in &exports {
            let bad = |why: String| NbdError::Export {
                name: export.name.clone(),
                why,
            };
            for text in [&export.name, &export.description] {
                if name(text.as_bytes()).is_none() {
                    return Err(bad(format!(
                        "names and descriptions have no NUL and at most {MAX_STRING} bytes"
                    )));
                }
            }
            if offers.iter().any(|offer| offer.name == export.name) {
                return Err(bad("another export has this name".into()));
            }
            if offers.len() == MAX_EXPORTS {
                return Err(bad(format!("a server has at most {MAX_EXPORTS} exports")));
            }
            let device = &export.device;
            let facts =
                Facts::new(device.size(), device.capabilities(), export.read_only).map_err(bad)?;
            offers.push(Offer {
                name: export.name.clone(),
                description: export.description.clone(),
                facts,
            });
        }
        Ok(Self {
            shared: Arc::new(Shared {
                served: Served {
                    exports,
                    offers,
                    options,
                    counters: Arc::default(),
                },
                connections: Mutex::default(),
                next: AtomicU64::new(1),
            }),
        })
    }

    /// An export's properties as sent to clients: size, flags and block sizes.
    #[must_use]
    pub fn facts(&self, export: &str) -> Option<Facts> {
        let offer = self
            .shared
            .served
            .offers
            .iter()
            .find(|o| o.name == export)?;
        Some(offer.facts)
    }

    /// Counters since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.served.counters.now()
    }

    /// Listens on a Unix socket. A stale socket file is replaced.
    ///
    /// # Errors
    /// [`NbdError::InUse`] if another server is listening, [`NbdError::Bind`] otherwise.
    pub fn listen_unix(&self, path: &Path) -> Result<Listening, NbdError> {
        let (listener, file) = unix::bind(path)?;
        self.listen(
            Acceptor::Unix(listener),
            Address::Unix(path.into()),
            Some(file),
        )
    }

    /// Listens on a TCP address; port 0: any free one.
    ///
    /// # Errors
    /// [`NbdError::Open`] for an address reachable by others when clients need not authenticate, [`NbdError::Bind`]
    /// otherwise.
    pub fn listen_tcp(&self, address: SocketAddr) -> Result<Listening, NbdError> {
        let tls = self.shared.served.options.tls.as_ref();
        if !address.ip().is_loopback() && !tls.is_some_and(|tls| tls.clients_proven()) {
            return Err(NbdError::Open(address));
        }
        let bad = |source| NbdError::Bind {
            address: format!("{address}"),
            source,
        };
        let listener = TcpListener::bind(address).map_err(bad)?;
        let address = listener.local_addr().map_err(bad)?;
        self.listen(Acceptor::Tcp(listener), Address::Tcp(address), None)
    }

    fn listen(
        &self,
        acceptor: Acceptor,
        address: Address,
        file: Option<unix::SocketFile>,
    ) -> Result<Listening, NbdError> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let acceptor = Arc::new(acceptor);
        let stopping = Arc::new(AtomicBool::new(false));
        let thread = {
            let (server, acceptor, stopping) =
                (self.clone(), Arc::clone(&acceptor), Arc::clone(&stopping));
            std::thread::Builder::new()
                .name("nbd-accept".into())
                .spawn(move || server.accept(id, &acceptor, &stopping))
                .map_err(|source| NbdError::Bind {
                    address: address.to_string(),
                    source,
                })?
        };
        Ok(Listening {
            server: self.clone(),
            id,
            address,
            acceptor,
            stopping,
            rest: Mutex::new(Some((thread, file))),
        })
    }

    fn accept(&self, id: u64, acceptor: &Acceptor, stopping: &AtomicBool) {
        loop {
            let socket = acceptor.accept();
            if stopping.load(Ordering::Acquire) {
                return;
            }
            let taken = socket.and_then(|socket| {
                let plain =
                    matches!(acceptor, Acceptor::Unix(_)) && self.shared.served.options.plain_unix;
                self.begin(id, socket, move |shared, control| {
                    connection::serve(&shared.served, &control.socket, plain, &control.stopping)
                })
            });
            if let Err(error) = taken
                && error.kind() != std::io::ErrorKind::ConnectionRefused
            {
                tracing::warn!(%error, "nbd: cannot accept a connection");
                std::thread::sleep(REST);
            }
        }
    }

    /// Serves an open connection, starting with the handshake, on a thread of its own.
    ///
    /// # Errors
    /// [`NbdError::Connection`]: the maximum number of connections is reached, or no thread can be started.
    pub fn serve_stream(&self, stream: UnixStream) -> Result<Connection, NbdError> {
        let plain = self.shared.served.options.plain_unix;
        self.begin(0, stream.into(), move |shared, control| {
            connection::serve(&shared.served, &control.socket, plain, &control.stopping)
        })
        .map_err(NbdError::Connection)
    }

    /// Serves a connection whose client sends requests at once, as the kernel's does: the outcome of the handshake is
    /// given. Without TLS.
    ///
    /// # Errors
    /// [`NbdError::Export`] for an unknown export, and as [`Self::serve_stream`].
    pub fn serve_transmission(
        &self,
        stream: UnixStream,
        export: &str,
        negotiated: Negotiated,
    ) -> Result<Connection, NbdError> {
        let place = self
            .shared
            .served
            .offers
            .iter()
            .position(|o| o.name == export);
        let Some(place) = place else {
            return Err(NbdError::Export {
                name: export.into(),
                why: "there is no such export".into(),
            });
        };
        let session = Session {
            export: place,
            structured: negotiated.structured_replies || negotiated.allocation,
            allocation: negotiated.allocation,
        };
        self.begin(0, stream.into(), move |shared, control| {
            connection::serve_requests(&shared.served, &control.socket, session, &control.stopping)
        })
        .map_err(NbdError::Connection)
    }

    /// Starts a connection's thread, if the limit permits.
    fn begin(
        &self,
        listener: u64,
        socket: Socket,
        serve: impl FnOnce(&Shared, &Control) -> Result<(), Ended> + Send + 'static,
    ) -> std::io::Result<Connection> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let control = Arc::new(Control {
            listener,
            socket: Arc::new(socket),
            stopping: AtomicBool::new(false),
            done: Mutex::new(false),
            ended: Condvar::new(),
        });
        {
            let mut connections = self.shared.connections.lock();
            if connections.len() >= self.shared.served.options.max_connections {
                add(&self.shared.served.counters.refused, 1);
                return Err(std::io::Error::new(
                    std::io::ErrorKind::ConnectionRefused,
                    "the connection limit is reached",
                ));
            }
            connections.insert(id, Arc::clone(&control));
        }
        add(&self.shared.served.counters.connections, 1);
        add(&self.shared.served.counters.open, 1);
        let guard = Registered {
            shared: Arc::clone(&self.shared),
            control: Arc::clone(&control),
            id,
        };
        std::thread::Builder::new()
            .name("nbd-client".into())
            .spawn(move || {
                // The connection ends and is unregistered even on a panic.
                let guard = guard;
                if let Err(error) = serve(&guard.shared, &guard.control) {
                    tracing::debug!(%error, "nbd: a connection ended");
                }
            })?;
        Ok(Connection { control })
    }

    /// Ends every connection: requests in flight complete and are answered within the drain time, the rest is severed.
    /// Listeners continue. Returns the number severed.
    pub fn stop(&self) -> usize {
        self.stop_those(|_| true, self.shared.served.options.drain)
    }

    /// Ends all connections at once; requests that wait get no answer.
    pub fn cut(&self) {
        for control in self.shared.connections.lock().values() {
            control.socket.cut();
        }
    }

    fn stop_those(&self, which: impl Fn(&Control) -> bool, timeout: Duration) -> usize {
        let chosen: Vec<_> = {
            let connections = self.shared.connections.lock();
            let all = connections.values();
            all.filter(|c| which(c)).map(Arc::clone).collect()
        };
        for control in &chosen {
            control.stop();
        }
        let deadline = Instant::now() + timeout;
        let late: Vec<_> = chosen.iter().filter(|c| !c.wait(deadline)).collect();
        for control in &late {
            control.socket.cut();
        }
        let deadline = Instant::now() + CUT;
        for control in &late {
            control.wait(deadline);
        }
        late.len()
    }
}

/// Unregisters a connection when its thread ends.
struct Registered {
    shared: Arc<Shared>,
    control: Arc<Control>,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.control.socket.cut();
        self.shared.connections.lock().remove(&self.id);
        self.shared
            .served
            .counters
            .open
            .fetch_sub(1, Ordering::Relaxed);
        *self.control.done.lock() = true;
        self.control.ended.notify_all();
    }
}

/// A connection being served. It continues when this is dropped.
pub struct Connection {
    control: Arc<Control>,
}

impl Connection {
    /// Whether it is still being served.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !*self.control.done.lock()
    }

    /// Waits for its end; false if it continues after `timeout`.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.control.wait(Instant::now() + timeout)
    }

    /// Ends it: requests in flight complete and are answered within `timeout`; then it is severed. False if it had to
    /// be severed.
    pub fn stop(&self, timeout: Duration) -> bool {
        self.control.stop();
        if self.control.wait(Instant::now() + timeout) {
            return true;
        }
        self.control.socket.cut();
        self.control.wait(Instant::now() + CUT);
        false
    }
}

/// The address a server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket file.
    Unix(PathBuf),
    /// An address and port.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

enum Acceptor {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Acceptor {
    fn accept(&self) -> std::io::Result<Socket> {
        match self {
            Self::Unix(listener) => listener.accept().map(|(stream, _)| stream.into()),
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| stream.into()),
        }
    }

    /// Wakes the current and all later callers of [`Self::accept`].
    fn close(&self) {
        let how = rustix::net::Shutdown::Both;
        let _ = match self {
            Self::Unix(listener) => rustix::net::shutdown(listener, how),
            Self::Tcp(listener) => rustix::net::shutdown(listener, how),
        };
    }
}

/// A listening socket, until this is stopped or dropped. Dropping severs its connections; stopping lets them finish
/// requests in flight.
pub struct Listening {
    server: Server,
    id: u64,
    address: Address,
    acceptor: Arc<Acceptor>,
    stopping: Arc<AtomicBool>,
    rest: Mutex<Option<(std::thread::JoinHandle<()>, Option<unix::SocketFile>)>>,
}

impl Listening {
    /// The address: for TCP with the port that was assigned.
    #[must_use]
    pub fn local_addr(&self) -> &Address {
        &self.address
    }

    /// Stops listening, removes the socket file, and ends the connections accepted here: requests in flight complete
    /// and are answered within [`ServerOptions::drain`], the rest is severed. Returns the number severed.
    pub fn stop(&self) -> usize {
        self.stop_within(self.server.shared.served.options.drain)
    }

    fn stop_within(&self, timeout: Duration) -> usize {
        let Some((thread, file)) = self.rest.lock().take() else {
            return 0;
        };
        self.stopping.store(true, Ordering::Release);
        // The file goes first: later clients find no server instead of an unresponsive one.
        drop(file);
        self.acceptor.close();
        if thread.join().is_err() {
            tracing::error!("nbd: the listener panicked");
        }
        let id = self.id;
        self.server.stop_those(|c| c.listener == id, timeout)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop_within(Duration::ZERO);
    }
}
