//! A device of this process as of one moment after another.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use drover_core::BlockDevice;

use crate::error::MigrateError;
use crate::movable::{Movable, Series};

/// A device that programs use meanwhile.
pub struct DeviceMoments {
    movable: Arc<Movable>,
    series: Option<Series>,
}

/// The state of a moment, and what was written since the one before; none if that is not known.
pub type State = (Arc<dyn BlockDevice>, Option<Vec<Range<u64>>>);

impl DeviceMoments {
    /// A device of which nothing is held yet.
    #[must_use]
    pub fn new(movable: Arc<Movable>) -> Self {
        let series = None;
        Self { movable, series }
    }

    /// Holds the state of now. `scratch` gets what is overwritten in the meantime. [`DeviceMoments::rest`] has to follow.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn hold(&mut self, scratch: PathBuf) -> Result<State, MigrateError> {
        let (movable, since) = (Arc::clone(&self.movable), self.series.take());
        let held = tokio::task::spawn_blocking(move || movable.hold_again(&scratch, since));
        let held = held.await.map_err(|_| MigrateError::Stopped)?;
        let (state, written, series) = held.map_err(|error| MigrateError::Disk {
            disk: "of the mount".into(),
            error,
        })?;
        self.series = Some(series);
        let written = written.map(|written| written.runs().collect());
        Ok((Arc::new(state), written))
    }

    /// Ends the held state. If it was all read, what is written since it is recorded on, otherwise no more.
    pub fn rest(&mut self, is_read: bool) {
        match self.series {
            Some(series) if is_read => self.movable.release_of(series),
            _ => self.end(),
        }
    }

    /// Records nothing any more.
    pub fn end(&mut self) {
        if let Some(series) = self.series.take() {
            self.movable.end_of(series);
        }
    }
}
