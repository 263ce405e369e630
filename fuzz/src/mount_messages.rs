//! Messages of both ends of a mount: any bytes decode to something that encodes to the same bytes, or are refused; a
//! body is decompressed to its announced length, or refused; the parts of a reply are inside it; no more runs of zeros
//! are kept than were requested.

use bytes::Bytes;
use drover_device::remote::{Chunks, Shape};
use drover_mount::protocol::{
    MAX_BODY, Open, Opened, Reply, Request, check_shape, decode_message, encode_message, pieces,
};
use drover_net::{decode, encode};

pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else {
        return;
    };
    let payload = Bytes::copy_from_slice(bytes);
    match which % 4 {
        0 => {
            if let Ok(open) = decode::<Open>(bytes) {
                let _ = open.check();
                assert_eq!(decode::<Open>(&encode(&open)).ok(), Some(open));
            }
            if let Ok(opened) = decode::<Opened>(bytes) {
                let _ = check_shape(opened.shape());
            }
        }
        1 => {
            if let Ok(message) = decode_message::<Request>(&payload) {
                let again = Bytes::from(encode_message(&message.head));
                assert_eq!(
                    decode_message::<Request>(&again).expect("its own").head,
                    message.head
                );
            }
        }
        2 => {
            if let Ok(message) = decode_message::<Reply>(&payload) {
                if let Reply::Presence { runs, end, .. } = &message.head {
                    presence(runs, *end);
                }
                if let Reply::Chunks {
                    first,
                    count,
                    zeros,
                    coding,
                    ..
                } = &message.head
                {
                    chunks(*first, *count, zeros);
                    drover_mount::fuzzing::unpack(*coding, &message.body, 65_536);
                }
            }
        }
        _ => {
            let Some((numbers, zeros)) = bytes.split_first_chunk::<12>() else {
                return;
            };
            let first = u64::from_le_bytes(numbers[..8].try_into().expect("eight"));
            let count = u32::from_le_bytes(numbers[8..].try_into().expect("four"));
            chunks(first % 512, count % 128, zeros);
            chunks(first, count, zeros);
        }
    }
}

/// The same page again and again, as an answer about a part of the device and about all of it.
fn presence(runs: &[(u64, u32)], end: u64) {
    for (first, count) in [(0, 100), (7, 1 << 28), (1 << 20, 1)] {
        let page = (runs.to_vec(), end);
        let next = (runs.to_vec(), end.saturating_add(1));
        drover_mount::fuzzing::presence(Chunks { first, count }, &[page, next]);
    }
}

fn chunks(first: u64, count: u32, zeros: &[u8]) {
    for (size, chunk) in [(1 << 20, 4096), (3_000_001, 65_536), (1 << 56, 4 << 20)] {
        let shape = Shape { size, chunk };
        if let Ok((found, length)) = pieces(shape, first, count, zeros) {
            assert_eq!(found.len(), count as usize);
            assert!(length <= MAX_BODY);
            let ends = found.iter().filter_map(|piece| piece.data.as_ref());
            assert_eq!(ends.last().map_or(0, |(_, bytes)| bytes.end), length);
        }
    }
}
