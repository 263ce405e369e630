//! The window against a link of a given rate and delay, frame by frame in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

/// One way of a link: bytes wait for those before them.
struct Link {
    rate: f64,
    delay: f64,
    free_at: f64,
}

struct Outcome {
    /// Bytes a second, after the start.
    rate: f64,
    /// The longest queue after the start, in seconds.
    queue: f64,
    /// When it first had nine tenths of the link.
    full_at: f64,
    window: Window,
}

const FRAME: f64 = 32_768.0;

/// Sends for `seconds` over a link whose rate is `rate(t)`; `noise` seconds at most are added to each arrival.
fn run(rate: &dyn Fn(f64) -> f64, trip: f64, seconds: f64, noise: f64, settle: f64) -> Outcome {
    let mut random = fastrand::Rng::with_seed(7);
    let mut window = Window::receiving(None, FRAME as u64);
    let mut link = Link {
        rate: rate(0.0),
        delay: trip / 2.0,
        free_at: 0.0,
    };
    // Arrivals, and permissions on their way back: (time, order, event).
    let mut events: BinaryHeap<Reverse<(u64, u64, usize)>> = BinaryHeap::new();
    let mut marks: Vec<(u64, Mark)> = vec![(window.size(), window.mark(Duration::ZERO))];
    let mut sent_with: Vec<usize> = Vec::new();
    let (mut order, mut sent, mut acked) = (0u64, 0u64, 0u64);
    let (mut got, mut queue, mut full_at) = (0.0, 0.0f64, f64::MAX);
    let (mut last_look, mut last_got) = (0.0, 0u64);
    let ns = |t: f64| (t * 1e9) as u64;
    // The first permission travels, too.
    let mut now = trip / 2.0;
    let mut allowed = 0usize;
    loop {
        while sent - acked + FRAME as u64 <= marks[allowed].0 || sent == acked {
            link.rate = rate(now);
            link.free_at = link.free_at.max(now) + FRAME / link.rate;
            if now > settle {
                queue = queue.max(link.free_at - now - FRAME / link.rate);
            }
            let at = link.free_at + link.delay + random.f64() * noise;
            sent += FRAME as u64;
            sent_with.push(allowed);
            events.push(Reverse((ns(at), order, 2 * (sent_with.len() - 1))));
            order += 1;
        }
        let Reverse((at, _, event)) = events.pop().expect("something is under way");
        now = at as f64 / 1e9;
        if now > seconds {
            break;
        }
        if event % 2 == 0 {
            window.arrived(FRAME as u64);
            let mark = marks[sent_with[event / 2]].1;
            window.sample(
                Duration::from_nanos(at),
                mark,
                0,
                FRAME as u64,
                SampleContext::default(),
            );
            if now > settle {
                got += FRAME;
            }
            if now - last_look >= 0.1 {
                let lately = (window.arrived - last_got) as f64 / (now - last_look);
                (last_look, last_got) = (now, window.arrived);
                if full_at == f64::MAX && lately >= 0.9 * rate(now) {
                    full_at = now;
                }
            }
            marks.push((window.size(), window.mark(Duration::from_nanos(at))));
            let back = at + ns(trip / 2.0);
            events.push(Reverse((back, order, 2 * (marks.len() - 1) + 1)));
            order += 1;
        } else {
            acked += FRAME as u64;
            allowed = allowed.max(event / 2);
        }
    }
    Outcome {
        rate: got / (seconds - settle),
        queue,
        full_at,
        window,
    }
}

const GIGABIT: f64 = 125e6;

#[test]
fn it_fills_the_link_and_leaves_no_queue() {
    for (rate, trip) in [
        (GIGABIT, 0.04),
        (GIGABIT, 0.01),
        (GIGABIT, 0.001),
        (GIGABIT, 0.0002),
        (GIGABIT / 10.0, 0.04),
        (GIGABIT / 10.0, 0.005),
        (GIGABIT * 10.0, 0.02),
    ] {
        let out = run(&|_| rate, trip, 4.0, 0.0, 1.5);
        assert!(
            out.rate >= 0.96 * rate,
            "{rate} B/s, {trip} s: {}",
            out.rate
        );
        // The least window is a few frames, which a slow link takes a while for.
        let most = 0.0045 + (RECEIVING.least as f64) / rate;
        assert!(out.queue < most, "{rate} B/s, {trip} s: {}", out.queue);
        assert!(out.full_at < 1.0, "{rate} B/s, {trip} s: {}", out.full_at);
        let seen = out.window.round_trip().unwrap().as_secs_f64();
        assert!(
            (seen - trip).abs() < 0.003 + trip * 0.05,
            "{seen} of {trip}"
        );
    }
}

