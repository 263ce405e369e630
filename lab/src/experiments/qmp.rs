//! A client of QEMU's control socket (QMP): one command at a time; events are kept.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Timeout for a reply.
const ANSWER: Duration = Duration::from_secs(20);

/// A connection to a running QEMU.
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// Events that nobody has waited for yet, the oldest first.
    events: Vec<Value>,
}

impl Qmp {
    /// Connects to the process `child` once it listens.
    pub fn connect(socket: &Path, child: &mut Child) -> Result<Self> {
        let deadline = Instant::now() + ANSWER;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(e) if Instant::now() > deadline => return Err(e).context("QEMU's socket"),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
            if let Some(status) = child.try_wait()? {
                bail!("QEMU ended at once: {status}");
            }
        };
        stream.set_write_timeout(Some(ANSWER))?;
        let mut qmp = Self {
            stream: BufReader::new(stream),
            events: Vec::new(),
        };
        qmp.line(deadline)?.context("no greeting")?;
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Sends a command and returns the reply.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        let deadline = Instant::now() + ANSWER;
        loop {
            let mut answer = self.line(deadline)?.context("QEMU has gone")?;
            if let Some(answer) = answer.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            self.events.push(answer);
        }
    }

    /// Waits for the first event that is `wanted`, and takes it.
    pub fn wait(
        &mut self,
        patience: Duration,
        mut wanted: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + patience;
        let mut seen = 0;
        loop {
            while seen == self.events.len() {
                let event = self.line(deadline)?.context("QEMU has gone")?;
                self.events.push(event);
            }
            if wanted(&self.events[seen]) {
                return Ok(self.events.remove(seen));
            }
            seen += 1;
        }
    }

    /// Waits for an event of this name; its time in seconds since 1970, by QEMU's clock.
    pub fn when(&mut self, name: &str, patience: Duration) -> Result<f64> {
        let event = self.wait(patience, |event| event["event"] == name);
        let event = event.with_context(|| format!("no event {name}"))?;
        let part = |key: &str| event["timestamp"][key].as_f64().context("no timestamp");
        Ok(part("seconds")? + part("microseconds")? / 1e6)
    }

    /// The times of all events of this name, until none comes for so long, or QEMU has ended.
    pub fn all(&mut self, name: &str, patience: Duration) -> Vec<f64> {
        std::iter::from_fn(|| self.when(name, patience).ok()).collect()
    }

    /// The next line; `None` at the end.
    fn line(&mut self, deadline: Instant) -> Result<Option<Value>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        self.stream.get_ref().set_read_timeout(Some(left))?;
        let mut line = String::new();
        if self.stream.read_line(&mut line).context("QEMU's answer")? == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&line)?))
    }
}
