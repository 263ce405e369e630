//! Requests of an untrusted site to a separate teleporter, up to the reply.

use drover_teleport::testing::{decode_event, encode_event};

pub fn run(data: &[u8]) {
    let Ok(event) = decode_event(data) else {
        return;
    };
    let again = decode_event(&encode_event(&event)).expect("an event");
    assert_eq!(format!("{again:?}"), format!("{event:?}"));
}
