//! Calls: served, refused, and hostile.

use std::time::Duration;

use drover_net::service::{
    CallEvent, Exchange, Handler, MAX_ID, OutgoingCall, Peer, Request, Services, call, decode_call,
    encode_call, kind, open, read_reply, reply_in,
};
use drover_net::service::{IncomingCall, Service, ServiceFuture};
use drover_net::{
    Code, Connection, FrameReader, FrameWriter, Identity, NetError, Refusal, Right, Rights, Role,
    encode, greet,
};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Counts down and reports every number, until zero or until it is stopped.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Count(u32);

impl Request for Count {
    const SERVICE: &'static str = "test.count";
    const RIGHT: Right = Right::List;
    type Progress = u32;
    type Reply = String;
}

#[derive(Debug, Serialize, Deserialize)]
struct Shout(String);

drover_net::request!(Shout: "test.shout", Manage, () => String);

struct Counter;

impl Handler<Count> for Counter {
    async fn handle(
        &self,
        peer: &Peer,
        request: Count,
        exchange: &mut Exchange<'_, Count>,
    ) -> Result<String, Refusal> {
        if request.0 == 13 {
            return Err(Refusal::new(Code::Denied, "not that one"));
        }
        for at in (0..request.0).rev() {
            exchange.report(&at).await?;
            if exchange.next_progress().await? > at {
                return Ok("left off".into());
            }
        }
        Ok(format!("{} counted", peer.name))
    }
}

/// Says back every frame that follows.
struct Echo;

#[derive(Debug, Serialize, Deserialize)]
struct OpenEcho;

impl Request for OpenEcho {
    const SERVICE: &'static str = "test.echo";
    const RIGHT: Right = Right::Send;
    type Progress = ();
    type Reply = u8;
}

impl Service for Echo {
    fn id(&self) -> &'static str {
        OpenEcho::SERVICE
    }

    fn right(&self) -> Right {
        OpenEcho::RIGHT
    }

    fn serve(&self, _: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let OpenEcho = call.request()?;
            call.accept::<OpenEcho>(&7).await?;
            while let Some(frame) = call.reader.next().await? {
                call.writer.send(frame.kind, &frame.payload).await?;
                call.writer.flush().await?;
            }
            call.writer.finish().await?;
            Ok(())
        })
    }
}

/// A connection that is served with some rights.
fn served(rights: Rights) -> (Connection, JoinHandle<Result<(), String>>) {
    let (here, there) = Connection::pair().unwrap();
    let served = tokio::spawn(async move {
        let mut services = Services::new(Refusal::new(Code::Unsupported, "nothing of the sort"));
        services.handle::<Count>(Counter);
        services.handle::<Shout>(Refusal::new(Code::Busy, "hoarse"));
        services.add(Echo);
        let peer = Peer {
            key: Identity::generate().key(),
            name: "lyon".into(),
            rights,
            domain: "default".into(),
        };
        let (_go, stop) = watch::channel(false);
        let call = IncomingCall::receive(there, stop)
            .await
            .map_err(|e| e.to_string())?;
        services.serve(peer, call).await.map_err(|e| e.to_string())
    });
    (here, served)
}

async fn greeted(rights: Rights) -> (FrameReader, FrameWriter, JoinHandle<Result<(), String>>) {
    let (here, served) = served(rights);
    let (mut reader, mut writer) = here.split();
    greet(&mut reader, &mut writer, Role::Client).await.unwrap();
    (reader, writer, served)
}

