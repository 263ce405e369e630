//! A `Local` that stores received chunks and records all calls.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use drover_device::remote::{Chunks, Content, Fetched, Link, Local, Remote, Shape};
use parking_lot::{Condvar, Mutex};

#[derive(Default)]
pub struct Received {
    pub chunks: HashMap<u64, Vec<u8>>,
    pub failed: HashMap<u64, DeviceError>,
    /// Chunks that came a second time.
    pub twice: u64,
    pub links: Vec<Link>,
    /// Requested by `next` and not arrived.
    under_way: BTreeSet<u64>,
    cursor: u64,
    pulling: bool,
}

pub struct LocalStub {
    pub shape: Shape,
    pub received: Mutex<Received>,
    change: Condvar,
}

impl LocalStub {
    pub fn attach(remote: &dyn Remote, pulling: bool) -> Arc<Self> {
        let local = Arc::new(Self {
            shape: remote.shape(),
            received: Mutex::new(Received {
                pulling,
                ..Received::default()
            }),
            change: Condvar::new(),
        });
        let weak: std::sync::Weak<Self> = Arc::downgrade(&local);
        remote.attach(weak);
        local
    }

    /// Waits until `enough` or panics.
    pub fn wait(&self, what: &str, enough: impl Fn(&Received) -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        let mut received = self.received.lock();
        while !enough(&received) {
            let late = self.change.wait_until(&mut received, limit).timed_out();
            assert!(
                !late,
                "{what}: {} of {} chunks, {} failed, links {:?}",
                received.chunks.len(),
                self.shape.chunks(),
                received.failed.len(),
                received.links
            );
        }
    }

    pub fn wait_all(&self) {
        let all = self.shape.chunks() as usize;
        self.wait("all chunks", |received| received.chunks.len() == all);
    }

    /// Asks for a chunk and waits for it.
    pub fn get(&self, remote: &dyn Remote, index: u64) -> Result<Vec<u8>, DeviceError> {
        {
            let mut received = self.received.lock();
            received.failed.remove(&index);
            if let Some(bytes) = received.chunks.get(&index) {
                return Ok(bytes.clone());
            }
        }
        remote.fetch(Chunks {
            first: index,
            count: 1,
        });
        self.wait("a chunk", |received| {
            received.chunks.contains_key(&index) || received.failed.contains_key(&index)
        });
        let received = self.received.lock();
        match received.failed.get(&index) {
            Some(error) => Err(error.clone()),
            None => Ok(received.chunks[&index].clone()),
        }
    }

    pub fn all_is(&self, bytes: &[u8]) {
        let received = self.received.lock();
        let chunk = self.shape.chunk as usize;
        for (index, expected) in bytes.chunks(chunk).enumerate() {
            assert!(
                received
                    .chunks
                    .get(&(index as u64))
                    .is_some_and(|b| b == expected),
                "chunk {index}"
            );
        }
    }
}

impl Local for LocalStub {
    fn arrived(&self, chunks: Vec<Fetched>) {
        let mut received = self.received.lock();
        for chunk in chunks {
            let length = self.shape.length(chunk.index) as usize;
            let bytes = match chunk.content {
                Content::Zero => vec![0; length],
                Content::Data(bytes, digest) => {
                    assert_eq!(&digest.0, blake3::hash(&bytes).as_bytes());
                    bytes.to_vec()
                }
            };
            assert_eq!(bytes.len(), length);
            received.under_way.remove(&chunk.index);
            if received.chunks.insert(chunk.index, bytes).is_some() {
                received.twice += 1;
            }
        }
        drop(received);
        self.change.notify_all();
    }

    fn failed(&self, chunks: Chunks, error: DeviceError) {
        let mut received = self.received.lock();
        for index in chunks.first..chunks.end() {
            received.under_way.remove(&index);
            received.failed.insert(index, error.clone());
        }
        drop(received);
        self.change.notify_all();
    }

    fn next(&self, most: u64) -> Option<Chunks> {
        let mut received = self.received.lock();
        if !received.pulling {
            return None;
        }
        let wanted = |received: &Received, index: u64| {
            !received.chunks.contains_key(&index) && !received.under_way.contains(&index)
        };
        while received.cursor < self.shape.chunks() && !wanted(&received, received.cursor) {
            received.cursor += 1;
        }
        let first = received.cursor;
        let mut count = 0;
        while first + u64::from(count) < self.shape.chunks()
            && wanted(&received, first + u64::from(count))
            && (count == 0 || u64::from(count + 1) * u64::from(self.shape.chunk) <= most)
        {
            received.under_way.insert(first + u64::from(count));
            count += 1;
        }
        received.cursor += u64::from(count);
        (count > 0).then_some(Chunks { first, count })
    }

    fn link(&self, link: Link) {
        self.received.lock().links.push(link);
        self.change.notify_all();
    }
}
