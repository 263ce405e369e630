//! One client connection: the handshake, then requests until the client disconnects.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, Extent};

use super::buffer::{Buffer, Buffers};
use super::check::check;
use super::counters::add;
use super::execute::{Executor, MAX_STATUS};
use super::input::{Input, Next};
use super::negotiate::{Negotiation, Security, Session, Step};
use super::options::Served;
use super::outbox::{Outbox, left};
use super::socket::Socket;
use super::tls::TlsStream;
use super::transport::Transport;
use super::wire::{self, OptionHeader, Request, command, flag, handshake, option, reply};
use crate::budget::{Budget, Permit};
use crate::pool::Pool;

/// The longest option that is processed (bytes).
const MAX_OPTION: u32 = 64 << 10;
/// The longest option that is skipped; a longer one ends the connection (bytes).
const MAX_SCRAP: u32 = 1 << 20;
/// Maximum options in one handshake.
const MAX_OPTIONS: usize = 256;
/// Maximum bytes of options in one handshake.
const MAX_OPTION_BYTES: u64 = 4 << 20;
/// How often an idle connection checks its state.
const TICK: Duration = Duration::from_secs(5);
/// Replies that the receiving thread collects for one send (bytes): more would exceed its CPU caches.
const CORK: usize = 256 << 10;
/// A non-blocking write of this length is still given to another thread when the client has sent more already: one
/// thread copies to the device while the other receives (bytes).
const SHARED: u32 = 256 << 10;
/// Bytes charged for a request without a payload.
const BARE_BYTES: usize = 4096;
/// The bytes charged by a block status for each block it examines: each may be a run of its own.
const STATUS_BYTES: usize = size_of::<Extent>();
/// The longest payload of a refused write that is skipped; a longer one ends the connection (bytes).
const MAX_REFUSED: u32 = 64 << 20;
/// Threads for requests that wait for a local disk; none of them waits for a network.
const DISK_THREADS: usize = 8;

/// Why a connection ended, other than by a disconnect request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Wire(#[from] wire::WireError),
    #[error("{0}")]
    Refused(&'static str),
}

/// Serves a client from the greeting on.
pub(super) fn serve(
    served: &Served,
    socket: &Arc<Socket>,
    plain_allowed: bool,
    stopping: &AtomicBool,
) -> Result<(), Ended> {
    let deadline = Instant::now() + served.options.handshake;
    let (transport, input, session) = match greet(served, socket, plain_allowed, deadline, stopping)
    {
        Ok(Some(begun)) => begun,
        Ok(None) => return Ok(()),
        Err(error) => {
            add(&served.counters.failed_handshakes, 1);
            return Err(error);
        }
    };
    transmit(served, transport, input, session, stopping)
}

/// Serves requests on a connection that needs no handshake.
pub(super) fn serve_requests(
    served: &Served,
    socket: &Arc<Socket>,
    session: Session,
    stopping: &AtomicBool,
) -> Result<(), Ended> {
    let transport = Arc::new(Transport::Plain(Arc::clone(socket)));
    let input = Input::new(Arc::clone(&transport));
    transmit(served, transport, input, session, stopping)
}

