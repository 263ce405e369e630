//! How much of the wire a packet takes that the kernel handed over with a virtio header: a TCP segment of up to
//! 64 KiB that a network card would cut. The link forwards it whole, header included, and the far
//! kernel takes it so; that saves most of the work and needs no checksum.

use tun_rs::{VIRTIO_NET_HDR_LEN, VirtioNetHdr};

use super::queue::Size;

/// Greatest read from a TUN device: header and packet.
pub const MAX_READ: usize = VIRTIO_NET_HDR_LEN + 65_536;

/// The size on the wire of what was read from a device; `None` for what is no packet.
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
