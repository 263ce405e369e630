//! Pushes interrupted by failures of the link or the site.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::{BlockDevice, DeviceError, Digest};
use drover_device::backend::overlay::{Identity, Options as OverlayOptions, Overlay, OverlayError};
use drover_device::remote::{Change, Epoch, Link, Remote, Staged};
use drover_device::synced::{Order, Sync, Synced, SyncedOptions};
use drover_mount::client::{Client, Options};
use drover_mount::server::WhyBroken;
use drover_storage::FakeDirectory;
use drover_store::lease::{Access, MountId};

use crate::local_stub::LocalStub;
use crate::util::{Near, Site, content, memory, name, runtime};

pub const PATIENCE: Duration = Duration::from_secs(90);
const CHUNK: usize = drover_mount::protocol::DEFAULT_CHUNK as usize;

pub fn writer(mount: MountId) -> Options {
    Options {
        mount,
        ..Options::new(name("web"), Access::ReadWrite)
    }
}

pub fn open(runtime: &tokio::runtime::Runtime, near: &Arc<Near>, options: Options) -> Arc<Client> {
    let client = Client::open(runtime.handle(), near.clone(), options);
    Arc::new(runtime.block_on(client).unwrap())
}

/// Asks for a thing and waits for the answer.
pub fn wait<T: Send + 'static>(
    request: impl FnOnce(Box<dyn FnOnce(Result<T, DeviceError>) + Send>),
) -> Result<T, DeviceError> {
    let (say, hear) = std::sync::mpsc::channel();
    request(Box::new(move |result| say.send(result).unwrap()));
    hear.recv_timeout(PATIENCE).expect("an answer")
}

pub fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < deadline, "it did not come to this: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A managed device that pushes only on request.
pub fn managed(client: &Arc<Client>, directory: &FakeDirectory) -> Arc<Synced> {
    Synced::open(SyncedOptions {
        sync: Sync::Local,
        push_interval: Duration::from_secs(1000),
        high_water: u64::MAX,
        prefetch: Order::None,
        give_up_after: PATIENCE,
        ..SyncedOptions::new(
            Arc::new(directory.clone()),
            Arc::clone(client) as Arc<dyn Remote>,
            b"web",
        )
    })
    .unwrap()
}

/// The contents of the site's disk, while it is not in use.
pub fn at_site(state: &Path, base: &[u8]) -> Vec<u8> {
    let directory = state.join("overlays/web");
    let mut found = None;
    soon("the site's program has ended", || {
        let identity = Identity {
            base: Digest([7; 32]),
            size: base.len() as u64,
            name: "web".into(),
        };
        let directory = drover_storage::HostDirectory::open(&directory).unwrap();
        let options = OverlayOptions {
            read_only: true,
            ..OverlayOptions::default()
        };
        match Overlay::open(Arc::new(directory), memory(base), identity, options) {
            Ok(overlay) => {
                let mut bytes = vec![0; base.len()];
                for (at, part) in (0..).step_by(1 << 20).zip(bytes.chunks_mut(1 << 20)) {
                    overlay.read(at, part).unwrap();
                }
                found = Some(bytes);
                true
            }
            Err(OverlayError::Busy { .. }) => false,
            Err(OverlayError::Missing { .. }) => {
                found = Some(base.to_vec());
                true
            }
            Err(error) => panic!("{error}"),
        }
    });
    found.unwrap()
}

#[test]
fn what_a_site_answered_stays_staged_over_a_cut_and_over_a_restart() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut model = content(8 << 20, 31);
    let mut site = Site::with("web", memory(&model));
    let near = Near::new(site.server.clone());
    let mount = MountId::random();
    let client = open(&runtime, &near, writer(mount));
    let local = LocalStub::attach(client.as_ref(), false);
    let epoch = Epoch(0).after(5);
    let change = |offset: usize, length: usize, model: &mut Vec<u8>| {
        fastrand::Rng::with_seed(offset as u64).fill(&mut model[offset..offset + length]);
        let bytes = Bytes::copy_from_slice(&model[offset..offset + length]);
        vec![Change::Write(offset as u64, bytes)]
    };
    let staged = |client: &Arc<Client>, epoch| -> Staged {
        wait(|done| client.staged(epoch, 0, done)).unwrap()
    };
    let end = model.len() as u64;
    assert_eq!(staged(&client, epoch).epoch, Epoch(0), "nothing yet");
    let changes = change(1 << 20, 2 << 20, &mut model);
    wait(|done| client.push(epoch, changes, done)).unwrap();
    near.cut();
    local.wait(
        "up",
        |received| matches!(received.links.last(), Some(Link::Up(n)) if *n >= 2),
    );
    let runs = vec![(1 << 20, 2 << 20)];
    assert_eq!(staged(&client, epoch), Staged { epoch, runs, end });
    let changes = vec![Change::Zero(4096, 8192)];
    wait(|done| client.push(epoch, changes, done)).unwrap();
    model[4096..12_288].fill(0);
    // The site's program starts anew.
    near.down.store(true, Ordering::Relaxed);
    near.cut();
    local.wait("down", |received| {
        matches!(received.links.last(), Some(Link::Down(_)))
    });
    drop(client);
    site.restart();
    let near = Near::again(site.server.clone(), near.peer.clone());
    let client = open(&runtime, &near, writer(mount));
    let runs = vec![(4096, 8192), (1 << 20, 2 << 20)];
    assert_eq!(staged(&client, epoch), Staged { epoch, runs, end });
    let other = Staged {
        epoch,
        runs: Vec::new(),
        end,
    };
    assert_eq!(staged(&client, epoch.after(1)), other, "of another");
    assert_eq!(client.committed(), Epoch(0), "it does not count yet");
    let changes = change(5 << 20, 4096, &mut model);
    wait(|done| client.push(epoch, changes, done)).unwrap();
    let covers = (2 << 20) + 8192 + 4096;
    wait(|done| client.commit(epoch, covers, done)).unwrap();
    let local = LocalStub::attach(client.as_ref(), true);
    local.wait_all();
    local.all_is(&model);
    assert_eq!(staged(&client, epoch).epoch, Epoch(0));
}

