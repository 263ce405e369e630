//! Epochs that take long to seal and copy, with other requests meanwhile.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use drover_core::{BlockDevice, ImageName};
use drover_device::remote::{Change, Epoch, Link, Remote};
use drover_mount::client::{Client, Options};
use drover_mount::server::{Base, Images, Room, WhyBroken};
use drover_net::{Peer, PeerKey, Refusal};
use drover_storage::{Access as FileAccess, Directory, FakeDirectory, File};
use drover_storage::{HostDirectory, Lock};
use drover_store::lease::{Access, MountId};

use crate::blocked::{Gate, Opens};
use crate::push::{PATIENCE, at_site, managed, open, soon, wait, writer};
use crate::util::{Near, Shelf, Site, content, memory, name, runtime};

const SIZE: usize = 4 << 20;

/// With what the names of files begin, and what holds back their syncs while it is closed.
type Gates = Vec<(&'static str, Arc<Gate>)>;

/// Images whose overlays are on a disk that holds syncs of some files back.
struct Held {
    shelf: Arc<Shelf>,
    gates: Gates,
}

impl Images for Held {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        self.shelf.open(name)
    }

    fn overlay(&self, path: &Path) -> io::Result<Arc<dyn Directory>> {
        Ok(Arc::new(Disk {
            inner: HostDirectory::open_or_create(path)?,
            gates: self.gates.clone(),
        }))
    }
}

struct Disk {
    inner: HostDirectory,
    gates: Gates,
}

impl Disk {
    fn held(&self, name: &str, inner: Box<dyn File>) -> Box<dyn File> {
        let held = self.gates.iter().find(|(files, _)| name.starts_with(files));
        match held {
            Some((_, gate)) => Box::new(HeldFile {
                inner,
                gate: Arc::clone(gate),
            }),
            None => inner,
        }
    }
}

impl Directory for Disk {
    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        Ok(self.held(name, self.inner.create(name)?))
    }
    fn open(&self, name: &str, access: FileAccess) -> io::Result<Box<dyn File>> {
        Ok(self.held(name, self.inner.open(name, access)?))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.inner.list()
    }
    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>> {
        self.inner.lock(name, lock)
    }
    fn describe(&self, name: &str) -> String {
        self.inner.describe(name)
    }
}

struct HeldFile {
    inner: Box<dyn File>,
    gate: Arc<Gate>,
}

impl File for HeldFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(buffer, offset)
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.inner.write_at(data, offset)
    }
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.inner.set_len(length)
    }
    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.inner.punch_hole(offset, length)
    }
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.inner.allocate(offset, length)
    }
    fn sync(&self) -> io::Result<()> {
        self.gate.pass();
        self.inner.sync()
    }
}

/// A site whose disk holds back syncs of a redo file, of the data, while the first gate, the second, is closed. Call within
/// a runtime.
fn site(bytes: &[u8]) -> (Site, Arc<Gate>, Arc<Gate>) {
    let (seals, copies) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
    let held = Held {
        shelf: Shelf::with("web", memory(bytes)),
        gates: vec![
            ("epoch-", Arc::clone(&seals)),
            ("data", Arc::clone(&copies)),
        ],
    };
    (Site::of(Arc::new(held)), seals, copies)
}

/// The image with what a site that is gone has written over it.
fn left_by(site: Site, base: &[u8]) -> Vec<u8> {
    let state = site.directory.path();
    drop(site.server);
    at_site(state, base)
}

fn write(at: u64, byte: u8) -> Vec<Change> {
    vec![Change::Write(at, Bytes::from(vec![byte; 65_536]))]
}

/// Reads of the same image wait neither for the seal nor for the link, which stands however long that takes.
#[test]
fn reads_are_answered_while_an_epoch_is_sealed_for_long() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let base = content(SIZE, 51);
    let mut model = base.clone();
    let (site, gate, _) = site(&base);
    let near = Near::new(site.server.clone());
    let give_up = Duration::from_secs(10);
    let options = Options {
        give_up,
        ..writer(MountId::random())
    };
    let client = open(&runtime, &near, options);
    let device = managed(&client, &FakeDirectory::default());
    let read = |at: usize| {
        let mut bytes = vec![0; 100_000];
        device.read(at as u64, &mut bytes).unwrap();
        assert!(bytes == base[at..at + 100_000]);
    };
    gate.set(true);
    let mut committed = Epoch(0);
    for epoch in 1..=2u64 {
        let at = (epoch - 1) as usize * 500_000;
        model[at..at + 500_000].fill(epoch as u8);
        device.write(at as u64, &model[at..at + 500_000]).unwrap();
        std::thread::scope(|scope| {
            // Before the scope waits for its threads, also when it panics.
            let _opens = Opens(Arc::clone(&gate));
            let sync = scope.spawn(|| device.pusher().sync());
            if epoch == 1 {
                gate.wait_for_a_request();
                read(2 << 20);
                // Longer than any other request may take.
                std::thread::sleep(give_up + Duration::from_secs(2));
                read(3 << 20);
                assert_eq!(client.committed(), Epoch(0));
                gate.set(false);
            }
            sync.join().unwrap().unwrap();
        });
        let now = device.progress().epoch;
        assert!(now > committed, "the next counts");
        committed = now;
    }
    device.close(true).unwrap();
    drop((device, client));
    drop(near);
    assert!(left_by(site, &base) == model);
}

