//! Questions and answers over a connection that may be idle for long.

use std::sync::Arc;

use drover_net::{FrameReader, FrameWriter, NetError, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::error::MigrateError;
use crate::protocol::{Answer, Ask, KEEP_ALIVE, kind};

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

    /// What the other end says next. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks, or something else comes.
    pub async fn hear<T: DeserializeOwned>(&mut self, kind: u8) -> Result<T, MigrateError> {
        let frame = tokio::select! {
            biased;
            frame = self.reader.next() => frame?,
            broken = self.writer.ping_when_idle(KEEP_ALIVE.ping_every) => return Err(broken.into()),
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
