//! Talking to the mount daemon: one line of JSON asks, lines of JSON answer, over the mount's own socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::left::Left;
use super::status::Status;
use crate::error::{Context, Result, bail};
use crate::remote::SocketPath;

/// The longest line either side takes.
const MAX_LINE: u64 = 1 << 20;

/// How long a caller may take to say what it wants.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// How long an answer may take to begin, and each line of it to follow.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Callers at once.
const MAX_CALLERS: usize = 32;

/// What the mount daemon is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// How is it?
    Status,
    /// End it.
    Stop(StopHow),
}

/// How a mount ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopHow {
    /// Do not push what was written.
    pub offline: bool,
    /// Throw away what was not pushed.
    pub discard: bool,
    /// Leave the cache.
    pub keep_cache: bool,
    /// Take it out of the tree even while it is used.
    pub lazy: bool,
}

/// What the mount daemon answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// How it is; while it ends, a line from time to time.
    Status(Box<Status>),
    /// It has ended; what is left.
    Ended(Left),
    /// It will not, and goes on as before.
    Refused(String),
}

/// Answers one caller: handed each question, tells answers through the function.
pub type Handler = dyn Fn(Ask, &mut dyn FnMut(Answer) -> Result<()>) -> Result<()> + Send + Sync;

/// Listens on `path` until the process ends, on threads of its own.
///
/// # Errors
/// When the socket cannot be made.
pub fn listen(path: &Path, handler: Arc<Handler>) -> Result<()> {
    let short = SocketPath::of(path)?;
    // The lock of the mount is ours: whoever left a socket here is gone.
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(short.path())
        .with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot protect {}", path.display()))?;
    let callers = Arc::new(AtomicUsize::new(0));
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                if callers.fetch_add(1, Ordering::Relaxed) >= MAX_CALLERS {
                    callers.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (handler, counted) = (Arc::clone(&handler), Arc::clone(&callers));
                let talk = std::thread::Builder::new()
                    .name("caller".into())
                    .spawn(move || {
                        if let Err(e) = answer(stream, handler.as_ref()) {
                            tracing::debug!("a caller: {e:#}");
                        }
                        counted.fetch_sub(1, Ordering::Relaxed);
                    });
                if talk.is_err() {
                    callers.fetch_sub(1, Ordering::Relaxed);
                }
            }
        })
        .context("cannot start a thread")?;
    Ok(())
}

fn answer(stream: UnixStream, handler: &Handler) -> Result<()> {
    stream.set_read_timeout(Some(ASK_LIMIT))?;
    stream.set_write_timeout(Some(ASK_LIMIT))?;
    let mut line = String::new();
    BufReader::new(&stream)
        .take(MAX_LINE)
        .read_line(&mut line)?;
    let ask: Ask = serde_json::from_str(&line).context("not a question")?;
    handler(ask, &mut |answer| {
        let mut text = serde_json::to_string(&answer)?;
        text.push('\n');
        (&stream).write_all(text.as_bytes())?;
        Ok(())
    })
}

/// Asks the mount daemon that listens on `path`; `each` sees every answer until it says that it was the last.
///
/// # Errors
/// When nobody listens there, or the answer breaks off.
pub fn ask(path: &Path, question: &Ask, each: impl FnMut(Answer) -> Result<bool>) -> Result<()> {
    ask_within(path, question, ANSWER_LIMIT, each)
}

fn ask_within(
    path: &Path,
    ask: &Ask,
    limit: Duration,
    mut each: impl FnMut(Answer) -> Result<bool>,
) -> Result<()> {
    let short = SocketPath::of(path)?;
    let stream = UnixStream::connect(short.path())
        .with_context(|| format!("nobody answers at {}", path.display()))?;
    stream.set_read_timeout(Some(limit))?;
    let mut text = serde_json::to_string(ask)?;
    text.push('\n');
    (&stream).write_all(text.as_bytes())?;
    let mut lines = BufReader::new(&stream);
    loop {
        let mut line = String::new();
        let got = lines
            .by_ref()
            .take(MAX_LINE)
            .read_line(&mut line)
            .context("the mount daemon does not answer")?;
        if got == 0 {
            bail!("the mount daemon ended without an answer");
        }
        if each(serde_json::from_str(&line).context("an answer that makes no sense")?)? {
            return Ok(());
        }
    }
}

/// How the mount that listens on `path` is, when it says so within `limit`.
///
/// # Errors
/// As [`ask()`].
pub fn status(path: &Path, limit: Duration) -> Result<Status> {
    let mut found = None;
    ask_within(path, &Ask::Status, limit, |answer| {
        if let Answer::Status(status) = answer {
            found = Some(*status);
        }
        Ok(true)
    })?;
    found.context("an answer to another question")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_answered_and_rubbish_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        listen(
            &path,
            Arc::new(|ask, tell| match ask {
                Ask::Status => tell(Answer::Refused("no".into())),
                Ask::Stop(how) => {
                    tell(Answer::Refused("busy".into()))?;
                    tell(Answer::Ended(Left::here(how.keep_cache.to_string())))
                }
            }),
        )
        .unwrap();
        let mut heard = Vec::new();
        let how = StopHow {
            keep_cache: true,
            ..StopHow::default()
        };
        ask(&path, &Ask::Stop(how), |answer| {
            let (said, last) = match answer {
                Answer::Ended(left) => (left.here, true),
                other => (format!("{other:?}"), false),
            };
            heard.push(said);
            Ok(last)
        })
        .unwrap();
        assert_eq!(heard, ["Refused(\"busy\")", "true"]);
        assert!(status(&path, ASK_LIMIT).is_err());
        let mut rude = UnixStream::connect(&path).unwrap();
        rude.write_all(b"hello\n").unwrap();
        let mut rest = String::new();
        rude.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "");
    }
}
