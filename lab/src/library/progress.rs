//! What a build is doing, said while it does it.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often a step that goes on says so where nobody sees a line being rewritten.
const EVERY: Duration = Duration::from_secs(15);

/// A step of a build: says its name when it starts, and its time while it goes on.
pub struct Step {
    end: Option<Sender<()>>,
    ticker: Option<JoinHandle<()>>,
}

impl Step {
    /// Starts a step of the image `name`.
    pub fn new(name: &str, what: &str) -> Self {
        let line = format!("{name}: {what}");
        let (end, ended) = mpsc::channel();
        let terminal = std::io::stderr().is_terminal();
        let started = Instant::now();
        eprint!("{line}{}", if terminal { "" } else { "\n" });
        let ticker = thread::spawn(move || {
            let every = if terminal {
                Duration::from_secs(1)
            } else {
                EVERY
            };
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(every) {
                let seconds = started.elapsed().as_secs();
                if terminal {
                    eprint!("\r{line}, {seconds} s");
                } else {
                    eprintln!("{line}, {seconds} s");
                }
            }
            if terminal {
                eprint!("\r\x1b[K");
            }
        });
        Self {
            end: Some(end),
            ticker: Some(ticker),
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
    }
}
