//! The exchange of hellos.

use drover_net::{Connection, NetError, PROTOCOL_MAX, Role, encode, greet, greet_as};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::util::raw_frame;

async fn meet(
    ours: std::ops::RangeInclusive<u16>,
    theirs: std::ops::RangeInclusive<u16>,
) -> [Result<drover_net::Greeting, NetError>; 2] {
    let (a, b) = Connection::pair().unwrap();
    let (mut a_in, mut a_out) = a.split();
    let (mut b_in, mut b_out) = b.split();
    let (x, y) = tokio::join!(
        greet_as(&mut a_in, &mut a_out, Role::Client, "drover 1.0", ours),
        greet_as(&mut b_in, &mut b_out, Role::Server, "drover 2.0", theirs)
    );
    [x, y]
}

#[tokio::test]
async fn the_newest_common_protocol() {
    for (ours, theirs, common) in [(1..=1, 1..=1, 1), (1..=3, 2..=5, 3), (4..=4, 1..=9, 4)] {
        let [x, y] = meet(ours, theirs).await;
        let (x, y) = (x.unwrap(), y.unwrap());
        assert_eq!((x.protocol, y.protocol), (common, common));
        assert_eq!(
            (x.software.as_str(), y.software.as_str()),
            ("drover 2.0", "drover 1.0")
        );
    }
}

#[tokio::test]
async fn old_and_new_say_who_must_be_upgraded() {
    let [old, new] = meet(1..=2, 3..=4).await;
    let (old, new) = (old.unwrap_err(), new.unwrap_err());
    assert!(
        old.to_string().ends_with("upgrade the drover here"),
        "{old}"
    );
    assert!(
        new.to_string().ends_with("upgrade the drover there"),
        "{new}"
    );
    assert!(
        old.to_string()
            .contains("(drover 2.0) speaks protocol 3 to 4, this drover 1 to 2")
    );
    assert!(!old.retryable() && !new.retryable());
}

/// What we say of a peer that sends `bytes` first.
async fn greeted_with(bytes: Vec<u8>) -> Result<drover_net::Greeting, NetError> {
    let (mut raw, ours) = UnixStream::pair().unwrap();
    let (mut reader, mut writer) = Connection::from_unix(ours, "rude").split();
    let rude = async {
        raw.write_all(&bytes).await.unwrap();
        raw.shutdown().await.unwrap();
        let _ = raw.read_to_end(&mut Vec::new()).await;
    };
    let greeting = async {
        let result = greet(&mut reader, &mut writer, Role::Server).await;
        drop((reader, writer));
        result
    };
    tokio::join!(greeting, rude).0
}

const MAGIC: [u8; 8] = *b"drover\r\n";

#[tokio::test]
async fn a_hello_must_be_one() {
    let hello =
        |magic, role, min: u16, max: u16| encode(&(magic, role, min, max, "x\ty".to_owned()));
    let client = hello(MAGIC, Role::Client, 1, PROTOCOL_MAX);
    let ok = greeted_with(raw_frame(1, 0xf2, 0, &client)).await.unwrap();
    // Control characters do not reach a log.
    assert_eq!((ok.protocol, ok.software.as_str()), (PROTOCOL_MAX, "xy"));
    // A later version may say more.
    let longer = [client.clone(), vec![1; 50]].concat();
    greeted_with(raw_frame(1, 0xf2, 0, &longer)).await.unwrap();

    let cases = [
        (
            raw_frame(1, 0xf2, 0, &hello(*b"ssh-2.0\n", Role::Client, 1, 1)),
            "not of drover",
        ),
        (
            raw_frame(1, 0xf2, 0, &hello(MAGIC, Role::Server, 1, 1)),
            "our end",
        ),
        (
            raw_frame(1, 0xf2, 0, &hello(MAGIC, Role::Client, 3, 2)),
            "empty",
        ),
        (raw_frame(1, 0xf2, 0, &client[..9]), "malformed"),
        (raw_frame(1, 0x10, 0, &client), "no hello"),
        (raw_frame(1, 0xf3, 0, b""), "at once"),
        (
            raw_frame(1, 0xf2, 0, &[client.clone(), vec![0; 5000]].concat()),
            "at most 4096",
        ),
    ];
    for (bytes, expected) in cases {
        let e = greeted_with(bytes).await.unwrap_err();
        assert!(e.to_string().contains(expected), "{e}");
    }
    let cut = greeted_with(raw_frame(1, 0xf2, 0, &client)[..20].to_vec()).await;
    assert!(matches!(cut, Err(NetError::Truncated { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_says_nothing_is_given_up() {
    let (a, _b) = Connection::pair().unwrap();
    let (mut reader, mut writer) = a.split();
    let e = greet(&mut reader, &mut writer, Role::Client)
        .await
        .unwrap_err();
    assert!(matches!(e, NetError::TimedOut { .. }), "{e}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_hello_is_one_or_an_error(
        mut payload in proptest::collection::vec(any::<u8>(), 0..80),
        magic: bool,
    ) {
        if magic && payload.len() >= 8 {
            payload[..8].copy_from_slice(&MAGIC);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        match runtime.block_on(greeted_with(raw_frame(1, 0xf2, 0, &payload))) {
            Ok(greeting) => {
                prop_assert!(payload.starts_with(&MAGIC));
                prop_assert_eq!(greeting.protocol, PROTOCOL_MAX);
                prop_assert!(greeting.software.chars().count() <= 64);
            }
            Err(e) => prop_assert!(!e.retryable(), "{}", e),
        }
    }
}
