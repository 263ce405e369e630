//! The completion queue: tasks of the link, which must not block, hand results to threads that may.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc as sync};

use drover_core::DeviceError;
use drover_device::remote::{Chunks, Done, Link};
use parking_lot::Mutex;

use super::backlog::{Adder, ChunksTask, Taker};

/// One completion.
pub enum Task {
    /// Chunks have arrived.
    Chunks(ChunksTask),
    /// A fetch of chunks has failed.
    Failed(Chunks, DeviceError),
    /// The link's state changed.
    Link(Link),
    /// Runs a callback.
    Call(Box<dyn FnOnce() + Send>),
}

/// The sending end of the queue to the threads that call the local side.
#[derive(Clone)]
pub struct CompletionQueue {
    /// Its length is bounded by what the scheduler admits, like the other's.
    front: sync::Sender<Task>,
    back: Arc<Adder>,
}

impl CompletionQueue {
    /// A queue, and its receiving ends: one for foreground work and one for background chunks.
    pub fn new() -> (Self, sync::Receiver<Task>, Taker) {
        let (say, front) = sync::channel();
        let hand = Adder::default();
        let back = hand.taker();
        let queue = Self {
            front: say,
            back: Arc::new(hand),
        };
        (queue, front, back)
    }

    /// Queues chunks.
    pub fn chunks(&self, task: ChunksTask, background: bool) {
        match background {
            true => self.back.add(task),
            false => self.say(Task::Chunks(task)),
        }
    }

    /// Moves chunks of this run to the front if they are in the background queue.
    pub fn hurry(&self, run: Chunks) {
        for task in self.back.hurry(run) {
            self.say(Task::Chunks(task));
        }
    }

    /// Reports that a fetch of chunks has failed.
    pub fn failed(&self, chunks: Chunks, error: DeviceError) {
        self.say(Task::Failed(chunks, error));
    }

    /// Reports that the link's state has changed.
    pub fn link(&self, link: Link) {
        self.say(Task::Link(link));
    }

    /// Queues a callback.
    pub fn call(&self, what: impl FnOnce() + Send + 'static) {
        self.say(Task::Call(Box::new(what)));
    }

    fn say(&self, task: Task) {
        // The threads end only with the last sender, so a receiver exists.
        let _ = self.front.send(task);
    }
}

/// Returns a factory of callbacks for `count` parts; `done` is called once, when all have been called.
pub fn all(count: usize, done: Done) -> impl FnMut() -> Done {
    struct All {
        left: AtomicUsize,
        done: Mutex<Option<Done>>,
    }
    let shared = Arc::new(All {
        left: AtomicUsize::new(count),
        done: Mutex::new(Some(done)),
    });
    if count == 0
        && let Some(done) = shared.done.lock().take()
    {
        done(Ok(()));
    }
    move || {
        let shared = shared.clone();
        Box::new(move |result| {
            let last = shared.left.fetch_sub(1, Ordering::AcqRel) == 1;
            if (last || result.is_err())
                && let Some(done) = { shared.done.lock().take() }
            {
                done(result);
            }
        })
    }
}
