//! A connection from an untrusted source: frames are decoded and decompressed by the connection's
//! stream. The other half of the inputs is compressed as by a source, and must round-trip.

use drover_core::BLOCK_SIZE;
use drover_teleport::Effort;
use drover_teleport::protocol::FRAME_BLOCKS;
use drover_teleport::testing::{Literal, LiteralHeader};
use drover_teleport::testing::{Packer, Unpacker};

fn stream(mut data: &[u8]) {
    let mut unpacker = Unpacker::default();
    let mut blocks = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (frame, rest) = rest.split_at(length);
        data = rest;
        let Ok(literal) = Literal::decode(frame) else {
            continue;
        };
        let count = literal.header.runs.count() as usize;
        assert!(count > 0 && count <= FRAME_BLOCKS);
        let mut again = literal.header.encode();
        again.extend_from_slice(literal.packed);
        assert_eq!(Literal::decode(&again).as_ref(), Ok(&literal));
        blocks.resize(count * BLOCK_SIZE, 0);
        if unpacker
            .unpack(literal.header.packing, literal.packed, &mut blocks)
            .is_err()
        {
            return; // The connection ends at its first error.
        }
    }
}

fn there_and_back(data: &[u8]) {
    let (mut packer, mut unpacker) = (Packer::new(20), Unpacker::default());
    for part in data.chunks(5000) {
        let mut blocks = part.repeat(1 + part.len() % 3);
        blocks.resize(blocks.len().next_multiple_of(BLOCK_SIZE), 0);
        let mut packed = Vec::new();
        let effort = match part[0] % 4 {
            0 => Effort::None,
            1 => Effort::Lz4,
            n => Effort::Zstd(n),
        };
        let packing = packer.pack(&blocks, effort, &mut packed).expect("memory");
        let header = LiteralHeader {
            slot: 3,
            packing,
            runs: (0..(blocks.len() / BLOCK_SIZE) as u64).collect(),
        };
        let mut frame = header.encode();
        frame.extend(packed);
        let literal = Literal::decode(&frame).expect("a literal");
        let mut back = vec![0; blocks.len()];
        unpacker
            .unpack(packing, literal.packed, &mut back)
            .expect("what was packed");
        assert!(back == blocks);
    }
}

pub fn run(data: &[u8]) {
    match data.split_first() {
        Some((0, rest)) => there_and_back(rest),
        Some((_, rest)) => stream(rest),
        None => {}
    }
}