#[test]
fn what_another_writer_staged_is_forgotten() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let model = content(2 << 20, 32);
    let site = Site::with("web", memory(&model));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    // Of a number that hardly any is above.
    let epoch = Epoch(0).after(u32::MAX);
    let changes = vec![Change::Zero(0, 4096)];
    wait(|done| client.push(epoch, changes, done)).unwrap();
    let image = name("web");
    let broken = site.server.break_lease(&image, WhyBroken::ByUser);
    assert!(runtime.block_on(broken).unwrap().is_some());
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let epoch = Epoch(0).after(0);
    let staged: Staged = wait(|done| client.staged(epoch, 0, done)).unwrap();
    assert_eq!((staged.epoch, staged.runs.len()), (Epoch(0), 0));
    let changes = vec![Change::Zero(8192, 4096)];
    wait(|done| client.push(epoch, changes, done)).unwrap();
    wait(|done| client.commit(epoch, 4096, done)).unwrap();
}

#[test]
fn an_epoch_of_which_some_is_missing_is_not_committed_and_can_be_completed() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut model = content(2 << 20, 35);
    let site = Site::with("web", memory(&model));
    let near = Near::new(site.server.clone());
    let mount = MountId::random();
    let client = open(&runtime, &near, writer(mount));
    let local = LocalStub::attach(client.as_ref(), false);
    let epoch = Epoch(0).after(9);
    let changes = vec![Change::Zero(4096, 4096)];
    wait(|done| client.push(epoch, changes, done)).unwrap();
    let refused = wait(|done| client.commit(epoch, 3 * 4096, done)).unwrap_err();
    assert!(refused.is_transient(), "{refused}");
    assert!(
        refused.to_string().contains("has 4096 bytes staged"),
        "{refused}"
    );
    // The link is made anew, so that the site says what counts and what is staged.
    local.wait(
        "up",
        |received| matches!(received.links.last(), Some(Link::Up(n)) if *n >= 2),
    );
    assert_eq!(client.committed(), Epoch(0));
    let staged: Staged = wait(|done| client.staged(epoch, 0, done)).unwrap();
    assert_eq!((staged.epoch, staged.runs), (epoch, vec![(4096, 4096)]));
    let changes = vec![Change::Zero(1 << 20, 8192)];
    wait(|done| client.push(epoch, changes, done)).unwrap();
    wait(|done| client.commit(epoch, 3 * 4096, done)).unwrap();
    model[4096..8192].fill(0);
    model[1 << 20..(1 << 20) + 8192].fill(0);
    for (index, chunk) in (0..).zip(model.chunks(CHUNK)) {
        assert!(local.get(client.as_ref(), index).unwrap() == chunk);
    }
}

/// Much dirty data, a link that is cut again and again, and a site that starts anew: one epoch, and little is sent twice.
#[test]
fn a_large_push_comes_to_its_end_over_cuts_and_a_restart() {
    const SIZE: usize = 96 << 20;
    let runtime = runtime();
    let _inside = runtime.enter();
    let base = vec![0; SIZE];
    let mut site = Site::with("web", memory(&base));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let device = managed(&client, &FakeDirectory::default());
    let mut model = base.clone();
    fastrand::Rng::with_seed(33).fill(&mut model);
    for at in (0..SIZE).step_by(1 << 20) {
        device.write(at as u64, &model[at..at + (1 << 20)]).unwrap();
    }
    let mut written = 0;
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| device.pusher().sync());
        for round in 1..5u64 {
            soon("some is staged", || {
                device.progress().pushing.staged >= round * (12 << 20) || sync.is_finished()
            });
            if round == 3 {
                near.down.store(true, Ordering::Relaxed);
                near.cut();
                soon("the link is down", || {
                    matches!(client.link(), Link::Down(_))
                });
                written += site.server.counted().bytes_written;
                site.restart();
                near.now(site.server.clone());
                near.down.store(false, Ordering::Relaxed);
            } else {
                near.cut();
            }
        }
        sync.join().unwrap().unwrap();
    });
    written += site.server.counted().bytes_written;
    assert_eq!(device.progress().epoch.count(), 1, "one epoch");
    // What was on its way at a cut may come twice.
    let most = (SIZE + 4 * (10 << 20)) as u64;
    assert!(written <= most, "{written} of {SIZE} bytes were sent");
    let image = device.as_ref();
    let mut bytes = vec![0; SIZE];
    image.read(0, &mut bytes).unwrap();
    assert!(bytes == model);
    device.close(true).unwrap();
    drop((device, client));
    let state = site.directory.path().to_owned();
    drop((near, site.server));
    assert!(at_site(&state, &base) == model);
}

