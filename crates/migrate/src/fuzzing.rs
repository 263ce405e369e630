//! Entry points for fuzz targets.

use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_net::Frame;

use crate::program::Target;
use crate::program::transfer::Transfer;
use crate::protocol::{MAX_FRAME, kind};

/// Frames of a program that moves, each a kind, a length of two bytes and a payload: applied or refused.
///
/// # Panics
/// When more is absent than there is.
pub fn program_frames(data: &[u8]) {
    const SIZE: u64 = (1 << 20) + 700;
    let (target, device) = Target::device(Arc::new(MemoryDevice::new(SIZE)));
    let transfer = Transfer::new(vec![target]);
    let mut rest = data;
    while let Some((&[frame, low, high], more)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([low, high]));
        let (payload, more) = more.split_at(length.min(more.len()).min(MAX_FRAME));
        rest = more;
        let payload = bytes::Bytes::copy_from_slice(payload);
        let frame = Frame {
            kind: kind::WRITE + frame % 16,
            payload,
        };
        let _ = transfer.apply(&frame);
        assert!(transfer.left() <= SIZE);
    }
    if transfer.left() == 0 {
        let mut all = vec![0; SIZE as usize];
        assert!(device.read(0, &mut all).is_ok());
    }
}
