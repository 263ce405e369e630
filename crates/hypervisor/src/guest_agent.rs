//! QEMU's guest agent: a program in the guest that can freeze its file systems, so that what is on the disks at a moment is
//! whole. It is asked by a socket of QEMU, in lines of JSON.
//!
//! The guest is not trusted: what it says is bounded, and how long it takes.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::error::{HypervisorError, one_line, plain};
use crate::machine::Machine;

/// The port by which the agent talks.
const PORT: &str = "org.qemu.guest_agent.0";

/// The longest answer, in bytes.
const MAX_ANSWER: usize = 64 << 10;

/// Most bytes of earlier answers that are skipped, which somebody else did not wait for.
const MAX_SKIPPED: usize = 1 << 20;

/// Most devices that are looked at.
const MAX_DEVICES: usize = 1024;

/// How long the first answer may take: it is here at once, or nobody is there.
const SYNC_LIMIT: Duration = Duration::from_secs(5);

/// How long freezing may take: the guest writes everything back first.
const FREEZE_LIMIT: Duration = Duration::from_secs(60);

/// What a machine has of a guest agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Agent {
    /// No port for one, or not by a Unix socket.
    None,
    /// A port that no program in the guest has open.
    Silent,
    /// One that can be asked at this socket.
    At(PathBuf),
}

impl Machine {
    /// Looks for the guest agent of the machine.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn guest_agent(&self) -> Result<Agent, HypervisorError> {
        #[derive(Deserialize)]
        struct Property {
            name: String,
            #[serde(rename = "type")]
            kind: String,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Chardev {
            label: String,
            filename: String,
            #[serde(default)]
            frontend_open: bool,
        }
        let qmp = self.qmp();
        for group in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let found: Vec<Property> = qmp.execute("qom-list", json!({"path": group})).await?;
            let ports = found
                .iter()
                .filter(|one| one.kind == "child<virtserialport>");
            for port in ports.take(MAX_DEVICES) {
                let path = format!("{group}/{}", port.name);
                let get = |property: &str| json!({"path": path, "property": property});
                let name: String = qmp.execute("qom-get", get("name")).await?;
                if name != PORT {
                    continue;
                }
                let label: String = qmp.execute("qom-get", get("chardev")).await?;
                let all: Vec<Chardev> = qmp.execute("query-chardev", json!({})).await?;
                let Some(chardev) = all.into_iter().find(|chardev| chardev.label == label) else {
                    return Ok(Agent::None);
                };
                return Ok(
                    match (socket_of(&chardev.filename), chardev.frontend_open) {
                        (None, _) => Agent::None,
                        (Some(_), false) => Agent::Silent,
                        (Some(socket), true) => Agent::At(socket),
                    },
                );
            }
        }
        Ok(Agent::None)
    }
}

/// The socket in what QEMU calls a character device: `unix:/run/web.qga,server=on`, perhaps with `disconnected:` before it.
fn socket_of(filename: &str) -> Option<PathBuf> {
    let name = filename.strip_prefix("disconnected:").unwrap_or(filename);
    let name = name.strip_prefix("unix:")?;
    let path = match name.rfind(",server") {
        Some(at) => &name[..at],
        None => name,
    };
    path.starts_with('/').then(|| PathBuf::from(path))
}

/// A connection with an agent.
#[derive(Debug)]
pub struct GuestAgent {
    socket: String,
    stream: BufReader<UnixStream>,
}

