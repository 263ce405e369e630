//! The driver's commands and structures (`linux/ublk_cmd.h`), as bytes in native order.

/// Control commands, encoded with their structure (`UBLK_F_CMD_IOCTL_ENCODE`).
pub(super) mod command {
    const READ: u32 = 2;
    const WRITE_READ: u32 = 3;

    /// `_IOC(direction, 'u', number, size)`.
    const fn encode(direction: u32, number: u32, size: u32) -> u32 {
        direction << 30 | size << 16 | (b'u' as u32) << 8 | number
    }

    pub(in super::super) const GET_DEV_INFO: u32 = encode(READ, 0x02, 32);
    pub(in super::super) const ADD_DEV: u32 = encode(WRITE_READ, 0x04, 32);
    pub(in super::super) const DEL_DEV: u32 = encode(WRITE_READ, 0x05, 32);
    pub(in super::super) const START_DEV: u32 = encode(WRITE_READ, 0x06, 32);
    pub(in super::super) const STOP_DEV: u32 = encode(WRITE_READ, 0x07, 32);
    pub(in super::super) const SET_PARAMS: u32 = encode(WRITE_READ, 0x08, 32);
    pub(in super::super) const GET_FEATURES: u32 = encode(READ, 0x13, 32);

    pub(in super::super) const FETCH_REQ: u32 = encode(WRITE_READ, 0x20, 16);
    pub(in super::super) const COMMIT_AND_FETCH_REQ: u32 = encode(WRITE_READ, 0x21, 16);
}

/// Commands carry the size of their structure.
pub(super) const FEATURE_IOCTL_ENCODE: u64 = 1 << 6;
/// Data is copied by reading and writing the character device, on any thread.
pub(super) const FEATURE_USER_COPY: u64 = 1 << 7;

/// The driver chooses the number.
pub(super) const ANY_DEVICE: u32 = u32::MAX;
/// The queue of a command for the whole device.
const NO_QUEUE: u16 = u16::MAX;

/// `ublksrv_ctrl_cmd`, in the 80 command bytes of a 128-byte entry.
pub(super) fn control_command(device: u32, buffer: u64, length: u16, data: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[0..4].copy_from_slice(&device.to_ne_bytes());
    bytes[4..6].copy_from_slice(&NO_QUEUE.to_ne_bytes());
    bytes[6..8].copy_from_slice(&length.to_ne_bytes());
    bytes[8..16].copy_from_slice(&buffer.to_ne_bytes());
    bytes[16..24].copy_from_slice(&data.to_ne_bytes());
    bytes
}

/// `ublksrv_io_cmd`: fetch a request for a tag, with the result of the previous one.
pub(super) fn io_command(queue: u16, tag: u16, result: i32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes
}

/// `ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Info {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) longest: u32,
    pub(super) device: u32,
    pub(super) features: u64,
    /// For the server's own use; the driver keeps it.
    pub(super) token: u64,
}

impl Info {
    pub(super) const SIZE: usize = 64;

    pub(super) fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[0..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.longest.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.device.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.features.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.token.to_ne_bytes());
        bytes
    }

    /// `None` when there are too few bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::SIZE] = bytes.get(..Self::SIZE)?.try_into().ok()?;
        Some(Self {
            queues: u16_at(bytes, 0)?,
            depth: u16_at(bytes, 2)?,
            longest: u32_at(bytes, 8)?,
            device: u32_at(bytes, 12)?,
            features: u64_at(bytes, 24)?,
            token: u64_at(bytes, 32)?,
        })
    }
}

/// The contents of `ublk_params`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Params {
    pub(super) read_only: bool,
    /// Bytes, all four powers of two.
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    pub(super) preferred: u32,
    pub(super) longest: u32,
    pub(super) size: u64,
    /// Bytes of one discard; 0: none.
    pub(super) longest_discard: u32,
    /// Bytes zeroed at once; 0: none.
    pub(super) longest_zeroes: u32,
}

impl Params {
    const SIZE: usize = 112;
    const TYPE_BASIC: u32 = 1 << 0;
    const TYPE_DISCARD: u32 = 1 << 1;
    const READ_ONLY: u32 = 1 << 0;
    const VOLATILE_CACHE: u32 = 1 << 2;
    const FUA: u32 = 1 << 3;

    pub(super) fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let shift = |size: u32| [u8::try_from(size.trailing_zeros()).unwrap_or(0)];
        let length = u32::try_from(Self::SIZE).unwrap_or(0);
        put(0, &length.to_ne_bytes());
        // Basic. Every device has a volatile write cache.
        let mut attributes = Self::VOLATILE_CACHE | Self::FUA;
        if self.read_only {
            attributes |= Self::READ_ONLY;
        }
        put(8, &attributes.to_ne_bytes());
        put(12, &shift(self.logical_block));
        put(13, &shift(self.physical_block));
        put(14, &shift(self.preferred));
        put(15, &shift(self.physical_block));
        put(16, &(self.longest / 512).to_ne_bytes());
        put(24, &(self.size / 512).to_ne_bytes());
        let mut types = Self::TYPE_BASIC;
        if self.longest_discard > 0 || self.longest_zeroes > 0 {
            types |= Self::TYPE_DISCARD;
            put(44, &self.physical_block.to_ne_bytes()); // granularity
            put(48, &(self.longest_discard / 512).to_ne_bytes());
            put(52, &(self.longest_zeroes / 512).to_ne_bytes());
            put(56, &1u16.to_ne_bytes()); // segments
        }
        put(4, &types.to_ne_bytes());
        bytes
    }
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write { through: bool },
    Flush,
    Discard,
    WriteZeroes { keep_allocated: bool },
    Unknown,
}

/// A request, from `ublksrv_io_desc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) operation: Operation,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Descriptor {
    pub(super) const SIZE: usize = 24;
    const FUA: u32 = 1 << 13;
    const NO_UNMAP: u32 = 1 << 15;

    /// `None` if the position overflows 64 bits.
    pub(super) fn decode(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let flags = u32_at(bytes, 0)?;
        let operation = match flags & 0xff {
            0 => Operation::Read,
            1 => Operation::Write {
                through: flags & Self::FUA != 0,
            },
            2 => Operation::Flush,
            3 => Operation::Discard,
            5 => Operation::WriteZeroes {
                keep_allocated: flags & Self::NO_UNMAP != 0,
            },
            _ => Operation::Unknown,
        };
        if operation == Operation::Flush {
            // The kernel sets an invalid position.
            return Some(Self {
                operation,
                offset: 0,
                length: 0,
            });
        }
        Some(Self {
            operation,
            length: u64::from(u32_at(bytes, 4)?) * 512,
            offset: u64_at(bytes, 8)?.checked_mul(512)?,
        })
    }
}

/// Offset of a queue's descriptors in the mapping: each queue has room for the maximum depth.
pub(super) fn descriptors_at(queue: u16) -> u64 {
    const DEEPEST: usize = 4096;
    u64::from(queue) * (DEEPEST * Descriptor::SIZE).next_multiple_of(4096) as u64
}

/// Offset of a request's data in the character device.
pub(super) fn data_at(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + (u64::from(queue) << 41) + (u64::from(tag) << 25)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
