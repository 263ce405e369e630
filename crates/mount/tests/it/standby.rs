//! A mount that stands by beside a writer, and takes its lease over.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_core::BlockDevice;
use drover_device::remote::{Epoch, Remote};
use drover_device::synced::{Order, Synced, SyncedOptions, drop_chunks};
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_mount::protocol::{HandOverLease, LeaseSeen, LookAtLease};
use drover_net::{Code, Refusal};
use drover_storage::{Directory, FakeDirectory};
use drover_store::generations::Summary;
use drover_store::lease::{Access, MountId};
use tokio::runtime::Runtime;

use crate::killed::{Mortal, insist};
use crate::push::soon;
use crate::util::{Near, Site, content, memory, name, runtime};

const SIZE: usize = 2 << 20;
const CHUNK: usize = 64 << 10;

fn options(access: Access, mount: u8) -> Options {
    Options {
        mount: MountId([mount; 16]),
        ..Options::new(name("web"), access)
    }
}

fn open(runtime: &Runtime, near: &Arc<Near>, options: Options) -> Arc<Client> {
    let opened = Client::open(runtime.handle(), near.clone(), options);
    Arc::new(runtime.block_on(opened).unwrap())
}

/// The mount that stands by, and its cache.
struct Standby {
    directory: FakeDirectory,
    since: Option<Summary>,
    device: Option<Arc<Synced>>,
    client: Option<Arc<Client>>,
}

impl Standby {
    fn new(seed: u64) -> Self {
        Self {
            directory: FakeDirectory::new(512, seed),
            since: None,
            device: None,
            client: None,
        }
    }

    /// Drops what was written since the last point.
    fn drop_old(&mut self, seen: &LeaseSeen) {
        if let Some(since) = &self.since {
            let changed = seen.written_since(since).expect("it is known");
            let directory: Arc<dyn Directory> = Arc::new(self.directory.clone());
            drop_chunks(&directory, &changed, Epoch(seen.identity.epoch)).unwrap();
        }
        let now = seen.generations.as_deref().map(Summary::decode);
        self.since = Some(now.expect("generations").unwrap());
    }

    fn open(&mut self, client: Arc<Client>, prefetch: Order) {
        let remote = client.clone() as Arc<dyn Remote>;
        let options = SyncedOptions {
            image: client.identity().digest,
            prefetch,
            ..SyncedOptions::new(Arc::new(self.directory.clone()), remote, b"web")
        };
        self.device = Some(Synced::open(options).unwrap());
        self.client = Some(client);
    }

    /// It is killed, or its host loses power.
    fn dies(&mut self, power: Option<u64>) {
        self.directory.cut_power_at(self.directory.steps());
        self.device = None;
        self.client = None;
        self.directory = match power {
            Some(seed) => self.directory.after_crash(seed),
            None => self.directory.after_kill(),
        };
    }

    fn begin(&mut self, runtime: &Runtime, near: &Arc<Near>, look: impl Fn() -> LeaseSeen) {
        let client = open(runtime, near, options(Access::Standby, 2));
        let seen = look();
        assert!(!seen.held);
        self.drop_old(&seen);
        client.agree(Epoch(seen.identity.epoch));
        self.open(client, Order::Sequential);
    }
}

