//! A client of QMP, QEMU's machine protocol, over a Unix socket.
//!
//! [`Qmp`] is a handle; one task reads and writes. Commands are answered in their order, out-of-band ones at once, even
//! while QEMU hangs in another. A command that was not answered in time is given up by its caller only: QEMU may still
//! execute it, and until it answers it counts as one of the [`MAX_UNANSWERED`].
//!
//! Whatever the other end says, memory is bounded, and no call takes longer than its timeout.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::error::{HypervisorError, is_gone, one_line, plain};

mod driver;
mod events;
mod message;
mod state;

pub use events::Events;
pub use message::{
    Event, Greeting, MAX_EVENT, MAX_MESSAGE, Message, NotAMessage, Splitter, Version, parse,
};

pub use state::MAX_EVENTS;

use driver::Outgoing;
use state::{Pending, State};

/// How long an answer may take, unless the command says otherwise.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the greeting may take.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the attempts to connect while others are connected.
const CONNECT_POLL: Duration = Duration::from_millis(50);

/// Commands of each kind, in turn and out of band, that may be unanswered. QEMU stops reading at eight in turn.
pub const MAX_UNANSWERED: usize = 4;

/// The longest command that is sent, in bytes.
pub const MAX_COMMAND: usize = 1 << 20;

/// A connection with a QEMU. Clones share it; it ends with the last one, [`Events`] included.
#[derive(Debug, Clone)]
pub struct Qmp {
    link: Arc<Link>,
}

#[derive(Debug)]
struct Link {
    state: Arc<State>,
    queue: mpsc::Sender<Outgoing>,
    greeting: Greeting,
    in_turn: Arc<Semaphore>,
    out_of_band: Arc<Semaphore>,
    /// QEMU keeps the descriptor of the newest message only.
    descriptor: Arc<Semaphore>,
}

/// A command, to be run by [`Qmp::run`].
#[derive(Debug)]
pub struct Command {
    name: String,
    arguments: Value,
    descriptor: Option<OwnedFd>,
    out_of_band: bool,
    timeout: Duration,
}

impl Command {
    /// A command without arguments.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Command {
            name: name.to_owned(),
            arguments: json!({}),
            descriptor: None,
            out_of_band: false,
            timeout: REPLY_TIMEOUT,
        }
    }

    /// With these arguments, an object.
    #[must_use]
    pub fn arguments(mut self, arguments: Value) -> Self {
        self.arguments = arguments;
        self
    }

    /// With an open file, which QEMU gets a descriptor of.
    #[must_use]
    pub fn descriptor(mut self, file: impl Into<OwnedFd>) -> Self {
        self.descriptor = Some(file.into());
        self
    }

    /// Overtakes all commands, also one in which QEMU hangs. Only few can: `yank`, `migrate-recover`, `migrate-pause`.
    #[must_use]
    pub fn out_of_band(mut self) -> Self {
        self.out_of_band = true;
        self
    }

    /// Waits so long for the answer.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

#[derive(Serialize)]
struct Wire<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    execute: Option<&'a str>,
    #[serde(rename = "exec-oob", skip_serializing_if = "Option::is_none")]
    out_of_band: Option<&'a str>,
    arguments: &'a Value,
    id: u64,
}

