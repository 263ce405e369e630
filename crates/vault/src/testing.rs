//! A store in memory whose operations can be made to fail, to stop, or to be interrupted by others; and a real S3 server.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::error::StoreError;
use crate::objects::{Listed, Objects};

pub use drover_storage::testing::S3Server;

/// What an operation does instead of succeeding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing; an error is returned.
    Refuse,
    /// It takes place, but an error is returned.
    LoseAnswer,
    /// It does not take place, nor does anything after it: the host is gone.
    StopBefore,
    /// It takes place; nothing after it does.
    StopAfter,
}

/// What is called before each operation, with its number and key.
type Hook = Arc<dyn Fn(u64, &str) -> Option<Fault> + Send + Sync>;

/// What all views of a store share.
#[derive(Default)]
struct Shared {
    objects: Mutex<BTreeMap<String, (Bytes, i64)>>,
    clock_ms: AtomicI64,
}

/// One host's view of a store in memory.
#[derive(Clone, Default)]
pub struct MemoryObjects {
    shared: Arc<Shared>,
    hook: Option<Hook>,
    operations: Arc<AtomicU64>,
    stopped: Arc<std::sync::atomic::AtomicBool>,
    most_read: Arc<AtomicU64>,
}

impl MemoryObjects {
    /// A view for another host, on which `hook` is called before each operation.
    #[must_use]
    pub fn with_hook(
        &self,
        hook: impl Fn(u64, &str) -> Option<Fault> + Send + Sync + 'static,
    ) -> Self {
        MemoryObjects {
            shared: self.shared.clone(),
            hook: Some(Arc::new(hook)),
            operations: Arc::default(),
            stopped: Arc::default(),
            most_read: Arc::default(),
        }
    }

    /// Another store with the same objects.
    #[must_use]
    pub fn copy(&self) -> Self {
        let shared = Shared {
            objects: Mutex::new(self.shared.objects.lock().clone()),
            clock_ms: AtomicI64::new(self.shared.clock_ms.load(Ordering::Relaxed)),
        };
        MemoryObjects {
            shared: Arc::new(shared),
            ..MemoryObjects::default()
        }
    }

    /// Lets time pass for the store.
    pub fn advance(&self, by: std::time::Duration) {
        let ms = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
        self.shared.clock_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// How many operations this view has made.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// The most bytes that one read of this view has given.
    #[must_use]
    pub fn most_read(&self) -> u64 {
        self.most_read.load(Ordering::Relaxed)
    }

    fn given(&self, bytes: Bytes) -> Bytes {
        self.most_read
            .fetch_max(bytes.len() as u64, Ordering::Relaxed);
        bytes
    }

    /// The keys there are.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        self.shared.objects.lock().keys().cloned().collect()
    }

    /// Changes an object behind the vault's back.
    pub fn damage(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some((bytes, _)) = self.shared.objects.lock().get_mut(key) {
            let mut new = bytes.to_vec();
            change(&mut new);
            *bytes = new.into();
        }
    }

    /// Removes an object behind the vault's back.
    pub fn lose(&self, key: &str) {
        self.shared.objects.lock().remove(key);
    }

    fn operate<T>(
        &self,
        doing: &'static str,
        key: &str,
        act: impl FnOnce() -> T,
    ) -> Result<T, StoreError> {
        let error = |why: &str| StoreError {
            doing,
            key: key.to_owned(),
            vault: self.describe(),
            why: why.to_owned(),
            can_retry: true,
            is_damage: false,
        };
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        if self.stopped.load(Ordering::Relaxed) {
            return Err(error("the host is gone"));
        }
        let fault = self.hook.as_ref().and_then(|hook| hook(number, key));
        match fault {
            None => Ok(act()),
            Some(Fault::Refuse) => Err(error("injected")),
            Some(Fault::LoseAnswer) => {
                act();
                Err(error("the answer was lost"))
            }
            Some(Fault::StopBefore) => {
                self.stopped.store(true, Ordering::Relaxed);
                Err(error("the host is gone"))
            }
            Some(Fault::StopAfter) => {
                act();
                self.stopped.store(true, Ordering::Relaxed);
                Err(error("the host is gone"))
            }
        }
    }
}

impl Objects for MemoryObjects {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        self.operate("write", key, || {
            let now = self.shared.clock_ms.load(Ordering::Relaxed);
            let mut objects = self.shared.objects.lock();
            match objects.contains_key(key) {
                true => false,
                false => objects.insert(key.to_owned(), (bytes, now)).is_none(),
            }
        })
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        self.operate("read", key, || {
            let objects = self.shared.objects.lock();
            objects.get(key).map(|o| self.given(o.0.clone()))
        })
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        self.operate("read", key, || {
            let objects = self.shared.objects.lock();
            let bytes = &objects.get(key)?.0;
            let at = |n: u64| (n as usize).min(bytes.len());
            Some(self.given(bytes.slice(at(range.start)..at(range.end))))
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.operate("list", prefix, || {
            let objects = self.shared.objects.lock();
            let below = objects.iter().filter(|(key, _)| {
                key.strip_prefix(prefix)
                    .is_some_and(|rest| rest.starts_with('/'))
            });
            below
                .map(|(key, (bytes, modified_ms))| Listed {
                    key: key.clone(),
                    size: bytes.len() as u64,
                    modified_ms: *modified_ms,
                })
                .collect()
        })
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        self.operate("remove", key, || {
            self.shared.objects.lock().remove(key);
        })
    }

    fn describe(&self) -> String {
        "memory".into()
    }
}
