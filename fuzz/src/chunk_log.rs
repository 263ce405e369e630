//! A damaged or forged chunk log: replayed, and written.

use std::sync::Arc;

use drover_storage::FakeDirectory;
use drover_storage::chunk_log::{ChunkLog, Record};

fn replay(directory: &FakeDirectory) -> Option<(ChunkLog, Vec<Record>)> {
    let opened = ChunkLog::open(Arc::new(directory.clone()), "log").ok()?;
    let mut found = Vec::new();
    let each = |record| {
        found.push(record);
        Ok(())
    };
    Some((opened.replay(each).ok()?, found))
}

pub fn run(data: &[u8]) {
    let directory = FakeDirectory::default();
    directory.put("log", data);
    let Some((mut log, mut found)) = replay(&directory) else {
        return;
    };
    let record = Record {
        first: data.len() as u64,
        ..Record::default()
    };
    log.append(&[record]).unwrap();
    log.sync().unwrap();
    found.push(record);
    let (_, again) = replay(&directory).expect("a log that was opened once");
    assert_eq!(again, found);
}
