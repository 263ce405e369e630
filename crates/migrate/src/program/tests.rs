//! Programs whose threads write while they move, and ends that die at any moment.

mod faults;
mod hostile;
mod leecher;
mod simulation;
mod world;

use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;

use super::*;
use world::{Writers, name, world};

fn moves(post_copy: bool, max_pause: Duration, seed: u64) {
    let Some(world) = world(seed, 4 << 20, 1 << 20) else {
        return;
    };
    let writers = Writers::start(&world, seed);
    let report = world.runtime.block_on(async {
        let options = SeederOptions {
            post_copy,
            max_pause,
            ..world.options()
        };
        let mut seeder = Seeder::open(world.parts(), options).await.unwrap();
        let tracked = seeder.track().await.unwrap();
        assert!(tracked.rounds >= 1 && tracked.sent > 0);
        // More than fits into any pause.
        writers.touch(&world);
        seeder.finalize(writers.clone()).await.unwrap()
    });
    let arrived = world.arrived();
    assert_eq!(arrived.state, b"its own state");
    // It read while it was started, before the rest followed.
    assert_eq!(report.asked > 0, post_copy, "{report:?}");
    assert_eq!(report.behind > 0, post_copy, "{report:?}");
    let (memory, disk) = writers.model();
    let mut found = vec![0; memory.len()];
    arrived.region.read_at(0, &mut found).unwrap();
    assert!(found == memory, "seed {seed}");
    let mut found = vec![0; disk.len()];
    arrived.disk.read(0, &mut found).unwrap();
    assert!(found == disk, "seed {seed}");
    // Without it all is flushed before it is taken.
    let in_part = &world.host.in_part;
    assert_eq!(in_part.load(std::sync::atomic::Ordering::SeqCst), post_copy);
    assert!(!world.here().may_run() && world.there().may_run());
    world.runtime.block_on(async {
        let complete = world.leecher().complete();
        let complete = tokio::time::timeout(Duration::from_secs(5), complete).await;
        complete.unwrap().unwrap();
    });
    assert_eq!(world.here().generation.0, 1);
}

#[test]
fn what_was_written_until_the_pause_is_there() {
    for seed in 0..6 {
        moves(false, Duration::from_millis(100), seed);
    }
}

#[test]
fn what_is_left_follows_and_is_waited_for() {
    for seed in 0..6 {
        moves(true, Duration::ZERO, seed);
    }
}

#[test]
fn it_goes_on_to_a_third_place_and_back() {
    let Some(world) = world(3, 1 << 20, 1 << 20) else {
        return;
    };
    let writers = Writers::start(&world, 3);
    let moved = world.runtime.block_on(async {
        let seeder = Seeder::open(world.parts(), world.options()).await.unwrap();
        seeder.finalize(writers.clone()).await
    });
    moved.unwrap();
    let (memory, _) = writers.model();
    let back = world.back();
    let again = Writers::frozen(&writers);
    back.runtime.block_on(async {
        let mut seeder = Seeder::open(back.parts(), back.options()).await.unwrap();
        seeder.track().await.unwrap();
        seeder.finalize(again).await.unwrap();
    });
    let mut found = vec![0; memory.len()];
    back.arrived().region.read_at(0, &mut found).unwrap();
    assert!(found == memory);
    assert!(world.here().may_run() && !world.there().may_run());
    assert_eq!(world.here().generation.0, 2);
}

/// Says once what was written.
struct Once(std::sync::atomic::AtomicBool);

impl Changes for Once {
    fn take(&self) -> Result<Vec<std::ops::Range<u64>>, drover_core::DeviceError> {
        match self.0.swap(true, std::sync::atomic::Ordering::SeqCst) {
            false => Ok(Vec::new()),
            true => Err(drover_core::DeviceError::Closed),
        }
    }
}

#[test]
fn a_round_that_was_cut_short_is_never_handed_over() {
    let Some(world) = world(5, 1 << 20, 256 << 10) else {
        return;
    };
    let writers = Writers::start(&world, 5);
    let stays = async |seeder: Seeder| {
        let stayed = seeder.finalize(writers.clone()).await.unwrap_err();
        assert!(stayed.to_string().contains("cut short"), "{stayed}");
        assert!(!writers.is_paused() && world.here().may_run());
        assert!(world.here().under_way.is_none());
    };
    world.runtime.block_on(async {
        // Dropped, as by a time limit.
        let mut seeder = Seeder::open(world.parts(), world.options()).await.unwrap();
        let track = tokio::time::timeout(Duration::ZERO, seeder.track());
        assert!(track.await.is_err());
        stays(seeder).await;
        // Failed.
        let mut parts = world.parts();
        parts[1] = Part::device("disk", Arc::clone(&world.disk), Once(false.into()));
        let mut seeder = Seeder::open(parts, world.options()).await.unwrap();
        seeder.track().await.unwrap_err();
        stays(seeder).await;
    });
}

#[test]
fn what_is_given_up_or_refused_stays() {
    let Some(world) = world(4, 1 << 20, 1 << 20) else {
        return;
    };
    let writers = Writers::start(&world, 4);
    world.runtime.block_on(async {
        let mut seeder = Seeder::open(world.parts(), world.options()).await.unwrap();
        seeder.track().await.unwrap();
        seeder.abort().await;
        assert!(world.here().may_run() && world.here().under_way.is_none());
        // Another program than the one that is expected, and parts of other sizes.
        let mut other = world.options();
        other.name_there = name("another");
        let refused = Seeder::open(world.parts(), other).await.unwrap_err();
        assert!(refused.to_string().contains("is not expected"), "{refused}");
        let small: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(4096));
        let (small, handle) = drover_device::stage::Tracked::new(small, 4096);
        let parts = vec![Part::device("memory", Arc::new(small), handle)];
        let refused = Seeder::open(parts, world.options()).await.unwrap_err();
        assert!(refused.to_string().contains("other parts"), "{refused}");
        assert!(world.here().may_run());
        // A program that cannot be paused runs on.
        let seeder = Seeder::open(world.parts(), world.options()).await.unwrap();
        let stubborn = Writers::stubborn(&writers);
        let stayed = seeder.finalize(stubborn.clone()).await.unwrap_err();
        assert!(
            matches!(stayed, crate::MigrateError::Stayed { .. }),
            "{stayed}"
        );
        assert_eq!(stubborn.resumed(), 1);
        assert!(world.here().may_run());
        // And after all of that it moves.
        let seeder = Seeder::open(world.parts(), world.options()).await.unwrap();
        seeder.finalize(writers.clone()).await.unwrap();
    });
    assert_eq!(writers.resumed(), 0);
    let refused = world
        .runtime
        .block_on(Seeder::open(world.parts(), world.options()))
        .unwrap_err();
    assert!(refused.to_string().contains("it runs at"), "{refused}");
}