impl GuestAgent {
    /// Connects, and waits until the agent answers.
    ///
    /// # Errors
    /// [`HypervisorError::Local`]: what the socket, or the agent, does instead.
    pub async fn connect(socket: &Path) -> Result<GuestAgent, HypervisorError> {
        let name = socket.display().to_string();
        let stream = UnixStream::connect(socket)
            .await
            .map_err(|e| failed(&name, &plain(&e)))?;
        let mut agent = GuestAgent {
            socket: name,
            stream: BufReader::new(stream),
        };
        let id = random();
        let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}});
        // The byte makes it forget what somebody began to say.
        agent.send(b"\xff", &sync).await?;
        let answered = timeout(SYNC_LIMIT, agent.synced(id)).await;
        let silent =
            "the guest agent does not answer; another program, as libvirt, may be connected to it";
        answered.map_err(|_| failed(&agent.socket, silent))??;
        Ok(agent)
    }

    /// Freezes all file systems of the guest; how many. [`Self::thaw`] has to follow soon, also after an error: every program in the
    /// guest that writes waits until then.
    ///
    /// # Errors
    /// [`HypervisorError::Local`]: why it does not.
    pub async fn freeze(&mut self) -> Result<u64, HypervisorError> {
        let status: String = self.ask("guest-fsfreeze-status", SYNC_LIMIT).await?;
        if status != "thawed" {
            let text = "the guest's file systems are frozen already, by another program";
            return Err(failed(&self.socket, text));
        }
        self.ask("guest-fsfreeze-freeze", FREEZE_LIMIT).await
    }

    /// Lets the file systems be written again; how many.
    ///
    /// # Errors
    /// [`HypervisorError::Local`]: why it does not.
    pub async fn thaw(&mut self) -> Result<u64, HypervisorError> {
        self.ask("guest-fsfreeze-thaw", FREEZE_LIMIT).await
    }

    /// Connects anew: only one program at a time can be connected.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn again(self) -> Result<GuestAgent, HypervisorError> {
        let GuestAgent { socket, stream } = self;
        drop(stream);
        GuestAgent::connect(Path::new(&socket)).await
    }

    /// Where it is asked.
    #[must_use]
    pub fn socket(&self) -> &str {
        &self.socket
    }

    async fn send(&mut self, before: &[u8], command: &Value) -> Result<(), HypervisorError> {
        let line = [before, command.to_string().as_bytes(), b"\n"].concat();
        let sent = timeout(SYNC_LIMIT, self.stream.get_mut().write_all(&line)).await;
        let sent = sent.map_err(|_| failed(&self.socket, "the guest agent does not read"))?;
        sent.map_err(|e| failed(&self.socket, &plain(&e)))
    }

    /// Reads on to the answer with this number.
    async fn synced(&mut self, id: u32) -> Result<(), HypervisorError> {
        let mut left = MAX_SKIPPED;
        loop {
            skip_to(&mut self.stream, 0xff, &mut left)
                .await
                .map_err(|e| failed(&self.socket, &e))?;
            if self.answer::<u32>().await.is_ok_and(|said| said == id) {
                return Ok(());
            }
        }
    }

    async fn ask<T: DeserializeOwned>(
        &mut self,
        command: &str,
        within: Duration,
    ) -> Result<T, HypervisorError> {
        self.send(b"", &json!({"execute": command})).await?;
        let answered = timeout(within, self.answer()).await;
        answered.map_err(|_| failed(&self.socket, &format!("no answer to {command} in time")))?
    }

    async fn answer<T: DeserializeOwned>(&mut self) -> Result<T, HypervisorError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(rename = "return")]
            value: Option<Value>,
            error: Option<Refused>,
        }
        #[derive(Deserialize)]
        struct Refused {
            desc: String,
        }
        let line = line(&mut self.stream).await;
        let line = line.map_err(|e| failed(&self.socket, &e))?;
        let foreign = || failed(&self.socket, "the guest agent's answer is not understood");
        let answer: Answer = serde_json::from_slice(&line).map_err(|_| foreign())?;
        match answer {
            Answer {
                error: Some(refused),
                ..
            } => Err(failed(
                &self.socket,
                &format!("the guest agent says: {}", one_line(&refused.desc)),
            )),
            Answer { value, .. } => {
                serde_json::from_value(value.unwrap_or_default()).map_err(|_| foreign())
            }
        }
    }
}

fn failed(socket: &str, reason: &str) -> HypervisorError {
    HypervisorError::Local {
        path: socket.to_owned(),
        reason: reason.to_owned(),
    }
}

/// A number that answers to others do not have.
fn random() -> u32 {
    RandomState::new().build_hasher().finish() as u32
}

/// Reads past the next `byte`.
async fn skip_to(
    from: &mut (impl AsyncRead + Unpin),
    byte: u8,
    left: &mut usize,
) -> Result<(), String> {
    loop {
        let next = from.read_u8().await.map_err(|e| plain(&e))?;
        *left = left.checked_sub(1).ok_or("the guest agent says too much")?;
        if next == byte {
            return Ok(());
        }
    }
}

