//! Tests of the queue model, packet by packet.

use super::*;

const MS: u64 = 1_000_000;
const PACKET: Size = Size {
    bytes: 1500,
    packets: 1,
};

fn shape() -> Shape {
    // 12 Mbit/s: one packet per millisecond.
    Shape {
        rate: 1_500_000,
        delay_ns: 20 * MS,
        loss: 0.0,
        queue_bytes: 15_000,
    }
}

#[test]
fn a_lone_packet_takes_its_serialisation_and_the_delay() {
    let mut queue = Queue::new(shape(), 1);
    queue.offer(5 * MS, PACKET, 'a');
    assert_eq!(queue.next_due_ns(), Some(26 * MS));
    assert_eq!(queue.take(26 * MS - 1), None);
    assert_eq!(queue.take(26 * MS), Some('a'));
    assert_eq!(queue.next_due_ns(), None);
}

#[test]
fn a_burst_leaves_at_the_rate_and_the_tail_is_dropped() {
    let mut queue = Queue::new(shape(), 1);
    for n in 0..20 {
        queue.offer(0, PACKET, n);
    }
    let mut arrived = Vec::new();
    for ms in 0..100 {
        while let Some(n) = queue.take(ms * MS) {
            arrived.push((n, ms));
        }
    }
    assert_eq!(
        arrived,
        (0..10).map(|n| (n, 21 + n as u64)).collect::<Vec<_>>()
    );
    let counters = queue.counters();
    assert_eq!(
        (
            counters.overflowed,
            counters.packets_out,
            counters.bytes_out
        ),
        (10, 10, 15_000)
    );
}

#[test]
fn a_steady_overload_is_delivered_at_the_rate() {
    let mut queue = Queue::new(shape(), 1);
    let mut out = 0;
    for step in 0..10_000u64 {
        // Twice the rate for five seconds.
        queue.offer(step * MS / 2, PACKET, ());
        while queue.take(step * MS / 2).is_some() {
            out += 1;
        }
    }
    assert!((4950..=5000).contains(&out), "{out}");
}

#[test]
fn loss_is_as_asked_and_a_seed_repeats_it() {
    let run = |seed| {
        let lossy = Shape {
            rate: 0,
            loss: 0.02,
            ..shape()
        };
        let mut queue = Queue::new(lossy, seed);
        (0..50_000u64).for_each(|n| {
            queue.offer(n, PACKET, n);
            while queue.take(n).is_some() {}
        });
        queue.counters().lost
    };
    assert!((900..1100).contains(&run(7)), "{}", run(7));
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn a_cut_loses_what_is_under_way() {
    let mut queue = Queue::new(shape(), 1);
    queue.offer(0, PACKET, 'a');
    queue.cut();
    queue.refuse(PACKET);
    assert_eq!(queue.take(u64::MAX), None);
    assert_eq!(queue.counters().cut, 2);
    queue.offer(30 * MS, PACKET, 'b');
    assert_eq!(queue.take(51 * MS), Some('b'));
}

#[test]
fn no_rate_means_no_bottleneck() {
    let mut queue = Queue::new(Shape { rate: 0, ..shape() }, 1);
    for n in 0..1000 {
        queue.offer(0, PACKET, n);
    }
    assert_eq!(
        (0..1000).filter(|_| queue.take(20 * MS).is_some()).count(),
        1000
    );
    assert_eq!(queue.counters().overflowed, 0);
}
