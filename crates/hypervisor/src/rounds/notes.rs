//! Recording that goes on between programs: what was written since a moment that is noted in QEMU itself, beside the bitmaps
//! that record. So the note is there exactly as long as they are.

use std::time::Duration;

use super::Rounds;
use crate::error::HypervisorError;
use crate::machine::Action;

impl Rounds {
    /// What was noted of each disk, in the order of the nodes. What is recorded is all that was written since any of its notes.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn noted(&self) -> Result<Vec<Vec<String>>, HypervisorError> {
        let media = self.media().await?;
        let of = |medium: &crate::machine::Medium| {
            let notes = medium.bitmaps.iter();
            let notes = notes.filter_map(|bitmap| self.names.noted(&bitmap.name));
            notes.map(str::to_owned).collect()
        };
        Ok(media.iter().map(of).collect())
    }

    /// Notes what the state is called that was held last, for each disk in the order of the nodes, in the place of what was
    /// noted before; up to 16 hexadecimal digits. It is what [`Rounds::rest`] then keeps recording from.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run), and [`HypervisorError::Unsupported`] for a name that is not allowed.
    pub async fn note(&self, notes: &[String]) -> Result<(), HypervisorError> {
        let media = self.media().await?;
        let names: Vec<String> = notes.iter().map(|note| self.names.note(note)).collect();
        if names.len() != media.len() || names.iter().any(|name| self.names.noted(name).is_none()) {
            return Err(self.machine.qmp().unsupported("cannot note that"));
        }
        let add = media
            .iter()
            .zip(&names)
            .map(|(medium, name)| Action::AddMark {
                node: &medium.node,
                name,
            });
        let add: Vec<Action<'_>> = add.collect();
        self.machine.transaction(&add).await?;
        for medium in &media {
            for old in &medium.bitmaps {
                if self.names.noted(&old.name).is_some() {
                    let removed =
                        self.machine
                            .remove_bitmap(&medium.node, &old.name, Duration::ZERO);
                    removed.await?;
                }
            }
        }
        Ok(())
    }

    /// Gives up the state that is held: nothing but the bitmaps that record is left in QEMU, and they have what was recorded
    /// before it, too.
    ///
    /// # Errors
    /// Those of [`Qmp::run`](crate::qmp::Qmp::run).
    pub async fn give_up_held(&mut self) -> Result<(), HypervisorError> {
        self.release_held().await?;
        if self.open {
            self.take_back().await?;
        }
        self.stop_serving().await
    }
}
