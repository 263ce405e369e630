//! A slow disk in one transfer must not block the matching of others.

use std::io;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use drover_core::{Digest, Head};
use drover_index::{Matcher, MatcherConfig, Origin};
use drover_storage::{Access, Directory, FakeDirectory, File, HostDirectory, Lock};
use drover_store::DataBits;

use super::*;
use crate::codec::Batch;
use crate::protocol::BATCH_BLOCKS;

/// Blocks syncs while it is shut: one barrier on entry, and one on release.
struct Gate {
    shut: AtomicBool,
    met: Barrier,
    let_go: Barrier,
}

impl Gate {
    fn pass(&self) {
        if self.shut.swap(false, Ordering::SeqCst) {
            self.met.wait();
            self.let_go.wait();
        }
    }
}

struct SlowDirectory(HostDirectory, Arc<Gate>);

struct SlowFile(Box<dyn File>, Arc<Gate>);

impl Directory for SlowDirectory {
    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>> {
        let file = self.0.open(name, access)?;
        Ok(Box::new(SlowFile(file, self.1.clone())))
    }
    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        Ok(Box::new(SlowFile(self.0.create(name)?, self.1.clone())))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }
    fn sync(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync()
    }
    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>> {
        self.0.lock(name, lock)
    }
    fn describe(&self, name: &str) -> String {
        self.0.describe(name)
    }
}

impl File for SlowFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_at(data, offset)
    }
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }
    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.punch_hole(offset, length)
    }
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.allocate(offset, length)
    }
    fn sync(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync()
    }
}

/// Closing the last handle of a removed file blocks until the file system has freed its space.
impl Drop for SlowFile {
    fn drop(&mut self) {
        self.1.pass();
    }
}

type Slow = Arc<Mutex<Teleporter>>;

fn slow(dir: &std::path::Path) -> (Slow, Arc<Gate>) {
    let gate = Arc::new(Gate {
        shut: AtomicBool::new(false),
        met: Barrier::new(2),
        let_go: Barrier::new(2),
    });
    let storage = SlowDirectory(HostDirectory::open(dir).unwrap(), gate.clone());
    let (matcher, _) = Matcher::open(storage, MatcherConfig::default()).unwrap();
    (Arc::new(Mutex::new(Teleporter::new(matcher))), gate)
}

/// A batch whose content depends on `content`.
fn batch(content: u8) -> Arc<Batch> {
    let mut data = DataBits::new(BATCH_BLOCKS);
    (0..300).for_each(|i| data.set(i));
    let digests: Vec<Digest> = (0..300u32)
        .map(|n| Digest(*blake3::hash(&[&[content][..], &n.to_le_bytes()].concat()).as_bytes()))
        .collect();
    let heads = (0..300).map(|n| match n % 10 {
        0 => Head::Strong,
        _ => Head::No,
    });
    Arc::new(Batch::new(0, data, heads.collect(), &digests))
}

const FIRST: ImageId = ImageId(1);

