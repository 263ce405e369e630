//! The journal of pending copies of the sequence cache: no slot is pending twice, whatever the records say.

pub fn run(data: &[u8]) {
    drover_store::fuzzing::pending_journal(data)
}
