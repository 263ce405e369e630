//! The thread that moves packets in one direction: reads from one device, lets the queue decide, writes to the other.

use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::{SyncDevice, VIRTIO_NET_HDR_LEN, VirtioNetHdr};

use super::queue::{Counters, Queue, Size};

/// While packets are under way the thread wakes this often at most: batches cost less than packets.
const TICK: Duration = Duration::from_micros(200);
/// How long an idle thread sleeps before it looks whether it shall stop.
const IDLE: Duration = Duration::from_millis(50);
/// Packets read in one go before those that are due are written.
const BATCH: usize = 128;

/// What the threads of a link share.
#[derive(Default)]
pub struct Shared {
    /// The threads end.
    pub stop: AtomicBool,
    /// Nothing passes.
    pub cut: AtomicBool,
    /// What each direction has counted, `a` to `b` first.
    pub counters: [Mutex<Counters>; 2],
}

/// Moves packets until it is stopped.
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
    // A line shorter than some ticks is timed more finely; one without delay is not batched at all.
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
                // The device is down for a moment, or gone: then the stop flag comes.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(5));
                    break;
                }
            }
        }
        while let Some(packet) = queue.take(now()) {
            // A device that takes nothing drops, as a network card would.
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

/// What is measured competes for the same cores, and a real link does not wait for them. Among the kernel's automatic
/// groups a nice value counts for little, so the thread runs in real time where that can be had.
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
    // A failed or interrupted wait is a short one.
    let _ = poll(&mut fds, Some(&timeout));
}

/// Greatest read from a TUN device: header and packet.
const MAX_READ: usize = VIRTIO_NET_HDR_LEN + 65_536;

/// The size on the wire of what was read from a device; `None` for what is no packet. The kernel hands over TCP segments of up to
/// 64 KiB that a network card would cut. The link forwards them whole, header included, and the far kernel takes them so;
/// that saves most of the work and needs no checksum.
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
        // TCP over either IP: the length of its header is in its 13th byte.
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
