//! What a peer must not be able to do: frames and calls that no seeder or leecher sends.

use std::sync::Arc;

use bytes::Bytes;
use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_net::{Frame, encode};

use super::super::protocol::{Left, MAX_RUNS, MAX_STATE, kind};
use super::super::target::Target;
use super::super::transfer::Transfer;
use crate::protocol::{Coding, WriteHead, kind as disk};

fn transfer() -> (Arc<Transfer>, Arc<dyn BlockDevice>) {
    let (target, device) = Target::device(Arc::new(MemoryDevice::new(10_000)));
    (Transfer::new(vec![target]), device)
}

fn frame(kind: u8, payload: impl Into<Bytes>) -> Frame {
    Frame {
        kind,
        payload: payload.into(),
    }
}

fn left(part: u32, runs: Vec<(u32, u32)>) -> Frame {
    frame(kind::LEFT, encode(&Left { part, runs }))
}

fn write(offset: u64, length: u64) -> Frame {
    let coding = Coding::Plain;
    let head = WriteHead {
        disk: 0,
        offset,
        length,
        coding,
    };
    frame(
        disk::WRITE,
        [encode(&head), vec![7; length as usize]].concat(),
    )
}

#[test]
fn what_is_out_of_bounds_is_refused() {
    let (transfer, _device) = transfer();
    let refused = |frame: Frame| transfer.apply(&frame).is_err();
    assert!(refused(left(1, vec![(0, 1)])));
    assert!(refused(left(0, vec![(0, 0)])));
    assert!(refused(left(0, vec![(0, 4)])));
    assert!(refused(left(0, vec![(u32::MAX, u32::MAX)])));
    assert!(refused(left(0, vec![(0, 1); MAX_RUNS + 1])));
    assert!(refused(frame(kind::LEFT, vec![0xff; 40])));
    assert!(refused(frame(kind::STATE, vec![0; MAX_STATE + 1])));
    assert!(refused(frame(kind::WANT, vec![])));
    assert!(refused(write(9_999, 2)));
    assert!(!refused(write(9_998, 2)));
    assert_eq!(transfer.left(), 0);
    assert!(!refused(left(0, vec![(1, 2)])));
    assert_eq!(transfer.left(), 10_000 - 4096);
}

#[test]
fn a_round_after_what_is_left_was_named_is_refused_and_not_waited_for() {
    let (transfer, _device) = transfer();
    transfer.apply(&left(0, vec![(1, 1)])).unwrap();
    assert!(transfer.apply(&write(0, 5000)).is_err());
    assert!(transfer.apply(&write(0, 4096)).is_err());
    assert_eq!(transfer.left(), 4096);
}

#[test]
fn nothing_that_was_named_or_said_is_changed_afterwards() {
    let (transfer, device) = transfer();
    let apply = |frame: Frame| transfer.apply(&frame);
    apply(write(0, 4096)).unwrap();
    apply(left(0, vec![(1, 1)])).unwrap();
    apply(frame(kind::STATE, b"first".to_vec())).unwrap();
    assert!(apply(frame(kind::STATE, b"second".to_vec())).is_err());
    assert!(apply(left(0, vec![(0, 1)])).is_err());
    assert_eq!(transfer.take_state(), b"first");
    // The program runs: what it has is not written over, and parts of blocks do not come.
    device.write(4096, &[1; 4096]).unwrap();
    apply(write(0, 8192)).unwrap();
    let mut found = [0; 2];
    device.read(4095, &mut found).unwrap();
    assert_eq!(found, [7, 1]);
    assert!(apply(write(1, 2)).is_err());
}
