//! One direction of the link as a model without sockets and without a clock: a bottleneck that
//! serialises packets at a rate, a queue before it that drops from the tail, a line that delays, jitters and loses.

use std::collections::VecDeque;
use std::time::Duration;

/// What a direction of the link does to packets. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Bytes a second through the bottleneck, IP headers included; 0 for no bottleneck.
    pub rate: u64,
    /// Time on the line, one way.
    pub delay_ns: u64,
    /// Greatest deviation from the delay, either way, evenly spread.
    pub jitter_ns: u64,
    /// Jitter may change the order of packets; else one that would overtake arrives with the one before it.
    pub reorder: bool,
    /// Probability of the loss of a packet on the line, 0 to 1.
    pub loss: f64,
    /// Bytes that may wait for the bottleneck.
    pub queue_bytes: u64,
}

/// Bytes that may be on the way at all, whatever the shape says: the lab's memory is bounded.
const MAX_IN_FLIGHT_BYTES: u64 = 512 << 20;

/// What became of packets; `bytes` count IP packets whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Packets that came to the link.
    pub packets_in: u64,
    /// Bytes that came to the link.
    pub bytes_in: u64,
    /// Packets that the link delivered.
    pub packets_out: u64,
    /// Bytes that the link delivered.
    pub bytes_out: u64,
    /// Packets lost on the line.
    pub lost: u64,
    /// Packets dropped because the queue was full.
    pub overflowed: u64,
    /// Packets dropped because the link was cut.
    pub cut: u64,
}

/// How much of the wire a packet takes: one that the kernel hands over in one piece may be several there.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bytes, with the headers of every packet.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
}

struct InFlight<P> {
    due_ns: u64,
    size: Size,
    packet: P,
}

/// Packets on their way in one direction.
pub struct Queue<P> {
    shape: Shape,
    rng: fastrand::Rng,
    /// When the bottleneck has sent all that waits for it.
    free_ns: u64,
    in_flight: VecDeque<InFlight<P>>,
    in_flight_bytes: u64,
    counters: Counters,
}

impl<P> Queue<P> {
    /// An idle direction; the seed fixes loss and jitter.
    pub fn new(shape: Shape, seed: u64) -> Self {
        Self {
            shape,
            rng: fastrand::Rng::with_seed(seed),
            free_ns: 0,
            in_flight: VecDeque::new(),
            in_flight_bytes: 0,
            counters: Counters::default(),
        }
    }

    /// A packet comes to the link at `now_ns`.
    pub fn offer(&mut self, now_ns: u64, size: Size, packet: P) {
        self.counters.packets_in += size.packets;
        self.counters.bytes_in += size.bytes;
        let start = self.free_ns.max(now_ns);
        let waiting = to_bytes(start - now_ns, self.shape.rate);
        let full = self.shape.rate > 0 && waiting + size.bytes > self.shape.queue_bytes;
        if full || self.in_flight_bytes + size.bytes > MAX_IN_FLIGHT_BYTES {
            self.counters.overflowed += size.packets;
            return;
        }
        // A packet that is lost on the line has taken its time at the bottleneck.
        self.free_ns = start + to_ns(size.bytes, self.shape.rate);
        if self.shape.loss > 0.0 && self.rng.f64() < self.shape.loss {
            self.counters.lost += size.packets;
            return;
        }
        let mut due_ns = self.free_ns + self.shape.delay_ns;
        if self.shape.jitter_ns > 0 {
            let jitter = self.shape.jitter_ns.min(self.shape.delay_ns);
            due_ns = due_ns - jitter + self.rng.u64(0..=2 * jitter);
        }
        if let Some(last) = self.in_flight.back().filter(|_| !self.shape.reorder) {
            due_ns = due_ns.max(last.due_ns);
        }
        self.in_flight_bytes += size.bytes;
        let arriving = InFlight {
            due_ns,
            size,
            packet,
        };
        // Nearly always at the end, or close to it.
        let later = self
            .in_flight
            .iter()
            .rev()
            .take_while(|p| p.due_ns > due_ns);
        let at = self.in_flight.len() - later.count();
        self.in_flight.insert(at, arriving);
    }

    /// Time on the line, one way.
    pub fn delay(&self) -> Duration {
        Duration::from_nanos(self.shape.delay_ns)
    }

    /// When the next packet arrives, if any is on its way.
    pub fn next_due_ns(&self) -> Option<u64> {
        self.in_flight.front().map(|p| p.due_ns)
    }

    /// The next packet that has arrived by `now_ns`.
    pub fn take(&mut self, now_ns: u64) -> Option<P> {
        if self.next_due_ns()? > now_ns {
            return None;
        }
        let arrived = self.in_flight.pop_front()?;
        self.in_flight_bytes -= arrived.size.bytes;
        self.counters.packets_out += arrived.size.packets;
        self.counters.bytes_out += arrived.size.bytes;
        Some(arrived.packet)
    }

    /// A packet comes to a link that is cut.
    pub fn refuse(&mut self, size: Size) {
        self.counters.packets_in += size.packets;
        self.counters.bytes_in += size.bytes;
        self.counters.cut += size.packets;
    }

    /// The link is cut: what is on its way is gone.
    pub fn cut(&mut self) {
        self.counters.cut += self
            .in_flight
            .drain(..)
            .map(|p| p.size.packets)
            .sum::<u64>();
        self.in_flight_bytes = 0;
        self.free_ns = 0;
    }

    /// What became of the packets so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

fn to_ns(bytes: u64, rate: u64) -> u64 {
    if rate == 0 {
        0
    } else {
        (u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64
    }
}

fn to_bytes(ns: u64, rate: u64) -> u64 {
    (u128::from(ns) * u128::from(rate) / 1_000_000_000) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const PACKET: Size = Size {
        bytes: 1500,
        packets: 1,
    };

    fn shape() -> Shape {
        // 12 Mbit/s: a packet a millisecond.
        Shape {
            rate: 1_500_000,
            delay_ns: 20 * MS,
            jitter_ns: 0,
            reorder: false,
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
    fn jitter_stays_inside_its_bounds_and_keeps_the_order() {
        let shape = Shape {
            rate: 0,
            jitter_ns: 5 * MS,
            ..shape()
        };
        let mut queue = Queue::new(shape, 3);
        let mut delays = Vec::new();
        for n in 0..500u64 {
            queue.offer(n * 50 * MS, PACKET, n);
            let due = queue.next_due_ns().unwrap();
            delays.push(due - n * 50 * MS);
            assert_eq!(queue.take(due), Some(n));
        }
        assert!(delays.iter().all(|d| (15 * MS..=25 * MS).contains(d)));
        assert!(delays.iter().max().unwrap() - delays.iter().min().unwrap() > 8 * MS);
        let mut last = 0;
        for n in 0..500u64 {
            queue.offer(n, PACKET, n);
        }
        while let Some(due) = queue.next_due_ns() {
            assert!(due >= last);
            last = due;
            queue.take(due).unwrap();
        }
    }

    #[test]
    fn packets_change_their_order_only_when_asked() {
        let order = |reorder| {
            let shape = Shape {
                rate: 0,
                jitter_ns: 5 * MS,
                reorder,
                ..shape()
            };
            let mut queue = Queue::new(shape, 3);
            (0..500u64).for_each(|n| queue.offer(n * MS / 10, PACKET, n));
            std::iter::from_fn(|| queue.take(u64::MAX)).collect::<Vec<_>>()
        };
        assert!(order(false).is_sorted());
        let mut mixed = order(true);
        assert!(!mixed.is_sorted());
        mixed.sort_unstable();
        assert_eq!(mixed, order(false));
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
}
