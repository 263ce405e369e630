//! Who may connect to whom.

use std::time::Duration;

use drover_net::{ConnectOptions, Connection, Identity, NetError, connect};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::util::{Rude, listener};

async fn one(listener: &drover_net::Listener) -> Result<Connection, NetError> {
    listener.accept().await.unwrap().handshake().await
}

#[tokio::test]
async fn both_ends_learn_the_others_key() {
    let (listener, server) = listener().await;
    let client = Identity::generate();
    let address = listener.local_addr().to_string();
    let options = ConnectOptions::named("lyon");
    let key = server.key();
    let (there, here) = tokio::join!(one(&listener), connect(&address, &client, &key, &options));
    let (there, here) = (there.unwrap(), here.unwrap());
    // The server never heard of this client and says who it is.
    assert_eq!(there.peer(), Some(client.key()));
    assert_eq!(here.peer(), Some(server.key()));
    assert_eq!(here.remote(), format!("lyon at {address}"));
    assert!(there.remote().starts_with("127.0.0.1:"));
}

#[tokio::test]
async fn another_sites_key_is_refused() {
    let (listener, server) = listener().await;
    let (client, pinned) = (Identity::generate(), Identity::generate().key());
    let address = listener.local_addr().to_string();
    let options = ConnectOptions::named("lyon");
    let (there, here) = tokio::join!(
        one(&listener),
        connect(&address, &client, &pinned, &options)
    );
    let e = here.unwrap_err();
    match &e {
        NetError::WrongPeer {
            expected, found, ..
        } => assert_eq!((*expected, *found), (pinned, server.key())),
        other => panic!("{other}"),
    }
    assert!(e.refused() && !e.retryable());
    assert!(
        e.to_string()
            .starts_with(&format!("lyon at {address} is not the site"))
    );
    let e = there.unwrap_err();
    assert!(matches!(e, NetError::Handshake { .. }), "{e}");
    assert!(e.to_string().contains("expected another key"), "{e}");
}

#[tokio::test]
async fn a_client_must_show_a_raw_key_and_speak_drover() {
    let (listener, _) = listener().await;
    let address = listener.local_addr();
    let rude = [
        (
            Rude {
                empty: true,
                ..Rude::default()
            },
            "shows no raw public key",
        ),
        (
            Rude {
                key: false,
                ..Rude::default()
            },
            "shows no raw public key",
        ),
        (
            Rude {
                alpn: &[b"http/1.1"],
                ..Rude::default()
            },
            "not a drover site",
        ),
        (
            Rude {
                alpn: &[],
                ..Rude::default()
            },
            "not a drover site",
        ),
        (
            Rude {
                raw: false,
                ..Rude::default()
            },
            "",
        ),
        (
            Rude {
                raw: false,
                key: false,
                ..Rude::default()
            },
            "",
        ),
    ];
    for (client, expected) in rude {
        let (there, _here) = tokio::join!(one(&listener), client.connect(address));
        let e = there.unwrap_err();
        assert!(e.refused(), "{e}");
        assert!(e.to_string().contains(expected), "{e}");
    }
    // The same client with nothing amiss is taken, so it is these faults that count.
    let (there, here) = tokio::join!(one(&listener), async {
        Rude::default().connect(address).await
    });
    assert!(there.unwrap().peer().is_some());
    here.unwrap();
}

/// A hello of TLS 1.2 without the extension that offers later versions.
fn tls12_hello() -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.push(0);
    // ECDHE-ECDSA and ECDHE-RSA with AES-128-GCM.
    body.extend([0, 4, 0xc0, 0x2b, 0xc0, 0x2f]);
    body.extend([1, 0]);
    // Groups: x25519; signatures: ed25519.
    let extensions = [0, 10, 0, 4, 0, 2, 0, 29, 0, 13, 0, 4, 0, 2, 8, 7];
    body.extend([0, extensions.len() as u8]);
    body.extend(extensions);
    let mut out = vec![22, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8];
    out.extend(body);
    out
}

