//! Requests in flight on one connection: sent by any thread, answered by the thread that receives.

use std::collections::HashMap;
use std::io::{self, BufReader, IoSlice};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use drover_core::nbd::{Request, command};
use parking_lot::{Condvar, Mutex};

use super::error::{Fault, silent};
use super::replies::{Content, MAX_STATUS_BYTES, Outcome, Replies};
use super::socket::Socket;

/// Maximum requests in flight.
const MAX_REQUESTS: usize = 128;
/// Maximum bytes of their data.
const MAX_BYTES: u64 = 64 << 20;
/// Receive buffer, for heads (bytes); data bypasses it.
const BUFFER: usize = 16 << 10;

/// A connection in the transmission phase. Dropping it ends it.
pub struct Calls {
    shared: Arc<Shared>,
    receiver: Option<JoinHandle<()>>,
}

/// Locks: `sending`, then `table`, then a slot's; `table` and slots are not held during I/O.
struct Shared {
    server: String,
    deadline: Duration,
    socket: Socket,
    sending: Mutex<()>,
    table: Mutex<Table>,
    /// A request has left the table.
    room: Condvar,
}

#[derive(Default)]
struct Table {
    waiting: HashMap<u64, (Request, Arc<Slot>)>,
    /// Of the data of those waiting.
    bytes: u64,
    /// The cookie of the last request.
    last: u64,
    /// Why there are no more requests.
    ended: Option<DeviceError>,
}

/// Where the outcome of one request is put.
#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Result<Outcome, DeviceError>>>,
    done: Condvar,
}

impl Slot {
    fn put(&self, outcome: Result<Outcome, DeviceError>) {
        *self.outcome.lock() = Some(outcome);
        self.done.notify_one();
    }

    /// Whether there is an outcome at the deadline.
    fn is_done_by(&self, deadline: Instant) -> bool {
        let mut outcome = self.outcome.lock();
        while outcome.is_none() && !self.done.wait_until(&mut outcome, deadline).timed_out() {}
        outcome.is_some()
    }

    fn take(&self) -> Result<Outcome, DeviceError> {
        let mut outcome = self.outcome.lock();
        loop {
            match outcome.take() {
                Some(outcome) => return outcome,
                None => self.done.wait(&mut outcome),
            }
        }
    }
}

/// Bytes of data that a request carries in either direction, at most.
fn bytes(request: &Request) -> u64 {
    match request.command {
        command::READ | command::WRITE => request.length.into(),
        command::BLOCK_STATUS => MAX_STATUS_BYTES,
        _ => 0,
    }
}

impl Shared {
    /// Ends the connection: every request in flight fails at once, and every later one.
    fn end(&self, fault: Fault) {
        let waiting = {
            let mut table = self.table.lock();
            let error = table
                .ended
                .get_or_insert_with(|| fault.ended(&self.server))
                .clone();
            table.bytes = 0;
            let waiting = std::mem::take(&mut table.waiting);
            waiting.into_values().map(move |of| (of.1, error.clone()))
        };
        self.socket.cut();
        self.room.notify_all();
        for (slot, error) in waiting {
            slot.put(Err(error));
        }
    }

    fn receive(&self, mut replies: Replies) {
        let mut input = BufReader::with_capacity(BUFFER, &self.socket);
        let fault = loop {
            let find = |cookie| Some(self.table.lock().waiting.get(&cookie)?.0);
            match replies.next(&mut input, find) {
                Ok(None) => {}
                Ok(Some((cookie, outcome))) => self.finish(cookie, outcome),
                Err(fault) => break fault,
            }
        };
        tracing::debug!(
            server = self.server,
            ?fault,
            "nbd: the connection has ended"
        );
        self.end(fault);
    }

    fn finish(&self, cookie: u64, outcome: Outcome) {
        let mut table = self.table.lock();
        let Some((request, slot)) = table.waiting.remove(&cookie) else {
            // The connection has ended meanwhile.
            return;
        };
        table.bytes -= bytes(&request);
        drop(table);
        self.room.notify_all();
        slot.put(Ok(outcome));
    }

    /// Waits for room, and enters the request with a cookie of its own.
    fn enter(&self, request: &mut Request) -> Result<Arc<Slot>, DeviceError> {
        let more = bytes(request);
        let deadline = Instant::now() + self.deadline;
        let mut table = self.table.lock();
        loop {
            if let Some(error) = &table.ended {
                return Err(error.clone());
            }
            let fits = table.bytes == 0 || table.bytes + more <= MAX_BYTES;
            if fits && table.waiting.len() < MAX_REQUESTS {
                break;
            }
            if self.room.wait_until(&mut table, deadline).timed_out() {
                return Err(DeviceError::Unavailable(format!(
                    "{}: too many requests wait for an answer",
                    self.server
                )));
            }
        }
        table.bytes += more;
        table.last += 1;
        request.cookie = table.last;
        let slot = Arc::new(Slot::default());
        let entry = (*request, Arc::clone(&slot));
        table.waiting.insert(request.cookie, entry);
        Ok(slot)
    }

    fn send(&self, request: &Request, payload: &[u8], deadline: Instant) -> io::Result<()> {
        let Some(_sending) = self.sending.try_lock_until(deadline) else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        let head = request.encode();
        let mut slices = [IoSlice::new(&head), IoSlice::new(payload)];
        self.socket.send(&mut slices, deadline)
    }
}

impl Calls {
    /// Takes over a connection after its negotiation. `deadline` is how long a request waits for room, and then how
    /// long for its answer; after that the connection ends.
    ///
    /// # Errors
    /// When there is no thread.
    pub fn start(
        socket: Socket,
        replies: Replies,
        server: String,
        deadline: Duration,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            server,
            deadline,
            socket,
            sending: Mutex::new(()),
            table: Mutex::default(),
            room: Condvar::new(),
        });
        let receiver = std::thread::Builder::new()
            .name("nbd-receive".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.receive(replies)
            })?;
        Ok(Self {
            shared,
            receiver: Some(receiver),
        })
    }

    /// Does one request; its cookie is chosen here.
    pub fn call(&self, mut request: Request, payload: &[u8]) -> Result<Content, DeviceError> {
        let shared = &self.shared;
        let slot = shared.enter(&mut request)?;
        let deadline = Instant::now() + shared.deadline;
        let late = || Fault::Io(silent(shared.deadline));
        match shared.send(&request, payload, deadline) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut => shared.end(late()),
            Err(error) => shared.end(error.into()),
        }
        if !slot.is_done_by(deadline) {
            // Puts an outcome, unless the thread that receives is about to put another.
            shared.end(late());
        }
        slot.take()?
            .map_err(|failure| failure.of(&shared.server, request.command))
    }

    /// Why the connection has ended, if it has.
    pub fn ended(&self) -> Option<DeviceError> {
        self.shared.table.lock().ended.clone()
    }

    /// The server's name in errors.
    pub fn server(&self) -> &str {
        &self.shared.server
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        let request = Request {
            flags: 0,
            command: command::DISCONNECT,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        // The server may end by itself; nobody waits for it, as no request is in flight.
        let _ = self.shared.send(&request, &[], Instant::now());
        self.shared.socket.cut();
        if let Some(receiver) = self.receiver.take() {
            let _ = receiver.join();
        }
    }
}
