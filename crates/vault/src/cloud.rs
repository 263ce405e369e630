//! A vault in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.
//!
//! Every request is repeated, a bounded number of times with growing pauses, after an answer that says to try later, a
//! lost connection or a timeout. A write that may have taken place without an answer finds its object when it is
//! repeated: it counts as done only if the content is its own. The store's own retries are off: they would hide that.

use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::ClientOptions;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
};
use tokio::runtime::Runtime;

use crate::error::{Result, StoreError, VaultError};
use crate::objects::{Listed, Objects};

/// How often a request is made at most.
const MAX_TRIES: u32 = 24;
/// Threads that wait for answers.
const THREADS: usize = 2;
/// Bytes that the slowest link sends in a second.
const SLOWEST: usize = 64 << 10;
/// Most bytes that are reserved for an answer before it comes.
const MAX_RESERVED: u64 = 16 << 20;
/// Most bytes of a store's answer in an error.
const MAX_ANSWER: usize = 300;

/// How long is waited, and how often.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// For the first answer ever: a store that is not there is said soon.
    pub(crate) first: Duration,
    /// For an answer of a store that has answered before.
    pub(crate) later: Duration,
    /// The first pause; each is twice as long.
    pub(crate) pause: Duration,
    /// The longest one.
    pub(crate) max_pause: Duration,
    /// For an answer, and for each part of it; for what is sent as well, a second more for each [`SLOWEST`] bytes.
    pub(crate) request: Duration,
    /// For a connection.
    pub(crate) connect: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            first: Duration::from_secs(15),
            later: Duration::from_secs(180),
            pause: Duration::from_millis(100),
            max_pause: Duration::from_secs(10),
            request: Duration::from_secs(120),
            connect: Duration::from_secs(10),
        }
    }
}

/// A prefix in an object store.
pub struct CloudObjects {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
    patience: Patience,
    has_answered: AtomicBool,
}

/// The threads that speak to stores, of all vaults of the process.
fn runtime() -> std::io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("store")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| made))
}

impl CloudObjects {
    /// The prefix at a URL, with credentials from the environment. Asks nothing of the store.
    ///
    /// # Errors
    /// When the URL is none of a store that is known, or the environment says nothing of how to reach it.
    pub fn open(url: &str) -> Result<Self> {
        CloudObjects::open_with(url, Patience::default())
    }

