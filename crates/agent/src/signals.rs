//! SIGTERM and Ctrl-C: the first signal asks for a clean shutdown, the second exits at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::error::{Context, Result};

/// Becomes true when this process is to stop.
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
                    // What is durable stays durable; the user does not want to wait for the rest.
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

/// Waits until the process is to stop.
pub async fn told(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: the process is ending.
    let _ = stop.wait_for(|&s| s).await;
}
