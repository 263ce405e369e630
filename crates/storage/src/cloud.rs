//! Object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage. Vaults keep their objects in
//! them, and disks their chunks.
//!
//! Credentials come from the environment, or from the profile files of AWS (`profile`).
//!
//! Every request is repeated, a bounded number of times with growing pauses, after an answer that says to try later, a
//! lost connection or a timeout. A write that may have taken place without an answer finds its object when it is
//! repeated: it counts as done only if the content is its own. The store's own retries are off: they would hide that.

use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::ClientOptions;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
    UpdateVersion,
};
use tokio::runtime::Runtime;

mod answer;
mod patience;
mod profile;

use answer::{answer, conflict, failed, is_denied, is_transient, one_line};
use patience::Retries;
pub use patience::{MAX_TRIES, Patience};

/// Requests of one call at once.
const MAX_AT_ONCE: usize = 16;
/// Keys of a listing that are passed on together, and how often ahead of who takes them.
const MAX_LISTED: usize = 1000;
const MAX_LISTS: usize = 4;
/// Threads that wait for answers.
const THREADS: usize = 2;
/// Bytes that the slowest link sends in a second.
const SLOWEST: usize = 64 << 10;
/// Most bytes that are reserved for an answer before it comes.
const MAX_RESERVED: u64 = 16 << 20;

/// What a store did not do.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot {doing} {key} in {url}: {why}")]
pub struct CloudError {
    /// The operation: `read`, `write`, `list`, `remove`.
    pub doing: &'static str,
    /// The object.
    pub key: String,
    /// The prefix.
    pub url: String,
    /// What the store said, in one short line.
    pub why: String,
    /// Whether it may work later.
    pub can_retry: bool,
    /// Whether the credentials are the reason.
    pub is_denied: bool,
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: String,
    /// Its length in bytes.
    pub size: u64,
    /// When it was written, by the store's clock, in milliseconds since 1970.
    pub modified_ms: i64,
}

/// The version of an object, as its store names it.
#[derive(Debug, Clone)]
pub struct Version(UpdateVersion);

impl Version {
    /// From its entity tag and its number, where the store has such.
    #[must_use]
    pub fn new(e_tag: Option<String>, version: Option<String>) -> Self {
        Version(UpdateVersion { e_tag, version })
    }

    /// Its entity tag and its number.
    #[must_use]
    pub fn into_parts(self) -> (Option<String>, Option<String>) {
        (self.0.e_tag, self.0.version)
    }
}

/// A prefix in an object store. Calls block; they can be made from any thread.
pub struct Cloud {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
    patience: Patience,
    has_answered: AtomicBool,
}

/// The threads that speak to stores, of all of them in the process.
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

impl Cloud {
    /// The prefix at a URL, with credentials from the environment. Asks nothing of the store.
    ///
    /// # Errors
    /// When the URL is none of a store that is known, or nothing says how to reach it: why.
    pub fn open(url: &str) -> Result<Self, String> {
        Cloud::open_with(url, Patience::default())
    }

    /// The same with other times to wait.
    ///
    /// # Errors
    /// As [`Cloud::open`].
    pub fn open_with(url: &str, patience: Patience) -> Result<Self, String> {
        let unsupported = |why: &dyn Display| why.to_string();
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
            "s3" => profile::of_environment()
                .map_err(|why| unsupported(&why))?
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
        Ok(Cloud {
            store: store.map_err(|e| unsupported(&one_line(&e)))?,
            prefix,
            url: url.trim_end_matches('/').to_owned(),
            patience,
            has_answered: AtomicBool::new(false),
        })
    }

    /// Over a store that was made elsewhere.
    #[must_use]
    pub fn over(store: Arc<dyn ObjectStore>, prefix: Path, url: &str, patience: Patience) -> Self {
        Cloud {
            store,
            prefix,
            url: url.trim_end_matches('/').to_owned(),
            patience,
            has_answered: AtomicBool::new(false),
        }
    }

