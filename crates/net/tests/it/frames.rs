//! Frames that a connection accepts, and those that it must not.

use std::time::Duration;

use drover_net::{Connection, MAX_FRAME, MAX_FRAME_BEFORE_TRUST, NetError, close};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use crate::util::{Rude, listener, pattern, raw_frame, tls_pair};

#[tokio::test]
async fn frames_of_all_sizes_both_ways() {
    let unix = Connection::pair().unwrap();
    for (there, here) in [tls_pair().await, unix] {
        let (mut there_in, mut there_out) = there.split();
        let (mut here_in, mut here_out) = here.split();
        there_in.set_max_frame(MAX_FRAME);
        let sizes = [
            0,
            1,
            11,
            12,
            13,
            4096,
            16_383,
            16_384,
            16_385,
            65_536,
            1 << 20,
            MAX_FRAME,
        ];
        let send = async {
            for (i, &size) in sizes.iter().enumerate() {
                let body = pattern(i as u64, size);
                let (a, b) = body.split_at(size / 3);
                here_out.send_vectored(i as u8, &[a, &[], b]).await.unwrap();
            }
            here_out.flush().await.unwrap();
        };
        let echo = async {
            for _ in sizes {
                let f = there_in.next().await.unwrap().unwrap();
                there_out.send(f.kind, &f.payload).await.unwrap();
            }
            there_out.flush().await.unwrap();
        };
        let check = async {
            for (i, &size) in sizes.iter().enumerate() {
                let f = here_in.next().await.unwrap().unwrap();
                assert_eq!(f.kind, i as u8);
                assert_eq!(f.payload, pattern(i as u64, size));
            }
        };
        tokio::join!(send, echo, check);
    }
}

#[tokio::test]
async fn many_parts_and_many_small_frames() {
    let (a, b) = Connection::pair().unwrap();
    let (_keep, mut out) = a.split();
    let (mut reader, _keep_too) = b.split();
    let body = pattern(3, 50_000);
    let parts: Vec<&[u8]> = body.chunks(700).collect();
    let send = async {
        out.send_vectored(5, &parts).await.unwrap();
        for n in 0..20_000u32 {
            out.send(6, &n.to_le_bytes()).await.unwrap();
        }
        out.flush().await.unwrap();
    };
    let receive = async {
        assert_eq!(reader.next().await.unwrap().unwrap().payload, body);
        for n in 0..20_000u32 {
            assert_eq!(
                &reader.next().await.unwrap().unwrap().payload[..],
                n.to_le_bytes()
            );
        }
    };
    tokio::join!(send, receive);
}

#[tokio::test]
async fn before_trust_only_small_frames() {
    let (there, here) = tls_pair().await;
    let (mut reader, _out) = there.split();
    let (_in, mut out) = here.split();
    assert_eq!(reader.max_frame(), MAX_FRAME_BEFORE_TRUST);
    out.send(1, &[1; MAX_FRAME_BEFORE_TRUST]).await.unwrap();
    out.send(1, &[1; MAX_FRAME_BEFORE_TRUST + 1]).await.unwrap();
    out.flush().await.unwrap();
    assert_eq!(reader.next().await.unwrap().unwrap().payload.len(), 4096);
    let e = reader.next().await.unwrap_err();
    assert!(
        matches!(
            e,
            NetError::FrameTooLarge {
                length: 4097,
                limit: 4096,
                ..
            }
        ),
        "{e}"
    );
    assert!(!e.retryable());
}

#[tokio::test]
async fn a_writer_keeps_to_the_rules() {
    let (a, b) = Connection::pair().unwrap();
    let (_in, mut out) = a.split();
    let (mut reader, _out) = b.split();
    let e = out.send(1, &vec![0; MAX_FRAME + 1]).await.unwrap_err();
    assert!(matches!(e, NetError::FrameTooLarge { .. }), "{e}");
    for kind in drover_net::RESERVED_KINDS {
        let e = out.send(kind, &[]).await.unwrap_err();
        assert!(matches!(e, NetError::FrameCorrupt { .. }), "{e}");
    }
    // Nothing of these was sent.
    out.send(1, b"fine").await.unwrap();
    out.finish().await.unwrap();
    assert_eq!(&reader.next().await.unwrap().unwrap().payload[..], b"fine");
    assert!(reader.next().await.unwrap().is_none());
    let e = out.send(1, b"late").await.unwrap_err();
    assert!(matches!(e, NetError::Closed { .. }), "{e}");
    out.finish().await.unwrap();
}

/// What a reader makes of `bytes` followed by the end of the socket.
async fn read_raw(bytes: &[u8]) -> Result<Option<drover_net::Frame>, NetError> {
    let (mut raw, ours) = UnixStream::pair().unwrap();
    let (mut reader, _out) = Connection::from_unix(ours, "rude").split();
    let write = async {
        let _ = raw.write_all(bytes).await;
        let _ = raw.shutdown().await;
    };
    tokio::join!(reader.next(), write).0
}