/// Handles `held`, and during each of its syncs matches an image of content `known`.
fn others_go_on_during(held: Event, syncs: usize, known: u8) {
    let dir = tempfile::tempdir().unwrap();
    let (teleporter, gate) = slow(dir.path());
    let image = |i, what| Event::Image(ImageId(i), what);
    for event in [
        image(9, ImageEvent::Begin),
        Event::Record(ImageId(9), batch(1)),
        image(9, ImageEvent::Finish),
        image(1, ImageEvent::Begin),
        Event::Record(FIRST, batch(2)),
    ] {
        handle(&teleporter, event).unwrap();
    }
    std::thread::scope(|threads| {
        gate.shut.store(true, Ordering::SeqCst);
        let shared = teleporter.clone();
        let at_the_disk = threads.spawn(move || handle(&shared, held).unwrap());
        for sync in 0..syncs {
            gate.met.wait();
            let (to, from) = channel();
            let shared = teleporter.clone();
            threads.spawn(move || {
                let id = 100 + sync as u64;
                handle(&shared, Event::Image(ImageId(id), ImageEvent::Begin)).unwrap();
                let answer = handle(&shared, Event::Match(ImageId(id), batch(known)));
                let _ = to.send(answer.unwrap());
            });
            let answer = from.recv_timeout(Duration::from_secs(60));
            // Release the waiting sync before any assertion.
            let more = answer.is_ok() && sync + 1 < syncs;
            gate.shut.store(more, Ordering::SeqCst);
            gate.let_go.wait();
            match answer.expect("another image waits for the disk") {
                Answer::Plan(plan) => {
                    assert!(plan.runs.iter().any(|r| r.origin != Origin::Literal))
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(at_the_disk.join().unwrap(), Answer::Done);
    });
}

#[test]
fn others_are_matched_while_a_finished_image_is_synced() {
    // The directory, the hash file, the side file, and the side file again.
    others_go_on_during(Event::Image(FIRST, ImageEvent::Finish), 4, 1);
}

#[test]
fn others_are_matched_while_a_removal_is_synced() {
    // Its two files, and the directory.
    others_go_on_during(Event::Image(ImageId(9), ImageEvent::Forget), 3, 2);
}

#[test]
fn others_are_matched_while_what_was_given_up_is_removed() {
    others_go_on_during(Event::Image(FIRST, ImageEvent::Abort), 2, 1);
}

/// Forgetting an image while it is being synced removes it, and its ID can be used again.
#[test]
fn an_image_that_is_forgotten_while_it_is_synced_is_not_there() {
    what_gives_way_while_it_is_synced(&[ImageEvent::Forget, ImageEvent::Begin]);
}

/// An image being finished lost its connection and is begun again on another.
#[test]
fn an_image_that_is_begun_anew_while_it_is_synced_has_begun() {
    what_gives_way_while_it_is_synced(&[ImageEvent::Begin]);
}

fn what_gives_way_while_it_is_synced(events: &'static [ImageEvent]) {
    let dir = tempfile::tempdir().unwrap();
    let (teleporter, gate) = slow(dir.path());
    let image = |what| Event::Image(FIRST, what);
    handle(&teleporter, image(ImageEvent::Begin)).unwrap();
    handle(&teleporter, Event::Record(FIRST, batch(2))).unwrap();
    std::thread::scope(|threads| {
        gate.shut.store(true, Ordering::SeqCst);
        let shared = teleporter.clone();
        let finishing = threads.spawn(move || handle(&shared, image(ImageEvent::Finish)));
        gate.met.wait();
        let (to, from) = channel();
        let shared = teleporter.clone();
        threads.spawn(move || {
            let answers = events.iter().map(|event| handle(&shared, image(*event)));
            let _ = to.send(answers.collect::<Result<Vec<_>, _>>());
        });
        let begun = from.recv_timeout(Duration::from_secs(60));
        gate.let_go.wait();
        begun.expect("it waits for the disk").unwrap();
        finishing.join().unwrap().unwrap_err();
    });
    assert_eq!(
        handle(&teleporter, Event::List).unwrap(),
        Answer::Images(vec![])
    );
    handle(&teleporter, Event::Record(FIRST, batch(3))).unwrap();
    handle(&teleporter, image(ImageEvent::Finish)).unwrap();
    assert_eq!(
        handle(&teleporter, Event::List).unwrap(),
        Answer::Images(vec![FIRST])
    );
}

/// The segments are chosen one answer before they are emptied: in between, the destination applies the plans that may
/// store into them.
#[test]
fn a_trimming_says_nothing_before_it_empties_anything() {
    let storage = FakeDirectory::default();
    let (matcher, _) = Matcher::open(storage, MatcherConfig::default()).unwrap();
    let teleporter = Mutex::new(Teleporter::new(matcher));
    let tell = |event| handle(&teleporter, event).unwrap();
    assert_eq!(tell(Event::Trim), Answer::Done);
    for image in [ImageId(1), ImageId(2)] {
        tell(Event::Image(image, ImageEvent::Begin));
        tell(Event::Match(image, batch(1)));
        tell(Event::Image(image, ImageEvent::Finish));
    }
    let (keep, have) = (0, 0);
    let Answer::Holding(all) = tell(Event::BeginTrim { keep, have }) else {
        panic!("nothing is said");
    };
    assert!(all > 0);
    assert_eq!(tell(Event::Trim), Answer::Freed(vec![]));
    assert_eq!(teleporter.lock().sequence_segments(), all);
    assert_eq!(tell(Event::Trim), Answer::Freed((0..all).collect()));
    assert_eq!(teleporter.lock().sequence_segments(), 0);
    assert_eq!(tell(Event::Trim), Answer::Done);
    assert_eq!(tell(Event::Trim), Answer::Done);
}