    pub(crate) fn open_with(url: &str, patience: Patience) -> Result<Self> {
        let unsupported = |why: &dyn Display| VaultError::Unsupported {
            url: url.to_owned(),
            why: why.to_string(),
        };
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(unsupported(&"it names no bucket"));
        }
        let prefix = Path::parse(prefix.trim_end_matches('/')).map_err(|e| unsupported(&e))?;
        if prefix
            .parts()
            .any(|part| matches!(part.as_ref(), "." | ".."))
        {
            return Err(unsupported(&"a prefix has no `.` and `..`"));
        }
        // Once for all; what the environment says of timeouts does not count. Requests have their own, see `within`.
        let client = ClientOptions::new()
            .with_timeout_disabled()
            .with_connect_timeout(patience.connect)
            .with_allow_http(allows_http());
        let retries = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        let of = format!("{scheme}://{bucket}");
        let store: Result<Arc<dyn ObjectStore>, Error> = match scheme {
            "s3" => AmazonS3Builder::from_env()
                .with_url(of)
                .with_client_options(client)
                .with_retry(retries)
                // An answer to many says 200 where one of them was refused.
                .with_disable_bulk_delete(true)
                .build()
                .map(|s| Arc::new(s) as _),
            "gs" => GoogleCloudStorageBuilder::from_env()
                .with_url(of)
                .with_client_options(client)
                .with_retry(retries)
                .build()
                .map(|s| Arc::new(s) as _),
            "az" => MicrosoftAzureBuilder::from_env()
                .with_url(of)
                .with_client_options(client)
                .with_retry(retries)
                .build()
                .map(|s| Arc::new(s) as _),
            _ => {
                return Err(unsupported(
                    &"object stores are s3://BUCKET/PREFIX, gs://BUCKET/PREFIX and az://CONTAINER/PREFIX",
                ));
            }
        };
        Ok(CloudObjects {
            store: store.map_err(|e| unsupported(&one_line(&e)))?,
            prefix,
            url: url.trim_end_matches('/').to_owned(),
            patience,
            has_answered: AtomicBool::new(false),
        })
    }

    fn error(&self, doing: &'static str, key: &str, why: &dyn Display, retry: bool) -> StoreError {
        StoreError {
            doing,
            key: key.to_owned(),
            vault: self.describe(),
            why: why.to_string(),
            can_retry: retry,
            is_damage: false,
        }
    }

    /// Runs `work` on the threads that speak to stores, and waits for it: callers are threads of all kinds.
    fn wait<T: Send + 'static>(
        &self,
        doing: &'static str,
        key: &str,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (result, done) = crossbeam_channel::bounded(1);
        let runtime = runtime().map_err(|e| self.error(doing, key, &e, true))?;
        drop(runtime.spawn(async move {
            let _ = result.send(work.await);
        }));
        match done.recv() {
            Ok(Ok(value)) => {
                self.has_answered.store(true, Ordering::Relaxed);
                Ok(value)
            }
            Ok(Err(error)) => Err(self.error(doing, key, &one_line(&error), is_transient(&error))),
            Err(_) => Err(self.error(doing, key, &"its thread ended; this is a bug", false)),
        }
    }

    fn path(&self, doing: &'static str, key: &str) -> Result<Path, StoreError> {
        let whole = match self.prefix.as_ref() {
            "" => key.to_owned(),
            prefix => format!("{prefix}/{key}"),
        };
        let fine = key
            .split('/')
            .all(|part| !part.is_empty() && !part.starts_with('.'));
        match Path::parse(whole) {
            Ok(path) if fine => Ok(path),
            Ok(_) => Err(self.error(doing, key, &"it is no key", false)),
            Err(error) => Err(self.error(doing, key, &error, false)),
        }
    }

    fn retries(&self) -> Retries {
        Retries {
            began: None,
            limit: match self.has_answered.load(Ordering::Relaxed) {
                true => self.patience.later,
                false => self.patience.first,
            },
            pause: self.patience.pause,
            max_pause: self.patience.max_pause,
            tries: 0,
        }
    }

    fn read(&self, key: &str, range: Option<Range<u64>>) -> Result<Option<Bytes>, StoreError> {
        let (store, path) = (self.store.clone(), self.path("read", key)?);
        let (mut retries, limit) = (self.retries(), self.patience.request);
        self.wait("read", key, async move {
            loop {
                match read(&*store, &path, range.clone(), limit).await {
                    Err(error) => retries.after(error).await?,
                    got => return got,
                }
            }
        })
    }
}

/// Whether plain HTTP is allowed, as the environment says: for a store on a trusted network.
fn allows_http() -> bool {
    let says = |name| std::env::var(name).is_ok_and(|v| matches!(&*v, "1" | "true" | "TRUE"));
    says("AWS_ALLOW_HTTP") || says("AZURE_ALLOW_HTTP") || says("GOOGLE_ALLOW_HTTP")
}

/// How often a request was made, and whether it is made again.
struct Retries {
    /// The first error.
    began: Option<Instant>,
    limit: Duration,
    pause: Duration,
    max_pause: Duration,
    tries: u32,
}

