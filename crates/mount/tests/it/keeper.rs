//! A near side that keeps what comes and notes what it is told.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use drover_device::remote::{Chunks, Content, Fetched, Link, Local, Remote, Shape};
use parking_lot::{Condvar, Mutex};

#[derive(Default)]
pub struct Kept {
    pub chunks: HashMap<u64, Vec<u8>>,
    pub failed: HashMap<u64, DeviceError>,
    /// Chunks that came a second time.
    pub twice: u64,
    pub links: Vec<Link>,
    /// Asked for by `next` and not come.
    under_way: BTreeSet<u64>,
    cursor: u64,
    pulling: bool,
}

pub struct Keeper {
    pub shape: Shape,
    pub kept: Mutex<Kept>,
    change: Condvar,
}

impl Keeper {
    pub fn attach(remote: &dyn Remote, pulling: bool) -> Arc<Self> {
        let keeper = Arc::new(Self {
            shape: remote.shape(),
            kept: Mutex::new(Kept {
                pulling,
                ..Kept::default()
            }),
            change: Condvar::new(),
        });
        let weak: std::sync::Weak<Self> = Arc::downgrade(&keeper);
        remote.attach(weak);
        keeper
    }

    /// Waits until `enough` or panics.
    pub fn wait(&self, what: &str, enough: impl Fn(&Kept) -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        let mut kept = self.kept.lock();
        while !enough(&kept) {
            let late = self.change.wait_until(&mut kept, limit).timed_out();
            assert!(
                !late,
                "{what}: {} of {} chunks, {} failed, links {:?}",
                kept.chunks.len(),
                self.shape.chunks(),
                kept.failed.len(),
                kept.links
            );
        }
    }

    pub fn wait_all(&self) {
        let all = self.shape.chunks() as usize;
        self.wait("all chunks", |kept| kept.chunks.len() == all);
    }

    /// Asks for a chunk and waits for it.
    pub fn get(&self, remote: &dyn Remote, index: u64) -> Result<Vec<u8>, DeviceError> {
        {
            let mut kept = self.kept.lock();
            kept.failed.remove(&index);
            if let Some(bytes) = kept.chunks.get(&index) {
                return Ok(bytes.clone());
            }
        }
        remote.fetch(Chunks {
            first: index,
            count: 1,
        });
        self.wait("a chunk", |kept| {
            kept.chunks.contains_key(&index) || kept.failed.contains_key(&index)
        });
        let kept = self.kept.lock();
        match kept.failed.get(&index) {
            Some(error) => Err(error.clone()),
            None => Ok(kept.chunks[&index].clone()),
        }
    }

    pub fn all_is(&self, bytes: &[u8]) {
        let kept = self.kept.lock();
        let chunk = self.shape.chunk as usize;
        for (index, expected) in bytes.chunks(chunk).enumerate() {
            assert!(
                kept.chunks
                    .get(&(index as u64))
                    .is_some_and(|b| b == expected),
                "chunk {index}"
            );
        }
    }
}

impl Local for Keeper {
    fn arrived(&self, chunks: Vec<Fetched>) {
        let mut kept = self.kept.lock();
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
            kept.under_way.remove(&chunk.index);
            if kept.chunks.insert(chunk.index, bytes).is_some() {
                kept.twice += 1;
            }
        }
        drop(kept);
        self.change.notify_all();
    }

    fn failed(&self, chunks: Chunks, error: DeviceError) {
        let mut kept = self.kept.lock();
        for index in chunks.first..chunks.end() {
            kept.under_way.remove(&index);
            kept.failed.insert(index, error.clone());
        }
        drop(kept);
        self.change.notify_all();
    }

    fn next(&self, most: u64) -> Option<Chunks> {
        let mut kept = self.kept.lock();
        if !kept.pulling {
            return None;
        }
        let wanted = |kept: &Kept, index: u64| {
            !kept.chunks.contains_key(&index) && !kept.under_way.contains(&index)
        };
        while kept.cursor < self.shape.chunks() && !wanted(&kept, kept.cursor) {
            kept.cursor += 1;
        }
        let first = kept.cursor;
        let mut count = 0;
        while first + u64::from(count) < self.shape.chunks()
            && wanted(&kept, first + u64::from(count))
            && (count == 0 || u64::from(count + 1) * u64::from(self.shape.chunk) <= most)
        {
            kept.under_way.insert(first + u64::from(count));
            count += 1;
        }
        kept.cursor += u64::from(count);
        (count > 0).then_some(Chunks { first, count })
    }

    fn link(&self, link: Link) {
        self.kept.lock().links.push(link);
        self.change.notify_all();
    }
}
