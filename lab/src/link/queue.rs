//! One direction of the link as a model without sockets and without a clock: a bottleneck that
//! serialises packets at a rate, a queue before it that drops from the tail, a line that delays and loses.

use std::collections::VecDeque;
use std::time::Duration;

/// What a direction of the link does to packets. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Bytes a second through the bottleneck, IP headers included; 0 for no bottleneck.
    pub rate: u64,
    /// Time on the line, one way.
    pub delay_ns: u64,
    /// Probability of the loss of a packet on the line, 0 to 1.
    pub loss: f64,
    /// Bytes that may wait for the bottleneck.
    pub queue_bytes: u64,
}

/// Bytes that may be on the way at all, whatever the shape says: the lab's memory is bounded.
const MAX_IN_FLIGHT_BYTES: u64 = 512 << 20;

/// What became of packets; `bytes` count IP packets whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// An idle direction; the seed fixes the losses.
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
        self.in_flight_bytes += size.bytes;
        self.in_flight.push_back(InFlight {
            due_ns: self.free_ns + self.shape.delay_ns,
            size,
            packet,
        });
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
mod tests;