#[tokio::test]
async fn tls_1_2_is_refused() {
    let (listener, _) = listener().await;
    let old = async {
        let mut tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
        tcp.write_all(&tls12_hello()).await.unwrap();
        let mut answer = Vec::new();
        tcp.read_to_end(&mut answer).await.unwrap();
        answer
    };
    let (there, answer) = tokio::join!(one(&listener), old);
    let e = there.unwrap_err();
    assert!(e.refused(), "{e}");
    // A fatal alert: protocol_version.
    assert_eq!((answer[0], &answer[5..]), (21, &[2, 70][..]));
}

#[tokio::test]
async fn garbage_instead_of_tls() {
    let (listener, _) = listener().await;
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0xff; 70_000]] {
        let client = async {
            let mut tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
            // It may be cut off before it has said everything.
            let _ = tcp.write_all(garbage).await;
            let _ = tcp.read_to_end(&mut Vec::new()).await;
        };
        let (there, ()) = tokio::join!(one(&listener), client);
        let e = there.unwrap_err();
        assert!(matches!(e, NetError::Handshake { .. }), "{e}");
    }

    // And the other way round: what listens there is no site.
    let ssh = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = ssh.local_addr().unwrap().to_string();
    let banner = async {
        let (mut tcp, _) = ssh.accept().await.unwrap();
        tcp.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await.unwrap();
        let _ = tcp.read_to_end(&mut Vec::new()).await;
    };
    let client = Identity::generate();
    let (expected, options) = (client.key(), ConnectOptions::default());
    let (here, ()) = tokio::join!(connect(&address, &client, &expected, &options), banner);
    let e = here.unwrap_err();
    assert!(e.to_string().contains("does not speak TLS"), "{e}");
}

#[tokio::test]
async fn a_slow_handshake_times_out_without_delaying_others() {
    let (listener, server) = listener().await;
    let address = listener.local_addr();
    let silent = TcpStream::connect(address).await.unwrap();
    let mut half = TcpStream::connect(address).await.unwrap();
    half.write_all(&[22, 3, 1, 2]).await.unwrap();
    let slow = [
        listener.accept().await.unwrap(),
        listener.accept().await.unwrap(),
    ];
    // A well-behaved client gets through meanwhile.
    let client = Identity::generate();
    let (text, key, options) = (address.to_string(), server.key(), ConnectOptions::default());
    let (there, here) = tokio::join!(one(&listener), connect(&text, &client, &key, &options));
    there.unwrap();
    here.unwrap();
    for pending in slow {
        let limit = Duration::from_millis(50);
        let e = pending.handshake_within(limit).await.unwrap_err();
        assert!(matches!(e, NetError::TimedOut { .. }), "{e}");
        assert!(e.retryable() && !e.refused());
    }
    drop((silent, half));
}

/// Silent clients have all slots. Others still get through: the oldest of the silent ones make room.
#[tokio::test]
async fn silent_clients_displace_each_other_and_nobody_else() {
    let (listener, server) = listener().await;
    let address = listener.local_addr();
    let mut silent = Vec::new();
    let mut handshakes = tokio::task::JoinSet::new();
    for _ in 0..drover_net::MAX_PENDING {
        silent.push(TcpStream::connect(address).await.unwrap());
        handshakes.spawn(listener.accept().await.unwrap().handshake());
    }
    let client = Identity::generate();
    let (text, key, options) = (address.to_string(), server.key(), ConnectOptions::default());
    let (there, here) = tokio::join!(one(&listener), connect(&text, &client, &key, &options));
    there.unwrap();
    here.unwrap();
    let e = handshakes.join_next().await.unwrap().unwrap().unwrap_err();
    assert!(matches!(e, NetError::Displaced { .. }), "{e}");
    assert_eq!(silent[0].read(&mut [0; 1]).await.unwrap_or(0), 0);
    // A connection keeps its slot until its peer is known.
    let (pending, _here) = tokio::join!(
        async { listener.accept().await.unwrap().authenticate().await },
        connect(&text, &client, &key, &options)
    );
    let (_connection, slot) = pending.unwrap();
    let lost = slot.hold("its request", std::future::pending::<()>());
    let flood = async {
        for _ in 0..=drover_net::MAX_PENDING {
            silent.push(TcpStream::connect(address).await.unwrap());
            handshakes.spawn(listener.accept().await.unwrap().handshake());
        }
    };
    let (lost, ()) = tokio::join!(lost, flood);
    assert!(matches!(lost, Err(NetError::Displaced { .. })), "{lost:?}");
}
