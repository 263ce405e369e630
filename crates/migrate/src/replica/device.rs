//! The disk of a program at one moment after another.

use std::path::PathBuf;
use std::sync::Arc;

use drover_core::ImageName;
use drover_store::generations::Points;

use super::held::Held;
use crate::error::MigrateError;
use crate::movable::{Movable, Series};
use crate::source::disks::whole;

/// A device of this process that is replicated, while programs use it.
pub struct DeviceDisk {
    movable: Arc<Movable>,
    /// Gets what is overwritten while a round is sent.
    scratch: PathBuf,
    /// What was written since the state before.
    points: Option<(Series, Points)>,
}

impl DeviceDisk {
    /// A device of which nothing is held yet.
    #[must_use]
    pub fn new(movable: Arc<Movable>, scratch: PathBuf) -> Self {
        let points = None;
        Self {
            movable,
            scratch,
            points,
        }
    }

    /// Where the next state keeps what is overwritten.
    pub(super) fn keep_aside_in(&mut self, scratch: PathBuf) {
        self.scratch = scratch;
    }

    /// Holds the state of now, to be sent as an image of this name.
    pub(super) async fn hold(&mut self, name: &ImageName) -> Result<Held, MigrateError> {
        let (movable, scratch) = (Arc::clone(&self.movable), self.scratch.clone());
        let before = self.points.take();
        let name = name.clone();
        let held = tokio::task::spawn_blocking(move || {
            let since = before.as_ref().map(|(series, _)| *series);
            let held = movable.hold_again(&scratch, since);
            let (held, written, series) = held.map_err(|error| MigrateError::Disk {
                disk: name.to_string(),
                error,
            })?;
            let mut points = match (before, &written) {
                (Some((_, points)), Some(_)) => points,
                _ => Points::new(movable.size()),
            };
            for range in written.iter().flat_map(|written| written.runs()) {
                points.written(range);
            }
            let image = whole(Arc::new(held), name.as_str())?;
            let held = Held::new(name, image, points.point());
            Ok::<_, MigrateError>((held, (series, points)))
        });
        let (held, points) = held.await.map_err(|_| MigrateError::Stopped)??;
        self.points = Some(points);
        Ok(held)
    }

    /// Ends the held state; what is written is recorded on.
    pub(super) fn rest(&self) {
        if let Some((series, _)) = self.points {
            self.movable.release_of(series);
        }
    }

    /// Records nothing any more.
    pub(super) fn end(&mut self) {
        if let Some((series, _)) = self.points.take() {
            self.movable.end_of(series);
        }
    }
}
