//! A person ends the move of a machine that runs here in part: its source is lost for good, with what had not arrived.

use std::sync::Arc;

use drover_core::ImageName;
use drover_net::{Code, Refusal};
use drover_store::machine::Move;

use super::{Coming, GivenUp, Moves, Site, crash, failed, to_the_end};
use crate::leecher::{Event, Leecher};

/// What is left of a machine whose source is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of its disks that are lost: who reads them gets an error. `None` if that is not known.
    pub lost_bytes: Option<u64>,
    /// Whether it runs: else it has to be booted from its disks.
    pub runs: bool,
}

impl<S: Site> Moves<S> {
    /// Ends the move of a machine that runs here, and some of whose disks is at a source that is lost for good.
    ///
    /// # Errors
    /// [`Code::NotFound`] when there is none; [`Code::Held`] when its source sends what is left, or another process works on the
    /// machine; when that it is lost cannot be recorded: then it is tried again.
    pub async fn break_off(self: &Arc<Self>, name: ImageName) -> Result<Kept, Refusal> {
        let moves = Arc::clone(self);
        let broken = to_the_end(async move { moves.break_off_one(&name).await });
        broken.await.map_err(failed)?
    }

    async fn break_off_one(&self, name: &ImageName) -> Result<Kept, Refusal> {
        let entry = self.entry(name)?;
        let mut slot = entry.lock().await;
        let record = self.site.machines().load(name)?;
        let under_way = record.as_ref().and_then(|record| record.under_way.clone());
        let (Some(record), Some(Move::Partial(token, from))) = (record, under_way) else {
            let text = format!("{name} is not arriving here");
            return Err(Refusal::new(Code::NotFound, text));
        };
        let is_it = |coming: &Coming| coming.leecher.token() == token;
        if !slot.as_ref().is_some_and(is_it) {
            let lock = self.site.machines().lock(name);
            let lock = lock.map_err(|e| Refusal::new(Code::Io, e.to_string()))?;
            let held = || Refusal::new(Code::Held, format!("another process moves {name}"));
            let lock = lock.ok_or_else(held)?;
            *slot = Leecher::restart(&record, &mut Vec::new()).map(|leecher| Coming {
                leecher,
                from: from.clone(),
                prepared: None,
                rest: None,
                conversation: 0,
                attempt: 0,
                early: 0,
                silent: None,
                lock: Some(lock),
            });
        }
        let none = || Refusal::new(Code::NotFound, format!("{name} is not arriving here"));
        let coming = slot.as_mut().ok_or_else(none)?;
        if let Some(rest) = &coming.rest {
            if rest.is_connected() {
                let text = format!(
                    "{0} is not lost: it sends what is left of {name}, or did so until less than a minute ago",
                    from.name
                );
                return Err(Refusal::new(Code::Held, text));
            }
            // From now on nothing of it arrives.
            rest.writing.end().await;
        }
        let given_up = GivenUp::of(self.site.machines(), name);
        let lost = match given_up.add(token) {
            Ok(()) => {
                crash("given up");
                self.site.lose_rest(name, &record).await
            }
            Err(e) => Err(e),
        };
        crash("lost");
        let lost_bytes = match lost {
            Ok(bytes) => Some(bytes),
            // They are somebody else's since.
            Err(refusal) if refusal.code == Code::Held => None,
            Err(refusal) => {
                *slot = None;
                return Err(refusal);
            }
        };
        if lost_bytes == Some(0) {
            // It all arrived, as its source is told if it comes back.
            let told = given_up.remove(token);
            let _ = told.inspect_err(|e| tracing::warn!(machine = %name, "{e}"));
        }
        coming.rest = None;
        let (leecher, prepared) = (&mut coming.leecher, &mut coming.prepared);
        let mut actions = Vec::new();
        leecher.handle(Event::Whole, &mut actions);
        let mut acted = self.act_all(name, leecher, prepared, actions).await;
        // It may run already.
        let runs = self.run(name, leecher.record(), None).await.is_ok();
        if acted.is_ok() && leecher.is_starting() {
            self.site.give_disks(name, leecher.record(), None).await;
            // One that does not run a person boots from its disks.
            let mut actions = Vec::new();
            leecher.handle(Event::Running, &mut actions);
            acted = self.act_all(name, leecher, prepared, actions).await;
        }
        match acted {
            Ok(()) => {
                crash("broken");
                coming.release_when_over();
            }
            // What this process knows is not what is recorded.
            Err(_) => *slot = None,
        }
        acted.map_err(failed)?;
        tracing::warn!(machine = %name, "its move was broken: what had not come of it is lost");
        Ok(Kept { lost_bytes, runs })
    }
}
