//! Clients that are no drover: keys nobody trusts, frames nobody sends.

use std::time::Duration;

use drover_core::ImageName;
use drover_net::{
    ConnectOptions, Connection, FrameReader, FrameWriter, Identity, Role, Ticket, connect_any,
    decode, encode, greet, greet_as,
};
use drover_teleport::RefuseReason;
use drover_teleport::protocol::{Refusal, Reply, Request, kind};

use crate::world::{Site, World};

/// A client that can say anything.
struct Client {
    identity: Identity,
    ticket: Ticket,
}

impl Client {
    fn new(site: &Site) -> Client {
        Client {
            identity: Identity::generate(),
            ticket: site.ticket.parse().unwrap(),
        }
    }

    async fn connect(&self) -> Connection {
        let options = ConnectOptions::named("the site");
        connect_any(
            &self.ticket.addresses,
            &self.identity,
            &self.ticket.key,
            &options,
        )
        .await
        .unwrap()
    }

    async fn greeted(&self) -> (FrameReader, FrameWriter) {
        let (mut reader, mut writer) = self.connect().await.split();
        greet(&mut reader, &mut writer, Role::Client).await.unwrap();
        reader.set_idle_timeout(Some(Duration::from_secs(60)));
        (reader, writer)
    }

    async fn ask(&self, request: &Request) -> Reply {
        let (mut reader, mut writer) = self.greeted().await;
        writer.send(kind::REQUEST, &encode(request)).await.unwrap();
        writer.flush().await.unwrap();
        let frame = reader.next().await.unwrap().unwrap();
        assert_eq!(frame.kind, kind::REPLY);
        decode(&frame.payload).unwrap()
    }

    async fn pair(&self, name: &str, addresses: Vec<String>) -> Reply {
        self.ask(&Request::Pair {
            secret: self.ticket.secret,
            name: name.into(),
            addresses,
        })
        .await
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(test)
}

fn reason(reply: Reply) -> (Option<RefuseReason>, String) {
    match reply {
        Reply::Refused(Refusal { reason, message }) => (reason, message),
        other => panic!("not refused: {other:?}"),
    }
}

fn every_request() -> Vec<Request> {
    let name = ImageName::new("a.img").unwrap();
    vec![
        Request::Send {
            images: 1,
            session: [0; 16],
        },
        Request::Lane { session: [0; 16] },
        Request::Images,
        Request::Verify { name: name.clone() },
        Request::Teleporter,
        Request::Status,
        Request::Metrics,
        Request::Index {
            paths: vec!["/etc/passwd".into()],
        },
        Request::Remove { name },
    ]
}

#[test]
fn a_strangers_every_request_is_refused() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let stranger = Client::new(&site);
        for request in every_request() {
            assert_eq!(
                reason(stranger.ask(&request).await).0,
                Some(RefuseReason::Trust),
                "{request:?}"
            );
        }
        let guess = Request::Pair {
            secret: [7; 16],
            name: "x".into(),
            addresses: vec![],
        };
        let (why, text) = reason(stranger.ask(&guess).await);
        assert_eq!(why, Some(RefuseReason::Trust));
        assert!(text.contains("not one of this site's"), "{text}");
    });
    assert_eq!(world.run("far", &["peers", "--json"]).ok().out, "");
}

#[test]
fn what_only_the_machine_itself_may_ask_is_refused_to_peers() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let peer = Client::new(&site);
        assert!(matches!(
            peer.pair("web", vec![]).await,
            Reply::Paired { .. }
        ));
        for request in every_request() {
            let local = matches!(
                request,
                Request::Status
                    | Request::Metrics
                    | Request::Index { .. }
                    | Request::Remove { .. }
                    | Request::Teleporter
            );
            if local {
                assert_eq!(
                    reason(peer.ask(&request).await).0,
                    Some(RefuseReason::Policy),
                    "{request:?}"
                );
            }
        }
        assert_eq!(peer.ask(&Request::Images).await, Reply::Images(vec![]));
    });
}

#[test]
fn frames_that_nobody_sends_end_only_their_own_connection() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let client = Client::new(&site);
        // Too large from one who is not trusted.
        let (mut reader, mut writer) = client.greeted().await;
        let _ = writer.send(kind::REQUEST, &vec![0u8; 1 << 20]).await;
        let _ = writer.flush().await;
        assert!(
            !matches!(reader.next().await, Ok(Some(_))),
            "answered a frame that is too large"
        );
        // Of a kind that begins nothing; and rubbish in a kind that does.
        for (frame, payload) in [
            (kind::LITERAL, vec![1, 2, 3]),
            (kind::REQUEST, vec![0xff; 64]),
            (kind::REQUEST, vec![]),
        ] {
            let (mut reader, mut writer) = client.greeted().await;
            writer.send(frame, &payload).await.unwrap();
            writer.flush().await.unwrap();
            assert!(
                !matches!(reader.next().await, Ok(Some(_))),
                "answered rubbish"
            );
        }
        // A protocol that is older than any.
        let (mut reader, mut writer) = client.connect().await.split();
        let e = greet_as(
            &mut reader,
            &mut writer,
            Role::Client,
            "drover 0.0.1",
            0..=0,
        )
        .await
        .unwrap_err();
        assert!(e.to_string().contains("upgrade"), "{e}");
        // Nothing at all, and gone.
        drop(client.connect().await);
        assert!(
            matches!(client.pair("web", vec![]).await, Reply::Paired { .. }),
            "the site goes on"
        );
    });
    assert!(!site.log().contains("panicked"), "{}", site.log());
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn what_a_peer_calls_itself_is_made_harmless() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let client = Client::new(&site);
        let addresses = [
            "\u{1b}[2J:1",
            "ok.example:7377",
            "no port",
            &"x".repeat(300),
        ]
        .map(String::from);
        client
            .pair("../\u{1b}]0;owned\u{7}\n", addresses.to_vec())
            .await;
    });
    let peers = world.run("far", &["peers", "--json"]).ok().json();
    assert_eq!(
        peers[0]["addresses"],
        serde_json::json!(["ok.example:7377"])
    );
    let name = peers[0]["name"].as_str().unwrap();
    assert!(
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
        "{name}"
    );
    let shown = world.run("far", &["peers"]).ok().out + &site.log();
    assert!(
        !shown.contains('\u{1b}') && !shown.contains('\u{7}'),
        "{shown:?}"
    );
    world.run("far", &["peers", "forget", name, "--yes"]).ok();
}
