//! A damaged or hostile profile of an image, from a file or a peer: whatever it says, it is usable or refused.

pub fn run(data: &[u8]) {
    drover_store::fuzzing::profile(data)
}
