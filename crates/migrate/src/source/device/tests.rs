//! Moves that are given up while they wait.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use tokio::sync::mpsc;

use super::*;
use crate::hooks::Commands;

fn device(hooks: Arc<dyn Hooks>, scratch: &std::path::Path) -> (Arc<dyn BlockDevice>, Device) {
    let (disk, movable) = crate::track(Arc::new(MemoryDevice::new(1 << 20)));
    let device = Device {
        movable: Some(Arc::new(movable)),
        hooks,
        image: ImageName::new("web.raw").unwrap(),
        scratch: scratch.to_owned(),
        paused: false,
        work: Work::default(),
    };
    (disk, device)
}

/// Begins something, and whether it waits.
async fn waits(future: std::pin::Pin<&mut impl Future>) -> bool {
    let mut future = future;
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

/// Gives up what the program's disk is needed for while another has it; then it can be used as before.
async fn given_up<T>(begin: impl AsyncFnOnce(&mut Device) -> T) {
    let scratch = tempfile::tempdir().unwrap();
    let (disk, mut device) = device(Arc::new(Commands::default()), scratch.path());
    let movable = device.movable().unwrap();
    let other = movable.freeze(&|| false).unwrap();
    {
        let begun = pin!(begin(&mut device));
        assert!(waits(begun).await);
    }
    // It ends soon, however long the other one has it.
    let stays = tokio::time::timeout(Duration::from_secs(10), device.stay(false));
    assert_eq!(stays.await.unwrap(), None);
    assert!(!device.is_frozen());
    other.thaw();
    disk.write(0, &[1; 4096]).unwrap();
    assert!(movable.written().is_empty(), "nothing is recorded");
    // The next one does not find anything.
    device.hold().await.unwrap();
    device.freeze().await.unwrap();
    assert!(device.is_frozen());
    device.stay(false).await;
    assert!(!movable.is_closed());
}

#[tokio::test]
async fn a_freeze_that_is_given_up_leaves_the_disk_in_use() {
    given_up(async |device| device.freeze().await.is_ok()).await;
}

#[tokio::test]
async fn a_state_that_is_given_up_is_not_held() {
    given_up(async |device| device.hold().await.is_ok()).await;
}

/// A program that is paused slowly.
struct Slow {
    begun: mpsc::UnboundedSender<()>,
    ends: parking_lot::Mutex<std::sync::mpsc::Receiver<()>>,
    told: AtomicBool,
    ended: AtomicBool,
}

impl Hooks for Slow {
    fn pause(&self, is_given_up: &dyn Fn() -> bool) -> Result<(), String> {
        self.begun.send(()).unwrap();
        self.ends.lock().recv().unwrap();
        let begun = Instant::now();
        while !is_given_up() && begun.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        self.told.store(is_given_up(), Ordering::SeqCst);
        self.ended.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn resume(&self) -> Result<(), String> {
        let ended = self.ended.load(Ordering::SeqCst);
        ended.then_some(()).ok_or_else(|| "it is paused".into())
    }
}

#[tokio::test]
async fn a_program_goes_on_after_its_pause_has_ended() {
    let (begun, mut has_begun) = mpsc::unbounded_channel();
    let (end, ends) = std::sync::mpsc::channel();
    let hooks = Arc::new(Slow {
        begun,
        ends: ends.into(),
        told: AtomicBool::default(),
        ended: AtomicBool::default(),
    });
    let scratch = tempfile::tempdir().unwrap();
    let (disk, mut device) = device(hooks.clone(), scratch.path());
    tokio::select! {
        _ = device.pause() => panic!("it does not end"),
        _ = has_begun.recv() => {}
    }
    let work = Arc::clone(&device.work);
    let mut stays = pin!(device.stay(false));
    assert!(waits(stays.as_mut()).await);
    assert!(work.try_lock().is_err(), "its pause has not ended");
    end.send(()).unwrap();
    assert_eq!(stays.await, None);
    assert!(hooks.told.load(Ordering::SeqCst));
    disk.write(0, &[1; 4096]).unwrap();
}