fn refusal<T: std::fmt::Debug>(result: Result<T, NetError>) -> Refusal {
    match result {
        Err(NetError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn both_ends_say_how_far_they_are() {
    let (here, served) = served(Rights::DEFAULT.of_peer());
    let mut counting = OutgoingCall::start(here, &Count(3)).await.unwrap();
    let mut heard = Vec::new();
    let reply = loop {
        match counting.next().await.unwrap() {
            CallEvent::Progress(at) => {
                heard.push(at);
                counting.report(&0).await.unwrap();
            }
            CallEvent::Reply(reply) => break reply,
        }
    };
    counting.close().await;
    assert_eq!((heard, reply.as_str()), (vec![2, 1, 0], "lyon counted"));
    served.await.unwrap().unwrap();
    let (here, _) = self::served(Rights::DEFAULT.of_peer());
    let mut counting = OutgoingCall::start(here, &Count(9)).await.unwrap();
    assert!(matches!(
        counting.next().await.unwrap(),
        CallEvent::Progress(8)
    ));
    counting.report(&100).await.unwrap();
    assert!(matches!(counting.next().await.unwrap(), CallEvent::Reply(r) if r == "left off"));
}

#[tokio::test]
async fn whoever_may_not_or_asks_for_nothing_there_is_is_refused() {
    let said = refusal(call(served(Rights::DEFAULT.of_peer()).0, &Count(13), |_| {}).await);
    assert_eq!(said, Refusal::new(Code::Denied, "not that one"));
    assert!(!said.retry);
    let said = refusal(
        call(
            served(Rights::DEFAULT.of_peer()).0,
            &Shout("x".into()),
            |()| {},
        )
        .await,
    );
    assert_eq!(said.code, Code::Denied);
    assert!(said.message.contains("the right manage"), "{said}");
    let said = refusal(call(served(Rights::OWNER).0, &Shout("x".into()), |()| {}).await);
    assert_eq!((said.code, said.retry), (Code::Busy, true));
    let said = refusal(call(served(Rights::STRANGER).0, &Count(1), |_| {}).await);
    assert_eq!(said.code, Code::Denied);
    let (mut reader, mut writer, served) = greeted(Rights::DEFAULT.of_peer()).await;
    writer.send(kind::CALL, b"\x04none").await.unwrap();
    writer.flush().await.unwrap();
    let frame = reader.next().await.unwrap().unwrap();
    let said = refusal(reply_in::<Count>(&frame, "it"));
    assert_eq!((said.code, said.retry), (Code::Unsupported, false));
    drover_net::close(reader, writer, Duration::from_secs(5))
        .await
        .unwrap();
    served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_conversation_follows_a_reply_and_may_begin_in_the_same_flight() {
    let (here, served) = served(Rights::DEFAULT.of_peer());
    let (mut reader, mut writer) = here.split();
    open(&mut writer, &OpenEcho).await.unwrap();
    writer.send(0x42, b"early").await.unwrap();
    writer.finish().await.unwrap();
    assert_eq!(read_reply::<OpenEcho>(&mut reader).await.unwrap(), 7);
    let frame = reader.next().await.unwrap().unwrap();
    assert_eq!((frame.kind, &frame.payload[..]), (0x42, &b"early"[..]));
    assert!(reply_in::<OpenEcho>(&frame, "it").is_err());
    assert!(reader.next().await.unwrap().is_none());
    served.await.unwrap().unwrap();
}

#[tokio::test]
async fn what_is_no_call_ends_the_connection() {
    let long = [&[33u8][..], &[b'a'; 33]].concat();
    let bad: [(u8, &[u8]); 7] = [
        (0x42, b"\x04none"),
        (kind::REPLY, b"\x04none"),
        (kind::CALL, b""),
        (kind::CALL, b"\0"),
        (kind::CALL, b"\x05none"),
        (kind::CALL, b"\x04No/e"),
        (kind::CALL, &long),
    ];
    for (kind, payload) in bad {
        let (mut reader, mut writer, served) = greeted(Rights::DEFAULT.of_peer()).await;
        writer.send(kind, payload).await.unwrap();
        writer.flush().await.unwrap();
        assert!(!matches!(reader.next().await, Ok(Some(_))), "{payload:?}");
        served.await.unwrap().unwrap_err();
    }
    // A request that is none, and more than one.
    for rest in [&b""[..], &[0x80], &[1, 2]] {
        let (mut reader, mut writer, served) = greeted(Rights::DEFAULT.of_peer()).await;
        let payload = [b"\x0atest.count", rest].concat();
        writer.send(kind::CALL, &payload).await.unwrap();
        writer.flush().await.unwrap();
        assert!(!matches!(reader.next().await, Ok(Some(_))), "{rest:?}");
        served.await.unwrap().unwrap_err();
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_wants_nothing_is_hung_up_on() {
    let (mut reader, _writer, served) = greeted(Rights::DEFAULT.of_peer()).await;
    assert!(!matches!(reader.next().await, Ok(Some(_))));
    let why = served.await.unwrap().unwrap_err();
    assert!(why.contains("took longer than 10s"), "{why}");
}

#[test]
fn the_documented_bytes() {
    // docs/format/services.md shows them.
    assert_eq!(encode_call(&Count(300)), b"\x0atest.count\xac\x02");
    let refusal = Refusal::new(Code::Denied, "no");
    assert_eq!(encode(&refusal), [3, 2, b'n', b'o', 0]);
    assert_eq!(encode(&Refusal::new(Code::Failed, "")), [16, 0, 1]);
}

proptest! {
    #[test]
    fn any_bytes_name_a_service_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok((id, request)) = decode_call(&bytes) {
            prop_assert!((1..=MAX_ID).contains(&id.len()));
            prop_assert_eq!(1 + id.len() + request.len(), bytes.len());
        }
    }
}
