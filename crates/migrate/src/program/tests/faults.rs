//! Processes that die, and connections that break, at any moment of a move.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::BlockDevice;
use drover_frontend::region::RegionDevice;
use drover_store::machine::Machines;
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use super::super::*;
use super::world::{There, Way, World, Writers, name, runtime, serve, world};

/// Ends a process: its runtime, and all that it serves.
fn kill(runtime: Runtime) {
    runtime.shutdown_timeout(Duration::from_secs(10));
}

/// The other end as a process of its own.
struct Process {
    runtime: Option<Runtime>,
    host: Arc<There>,
    leecher: Arc<Leecher<There>>,
}

impl Process {
    fn start(world: &World) -> Self {
        let runtime = runtime();
        let sizes = [world.region.len() as u64, world.disk.size()];
        let host = There::new(sizes, world.machines.clone());
        let leecher = Leecher::new(
            name("program"),
            world.machines[1].clone(),
            Arc::clone(&host),
        );
        *world.way.serving.lock() = Some(serve(&runtime, &leecher));
        Self {
            runtime: Some(runtime),
            host,
            leecher,
        }
    }

    fn kill(&mut self, way: &Way) {
        *way.serving.lock() = None;
        kill(self.runtime.take().unwrap());
    }
}

/// Waits until one end is to die: any time, or just after it was paused, committed or taken.
fn wait_for_a_moment(rng: &mut fastrand::Rng, machines: &[Machines; 2], writers: &Writers) {
    let kind = rng.u8(..4);
    let begun = Instant::now();
    let load = |end: usize| machines[end].load(&name("program")).unwrap();
    let is_it = || match kind {
        0 => true,
        1 => writers.is_paused(),
        2 => load(0).is_some_and(|record| record.is_committed()),
        _ => load(1).is_some_and(|record| record.may_run()),
    };
    while !is_it() && begun.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_micros(50));
    }
    let longest = if kind == 0 { 60_000 } else { 3000 };
    std::thread::sleep(Duration::from_micros(rng.u64(0..longest)));
}

