//! Internals of sites and sessions, for tests, benchmarks and fuzzers.

pub use crate::codec::{
    Batch, Have, Literal, LiteralHeader, Need, PROOF_BLOCKS, Packing, Runs, Want, decode_plan,
    encode_plan, proofs_of,
};
pub use crate::compress::{MAX_WINDOW_LOG, Pace, Packer, Unpacker};
pub use crate::matching::{
    connect, decode_answer, decode_event, encode_answer, encode_event, handle,
};
pub use crate::walk::{Walk, read_image};

/// The state machine of a destination.
pub mod destination {
    pub use crate::destination::{Action, Destination, Event, Given, KeptBy, ReuseJob, Run};
}

/// The state machine of a source.
pub mod source {
    pub use crate::source::{Action, Event, FIRST_WINDOW, Source};
}

/// Events and answers of a teleporter.
pub mod teleporter {
    pub use crate::teleporter::{Answer, Event, ImageEvent};
}
