//! A connection with a libvirt daemon: its remote protocol over a Unix socket, as `virsh` speaks it.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::xdr::{Reader, Writer};
use crate::error::{HypervisorError, one_line, plain};

/// The program of the remote protocol.
const PROGRAM: u32 = 0x2000_8086;

/// The program of what QEMU alone has.
const QEMU_PROGRAM: u32 = 0x2000_8087;

/// The only version of both.
const VERSION: u32 = 1;

/// The length of a message and its header.
const HEADER_BYTES: usize = 28;

/// Upper bound on a message; the descriptions of machines are the longest.
const MAX_MESSAGE: usize = 8 << 20;

/// Calls that wait to be sent.
const QUEUE: usize = 16;

/// How long the daemon may take for what takes it no time.
const QUICK: Duration = Duration::from_secs(60);

/// Failure: there is no such machine.
const NO_MACHINE: u32 = 42;

/// Types of messages: a call and an answer, without and with open files, and what comes by itself.
const CALL: u32 = 0;
const REPLY: u32 = 1;
const EVENT: u32 = 2;
const CALL_WITH_FILES: u32 = 4;
const REPLY_WITH_FILES: u32 = 5;

/// Kind of authentication that asks polkit about the process at the other end.
const POLKIT: u32 = 2;

/// Procedures of the remote protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Procedure {
    Open = 1,
    Define = 11,
    Destroy = 12,
    XmlDesc = 14,
    GetAutostart = 15,
    LookupByName = 23,
    Resume = 28,
    SetAutostart = 29,
    AuthList = 66,
    AuthPolkit = 70,
    LibraryVersion = 157,
    JobInfo = 163,
    AbortJob = 164,
    SetMaxDowntime = 166,
    SnapshotCreate = 185,
    BlockInfo = 194,
    GetState = 212,
    BlockJobAbort = 237,
    BlockJobInfo = 238,
    BlockCommit = 290,
    MigrateBegin = 302,
    MigratePrepare = 303,
    MigratePerform = 305,
    MigrateFinish = 306,
    MigrateConfirm = 307,
}

/// Procedures of the program that QEMU alone has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Monitor {
    Command = 1,
    Register = 4,
    Event = 6,
    CommandWithFiles = 7,
}

/// An answer.
pub struct Called {
    pub body: Vec<u8>,
    failed: bool,
}

/// A message on its way, and the file that goes after it.
type Outgoing = (Vec<u8>, Option<OwnedFd>);

/// Which libvirt daemon: `qemu:///system` or `qemu:///session`, with `?socket=/path` where the socket is not at its usual
/// place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    text: String,
    /// What the daemon is asked to open.
    driver: &'static str,
    socket: Option<PathBuf>,
}

impl Uri {
    /// The one that `virsh` uses where none is named.
    ///
    /// # Errors
    /// When `LIBVIRT_DEFAULT_URI` names one that cannot be asked.
    pub fn usual() -> Result<Uri, String> {
        match std::env::var("LIBVIRT_DEFAULT_URI") {
            Ok(named) if !named.is_empty() => {
                let parsed = named.parse();
                return parsed.map_err(|e| format!("LIBVIRT_DEFAULT_URI: {e}"));
            }
            _ => {}
        }
        let driver = match rustix::process::geteuid().is_root() {
            true => "qemu:///system",
            false => "qemu:///session",
        };
        Ok(Uri {
            text: driver.into(),
            driver,
            socket: None,
        })
    }

    /// Where its socket may be.
    fn sockets(&self) -> Vec<PathBuf> {
        if let Some(socket) = &self.socket {
            return vec![socket.clone()];
        }
        let run = match self.driver {
            "qemu:///system" => PathBuf::from("/run"),
            _ => std::env::var_os("XDG_RUNTIME_DIR").map_or_else(
                || PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw())),
                PathBuf::from,
            ),
        };
        // One daemon for each kind of hypervisor, or one for all.
        ["virtqemud-sock", "libvirt-sock"]
            .map(|name| run.join("libvirt").join(name))
            .into()
    }
}

