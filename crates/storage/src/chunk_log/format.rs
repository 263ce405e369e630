//! The file format: numbers are little-endian, checksums CRC-32C.

/// Maximum length of a caller's header, in bytes.
pub const MAX_HEADER: usize = 4096;

pub(super) const MAGIC: [u8; 8] = *b"DRVRCLG\0";
pub(super) const VERSION: u32 = 1;
/// Bytes before the caller's header.
pub(super) const FIXED_HEADER: usize = 24;
/// Alignment of everything in the file.
pub(super) const ALIGN: usize = 8;

const FRAME_MAGIC: [u8; 4] = *b"CLfr";
pub(super) const FRAME_HEADER: usize = 32;
pub(super) const RECORD_BYTES: usize = 24;
/// Maximum records in a frame.
pub(super) const FRAME_RECORDS: usize = 2048;

/// A run of units, their state, and a mask for the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The first unit.
    pub first: u64,
    /// Number of units.
    pub count: u32,
    /// Their state.
    pub state: u8,
    /// Further information, for example the parts of a unit concerned.
    pub mask: u64,
}

impl Record {
    pub(super) fn encode(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.first.to_le_bytes());
        to.extend_from_slice(&self.mask.to_le_bytes());
        to.extend_from_slice(&self.count.to_le_bytes());
        to.extend_from_slice(&[self.state, 0, 0, 0]);
    }

    fn decode(bytes: &[u8; RECORD_BYTES]) -> Self {
        Self {
            first: u64_at(bytes, 0),
            mask: u64_at(bytes, 8),
            count: u32_at(bytes, 16),
            state: bytes[20],
        }
    }
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

pub(super) fn crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Whether `bytes` have that checksum. Always true when fuzzing, so that the fuzzer need not guess it.
pub(super) fn has_crc(bytes: &[u8], stored: u32) -> bool {
    stored == crc(bytes) || cfg!(fuzzing)
}

/// Length of a file's header with a caller's header of `length` bytes.
pub(super) fn header_length(length: usize) -> usize {
    (FIXED_HEADER + length + 4).next_multiple_of(ALIGN)
}

/// Encodes a file's header. `snapshot`: end offset of the snapshot.
pub(super) fn header_bytes(header: &[u8], snapshot: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(header_length(header.len()));
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&snapshot.to_le_bytes());
    bytes.extend_from_slice(header);
    bytes.extend_from_slice(&crc(&bytes).to_le_bytes());
    bytes.resize(header_length(header.len()), 0);
    bytes
}

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    /// Counted from one.
    pub sequence: u64,
    /// The last frame known to be on disk when this one was written.
    pub durable: u64,
    /// Bytes of records.
    pub length: usize,
    pub crc: u32,
}

impl FrameHeader {
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..FRAME_HEADER)?;
        let count = u32_at(bytes, 4) as usize;
        let fine = bytes[..4] == FRAME_MAGIC
            && has_crc(&bytes[..28], u32_at(bytes, 28))
            && (1..=FRAME_RECORDS).contains(&count);
        fine.then(|| Self {
            sequence: u64_at(bytes, 8),
            durable: u64_at(bytes, 16),
            length: count * RECORD_BYTES,
            crc: u32_at(bytes, 24),
        })
    }
}

/// Encodes a frame of records.
pub(super) fn frame(sequence: u64, durable: u64, records: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FRAME_HEADER + records.len());
    bytes.extend_from_slice(&FRAME_MAGIC);
    bytes.extend_from_slice(&((records.len() / RECORD_BYTES) as u32).to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(&durable.to_le_bytes());
    bytes.extend_from_slice(&crc(records).to_le_bytes());
    bytes.extend_from_slice(&crc(&bytes).to_le_bytes());
    bytes.extend_from_slice(records);
    bytes
}

/// The records of a frame.
pub(super) fn records(bytes: &[u8]) -> impl Iterator<Item = Record> + '_ {
    bytes.as_chunks().0.iter().map(Record::decode)
}

/// The temporary name under which a log is written before it is renamed.
pub(super) fn temporary(name: &str) -> String {
    format!("{name}.new")
}
