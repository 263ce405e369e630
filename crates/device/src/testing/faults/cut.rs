//! Makes a device unavailable, and available again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError};
use parking_lot::{Condvar, Mutex};

use crate::stage::MAX_TIMEOUT;
use crate::stage::{Entry, Gate, Gated, Operation, Request};

/// A device whose link can be cut.
pub type Cut<D> = Gated<D, Wire>;

impl<D: BlockDevice> Cut<D> {
    /// A link that holds, and the handle that cuts it. A request that hangs gives up after `timeout`,
    /// or a day if that is longer.
    pub fn new(inner: D, timeout: Duration) -> (Self, CutHandle) {
        let wire = Wire {
            shared: Arc::default(),
            timeout: timeout.min(MAX_TIMEOUT),
        };
        let handle = CutHandle {
            shared: Arc::clone(&wire.shared),
        };
        (Self::with_gate(inner, wire), handle)
    }
}

/// The gate of [`Cut`].
#[derive(Debug)]
pub struct Wire {
    shared: Arc<Shared>,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<LinkState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LinkState {
    cut: Option<CutHow>,
    /// Requests that hang now.
    hanging: usize,
}

/// What happens to requests while the link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutHow {
    /// They fail at once.
    Fail,
    /// They hang until the link is healed or their timeout ends.
    Hang,
}

/// Cuts and heals the link of a [`Cut`].
#[derive(Clone, Debug)]
pub struct CutHandle {
    shared: Arc<Shared>,
}

impl CutHandle {
    /// Cuts the link, or changes how it is cut. Requests under way at the device are done there, but their answers are
    /// lost, or hang, too.
    pub fn cut(&self, how: CutHow) {
        self.shared.state.lock().cut = Some(how);
        self.shared.changed.notify_all();
    }

    /// Heals the link: what hangs goes on.
    pub fn heal(&self) {
        self.shared.state.lock().cut = None;
        self.shared.changed.notify_all();
    }

    /// How the link is cut now, if it is.
    #[must_use]
    pub fn state(&self) -> Option<CutHow> {
        self.shared.state.lock().cut
    }

    /// Requests that hang now.
    #[must_use]
    pub fn hanging(&self) -> usize {
        self.shared.state.lock().hanging
    }
}

impl Wire {
    fn cross(&self, may_hang: bool) -> Result<(), DeviceError> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.shared.state.lock();
        loop {
            match state.cut {
                None => return Ok(()),
                Some(CutHow::Hang) if may_hang => {
                    state.hanging += 1;
                    let late = self.shared.changed.wait_until(&mut state, deadline);
                    state.hanging -= 1;
                    if late.timed_out() && state.cut.is_some() {
                        return Err(DeviceError::Unavailable(format!(
                            "the link has been cut for {:?}",
                            self.timeout
                        )));
                    }
                }
                Some(_) => return Err(DeviceError::Unavailable("the link is cut".into())),
            }
        }
    }
}

impl Gate for Wire {
    /// Whether its answer may hang.
    type Pass<'a> = bool;

    fn enter(&self, request: &Request) -> Result<Entry<bool>, DeviceError> {
        let may_hang = request.operation != Operation::Prefetch;
        self.cross(may_hang)?;
        Ok(Entry::Pass(may_hang))
    }

    fn leave(&self, may_hang: bool) -> Result<(), DeviceError> {
        self.cross(may_hang)
    }

    fn cost(&self, _: Cost) -> Cost {
        Cost::Network
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::backend::MemoryDevice;

    const MS: Duration = Duration::from_millis(1);

    fn unavailable<T: std::fmt::Debug>(result: &Result<T, DeviceError>) -> bool {
        matches!(result, Err(DeviceError::Unavailable(_)))
    }

    /// Until as many requests hang.
    fn until_hanging(handle: &CutHandle, count: usize) {
        let start = Instant::now();
        while handle.hanging() != count {
            assert!(start.elapsed() < 5000 * MS, "{} hang", handle.hanging());
            std::thread::sleep(MS);
        }
    }

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| Box::new(Cut::new(MemoryDevice::new(size), MS).0));
    }

    #[test]
    fn a_cut_link_fails_everything_and_a_healed_one_nothing() {
        let (device, handle) = Cut::new(MemoryDevice::new(8192), 1000 * MS);
        device.write(0, &[1; 512]).unwrap();
        handle.cut(CutHow::Fail);
        assert_eq!(handle.state(), Some(CutHow::Fail));
        assert!(unavailable(&device.read(0, &mut [0; 512])));
        assert!(unavailable(&device.write(0, &[2; 512])));
        assert!(unavailable(&device.write_zeroes(
            0,
            512,
            Default::default()
        )));
        assert!(unavailable(&device.trim(0, 512)));
        assert!(unavailable(&device.flush()));
        assert!(unavailable(&device.extents(0, 512)));
        assert!(unavailable(&device.prefetch(0, 512)));
        handle.heal();
        let mut buffer = [0; 512];
        device.read(0, &mut buffer).unwrap();
        assert_eq!(buffer, [1; 512]);
    }

    #[test]
    fn what_hangs_goes_on_when_healed_and_gives_up_in_time() {
        let (device, handle) = Cut::new(MemoryDevice::new(8192), 10_000 * MS);
        handle.cut(CutHow::Hang);
        // Hints have no reply.
        assert!(unavailable(&device.prefetch(0, 1)));
        std::thread::scope(|scope| {
            let hung = [0, 512].map(|at| {
                let device = &device;
                scope.spawn(move || device.write(at, &[1; 512]))
            });
            until_hanging(&handle, 2);
            handle.heal();
            for one in hung {
                one.join().unwrap().unwrap();
            }
            handle.cut(CutHow::Hang);
            let failed = scope.spawn(|| device.flush());
            until_hanging(&handle, 1);
            handle.cut(CutHow::Fail);
            assert!(unavailable(&failed.join().unwrap()));
        });
        let (device, handle) = Cut::new(device, 20 * MS);
        handle.cut(CutHow::Hang);
        let start = Instant::now();
        assert!(unavailable(&device.flush()));
        assert!(start.elapsed() >= 20 * MS);
    }

    /// Cuts the link while a request is at the device.
    #[derive(Default)]
    struct Scissors(OnceLock<CutHandle>);

    impl Gate for Scissors {
        type Pass<'a> = ();
        fn enter(&self, _: &Request) -> Result<Entry<()>, DeviceError> {
            if let Some(handle) = self.0.get() {
                handle.cut(CutHow::Fail);
            }
            Ok(Entry::Pass(()))
        }
        fn leave(&self, (): ()) -> Result<(), DeviceError> {
            Ok(())
        }
        fn cost(&self, inner: Cost) -> Cost {
            inner
        }
    }

    #[test]
    fn an_answer_is_lost_when_the_link_is_cut_under_way() {
        let memory = Arc::new(MemoryDevice::new(8192));
        let far = Arc::new(Gated::with_gate(
            Arc::clone(&memory),
            Scissors(OnceLock::new()),
        ));
        let (device, handle) = Cut::new(Arc::clone(&far), MS);
        far.gate().0.set(handle).unwrap();
        assert!(unavailable(&device.write(0, &[1; 512])));
        let mut buffer = [0; 512];
        memory.read(0, &mut buffer).unwrap();
        assert_eq!(buffer, [1; 512], "the device has done it all the same");
    }
}
