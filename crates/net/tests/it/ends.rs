//! How connections end, without waiting for replies.

use std::time::Duration;

use drover_net::{
    ConnectOptions, Connection, Identity, MAX_FRAME, NetError, Role, close, connect, greet,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::util::{count_pattern, listener, pattern, raw_frame, send_pattern, tls_pair};

const BULK: u64 = 64 << 20;

/// The pitfall of one-way TLS 1.3 streams: unread session tickets reset the socket and eat the
/// tail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_finishes_and_goes_loses_nothing() {
    for round in 0..6 {
        let (there, here) = tls_pair().await;
        // Both directions: the server's side is where tickets would come from.
        let (from, to) = if round % 2 == 0 {
            (here, there)
        } else {
            (there, here)
        };
        let sender = tokio::spawn(async move {
            let (reader, mut writer) = from.split();
            send_pattern(&mut writer, BULK, 1 << 20).await.unwrap();
            writer.finish().await.unwrap();
            drop((reader, writer));
        });
        let (mut reader, _out) = to.split();
        reader.set_max_frame(MAX_FRAME);
        // The sender is gone long before the last byte is read.
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(count_pattern(&mut reader).await.unwrap(), BULK);
        sender.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_sides_talk_at_once_and_close() {
    let (there, here) = tls_pair().await;
    let mut tasks = Vec::new();
    for end in [there, here] {
        tasks.push(tokio::spawn(async move {
            let (mut reader, mut writer) = end.split();
            reader.set_max_frame(MAX_FRAME);
            let send = async {
                send_pattern(&mut writer, BULK / 4, 300_000).await.unwrap();
                writer.finish().await.unwrap();
                writer
            };
            let (got, writer) = tokio::join!(count_pattern(&mut reader), send);
            close(reader, writer, Duration::from_secs(60))
                .await
                .unwrap();
            got.unwrap()
        }));
    }
    for t in tasks {
        assert_eq!(t.await.unwrap(), BULK / 4);
    }
}

#[tokio::test]
async fn a_process_that_dies_is_no_clean_end() {
    for connections in [tls_pair().await, Connection::pair().unwrap()] {
        let (there, here) = connections;
        let (mut reader, _out) = there.split();
        let (reader_here, mut writer) = here.split();
        writer.send(1, b"last words").await.unwrap();
        writer.flush().await.unwrap();
        drop((reader_here, writer));
        assert!(reader.next().await.unwrap().is_some());
        let e = reader.next().await.unwrap_err();
        assert!(matches!(e, NetError::Truncated { .. }), "{e}");
    }
}

/// A proxy that passes the handshake and the hello, and then, until told, nothing from the
/// server: an infinite round-trip time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_waits_a_round_trip() {
    let (listener, server) = listener().await;
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, target) = (proxy.local_addr().unwrap(), listener.local_addr());
    let (hold, mut held) = oneshot::channel::<()>();
    let passing = tokio::spawn(async move {
        let (client, _) = proxy.accept().await.unwrap();
        let upstream = TcpStream::connect(target).await.unwrap();
        let (mut client_in, mut client_out) = client.into_split();
        let (mut server_in, mut server_out) = upstream.into_split();
        tokio::spawn(async move {
            copy(&mut client_in, &mut server_out).await.unwrap();
            server_out.shutdown().await.unwrap();
        });
        let mut buffer = vec![0; 4096];
        loop {
            tokio::select! {
                n = server_in.read(&mut buffer) => {
                    let n = n.unwrap();
                    client_out.write_all(&buffer[..n]).await.unwrap();
                }
                _ = &mut held => break,
            }
        }
        (server_in, client_out)
    });

    let serving = tokio::spawn(async move {
        let connection = listener.accept().await.unwrap().handshake().await.unwrap();
        let (mut reader, mut writer) = connection.split();
        greet(&mut reader, &mut writer, Role::Server).await.unwrap();
        reader.set_max_frame(MAX_FRAME);
        (count_pattern(&mut reader).await.unwrap(), writer)
    });
    let client = Identity::generate();
    let (text, options) = (address.to_string(), ConnectOptions::default());
    let connection = connect(&text, &client, &server.key(), &options)
        .await
        .unwrap();
    let (mut reader, mut writer) = connection.split();
    greet(&mut reader, &mut writer, Role::Client).await.unwrap();
    hold.send(()).unwrap();
    let _held = passing.await.unwrap();
    // Large and small frames, flushed one by one, and the end.
    send_pattern(&mut writer, BULK, 1 << 20).await.unwrap();
    let mut at = BULK;
    for _ in 0..500 {
        writer.send(8, pattern(at, 100)).await.unwrap();
        writer.flush().await.unwrap();
        at += 100;
    }
    writer.finish().await.unwrap();
    assert_eq!(serving.await.unwrap().0, at);
}

#[tokio::test]
async fn reading_on_after_a_dropped_future() {
    let (raw, ours) = tokio::net::UnixStream::pair().unwrap();
    let (mut reader, _out) = Connection::from_unix(ours, "slow").split();
    let mut raw = raw;
    let frames = [
        raw_frame(1, 3, 0, b"trickled"),
        raw_frame(1, 4, 0, &[5; 300]),
        raw_frame(1, 0xf3, 0, b""),
    ]
    .concat();
    let mut got = Vec::new();
    for byte in frames {
        raw.write_all(&[byte]).await.unwrap();
        // The reader's future is dropped after every byte.
        tokio::select! {
            biased;
            frame = reader.next() => got.push(frame.unwrap()),
            () = tokio::task::yield_now() => {}
        }
    }
    drop(raw);
    while got.len() < 3 {
        got.push(reader.next().await.unwrap());
    }
    assert_eq!(&got[0].as_ref().unwrap().payload[..], b"trickled");
    assert_eq!(got[1].as_ref().unwrap().payload.len(), 300);
    assert!(got[2].is_none());
    assert!(reader.next().await.unwrap().is_none());
}

#[tokio::test]
async fn a_dropped_long_send_cannot_be_followed() {
    let (a, _b) = Connection::pair().unwrap();
    let (_in, mut out) = a.split();
    let long = vec![1; MAX_FRAME];
    // The peer does not read, so this cannot complete.
    let sent = tokio::time::timeout(Duration::from_millis(50), out.send(1, &long)).await;
    assert!(sent.is_err());
    for result in [
        out.send(1, b"x").await,
        out.flush().await,
        out.finish().await,
    ] {
        assert!(matches!(result, Err(NetError::Closed { .. })));
    }
}