impl Qmp {
    /// Connects to the QEMU whose QMP socket is at `path`, and makes it ready for commands, out-of-band ones if it
    /// has them. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`HypervisorError::Connect`], while others are connected after [`GREETING_TIMEOUT`], [`HypervisorError::NotQmp`],
    /// [`HypervisorError::Silent`] after the same, or what [`Self::run`] returns.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Qmp, HypervisorError> {
        let path = path.as_ref();
        let name = one_line(&path.display().to_string());
        // Whoever is connected may be about to leave.
        let until = Instant::now() + GREETING_TIMEOUT;
        let connected = loop {
            match UnixStream::connect(path).await {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                    sleep(CONNECT_POLL).await;
                }
                connected => break connected,
            }
        };
        match connected {
            Ok(stream) => Self::over(stream, &name).await,
            Err(e) => Err(HypervisorError::Connect {
                reason: match e.kind() {
                    // Its queue of connections is full.
                    io::ErrorKind::WouldBlock => {
                        "other programs are connected to it; QEMU serves one at a time".into()
                    }
                    _ => plain(&e),
                },
                is_gone: is_gone(&e),
                socket: name,
            }),
        }
    }

    /// As [`Self::connect`], over a connected socket that errors call `name`.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub async fn over(stream: UnixStream, name: &str) -> Result<Qmp, HypervisorError> {
        let mut splitter = Splitter::new(MAX_MESSAGE);
        let greeting = timeout(
            GREETING_TIMEOUT,
            driver::greeting(&stream, &mut splitter, name),
        )
        .await
        .map_err(|_| HypervisorError::Silent {
            socket: name.to_owned(),
            after: GREETING_TIMEOUT,
        })??;
        let (queue, outgoing) = mpsc::channel(2 * MAX_UNANSWERED);
        let state = Arc::new(State::new(name));
        tokio::spawn(driver::drive(stream, splitter, outgoing, state.clone()));
        let permits = |count| Arc::new(Semaphore::new(count));
        let qmp = Qmp {
            link: Arc::new(Link {
                state,
                queue,
                in_turn: permits(MAX_UNANSWERED),
                out_of_band: permits(MAX_UNANSWERED),
                descriptor: permits(1),
                greeting,
            }),
        };
        let enable = if qmp.greeting().out_of_band {
            json!({"enable": ["oob"]})
        } else {
            json!({})
        };
        let begin = Command::new("qmp_capabilities").arguments(enable);
        qmp.run::<Value>(begin.timeout(GREETING_TIMEOUT)).await?;
        Ok(qmp)
    }

    /// What QEMU said first.
    #[must_use]
    pub fn greeting(&self) -> &Greeting {
        &self.link.greeting
    }

    /// What errors call this QEMU: its socket's path.
    #[must_use]
    pub fn socket(&self) -> &str {
        self.link.state.socket()
    }

    /// Executes a command with arguments, an object, and decodes what it returns.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub async fn execute<T: DeserializeOwned>(
        &self,
        name: &str,
        arguments: Value,
    ) -> Result<T, HypervisorError> {
        self.run(Command::new(name).arguments(arguments)).await
    }

    /// Executes a command that returns nothing.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub async fn order(&self, name: &str, arguments: Value) -> Result<(), HypervisorError> {
        self.execute::<Value>(name, arguments).await.map(|_| ())
    }

    /// Runs a command and decodes what it returns. When the future is dropped, QEMU may still execute it.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`] with QEMU's error, [`HypervisorError::TimedOut`], [`HypervisorError::Closed`],
    /// [`HypervisorError::Malformed`], [`HypervisorError::Answer`] when what it returns is not a `T`, and
    /// [`HypervisorError::Unsupported`] for an out-of-band command where QEMU has none.
    pub async fn run<T: DeserializeOwned>(&self, command: Command) -> Result<T, HypervisorError> {
        let name = command.name.clone();
        let value = self.send(command).await?;
        T::deserialize(value).map_err(|e| HypervisorError::Answer {
            socket: self.socket().to_owned(),
            command: name,
            reason: one_line(&e.to_string()),
        })
    }

    async fn send(&self, command: Command) -> Result<Value, HypervisorError> {
        let link = &self.link;
        let deadline = Instant::now() + command.timeout;
        if command.out_of_band && !link.greeting.out_of_band {
            return Err(self.unsupported("offers no out-of-band commands on this socket"));
        }
        let late = |name: &str| HypervisorError::TimedOut {
            socket: self.socket().to_owned(),
            command: name.to_owned(),
            after: command.timeout,
        };
        let mut permits: Vec<OwnedSemaphorePermit> = Vec::new();
        let kind = if command.out_of_band {
            &link.out_of_band
        } else {
            &link.in_turn
        };
        let needed = [
            Some(kind),
            command.descriptor.as_ref().map(|_| &link.descriptor),
        ];
        for semaphore in needed.into_iter().flatten() {
            match timeout_at(deadline, semaphore.clone().acquire_owned()).await {
                Ok(permit) => permits.extend(permit),
                Err(_) => {
                    let oldest = link.state.oldest(command.out_of_band);
                    return Err(late(oldest.as_deref().unwrap_or(&command.name)));
                }
            }
        }
        let (id, reply) = link.state.expect(Pending {
            command: command.name.clone(),
            out_of_band: command.out_of_band,
            _permits: permits,
        })?;
        let wire = Wire {
            execute: (!command.out_of_band).then_some(&command.name),
            out_of_band: command.out_of_band.then_some(&command.name),
            arguments: &command.arguments,
            id,
        };
        let bytes = match serde_json::to_vec(&wire) {
            Ok(mut bytes) if bytes.len() < MAX_COMMAND => {
                bytes.push(b'\n');
                bytes
            }
            _ => {
                link.state.forget(id);
                return Err(self.unsupported("is asked for too much in one command"));
            }
        };
        // There is room, but when the other end has answered what it was not asked yet.
        let outgoing = Outgoing::new(bytes, command.descriptor);
        if link.queue.try_send(outgoing).is_err() {
            link.state.forget(id);
            return Err(link.state.ended().unwrap_or_else(|| late(&command.name)));
        }
        match timeout_at(deadline, reply).await {
            Ok(Ok(Ok(value))) => Ok(value),
            Ok(Ok(Err((class, description)))) => Err(HypervisorError::Refused {
                socket: self.socket().to_owned(),
                command: command.name,
                class,
                description,
            }),
            Ok(Err(_)) => Err(link.state.ended().unwrap_or_else(|| late(&command.name))),
            Err(_) => Err(late(&command.name)),
        }
    }

    /// The events from now on. At most [`MAX_EVENTS`] are kept until they are taken.
    #[must_use]
    pub fn events(&self) -> Events {
        Events::new(self.link.state.clone(), self.link.queue.clone())
    }

    pub(crate) fn unsupported(&self, reason: &str) -> HypervisorError {
        HypervisorError::Unsupported {
            socket: self.socket().to_owned(),
            reason: reason.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
