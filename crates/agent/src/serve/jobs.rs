//! Long-running requests: run on threads of their own, a few at a time, with progress reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use drover_net::service::{Exchange, Request};
use drover_teleport::services::Progress;

use super::server::Server;
use crate::error::{Result, bail};
use crate::signals::stopped;

/// Interval of progress reports, which also keep the connection alive.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Runs `job` on its own thread once a permit is free, and reports its progress to the caller.
///
/// # Errors
/// When the caller disconnects or the site stops; the job is abandoned then.
pub async fn run<R: Request<Progress = Progress>, T: Send + 'static>(
    server: &Arc<Server>,
    exchange: &mut Exchange<'_, R>,
    job: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T + Send + 'static,
) -> Result<T> {
    let done = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let seen = Arc::clone(&done);
    let jobs = Arc::clone(&server.jobs);
    let work = async move {
        let place = jobs.acquire_owned().await?;
        let out = tokio::task::spawn_blocking(move || {
            let _place = place;
            job(&mut |now, total| {
                done.0.store(now, Relaxed);
                done.1.store(total, Relaxed);
            })
        })
        .await?;
        Ok(out)
    };
    tokio::pin!(work);
    let mut stop = exchange.stop();
    let mut ticks = tokio::time::interval(REPORT_EVERY);
    loop {
        tokio::select! {
            out = &mut work => return out,
            () = stopped(&mut stop) => bail!("the site is stopping"),
            _ = ticks.tick() => {
                let (done, total) = (seen.0.load(Relaxed), seen.1.load(Relaxed));
                exchange.report(&Progress { done, total }).await?;
            }
        }
    }
}
