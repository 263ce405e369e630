//! A full cache.

use std::sync::Arc;

use drover_frontend::nbd::wire::command as c;

use super::Served;
use super::raw::Raw;
use crate::support::{CHUNK, DIRTY, full};

#[test]
fn writes_that_wait_for_room_keep_no_local_read_waiting() {
    let (device, remote) = full();
    let served = Served::one(Arc::clone(&device) as _);
    let mut raw = Raw::go(&served.socket(), "", true);
    // More than there are threads, and than requests that may be under way otherwise.
    let writes = 300;
    for n in 0..writes {
        let at = (DIRTY + n) * CHUNK;
        raw.ask(c::WRITE, 0, at, 4096, &[7; 4096]);
    }
    for n in 0..50 {
        let index = n % DIRTY;
        let cookie = raw.ask(c::READ, 0, index * CHUNK, 4096, &[]);
        let answer = raw.answer();
        assert_eq!(answer.request.cookie, cookie);
        assert_eq!(answer.data, [index as u8 + 1; 4096]);
    }
    remote.mend();
    for _ in 0..writes {
        let answer = raw.answer();
        assert_eq!(answer.error, 0, "{}", answer.message);
    }
    drop(raw);
    served.listening.stop();
    device.close(true).unwrap();
}