#[test]
fn it_is_tcp_that_the_link_waits_for_at_the_start() {
    // Two connections of ten segments each, twice as much each round trip.
    for trip in [0.04, 0.02] {
        let slow_start = |t: f64| GIGABIT.min(28_960.0 * (t / trip).exp2() / trip);
        let out = run(&slow_start, trip, 4.0, 0.0, 2.0);
        let least = trip * (GIGABIT * trip / 28_960.0).log2();
        assert!(
            out.full_at < least + 0.45,
            "full after {} s of {least}",
            out.full_at
        );
        assert!(out.rate >= 0.96 * GIGABIT, "{}", out.rate);
        assert!(out.queue < 0.006, "{}", out.queue);
    }
}

#[test]
fn the_round_trip_is_not_short_after_a_slow_start() {
    for (rate, trip) in [
        (GIGABIT / 10.0, 0.04),
        (GIGABIT / 2.5, 0.04),
        (GIGABIT / 50.0, 0.04),
        (GIGABIT / 10.0, 0.1),
    ] {
        let slow_start = |t: f64| rate.min(28_960.0 * (t / trip).exp2() / trip);
        for noise in [0.0, 0.004] {
            // The round trip counts for ten seconds, so one that is too short would be seen by then.
            let out = run(&slow_start, trip, 8.0, noise, 3.0);
            let seen = out.window.round_trip().unwrap().as_secs_f64();
            assert!(
                seen > 0.97 * trip,
                "{rate} B/s, {trip} s, noise {noise}: {seen}"
            );
            assert!(out.rate >= 0.95 * rate, "{rate} B/s: {}", out.rate);
        }
    }
}

#[test]
fn jitter_does_not_starve_it() {
    let out = run(&|_| GIGABIT, 0.04, 5.0, 0.002, 1.5);
    assert!(out.rate >= 0.95 * GIGABIT, "{}", out.rate);
    assert!(out.queue < 0.006, "{}", out.queue);
}

#[test]
fn it_follows_a_link_that_changes() {
    let down = |t: f64| if t < 2.0 { GIGABIT } else { GIGABIT / 4.0 };
    let out = run(&down, 0.04, 6.0, 0.0, 4.0);
    assert!(out.rate >= 0.96 * GIGABIT / 4.0, "{}", out.rate);
    assert!(out.queue < 0.006, "{}", out.queue);
    let up = |t: f64| if t < 2.0 { GIGABIT / 4.0 } else { GIGABIT };
    let out = run(&up, 0.04, 8.0, 0.0, 5.0);
    assert!(out.rate >= 0.96 * GIGABIT, "{}", out.rate);
}

#[test]
fn the_round_trip_does_not_creep_up() {
    let out = run(&|_| GIGABIT / 4.0, 0.01, 40.0, 0.0, 2.0);
    let seen = out.window.round_trip().unwrap().as_secs_f64();
    assert!(seen < 0.0115, "{seen} of 0.01");
    assert!(out.rate >= 0.96 * GIGABIT / 4.0, "{}", out.rate);
}

#[test]
fn it_follows_a_path_that_becomes_longer() {
    // A longer way is not a queue, and making the window smaller does not make it shorter.
    let mut window = Window::receiving(None, FRAME as u64);
    let mut at = 0.0;
    for round in 0..200 {
        let trip = if round < 50 { 0.01 } else { 0.04 };
        let mark = window.mark(Duration::from_secs_f64(at));
        at += trip;
        let size = window.size().min((GIGABIT * trip) as u64);
        window.arrived(size);
        window.sample(
            Duration::from_secs_f64(at),
            mark,
            0,
            0,
            SampleContext::default(),
        );
    }
    assert!(
        window.size() as f64 >= 0.9 * GIGABIT * 0.04,
        "{}",
        window.size()
    );
}

#[test]
fn little_to_send_says_nothing_about_the_link() {
    let mut window = Window::receiving(None, FRAME as u64);
    let ms = Duration::from_millis;
    let little = SampleContext {
        limited: true,
        ..SampleContext::default()
    };
    for n in 0..100 {
        let mark = window.mark(ms(n * 10));
        window.arrived(4096);
        window.sample(ms(n * 10 + 5), mark, 0, 4096, little);
    }
    assert_eq!(window.size(), RECEIVING.first);
    assert_eq!(window.round_trip(), Some(ms(5)));
}

#[test]
fn a_fixed_number_is_kept() {
    let mut window = Window::receiving(Some(1 << 20), FRAME as u64);
    for n in 0..50 {
        let mark = window.mark(Duration::from_millis(n));
        window.arrived(100_000);
        window.sample(
            Duration::from_millis(n + 1),
            mark,
            0,
            100_000,
            SampleContext::default(),
        );
    }
    assert_eq!(window.size(), 1 << 20);
}
