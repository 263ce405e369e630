//! Floods of connections.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};

use drover_core::Digest;
use drover_teleport::protocol;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::*;

/// Connects from 127.0.0.`host`.
async fn from(host: u8, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::new(127, 0, 0, host), 0).into())?;
    socket.connect(to).await
}

fn address(client: &Client) -> SocketAddr {
    client.ticket.addresses[0].parse().unwrap()
}

/// More silent connections than there are slots, from eight addresses, renewed without end: peers that are paired, and
/// those that pair, get through every time.
#[test]
fn silent_connections_keep_nobody_out() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let peer = Client::new(&site);
        peer.pair("web", vec![]).await.unwrap();
        let to = address(&peer);
        let flood = tokio::spawn(async move {
            let mut open = VecDeque::new();
            loop {
                for host in 2..10 {
                    // The site may be slow to accept, or close it at once.
                    open.extend(from(host, to).await);
                }
                if open.len() > drover_net::MAX_PENDING + 64 {
                    open.drain(..8);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        });
        // All slots are taken.
        tokio::time::sleep(Duration::from_secs(2)).await;
        for n in 0..20 {
            let asked = peer.ask(&ListImages).await;
            assert!(asked.is_ok(), "request {n}: {asked:?}");
        }
        let other = Client::new(&site);
        let refusal = other.refused(&encode_call(&ListImages)).await;
        assert_eq!(refusal.code, Code::Untrusted);
        assert!(!flood.is_finished());
        flood.abort();
    });
    let metrics = world.run("far", &["status", "--metrics"]).ok().out;
    let limit = metrics
        .lines()
        .find(|line| line.contains("rejected") && line.contains("limit"));
    assert!(limit.is_some_and(|line| !line.ends_with(" 0")), "{metrics}");
}

/// Behind one address there may be many peers: a flood from there takes nothing from those that are connected.
#[test]
fn connections_that_were_admitted_are_not_displaced() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let peer = Client::new(&site);
        peer.pair("web", vec![]).await.unwrap();
        let session = drover_net::random_id();
        let (mut reader, mut writer) = peer.greeted().await;
        let open = OpenSession { images: 1, session };
        writer.send(kind::CALL, &encode_call(&open)).await.unwrap();
        writer.flush().await.unwrap();
        assert_eq!(reader.next().await.unwrap().unwrap().kind, kind::REPLY);
        let mut silent = Vec::new();
        for _ in 0..drover_net::MAX_PENDING + 64 {
            silent.extend(from(1, address(&peer)).await);
        }
        let offer = protocol::Offer {
            slot: 0,
            name: ImageName::new("a.img").unwrap(),
            format: "raw".into(),
            file_bytes: 0,
            virtual_bytes: 0,
            walk_blocks: 0,
            layout_bytes: 0,
            stamp: Digest::default(),
            dry_run: true,
        };
        let offer = drover_net::encode(&offer);
        writer.send(protocol::kind::OFFER, &offer).await.unwrap();
        writer.flush().await.unwrap();
        let answer = reader.next().await.unwrap().unwrap();
        assert_eq!(answer.kind, protocol::kind::ACCEPT);
    });
}

/// Whatever strangers do, they write few lines.
#[test]
fn strangers_fill_no_log() {
    let world = World::new();
    let site = world.serve("far", &[]);
    let before = site.log().len();
    run(async {
        let client = Client::new(&site);
        for _ in 0..300 {
            let mut tcp = from(2, address(&client)).await.unwrap();
            let _ = tcp.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
            let _ = tcp.read_to_end(&mut Vec::new()).await;
        }
        let guess = encode_call(&Pair {
            secret: [7; 16],
            name: "x".into(),
            addresses: vec![],
        });
        for _ in 0..30 {
            client.refused(&guess).await;
            client.refused(&encode_call(&ListImages)).await;
        }
    });
    let log = site.log();
    let lines = log[before..].lines().count();
    assert!((1..=4).contains(&lines), "{log}");
}