    /// Its URL, for messages.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    fn error(&self, doing: &'static str, key: &str, why: &dyn Display, retry: bool) -> CloudError {
        CloudError {
            doing,
            key: key.to_owned(),
            url: self.url.clone(),
            why: why.to_string(),
            can_retry: retry,
            is_denied: false,
        }
    }

    fn failed(&self, doing: &'static str, key: &str, error: &Error) -> CloudError {
        CloudError {
            is_denied: is_denied(error),
            ..self.error(doing, key, &one_line(error), is_transient(error))
        }
    }

    /// Runs `work` on the threads that speak to stores, and waits for it: callers are threads of all kinds.
    fn wait<T: Send + 'static>(
        &self,
        doing: &'static str,
        key: &str,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, CloudError> {
        let (result, done) = channel();
        let runtime = runtime().map_err(|e| self.error(doing, key, &e, true))?;
        drop(runtime.spawn(async move {
            let _ = result.send(work.await);
        }));
        match done.recv() {
            Ok(Ok(value)) => {
                self.has_answered.store(true, Ordering::Relaxed);
                Ok(value)
            }
            Ok(Err(error)) => Err(self.failed(doing, key, &error)),
            Err(_) => Err(self.error(doing, key, &"its thread ended; this is a bug", false)),
        }
    }

    fn path(&self, doing: &'static str, key: &str) -> Result<Path, CloudError> {
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
        self.patience
            .retries(self.has_answered.load(Ordering::Relaxed))
    }

    fn read(&self, key: &str, range: Option<Range<u64>>) -> Result<Option<Bytes>, CloudError> {
        let (store, path) = (self.store.clone(), self.path("read", key)?);
        let (retries, limit) = (self.retries(), self.patience.request);
        self.wait("read", key, async move {
            read_patiently(&*store, &path, range, limit, retries).await
        })
    }

    /// Writes an object, unless the key exists; whether it was written. After an error it may have been written.
    ///
    /// # Errors
    /// What the store says.
    pub fn create(&self, key: &str, bytes: Bytes) -> Result<bool, CloudError> {
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

    /// An object; none if it does not exist.
    ///
    /// # Errors
    /// What the store says.
    pub fn get(&self, key: &str) -> Result<Option<Bytes>, CloudError> {
        self.read(key, None)
    }

    /// Part of an object, as far as it goes; none if it does not exist.
    ///
    /// # Errors
    /// What the store says.
    pub fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, CloudError> {
        match range.is_empty() {
            true => Ok(self.read(key, None)?.map(|_| Bytes::new())),
            false => self.read(key, Some(range)),
        }
    }

    /// Every object below a prefix, in any order.
    ///
    /// # Errors
    /// What the store says.
    pub fn list(&self, prefix: &str) -> Result<Vec<Listed>, CloudError> {
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

    /// Calls `each` with the key of every object below a prefix, in any order, some perhaps twice. Must not be called on a
    /// thread of an async runtime.
    ///
    /// # Errors
    /// What the store says.
    pub fn list_each(&self, prefix: &str, each: &mut dyn FnMut(&str)) -> Result<(), CloudError> {
        let (store, path) = (self.store.clone(), self.path("list", prefix)?);
        let skip = match self.prefix.as_ref() {
            "" => 0,
            prefix => prefix.len() + 1,
        };
        let (mut retries, limit) = (self.retries(), self.patience.request);
        let runtime = runtime().map_err(|e| self.error("list", prefix, &e, true))?;
        let (come, mut coming) = tokio::sync::mpsc::channel(MAX_LISTS);
        drop(runtime.spawn(async move {
            'again: loop {
                let mut listing = store.list(Some(&path));
                let mut some = Vec::new();
                loop {
                    let meta = match within(limit, listing.try_next()).await {
                        Ok(meta) => meta,
                        Err(error) => match retries.after(error).await {
                            Ok(()) => continue 'again,
                            Err(error) => {
                                let _ = come.send(Err(error)).await;
                                return;
                            }
                        },
                    };
                    let is_last = meta.is_none();
                    let key =
                        meta.and_then(|meta| Some(meta.location.as_ref().get(skip..)?.to_owned()));
                    some.extend(key);
                    let is_full = is_last || some.len() == MAX_LISTED;
                    if is_full && come.send(Ok(std::mem::take(&mut some))).await.is_err() || is_last
                    {
                        return;
                    }
                }
            }
        }));
        while let Some(some) = coming.blocking_recv() {
            let some = some.map_err(|error| self.failed("list", prefix, &error))?;
            some.iter().for_each(|key| each(key));
        }
        Ok(())
    }

    /// Removes an object; one that does not exist is no error.
    ///
    /// # Errors
    /// What the store says.
    pub fn remove(&self, key: &str) -> Result<(), CloudError> {
        let (store, path) = (self.store.clone(), self.path("remove", key)?);
        let (retries, limit) = (self.retries(), self.patience.request);
        self.wait("remove", key, async move {
            remove_patiently(&*store, &path, limit, retries).await
        })
    }

    /// Parts of many objects, asked for at the same time: each with its key and range, in order.
    #[must_use]
    pub fn get_many(
        &self,
        wanted: &[(String, Range<u64>)],
    ) -> Vec<Result<Option<Bytes>, CloudError>> {
        let limit = self.patience.request;
        let jobs = wanted.iter().map(|(key, range)| {
            let (store, retries, range) = (self.store.clone(), self.retries(), range.clone());
            let job = self.path("read", key).map(|path| async move {
                read_patiently(&*store, &path, Some(range), limit, retries).await
            });
            (key.clone(), job)
        });
        self.wait_for_all("read", jobs)
    }

    /// Writes many objects at the same time, whether or not they exist; what became of each, in order.
    #[must_use]
    pub fn put_many(&self, objects: Vec<(String, Bytes)>) -> Vec<Result<(), CloudError>> {
        let jobs = objects.into_iter().map(|(key, bytes)| {
            let limit = limit_of_write(self.patience.request, bytes.len());
            let (store, mut retries) = (self.store.clone(), self.retries());
            let job = self.path("write", &key).map(|path| async move {
                loop {
                    match within(limit, store.put(&path, bytes.clone().into())).await {
                        Ok(_) => return Ok(()),
                        Err(error) => retries.after(error).await?,
                    }
                }
            });
            (key, job)
        });
        self.wait_for_all("write", jobs)
    }

    /// Removes many objects at the same time; those that do not exist are no errors.
    #[must_use]
    pub fn remove_many(&self, keys: &[String]) -> Vec<Result<(), CloudError>> {
        let limit = self.patience.request;
        let jobs = keys.iter().map(|key| {
            let (store, retries) = (self.store.clone(), self.retries());
            let job = self
                .path("remove", key)
                .map(|path| async move { remove_patiently(&*store, &path, limit, retries).await });
            (key.clone(), job)
        });
        self.wait_for_all("remove", jobs)
    }

    /// Does jobs on the threads that speak to stores, [`MAX_AT_ONCE`] at a time.
    fn wait_for_all<T, A>(
        &self,
        doing: &'static str,
        jobs: impl Iterator<Item = (String, Result<A, CloudError>)>,
    ) -> Vec<Result<T, CloudError>>
    where
        T: Send + 'static,
        A: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let (keys, jobs): (Vec<_>, Vec<_>) = jobs.unzip();
        let begun = jobs.into_iter().map(|job| async move {
            match job {
                Ok(job) => Ok(job.await),
                Err(error) => Err(error),
            }
        });
        let begun = stream::iter(begun.collect::<Vec<_>>()).buffered(MAX_AT_ONCE);
        let done = self.wait(
            doing,
            "",
            async move { Ok(begun.collect::<Vec<_>>().await) },
        );
        let done = match done {
            Ok(done) => done,
            Err(error) => return keys.iter().map(|_| Err(error.clone())).collect(),
        };
        let done = keys.iter().zip(done).map(|(key, done)| match done {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.failed(doing, key, &error)),
            Err(error) => Err(error),
        });
        done.collect()
    }

    /// An object and its version; none if it does not exist.
    ///
    /// # Errors
    /// What the store says.
    pub fn get_versioned(
        &self,
        key: &str,
        most: u64,
    ) -> Result<Option<(Bytes, Version)>, CloudError> {
        let (store, path) = (self.store.clone(), self.path("read", key)?);
        let (mut retries, limit) = (self.retries(), self.patience.request);
        self.wait("read", key, async move {
            loop {
                match read_versioned(&*store, &path, most, limit).await {
                    Err(error) => retries.after(error).await?,
                    got => return got,
                }
            }
        })
    }

    /// Writes an object if it has that version, or if there is none; its new version, or none if it was refused. It is
    /// tried once: after an error that says that a retry may help, and also after a refusal that follows such an error, it
    /// may have been written.
    ///
    /// # Errors
    /// What the store says.
    pub fn swap(
        &self,
        key: &str,
        was: Option<&Version>,
        bytes: Bytes,
    ) -> Result<Option<Version>, CloudError> {
        let (store, path) = (self.store.clone(), self.path("write", key)?);
        let limit = limit_of_write(self.patience.request, bytes.len());
        let mode = match was {
            Some(version) => PutMode::Update(version.0.clone()),
            None => PutMode::Create,
        };
        self.wait("write", key, async move {
            let put = PutOptions {
                mode,
                ..PutOptions::default()
            };
            match within(limit, store.put_opts(&path, bytes.into(), put)).await {
                Ok(done) => Ok(Some(Version(done.into()))),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }
}

async fn read_patiently(
    store: &dyn ObjectStore,
    path: &Path,
    range: Option<Range<u64>>,
    limit: Duration,
    mut retries: Retries,
) -> Result<Option<Bytes>, Error> {
    loop {
        match read(store, path, range.clone(), limit).await {
            Err(error) => retries.after(error).await?,
            got => return got,
        }
    }
}

async fn remove_patiently(
    store: &dyn ObjectStore,
    path: &Path,
    limit: Duration,
    mut retries: Retries,
) -> Result<(), Error> {
    loop {
        match within(limit, store.delete(path)).await {
            Ok(()) | Err(Error::NotFound { .. }) => return Ok(()),
            Err(error) => retries.after(error).await?,
        }
    }
}

/// Whether plain HTTP is allowed, as the environment says: for a store on a trusted network.
fn allows_http() -> bool {
    let says = |name| std::env::var(name).is_ok_and(|v| matches!(&*v, "1" | "true" | "TRUE"));
    says("AWS_ALLOW_HTTP") || says("AZURE_ALLOW_HTTP") || says("GOOGLE_ALLOW_HTTP")
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
        if bytes.len() as u64 > wanted {
            break;
        }
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
    let asked = range.as_ref().map_or(size, |range| range.end - range.start);
    if got.range.end - got.range.start > asked {
        return Err(failed(format!(
            "more than the {asked} bytes that were asked for come"
        )));
    }
    match range.is_some() || is_whole {
        true => Ok(Some(content(got, limit).await?)),
        false => Err(failed(format!("part of {size} bytes came"))),
    }
}

/// An object of at most `most` bytes, with its version.
async fn read_versioned(
    store: &dyn ObjectStore,
    path: &Path,
    most: u64,
    limit: Duration,
) -> Result<Option<(Bytes, Version)>, Error> {
    let got = match within(limit, store.get_opts(path, GetOptions::default())).await {
        Ok(got) => got,
        Err(Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    if got.meta.size > most {
        return Err(Error::NotSupported {
            source: format!("it has {} bytes, more than {most}", got.meta.size).into(),
        });
    }
    let version = Version(UpdateVersion {
        e_tag: got.meta.e_tag.clone(),
        version: got.meta.version.clone(),
    });
    Ok(Some((content(got, limit).await?, version)))
}

#[cfg(test)]
mod tests;