#[tokio::test]
async fn garbage_instead_of_frames() {
    let good = raw_frame(1, 3, 0, b"good");
    assert_eq!(
        &read_raw(&good).await.unwrap().unwrap().payload[..],
        b"good"
    );

    let mut flipped = good.clone();
    flipped[13] ^= 1;
    let mut relabelled = good.clone();
    relabelled[1] = 4;
    let cases = [
        (raw_frame(2, 3, 0, b""), "wire format 2"),
        (raw_frame(1, 3, 1, b""), "reserved bits"),
        (raw_frame(1, 0xf2, 0, b""), "unexpected kind"),
        (raw_frame(1, 0xf9, 0, b""), "unknown"),
        (flipped, "checksum"),
        (relabelled, "checksum"),
        (b"HTTP/1.1 400 Bad Request\r\n".to_vec(), "wire format 72"),
        (
            vec![1, 3, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0],
            "4294967295 bytes",
        ),
    ];
    for (bytes, expected) in cases {
        let e = read_raw(&bytes).await.unwrap_err();
        assert!(e.to_string().contains(expected), "{e}");
        assert!(!e.retryable(), "{e}");
    }
    let after_end = [raw_frame(1, 0xf3, 0, b""), good].concat();
    let e = read_raw(&after_end).await.unwrap_err();
    assert!(e.to_string().contains("after the end"), "{e}");
    // Pings and their answers are not seen.
    let pings = [
        raw_frame(1, 0xf0, 0, b""),
        raw_frame(1, 0xf1, 0, b"x"),
        raw_frame(1, 0xf3, 0, b""),
    ];
    assert!(read_raw(&pings.concat()).await.unwrap().is_none());
}

#[tokio::test]
async fn every_cut_is_noticed() {
    let whole = raw_frame(1, 3, 0, b"a message");
    for cut in 0..whole.len() {
        let e = read_raw(&whole[..cut]).await.unwrap_err();
        assert!(matches!(e, NetError::Truncated { .. }), "at {cut}: {e}");
        assert!(e.retryable());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_bytes_are_frames_or_an_error(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
        plausible: bool,
    ) {
        if plausible && bytes.len() >= 8 {
            bytes[0] = 1;
            bytes[2..4].fill(0);
            bytes[5..8].fill(0);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let got = runtime.block_on(read_raw(&bytes));
        // Random bytes have no right checksum, and no proper end.
        prop_assert!(got.is_err());
    }
}

#[tokio::test]
async fn a_cut_tls_stream_is_no_clean_end() {
    let (listener, _) = listener().await;
    // Cut at a frame's end and inside one; with close_notify but without our end frame.
    for (bytes, polite) in [
        (raw_frame(1, 3, 0, b"x"), false),
        (raw_frame(1, 3, 0, b"xyz")[..14].to_vec(), false),
        (raw_frame(1, 3, 0, b"x"), true),
    ] {
        let whole = bytes.len() == 13;
        let client = async {
            let mut tls = Rude::default()
                .connect(listener.local_addr())
                .await
                .unwrap();
            tls.write_all(&bytes).await.unwrap();
            tls.flush().await.unwrap();
            if polite {
                tls.shutdown().await.unwrap();
            } else {
                tls.get_mut().0.shutdown().await.unwrap();
            }
            tls
        };
        let server = async { listener.accept().await.unwrap().handshake().await };
        let (there, _client) = tokio::join!(server, client);
        let (mut reader, _out) = there.unwrap().split();
        if whole {
            assert_eq!(&reader.next().await.unwrap().unwrap().payload[..], b"x");
        }
        let e = reader.next().await.unwrap_err();
        assert!(matches!(e, NetError::Truncated { .. }), "{e}");
    }
}

#[tokio::test]
async fn bytes_changed_under_tls_are_noticed() {
    let (listener, _) = listener().await;
    let client = async {
        let mut tls = Rude::default()
            .connect(listener.local_addr())
            .await
            .unwrap();
        // A record that was not made by the session.
        let (tcp, _) = tls.get_mut();
        tcp.write_all(&[23, 3, 3, 0, 40]).await.unwrap();
        tcp.write_all(&[9; 40]).await.unwrap();
        tls
    };
    let server = async { listener.accept().await.unwrap().handshake().await };
    let (there, _client) = tokio::join!(server, client);
    let (mut reader, _out) = there.unwrap().split();
    let e = reader.next().await.unwrap_err();
    assert!(matches!(e, NetError::Io { .. }), "{e}");
}

#[tokio::test]
async fn counters_agree_at_both_ends() {
    let (there, here) = tls_pair().await;
    let (a, b) = (there.wire(), here.wire());
    let handshake = a.received();
    assert!(handshake > 0 && b.received() > 0);
    let (mut reader, writer) = there.split();
    let (here_in, mut out) = here.split();
    reader.set_max_frame(MAX_FRAME);
    let send = async {
        out.send(1, &vec![7; 1 << 20]).await.unwrap();
        close(here_in, out, Duration::from_secs(60)).await.unwrap();
    };
    let receive = async {
        assert_eq!(reader.next().await.unwrap().unwrap().payload.len(), 1 << 20);
        close(reader, writer, Duration::from_secs(60))
            .await
            .unwrap();
    };
    tokio::join!(send, receive);
    assert_eq!((a.sent(), a.received()), (b.received(), b.sent()));
    let overhead = b.sent() - (1 << 20) - handshake;
    assert!((1_000..4_000).contains(&overhead), "{overhead} bytes");
}
