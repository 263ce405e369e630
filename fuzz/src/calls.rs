//! The first frame of a connection, and a refusal in reply: any bytes are decoded within the limits, or refused.

use drover_net::service::{MAX_ID, decode_call};
use drover_net::{Refusal, decode, encode};

pub fn run(data: &[u8]) {
    if let Ok((id, request)) = decode_call(data) {
        assert!((1..=MAX_ID).contains(&id.len()) && id.is_ascii());
        assert_eq!(1 + id.len() + request.len(), data.len());
    }
    if let Ok(refusal) = decode::<Refusal>(data) {
        assert_eq!(decode(&encode(&refusal)).ok(), Some(refusal.clone()));
        let tidy = refusal.tidy();
        assert!(tidy.message.len() <= Refusal::MAX_BYTES);
        assert!(!tidy.message.contains(char::is_control));
    }
}