/// The handshake. None if the client ended it.
fn greet(
    served: &Served,
    socket: &Arc<Socket>,
    plain_allowed: bool,
    deadline: Instant,
    stopping: &AtomicBool,
) -> Result<Option<(Arc<Transport>, Input, Session)>, Ended> {
    let mut transport = Arc::new(Transport::Plain(Arc::clone(socket)));
    let mut input = Input::new(Arc::clone(&transport));
    let send = |transport: &Transport, bytes: &[u8]| -> io::Result<()> {
        socket.send_within(left(deadline))?;
        transport.send(&mut [IoSlice::new(bytes)])
    };
    let mut greeting = wire::GREETING.to_be_bytes().to_vec();
    greeting.extend(wire::OPTION.to_be_bytes());
    let flags = (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES) as u16;
    greeting.extend(flags.to_be_bytes());
    send(&transport, &greeting)?;

    let mut flags = [0; 4];
    input.exactly(&mut flags, deadline)?;
    let security = match (&served.options.tls, plain_allowed) {
        (None, _) => Security::Plain,
        (Some(_), true) => Security::Offered,
        (Some(_), false) => Security::Demanded,
    };
    let mut negotiation = Negotiation::new(&served.offers, security, u32::from_be_bytes(flags))
        .ok_or(Ended::Refused("unknown client flags"))?;
    let mut bytes = 0;
    for _ in 0..MAX_OPTIONS {
        if stopping.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut header = [0; wire::OPTION_BYTES];
        input.exactly(&mut header, deadline)?;
        let header = OptionHeader::parse(&header)?;
        bytes += u64::from(header.length);
        if header.length > MAX_SCRAP || bytes > MAX_OPTION_BYTES {
            return Err(Ended::Refused("an option that is too long"));
        }
        let mut out = Vec::new();
        if header.length > MAX_OPTION {
            input.skip(header.length, deadline)?;
            if header.option == option::EXPORT_NAME {
                return Err(Ended::Refused("an export name that is too long"));
            }
            wire::option_reply(&mut out, header.option, reply::ERR_TOO_BIG, &[]);
            send(&transport, &out)?;
            continue;
        }
        let mut data = vec![0; header.length as usize];
        input.exactly(&mut data, deadline)?;
        let step = negotiation.option(header.option, &data, &mut out);
        if !out.is_empty() {
            send(&transport, &out)?;
        }
        match (step, &served.options.tls) {
            (Step::Continue, _) => {}
            (Step::Transmit(session), _) => return Ok(Some((transport, input, session))),
            (Step::StartTls, Some(tls)) => {
                let stream = TlsStream::accept(Arc::clone(socket), tls, input.rest(), deadline)?;
                transport = Arc::new(Transport::Tls(Box::new(stream)));
                input = Input::new(Arc::clone(&transport));
                negotiation.secured();
            }
            (Step::StartTls | Step::Close, _) => {
                transport.finish();
                return match header.option {
                    option::ABORT => Ok(None),
                    _ => Err(Ended::Refused(
                        "an unknown export, or one that requires other options",
                    )),
                };
            }
        }
    }
    Err(Ended::Refused("too many options"))
}

/// A request to be executed.
struct Job {
    request: Request,
    payload: Option<Buffer>,
    permit: Permit,
}

