//! The disks of a machine that was handed over, as a site serves them after a restart: what has not followed the machine yet is
//! read from them.

use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{Cost, DeviceError, ImageName};
use drover_device::stage::{Entry, Gate, Gated, Request};
use drover_store::machine::Machines;

/// A disk that is only read as long as its machine may not run here.
pub(super) type HandedOver<D> = Gated<D, Fence>;

/// The gate of [`HandedOver`].
pub(super) struct Fence {
    machines: Machines,
    machine: ImageName,
    /// Whether the other site has refused the machine since, so that it runs on here.
    stays: AtomicBool,
}

impl Fence {
    pub(super) fn new(machines: &Machines, machine: &ImageName) -> Self {
        Self {
            machines: machines.clone(),
            machine: machine.clone(),
            stays: AtomicBool::new(false),
        }
    }

    /// Whether the machine may run here again, which its record says before its hypervisor continues it.
    fn stays(&self) -> bool {
        if self.stays.load(Ordering::Acquire) {
            return true;
        }
        let record = self.machines.load(&self.machine);
        let stays = record.is_ok_and(|record| record.is_some_and(|record| record.may_run()));
        if stays {
            self.stays.store(true, Ordering::Release);
        }
        stays
    }
}

impl Gate for Fence {
    type Pass<'a> = ();

    fn enter(&self, request: &Request) -> Result<Entry<()>, DeviceError> {
        match request.operation.changes() && !self.stays() {
            true => Err(DeviceError::ReadOnly),
            false => Ok(Entry::Pass(())),
        }
    }

    fn leave(&self, (): ()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn cost(&self, inner: Cost) -> Cost {
        inner
    }
}

#[cfg(test)]
mod tests {
    use drover_core::{BlockDevice, Zeroes};
    use drover_device::backend::MemoryDevice;
    use drover_store::machine::{MachineRecord, Other, Seed, Token};

    use super::*;

    #[test]
    fn it_is_written_only_when_its_machine_stays() {
        let directory = tempfile::tempdir().unwrap();
        let machines = Machines::new(directory.path().to_owned());
        let name = ImageName::new("web").unwrap();
        let to = Other {
            key: [1; 32],
            name: "far".into(),
        };
        let token = Token([2; 16]);
        let here = MachineRecord::new(Seed([3; 16]), Vec::new());
        let committed = here.leave(token, to).unwrap().commit(token).unwrap();
        machines.store(&name, &committed).unwrap();
        let device = MemoryDevice::from_bytes(&[7; 8192]);
        let device = HandedOver::with_gate(device, Fence::new(&machines, &name));
        let refused = |done: Result<(), DeviceError>| {
            assert!(matches!(done, Err(DeviceError::ReadOnly)), "{done:?}");
        };
        refused(device.write(0, &[1; 4096]));
        refused(device.write_zeroes(0, 4096, Zeroes::default()));
        refused(device.trim(0, 4096));
        device.flush().unwrap();
        let mut found = [0; 8192];
        device.read(0, &mut found).unwrap();
        assert_eq!(found, [7; 8192]);
        // It is at the other site for good.
        machines
            .store(&name, &committed.gone(token).unwrap())
            .unwrap();
        refused(device.write(0, &[1; 4096]));
        machines
            .store(&name, &committed.thaw(token).unwrap())
            .unwrap();
        device.write(0, &[1; 4096]).unwrap();
        device.read(0, &mut found).unwrap();
        assert_eq!(found[4095..4097], [1, 7]);
    }
}
