//! Questions and answers over a connection that may be idle for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_net::{FrameReader, FrameWriter, NetError, WireCounters, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::error::MigrateError;
use crate::protocol::{Answer, Ask, KEEP_ALIVE, kind};

/// How often an end that has nothing to say, or is doing what it was asked, shows that it lives.
const PING_EVERY: Duration = Duration::from_secs(1);

/// The oldest protocol by which the other end shows that.
const PROTOCOL_OF_PINGS: u16 = 4;

/// How long nothing may come from such an end while a machine is paused for it. Otherwise [`KEEP_ALIVE`] says that.
const SILENT: Duration = Duration::from_secs(5);

/// How often that is looked at. An end that stands still itself counts for one of these.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Whether the other end lives, by what comes over its connection.
#[derive(Debug, Default)]
pub struct Liveness {
    wire: Arc<WireCounters>,
    paused: AtomicBool,
    /// Whether the other end shows it often.
    pings: bool,
}

impl Liveness {
    /// That of the end of a connection whose ends have agreed on this protocol.
    #[must_use]
    pub fn of(wire: Arc<WireCounters>, protocol: u16, paused: bool) -> Self {
        Self {
            wire,
            paused: AtomicBool::new(paused),
            pings: protocol >= PROTOCOL_OF_PINGS,
        }
    }

    /// Whether somebody is paused, and waits for it.
    pub fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Returns when nothing has come for [`SILENT`] while somebody waits for it; never if the other end may be silent for longer.
    /// Cancel safe.
    pub async fn lost(&self) {
        let (mut seen, mut silent) = (self.wire.received(), Duration::ZERO);
        while silent < SILENT {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = self.wire.received();
            if self.pings && now == seen && self.paused.load(Ordering::Relaxed) {
                silent += LOOK_EVERY;
            } else {
                (seen, silent) = (now, Duration::ZERO);
            }
        }
    }
}

/// One end of the conversation.
pub struct Talk {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Talk {
    /// Uses an open connection, after the reply to the call that opened it.
    #[must_use]
    pub fn new(mut reader: FrameReader, mut writer: FrameWriter) -> Self {
        KEEP_ALIVE.apply(&mut reader, &mut writer);
        Self { reader, writer }
    }

    /// Says something.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn say(&mut self, kind: u8, message: &impl Serialize) -> Result<(), MigrateError> {
        self.writer.send(kind, &encode(message)).await?;
        Ok(self.writer.flush().await?)
    }

    /// Waits for what the other end has asked for, and shows it meanwhile that this one lives.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Result<T, MigrateError> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            broken = self.writer.ping_when_idle(PING_EVERY) => Err(broken.into()),
        }
    }

    /// What the other end says next. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks, or something else comes.
    pub async fn hear<T: DeserializeOwned>(&mut self, kind: u8) -> Result<T, MigrateError> {
        let frame = tokio::select! {
            biased;
            frame = self.reader.next() => frame?,
            broken = self.writer.ping_when_idle(PING_EVERY) => return Err(broken.into()),
        };
        match frame {
            Some(frame) if frame.kind == kind => Ok(decode(&frame.payload)?),
            Some(_) => Err(MigrateError::Protocol("a move")),
            None => {
                let peer = self.reader.peer_text().to_owned();
                Err(NetError::Truncated { peer }.into())
            }
        }
    }
}

/// The seeder's end: it also shows that it lives, and notices that the other end does not, while nothing is asked.
pub struct Asker {
    questions: mpsc::Sender<Question>,
    task: JoinHandle<()>,
}

type Question = (Ask, oneshot::Sender<Result<Answer, MigrateError>>);

impl Asker {
    /// Asks over this connection; `lost` is notified when it breaks.
    #[must_use]
    pub fn new(talk: Talk, lost: Arc<Notify>) -> Self {
        let (questions, queue) = mpsc::channel(1);
        let task = tokio::spawn(async move {
            if let Err(e) = ask_all(talk, queue).await {
                tracing::debug!("conversation: {e}");
                lost.notify_one();
            }
        });
        Self { questions, task }
    }

    /// Whether its connection has not broken, as far as is known here.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.task.is_finished()
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// When the connection is broken.
    pub async fn ask(&self, ask: Ask) -> Result<Answer, MigrateError> {
        let (reply, answer) = oneshot::channel();
        let asked = self.questions.send((ask, reply)).await;
        asked.map_err(|_| MigrateError::Lost)?;
        answer.await.map_err(|_| MigrateError::Lost)?
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn ask_all(mut talk: Talk, mut queue: mpsc::Receiver<Question>) -> Result<(), MigrateError> {
    loop {
        let asked = tokio::select! {
            asked = queue.recv() => asked,
            // Nothing comes unasked.
            said = talk.hear::<Answer>(kind::ANSWER) => {
                return said.and(Err(MigrateError::Protocol("a move")));
            }
        };
        let Some((ask, reply)) = asked else {
            return Ok(());
        };
        let answered = async {
            talk.say(kind::ASK, &ask).await?;
            talk.hear(kind::ANSWER).await
        };
        let answered = answered.await;
        let broken = answered.is_err();
        // Whoever asked may have given up.
        let _ = reply.send(answered);
        if broken {
            return Err(MigrateError::Lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_net::Connection;
    use drover_store::machine::Decision;

    use super::*;

    /// Both ends, and what shows whether the second one lives.
    fn pair() -> (Talk, Talk, Liveness) {
        let (here, there) = Connection::pair().unwrap();
        let liveness = Liveness::of(here.wire(), PROTOCOL_OF_PINGS, false);
        let talk = |connection: Connection| {
            let (reader, writer) = connection.split();
            Talk::new(reader, writer)
        };
        (talk(here), talk(there), liveness)
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_that_is_silent_counts_as_lost_only_while_somebody_is_paused() {
        let (_here, _there, liveness) = pair();
        let lost = liveness.lost();
        tokio::pin!(lost);
        let minute = Duration::from_secs(60);
        assert!(tokio::time::timeout(minute, &mut lost).await.is_err());
        liveness.set_paused(true);
        let soon = SILENT + 2 * LOOK_EVERY;
        assert!(tokio::time::timeout(SILENT / 2, &mut lost).await.is_err());
        assert!(tokio::time::timeout(soon, &mut lost).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn an_earlier_drover_may_be_silent_for_longer() {
        let (here, _there) = Connection::pair().unwrap();
        let liveness = Liveness::of(here.wire(), PROTOCOL_OF_PINGS - 1, true);
        let silence = tokio::time::timeout(KEEP_ALIVE.dead_after, liveness.lost());
        assert!(silence.await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_that_works_long_lives() {
        let (mut here, mut there, liveness) = pair();
        liveness.set_paused(true);
        let works = async {
            let ask: Ask = there.hear(kind::ASK).await.unwrap();
            assert_eq!(ask, Ask::Arrived);
            there
                .meanwhile(tokio::time::sleep(SILENT + 4 * LOOK_EVERY))
                .await
                .unwrap();
            let answer = Answer {
                decision: Decision::Open,
                why: String::new(),
            };
            there.say(kind::ANSWER, &answer).await.unwrap();
        };
        let asks = async {
            here.say(kind::ASK, &Ask::Arrived).await.unwrap();
            tokio::select! {
                answer = here.hear::<Answer>(kind::ANSWER) => answer.unwrap(),
                () = liveness.lost() => panic!("it works, and says so"),
            }
        };
        let (answer, ()) = tokio::join!(asks, works);
        assert_eq!(answer.decision, Decision::Open);
    }
}