/// The transmission phase: receives and executes requests.
fn transmit(
    served: &Served,
    transport: Arc<Transport>,
    mut input: Input,
    session: Session,
    stopping: &AtomicBool,
) -> Result<(), Ended> {
    let export = &served.exports[session.export];
    let facts = served.offers[session.export].facts;
    let pool = Arc::new(Buffers::default());
    let executor = Arc::new(Executor {
        device: Arc::clone(&export.device),
        can: export.device.capabilities(),
        facts,
        session,
        pool: Arc::clone(&pool),
        counters: Arc::clone(&served.counters),
    });
    let outbox = Arc::new(Outbox::new(
        Arc::clone(&transport),
        Arc::clone(&served.counters),
    ));
    let budget = Budget::new(served.options.requests, served.options.request_bytes);
    let worker = {
        let (executor, outbox) = (Arc::clone(&executor), Arc::clone(&outbox));
        move || {
            let (executor, outbox) = (Arc::clone(&executor), Arc::clone(&outbox));
            move |job: Job| {
                // The client is gone: reads are skipped, writes are still executed.
                if outbox.is_gone() && job.request.command == command::READ {
                    return;
                }
                outbox.put(executor.execute(&job.request, job.payload, job.permit));
                outbox.flush();
            }
        }
    };
    let disk = Pool::new("nbd-disk", DISK_THREADS, worker.clone());
    let network = Pool::new("nbd-network", served.options.threads, worker.clone());
    // Separate from reads, local or not: waiting for room in a cache takes as long as the link is slow or down.
    let changes = Pool::new("nbd-change", served.options.threads, worker);

    let socket = transport.socket();
    socket.receive_within(TICK.min(served.options.stall))?;
    socket.send_within(served.options.stall)?;
    let stall = served.options.stall;
    let mut serve = || -> Result<(), Ended> {
        let mut corked = 0;
        loop {
            if stopping.load(Ordering::Acquire) || outbox.is_gone() {
                return Ok(());
            }
            let header = match input.next() {
                Next::Header(header) => header,
                // Pending replies are sent before this thread blocks.
                Next::More => {
                    outbox.flush();
                    corked = 0;
                    if !input.fill(stall, || pool.clear())? {
                        return Ok(());
                    }
                    continue;
                }
            };
            let request = Request::parse(&header)?;
            if request.command == command::DISCONNECT {
                return Ok(());
            }
            add(&served.counters.requests, 1);
            let refused = check(&request, &facts, session.allocation).err();
            let bytes = match request.command {
                _ if refused.is_some() => BARE_BYTES,
                command::READ | command::WRITE => BARE_BYTES + request.length as usize,
                command::BLOCK_STATUS => {
                    let blocks = request.length.min(MAX_STATUS) as usize / 4096;
                    BARE_BYTES + blocks * STATUS_BYTES
                }
                _ => BARE_BYTES,
            };
            let permit = budget.try_admit(bytes).unwrap_or_else(|| {
                outbox.flush();
                budget.admit(bytes)
            });
            if let Some(refusal) = refused {
                if request.payload() > MAX_REFUSED {
                    return Err(Ended::Refused("a write that is much too long"));
                }
                input.skip_stalling(request.payload(), stall, || outbox.flush())?;
                outbox.put(executor.refused(&request, refusal, permit));
                continue;
            }
            let payload = match request.payload() {
                0 => None,
                length => {
                    let mut buffer = pool.take(length as usize);
                    input.payload(&mut buffer, stall, || outbox.flush())?;
                    Some(buffer)
                }
            };
            let place = match place(&request, export.device.as_ref()) {
                Place::Here if request.payload() >= SHARED && input.has_more() => Place::Disk,
                place => place,
            };
            match place {
                Place::Here => {
                    outbox.put(executor.execute(&request, payload, permit));
                    corked += bytes;
                    if corked >= CORK {
                        outbox.flush();
                        corked = 0;
                    }
                }
                Place::Disk => disk.submit(Job {
                    request,
                    payload,
                    permit,
                }),
                Place::Network => network.submit(Job {
                    request,
                    payload,
                    permit,
                }),
                Place::Change => {
                    let mut permit = permit;
                    permit.park();
                    changes.submit(Job {
                        request,
                        payload,
                        permit,
                    });
                }
            }
        }
    };
    let ended = serve();
    outbox.flush();
    // Requests sent before the disconnect are completed, and answered if the client still listens.
    budget.drain();
    transport.finish();
    ended
}

/// The thread that executes a request.
enum Place {
    /// The thread that received it.
    Here,
    Disk,
    Network,
    /// The threads for changes and flushes, which may wait for a network, or for cache room that needs the network.
    Change,
}

fn place(request: &Request, device: &dyn BlockDevice) -> Place {
    match request.command {
        // Returns without waiting.
        command::CACHE => return Place::Here,
        command::FLUSH => return Place::Change,
        _ if request.length == 0 => return Place::Here,
        _ => {}
    }
    let (offset, length) = (request.offset, request.length.into());
    if let command::WRITE | command::WRITE_ZEROES | command::TRIM = request.command {
        return match device.write_cost(offset, length) {
            // The flush may wait even if a write to the range does not.
            _ if request.has(flag::FUA) => Place::Change,
            Cost::Memory => Place::Here,
            Cost::Disk => Place::Disk,
            Cost::Network => Place::Change,
        };
    }
    match device.cost(offset, length) {
        // Two threads would only contend: the connection sends replies one at a time.
        Cost::Memory => Place::Here,
        Cost::Disk => Place::Disk,
        Cost::Network => Place::Network,
    }
}