#[test]
fn much_is_written_while_the_site_cannot_be_reached() {
    const SIZE: usize = 64 << 20;
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&vec![0; SIZE]));
    let near = Near::new(site.server.clone());
    let client = open(&runtime, &near, writer(MountId::random()));
    let device = managed(&client, &FakeDirectory::default());
    let mut random = fastrand::Rng::with_seed(34);
    let mut model = vec![0; SIZE];
    let mut write = |model: &mut Vec<u8>| {
        random.fill(model);
        for at in (0..SIZE).step_by(1 << 20) {
            device.write(at as u64, &model[at..at + (1 << 20)]).unwrap();
        }
        device.flush().unwrap();
    };
    write(&mut model);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| device.pusher().sync());
        soon("some is staged", || {
            device.progress().pushing.staged > 0 || sync.is_finished()
        });
        near.down.store(true, Ordering::Relaxed);
        near.cut();
        soon("the link is down", || {
            matches!(client.link(), Link::Down(_))
        });
        // Over all that is being pushed, twice.
        write(&mut model);
        write(&mut model);
        near.down.store(false, Ordering::Relaxed);
        sync.join().unwrap().unwrap();
    });
    device.pusher().sync().unwrap();
    assert_eq!(device.pusher().pending(), 0);
    drop((device, client));
    // A reader gets what was written last.
    let near = Near::again(site.server.clone(), near.peer.clone());
    let image = name("web");
    let broken = site.server.break_lease(&image, WhyBroken::ByUser);
    runtime.block_on(broken).unwrap();
    let reader = open(&runtime, &near, Options::new(name("web"), Access::ReadOnly));
    let local = LocalStub::attach(reader.as_ref(), true);
    local.wait_all();
    local.all_is(&model);
}

/// Writes, cuts and restarts of the site from a seed: the site is at all times at a state that the device had.
#[test]
fn the_site_is_always_at_a_state_that_the_device_had() {
    const SIZE: usize = 3 << 20;
    for seed in 0..4 {
        let runtime = runtime();
        let _inside = runtime.enter();
        let mut random = fastrand::Rng::with_seed(seed);
        let base = content(SIZE, seed);
        let mut site = Site::with("web", memory(&base));
        let near = Near::new(site.server.clone());
        let client = open(&runtime, &near, writer(MountId::random()));
        let device = Synced::open(SyncedOptions {
            sync: Sync::Local,
            push_interval: Duration::from_millis(random.u64(5..40)),
            give_up_after: PATIENCE,
            ..SyncedOptions::new(
                Arc::new(FakeDirectory::default()),
                Arc::clone(&client) as Arc<dyn Remote>,
                b"web",
            )
        })
        .unwrap();
        let mut model = base.clone();
        let mut had = HashSet::from([blake3::hash(&model)]);
        for step in 0..120 {
            match random.u8(0..30) {
                0 | 1 => near.cut(),
                2 => {
                    near.down.store(true, Ordering::Relaxed);
                    near.cut();
                    let state = site.directory.path().to_owned();
                    near.now(site.idle());
                    soon("the link is down", || {
                        matches!(client.link(), Link::Down(_))
                    });
                    let there = blake3::hash(&at_site(&state, &base));
                    assert!(had.contains(&there), "seed {seed}, step {step}: a mixture");
                    site.restart();
                    near.now(site.server.clone());
                    near.down.store(false, Ordering::Relaxed);
                }
                3 => device.flush().unwrap(),
                _ => {
                    let at = random.usize(0..SIZE - 1);
                    let length = random.usize(1..=(SIZE - at).min(300_000));
                    random.fill(&mut model[at..at + length]);
                    had.insert(blake3::hash(&model));
                    device.write(at as u64, &model[at..at + length]).unwrap();
                }
            }
        }
        device.pusher().sync().unwrap();
        device.close(true).unwrap();
        drop((device, client));
        let state = site.directory.path().to_owned();
        near.now(site.idle());
        assert!(at_site(&state, &base) == model, "seed {seed}");
    }
}
