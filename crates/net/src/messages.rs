//! Control messages as bytes: postcard, nothing left over.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::NetError;

/// The bytes of a message.
///
/// # Panics
/// For a type that postcard cannot represent (a sequence without a length); messages are plain
/// structs and enums.
#[must_use]
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("messages are plain data")
}

/// A message from bytes, all of which must belong to it.
///
/// # Errors
/// [`NetError::Message`] when they are not a `T`, or more than one.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, NetError> {
    let bad = |reason: String| NetError::Message {
        what: type_name::<T>(),
        reason,
    };
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(|e| bad(e.to_string()))?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(bad(format!("{} bytes too many", rest.len())))
    }
}

/// A type's name without its path.
fn type_name<T>() -> &'static str {
    let full = std::any::type_name::<T>();
    let end = full.find('<').unwrap_or(full.len());
    full[..end].rsplit("::").next().unwrap_or(full)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Sample {
        Empty,
        Full { name: String, runs: Vec<(u64, u32)> },
    }

    #[test]
    fn nothing_may_be_left_over() {
        let m = Sample::Full {
            name: "web".into(),
            runs: vec![(1, 2), (1 << 40, 7)],
        };
        let mut bytes = encode(&m);
        assert_eq!(decode::<Sample>(&bytes).unwrap(), m);
        bytes.push(0);
        let e = decode::<Sample>(&bytes).unwrap_err();
        assert_eq!(e.to_string(), "malformed Sample: 1 bytes too many");
        assert!(!e.retryable());
        assert_eq!(
            decode::<Sample>(&encode(&Sample::Empty)).unwrap(),
            Sample::Empty
        );
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(m) = decode::<Sample>(&bytes) {
                prop_assert_eq!(decode::<Sample>(&encode(&m)).unwrap(), m);
            }
        }
    }
}
