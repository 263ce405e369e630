//! What an NBD server sends: a negotiation, then replies to a few requests. A session that is accepted is consistent, and a
//! request gets what it asked for or an error, once.

use std::collections::HashMap;
use std::io::{Read, Write};

use drover_core::nbd::{Request, allocation, command};
use drover_device::backend::nbd::fuzzing::{Replies, Session, negotiate};

/// A second context.
const BITMAP: &str = "qemu:dirty-bitmap:b0";

/// A server that says these bytes, whatever it hears.
struct Server<'a>(&'a [u8]);

impl Read for Server<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Server<'_> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        Ok(buffer.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn consistent(session: &Session) {
    assert!(session.minimum.is_power_of_two() && session.preferred.is_power_of_two());
    assert!(session.minimum <= session.preferred && session.preferred <= session.maximum);
    assert!(session.maximum.is_multiple_of(session.minimum) && session.maximum <= 32 << 20);
    assert!(session.size.is_multiple_of(u64::from(session.minimum)));
    assert!(i64::try_from(session.size).is_ok());
    for context in &session.contexts {
        assert!(session.structured);
        assert!([allocation::NAME, BITMAP].contains(&context.name.as_str()));
        let same = session
            .contexts
            .iter()
            .filter(|other| other.id == context.id);
        assert_eq!(same.count(), 1);
    }
}

fn replies(server: &mut Server<'_>, structured: bool, contexts: &[u32]) {
    let asked = [
        (command::READ, 8192, 4096),
        (command::READ, u64::MAX - 100, 7),
        (command::WRITE, 0, 512),
        (command::FLUSH, 0, 0),
        (command::BLOCK_STATUS, 0, 1 << 20),
        (command::BLOCK_STATUS, 4096, 1),
    ];
    let mut waiting: HashMap<u64, Request> = (1..)
        .zip(asked)
        .map(|(cookie, (command, offset, length))| {
            let request = Request {
                flags: 0,
                command,
                cookie,
                offset,
                length,
            };
            (cookie, request)
        })
        .collect();
    let mut replies = Replies::new(structured, contexts.to_vec());
    while let Ok(done) = replies.next(server, |cookie| waiting.get(&cookie).copied()) {
        let Some((cookie, outcome)) = done else {
            continue;
        };
        let request = waiting
            .remove(&cookie)
            .expect("an answer to a request in flight");
        match outcome {
            Err(failure) => assert_ne!(failure.number, 0),
            Ok(content) => {
                let read = request.command == command::READ;
                assert_eq!(
                    content.data.len(),
                    if read { request.length as usize } else { 0 }
                );
                let told = request.command == command::BLOCK_STATUS;
                assert_eq!(content.status.is_empty(), !told);
                for status in &content.status {
                    assert!(contexts.contains(&status.id) && !status.runs.is_empty());
                    assert!(status.runs.iter().all(|(length, _)| *length > 0));
                }
            }
        }
    }
}

pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else {
        return;
    };
    let mut server = Server(bytes);
    match which % 4 {
        0 => replies(&mut server, false, &[]),
        1 => replies(&mut server, true, &[1, 9]),
        which => {
            let wanted = Vec::from_iter((which == 3).then(|| BITMAP.to_owned()));
            if let Ok(session) = negotiate(&mut server, "web", &wanted) {
                consistent(&session);
                let ids: Vec<u32> = session.contexts.iter().map(|context| context.id).collect();
                replies(&mut server, session.structured, &ids);
            }
        }
    }
}