/// Reads a line.
async fn line(from: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    loop {
        match from.read_u8().await.map_err(|e| plain(&e))? {
            b'\n' => return Ok(out),
            _ if out.len() == MAX_ANSWER => return Err("the guest agent says too much".into()),
            byte => out.push(byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncBufReadExt;
    use tokio::net::UnixListener;

    use super::*;

    #[test]
    fn the_socket_is_found_in_what_qemu_says() {
        let of = |name| socket_of(name).map(|path| path.display().to_string());
        let at = |path: &str| Some(path.to_owned());
        assert_eq!(of("disconnected:unix:/run/a,server=on"), at("/run/a"));
        assert_eq!(of("unix:/run/a,b.qga,server=on"), at("/run/a,b.qga"));
        assert_eq!(of("unix:/run/a"), at("/run/a"));
        assert_eq!(of("unix:a,server=on"), None);
        assert_eq!(of("pty:/dev/pts/1"), None);
    }

    /// An agent that answers so, line by line; the command of each line.
    async fn answering(
        answers: Vec<&'static str>,
    ) -> (
        tempfile::TempDir,
        PathBuf,
        tokio::task::JoinHandle<Vec<String>>,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qga");
        let listener = UnixListener::bind(&path).unwrap();
        let served = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            let mut heard = Vec::new();
            for answer in answers {
                let mut line = Vec::new();
                if stream.read_until(b'\n', &mut line).await.unwrap() == 0 {
                    break;
                }
                let line = line.strip_prefix(b"\xff").unwrap_or(&line);
                let asked: Value = serde_json::from_slice(line).unwrap();
                heard.push(asked["execute"].as_str().unwrap().to_owned());
                let id = asked["arguments"]["id"].to_string();
                let answer = answer.replace("ID", &id);
                let mut bytes = Vec::new();
                for c in answer.chars() {
                    match c {
                        '^' => bytes.push(0xff),
                        c => bytes.push(c as u8),
                    }
                }
                stream.get_mut().write_all(&bytes).await.unwrap();
            }
            heard
        });
        (dir, path, served)
    }

    #[tokio::test]
    async fn file_systems_are_frozen_and_thawed() {
        // Before it, what somebody else did not wait for.
        let answers = vec![
            "{\"return\": {}}\n^{\"return\": 7}\nhalf^{\"return\": ID}\n",
            "{\"return\": \"thawed\"}\n",
            "{\"return\": 2}\n",
            "{\"return\": 2}\n",
        ];
        let (_dir, path, served) = answering(answers).await;
        let mut agent = GuestAgent::connect(&path).await.unwrap();
        assert_eq!(agent.freeze().await.unwrap(), 2);
        assert_eq!(agent.thaw().await.unwrap(), 2);
        let heard = served.await.unwrap();
        let freezes = heard.iter().map(String::as_str);
        let wanted = [
            "guest-sync-delimited",
            "guest-fsfreeze-status",
            "guest-fsfreeze-freeze",
            "guest-fsfreeze-thaw",
        ];
        assert!(freezes.eq(wanted), "{heard:?}");
    }

    #[tokio::test]
    async fn what_an_agent_refuses_is_said_in_its_words() {
        let answers = vec![
            "^{\"return\": ID}\n",
            "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"Command has been\\ndisabled\"}}\n",
        ];
        let (_dir, path, _served) = answering(answers).await;
        let mut agent = GuestAgent::connect(&path).await.unwrap();
        let error = agent.freeze().await.unwrap_err().to_string();
        assert!(error.contains("Command has been"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        let frozen = vec!["^{\"return\": ID}\n", "{\"return\": \"frozen\"}\n"];
        let (_dir, path, _served) = answering(frozen).await;
        let mut agent = GuestAgent::connect(&path).await.unwrap();
        let error = agent.freeze().await.unwrap_err().to_string();
        assert!(error.contains("frozen already"), "{error}");
    }

    #[tokio::test]
    async fn an_agent_that_says_too_much_is_left() {
        let endless: &'static str = Box::leak("x".repeat(MAX_SKIPPED + 2).into_boxed_str());
        let (_dir, path, _served) = answering(vec![endless]).await;
        let error = GuestAgent::connect(&path).await.unwrap_err().to_string();
        assert!(error.contains("too much"), "{error}");
        let long = "^".to_owned() + &"y".repeat(2 * MAX_ANSWER) + "\n^{\"return\": ID}\n";
        let long: &'static str = Box::leak(long.into_boxed_str());
        let (_dir, path, _served) = answering(vec![long]).await;
        // It is skipped like anything that is no answer.
        GuestAgent::connect(&path).await.unwrap();
    }
}
