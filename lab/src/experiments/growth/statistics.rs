//! What an image is made of, in the few numbers that decide what sending it takes.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Head};
use drover_index::Scanner;
use rustix::fs::SeekFrom;
use serde::Serialize;
use zstd::stream::Encoder;

/// Bytes read at a time.
const READ: usize = 1 << 20;
/// A block that keeps more than this share is taken for one that does not shrink.
const SHRINKS_BELOW: f64 = 0.97;
/// One block in so many is looked at alone.
const SAMPLE: u64 = 16;

/// What an image is made of. Shares are of blocks of 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Statistics {
    /// Blocks that are not zero, of all.
    pub data_share: f64,
    /// Blocks between two holes of the file, on average.
    pub run_blocks: f64,
    /// Zero blocks, of those that are not in holes.
    pub zero_share: f64,
    /// Blocks that the image had before, of those that are not zero.
    pub repeat_share: f64,
    /// Strong heads, of those that are not zero.
    pub strong_share: f64,
    /// Weak heads, of those that are not zero.
    pub weak_share: f64,
    /// Blocks that do not shrink, of those that are not zero.
    pub dense_share: f64,
    /// How many times smaller the rest gets in one stream of `zstd -3`.
    pub shrinks_times: f64,
}

/// The means of the library's systems as they were in November 2026; `growth/content` measures them again. Only the data share
/// is another (36 % there, 18 to 50): as much as lets the greatest image and its copy fit on an ordinary disk.
pub const LIBRARY: Statistics = Statistics {
    data_share: 0.125,
    run_blocks: 18_000.0,
    zero_share: 0.085,
    repeat_share: 0.029,
    strong_share: 0.075,
    weak_share: 0.262,
    dense_share: 0.107,
    shrinks_times: 4.2,
};

impl Statistics {
    /// The mean of several.
    pub fn mean(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Self {
            data_share: mean(|s| s.data_share),
            run_blocks: mean(|s| s.run_blocks),
            zero_share: mean(|s| s.zero_share),
            repeat_share: mean(|s| s.repeat_share),
            strong_share: mean(|s| s.strong_share),
            weak_share: mean(|s| s.weak_share),
            dense_share: mean(|s| s.dense_share),
            shrinks_times: mean(|s| s.shrinks_times),
        }
    }

    /// Those of an image.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let size = file.metadata()?.len();
        let mut counted = Counted::new()?;
        counted
            .all(&file, size)
            .with_context(|| format!("cannot read {}", path.display()))?;
        counted.shares(size)
    }
}

/// What has been counted so far.
struct Counted {
    scanner: Scanner,
    seen: HashSet<u128>,
    stream: Encoder<'static, Length>,
    runs: u64,
    blocks: u64,
    data: u64,
    repeats: u64,
    strong: u64,
    weak: u64,
    looked_at: u64,
    dense: u64,
    /// Bytes of blocks that shrink, which went into the stream.
    streamed: u64,
}

impl Counted {
    fn new() -> Result<Self> {
        let mut stream = Encoder::new(Length(0), 3)?;
        // As a lane of drover does.
        stream.window_log(24)?;
        stream.long_distance_matching(true)?;
        Ok(Self {
            scanner: Scanner::new(),
            seen: HashSet::new(),
            stream,
            runs: 0,
            blocks: 0,
            data: 0,
            repeats: 0,
            strong: 0,
            weak: 0,
            looked_at: 0,
            dense: 0,
            streamed: 0,
        })
    }

    /// Counts what is between holes.
    fn all(&mut self, file: &File, size: u64) -> io::Result<()> {
        let mut buffer = vec![0; READ];
        let mut at = 0;
        while at < size {
            let from = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                Ok(offset) => offset / BLOCK_SIZE_U64 * BLOCK_SIZE_U64,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let end = rustix::fs::seek(file, SeekFrom::Hole(from.max(at)))?.min(size);
            self.runs += 1;
            self.scanner.skip_zeros();
            at = from;
            while at < end {
                let take = (end - at).min(READ as u64) as usize;
                file.read_exact_at(&mut buffer[..take], at)?;
                let whole = take.next_multiple_of(BLOCK_SIZE);
                buffer[take..whole].fill(0);
                self.piece(&buffer[..whole])?;
                at += take as u64;
            }
        }
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> io::Result<()> {
        let scan = self.scanner.scan(bytes);
        let mut heads = scan.heads.iter();
        for (block, zero) in bytes.chunks_exact(BLOCK_SIZE).zip(scan.zero.iter()) {
            self.blocks += 1;
            if zero {
                continue;
            }
            self.data += 1;
            match heads.next() {
                Some(Head::Strong) => self.strong += 1,
                Some(Head::Weak) => self.weak += 1,
                _ => {}
            }
            let mut key = [0; 16];
            key.copy_from_slice(&blake3::hash(block).as_bytes()[..16]);
            if !self.seen.insert(u128::from_le_bytes(key)) {
                self.repeats += 1;
                continue;
            }
            // What stands next to a dense block is mostly dense, too: a sample tells of its neighbours.
            if self.data.is_multiple_of(SAMPLE) {
                self.looked_at += 1;
                let packed = zstd::bulk::compress(block, 1)?.len();
                if packed as f64 > SHRINKS_BELOW * BLOCK_SIZE as f64 {
                    self.dense += 1;
                }
            }
            self.streamed += BLOCK_SIZE_U64;
            self.stream.write_all(block)?;
        }
        Ok(())
    }

    fn shares(self, size: u64) -> Result<Statistics> {
        let share = |part: u64, of: u64| part as f64 / of.max(1) as f64;
        let packed = self.stream.finish()?.0;
        let dense_share = share(self.dense, self.looked_at);
        // Dense blocks pass through the stream as they are.
        let dense = dense_share * self.streamed as f64;
        Ok(Statistics {
            data_share: share(self.data, size.div_ceil(BLOCK_SIZE_U64)),
            run_blocks: share(self.blocks, self.runs),
            zero_share: 1.0 - share(self.data, self.blocks),
            repeat_share: share(self.repeats, self.data),
            strong_share: share(self.strong, self.data),
            weak_share: share(self.weak, self.data),
            dense_share,
            shrinks_times: (self.streamed as f64 - dense) / (packed as f64 - dense).max(1.0),
        })
    }
}

/// Counts what it is given and keeps nothing.
struct Length(u64);

impl Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