/// The reference: what its writer wrote is read by who takes over, whatever was cached before, and whoever died meanwhile.
#[test]
fn who_takes_over_never_reads_what_is_out_of_date() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut kept = 0;
    for seed in 0..12 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut site = Mortal::new(seed);
        let (here, there) = (
            Near::new(site.server.clone()),
            Near::new(site.server.clone()),
        );
        let mut here = here;
        let look = |site: &Mortal, peer| {
            let ask = LookAtLease {
                image: name("web"),
                mount: MountId([2; 16]),
                point: true,
            };
            runtime.block_on(site.server.look_at_lease(peer, ask))
        };
        let mut writer = RemoteDevice::new(open(&runtime, &here, options(Access::ReadWrite, 1)));
        let mut model = content(SIZE, seed);
        writer.write(0, &model).unwrap();
        let mut standby = Standby::new(seed);
        standby.begin(&runtime, &there, || look(&site, &there.peer).unwrap());
        for _ in 0..random.usize(10..60) {
            match random.u8(..22) {
                0..8 => {
                    // Only half of the disk in every other run: the rest of the cache is kept.
                    let most = SIZE >> (seed % 2);
                    let length = random.usize(1..9000);
                    let at = random.usize(..most - length);
                    random.fill(&mut model[at..at + length]);
                    insist(seed, || writer.write(at as u64, &model[at..at + length]));
                }
                8 => insist(seed, || writer.flush()),
                9 => {
                    // The site ends: it is killed, or loses power.
                    there.down.store(true, Ordering::Relaxed);
                    there.cut();
                    let power = random.bool().then_some(seed);
                    site.ends(&here, power);
                    there.now(site.server.clone());
                    there.down.store(false, Ordering::Relaxed);
                    insist(seed, || writer.flush());
                    soon("it stands by again", || look(&site, &there.peer).is_ok());
                }
                10 => {
                    standby.dies(random.bool().then(|| random.u64(..)));
                    standby.begin(&runtime, &there, || look(&site, &there.peer).unwrap());
                }
                11 | 12 => {
                    // Its process is killed, and the site loses power: nobody repeats what was not flushed.
                    there.down.store(true, Ordering::Relaxed);
                    there.cut();
                    site.stops(&here, Some(random.u64(..)));
                    drop(writer);
                    here = Near::again(site.server.clone(), here.peer.clone());
                    writer =
                        RemoteDevice::new(open(&runtime, &here, options(Access::ReadWrite, 1)));
                    insist(seed, || writer.read(0, &mut model));
                    there.now(site.server.clone());
                    there.down.store(false, Ordering::Relaxed);
                    soon("it stands by again", || look(&site, &there.peer).is_ok());
                }
                _ => {
                    // Whatever it gets: nobody sees it.
                    let device = standby.device.as_ref().unwrap();
                    let at = random.u64(..(SIZE / CHUNK) as u64) * CHUNK as u64;
                    insist(seed, || device.read(at, &mut [0; CHUNK]));
                }
            }
        }
        insist(seed, || writer.flush());
        let hand_over = || HandOverLease {
            image: name("web"),
            mount: MountId([1; 16]),
            link: u64::MAX,
            token: [seed as u8; 16],
            to: Some(there.peer.key),
            to_mount: None,
            commit: true,
        };
        insist(seed, || -> Result<(), Refusal> {
            runtime.block_on(site.server.hand_over(&here.peer, hand_over()))?;
            Ok(())
        });
        // The same again has the same outcome, also at a site that was killed.
        let has_ended = random.bool();
        if has_ended {
            there.down.store(true, Ordering::Relaxed);
            there.cut();
            site.ends(&here, random.bool().then_some(seed));
            there.now(site.server.clone());
            there.down.store(false, Ordering::Relaxed);
        }
        runtime
            .block_on(site.server.hand_over(&here.peer, hand_over()))
            .unwrap();
        let late = writer.write(0, &[9; 512]).and_then(|()| writer.flush());
        assert!(late.is_err(), "seed {seed}: there are two writers");
        let power = random.bool().then(|| random.u64(..));
        if random.bool() {
            let device = standby.device.take().unwrap();
            device.close(false).unwrap();
            standby.client = None;
        } else {
            standby.dies(power);
        }
        let seen = look(&site, &there.peer).unwrap();
        assert!(seen.held);
        let before = standby.since.clone().unwrap();
        match seen.written_since(&before) {
            Some(_) => standby.drop_old(&seen),
            // A site that dies in that instant may not know it.
            None => {
                assert!(has_ended, "seed {seed}: it must know what was written");
                standby = Standby::new(seed);
            }
        }
        if random.bool() {
            standby.dies(power);
        }
        let client = open(&runtime, &there, options(Access::ReadWrite, 2));
        standby.open(client, Order::None);
        let device = standby.device.take().unwrap();
        kept += device.progress().local;
        let mut found = vec![0; SIZE];
        device.read(0, &mut found).unwrap();
        let differs = (0..SIZE / 512).find(|n| found[n * 512..][..512] != model[n * 512..][..512]);
        assert_eq!(differs, None, "seed {seed}: an old chunk is read");
        device.write(0, &[7; 512]).unwrap();
        device.close(true).unwrap();
    }
    assert!(kept > 0, "nothing of any cache was of use");
}

