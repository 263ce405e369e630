//! Whether bytes flow over the link while they could.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::experiments::lines::Net;

/// How often the link is looked at, and what of it is less than a flow of data.
const EVERY: Duration = Duration::from_millis(500);
const LITTLE: u64 = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Can {
    /// There is no link, or no site, or nothing to send.
    Not,
    /// Since then, and nothing has flowed yet.
    Since(Instant),
    /// It did last then.
    Flows(Instant),
    Ended,
}

/// What flows, told by who cuts and heals to who watches.
#[derive(Clone)]
pub struct Flow(Arc<Mutex<Can>>);

impl Flow {
    /// Nothing has been sent yet, and that does not count.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Can::Not)))
    }

    fn set(&self, can: Can) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = can;
    }

    /// From now on nothing can flow.
    pub fn away(&self) {
        self.set(Can::Not);
    }

    /// From now on it can.
    pub fn back(&self) {
        self.set(Can::Since(Instant::now()));
    }

    /// Nobody watches any more.
    pub fn end(&self) {
        self.set(Can::Ended);
    }

    /// Watches until the end: the longest time without a flow while there could be one, and the longest until it began again.
    pub fn watch(&self, net: &Net) -> Result<(Duration, Duration)> {
        let mut longest = (Duration::ZERO, Duration::ZERO);
        let sent = || anyhow::Ok(net.bytes()?.context("no link")?.0);
        let mut last = sent()?;
        let mut began = false;
        loop {
            std::thread::sleep(EVERY);
            let (sent, now) = (sent()?, Instant::now());
            let flows = sent - std::mem::replace(&mut last, sent) > LITTLE;
            let mut can = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match *can {
                Can::Ended => return Ok(longest),
                // The first bytes of all need no link that came back.
                Can::Not if flows && !began => *can = Can::Flows(now),
                Can::Not => {}
                Can::Since(then) if flows => {
                    longest.1 = longest.1.max(now - then);
                    *can = Can::Flows(now);
                }
                Can::Since(_) => {}
                Can::Flows(then) => {
                    longest.0 = longest.0.max((now - then).saturating_sub(EVERY));
                    if flows {
                        *can = Can::Flows(now);
                    }
                }
            }
            began |= matches!(*can, Can::Flows(_));
        }
    }
}