/// The mount does not hear that an epoch was sealed: it is cut off, or gives up. It learns that once it is back.
#[test]
fn an_epoch_whose_seal_outlasts_the_link_is_sealed_once() {
    for limit in [None, Some(Duration::from_millis(500))] {
        let runtime = runtime();
        let _inside = runtime.enter();
        let base = content(SIZE, 52);
        let mut model = base.clone();
        let (site, gate, _) = site(&base);
        let near = Near::new(site.server.clone());
        let mut options = writer(MountId::random());
        if let Some(limit) = limit {
            options.commit_limit = limit;
        }
        let client = open(&runtime, &near, options);
        let device = managed(&client, &FakeDirectory::default());
        gate.set(true);
        model[..1 << 20].fill(1);
        device.write(0, &model[..1 << 20]).unwrap();
        std::thread::scope(|scope| {
            // Before the scope waits for its threads, also when it panics.
            let _opens = Opens(Arc::clone(&gate));
            let sync = scope.spawn(|| device.pusher().sync());
            gate.wait_for_a_request();
            let connects = near.connects.load(Ordering::Relaxed);
            if limit.is_none() {
                near.cut();
            }
            soon("the mount tries to come back", || {
                near.connects.load(Ordering::Relaxed) > connects
            });
            assert_eq!(client.committed(), Epoch(0));
            gate.set(false);
            sync.join().unwrap().unwrap();
        });
        assert_eq!(device.progress().epoch.count(), 1, "{limit:?}: one epoch");
        let written = site.server.counted().bytes_written;
        assert_eq!(written, 1 << 20, "{limit:?}: nothing was sent again");
        // And the next one follows.
        model[2 << 20..3 << 20].fill(2);
        device.write(2 << 20, &model[2 << 20..3 << 20]).unwrap();
        soon("the next epoch counts", || {
            let _ = device.pusher().sync();
            device.progress().epoch.count() == 2
        });
        device.close(true).unwrap();
        drop((device, client));
        drop(near);
        assert!(left_by(site, &base) == model, "{limit:?}");
    }
}

/// One that counts is copied into its place behind its answer: nothing waits for that.
#[test]
fn the_next_epoch_is_taken_and_a_link_is_made_while_one_is_copied() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let base = content(SIZE, 53);
    let (site, _, gate) = site(&base);
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let (first, second) = (Epoch(0).after(1), Epoch(0).after(1).after(1));
    wait(|done| client.push(first, write(0, 1), done)).unwrap();
    gate.set(true);
    let opens = Opens(Arc::clone(&gate));
    wait(|done| client.commit(first, 65_536, done)).unwrap();
    gate.wait_for_a_request();
    wait(|done| client.push(second, write(65_536, 2), done)).unwrap();
    near.cut();
    soon(
        "the link is back",
        || matches!(client.link(), Link::Up(n) if n >= 2),
    );
    let staged = wait(|done| client.staged(second, 0, done)).unwrap();
    assert_eq!(staged.runs, vec![(65_536, 65_536)]);
    drop(opens);
    wait(|done| client.commit(second, 65_536, done)).unwrap();
    wait(|done| client.close(done)).unwrap();
    drop(client);
    let state = site.directory.path().to_owned();
    drop((near, site.server));
    let mut model = base.clone();
    model[..65_536].fill(1);
    model[65_536..131_072].fill(2);
    assert!(at_site(&state, &base) == model);
}

/// Threads of this process that copy epochs, those of other tests among them.
fn copying() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.flatten().map(|task| {
        // A thread that has ended meanwhile has none.
        std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
    });
    names.filter(|name| name.trim() == "mount-settle").count()
}

/// A mount that commits the same epoch again and again makes no thread more than one that does so once.
#[test]
fn commits_of_one_epoch_while_it_is_copied_start_no_more_copies() {
    const TIMES: usize = 300;
    let runtime = runtime();
    let _inside = runtime.enter();
    let (site, _, gate) = site(&content(SIZE, 54));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let epoch = Epoch(0).after(1);
    wait(|done| client.push(epoch, write(0, 1), done)).unwrap();
    gate.set(true);
    let opens = Opens(Arc::clone(&gate));
    for _ in 0..TIMES {
        wait(|done| client.commit(epoch, 65_536, done)).unwrap();
    }
    gate.wait_for_a_request();
    let threads = copying();
    assert!(threads < TIMES / 2, "{threads} threads");
    drop(opens);
    wait(|done| client.close(done)).unwrap();
}

