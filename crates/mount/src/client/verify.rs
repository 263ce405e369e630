//! The threads that verify chunks and deliver them to the local side. They may block on its disk, unlike threads of the
//! runtime.

use std::io;
use std::sync::{Arc, Weak, mpsc as sync};

use bytes::Bytes;
use drover_core::{DeviceError, Digest};
use drover_device::remote::{Chunks, Content, Fetched, Local};
use tracing::warn;

use super::backlog::{ChunksTask, Taker};
use super::completion::{CompletionQueue, Task};
use super::inner::Inner;
use super::scheduler::Job;
use crate::compress::Unpacker;
use crate::protocol::{Coding, pieces};

/// Threads for background chunks.
const BACK_THREADS: usize = 2;

/// The receiving ends of the threads' queues.
pub struct Workers {
    completions: CompletionQueue,
    front: sync::Receiver<Task>,
    back: Taker,
    unpackers: Vec<Unpacker>,
}

impl Workers {
    /// Creates the resources of the threads.
    pub fn new() -> io::Result<Self> {
        let (completions, front, back) = CompletionQueue::new();
        let unpackers = (0..=BACK_THREADS).map(|_| Unpacker::new());
        Ok(Self {
            completions,
            front,
            back,
            unpackers: unpackers.collect::<io::Result<_>>()?,
        })
    }

    /// The queue that feeds them.
    pub fn completions(&self) -> CompletionQueue {
        self.completions.clone()
    }

    /// Starts the threads; they end when the last sender of the completion queue is dropped.
    pub fn run(self, inner: &Arc<Inner>) -> io::Result<()> {
        let mut unpackers = self.unpackers.into_iter();
        let front = self.front;
        let named = |name: &str| std::thread::Builder::new().name(format!("mount-{name}"));
        if let Some(mut unpacker) = unpackers.next() {
            let inner = Arc::downgrade(inner);
            named("front").spawn(move || {
                while let Ok(task) = front.recv() {
                    handle(&inner, task, &mut unpacker);
                }
            })?;
        }
        for mut unpacker in unpackers {
            let (inner, back) = (Arc::downgrade(inner), self.back.clone());
            named("back").spawn(move || {
                while let Some(task) = back.next() {
                    handle(&inner, Task::Chunks(task), &mut unpacker);
                }
            })?;
        }
        Ok(())
    }
}

fn handle(inner: &Weak<Inner>, task: Task, unpacker: &mut Unpacker) {
    // Callbacks run even when the client is gone.
    if let Task::Call(call) = task {
        call();
        return;
    }
    let Some(inner) = inner.upgrade() else {
        return;
    };
    let silent = inner.silent.read();
    // A request made after the end still gets a reply.
    if *silent && !matches!(task, Task::Failed(..)) {
        return;
    }
    match task {
        Task::Chunks(task) => {
            inner.verify(&task, unpacker);
            inner.pump();
        }
        Task::Failed(chunks, error) => {
            inner.early.lock().forget(chunks);
            if let Some(local) = inner.near() {
                local.failed(chunks, error);
            }
        }
        Task::Link(link) => {
            if let Some(local) = inner.near() {
                local.link(link);
            }
        }
        Task::Call(_) => {}
    }
}

impl Inner {
    /// The local side. It may not be attached yet when early chunks arrive: those are kept; and it may attach while
    /// they are looked up among the early chunks, so this is called after that.
    fn near(&self) -> Option<Arc<dyn Local>> {
        self.local.get().and_then(Weak::upgrade)
    }

    /// Delivers the chunks that match their digests; the others are requested once more.
    fn verify(self: &Arc<Self>, task: &ChunksTask, unpacker: &mut Unpacker) {
        let shape = self.opened.shape();
        let unpacked = pieces(shape, task.first, task.count, &task.zeros)
            .map_err(|e| e.message)
            .and_then(|(found, length)| {
                let body = match task.coding {
                    Coding::Plain if task.body.len() == length => Ok(task.body.clone()),
                    coding => unpacker.unpack(coding, &task.body, length).map(Bytes::from),
                };
                Ok((found, body.map_err(|e| e.to_string())?))
            });
        let (mut good, mut wrong) = (Vec::new(), Vec::new());
        match unpacked {
            Ok((found, body)) => {
                for piece in found {
                    let content = match piece.data {
                        None => Some(Content::Zero),
                        Some((digest, bytes)) => {
                            let bytes = body.slice(bytes);
                            let hash = blake3::hash(&bytes);
                            (hash.as_bytes()[..] == body[digest])
                                .then(|| Content::Data(bytes, Digest(*hash.as_bytes())))
                        }
                    };
                    match content {
                        Some(content) => good.push(Fetched {
                            index: piece.index,
                            content,
                        }),
                        None => wrong.push(piece.index),
                    }
                }
            }
            Err(why) => {
                warn!(image = %self.options.image, first = task.first, why, "cannot unpack a reply");
                wrong.extend(task.first..task.first + u64::from(task.count));
            }
        }
        {
            let mut early = self.early.lock();
            good = good.into_iter().filter_map(|g| early.keep(g)).collect();
        }
        // Done first: as soon as they are delivered they may be requested again.
        self.state.lock().scheduler.verified(Chunks {
            first: task.first,
            count: task.count,
        });
        if !good.is_empty()
            && let Some(local) = self.near()
        {
            local.arrived(good);
        }
        for index in wrong {
            self.wrong(index, task);
        }
    }

    fn wrong(self: &Arc<Self>, index: u64, task: &ChunksTask) {
        let run = Chunks {
            first: index,
            count: 1,
        };
        let image = &self.options.image;
        if task.again {
            let text = format!(
                "chunk {index} of {} does not have the digest that the site sent; verify the image there",
                image.as_str()
            );
            self.completions.failed(run, DeviceError::Corrupt(text));
            return;
        }
        warn!(%image, chunk = index, "a chunk has the wrong digest; requesting it again");
        // A concurrent read of it joins this request.
        self.put(Job {
            again: true,
            ..Job::read(run, false, self.now() + self.options.give_up)
        });
        self.issue();
    }
}