/// One move, in which one end dies after a while, and comes back. Returns which of them has it.
fn dies(seed: u64, is_seeder: bool) -> &'static str {
    let mut rng = fastrand::Rng::with_seed(seed);
    let Some(world) = world(seed, 1 << 20, 256 << 10) else {
        return "skipped";
    };
    let mut there = Process::start(&world);
    let writers = Writers::start(&world, seed);
    let mut options = world.options();
    options.post_copy = rng.bool();
    options.max_pause = Duration::from_millis(rng.u64(0..2));
    options.max_rounds = rng.u32(1..4);
    let here = runtime();
    let ended = Arc::new(Mutex::new(None));
    {
        let (ended, writers) = (Arc::clone(&ended), Arc::clone(&writers));
        let (parts, options) = (world.parts(), options.clone());
        here.spawn(async move {
            let moved = async {
                let mut seeder = Seeder::open(parts, options).await?;
                seeder.track().await?;
                seeder.hand_over(writers).await
            };
            let moved = moved.await;
            *ended.lock() = Some(moved);
        });
    }
    let machines = world.machines.clone();
    wait_for_a_moment(&mut rng, &machines, &writers);
    if is_seeder {
        kill(here);
        // It comes back, with nothing in memory, and asks.
        let settled = there.runtime.as_ref().unwrap().block_on(async {
            let settling = settle(&machines[0], &options.name, Some(&options));
            tokio::time::timeout(Duration::from_secs(60), settling).await
        });
        let settled = settled.expect("it is decided").unwrap();
        let known = machines[0].load(&options.name).unwrap();
        let is_here = known.as_ref().is_none_or(|record| record.may_run());
        assert_eq!(settled == Settled::Here, is_here, "seed {seed}");
        let there_too = machines[1].load(&options.name).unwrap();
        let is_there = there_too.is_some_and(|record| record.may_run());
        assert_ne!(is_here, is_there, "seed {seed}: one of them has it");
        // It may have been taken, and lack what it needs to start.
        assert!(is_there || there.host.runs.load(Ordering::SeqCst) == 0);
        check(&there.host, &writers, seed, false);
        return if is_there { "there" } else { "here" };
    }
    let before = there.leecher.stage().borrow().clone();
    there.kill(&world.way);
    let died = Arc::clone(&there.host);
    // With its locks.
    drop(there);
    let was_complete = before == Stage::Complete;
    let again = runtime();
    let settled = again.block_on(settle(&machines[1], &options.name, None));
    // What is started from its devices finds all of it there.
    if settled.unwrap() == Settled::Here && died.arrived.lock().is_some() {
        check(&died, &writers, seed, true);
    }
    let mut there = Process::start(&world);
    // It ends, whatever it has to ask for, but for what it cannot send any more.
    let is_over = || {
        let record = machines[0].load(&options.name).unwrap();
        record.is_some_and(|record| record.under_way.is_none()) || ended.lock().is_some()
    };
    for _ in 0..6000 {
        if is_over()
            || machines[1]
                .load(&options.name)
                .unwrap()
                .is_some_and(|r| r.may_run())
        {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let is_here = machines[0]
        .load(&options.name)
        .unwrap()
        .is_none_or(|r| r.may_run());
    let is_there = machines[1]
        .load(&options.name)
        .unwrap()
        .is_some_and(|r| r.may_run());
    assert!(!(is_here && is_there), "seed {seed}: both have it");
    if is_here {
        // It runs on, unless it was not paused at all.
        for _ in 0..1000 {
            if ended.lock().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(matches!(*ended.lock(), Some(Err(_))), "seed {seed}");
    }
    let ended = ended.lock();
    assert!(
        is_here || is_there,
        "seed {seed}: nobody has it: {:?}, {:?}, {:?}",
        *ended,
        machines[0].load(&options.name),
        machines[1].load(&options.name),
    );
    assert!(!was_complete || is_there, "seed {seed}");
    assert!(there.host.runs.load(Ordering::SeqCst) <= 1);
    kill(here);
    kill(again);
    kill(there.runtime.take().unwrap());
    if is_there { "there" } else { "here" }
}

/// What arrived, if all of it did, is what was there.
fn check(host: &There, writers: &Writers, seed: u64, must: bool) {
    let arrived = host.arrived.lock().clone();
    let Some(arrived) = arrived else {
        assert!(!must, "seed {seed}: it has not arrived");
        return;
    };
    let (memory, disk) = writers.model();
    // What is missing is an error, not another content.
    let region: Arc<dyn BlockDevice> = Arc::new(RegionDevice::new(arrived.region));
    for (device, content) in [(region, memory), (arrived.disk, disk)] {
        for (offset, expected) in (0..).step_by(4096).zip(content.chunks(4096)) {
            let mut found = vec![0; expected.len()];
            match device.read(offset, &mut found) {
                Ok(()) => assert!(found == expected, "seed {seed}: {offset}"),
                Err(e) if must => panic!("seed {seed}: {e}"),
                // Each would wait.
                Err(_) => break,
            }
        }
    }
}

#[test]
fn a_seeder_that_dies_leaves_one_owner() {
    let ends: Vec<_> = (0..40).map(|seed| dies(seed, true)).collect();
    eprintln!("{ends:?}");
}

#[test]
fn a_leecher_that_dies_leaves_one_owner() {
    let ends: Vec<_> = (100..140).map(|seed| dies(seed, false)).collect();
    eprintln!("{ends:?}");
}

/// Connections that break while the program, being started, waits for what is left.
#[test]
fn what_it_waits_for_while_it_is_started_is_sent_by_new_connections() {
    let Some(world) = world(9, 2 << 20, 1 << 20) else {
        return;
    };
    let writers = Writers::start(&world, 9);
    world.way.is_fragile.store(true, Ordering::SeqCst);
    let mut options = world.options();
    options.max_pause = Duration::ZERO;
    options.give_up_after = Duration::from_secs(30);
    let way = Arc::clone(&world.way);
    *world.host.on_run.lock() = Some(Box::new(move || way.cut()));
    let report = world.runtime.block_on(async {
        let mut seeder = Seeder::open(world.parts(), options).await.unwrap();
        seeder.track().await.unwrap();
        writers.touch(&world);
        seeder.finalize(writers.clone()).await.unwrap()
    });
    assert!(report.asked > 0 && report.behind > 0, "{report:?}");
    check(&world.host, &writers, 9, true);
}

/// Its link dies as soon as it is paused.
struct Cut(Arc<Writers>, Arc<Way>);

impl Program for Cut {
    fn pause(&self) -> std::io::Result<Vec<u8>> {
        self.1.stall();
        self.0.pause()
    }

    fn resume(&self) {
        self.0.resume();
    }
}

#[test]
fn it_is_not_paused_for_longer_than_its_link_lives() {
    let Some(world) = world(10, 1 << 20, 256 << 10) else {
        return;
    };
    let writers = Writers::start(&world, 10);
    world.way.is_fragile.store(true, Ordering::SeqCst);
    let mut options = world.options();
    options.post_copy = false;
    let cut = Arc::new(Cut(Arc::clone(&writers), Arc::clone(&world.way)));
    let ended = world.runtime.block_on(async {
        let seeder = Seeder::open(world.parts(), options).await.unwrap();
        tokio::time::timeout(Duration::from_secs(20), seeder.finalize(cut)).await
    });
    ended.expect("it runs on").unwrap_err();
    assert_eq!(writers.resumed(), 1);
    assert!(world.here().may_run() && world.here().under_way.is_none());
}

/// However often a connection is made anew, the time to give up begins when none can be made.
#[test]
fn each_connection_that_is_made_begins_the_time_to_give_up_anew() {
    let Some(world) = world(8, 2 << 20, 1 << 20) else {
        return;
    };
    let writers = Writers::start(&world, 8);
    world.way.is_fragile.store(true, Ordering::SeqCst);
    let mut options = world.options();
    options.max_pause = Duration::ZERO;
    options.give_up_after = Duration::ZERO;
    world.host.reads.store(false, Ordering::SeqCst);
    let (way, cuts) = (Arc::clone(&world.way), Arc::new(AtomicU64::new(0)));
    options.on_progress = Arc::new(move |progress| {
        // The rest was sent, and is not confirmed yet.
        if progress.is_there && progress.left == 0 && cuts.fetch_add(1, Ordering::SeqCst) < 3 {
            way.cut();
        }
    });
    let report = world.runtime.block_on(async {
        let mut seeder = Seeder::open(world.parts(), options).await.unwrap();
        seeder.track().await.unwrap();
        writers.touch(&world);
        seeder.finalize(writers.clone()).await.unwrap()
    });
    assert!(report.behind > 0);
    check(&world.host, &writers, 8, true);
    assert!(world.there().under_way.is_none());
}

/// Connections that end after some bytes.
#[test]
fn connections_that_break_lose_nothing() {
    let mut moved = 0;
    for seed in 200..230 {
        let Some(world) = world(seed, 1 << 20, 256 << 10) else {
            return;
        };
        let mut rng = fastrand::Rng::with_seed(seed);
        let limits = (0..rng.usize(1..6)).map(|_| match rng.u8(..3) {
            0 => rng.usize(0..2000),
            1 => rng.usize(0..2 << 20),
            _ => usize::MAX,
        });
        *world.way.limits.lock() = limits.collect();
        let writers = Writers::start(&world, seed);
        let mut options = world.options();
        options.max_pause = Duration::ZERO;
        let result = world.runtime.block_on(async {
            let moving = async {
                let mut seeder = Seeder::open(world.parts(), options).await?;
                seeder.track().await?;
                seeder.finalize(writers.clone()).await
            };
            tokio::time::timeout(Duration::from_secs(60), moving).await
        });
        let result = result.unwrap_or_else(|_| panic!("seed {seed}: it does not end"));
        let (here, there) = (
            world.machines[0].load(&name("program")).unwrap(),
            world.machines[1].load(&name("program")).unwrap(),
        );
        let is_here = here.is_none_or(|record| record.may_run());
        let is_there = there.is_some_and(|record| record.may_run());
        assert_ne!(is_here, is_there, "seed {seed}: {result:?}");
        assert_eq!(result.is_ok(), is_there, "seed {seed}: {result:?}");
        if is_there {
            moved += 1;
            check(&world.host, &writers, seed, true);
        }
    }
    assert!(moved > 3, "{moved} of 30");
}
