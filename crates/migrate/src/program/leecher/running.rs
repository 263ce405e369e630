//! A program that was taken: it is started, and what is left of it comes.

use std::sync::Arc;
use std::time::Duration;

use drover_net::Refusal;
use drover_store::machine::Token;
use tokio::sync::watch;

use super::super::transfer::{Phase, Transfer};
use super::{Coming, Host, Leecher, Stage};
use crate::leecher::{Action, Event};

impl<H: Host> Leecher<H> {
    /// Lets it run, or says at once why that cannot be. Its host may have to wait for what is absent: others may ask, and bring
    /// that, meanwhile.
    pub(super) fn run(self: &Arc<Self>, coming: &mut Coming) -> Option<Event> {
        let Some(transfer) = coming.transfer.clone() else {
            let why = "what had arrived of it was lost with its process".to_owned();
            self.stage.send_replace(Stage::Lost(why.clone()));
            return Some(Event::NotStarted(why));
        };
        let (running, run) = watch::channel(());
        coming.run = Some(run);
        let (this, token, state) = (
            Arc::clone(self),
            coming.leecher.token(),
            transfer.take_state(),
        );
        tokio::spawn(async move {
            let host = Arc::clone(&this.host);
            let run = tokio::task::spawn_blocking(move || host.run(state)).await;
            let run = run.unwrap_or_else(|e| Err(e.to_string()));
            this.ran(token, transfer, run).await;
            drop(running);
        });
        None
    }

    async fn ran(&self, token: Token, transfer: Arc<Transfer>, ran: Result<(), String>) {
        let mut slot = self.slot.lock().await;
        let current = slot
            .as_mut()
            .filter(|coming| coming.leecher.token() == token && coming.has(&transfer));
        let Some(coming) = current else {
            return;
        };
        let event = match ran {
            Ok(()) => Event::Running,
            Err(why) => {
                self.stage.send_replace(Stage::Lost(why.clone()));
                Event::NotStarted(why)
            }
        };
        let runs = matches!(event, Event::Running);
        let mut actions = Vec::new();
        coming.leecher.handle(event, &mut actions);
        for action in actions {
            if let Action::Keep(record) = action
                && let Err(e) = self.keep(record).await
            {
                // The former record means the same to the next process.
                tracing::warn!(program = %self.name, "{e}");
            }
        }
        coming.release_when_over();
        if coming.leecher.is_over() {
            self.stage.send_replace(Stage::Complete);
        } else if runs {
            self.stage.send_replace(Stage::Running);
            tokio::spawn(watch_over(transfer, self.stage.clone(), coming.patience));
        }
    }

    /// All of it is here, and durable: records that. Blocks.
    pub(super) fn whole(&self, token: Token) -> Result<(), Refusal> {
        let mut slot = self.slot.blocking_lock();
        let current = slot.as_mut();
        let Some(coming) = current.filter(|coming| coming.leecher.token() == token) else {
            return Ok(());
        };
        let mut leecher = coming.leecher.clone();
        let mut actions = Vec::new();
        leecher.handle(Event::Whole, &mut actions);
        for action in actions {
            if let Action::Keep(record) = action {
                self.machines.store(&self.name, &record)?;
            }
        }
        coming.leecher = leecher;
        coming.release_when_over();
        if coming.leecher.is_over() {
            self.stage.send_replace(Stage::Complete);
        }
        Ok(())
    }
}

/// Notices when what is left of a program that runs here does not come, and when it does after all.
async fn watch_over(transfer: Arc<Transfer>, stage: watch::Sender<Stage>, patience: Duration) {
    let (mut phase, mut connections) = (transfer.phase(), transfer.connections());
    let weak = Arc::downgrade(&transfer);
    drop(transfer);
    loop {
        connections.borrow_and_update();
        let Some(left) = weak.upgrade().map(|transfer| transfer.left()) else {
            return;
        };
        tokio::select! {
            _ = phase.wait_for(|phase| *phase == Phase::Complete) => return,
            changed = connections.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            () = tokio::time::sleep(patience) => {}
        }
        let Some(transfer) = weak.upgrade() else {
            return;
        };
        let now = transfer.left();
        if now > 0 && now == left && !transfer.is_connected() {
            let why = "its seeder is gone, with what was not here yet";
            transfer.fail(why);
            drop(transfer);
            // Unless it is complete by now.
            turn(&stage, &Stage::Running, Stage::Lost(why.to_owned()));
            if connections.changed().await.is_err() {
                return;
            }
            if let Some(transfer) = weak.upgrade() {
                transfer.revive();
            }
            turn(&stage, &Stage::Lost(why.to_owned()), Stage::Running);
        }
    }
}

fn turn(stage: &watch::Sender<Stage>, from: &Stage, to: Stage) {
    stage.send_if_modified(|stage| {
        let is_it = stage == from;
        if is_it {
            *stage = to;
        }
        is_it
    });
}
