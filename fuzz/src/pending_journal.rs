//! The journal of what is pending in the sequence cache: no slot is pending twice, whatever the records say.

pub fn run(data: &[u8]) {
    drover_store::fuzzing::pending_journal(data)
}