impl FromStr for Uri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "{text:?} is not qemu:///system or qemu:///session, perhaps with ?socket=/path: only the libvirt of this host is asked"
            )
        };
        let (base, query) = text.split_once('?').unwrap_or((text, ""));
        let driver = match base {
            "qemu:///system" | "qemu+unix:///system" => "qemu:///system",
            "qemu:///session" | "qemu+unix:///session" => "qemu:///session",
            _ => return Err(bad()),
        };
        let socket = match query {
            "" => None,
            query => {
                let path = query.strip_prefix("socket=").ok_or_else(bad)?;
                let path = PathBuf::from(path);
                Some(path).filter(|path| path.is_absolute())
            }
        };
        if !query.is_empty() && socket.is_none() {
            return Err(bad());
        }
        Ok(Uri {
            text: text.to_owned(),
            driver,
            socket,
        })
    }
}

impl std::fmt::Display for Uri {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Answers that are waited for, by serial number; `None` when the connection has ended.
type Waiting = Arc<Mutex<Option<HashMap<u32, oneshot::Sender<Message>>>>>;

/// Who is told of QEMU's events.
type Watcher = Arc<Mutex<Option<mpsc::Sender<Vec<u8>>>>>;

/// What a daemon sent.
struct Message {
    serial: u32,
    is_reply: bool,
    is_event: bool,
    failed: bool,
    body: Vec<u8>,
}

/// A connection. When it is dropped, the daemon ends what depends on it, such as a machine that is being received.
#[derive(Debug)]
pub struct Connection {
    uri: String,
    out: mpsc::Sender<Outgoing>,
    waiting: Waiting,
    /// Where QEMU's events go.
    watcher: Watcher,
    serial: Mutex<u32>,
    tasks: [JoinHandle<()>; 2],
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("serial", &self.serial)
            .finish_non_exhaustive()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Connection {
    /// Connects to a daemon.
    ///
    /// # Errors
    /// When it does not run, or does not let this user in.
    pub async fn open(uri: &Uri) -> Result<Self, HypervisorError> {
        let mut failed = None;
        for socket in uri.sockets() {
            match UnixStream::connect(&socket).await {
                Ok(stream) => return Self::over(stream, uri).await,
                Err(e) => failed = Some(no_libvirt(uri, &socket, &e)),
            }
        }
        Err(failed.unwrap_or_else(|| {
            no_libvirt(uri, Path::new(""), &std::io::ErrorKind::NotFound.into())
        }))
    }

    async fn over(stream: UnixStream, uri: &Uri) -> Result<Self, HypervisorError> {
        let (reader, mut writer) = stream.into_split();
        let (out, mut queue) = mpsc::channel::<Outgoing>(QUEUE);
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let write = tokio::spawn(async move {
            while let Some((message, file)) = queue.recv().await {
                let written = match writer.write_all(&message).await {
                    Ok(()) => send_file(&writer, file).await,
                    failed => failed,
                };
                if written.is_err() {
                    // The reader ends too.
                    return;
                }
            }
        });
        let answered = Arc::clone(&waiting);
        let watcher = Watcher::default();
        let watched = Arc::clone(&watcher);
        let read = tokio::spawn(async move {
            let mut reader = reader;
            while let Some(message) = read_message(&mut reader).await {
                if message.is_event {
                    if let Some(watcher) = &*watched.lock() {
                        // Who is late finds out by asking.
                        let _ = watcher.try_send(message.body);
                    }
                    continue;
                }
                let mut waiting = answered.lock();
                let known = waiting.as_mut().filter(|_| message.is_reply);
                if let Some(wants) = known.and_then(|known| known.remove(&message.serial)) {
                    // Nobody may wait any more.
                    let _ = wants.send(message);
                }
            }
            // Those who wait find out.
            *answered.lock() = None;
            *watched.lock() = None;
        });
        let connection = Connection {
            uri: uri.text.clone(),
            out,
            waiting,
            watcher,
            serial: Mutex::new(0),
            tasks: [write, read],
        };
        connection.greet(uri.driver).await?;
        Ok(connection)
    }

    async fn greet(&self, driver: &str) -> Result<(), HypervisorError> {
        let kinds = self
            .call(Procedure::AuthList, "authenticate", Writer::default())
            .await?;
        let mut kinds = Reader::new(&kinds);
        let count = kinds.number().unwrap_or(0);
        let offered: Vec<_> = (0..count.min(16)).map_while(|_| kinds.number()).collect();
        if offered.first().is_some_and(|first| *first == POLKIT) {
            self.call(Procedure::AuthPolkit, "authenticate", Writer::default())
                .await?;
        }
        let open = Writer::default().optional(Some(driver)).number(0);
        self.call(Procedure::Open, "open the connection", open)
            .await?;
        Ok(())
    }

    /// Calls a procedure that takes no time; the body of the answer. `what` completes "libvirt cannot …".
    pub async fn call(
        &self,
        procedure: Procedure,
        what: &str,
        body: Writer,
    ) -> Result<Vec<u8>, HypervisorError> {
        self.call_within(procedure, what, body, QUICK).await
    }

    /// The same with a limit.
    pub async fn call_within(
        &self,
        procedure: Procedure,
        what: &str,
        body: Writer,
        limit: Duration,
    ) -> Result<Vec<u8>, HypervisorError> {
        let called = (PROGRAM, procedure as u32);
        let answer = self.exchange(called, what, body, None, limit).await?;
        match answer.failed {
            true if procedure == Procedure::LookupByName && code(&answer.body) == NO_MACHINE => {
                Err(HypervisorError::NoMachine {
                    uri: self.uri.clone(),
                    name: what.to_owned(),
                })
            }
            true => Err(self.unsupported(what, reason(&answer.body))),
            false => Ok(answer.body),
        }
    }

    /// Calls a procedure of QEMU's, with an open file.
    pub async fn monitor(
        &self,
        procedure: Monitor,
        what: &str,
        body: Writer,
        file: Option<OwnedFd>,
    ) -> Result<Called, HypervisorError> {
        let called = (QEMU_PROGRAM, procedure as u32);
        let answer = self.exchange(called, what, body, file, QUICK).await?;
        match answer.failed {
            true => Err(self.unsupported(what, reason(&answer.body))),
            false => Ok(answer),
        }
    }

    /// Has QEMU's events sent on, as libvirt tells them.
    pub fn watch(&self, to: mpsc::Sender<Vec<u8>>) {
        *self.watcher.lock() = Some(to);
    }

    async fn exchange(
        &self,
        called: (u32, u32),
        what: &str,
        body: Writer,
        file: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Called, HypervisorError> {
        let serial = {
            let mut serial = self.serial.lock();
            *serial = serial.wrapping_add(1);
            *serial
        };
        let (send, answer) = oneshot::channel();
        match self.waiting.lock().as_mut() {
            Some(waiting) => waiting.insert(serial, send),
            None => return Err(self.ended()),
        };
        let message = message(called, serial, &body.finish(), file.is_some());
        let sent = self.out.send((message, file)).await;
        sent.map_err(|_| self.ended())?;
        match tokio::time::timeout(limit, answer).await {
            Ok(answer) => {
                let Message { body, failed, .. } = answer.map_err(|_| self.ended())?;
                Ok(Called { body, failed })
            }
            Err(_) => Err(self.unsupported(what, format!("no answer within {limit:?}"))),
        }
    }

    fn ended(&self) -> HypervisorError {
        HypervisorError::LibvirtClosed {
            uri: self.uri.clone(),
        }
    }

    /// An answer without what was expected.
    pub fn unknown(&self, what: &str) -> HypervisorError {
        HypervisorError::Libvirt {
            uri: self.uri.clone(),
            what: what.to_owned(),
            reason: "its answer is not understood".into(),
        }
    }

    /// Something is not possible with a machine of this libvirt.
    pub fn unsupported(&self, what: &str, reason: String) -> HypervisorError {
        HypervisorError::Libvirt {
            uri: self.uri.clone(),
            what: what.to_owned(),
            reason,
        }
    }
}

fn no_libvirt(uri: &Uri, socket: &Path, error: &std::io::Error) -> HypervisorError {
    HypervisorError::NoLibvirt {
        uri: uri.text.clone(),
        socket: socket.display().to_string(),
        reason: plain(error),
    }
}

fn message((program, procedure): (u32, u32), serial: u32, body: &[u8], has_file: bool) -> Vec<u8> {
    let files = match has_file {
        true => Writer::default().number(1),
        false => Writer::default(),
    };
    let files = files.finish();
    let length = HEADER_BYTES + files.len() + body.len();
    Writer::default()
        .number(u32::try_from(length).unwrap_or(u32::MAX))
        .number(program)
        .number(VERSION)
        .number(procedure)
        .number(if has_file { CALL_WITH_FILES } else { CALL })
        .number(serial)
        // The status of a call.
        .number(0)
        .fixed(&files)
        .fixed(body)
        .finish()
}

/// Sends the file that a message announced, with a byte of its own.
async fn send_file(socket: &OwnedWriteHalf, file: Option<OwnedFd>) -> io::Result<()> {
    let Some(file) = file else {
        return Ok(());
    };
    let socket: &UnixStream = socket.as_ref();
    loop {
        socket.writable().await?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let sent = socket.try_io(Interest::WRITABLE, || {
            let byte = [IoSlice::new(&[0])];
            Ok(sendmsg(socket, &byte, &mut ancillary, SendFlags::NOSIGNAL)?)
        });
        match sent {
            Ok(_) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
}

/// The next message; `None` at the end, or where it is none.
async fn read_message(reader: &mut OwnedReadHalf) -> Option<Message> {
    let length = reader.read_u32().await.ok()? as usize;
    if !(HEADER_BYTES..=MAX_MESSAGE).contains(&length) {
        return None;
    }
    let mut bytes = vec![0; length - 4];
    reader.read_exact(&mut bytes).await.ok()?;
    let mut header = Reader::new(&bytes);
    let (program, version) = (header.number()?, header.number()?);
    let (procedure, kind) = (header.number()?, header.number()?);
    let (serial, status) = (header.number()?, header.number()?);
    Some(Message {
        serial,
        is_reply: [PROGRAM, QEMU_PROGRAM].contains(&program)
            && version == VERSION
            && [REPLY, REPLY_WITH_FILES].contains(&kind),
        is_event: program == QEMU_PROGRAM && kind == EVENT && procedure == Monitor::Event as u32,
        failed: status != 0,
        body: bytes.split_off(HEADER_BYTES - 4),
    })
}

/// The number of a failure.
fn code(body: &[u8]) -> u32 {
    Reader::new(body).number().unwrap_or(0)
}

/// What libvirt says of a failure.
fn reason(body: &[u8]) -> String {
    let mut reader = Reader::new(body);
    let text = (|| {
        let (_code, _domain) = (reader.number()?, reader.number()?);
        reader.optional()?
    })();
    one_line(text.as_deref().unwrap_or("it does not say why"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_libvirt_of_this_host_is_asked() {
        let session: Uri = "qemu:///session?socket=/run/x".parse().unwrap();
        assert_eq!(session.sockets(), [PathBuf::from("/run/x")]);
        assert_eq!(session.to_string(), "qemu:///session?socket=/run/x");
        let system: Uri = "qemu:///system".parse().unwrap();
        assert_eq!(system.sockets().len(), 2);
        for bad in [
            "",
            "qemu+ssh://host/system",
            "qemu+tcp://h/system",
            "xen:///system",
            "qemu:///system?socket=x",
            "qemu:///system?no_verify=1",
        ] {
            assert!(bad.parse::<Uri>().is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_socket_that_is_not_libvirts_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let uri: Uri = format!("qemu:///session?socket={}", path.display())
            .parse()
            .unwrap();
        let none = Connection::open(&uri).await.unwrap_err();
        assert!(
            none.to_string().contains("there is no such socket"),
            "{none}"
        );
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let speak = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                .await
                .unwrap();
            stream
        });
        let other = Connection::open(&uri).await.unwrap_err();
        assert!(
            matches!(other, HypervisorError::LibvirtClosed { .. }),
            "{other}"
        );
        speak.await.unwrap();
    }
}
