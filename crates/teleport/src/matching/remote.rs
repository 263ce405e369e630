//! A remote teleporter: the same events and answers as in a site, over a connection.

use std::time::{Duration, Instant};

use drover_index::Probe;
use drover_net::service::{self, IncomingCall, read_reply};
use drover_net::{
    Code, ConnectOptions, DEFAULT_DOMAIN, Frame, Identity, KeepAlive, NetError, PeerKey, Refusal,
    connect_any,
};

use super::link::{LocalTeleporter, RemoteLink, handle};
use super::wire::{decode_event, encode_answer};
use crate::TeleportError;
use crate::frames::{read_frames, wait_true, write_frames};
use crate::protocol::{MAX_SESSION_FRAME, kind};
use crate::services::{BeginMatching, BeginMatchingFor};
use crate::teleporter::{Answer, Event, ImageEvent};

/// A teleporter on another machine.
#[derive(Debug, Clone)]
pub struct RemoteTeleporter {
    /// The domain of this site that it matches for.
    pub domain: String,
    /// This site's identity.
    pub identity: Identity,
    /// The teleporter's key.
    pub key: PeerKey,
    /// Its addresses.
    pub addresses: Vec<String>,
}

/// Connects a site to its teleporter.
///
/// # Errors
/// When it cannot be reached or does not serve this site.
pub async fn connect(remote: &RemoteTeleporter) -> Result<RemoteLink, TeleportError> {
    let options = ConnectOptions::named("the teleporter");
    let connection =
        connect_any(&remote.addresses, &remote.identity, &remote.key, &options).await?;
    let (mut reader, mut writer) = connection.split();
    KeepAlive::default().apply(&mut reader, &mut writer);
    match remote.domain.as_str() {
        // As sites without domains do.
        DEFAULT_DOMAIN => service::open(&mut writer, &BeginMatching).await?,
        domain => {
            let domain = domain.to_owned();
            service::open(&mut writer, &BeginMatchingFor { domain }).await?;
        }
    }
    writer.flush().await?;
    let refused = |e| match e {
        NetError::Refused(refusal) => TeleportError::Teleporter(refusal),
        e => e.into(),
    };
    let reply = read_reply::<BeginMatching>(&mut reader).await;
    reply.map_err(refused)?;
    reader.set_max_frame(MAX_SESSION_FRAME);
    let (to, _) = write_frames(writer);
    Ok(RemoteLink {
        to,
        from: read_frames(reader),
        waiting: Default::default(),
    })
}

/// Interval at which an idle connection asks whether it is to end.
const IDLE_LOOK: Duration = Duration::from_secs(1);

/// Serves one connection of a destination that called [`BeginMatching`] or [`BeginMatchingFor`], until the destination
/// hangs up, the call is stopped, or `ends_idle` returns true: it is called now and then with the time since the last
/// request. Images still in transit on the connection are aborted then.
///
/// # Errors
/// When the connection breaks or the destination violates the protocol.
pub async fn serve_teleporter(
    mut call: IncomingCall,
    teleporter: LocalTeleporter,
    ends_idle: impl Fn(Duration) -> bool,
) -> Result<(), TeleportError> {
    call.reader.set_max_frame(MAX_SESSION_FRAME);
    KeepAlive::default().apply(&mut call.reader, &mut call.writer);
    call.accept::<BeginMatching>(&()).await?;
    let (to, _) = write_frames(call.writer);
    let mut frames = read_frames(call.reader);
    let mut begun = Vec::new();
    let mut probe = Probe::default();
    let mut last = Instant::now();
    let result = loop {
        let frame = tokio::select! {
            frame = frames.recv() => frame,
            () = wait_true(call.stop.clone()) => break Ok(()),
            () = tokio::time::sleep(IDLE_LOOK) => match ends_idle(last.elapsed()) {
                true => break Err(TeleportError::Failed(
                    "the destination was idle while others waited".into(),
                )),
                false => continue,
            },
        };
        let frame = match frame {
            None => break Ok(()),
            Some(Err(e)) => break Err(e),
            Some(Ok(frame)) => frame,
        };
        let event = match decode_event(&frame.payload) {
            Ok(event) if frame.kind == kind::MATCH => event,
            _ => {
                break Err(TeleportError::Protocol("expected a match request".into()));
            }
        };
        if let Event::Image(image, what) = event {
            begun.retain(|i| *i != image);
            if what == ImageEvent::Begin {
                begun.push(image);
            }
        }
        let shared = teleporter.clone();
        let answer = tokio::task::spawn_blocking(move || match event {
            Event::Probe(batch) => {
                if batch.index == 0 {
                    probe = Probe::default();
                }
                let known = shared.lock().probe(&mut probe, &batch);
                let known = known.map(Answer::Known).map_err(TeleportError::from);
                (known, probe)
            }
            event => (handle(&shared, event), probe),
        })
        .await;
        let answer = match answer {
            Ok((answer, next)) => {
                probe = next;
                answer.map_err(|e| {
                    tracing::warn!("cannot match: {e}");
                    e.for_peer()
                })
            }
            Err(_) => {
                probe = Probe::default();
                Err(Refusal::new(Code::Failed, "it stopped"))
            }
        };
        let frame = Frame::new(kind::PLAN, encode_answer(&answer));
        // One that does not read answers is no better than one that asks nothing.
        let sent = tokio::select! {
            sent = to.send(frame) => sent.is_ok(),
            () = wait_true(call.stop.clone()) => false,
        };
        if !sent {
            break Ok(());
        }
        last = Instant::now();
    };
    let aborted = tokio::task::spawn_blocking(move || {
        for image in begun {
            let _ = handle(&teleporter, Event::Image(image, ImageEvent::Abort));
        }
    });
    let _ = aborted.await;
    result
}
