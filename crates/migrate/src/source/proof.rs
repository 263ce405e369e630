//! Images that are delivered without having been read here: an old copy at the other site was said to have what did not
//! change. They are read in the background, from when that is known, and their digests are compared before the machine is handed over.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use drover_core::{Digest, ImageName};
use drover_image::Outgoing;
use drover_teleport::progress::SendEvent;
use drover_teleport::{SendItem, TeleportError, digest_of};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::report::{MoveEvent, OnMove};
use crate::error::MigrateError;

/// An image to compare.
pub struct Delivered {
    /// Its name at the other site.
    pub name: ImageName,
    /// The state that was sent.
    pub image: Arc<Outgoing>,
    /// What the other site has.
    pub digest: Digest,
}

/// Reads states of disks, one after the other; each at most once. It ends when this is dropped.
#[derive(Default)]
pub struct Reader {
    begun: BTreeSet<ImageName>,
    /// `None` before the first.
    queue: Option<Sender<State>>,
    read: Option<JoinHandle<Result<Vec<Read>, TeleportError>>>,
    stop: Arc<AtomicBool>,
}

/// A state of a disk, to be read; its name at the other site.
type State = (ImageName, Arc<Outgoing>);

/// What was read; no digest if that was stopped.
type Read = (ImageName, Option<Digest>);

impl Reader {
    /// Begins to read a state, unless that was begun. Only in a runtime.
    pub fn read(&mut self, name: &ImageName, image: &Arc<Outgoing>) {
        if !self.begun.insert(name.clone()) {
            return;
        }
        if self.queue.is_none() {
            let (queue, states) = channel();
            let stop = Arc::clone(&self.stop);
            self.queue = Some(queue);
            let read = move || read_all(&states, &stop);
            self.read = Some(tokio::task::spawn_blocking(read));
        }
        if let Some(queue) = &self.queue {
            // It has ended with an error, which is told at the end.
            let _ = queue.send((name.clone(), Arc::clone(image)));
        }
    }

    /// All that was delivered is known: the rest of that is read, and then compared.
    pub fn compare(mut self, delivered: Vec<Delivered>) -> Proof {
        for delivered in &delivered {
            self.read(&delivered.name, &delivered.image);
        }
        // From now on the proof stops it; at once if there is nothing to compare.
        let stop = std::mem::take(&mut self.stop);
        stop.store(delivered.is_empty(), Ordering::Relaxed);
        let digests = delivered.into_iter().map(|one| (one.name, one.digest));
        Proof {
            delivered: digests.collect(),
            compared: self.read.take(),
            stop,
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A reader of what is sent, which begins with each image as soon as it is known that it is not read to be sent: `on_event` has to
/// be told what happens.
pub fn reader_of(items: &[SendItem], on_event: OnMove) -> (Arc<Mutex<Reader>>, OnMove) {
    let states = items.iter().filter_map(|item| {
        let state = item.snapshot.as_ref()?;
        Some((item.name.clone(), Arc::clone(&state.image)))
    });
    let states: Vec<State> = states.collect();
    let reader = Arc::<Mutex<Reader>>::default();
    let reads = Arc::clone(&reader);
    let on_event = move |event: MoveEvent| {
        if let MoveEvent::Send(SendEvent::Skips { name: skipped }) = &event {
            let state = states.iter().find(|(name, _)| name.as_str() == skipped);
            if let Some((name, image)) = state {
                reads.lock().read(name, image);
            }
        }
        on_event(event);
    };
    (reader, Arc::new(on_event))
}

fn read_all(states: &Receiver<State>, stop: &AtomicBool) -> Result<Vec<Read>, TeleportError> {
    let mut read = Vec::new();
    while let Ok((name, image)) = states.recv() {
        let digest = digest_of(&image, &|| stop.load(Ordering::Relaxed))?;
        read.push((name, digest));
    }
    Ok(read)
}

/// A comparison that is under way; it ends when this is dropped.
pub struct Proof {
    delivered: Vec<(ImageName, Digest)>,
    compared: Option<JoinHandle<Result<Vec<Read>, TeleportError>>>,
    stop: Arc<AtomicBool>,
}

impl Proof {
    /// Whether [`Self::done`] has not returned yet.
    pub fn is_pending(&self) -> bool {
        self.compared.is_some()
    }

    /// Whether it would return at once, and has not yet.
    pub fn is_finished(&self) -> bool {
        self.compared.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Waits until all are compared. Cancel safe.
    ///
    /// # Errors
    /// [`MigrateError::OldCopy`] when one differs; or it cannot be read.
    pub async fn done(&mut self) -> Result<(), MigrateError> {
        let Some(compared) = &mut self.compared else {
            return Ok(());
        };
        let compared = compared.await;
        self.compared = None;
        let read = compared.map_err(|_| MigrateError::Stopped)??;
        for (name, digest) in self.delivered.drain(..) {
            let found = read.iter().find(|(read, _)| *read == name);
            match found.and_then(|(_, digest)| *digest) {
                Some(found) if found == digest => {}
                Some(_) => return Err(MigrateError::OldCopy(name)),
                None => return Err(MigrateError::Stopped),
            }
        }
        Ok(())
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use drover_image::{Format, Layout};

    use super::*;

    fn image(bytes: Vec<u8>) -> Arc<Outgoing> {
        let size = bytes.len() as u64;
        let all = 0..size;
        Arc::new(Outgoing {
            layout: Layout::in_file_order(size, std::slice::from_ref(&all)),
            content: Arc::new(bytes),
            format: Format::Raw,
            virtual_size: size,
            notes: Vec::new(),
            stamps: Vec::new(),
        })
    }

    fn delivered(name: &str, image: &Arc<Outgoing>) -> Delivered {
        Delivered {
            name: ImageName::new(name).unwrap(),
            image: Arc::clone(image),
            digest: digest_of(image, &|| false).unwrap().unwrap(),
        }
    }

    #[tokio::test]
    async fn what_is_read_early_and_late_is_compared() {
        let images = [image(vec![7; 100_000]), image(vec![8; 5000])];
        for early in 0..3 {
            let mut reader = Reader::default();
            let all = || ["web-0.raw", "web-1.raw"].into_iter().zip(&images);
            for (name, image) in all().take(early) {
                let name = ImageName::new(name).unwrap();
                reader.read(&name, image);
                // After a cut it is skipped again.
                reader.read(&name, image);
            }
            let mut proof = reader.compare(all().map(|(n, i)| delivered(n, i)).collect());
            assert!(proof.is_pending());
            proof.done().await.unwrap();
            assert!(!proof.is_pending() && !proof.is_finished());
        }
    }

    #[tokio::test]
    async fn another_image_is_found() {
        let (was, is) = (image(vec![7; 100_000]), image(vec![9; 100_000]));
        let mut reader = Reader::default();
        reader.read(&ImageName::new("web-0.raw").unwrap(), &is);
        let other = Delivered {
            image: Arc::clone(&is),
            ..delivered("web-0.raw", &was)
        };
        let mut proof = reader.compare(vec![delivered("web-1.raw", &was), other]);
        let found = proof.done().await.unwrap_err();
        assert!(
            matches!(&found, MigrateError::OldCopy(name) if name.as_str() == "web-0.raw"),
            "{found}"
        );
    }

    #[tokio::test]
    async fn nothing_to_compare_is_no_wait() {
        assert!(!Reader::default().compare(Vec::new()).is_pending());
        let mut reader = Reader::default();
        reader.read(&ImageName::new("web-0.raw").unwrap(), &image(vec![7; 5000]));
        reader.compare(Vec::new()).done().await.unwrap();
    }
}
