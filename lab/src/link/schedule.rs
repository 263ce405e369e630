//! Cuts and heals at times set beforehand, so that an experiment with them can be repeated.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::Engine;

/// What happens to a link, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Times since the start, in order, and whether the link is cut from then on.
    events: Vec<(Duration, bool)>,
}

impl Schedule {
    /// Cuts and heals at these seconds since the start.
    ///
    /// # Errors
    /// When a time is no time, or when a cut and a heal are at the same one.
    pub fn new(cut_at: &[f64], heal_at: &[f64]) -> Result<Self> {
        let mut events = Vec::new();
        for (times, cut) in [(cut_at, true), (heal_at, false)] {
            for &seconds in times {
                match Duration::try_from_secs_f64(seconds) {
                    Ok(at) => events.push((at, cut)),
                    Err(_) => bail!("{seconds}: not a number of seconds"),
                }
            }
        }
        events.sort_unstable();
        if events.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            bail!("two cuts or heals at the same time");
        }
        Ok(Self { events })
    }
}

/// A schedule at work, until it is dropped.
pub struct Running {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Starts the schedule's clock.
    pub fn start(engine: Arc<Engine>, schedule: &Schedule) -> Result<Self> {
        let events = schedule.events.clone();
        let (stop, stopped) = mpsc::channel();
        let started = Instant::now();
        let run = move || {
            for (at, cut) in events {
                let wait = at.saturating_sub(started.elapsed());
                if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let what = if cut { "cut" } else { "healed" };
                match engine.set_cut(cut) {
                    Ok(()) => eprintln!("{:.1} s: {what}", started.elapsed().as_secs_f64()),
                    Err(error) => eprintln!("{:.1} s: not {what}: {error:#}", at.as_secs_f64()),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("link-schedule".to_owned())
            .spawn(run)?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_put_in_order_and_nonsense_is_refused() {
        let schedule = Schedule::new(&[5.0, 20.5], &[30.0, 12.0]).unwrap();
        let ms: Vec<_> = schedule
            .events
            .iter()
            .map(|(at, cut)| (at.as_millis(), *cut))
            .collect();
        assert_eq!(
            ms,
            [
                (5000, true),
                (12_000, false),
                (20_500, true),
                (30_000, false)
            ]
        );
        assert!(Schedule::new(&[-1.0], &[]).is_err());
        assert!(Schedule::new(&[f64::NAN], &[]).is_err());
        assert!(Schedule::new(&[3.0], &[3.0]).is_err());
    }
}
