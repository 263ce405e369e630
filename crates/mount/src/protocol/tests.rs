use bytes::Bytes;
use drover_core::DeviceError;
use drover_net::{decode, encode};
use proptest::prelude::*;

use super::*;

fn open() -> Open {
    Open {
        mount: MountId([7; 16]),
        connection: ConnectionKind::Front,
        link: 1,
        image: ImageName::new("web.qcow2").unwrap(),
        access: Access::ReadWrite,
        chunk: DEFAULT_CHUNK,
        expected: None,
        note: "on nantes".into(),
        term: Some(3600),
    }
}

#[test]
fn an_open_is_checked() {
    assert_eq!(decode::<Open>(&encode(&open())).unwrap(), open());
    assert_eq!(open().check(), Ok(()));
    let refused = |open: Open| open.check().unwrap_err();
    for chunk in [0, 1, 2048, 65_535, 8 << 20] {
        assert_eq!(refused(Open { chunk, ..open() }).code, Code::Protocol);
    }
    let note = "x".repeat(MAX_NAME + 1);
    assert_eq!(refused(Open { note, ..open() }).code, Code::Protocol);
    for term in [0, drover_store::lease::MAX_TERM + 1, u64::MAX] {
        let open = Open {
            term: Some(term),
            ..open()
        };
        assert_eq!(refused(open).code, Code::Protocol);
    }
    let mut more = encode(&open());
    more.push(0);
    assert!(decode::<Open>(&more).is_err());
}

#[test]
fn the_capabilities_of_direct_requests_are_four_bytes_in_order() {
    let only = |n: usize| DirectCapabilities {
        fast_zeroes: n == 0,
        trim: n == 1,
        durable: n == 2,
        extents: n == 3,
    };
    for n in 0..4 {
        let mut wire = [0; 4];
        wire[n] = 1;
        assert_eq!(encode(&only(n)), wire);
    }
}

#[test]
fn sizes_that_lie_are_refused() {
    let check = |size, chunk| check_shape(Shape { size, chunk });
    assert!(check(1, MIN_CHUNK).is_ok());
    assert!(check(0, MIN_CHUNK).is_err());
    assert!(check(MAX_SIZE + 1, MAX_CHUNK).is_err());
    assert!(check(u64::MAX, MAX_CHUNK).is_err());
    assert!(check(MAX_CHUNKS * 4096, MIN_CHUNK).is_ok());
    assert!(check(MAX_CHUNKS * 4096 + 1, MIN_CHUNK).is_err());
}

#[test]
fn the_largest_heads_fit() {
    let runs = vec![(u64::MAX, u32::MAX); MAX_RUNS];
    let presence = Reply::Presence {
        id: u64::MAX,
        runs,
        end: u64::MAX,
    };
    let runs = vec![(u64::MAX, 2); MAX_RUNS];
    let extents = Reply::Extents { id: u64::MAX, runs };
    let staged = Reply::Staged {
        id: u64::MAX,
        epoch: u64::MAX,
        runs: vec![(MAX_SIZE, MAX_SIZE); MAX_RUNS],
        end: MAX_SIZE,
    };
    for reply in [presence, extents, staged] {
        let head = encode_message(&reply);
        assert!(head.len() <= MAX_HEAD, "{}", head.len());
        let back = decode_message::<Reply>(&Bytes::from(head)).unwrap();
        assert_eq!(back.head, reply);
    }
}

#[test]
fn an_error_of_a_device_says_the_same_at_the_mount() {
    let errors = [
        DeviceError::ReadOnly,
        DeviceError::Unsupported("zero a range quickly".into()),
        DeviceError::NoSpace("the disk".into()),
        DeviceError::OutOfRange {
            offset: 1,
            length: 2,
            size: 3,
        },
    ];
    for error in errors {
        let told = refusal_of(error.clone());
        assert_eq!(device_error(told, 1, 2, 3).to_string(), error.to_string());
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let payload = Bytes::from(bytes);
        if let Ok(message) = decode_message::<Request>(&payload) {
            let again = encode_message(&message.head);
            prop_assert_eq!(decode_message::<Request>(&Bytes::from(again)).unwrap().head, message.head);
        }
        if let Ok(message) = decode_message::<Reply>(&payload) {
            let again = encode_message(&message.head);
            prop_assert_eq!(decode_message::<Reply>(&Bytes::from(again)).unwrap().head, message.head);
        }
        if let Ok(open) = decode::<Open>(&payload) {
            let _ = open.check();
        }
    }

    #[test]
    fn pieces_lie_side_by_side(size in 1u64..3_000_000, chunk in 12u32..19, first in 0u64..80, count in 0u32..80, zeros in proptest::collection::vec(any::<u8>(), 0..10)) {
        let shape = Shape { size, chunk: 1 << chunk };
        if let Ok((found, length)) = pieces(shape, first, count, &zeros) {
            prop_assert_eq!(found.len(), count as usize);
            let data: Vec<_> = found.iter().filter_map(|p| p.data.clone()).collect();
            let mut at = 0;
            for (digest, _) in &data {
                prop_assert_eq!(digest.clone(), at..at + Digest::LEN);
                at += Digest::LEN;
            }
            for (piece, (_, bytes)) in found.iter().filter(|p| p.data.is_some()).zip(&data) {
                prop_assert_eq!(bytes.clone(), at..at + shape.length(piece.index) as usize);
                at = bytes.end;
            }
            prop_assert_eq!(at, length);
            prop_assert!(length <= MAX_BODY);
        }
    }
}
