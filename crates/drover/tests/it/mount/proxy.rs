//! A TCP proxy as the link between sites; it can be cut, stalled, slowed and healed.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Queue length in pieces, per direction and connection.
const QUEUE: usize = 256;

/// State of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Forward,
    /// Existing and new connections are closed at once.
    Cut,
    /// Connections are accepted but carry no data.
    Stall,
}

struct State {
    mode: Mode,
    delay: Duration,
    target: Option<SocketAddr>,
    open: Vec<TcpStream>,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    to_near: AtomicU64,
    to_far: AtomicU64,
}

/// The proxy. Dropping it closes all its connections.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub fn new() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                mode: Mode::Forward,
                delay: Duration::ZERO,
                target: None,
                open: Vec::new(),
                stop: false,
            }),
            changed: Condvar::new(),
            to_near: AtomicU64::new(0),
            to_far: AtomicU64::new(0),
        });
        let inner = Arc::clone(&shared);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if inner.state.lock().unwrap().stop {
                    return;
                }
                inner.accept(near);
            }
        });
        Proxy { address, shared }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the target of new connections.
    pub fn lead_to(&self, target: SocketAddr) {
        self.shared.state.lock().unwrap().target = Some(target);
    }

    pub fn cut(&self) {
        self.set(Mode::Cut);
        self.shared.close_all();
    }

    pub fn stall(&self) {
        self.set(Mode::Stall);
    }

    /// Forwards again. Stalled connections continue.
    pub fn heal(&self) {
        self.set(Mode::Forward);
    }

    /// Sets the one-way latency.
    pub fn delay(&self, delay: Duration) {
        self.shared.state.lock().unwrap().delay = delay;
    }

    /// Bytes forwarded to the near side.
    pub fn to_near(&self) -> u64 {
        self.shared.to_near.load(Ordering::Relaxed)
    }

    /// Bytes forwarded to the remote site.
    pub fn to_far(&self) -> u64 {
        self.shared.to_far.load(Ordering::Relaxed)
    }

    fn set(&self, mode: Mode) {
        self.shared.state.lock().unwrap().mode = mode;
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap().stop = true;
        self.cut();
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn close_all(&self) {
        for stream in self.state.lock().unwrap().open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn accept(self: &Arc<Self>, near: TcpStream) {
        let mut state = self.state.lock().unwrap();
        if state.mode == Mode::Cut {
            return;
        }
        let Some(far) = state.target.and_then(|t| TcpStream::connect(t).ok()) else {
            return;
        };
        for (from, to, is_to_far) in [(&near, &far, true), (&far, &near, false)] {
            let _ = from.set_nodelay(true);
            let (put, take) = sync_channel(QUEUE);
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let (reads, writes) = (Arc::clone(self), Arc::clone(self));
            std::thread::spawn(move || reads.read(from, &put));
            std::thread::spawn(move || writes.write(to, &take, is_to_far));
        }
        state.open.push(near);
        state.open.push(far);
    }

    fn read(&self, mut from: TcpStream, put: &SyncSender<(Instant, Vec<u8>)>) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            let due = Instant::now() + self.state.lock().unwrap().delay;
            if put.send((due, buffer[..n].to_vec())).is_err() {
                return;
            }
        }
    }

    fn write(&self, mut to: TcpStream, take: &Receiver<(Instant, Vec<u8>)>, is_to_far: bool) {
        while let Ok((due, piece)) = take.recv() {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let state = self.state.lock().unwrap();
            drop(
                self.changed
                    .wait_while(state, |s| s.mode == Mode::Stall)
                    .unwrap(),
            );
            if to.write_all(&piece).is_err() {
                break;
            }
            let count = if is_to_far {
                &self.to_far
            } else {
                &self.to_near
            };
            count.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        let _ = to.shutdown(Shutdown::Both);
    }
}