#[test]
fn what_was_read_after_a_point_does_not_change_back_when_the_site_loses_power() {
    let runtime = runtime();
    let _inside = runtime.enter();
    for seed in 0..8 {
        let mut site = Mortal::new(seed);
        let (here, there) = (
            Near::new(site.server.clone()),
            Near::new(site.server.clone()),
        );
        let look = |site: &Mortal| {
            let ask = LookAtLease {
                image: name("web"),
                mount: MountId([2; 16]),
                point: true,
            };
            runtime.block_on(site.server.look_at_lease(&there.peer, ask))
        };
        let writer = RemoteDevice::new(open(&runtime, &here, options(Access::ReadWrite, 1)));
        writer.write(0, &vec![1; SIZE]).unwrap();
        writer.flush().unwrap();
        writer.write(0, &vec![2; SIZE]).unwrap();
        let mut standby = Standby::new(seed);
        standby.begin(&runtime, &there, || look(&site).unwrap());
        let device = standby.device.take().unwrap();
        device.read(0, &mut vec![0; SIZE]).unwrap();
        there.down.store(true, Ordering::Relaxed);
        there.cut();
        // Its process is killed too: nobody repeats what was not flushed.
        site.stops(&here, Some(seed));
        drop(writer);
        let here = Near::again(site.server.clone(), here.peer.clone());
        let writer = RemoteDevice::new(open(&runtime, &here, options(Access::ReadWrite, 1)));
        let mut model = vec![0; SIZE];
        writer.read(0, &mut model).unwrap();
        there.now(site.server.clone());
        there.down.store(false, Ordering::Relaxed);
        soon("it stands by again", || look(&site).is_ok());
        writer.flush().unwrap();
        let ask = HandOverLease {
            image: name("web"),
            mount: MountId([1; 16]),
            link: u64::MAX,
            token: [1; 16],
            to: None,
            to_mount: None,
            commit: true,
        };
        runtime
            .block_on(site.server.hand_over(&here.peer, ask))
            .unwrap();
        device.close(false).unwrap();
        drop((device, standby.client.take()));
        let seen = look(&site).unwrap();
        if seen
            .written_since(standby.since.as_ref().unwrap())
            .is_none()
        {
            continue;
        }
        standby.drop_old(&seen);
        let client = open(&runtime, &there, options(Access::ReadWrite, 2));
        standby.open(client, Order::None);
        let mut found = vec![0; SIZE];
        let device = standby.device.take().unwrap();
        device.read(0, &mut found).unwrap();
        assert!(found == model, "seed {seed}: it reads what the disk lost");
    }
}

#[test]
fn a_lease_is_not_handed_over_for_a_process_that_another_has_followed() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(SIZE, 1)));
    let (here, there) = (
        Near::new(site.server.clone()),
        Near::new(site.server.clone()),
    );
    let killed = open(&runtime, &here, options(Access::ReadWrite, 1));
    let _standby = open(&runtime, &there, options(Access::Standby, 2));
    let hand_over = |link| {
        let ask = HandOverLease {
            image: name("web"),
            mount: MountId([1; 16]),
            link,
            token: [1; 16],
            to: None,
            to_mount: None,
            commit: true,
        };
        let done = runtime.block_on(site.server.hand_over(&here.peer, ask));
        done.map_err(|refusal| refusal.code)
    };
    let link = killed.latest_link();
    here.down.store(true, Ordering::Relaxed);
    here.cut();
    drop(killed);
    // It is mounted again before the site comes to its request.
    let again = Near::again(site.server.clone(), here.peer.clone());
    let client = open(&runtime, &again, options(Access::ReadWrite, 1));
    let writer = RemoteDevice::new(Arc::clone(&client));
    writer.write(0, &[6; 512]).unwrap();
    assert_eq!(hand_over(link), Err(Code::Unavailable));
    writer.write(512, &[6; 512]).unwrap();
    writer.flush().unwrap();
    assert_eq!(hand_over(client.latest_link()).as_deref(), Ok("nantes"));
}

