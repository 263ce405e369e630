//! The caller's side.

use std::marker::PhantomData;
use std::time::Duration;

use super::{Request, encode_call, final_reply, kind};
use crate::frame::corrupt;
use crate::{
    Connection, Frame, FrameReader, FrameWriter, Greeting, NetError, Role, decode, encode, greet,
    read_hello, send_hello,
};

/// How long the other end may be silent before its reply.
const SILENCE: Duration = Duration::from_secs(120);

/// Timeout of closing.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Sends the hello and the call, without waiting: what follows may go in the same flight. Not flushed;
/// [`read_reply`] must follow.
///
/// # Errors
/// That the connection broke.
pub async fn open<R: Request>(writer: &mut FrameWriter, request: &R) -> Result<(), NetError> {
    send_hello(writer, Role::Client).await?;
    writer.send(kind::CALL, &encode_call(request)).await
}

/// The reply in the first frame after a call.
///
/// # Errors
/// [`NetError::Refused`], or a protocol error; `peer` names the other end.
pub fn reply_in<R: Request>(frame: &Frame, peer: &str) -> Result<R::Reply, NetError> {
    final_reply::<R>(frame).unwrap_or_else(|| Err(corrupt(peer, "unexpected kind in a reply")))
}

/// The hello, and the reply to a call that [`open`] sent.
///
/// # Errors
/// As [`read_hello`] and [`reply_in`].
pub async fn read_reply<R: Request>(reader: &mut FrameReader) -> Result<R::Reply, NetError> {
    Ok(read_greeted_reply::<R>(reader).await?.1)
}

/// The same, with what the two ends agreed on.
///
/// # Errors
/// As [`read_reply`].
pub async fn read_greeted_reply<R: Request>(
    reader: &mut FrameReader,
) -> Result<(Greeting, R::Reply), NetError> {
    let greeting = read_hello(reader, Role::Client).await?;
    let frame = next(reader).await?;
    let reply = reply_in::<R>(&frame, reader.peer_text())?;
    Ok((greeting, reply))
}

/// An event of a call.
#[derive(Debug)]
pub enum CallEvent<R: Request> {
    /// Progress of the other end.
    Progress(R::Progress),
    /// The reply; nothing follows.
    Reply(R::Reply),
}

/// A call in progress.
#[derive(Debug)]
pub struct OutgoingCall<R> {
    reader: FrameReader,
    writer: FrameWriter,
    request: PhantomData<fn(R)>,
}

impl<R: Request> OutgoingCall<R> {
    /// Exchanges hellos and sends the call.
    ///
    /// # Errors
    /// As [`greet`], or that the connection broke.
    pub async fn start(connection: Connection, request: &R) -> Result<Self, NetError> {
        let (mut reader, mut writer) = connection.split();
        greet(&mut reader, &mut writer, Role::Client).await?;
        reader.set_idle_timeout(Some(SILENCE));
        writer.send(kind::CALL, &encode_call(request)).await?;
        writer.flush().await?;
        Ok(OutgoingCall {
            reader,
            writer,
            request: PhantomData,
        })
    }

    /// Sends progress.
    ///
    /// # Errors
    /// That the connection broke.
    pub async fn report(&mut self, progress: &R::Progress) -> Result<(), NetError> {
        self.writer.send(kind::PROGRESS, &encode(progress)).await?;
        self.writer.flush().await
    }

    /// What comes next. Cancel safe.
    ///
    /// # Errors
    /// [`NetError::Refused`], a lost connection, or a protocol error.
    pub async fn next(&mut self) -> Result<CallEvent<R>, NetError> {
        let frame = next(&mut self.reader).await?;
        if frame.kind == kind::PROGRESS {
            return Ok(CallEvent::Progress(decode(&frame.payload)?));
        }
        Ok(CallEvent::Reply(reply_in::<R>(
            &frame,
            self.reader.peer_text(),
        )?))
    }

    /// Closes the connection.
    pub async fn close(self) {
        // The reply has come.
        let _ = crate::close(self.reader, self.writer, CLOSE_LIMIT).await;
    }
}

/// The next frame of a conversation that is not over.
pub(super) async fn next(reader: &mut FrameReader) -> Result<Frame, NetError> {
    reader.next().await?.ok_or_else(|| NetError::Truncated {
        peer: reader.peer_text().to_owned(),
    })
}

/// Calls and waits for the reply; `progress` receives the messages before it.
///
/// # Errors
/// [`NetError::Refused`], as [`greet`], or that the connection broke.
pub async fn call<R: Request>(
    connection: Connection,
    request: &R,
    mut progress: impl FnMut(R::Progress),
) -> Result<R::Reply, NetError> {
    let mut calling = OutgoingCall::start(connection, request).await?;
    loop {
        match calling.next().await? {
            CallEvent::Progress(said) => progress(said),
            CallEvent::Reply(reply) => {
                calling.close().await;
                return Ok(reply);
            }
        }
    }
}
