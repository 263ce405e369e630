//! A model of one direction of the link, without sockets and without a clock: a bottleneck that serialises packets at a
//! rate, a drop-tail queue before it, and a line with delay and loss.

use std::collections::VecDeque;
use std::time::Duration;

/// Parameters of one direction. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Rate of the bottleneck in bytes per second, IP headers included; 0 for no bottleneck.
    pub rate: u64,
    /// One-way delay of the line.
    pub delay_ns: u64,
    /// Packet loss probability on the line, 0 to 1.
    pub loss: f64,
    /// Size of the bottleneck's queue in bytes.
    pub queue_bytes: u64,
}

/// Upper bound on bytes in flight, whatever the parameters, to bound the lab's memory.
const MAX_IN_FLIGHT_BYTES: u64 = 512 << 20;

/// Packet counters; bytes include IP headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets received.
    pub packets_in: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Packets delivered.
    pub packets_out: u64,
    /// Bytes delivered.
    pub bytes_out: u64,
    /// Packets lost on the line.
    pub lost: u64,
    /// Packets dropped because the queue was full.
    pub overflowed: u64,
    /// Packets dropped because the link was cut.
    pub cut: u64,
}

/// The size of a packet on the wire; one that the kernel passes unsplit may count as several.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bytes, including the headers of every packet.
    pub bytes: u64,
    /// Number of packets.
    pub packets: u64,
}

struct InFlight<P> {
    due_ns: u64,
    size: Size,
    packet: P,
}

/// The packets in flight in one direction.
pub struct Queue<P> {
    shape: Shape,
    rng: fastrand::Rng,
    /// When the bottleneck will have sent all queued packets.
    free_ns: u64,
    in_flight: VecDeque<InFlight<P>>,
    in_flight_bytes: u64,
    counters: Counters,
}

impl<P> Queue<P> {
    /// An idle direction; the seed determines the losses.
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

    /// Accepts or drops a packet at `now_ns`.
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
        // A packet that is lost on the line has still used the bottleneck.
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

    /// One-way delay of the line.
    pub fn delay(&self) -> Duration {
        Duration::from_nanos(self.shape.delay_ns)
    }

    /// Arrival time of the next packet, if any is in flight.
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

    /// Counts a packet that was dropped because the link is cut.
    pub fn refuse(&mut self, size: Size) {
        self.counters.packets_in += size.packets;
        self.counters.bytes_in += size.bytes;
        self.counters.cut += size.packets;
    }

    /// Drops all packets in flight, because the link is cut.
    pub fn cut(&mut self) {
        self.counters.cut += self
            .in_flight
            .drain(..)
            .map(|p| p.size.packets)
            .sum::<u64>();
        self.in_flight_bytes = 0;
        self.free_ns = 0;
    }

    /// The counters so far.
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
