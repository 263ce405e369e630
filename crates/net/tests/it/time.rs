//! Rate limits and timeouts, on a paused clock.

use std::sync::Arc;
use std::time::Duration;

use drover_net::{Connection, KeepAlive, MAX_FRAME, NetError, RateLimit};
use tokio::time::Instant;

use crate::util::{count_pattern, send_pattern, tls_pair};

#[tokio::test(start_paused = true)]
async fn a_limit_holds_for_several_writers_together() {
    const EACH: u64 = 10_000_000;
    let limit = Arc::new(RateLimit::new(2_000_000));
    let start = Instant::now();
    let mut tasks = Vec::new();
    // Large frames on one connection, tiny ones on another.
    for frame in [1 << 20, 5_000] {
        let (a, b) = Connection::pair().unwrap();
        let limit = limit.clone();
        tasks.push(tokio::spawn(async move {
            let (_in, mut out) = a.split();
            out.set_rate(Some(limit));
            send_pattern(&mut out, EACH, frame).await.unwrap();
            out.finish().await.unwrap();
        }));
        tasks.push(tokio::spawn(async move {
            let (mut reader, _out) = b.split();
            assert_eq!(count_pattern(&mut reader).await.unwrap(), EACH);
        }));
    }
    for t in tasks {
        t.await.unwrap();
    }
    let seconds = start.elapsed().as_secs_f64();
    assert!(
        (9.8..10.3).contains(&seconds),
        "{seconds} s for 20 MB at 2 MB/s"
    );
}

#[tokio::test]
async fn encryption_counts_against_the_limit() {
    let (there, here) = tls_pair().await;
    let wire = here.wire();
    let (mut reader, _out) = there.split();
    let (_in, mut out) = here.split();
    // From here on the clock jumps.
    tokio::time::pause();
    let before = wire.sent();
    out.set_rate(Some(Arc::new(RateLimit::new(10_000))));
    let start = Instant::now();
    let receive = tokio::spawn(async move { while reader.next().await.unwrap().is_some() {} });
    for _ in 0..1_000 {
        // 22 bytes of frame, and as much again for its TLS record.
        out.send(1, &[7; 10]).await.unwrap();
        out.flush().await.unwrap();
    }
    let bytes = (wire.sent() - before) as f64;
    assert!(bytes > 40_000.0, "{bytes}");
    let seconds = start.elapsed().as_secs_f64();
    let fair = bytes / 10_000.0;
    assert!(
        (fair * 0.95..fair * 1.05).contains(&seconds),
        "{seconds} s instead of {fair}"
    );
    out.finish().await.unwrap();
    receive.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn pings_keep_an_idle_connection() {
    let (a, b) = Connection::pair().unwrap();
    let (mut a_in, mut a_out) = a.split();
    let (mut b_in, mut b_out) = b.split();
    let policy = KeepAlive::default();
    policy.apply(&mut a_in, &mut a_out);
    policy.apply(&mut b_in, &mut b_out);
    let quiet = Duration::from_secs(600);
    let sender = tokio::spawn(async move {
        tokio::select! {
            e = a_out.ping_when_idle(policy.ping_every) => panic!("{e}"),
            () = tokio::time::sleep(quiet) => {}
        }
        a_out.send(1, b"still here").await.unwrap();
        a_out.flush().await.unwrap();
        a_out
    });
    let frame = b_in.next().await.unwrap().unwrap();
    assert_eq!(&frame.payload[..], b"still here");
    // And then nothing more, nor pings: the peer is given up, in time.
    let _a_out = sender.await.unwrap();
    let start = Instant::now();
    let e = b_in.next().await.unwrap_err();
    assert!(
        matches!(e, NetError::TimedOut { .. }) && e.retryable(),
        "{e}"
    );
    assert!(start.elapsed() >= policy.dead_after);
    assert!(start.elapsed() < policy.dead_after + Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_reads_nothing_is_given_up() {
    let (a, _b) = Connection::pair().unwrap();
    let (mut a_in, mut a_out) = a.split();
    KeepAlive::default().apply(&mut a_in, &mut a_out);
    let e = a_out.send(1, &vec![0; MAX_FRAME]).await.unwrap_err();
    assert!(e.to_string().contains("taking what is sent to it"), "{e}");
}