/// A commit that waits for the copy of the previous one, or for a disk's sync, does not delay queries.
#[test]
fn another_mount_is_answered_while_a_commit_waits() {
    for waits_for_the_copy in [true, false] {
        let runtime = runtime();
        let _inside = runtime.enter();
        let (site, seals, copies) = site(&content(SIZE, 56));
        let near = Near::new(site.server.clone());
        let client = open(&runtime, &near, writer(MountId::random()));
        let (first, second) = (Epoch(0).after(1), Epoch(0).after(1).after(1));
        wait(|done| client.push(first, write(0, 1), done)).unwrap();
        let gate = match waits_for_the_copy {
            true => copies,
            false => seals,
        };
        let (say, hear) = std::sync::mpsc::channel();
        let say_too = say.clone();
        gate.set(true);
        let opens = Opens(Arc::clone(&gate));
        client.commit(first, 65_536, Box::new(move |done| drop(say.send(done))));
        gate.wait_for_a_request();
        if waits_for_the_copy {
            hear.recv_timeout(PATIENCE).expect("an answer").unwrap();
            wait(|done| client.push(second, write(65_536, 2), done)).unwrap();
            client.commit(
                second,
                65_536,
                Box::new(move |done| drop(say_too.send(done))),
            );
            // Only so that it most likely is at it.
            std::thread::sleep(Duration::from_millis(200));
        }
        let other = Options::new(name("web"), Access::ReadOnly);
        let other = Client::open(runtime.handle(), Near::new(site.server.clone()), other);
        let why = runtime.block_on(other).err().expect("it is leased");
        let expected = match waits_for_the_copy {
            true => "holds the write lease of web",
            false => "a commit is under way",
        };
        let why = why.to_string();
        assert!(why.contains(expected), "{why}");
        if !waits_for_the_copy {
            // Nor does the site's owner wait until the disk is done.
            let web = name("web");
            let broken = runtime.block_on(async {
                tokio::time::timeout(PATIENCE, site.server.break_lease(&web, WhyBroken::ByUser))
                    .await
            });
            let why = broken.expect("an answer").unwrap_err().to_string();
            assert!(why.contains(expected), "{why}");
        }
        assert!(hear.try_recv().is_err(), "the commit still waits");
        drop(opens);
        hear.recv_timeout(PATIENCE).expect("an answer").unwrap();
        wait(|done| client.close(done)).unwrap();
    }
}

/// The connection on which an epoch was committed has ended before the epoch was sealed.
#[test]
fn an_epoch_whose_reply_is_lost_is_copied_nevertheless() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let base = content(SIZE, 55);
    let (site, seals, copies) = site(&base);
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let epoch = Epoch(0).after(1);
    wait(|done| client.push(epoch, write(0, 1), done)).unwrap();
    seals.set(true);
    copies.set(true);
    let opens = (Opens(Arc::clone(&seals)), Opens(Arc::clone(&copies)));
    let (say, hear) = std::sync::mpsc::channel();
    client.commit(
        epoch,
        65_536,
        Box::new(move |result| drop(say.send(result))),
    );
    seals.wait_for_a_request();
    // The image is not closed meanwhile, which would copy it too.
    let view = site.server.view(&name("web")).unwrap();
    near.cut();
    let cut = hear.recv_timeout(PATIENCE).expect("an answer");
    assert!(cut.is_err(), "the link was cut");
    seals.set(false);
    copies.wait_for_a_request();
    drop((view, opens));
    soon("the link is back", || client.committed() == epoch);
    wait(|done| client.close(done)).unwrap();
    drop(client);
    let state = site.directory.path().to_owned();
    drop((near, site.server));
    let mut model = base.clone();
    model[..65_536].fill(1);
    assert!(at_site(&state, &base) == model);
}

/// Only the copying thread still uses the image.
#[test]
fn changes_are_dropped_once_they_have_been_copied() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let (site, _, gate) = site(&content(SIZE, 57));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let epoch = Epoch(0).after(1);
    wait(|done| client.push(epoch, write(0, 1), done)).unwrap();
    gate.set(true);
    wait(|done| client.commit(epoch, 65_536, done)).unwrap();
    gate.wait_for_a_request();
    wait(|done| client.close(done)).unwrap();
    drop(client);
    let image = name("web");
    soon("nobody has it mounted", || {
        site.server.leased(&image).unwrap().is_none()
    });
    std::thread::scope(|scope| {
        // Before the scope waits for its threads, also when it panics.
        let opens = Opens(Arc::clone(&gate));
        let dropped = scope.spawn(|| site.server.drop_changes(&image));
        // Longer than a user may take to release it.
        std::thread::sleep(Duration::from_secs(12));
        drop(opens);
        let dropped = dropped.join().unwrap().unwrap();
        assert_eq!(dropped.map(|c| c.changed), Some(65_536));
    });
}
