//! QEMU's monitor of a machine that libvirt manages: what its QMP socket would be, by way of libvirt, which has that socket
//! to itself. libvirt passes commands on as they are, with open files, and QEMU's events back.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::Domain;
use super::connection::{Called, Monitor};
use super::xdr::{Reader, Writer};
use crate::error::{HypervisorError, plain};
use crate::machine::Machine;
use crate::qmp::{MAX_COMMAND, Qmp, Splitter};

/// Events that wait to be passed on.
const MAX_EVENTS: usize = 256;

/// Bytes that are read at a time.
const PIECE: usize = 64 << 10;

impl Domain {
    /// The machine's QEMU, by commands that libvirt passes on. libvirt marks the machine as *tainted* by that, and knows
    /// nothing of what they do: leave nothing that it would stumble over.
    ///
    /// # Errors
    /// When libvirt cannot be asked, or the machine is off.
    pub async fn machine(&self) -> Result<Machine, HypervisorError> {
        let version = self.monitor("query-version", &json!({}), None).await?;
        let greeting = json!({"QMP": {"version": version["return"], "capabilities": []}});
        let local = |e: io::Error| HypervisorError::Local {
            path: self.name.clone(),
            reason: plain(&e),
        };
        let (ours, theirs) = UnixStream::pair().map_err(local)?;
        let (send, events) = mpsc::channel(MAX_EVENTS);
        self.connection.watch(send);
        // Those of this machine, of all kinds.
        let register = Writer::default()
            .number(1)
            .append(self.argument())
            .number(0)
            .number(0);
        let what = "tell what happens to the machine";
        self.connection
            .monitor(Monitor::Register, what, register, None)
            .await?;
        tokio::spawn(carry(self.clone(), theirs, events, greeting));
        Ok(Machine::new(
            Qmp::over(ours, &format!("libvirt:{}", self.name)).await?,
        ))
    }

    /// QEMU's answer to a command.
    async fn monitor(
        &self,
        command: &str,
        arguments: &Value,
        file: Option<OwnedFd>,
    ) -> Result<Value, HypervisorError> {
        let what = format!("pass {command} on to QEMU");
        let text = json!({"execute": command, "arguments": arguments}).to_string();
        let body = self.argument().text(&text).number(0);
        let procedure = match file {
            Some(_) => Monitor::CommandWithFiles,
            None => Monitor::Command,
        };
        let Called { body, .. } = self
            .connection
            .monitor(procedure, &what, body, file)
            .await?;
        let answer = Reader::new(&body).text();
        let answer = answer.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        answer
            .filter(Value::is_object)
            .ok_or_else(|| self.connection.unknown(&what))
    }
}

/// Commands that come with the descriptor of an open file.
fn takes_file(command: &str) -> bool {
    matches!(command, "getfd" | "add-fd")
}

/// Is QEMU to the other end of a socket, until that is closed.
async fn carry(
    domain: Domain,
    mut socket: UnixStream,
    mut events: mpsc::Receiver<Vec<u8>>,
    greeting: Value,
) {
    let mut splitter = Splitter::new(MAX_COMMAND);
    let mut file = None;
    let mut say = greeting;
    loop {
        let mut line = say.to_string();
        line.push('\n');
        if socket.write_all(line.as_bytes()).await.is_err() {
            return;
        }
        say = loop {
            match splitter.next() {
                Ok(Some(command)) => {
                    break run(&domain, &command, &mut file).await;
                }
                Ok(None) => {}
                Err(_) => return,
            }
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => {
                        if let Some(event) = of_event(&event) {
                            break event;
                        }
                    }
                    // The connection with libvirt is over.
                    None => return,
                },
                read = read(&socket, &mut splitter, &mut file) => {
                    if !matches!(read, Ok(1..)) {
                        return;
                    }
                }
            }
        };
    }
}

async fn run(domain: &Domain, command: &[u8], file: &mut Option<OwnedFd>) -> Value {
    let command: Value = serde_json::from_slice(command).unwrap_or_default();
    let name = command["execute"].as_str().unwrap_or_default();
    let mut answer = match name {
        // libvirt has said it.
        "qmp_capabilities" => json!({"return": {}}),
        _ => {
            let file = match takes_file(name) {
                true => file.take(),
                false => None,
            };
            let passed = domain.monitor(name, &command["arguments"], file).await;
            passed.unwrap_or_else(
                |e| json!({"error": {"class": "GenericError", "desc": e.to_string()}}),
            )
        }
    };
    answer["id"] = command["id"].clone();
    answer
}

/// An event as QEMU says it.
fn of_event(body: &[u8]) -> Option<Value> {
    let mut body = Reader::new(body);
    let _callback = body.number()?;
    let _machine = (body.text()?, body.fixed(16)?, body.number()?);
    let (name, seconds, micros) = (body.text()?, body.long()?, body.number()?);
    let data = body.optional()?;
    let data = data.and_then(|data| serde_json::from_str::<Value>(&data).ok());
    Some(json!({
        "event": name,
        "data": data.unwrap_or_else(|| json!({})),
        "timestamp": {"seconds": seconds, "microseconds": micros},
    }))
}

/// Reads what there is; the descriptor that came with it, too.
async fn read(
    socket: &UnixStream,
    splitter: &mut Splitter,
    file: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    let mut buffer = vec![0; PIECE];
    loop {
        socket.readable().await?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = socket.try_io(Interest::READABLE, || {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            Ok(recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes)
        });
        match received {
            Ok(count) => {
                for message in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(mut files) = message {
                        *file = files.next();
                    }
                }
                splitter.push(&buffer[..count]);
                return Ok(count);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_as_qemu_says_it() {
        let body = Writer::default()
            .number(0)
            .text("web")
            .fixed(&[1; 16])
            .number(3)
            .text("BLOCK_EXPORT_DELETED")
            .long(12)
            .number(34)
            .optional(Some(r#"{"id":"x"}"#))
            .finish();
        let event = of_event(&body).unwrap();
        assert_eq!(event["event"], "BLOCK_EXPORT_DELETED");
        assert_eq!(event["data"]["id"], "x");
        assert_eq!(event["timestamp"]["microseconds"], 34);
        for cut in 0..body.len() {
            assert_eq!(of_event(&body[..cut]), None, "{cut}");
        }
    }
}
