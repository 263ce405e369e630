//! The disks of a machine that was handed over, as a site serves them until its move is settled: what has not followed the machine
//! yet is read from them.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drover_core::{Cost, DeviceError, ImageName};
use drover_device::stage::{Entry, Gate, Gated, Request};
use drover_store::machine::{MachineRecord, Machines, Move, Owner};
use parking_lot::Mutex;

/// How long a record that cannot be read is read again, before what was last known of the machine counts.
const READ_LIMIT: Duration = Duration::from_secs(5);
const READ_POLL: Duration = Duration::from_millis(50);

/// A disk that is only read as long as its machine was handed over, or has left.
pub(super) type HandedOver<D> = Gated<D, Fence>;

/// The gate of [`HandedOver`]. The command that moves the machine is another process: its decision is read from the record, anew
/// whenever that was replaced.
pub(super) struct Fence {
    machines: Machines,
    machine: ImageName,
    record: PathBuf,
    known: Mutex<Known>,
}

/// What the record said when it was last read.
struct Known {
    of: Option<Stamp>,
    has_left: bool,
}

/// Tells whether the record was replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    changed: (i64, i64),
}

impl Stamp {
    fn of(about: &Metadata) -> Self {
        Self {
            inode: about.ino(),
            size: about.len(),
            changed: (about.ctime(), about.ctime_nsec()),
        }
    }
}

/// Whether nothing may be written here any more, for all that this site knows. One that comes writes before it is taken.
fn has_left(record: &MachineRecord) -> bool {
    match (&record.under_way, &record.owner) {
        (Some(Move::Committed(..)), _) | (None, Owner::There(_)) => true,
        (Some(_), _) | (None, Owner::Here) => false,
    }
}

impl Fence {
    /// The gate of a machine with this record.
    pub(super) fn new(machines: &Machines, machine: &ImageName, record: &MachineRecord) -> Self {
        Self {
            record: machines.directory().join(machine.as_str()),
            machines: machines.clone(),
            machine: machine.clone(),
            known: Mutex::new(Known {
                of: None,
                has_left: has_left(record),
            }),
        }
    }

    /// Whether the machine was handed over, or has left. Without a record it is as it was.
    fn has_left(&self) -> bool {
        let mut known = self.known.lock();
        let begun = Instant::now();
        loop {
            let stamp = std::fs::metadata(&self.record).map(|about| Stamp::of(&about));
            if stamp.as_ref().is_ok_and(|stamp| known.of == Some(*stamp)) {
                return known.has_left;
            }
            match self.machines.load(&self.machine) {
                Ok(Some(record)) => {
                    // Replaced in between, it is read once more.
                    *known = Known {
                        of: stamp.ok(),
                        has_left: has_left(&record),
                    };
                    return known.has_left;
                }
                Ok(None) => return known.has_left,
                // Too many files are open, say: a guest that is told of an error is lost.
                Err(_) if begun.elapsed() < READ_LIMIT => std::thread::sleep(READ_POLL),
                Err(e) => {
                    tracing::warn!(machine = %self.machine, "{e}");
                    return known.has_left;
                }
            }
        }
    }
}

impl Gate for Fence {
    type Pass<'a> = ();

    fn enter(&self, request: &Request) -> Result<Entry<()>, DeviceError> {
        match request.operation.changes() && self.has_left() {
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
    use drover_store::machine::{Other, Seed, Token};

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
        let leaving = here.leave(token, to).unwrap();
        let committed = leaving.commit(token).unwrap();
        let store = |record: &MachineRecord| machines.store(&name, record).unwrap();
        let device = |record: &MachineRecord| {
            store(record);
            let device = MemoryDevice::from_bytes(&[7; 8192]);
            HandedOver::with_gate(device, Fence::new(&machines, &name, record))
        };
        let refused = |done: Result<(), DeviceError>| {
            assert!(matches!(done, Err(DeviceError::ReadOnly)), "{done:?}");
        };
        let mut found = [0; 8192];
        let handed_over = device(&committed);
        refused(handed_over.write(0, &[1; 4096]));
        refused(handed_over.write_zeroes(0, 4096, Zeroes::default()));
        refused(handed_over.trim(0, 4096));
        handed_over.flush().unwrap();
        handed_over.read(0, &mut found).unwrap();
        assert_eq!(found, [7; 8192]);
        // It is at the other site for good.
        store(&committed.gone(token).unwrap());
        refused(handed_over.write(0, &[1; 4096]));
        store(&committed.thaw(token).unwrap());
        handed_over.write(0, &[1; 4096]).unwrap();
        handed_over.read(0, &mut found).unwrap();
        assert_eq!(found[4095..4097], [1, 7]);

        // One that ran when its disks were opened, and is handed over, again and again.
        let device = device(&here);
        for _ in 0..3 {
            device.write(0, &[1; 4096]).unwrap();
            store(&leaving);
            device.write(0, &[1; 4096]).unwrap();
            store(&committed);
            refused(device.write(0, &[1; 4096]));
            store(&leaving);
        }
        store(&committed);
        refused(device.write(0, &[1; 4096]));
        // What is lost says nothing, nor what is damaged.
        machines.remove(&name).unwrap();
        refused(device.write(0, &[1; 4096]));
    }

    #[test]
    fn a_record_that_cannot_be_read_for_a_moment_does_not_cost_a_write() {
        let directory = tempfile::tempdir().unwrap();
        let machines = Machines::new(directory.path().to_owned());
        let name = ImageName::new("web").unwrap();
        let (token, to) = (
            Token([2; 16]),
            Other {
                key: [1; 32],
                name: "far".into(),
            },
        );
        let leaving = MachineRecord::new(Seed([3; 16]), Vec::new())
            .leave(token, to)
            .unwrap();
        let committed = leaving.commit(token).unwrap();
        machines.store(&name, &committed).unwrap();
        let device = HandedOver::with_gate(
            MemoryDevice::from_bytes(&[7; 8192]),
            Fence::new(&machines, &name, &committed),
        );
        assert!(device.write(0, &[1; 4096]).is_err());
        std::fs::write(directory.path().join("web"), "torn").unwrap();
        std::thread::scope(|scope| {
            let write = scope.spawn(|| device.write(0, &[1; 4096]));
            std::thread::sleep(READ_POLL * 2);
            machines.store(&name, &leaving).unwrap();
            write.join().unwrap().unwrap();
        });
    }
}
