//! The journal of what is pending in the sequence cache: no slot is pending twice, whatever the records say.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| drover_store::fuzzing::pending_journal(data));
