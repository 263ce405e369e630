//! How long a store is waited for, and how often it is asked.

use std::time::{Duration, Instant};

use object_store::Error;

use super::answer::{is_transient, one_line};

/// How often a request is made at most.
pub const MAX_TRIES: u32 = 24;

/// How long is waited, and how often.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the first answer ever: a store that is not there is said soon.
    pub first: Duration,
    /// For an answer of a store that has answered before.
    pub later: Duration,
    /// The first pause; each is twice as long.
    pub pause: Duration,
    /// The longest one.
    pub max_pause: Duration,
    /// For an answer, and for each part of it; for what is sent as well, a second more for each 64 KiB.
    pub request: Duration,
    /// For a connection.
    pub connect: Duration,
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

impl Patience {
    pub(super) fn retries(&self, has_answered: bool) -> Retries {
        Retries {
            began: None,
            limit: match has_answered {
                true => self.later,
                false => self.first,
            },
            pause: self.pause,
            max_pause: self.max_pause,
            tries: 0,
        }
    }
}

/// How often a request was made, and whether it is made again.
pub(super) struct Retries {
    /// The first error.
    began: Option<Instant>,
    limit: Duration,
    pause: Duration,
    max_pause: Duration,
    tries: u32,
}

impl Retries {
    /// Waits after an error, or returns it.
    pub(super) async fn after(&mut self, error: Error) -> Result<(), Error> {
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
