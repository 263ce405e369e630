//! Moves the disk of a program: its state is sent as an image, then what the program writes meanwhile, the last of it while
//! the disk is frozen.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use drover_store::machine::{MachineRecord, Machines, Seed};
use tokio::sync::watch;

use super::ahead::Ahead;
use super::copy::{FEW_DIRTY, MAX_ROUNDS, ROUND_EVERY};
use super::device::Device;
use super::disks::Disks;
use super::leaving::check_same;
use super::report::{MoveEvent, MoveOptions, MoveReport, OnMove, Step};
use super::{Driven, Driver, call_over, drive, lock, millis};
use crate::disks::{DiskWriter, Sent};
use crate::error::MigrateError;
use crate::hooks::{Commands, Hooks};
use crate::movable::Movable;
use crate::protocol::{Ask, Kind, SendDisks};

/// Moves a device. Returns when it is at the other site; then it answers nothing more here. `device` is `None` where no
/// process serves it any more, which is only right when the move is committed: then the other site is asked.
///
/// `options.machine` names the record of the disk in `records`, and `options.name_there` its image there.
///
/// # Errors
/// When it stays here, and can be used as before; or, after the commitment, when it was stopped before the other site had
/// answered: then nobody may use it until the same is called again.
pub async fn move_device(
    device: Option<Arc<Movable>>,
    hooks: Arc<dyn Hooks>,
    records: &Machines,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    let lock = lock(records, &options.machine)?;
    let known = records.load(&options.machine)?;
    let is_committed = known.as_ref().is_some_and(MachineRecord::is_committed);
    if device.is_none() && !is_committed {
        return Err(MigrateError::Unsupported(format!(
            "{} is not in use: send it instead",
            options.machine
        )));
    }
    let known = known.unwrap_or_else(|| {
        MachineRecord::new(Seed(drover_net::random_id()), vec![options.machine.clone()])
    });
    check_same(&known, &options)?;
    let driven = Driven {
        hypervisor: None,
        disks: Disks::default(),
        device: Some(Box::new(Device::new(device, hooks, &options))),
    };
    drive(driven, known, lock, records, options, on_event, stop).await
}

/// Says what a move of a device would send: `options.send.dry_run` must be set.
///
/// # Errors
/// When the other site does not say.
pub async fn estimate_device(
    movable: Arc<Movable>,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    let none = Arc::new(Commands::default());
    let mut device = Device::new(Some(movable), none, &options);
    let sent = async {
        let items = device.hold().await?;
        super::images::send_images(items, &options, on_event, stop).await
    };
    let sent = sent.await;
    device.gone().await;
    sent.map(|_| MoveReport {
        machine: options.name_there.to_string(),
        ..MoveReport::default()
    })
}

impl Driver<'_> {
    fn device(&mut self) -> Result<&mut Device, MigrateError> {
        let device = self.device.as_deref_mut();
        device.ok_or(MigrateError::Stopped)
    }

    /// Sends rounds until few are left, and then the last one, with the device frozen.
    pub(super) async fn follow_device(&mut self) -> Result<(), MigrateError> {
        let send = self.options.send.clone();
        let writes = Ahead::begin(&send);
        self.order(Ask::Prepare).await?;
        self.step(Step::Disks);
        let request = SendDisks {
            kind: Kind::Disk,
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
        };
        let (reader, writer, ..) = call_over(writes.made().await?, &send, &request).await?;
        let sent = Arc::new(Sent::default());
        let writer = &mut DiskWriter::new(reader, writer, Arc::clone(&sent));
        loop {
            let begun = Instant::now();
            let bytes = self.device_round(writer).await?;
            writer.flushed().await?;
            let fits = match self.options.max_pause {
                None => self.report.rounds >= MAX_ROUNDS,
                Some(limit) => begun.elapsed() <= limit,
            };
            let few = bytes < FEW_DIRTY && self.options.max_pause.is_none();
            if few || fits {
                break;
            }
            if begun.elapsed() < ROUND_EVERY {
                tokio::time::sleep(ROUND_EVERY.saturating_sub(begun.elapsed())).await;
            }
        }
        self.step(Step::Switch);
        let paused = Instant::now();
        self.set_paused(Some(paused));
        self.device()?.pause().await?;
        self.report.pause.hook_ms = millis(paused);
        self.device()?.freeze().await?;
        self.device_round(writer).await?;
        // Round trips of the pause that do not wait for each other.
        tokio::try_join!(writer.flushed(), self.order(Ask::Arrived))?;
        self.report.pause.disks_ms = millis(paused) - self.report.pause.hook_ms;
        self.report.disk_bytes = sent.disk.load(Ordering::Relaxed);
        self.report.disk_wire_bytes = sent.packed.load(Ordering::Relaxed);
        Ok(())
    }

    /// Sends what was written since the last round; bytes.
    async fn device_round(&mut self, writer: &mut DiskWriter) -> Result<u64, MigrateError> {
        let bytes = self.device()?.send_round(writer).await?;
        self.report.rounds += 1;
        (self.on_event)(MoveEvent::Round {
            round: self.report.rounds,
            bytes,
        });
        Ok(bytes)
    }
}