#[test]
fn a_lease_is_handed_over_only_to_one_that_stands_by() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(SIZE, 1)));
    let (here, there) = (
        Near::new(site.server.clone()),
        Near::new(site.server.clone()),
    );
    let writer = RemoteDevice::new(open(&runtime, &here, options(Access::ReadWrite, 1)));
    writer.write(0, &[1; 512]).unwrap();
    let hand_over = |near: &Near, mount: u8, to, commit| {
        let ask = HandOverLease {
            image: name("web"),
            mount: MountId([mount; 16]),
            link: u64::MAX,
            token: [1; 16],
            to,
            to_mount: None,
            commit,
        };
        let done = runtime.block_on(site.server.hand_over(&near.peer, ask));
        done.map_err(|refusal| refusal.code)
    };
    assert_eq!(hand_over(&here, 1, None, true), Err(Code::OutOfOrder));
    let standby = open(&runtime, &there, options(Access::Standby, 2));
    let device = RemoteDevice::new(standby);
    assert!(device.write(0, &[2; 512]).is_err(), "it does not write");
    assert_eq!(
        hand_over(&here, 1, Some(here.peer.key), true),
        Err(Code::OutOfOrder)
    );
    assert_eq!(hand_over(&there, 2, None, true), Err(Code::Lost));
    assert_eq!(hand_over(&there, 1, None, true), Err(Code::Lost));
    // Nothing has happened so far, nor when it is only checked.
    assert_eq!(hand_over(&here, 1, None, false).unwrap(), "nantes");
    writer.write(0, &[3; 512]).unwrap();
    let another = open(&runtime, &here, options(Access::Standby, 3));
    assert_eq!(
        hand_over(&here, 1, None, true),
        Err(Code::OutOfOrder),
        "to which?"
    );
    drop(another);
    soon("it stands by alone", || {
        hand_over(&here, 1, None, false).is_ok()
    });
    writer.flush().unwrap();
    hand_over(&here, 1, None, true).unwrap();
    assert_eq!(hand_over(&here, 1, None, true).unwrap(), "", "once");
    assert!(
        writer
            .write(0, &[4; 512])
            .and_then(|()| writer.flush())
            .is_err()
    );
    let back = Client::open(
        runtime.handle(),
        here.clone(),
        options(Access::ReadWrite, 1),
    );
    let back = runtime.block_on(back).err().unwrap().to_string();
    assert!(back.contains("was handed over to nantes"), "{back}");
    // What ends by standing by does not take its lease with it.
    device.close().unwrap();
    let heir = RemoteDevice::new(open(&runtime, &there, options(Access::ReadWrite, 2)));
    let mut bytes = [0; 512];
    heir.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 512]);
    heir.write(0, &[5; 512]).unwrap();
    heir.close().unwrap();
}

#[test]
fn one_that_stands_by_without_a_writer_is_told_and_ends_few_generations() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(SIZE, 1)));
    let (here, there) = (
        Near::new(site.server.clone()),
        Near::new(site.server.clone()),
    );
    let look = |near: &Near, mount: u8, point| {
        let ask = LookAtLease {
            image: name("web"),
            mount: MountId([mount; 16]),
            point,
        };
        let seen = runtime.block_on(site.server.look_at_lease(&near.peer, ask));
        seen.map_err(|refusal| refusal.code)
    };
    let _standby = open(&runtime, &there, options(Access::Standby, 2));
    assert!(!look(&there, 2, true).unwrap().has_writer);
    let writer = RemoteDevice::new(open(&runtime, &here, options(Access::ReadWrite, 1)));
    assert!(look(&there, 2, true).unwrap().has_writer);
    let ended = (1..200).find_map(|n| {
        writer.write(0, &[n; 512]).unwrap();
        look(&there, 2, true).err()
    });
    assert_eq!(ended, Some(Code::Busy), "it ends all generations there are");
    // What uses up none, or is the holder's own, is not limited.
    assert!(!look(&there, 2, false).unwrap().held);
    assert!(look(&here, 1, true).unwrap().held);
    writer.close().unwrap();
    assert!(!look(&there, 2, false).unwrap().has_writer);
}
