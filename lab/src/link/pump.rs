//! The thread that forwards packets in one direction: it reads from one device, passes them through the queue model,
//! and writes to the other.

use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::{SyncDevice, VIRTIO_NET_HDR_LEN, VirtioNetHdr};

use super::queue::{Counters, Queue, Size};

/// Minimum interval between wakeups while packets are in flight: batches cost less than single packets.
const TICK: Duration = Duration::from_micros(200);
/// Interval at which an idle thread checks the stop flag.
const IDLE: Duration = Duration::from_millis(50);
/// Upper bound on packets read before due ones are written.
const BATCH: usize = 128;

/// State shared by the threads of a link.
#[derive(Default)]
pub struct Shared {
    /// Ends the threads.
    pub stop: AtomicBool,
    /// The link is cut.
    pub cut: AtomicBool,
    /// Counters per direction, `a` to `b` first.
    pub counters: [Mutex<Counters>; 2],
}

/// Forwards packets until stopped.
pub fn run(
    from: &SyncDevice,
    to: &SyncDevice,
    mut queue: Queue<Box<[u8]>>,
    shared: &Arc<Shared>,
    direction: usize,
) {
    hurry();
    let epoch = Instant::now();
    let now = || epoch.elapsed().as_nanos() as u64;
    // A line with a short delay is timed more finely; one without delay is not batched at all.
    let tick = TICK.min(queue.delay() / 10);
    let mut buffer = vec![0; MAX_READ];
    let mut was_cut = false;
    while !shared.stop.load(Ordering::Relaxed) {
        let cut = shared.cut.load(Ordering::Relaxed);
        if cut && !was_cut {
            queue.cut();
        }
        was_cut = cut;
        let mut read = 0;
        while read < BATCH {
            match from.recv(&mut buffer) {
                Ok(len) => {
                    read += 1;
                    let Some(size) = wire_size(&buffer[..len]) else {
                        continue;
                    };
                    if cut {
                        queue.refuse(size);
                    } else {
                        queue.offer(now(), size, buffer[..len].into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The device is down for a moment, or gone; in the latter case the stop flag follows.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(5));
                    break;
                }
            }
        }
        while let Some(packet) = queue.take(now()) {
            // A device whose buffer is full drops packets, as a network card would.
            let _ = to.send(&packet);
        }
        if let Ok(mut counters) = shared.counters[direction].lock() {
            *counters = queue.counters();
        }
        if read == BATCH {
            continue;
        }
        match queue.next_due_ns() {
            Some(_) if !tick.is_zero() && read > 0 => std::thread::sleep(tick),
            Some(due) => {
                let wait = Duration::from_nanos(due.saturating_sub(now()));
                wait_readable(from, wait.max(tick).min(IDLE));
            }
            None => wait_readable(from, IDLE),
        }
    }
}

/// Requests real-time scheduling: the measured programs compete for the same cores, and a real link does not wait for
/// them. A nice value has little effect across the kernel's automatic task groups.
fn hurry() {
    let _ = rustix::process::setpriority_process(None, -15);
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let _ = Command::new("chrt")
        .args(["--rr", "--pid", "1", &thread])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

fn wait_readable(device: &SyncDevice, timeout: Duration) {
    let timeout = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    let mut fds = [PollFd::new(device, PollFlags::IN)];
    // A failed or interrupted wait is just shorter.
    let _ = poll(&mut fds, Some(&timeout));
}

/// Upper bound on a read from a TUN device: header and packet.
const MAX_READ: usize = VIRTIO_NET_HDR_LEN + 65_536;

/// The size on the wire of data read from a device; `None` if it is not a packet. The kernel passes TCP segments of up
/// to 64 KiB that a network card would split (GSO). The link forwards them unsplit, with their header, and the
/// receiving kernel accepts them; that saves most of the work and needs no checksums.
pub fn wire_size(read: &[u8]) -> Option<Size> {
    let header = VirtioNetHdr::decode(read).ok()?;
    let packet = &read[VIRTIO_NET_HDR_LEN..];
    let whole = Size {
        bytes: packet.len() as u64,
        packets: 1,
    };
    if packet.is_empty() {
        return None;
    }
    if header.gso_type == 0 || header.gso_size == 0 {
        return Some(whole);
    }
    let start = usize::from(header.csum_start);
    let transport = match header.gso_type & 0x7f {
        // TCP over IPv4 or IPv6: the length of its header is in its 13th byte.
        1 | 4 => usize::from(packet.get(start + 12)? >> 4) * 4,
        _ => 8,
    };
    let headers = (start + transport) as u64;
    let payload = whole.bytes.checked_sub(headers)?;
    let packets = payload.div_ceil(u64::from(header.gso_size)).max(1);
    Some(Size {
        bytes: payload + packets * headers,
        packets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(gso_type: u8, gso_size: u16, len: usize) -> Vec<u8> {
        let header = VirtioNetHdr {
            flags: 1,
            gso_type,
            hdr_len: 52,
            gso_size,
            csum_start: 20,
            csum_offset: 16,
        };
        let mut bytes = vec![0; VIRTIO_NET_HDR_LEN + len];
        header.encode(&mut bytes).unwrap();
        if len > 32 {
            bytes[VIRTIO_NET_HDR_LEN + 32] = 8 << 4;
        }
        bytes
    }

    #[test]
    fn a_segment_counts_as_the_packets_it_is_on_the_wire() {
        let size = wire_size(&read(1, 1448, 52 + 4 * 1448)).unwrap();
        assert_eq!((size.packets, size.bytes), (4, 4 * 1500));
        let size = wire_size(&read(1, 1448, 52 + 1449)).unwrap();
        assert_eq!((size.packets, size.bytes), (2, 1449 + 104));
    }

    #[test]
    fn a_plain_packet_is_one_and_rubbish_is_none() {
        let size = wire_size(&read(0, 0, 84)).unwrap();
        assert_eq!((size.packets, size.bytes), (1, 84));
        assert!(wire_size(&[0; 4]).is_none());
        assert!(wire_size(&read(0, 0, 0)).is_none());
        assert!(wire_size(&read(1, 1448, 20)).is_none());
        assert!(wire_size(&read(1, 1448, 40)).is_none());
    }
}