impl Retries {
    /// Waits after an error, or returns it.
    async fn after(&mut self, error: Error) -> Result<(), Error> {
        self.tries += 1;
        let began = *self.began.get_or_insert_with(Instant::now);
        if !is_transient(&error)
            || self.tries >= MAX_TRIES
            || began.elapsed() + self.pause > self.limit
        {
            return Err(error);
        }
        tracing::debug!("try {}: {}", self.tries, one_line(&error));
        // Hosts that were refused together do not come back together.
        tokio::time::sleep(self.pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        self.pause = (self.pause * 2).min(self.max_pause);
        Ok(())
    }
}

/// An answer of the store that is an error: its status, and what follows. The library's type for it is private, and its
/// text is all there is.
fn answer(error: &Error) -> Option<(u16, String)> {
    const SAYS: &str = "status code: ";
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        let text = error.to_string();
        if let Some((_, rest)) = text.split_once(SAYS) {
            let status = rest.get(..3)?.parse().ok()?;
            return Some((status, rest.to_owned()));
        }
        source = error.source();
    }
    None
}

/// Whether the same request may succeed later.
fn is_transient(error: &Error) -> bool {
    match error {
        Error::Generic { .. } => answer(error).is_none_or(|(status, text)| {
            status >= 500
                || matches!(status, 408 | 429)
                // S3 waited for the rest of a request, in vain.
                || status == 400 && text.contains("<Code>RequestTimeout</Code>")
        }),
        // A conflict with another write under way is among these.
        Error::AlreadyExists { .. } | Error::JoinError { .. } => true,
        _ => false,
    }
}

/// An error as one short line, without the library's words about retries.
fn one_line(error: &Error) -> String {
    let text = match answer(error) {
        Some((_, answer)) => {
            let (status, body) = answer.split_once(':').unwrap_or((&answer, ""));
            let part = |tag: &str| {
                let (_, rest) = body.split_once(&format!("<{tag}>"))?;
                Some(format!(": {}", rest.split_once('<')?.0))
            };
            let (code, message) = (part("Code"), part("Message"));
            format!(
                "{}{}{}",
                status.trim(),
                code.unwrap_or_default(),
                message.unwrap_or_default()
            )
        }
        None => {
            // The innermost says what happened.
            let mut last: &(dyn std::error::Error + 'static) = error;
            while let Some(source) = last.source() {
                last = source;
            }
            last.to_string()
        }
    };
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_ANSWER)
        .collect();
    match error {
        Error::NotFound { .. } => format!("{line} (does the bucket exist?)"),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            format!("{line} (see the credentials in the environment)")
        }
        _ => line,
    }
}

/// The error of a write that was refused, although there is no object.
fn conflict(path: &Path) -> Error {
    Error::AlreadyExists {
        path: path.to_string(),
        source: "it conflicts with another write".into(),
    }
}

fn failed(why: String) -> Error {
    Error::Generic {
        store: "vault",
        source: why.into(),
    }
}

/// What a store answers, if it does in time.
async fn within<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(failed(format!("no answer within {limit:?}"))),
    }
}

/// How long a write of so many bytes may take.
fn limit_of_write(request: Duration, len: usize) -> Duration {
    request + Duration::from_secs((len / SLOWEST) as u64)
}

/// The content of an answer of which each part comes in time.
async fn content(got: GetResult, limit: Duration) -> Result<Bytes, Error> {
    let wanted = got.range.end - got.range.start;
    let mut bytes = Vec::with_capacity(wanted.min(MAX_RESERVED) as usize);
    let mut parts = got.into_stream();
    while let Some(part) = within(limit, parts.try_next()).await? {
        bytes.extend_from_slice(&part);
    }
    match bytes.len() as u64 == wanted {
        true => Ok(bytes.into()),
        false => Err(failed(format!("{} of {wanted} bytes came", bytes.len()))),
    }
}

/// Whether an object that exists is this one; none if it does not exist. One of another length is not read.
async fn is_same(
    store: &dyn ObjectStore,
    path: &Path,
    bytes: &Bytes,
    limit: Duration,
) -> Result<Option<bool>, Error> {
    match within(limit, store.get_opts(path, GetOptions::default())).await {
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
        Ok(got) if got.meta.size != bytes.len() as u64 => Ok(Some(false)),
        Ok(got) => Ok(Some(content(got, limit).await? == *bytes)),
    }
}

