//! Connecting to a peer, and the errors of that.

use std::time::Duration;

use drover_net::{
    ConnectOptions, Identity, Listener, NetError, Route, connect, connect_any, connect_or_tell,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::util::listener;

/// A local address without a listener.
async fn unused_address() -> String {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    socket.local_addr().unwrap().to_string()
}

#[tokio::test]
async fn one_line_that_names_the_peer() {
    let me = Identity::generate();
    let (key, options) = (me.key(), ConnectOptions::named("lyon"));
    let address = unused_address().await;
    let e = connect(&address, &me, &key, &options).await.unwrap_err();
    assert_eq!(
        e.to_string(),
        format!("cannot reach lyon at {address}: connection refused")
    );
    assert!(e.retryable() && !e.refused());

    for bad in ["lyon", "lyon:", ":7777", "lyon:port", "lyon:99999", ""] {
        let e = connect(bad, &me, &key, &options).await.unwrap_err();
        assert!(
            e.to_string().ends_with("an address is HOST:PORT"),
            "{bad}: {e}"
        );
    }
    let none: [&str; 0] = [];
    let e = connect_any(&none, &me, &key, &options).await.unwrap_err();
    assert_eq!(e.to_string(), "cannot reach lyon: no address is known");
    let port = address.rsplit_once(':').unwrap().1;
    let named = format!("localhost:{port}");
    let e = connect(&named, &me, &key, &options).await.unwrap_err();
    assert!(e.to_string().contains("connection refused"), "{e}");
}

#[tokio::test]
async fn the_address_where_the_right_site_answers_wins() {
    let me = Identity::generate();
    let (right, server) = listener().await;
    let (wrong, _) = listener().await;
    let right_address = right.local_addr().to_string();
    let addresses = [
        unused_address().await,
        wrong.local_addr().to_string(),
        right_address.clone(),
    ];
    for l in [right, wrong] {
        tokio::spawn(async move {
            loop {
                let pending = l.accept().await.unwrap();
                tokio::spawn(pending.handshake());
            }
        });
    }
    let options = ConnectOptions::named("lyon");
    let c = connect_any(&addresses, &me, &server.key(), &options)
        .await
        .unwrap();
    assert_eq!(c.peer(), Some(server.key()));
    assert_eq!(c.remote(), format!("lyon at {right_address}"));

    // Without the right peer, a reply from another site is the more important error than no reply.
    let e = connect_any(&addresses[..2], &me, &server.key(), &options)
        .await
        .unwrap_err();
    assert!(matches!(e, NetError::WrongPeer { .. }), "{e}");
    let both = [unused_address().await, unused_address().await];
    let e = connect_any(&both, &me, &server.key(), &options)
        .await
        .unwrap_err();
    assert!(
        both.iter().all(|a| e.to_string().contains(a.as_str())),
        "{e}"
    );
}

#[tokio::test]
async fn what_takes_a_connection_and_is_silent_may_be_the_site() {
    let (me, key) = (Identity::generate(), Identity::generate().key());
    let options = ConnectOptions {
        step_timeout: Duration::from_millis(300),
        ..ConnectOptions::named("lyon")
    };
    let tell = async |addresses: &[String]| {
        let told = connect_or_tell(addresses, &me, &key, &options).await;
        told.unwrap_err()
    };
    // The kernel takes connections for a process that is stopped.
    let stopped = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stopped = (stopped.local_addr().unwrap().to_string(), stopped);
    let closes = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closing = closes.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        loop {
            drop(closes.accept().await.unwrap());
        }
    });
    // An alert (fatal, internal error), and what is no TLS.
    let says = async |said: &'static [u8]| {
        let says = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = says.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = says.accept().await.unwrap();
                stream.write_all(said).await.unwrap();
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        address
    };
    let alert = says(&[0x15, 3, 3, 0, 2, 2, 0x50]).await;
    let ssh = says(b"SSH-2.0-OpenSSH_9.2p1\r\n").await;
    assert!(tell(&[alert]).await.may_be_there);
    assert!(!tell(&[ssh]).await.may_be_there);
    let (other, _) = listener().await;
    let wrong = other.local_addr().to_string();
    tokio::spawn(async move {
        loop {
            let pending = other.accept().await.unwrap();
            tokio::spawn(pending.handshake());
        }
    });
    let nobody = unused_address().await;
    assert!(!tell(&[]).await.may_be_there);
    assert!(!tell(std::slice::from_ref(&nobody)).await.may_be_there);
    assert!(
        tell(&[nobody.clone(), stopped.0.clone()])
            .await
            .may_be_there
    );
    assert!(tell(&[closing]).await.may_be_there);
    let told = tell(&[wrong.clone(), nobody]).await;
    assert!(matches!(told.error, NetError::WrongPeer { .. }) && !told.may_be_there);
    // Also where another error says more.
    let told = tell(&[wrong, stopped.0]).await;
    assert!(matches!(told.error, NetError::WrongPeer { .. }) && told.may_be_there);
}

/// A site runs on two nodes: what belongs together goes to one of them.
#[tokio::test]
async fn a_route_stays_with_an_address_until_it_does_not_answer_or_is_left() {
    let (me, site) = (Identity::generate(), Identity::generate());
    let mut addresses = Vec::new();
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let node = Listener::bind("127.0.0.1:0".parse().unwrap(), &site)
            .await
            .unwrap();
        addresses.push(node.local_addr().to_string());
        nodes.push(tokio::spawn(async move {
            loop {
                let pending = node.accept().await.unwrap();
                tokio::spawn(pending.handshake());
            }
        }));
    }
    let (route, options) = (Route::default(), ConnectOptions::named("lyon"));
    let to = async || {
        let all = &addresses;
        let connection = route.connect(all, &me, &site.key(), &options).await;
        let remote = connection.unwrap().remote().to_owned();
        all.iter()
            .position(|a| remote.ends_with(a.as_str()))
            .unwrap()
    };
    // Also those that are made at the same time.
    let (first, second, third) = tokio::join!(to(), to(), to());
    assert_eq!([second, third], [first; 2]);
    let other = 1 - first;
    // Left, it is the last to be tried; on a slow machine it may still be the first that answers.
    route.leave().await;
    let now = to().await;
    assert_eq!(to().await, now);
    nodes[now].abort();
    let _ = (&mut nodes[now]).await;
    assert_eq!(to().await, 1 - now);
    assert!(now == other || now == first);
}

#[tokio::test]
async fn a_server_that_says_nothing_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let me = Identity::generate();
    let options = ConnectOptions {
        step_timeout: Duration::from_millis(50),
        ..ConnectOptions::default()
    };
    let address = silent.local_addr().unwrap().to_string();
    let e = connect(&address, &me, &me.key(), &options)
        .await
        .unwrap_err();
    assert!(matches!(e, NetError::TimedOut { .. }), "{e}");
}

#[tokio::test]
async fn a_port_in_use_is_said() {
    let (taken, _) = listener().await;
    let e = drover_net::Listener::bind(taken.local_addr(), &Identity::generate())
        .await
        .unwrap_err();
    assert_eq!(
        e.to_string(),
        format!(
            "cannot listen on {}: address already in use",
            taken.local_addr()
        )
    );
}
