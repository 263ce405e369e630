//! What a QMP socket says: cut into the same messages however it arrives, each taken apart or refused; lists of disks
//! and names of files are understood or refused.

use drover_hypervisor::machine::{parse_data, parse_disks};
use drover_hypervisor::qmp::{Message, NotAMessage, Splitter, parse};

const LIMIT: usize = 2000;

/// The messages of a stream that arrives in pieces, and whether it could be read to its end.
fn split(bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, bool) {
    let mut splitter = Splitter::new(LIMIT);
    let mut messages = Vec::new();
    let mut take = |piece: &[u8]| -> Result<(), NotAMessage> {
        splitter.push(piece);
        while let Some(message) = splitter.next()? {
            assert!(message.len() <= LIMIT);
            messages.push(message);
        }
        Ok(())
    };
    let good = bytes.chunks(piece).all(|piece| take(piece).is_ok());
    (messages, good)
}

pub fn run(data: &[u8]) {
    let Some((&piece, bytes)) = data.split_first() else {
        return;
    };
    let whole = split(bytes, bytes.len().max(1));
    assert_eq!(split(bytes, usize::from(piece).max(1)), whole);
    for message in whole.0 {
        if let Ok(Message::Reply {
            result: Ok(value), ..
        }) = parse(&message)
        {
            let _ = parse_disks(value);
        }
    }
    if let Ok(name) = std::str::from_utf8(bytes) {
        let _ = parse_data(name);
    }
}