/// An object, or part of one; none if it does not exist.
async fn read(
    store: &dyn ObjectStore,
    path: &Path,
    range: Option<Range<u64>>,
    limit: Duration,
) -> Result<Option<Bytes>, Error> {
    let options = GetOptions {
        range: range.clone().map(Into::into),
        ..GetOptions::default()
    };
    let got = match within(limit, store.get_opts(path, options)).await {
        Ok(got) => got,
        Err(Error::NotFound { .. }) => return Ok(None),
        // A range that begins beyond the end.
        Err(error) if answer(&error).is_some_and(|(status, _)| status == 416) => {
            return Ok(Some(Bytes::new()));
        }
        Err(error) => return Err(error),
    };
    let (is_whole, size) = (got.range == (0..got.meta.size), got.meta.size);
    match range.is_some() || is_whole {
        true => Ok(Some(content(got, limit).await?)),
        false => Err(failed(format!("part of {size} bytes came"))),
    }
}

impl Objects for CloudObjects {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        let (store, path) = (self.store.clone(), self.path("write", key)?);
        let (mut retries, request) = (self.retries(), self.patience.request);
        let limit = limit_of_write(request, bytes.len());
        self.wait("write", key, async move {
            // An earlier try may have been done without our knowing.
            let mut is_unsure = false;
            loop {
                let put = PutOptions {
                    mode: PutMode::Create,
                    ..PutOptions::default()
                };
                let written = store.put_opts(&path, bytes.clone().into(), put);
                let error = match within(limit, written).await {
                    Ok(_) => return Ok(true),
                    Err(error) => error,
                };
                let exists = matches!(error, Error::AlreadyExists { .. });
                if !exists {
                    is_unsure = true;
                    retries.after(error).await?;
                }
                // Also before another try: a server that refuses one without reading it may cut the connection.
                match is_same(&*store, &path, &bytes, request).await {
                    Ok(Some(same)) => return Ok(is_unsure && same),
                    Ok(None) if !exists => {}
                    // A conflict with another write under way, or it was removed meanwhile.
                    Ok(None) => retries.after(conflict(&path)).await?,
                    Err(error) => retries.after(error).await?,
                }
            }
        })
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        self.read(key, None)
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        match range.is_empty() {
            true => Ok(self.read(key, None)?.map(|_| Bytes::new())),
            false => self.read(key, Some(range)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let (store, path) = (self.store.clone(), self.path("list", prefix)?);
        let skip = match self.prefix.as_ref() {
            "" => 0,
            prefix => prefix.len() + 1,
        };
        let (mut retries, limit) = (self.retries(), self.patience.request);
        self.wait("list", prefix, async move {
            'again: loop {
                let mut listing = store.list(Some(&path));
                let mut listed = Vec::new();
                loop {
                    let meta = match within(limit, listing.try_next()).await {
                        Ok(Some(meta)) => meta,
                        Ok(None) => return Ok(listed),
                        Err(error) => {
                            retries.after(error).await?;
                            continue 'again;
                        }
                    };
                    if let Some(key) = meta.location.as_ref().get(skip..) {
                        listed.push(Listed {
                            key: key.to_owned(),
                            size: meta.size,
                            modified_ms: meta.last_modified.timestamp_millis(),
                        });
                    }
                }
            }
        })
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        let (store, path) = (self.store.clone(), self.path("remove", key)?);
        let (mut retries, limit) = (self.retries(), self.patience.request);
        self.wait("remove", key, async move {
            loop {
                match within(limit, store.delete(&path)).await {
                    Ok(()) | Err(Error::NotFound { .. }) => return Ok(()),
                    Err(error) => retries.after(error).await?,
                }
            }
        })
    }

    fn describe(&self) -> String {
        self.url.clone()
    }
}

#[cfg(test)]
mod tests;
