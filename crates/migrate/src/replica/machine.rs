//! The disks of a QEMU at one moment after another.

use std::ops::Range;
use std::path::PathBuf;

use drover_core::{BlockDevice, ImageName};
use drover_hypervisor::Rounds;
use drover_hypervisor::machine::Machine;
use drover_hypervisor::rounds::View;
use drover_store::generations::Points;

use super::held::Held;
use crate::error::MigrateError;
use crate::protocol::DiskOffer;
use crate::source::disks::{self, GRANULARITY, Opening, REPLICA, clear_replica, whole};

/// The writable disks of a machine that is replicated.
pub struct MachineDisks {
    machine: Machine,
    name: ImageName,
    /// Gets the socket of the hypervisor's exports.
    work: PathBuf,
    /// Gets what the machine overwrites while a round is sent.
    scratch: PathBuf,
    offers: Vec<DiskOffer>,
    nodes: Vec<String>,
    rounds: Option<Rounds>,
    /// What was written to each disk between the rounds.
    points: Vec<Points>,
    opening: Opening,
}

impl MachineDisks {
    /// The disks of a machine, of which nothing is held yet.
    #[must_use]
    pub fn new(machine: Machine, name: ImageName, work: PathBuf, scratch: PathBuf) -> Self {
        Self {
            machine,
            name,
            work,
            scratch,
            offers: Vec::new(),
            nodes: Vec::new(),
            rounds: None,
            points: Vec::new(),
            opening: Opening::default(),
        }
    }

    /// Where the next state keeps what is overwritten.
    pub(super) fn keep_aside_in(&mut self, scratch: PathBuf) {
        self.scratch = scratch;
    }

    /// Looks at the disks that the machine has now; their devices.
    pub(super) async fn look(&mut self) -> Result<Vec<String>, MigrateError> {
        if self.rounds.is_none() {
            // What a process has left that was killed is no disk's.
            self.end().await;
        }
        let found = disks::writable(&self.machine, &self.name, None).await?;
        if found.offers.is_empty() {
            let text = format!("{} has no disk that it can write", self.name);
            return Err(MigrateError::Unsupported(text));
        }
        if (&found.offers, found.nodes()) != (&self.offers, &self.nodes[..]) {
            // What was recorded is of other disks.
            self.end().await;
            self.nodes = found.nodes().to_vec();
            self.offers = found.offers;
        }
        let devices = self.offers.iter().map(|offer| offer.device.clone());
        Ok(devices.collect())
    }

    /// Holds the state of all disks as of now, to be sent as these images.
    pub(super) async fn hold(&mut self, images: &[ImageName]) -> Result<Vec<Held>, MigrateError> {
        match self.hold_again().await {
            Ok(true) => {}
            Ok(false) => self.hold_first().await?,
            Err(e) => {
                tracing::info!("what was written is not known: {e}");
                self.end().await;
                self.hold_first().await?;
            }
        }
        let views = match &self.rounds {
            Some(rounds) => rounds.held().await?.unwrap_or_default(),
            None => Vec::new(),
        };
        let mut held = Vec::new();
        for (n, view) in views.into_iter().enumerate() {
            let disk = format!("{n}");
            let opened = disks::open(&self.opening, view, move |device, _| {
                Ok(whole(device, &disk))
            });
            let image = opened.await??;
            if let (Some(name), Some(points)) = (images.get(n), self.points.get_mut(n)) {
                held.push(Held::new(name.clone(), image, points.point()));
            }
        }
        match held.len() == images.len() {
            true => Ok(held),
            false => Err(MigrateError::Protocol("the images of a round")),
        }
    }

    async fn hold_first(&mut self) -> Result<(), MigrateError> {
        let nodes: Vec<&str> = self.nodes.iter().map(String::as_str).collect();
        let (work, scratch) = (&self.work, &self.scratch);
        let begun = Rounds::begin_held(&self.machine, REPLICA, &nodes, work, GRANULARITY, scratch);
        self.rounds = Some(begun.await?);
        let sizes = self.offers.iter().map(|offer| offer.size);
        self.points = sizes.map(Points::new).collect();
        Ok(())
    }

    /// False if nothing was recorded before.
    async fn hold_again(&mut self) -> Result<bool, MigrateError> {
        let Some(rounds) = &mut self.rounds else {
            return Ok(false);
        };
        let opening = self.opening.write().await;
        let views = rounds.hold_next(&self.scratch).await?;
        drop(opening);
        for (points, view) in self.points.iter_mut().zip(views) {
            for range in dirty(&self.opening, view).await? {
                points.written(range);
            }
        }
        Ok(true)
    }

    /// Ends the held state; what is written is recorded on.
    pub(super) async fn rest(&mut self) {
        let Some(rounds) = &mut self.rounds else {
            return;
        };
        let opening = self.opening.write().await;
        let rested = rounds.rest().await;
        drop(opening);
        if let Err(e) = rested {
            tracing::debug!("the state of the disks was not released: {e}");
            self.end().await;
        }
    }

    /// Leaves nothing in the hypervisor.
    pub(super) async fn end(&mut self) {
        let _none_opens = self.opening.write().await;
        (self.rounds, self.points) = (None, Vec::new());
        clear_replica(&self.machine, &self.work).await;
    }
}

/// What a view says is dirty.
pub(crate) async fn dirty(opening: &Opening, view: View) -> Result<Vec<Range<u64>>, MigrateError> {
    if view.bytes == 0 {
        return Ok(Vec::new());
    }
    let opened = disks::open(opening, view, |device, context| {
        device.dirty(context, 0, device.size()).collect()
    });
    opened.await
}
