//! Waits of ordinary threads for what a database server answers: its connections live on a thread of their own.

use std::error::Error as _;
use std::future::Future;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use crate::site_catalog::table::RowError;

/// How long an answer may take. A statement gives up earlier by itself ([`super::link`]).
pub const CALL_LIMIT: Duration = Duration::from_secs(15);

static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();

/// Runs what blocks: tells the runtime of the caller, if it is a thread of one.
pub fn in_place<T>(f: impl FnOnce() -> T) -> T {
    let inside = Handle::try_current();
    if inside.is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread) {
        tokio::task::block_in_place(f)
    } else {
        f()
    }
}

/// Waits for a future, at most for so long.
///
/// # Errors
/// Its error; or that there was none in time.
pub fn wait<T: Send + 'static>(
    limit: Duration,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, RowError> {
    let runtime = RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        let builder = builder.worker_threads(1).thread_name("catalog");
        builder.enable_all().build().map_err(|e| e.to_string())
    });
    let runtime = runtime
        .as_ref()
        .map_err(|e| RowError::Server(format!("cannot start a thread: {e}"), true))?;
    let (answer, answers) = sync_channel(1);
    let task = runtime.spawn(async move {
        // Whoever waited may have given up.
        let _ = answer.send(future.await);
    });
    match answers.recv_timeout(limit) {
        Ok(answer) => answer.map_err(row_error),
        Err(RecvTimeoutError::Timeout) => {
            task.abort();
            let text = format!("no answer within {} s", limit.as_secs());
            Err(RowError::Server(text, true))
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(RowError::Server("the thread for it has ended".into(), true))
        }
    }
}

/// What the server or the connection said, and whether it can help to try again.
fn row_error(e: Error) -> RowError {
    if let Some(said) = e.as_db_error() {
        return RowError::Server(said.message().to_owned(), may_pass(said.code()));
    }
    // What the library adds in front says no more.
    let mut why: &dyn std::error::Error = &e;
    while let Some(inner) = why.source() {
        why = inner;
    }
    let of_system = e.source().and_then(|s| s.downcast_ref::<std::io::Error>());
    // What a certificate proves or not stays so.
    let of_tls = |e: &std::io::Error| e.get_ref().is_some_and(|e| e.is::<rustls::Error>());
    let passes = e.is_closed() || of_system.is_some_and(|e| !of_tls(e));
    RowError::Server(why.to_string(), passes)
}

/// Whether what this code says may pass by itself.
fn may_pass(code: &SqlState) -> bool {
    let code = code.code();
    // Connections, resources, rolled back, lock timeout, shutting down or starting.
    let classes = ["08", "53", "40"];
    let others = ["55P03", "57014", "57P01", "57P02", "57P03", "25P03"];
    classes.iter().any(|class| code.starts_with(class)) || others.contains(&code)
}
