//! Refusals: a code, a message for a person, and whether a retry can help.

use serde::{Deserialize, Serialize};

/// The code of a refusal. The order is that of the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Code {
    /// The other end broke the protocol.
    Protocol,
    /// It speaks another version.
    Version,
    /// Its key is not trusted, or its ticket is no good.
    Untrusted,
    /// Not permitted, or the request is not acceptable.
    Denied,
    /// There is nothing of that name.
    NotFound,
    /// Another holder has it.
    Held,
    /// The caller no longer holds its lease.
    Lost,
    /// Outside the device or file.
    OutOfRange,
    /// Read-only.
    ReadOnly,
    /// Not supported here.
    Unsupported,
    /// A disk or a quota is full.
    NoSpace,
    /// Not possible at the moment.
    Unavailable,
    /// What is stored is damaged.
    Corrupt,
    /// A disk reports an error.
    Io,
    /// Another request must come first.
    OutOfOrder,
    /// Too many at once.
    Busy,
    /// It was tried and failed.
    Failed,
}

impl Code {
    /// Whether it is a decision, which stands until something is changed, and not a failure.
    #[must_use]
    pub fn is_decision(self) -> bool {
        use Code::*;
        matches!(
            self,
            Untrusted | Denied | NotFound | Held | Lost | ReadOnly | Unsupported | NoSpace
        )
    }

    /// Whether a retry can help, judged by the code alone.
    fn may_pass(self) -> bool {
        matches!(
            self,
            Code::Unavailable | Code::Io | Code::Busy | Code::Failed
        )
    }
}

/// A refusal, as one site sends it to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The code.
    pub code: Code,
    /// One line for a person, at most [`Refusal::MAX_BYTES`].
    pub message: String,
    /// Whether a later retry can help.
    pub retry: bool,
}

impl Refusal {
    /// The longest message, in bytes.
    pub const MAX_BYTES: usize = 1000;

    /// A refusal. Its message is made one line and cut to [`Refusal::MAX_BYTES`]; the code says whether a retry can help.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let retry = code.may_pass();
        Self {
            code,
            message: message.into(),
            retry,
        }
        .tidy()
    }

    /// The same for one that came from elsewhere: its message may hold anything.
    #[must_use]
    pub fn tidy(mut self) -> Self {
        self.message = self.message.replace(char::is_control, " ");
        let end = self.message.floor_char_boundary(Self::MAX_BYTES);
        self.message.truncate(end);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_and_are_cut_at_a_character() {
        let long = Refusal::new(Code::Failed, "é".repeat(5000));
        assert!(long.message.len() <= Refusal::MAX_BYTES);
        assert!(long.message.chars().all(|c| c == 'é'));
        assert!(long.retry);
        let odd = Refusal {
            code: Code::Denied,
            message: "a\nb\x1b[31m".into(),
            retry: false,
        };
        assert_eq!(odd.tidy(), Refusal::new(Code::Denied, "a b [31m"));
    }
}
