//! What an untrusted site asks of a lone teleporter, up to the teleporter's answer.

#![no_main]

use drover_teleport::matching::{decode_event, encode_event};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(event) = decode_event(data) else {
        return;
    };
    let again = decode_event(&encode_event(&event)).expect("an event");
    assert_eq!(format!("{again:?}"), format!("{event:?}"));
});
