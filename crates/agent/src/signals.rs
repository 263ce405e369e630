//! SIGTERM and Ctrl-C: the first signal asks for a clean shutdown, the second exits at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::error::{Context, Result};

/// Becomes true once a signal has requested a shutdown.
#[derive(Debug, Clone)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn on_signals() -> Result<Stop> {
        let mut term = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut int = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        let (send, receive) = watch::channel(false);
        tokio::spawn(async move {
            let mut asked = 0;
            loop {
                let code = tokio::select! {
                    Some(()) = term.recv() => 143,
                    Some(()) = int.recv() => 130,
                    else => return,
                };
                asked += 1;
                if asked > 1 {
                    // Only work that is not durable yet is lost, and the user does not want to wait for it.
                    std::process::exit(code);
                }
                send.send_replace(true);
            }
        });
        Ok(Stop(receive))
    }

    /// A receiver for tasks that have to stop.
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.0.clone()
    }
}

/// Waits for a request to stop the process.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: the process is ending.
    let _ = stop.wait_for(|&s| s).await;
}
