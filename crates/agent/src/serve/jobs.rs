//! Long-running requests: run on threads of their own, a few at a time, with progress reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use drover_net::service::{Exchange, Request};
use drover_net::{PeerKey, ShareLimits, Shares};
use drover_teleport::services::Progress;

use super::server::Server;
use crate::error::{Result, bail};
use crate::signals::stopped;

/// Interval of progress reports, which also keep the connection alive.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Upper bound on concurrent long jobs (verify, index), but each caller may have one.
const MAX_JOBS: u64 = 2;

/// The places for long jobs.
pub fn places() -> Shares<PeerKey> {
    Shares::new(ShareLimits {
        all: MAX_JOBS,
        one: MAX_JOBS,
        sure: 1,
    })
}

/// Runs `job` on its own thread once a place is free, and reports its progress to the caller. `uses` is kept until the job
/// has ended: the domains that it works in.
///
/// # Errors
/// When the caller disconnects or the site stops; the job goes on, and nobody hears of it.
pub async fn run<R: Request<Progress = Progress>, T: Send + 'static>(
    server: &Arc<Server>,
    exchange: &mut Exchange<'_, R>,
    uses: impl Send + 'static,
    job: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T + Send + 'static,
) -> Result<T> {
    let done = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let seen = Arc::clone(&done);
    let (jobs, caller) = (server.jobs.clone(), exchange.caller());
    let work = async move {
        let place = jobs.take(caller, 1).await;
        let out = tokio::task::spawn_blocking(move || {
            let _until_it_ends = (place, uses);
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
            () = stopped(&mut stop) => {
                bail!("it was ended: the site stops, or the right to it was taken away");
            }
            _ = ticks.tick() => {
                let (done, total) = (seen.0.load(Relaxed), seen.1.load(Relaxed));
                exchange.report(&Progress { done, total }).await?;
            }
        }
    }
}
