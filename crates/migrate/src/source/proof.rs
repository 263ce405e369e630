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
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
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
    read: Option<Reading>,
    stop: Arc<AtomicBool>,
}

/// The thread that reads, and what it has read.
struct Reading {
    thread: JoinHandle<Result<(), TeleportError>>,
    read: UnboundedReceiver<Read>,
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
            // As many as there are disks.
            let (found, read) = unbounded_channel();
            let stop = Arc::clone(&self.stop);
            self.queue = Some(queue);
            let thread = tokio::task::spawn_blocking(move || read_all(&states, &found, &stop));
            self.read = Some(Reading { thread, read });
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
            reading: self.read.take(),
            wrong: None,
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

fn read_all(
    states: &Receiver<State>,
    found: &UnboundedSender<Read>,
    stop: &AtomicBool,
) -> Result<(), TeleportError> {
    while let Ok((name, image)) = states.recv() {
        let digest = digest_of(&image, &|| stop.load(Ordering::Relaxed))?;
        // Nobody may want to know it any more.
        let _ = found.send((name, digest));
    }
    Ok(())
}

/// A comparison that is under way; it ends when this is dropped.
pub struct Proof {
    /// What is not compared yet.
    delivered: Vec<(ImageName, Digest)>,
    reading: Option<Reading>,
    /// What was found to be wrong.
    wrong: Option<MigrateError>,
    stop: Arc<AtomicBool>,
}

impl Proof {
    /// Whether [`Self::done`] has not returned yet.
    pub fn is_pending(&self) -> bool {
        self.reading.is_some()
    }

    /// Whether it would return at once, and has not yet.
    pub fn is_finished(&mut self) -> bool {
        while let Some(Ok(read)) = self.reading.as_mut().map(|of| of.read.try_recv()) {
            self.compare(read);
        }
        self.reading.as_ref().is_some_and(|reading| {
            self.wrong.is_some() || self.delivered.is_empty() || reading.thread.is_finished()
        })
    }

    fn compare(&mut self, (name, found): Read) {
        let is_it = |(delivered, _): &(ImageName, Digest)| *delivered == name;
        // One that was read after all when it was sent anew is none of these.
        let Some(at) = self.delivered.iter().position(is_it) else {
            return;
        };
        let (_, digest) = self.delivered.swap_remove(at);
        match found {
            Some(found) if found == digest => {}
            Some(_) => self.wrong = Some(MigrateError::OldCopy(name)),
            None => self.wrong = Some(MigrateError::Stopped),
        }
    }

    /// Waits until all are compared, or one differs. Then nothing is read any more. Cancel safe.
    ///
    /// # Errors
    /// [`MigrateError::OldCopy`] when one differs; or it cannot be read.
    pub async fn done(&mut self) -> Result<(), MigrateError> {
        while self.wrong.is_none() && !self.delivered.is_empty() {
            let Some(reading) = &mut self.reading else {
                return Ok(());
            };
            match reading.read.recv().await {
                Some(read) => self.compare(read),
                None => break,
            }
        }
        let Some(reading) = &mut self.reading else {
            return Ok(());
        };
        self.stop.store(true, Ordering::Relaxed);
        let ended = (&mut reading.thread).await;
        self.reading = None;
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        ended.map_err(|_| MigrateError::Stopped)??;
        match self.delivered.is_empty() {
            true => Ok(()),
            false => Err(MigrateError::Stopped),
        }
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

    /// Content that is never read to its end.
    struct Endless;

    impl drover_core::ReadAt for Endless {
        fn len(&self) -> u64 {
            1 << 40
        }

        fn read_at(&self, buffer: &mut [u8], _: u64) -> std::io::Result<usize> {
            buffer.fill(1);
            Ok(buffer.len())
        }
    }

    #[tokio::test]
    async fn a_wrong_copy_is_found_before_the_next_disk_is_read() {
        let (was, is) = (image(vec![7; 100_000]), image(vec![9; 100_000]));
        let all = 0..1 << 40;
        let endless = Arc::new(Outgoing {
            layout: Layout::in_file_order(all.end, std::slice::from_ref(&all)),
            content: Arc::new(Endless),
            format: Format::Raw,
            virtual_size: all.end,
            notes: Vec::new(),
            stamps: Vec::new(),
        });
        for waits in [false, true] {
            let wrong = Delivered {
                image: Arc::clone(&is),
                ..delivered("web-0.raw", &was)
            };
            let next = Delivered {
                name: ImageName::new("web-1.raw").unwrap(),
                image: Arc::clone(&endless),
                digest: Digest([1; 32]),
            };
            let mut proof = Reader::default().compare(vec![wrong, next]);
            while !waits && !proof.is_finished() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            let found = proof.done().await.unwrap_err();
            assert!(
                matches!(&found, MigrateError::OldCopy(name) if name.as_str() == "web-0.raw"),
                "{found}"
            );
            assert!(!proof.is_pending());
        }
    }

    #[tokio::test]
    async fn nothing_to_compare_is_no_wait() {
        assert!(!Reader::default().compare(Vec::new()).is_pending());
        let mut reader = Reader::default();
        reader.read(&ImageName::new("web-0.raw").unwrap(), &image(vec![7; 5000]));
        reader.compare(Vec::new()).done().await.unwrap();
    }
}
