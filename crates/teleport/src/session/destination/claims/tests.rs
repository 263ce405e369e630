use std::collections::VecDeque;

use super::*;

/// Blocks that are simulated as one.
const UNIT: u64 = 16;

/// Units of a batch.
const BATCH: usize = 2048 / UNIT as usize;

/// A simulated image that a node receives. Its first units are those that all images have.
struct Image {
    pace: Pace,
    /// The first unit that is not claimed.
    next: usize,
    /// What it has requested, and from when on that can come.
    asked: VecDeque<(Duration, usize)>,
    came: u64,
    /// What it has, and what it waits for from others.
    here: usize,
    waits: Vec<usize>,
}

/// Nodes that receive a flock, two images each, over a link of their own: the units that came over each, how many a fair share would
/// be, and by how much it took longer than those of the busiest link.
fn receive(seed: u64, nodes: usize) -> (Vec<u64>, u64, f64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rate = [3200, 16_000, 64_000][rng.usize(0..3)];
    let trip = Duration::from_millis([2, 40, 120][rng.usize(0..3)]);
    let common = BATCH * rng.usize(12..24);
    let length = common + BATCH * rng.usize(2..5);
    let image = || Image {
        pace: Pace::default(),
        next: 0,
        asked: VecDeque::new(),
        came: 0,
        here: 0,
        waits: Vec::new(),
    };
    let mut all = Vec::from_iter((0..2 * nodes).map(|_| image()));
    let (mut claimed, mut there) = (vec![false; common], vec![false; common]);
    let mut got = vec![0u64; nodes];
    let (tick, start, mut now) = (Duration::from_millis(5), Instant::now(), Duration::ZERO);
    for turn in 1.. {
        if all.iter().all(|image| image.here == length) {
            break;
        }
        now += tick;
        assert!(now < Duration::from_secs(3600), "seed {seed}: no end");
        for node in 0..nodes {
            let mut room = rate / UNIT * tick.as_millis() as u64 / 1000;
            // The second once the first has claimed all that it has.
            let second = all[node].next == length;
            for i in [Some(node), second.then_some(node + nodes)]
                .into_iter()
                .flatten()
            {
                let image = &mut all[i];
                while image.next < length {
                    let coming = image.asked.len() as u64 * UNIT;
                    if !image.pace.may(start + now, image.came * UNIT, coming) {
                        break;
                    }
                    let end = (image.next + BATCH).min(length);
                    for unit in image.next..end {
                        match (claimed.get_mut(unit), there.get(unit)) {
                            (Some(_), Some(true)) => image.here += 1,
                            (Some(true), _) => image.waits.push(unit),
                            (Some(new), _) => {
                                *new = true;
                                image.asked.push_back((now + trip, unit));
                            }
                            (None, _) => image.asked.push_back((now + trip, unit)),
                        }
                    }
                    image.next = end;
                }
                while room > 0
                    && let Some((_, unit)) = image.asked.pop_front_if(|(from, _)| *from <= now)
                {
                    room -= 1;
                    got[node] += 1;
                    image.came += 1;
                    image.here += 1;
                    if let Some(there) = there.get_mut(unit) {
                        assert!(!*there, "seed {seed}: {unit} was sent twice");
                        *there = true;
                    }
                }
                if turn % 20 == 0 {
                    let before = image.waits.len();
                    image.waits.retain(|unit| !there[*unit]);
                    image.here += before - image.waits.len();
                }
            }
        }
    }
    let unique = common + 2 * nodes * (length - common);
    assert_eq!(got.iter().sum::<u64>(), unique as u64, "seed {seed}");
    let busiest = *got.iter().max().unwrap() * UNIT;
    let took = now.as_secs_f64() - 4.0 * trip.as_secs_f64();
    (
        got,
        (unique / nodes) as u64,
        took * rate as f64 / busiest as f64,
    )
}

#[test]
fn nodes_take_turns_at_what_images_have_in_common() {
    for seed in 0..24 {
        for nodes in [2, 4] {
            let (got, fair, took) = receive(seed, nodes);
            // None gets much more than its share: some batches, and what came ahead.
            let most = fair * 5 / 4 + 2 * BATCH as u64;
            assert!(
                got.iter().all(|n| *n <= most),
                "seed {seed}: {fair}, {got:?}"
            );
            // And no link is idle for long.
            assert!(took < 1.25, "seed {seed}, {nodes} nodes: {took}");
        }
    }
}

#[test]
fn what_is_claimed_ahead_follows_what_comes() {
    let (mut pace, start) = (Pace::default(), Instant::now());
    let at = |ms| start + Duration::from_millis(ms);
    assert!(pace.may(at(0), 0, MIN_AHEAD - 1) && !pace.may(at(0), 0, MIN_AHEAD));
    // 10,000 blocks a second: half a second of them.
    assert!(!pace.may(at(200), 2000, 5000));
    assert!(pace.may(at(210), 2000, 4999));
    // It has stalled.
    assert!(!pace.may(at(2000), 2000, 4999));
    assert!(pace.may(at(2001), 2000, MIN_AHEAD - 1));
}
