//! The header file of a directory device: its size and chunk size, with a checksum.

use std::io;

use drover_core::DeviceError;

use crate::remote::Shape;
use drover_storage::{Access, Directory, Lock, read_exact_at, replace};

/// The most chunks of a device, which bounds the memory it takes. A larger device needs larger chunks.
pub const MAX_CHUNKS: u64 = 1 << 22;

pub(super) const NAME: &str = "header";
const NEW: &str = "header.new";
const LOCK: &str = "lock";

const MAGIC: [u8; 8] = *b"DRVRDIR\0";
const VERSION: u32 = 1;
/// Magic, version, chunk, size, CRC-32C of the preceding bytes.
const LENGTH: usize = 8 + 4 + 4 + 8 + 4;

/// An error that names the file.
pub(super) fn at(directory: &dyn Directory, name: &str, error: &io::Error) -> DeviceError {
    let text = format!("{}: {error}", directory.describe(name));
    io::Error::new(error.kind(), text).into()
}

fn damaged(directory: &dyn Directory, what: &str) -> DeviceError {
    DeviceError::Corrupt(format!("{}: {what}", directory.describe(NAME)))
}

pub(super) fn lock(
    directory: &dyn Directory,
    kind: Lock,
) -> Result<Box<dyn Send + Sync>, DeviceError> {
    directory
        .lock(LOCK, kind)
        .map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => DeviceError::Unavailable(format!(
                "{}: another process has the device open",
                directory.describe(LOCK)
            )),
            _ => at(directory, LOCK, &error),
        })
}

fn is_possible(shape: Shape) -> bool {
    shape.chunk.is_power_of_two() && shape.chunk >= 4096 && shape.chunks() <= MAX_CHUNKS
}

fn crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn encode(shape: Shape) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LENGTH);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&shape.chunk.to_le_bytes());
    bytes.extend_from_slice(&shape.size.to_le_bytes());
    bytes.extend_from_slice(&crc(&bytes).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8; LENGTH]) -> Result<Shape, &'static str> {
    let number = |at: usize| {
        let mut four = [0; 4];
        four.copy_from_slice(&bytes[at..at + 4]);
        u32::from_le_bytes(four)
    };
    if bytes[..8] != MAGIC {
        return Err("not the header of a device in a directory");
    }
    // A fuzzer need not guess it.
    if number(24) != crc(&bytes[..24]) && !cfg!(fuzzing) {
        return Err("the checksum is wrong");
    }
    if number(8) != VERSION {
        return Err("written by a newer version of this program");
    }
    let shape = Shape {
        chunk: number(12),
        size: u64::from(number(16)) | u64::from(number(20)) << 32,
    };
    match is_possible(shape) {
        true => Ok(shape),
        false => Err("no device has this size and chunk"),
    }
}

/// Whether a device of that shape can be made here.
pub(super) fn check_new(directory: &dyn Directory, shape: Shape) -> Result<(), DeviceError> {
    if !is_possible(shape) {
        return Err(DeviceError::Unsupported(
            "have this shape: a chunk is a power of two of at least 4096 bytes, and there are at most 4194304 chunks"
                .into(),
        ));
    }
    let names = directory.list().map_err(|e| at(directory, NAME, &e))?;
    if let Some(name) = names.iter().find(|name| ![NEW, LOCK].contains(&&***name)) {
        let exists = io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the directory is not empty, or is a device already",
        );
        return Err(at(directory, name, &exists));
    }
    Ok(())
}

/// Writes the header of a new device.
pub(super) fn create(directory: &dyn Directory, shape: Shape) -> Result<(), DeviceError> {
    check_new(directory, shape)?;
    replace(directory, NEW, NAME, &encode(shape)).map_err(|error| at(directory, NAME, &error))
}

pub(super) fn read(directory: &dyn Directory) -> Result<Shape, DeviceError> {
    let file = directory
        .open(NAME, Access::Read)
        .map_err(|error| at(directory, NAME, &error))?;
    let length = file.len().map_err(|error| at(directory, NAME, &error))?;
    if length != LENGTH as u64 {
        return Err(damaged(directory, "the length is wrong"));
    }
    let mut bytes = [0; LENGTH];
    read_exact_at(file.as_ref(), &mut bytes, 0).map_err(|error| at(directory, NAME, &error))?;
    decode(&bytes).map_err(|what| damaged(directory, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_and_no_flipped_bit_is_taken() {
        for (size, chunk) in [(0, 4096), (1, 4096), (1 << 44, 1 << 22), (70_001, 65_536)] {
            let shape = Shape { size, chunk };
            let bytes: [u8; LENGTH] = encode(shape).try_into().unwrap();
            assert_eq!(decode(&bytes), Ok(shape));
            for bit in 0..LENGTH * 8 {
                let mut flipped = bytes;
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(decode(&flipped).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn a_shape_that_cannot_be_is_refused_even_with_a_good_checksum() {
        for (size, chunk) in [
            (4096, 0),
            (4096, 512),
            (4096, 5000),
            (u64::MAX, 4096),
            (4097 << 22, 4096),
        ] {
            let bytes: [u8; LENGTH] = encode(Shape { size, chunk }).try_into().unwrap();
            assert!(decode(&bytes).is_err(), "{size} in chunks of {chunk}");
        }
        let mut newer = encode(Shape {
            size: 4096,
            chunk: 4096,
        });
        newer[8] = 2;
        let sum = crc(&newer[..24]);
        newer[24..].copy_from_slice(&sum.to_le_bytes());
        assert!(decode(&newer.try_into().unwrap()).is_err());
    }
}
