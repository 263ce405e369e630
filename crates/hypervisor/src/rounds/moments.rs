//! The disks at one moment after another, and what was written in between.

use std::path::Path;

use super::{Rounds, View, held};
use crate::error::HypervisorError;

impl Rounds {
    /// Holds the disks as of now, as [`Rounds::begin_held`] does, and ends the round: what was written since the moment that
    /// was held before, and nothing else, differs between the two. [`Rounds::held`] has the disks, these views say what is
    /// dirty. [`Rounds::rest`] follows; after an error, [`Rounds::end`], since some of it may have happened.
    ///
    /// The machine is paused for milliseconds.
    ///
    /// # Errors
    /// Those of [`Rounds::begin_held`].
    pub async fn hold_next(&mut self, scratch: &Path) -> Result<Vec<View>, HypervisorError> {
        self.rest().await?;
        let media = self.media().await?;
        held::prepare(&self.machine, &self.names, &media, scratch).await?;
        let number = self.current;
        let (old, new) = (self.names.bitmap(number), self.names.bitmap(number + 1));
        self.take_moment(new, Some(old.clone())).await?;
        self.current += 1;
        self.open = true;
        held::show(&self.machine, &self.names, self.nodes.len()).await?;
        self.held = true;
        self.serve().await?;
        let counts = self.counts(number).await?;
        let mut views = Vec::new();
        for (index, (node, bytes)) in self.nodes.iter().zip(counts).enumerate() {
            let export = self.names.export(number, index);
            self.export(&export, node, &[&old]).await?;
            views.push(View {
                address: self.address(export),
                context: Some(format!("qemu:dirty-bitmap:{old}")),
                bytes,
            });
        }
        Ok(views)
    }

    /// Leaves nothing in QEMU but the bitmaps that record: its NBD server is free for others. What was read of the round
    /// before does not count any more.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run): call it again.
    pub async fn rest(&mut self) -> Result<(), HypervisorError> {
        self.release_held().await?;
        self.confirm().await?;
        self.stop_serving().await
    }
}
