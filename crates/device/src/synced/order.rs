//! The order in which chunks are pulled, and the file format of a recorded order.

use std::ops::Range;

use parking_lot::Mutex;

use super::state::Geometry;
use crate::remote::{Chunks, Shape};

/// What is pulled in the background.
#[derive(Clone, Debug, Default)]
pub enum Order {
    /// Nothing but demand fetches and read-ahead for sequential readers.
    None,
    /// First the places that are read early on any disk (both ends, where partition tables are), then the rest in
    /// order.
    #[default]
    Sequential,
    /// These first, then as [`Order::Sequential`].
    List(Vec<Chunks>),
}

/// The first line of an order file.
const TITLE: &str = "drover order 1";
/// Maximum number of runs in an order.
pub const MAX_RUNS: usize = 1 << 20;
/// Maximum size of an order file in bytes.
const MAX_TEXT: usize = 64 << 20;

/// Why a text cannot be parsed as an order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// The title line is missing.
    #[error("it does not begin with `{TITLE}`: not a recorded order")]
    Title,
    /// A line is not a run.
    #[error("line {0} is not an offset and a length in bytes")]
    Line(usize),
    /// Too many runs.
    #[error("it has more than {MAX_RUNS} runs")]
    TooLong,
}

impl Order {
    /// Parses an order file: a title, then `offset length` in bytes on each line, so that it applies to any chunk size.
    /// Runs outside the device are dropped: the image may have changed since.
    ///
    /// # Errors
    /// [`OrderError`].
    pub fn parse(text: &str, shape: Shape) -> Result<Self, OrderError> {
        if text.len() > MAX_TEXT {
            return Err(OrderError::TooLong);
        }
        let mut lines = text.lines();
        if lines.next().map(str::trim) != Some(TITLE) {
            return Err(OrderError::Title);
        }
        let mut runs = Vec::new();
        for (number, line) in lines.enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace().map(str::parse::<u64>);
            let (Some(Ok(offset)), Some(Ok(length)), None) =
                (words.next(), words.next(), words.next())
            else {
                return Err(OrderError::Line(number + 2));
            };
            if runs.len() == MAX_RUNS {
                return Err(OrderError::TooLong);
            }
            runs.extend(run(shape, offset, length));
        }
        Ok(Self::List(runs))
    }

    /// The order as file contents.
    #[must_use]
    pub fn format(runs: &[Chunks], shape: Shape) -> String {
        let mut text = format!("{TITLE}\n");
        for run in runs {
            let offset = run.first.saturating_mul(u64::from(shape.chunk));
            let end = run
                .end()
                .saturating_mul(u64::from(shape.chunk))
                .min(shape.size);
            text.push_str(&format!("{offset} {}\n", end.saturating_sub(offset)));
        }
        text
    }

    /// The runs pulled before the rest, in this order.
    pub(super) fn first(&self, shape: Shape) -> Vec<Chunks> {
        let mut runs: Vec<Chunks> = match self {
            Self::None => return Vec::new(),
            Self::Sequential => Vec::new(),
            Self::List(list) => {
                let inside = |c: &&Chunks| c.count > 0 && c.first < shape.chunks();
                let cut = |c: &Chunks| Chunks {
                    first: c.first,
                    count: u64::from(c.count).min(shape.chunks() - c.first) as u32,
                };
                list.iter().filter(inside).map(cut).collect()
            }
        };
        // Partition tables and their backup at the end, boot records, superblocks of ext4, xfs and btrfs in a first
        // partition at 1 MiB.
        let places = [
            (0, 1 << 20),
            (shape.size.saturating_sub(1 << 20), 1 << 20),
            (1 << 20, 256 << 10),
            (65 << 20, 64 << 10),
        ];
        runs.extend(places.iter().filter_map(|(o, l)| run(shape, *o, *l)));
        runs
    }
}

/// The chunks that a byte range touches.
fn run(shape: Shape, offset: u64, length: u64) -> Option<Chunks> {
    let end = offset.saturating_add(length).min(shape.size);
    if offset >= end {
        return None;
    }
    let chunk = u64::from(shape.chunk);
    let first = offset / chunk;
    Some(Chunks {
        first,
        count: u32::try_from((end - 1) / chunk + 1 - first).ok()?,
    })
}

/// Records the order in which chunks are first used.
pub struct Recorder {
    seen: Mutex<(Vec<u64>, Vec<Chunks>)>,
}

impl Recorder {
    pub fn new(geometry: Geometry) -> Self {
        let words = geometry.shape.chunks().div_ceil(64) as usize;
        Self {
            seen: Mutex::new((vec![0; words], Vec::new())),
        }
    }

    pub fn used(&self, chunks: Range<u64>) {
        let mut seen = self.seen.lock();
        let (bits, runs) = &mut *seen;
        for index in chunks {
            let bit = 1 << (index % 64);
            let word = &mut bits[(index / 64) as usize];
            if *word & bit != 0 {
                continue;
            }
            let full = runs.len() >= MAX_RUNS;
            match runs.last_mut() {
                Some(run) if run.end() == index => run.count += 1,
                _ if full => return,
                _ => runs.push(Chunks {
                    first: index,
                    count: 1,
                }),
            }
            *word |= bit;
        }
    }

    pub fn runs(&self) -> Vec<Chunks> {
        self.seen.lock().1.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        size: 10_000_000,
        chunk: 65536,
    };

    #[test]
    fn an_order_survives_its_file() {
        let runs = vec![
            Chunks { first: 3, count: 2 },
            Chunks {
                first: 152,
                count: 1,
            },
        ];
        let text = Order::format(&runs, SHAPE);
        let Order::List(back) = Order::parse(&text, SHAPE).unwrap() else {
            panic!("a list");
        };
        assert_eq!(back, runs);
    }

    #[test]
    fn rubbish_is_no_order() {
        let parse = |text: &str| Order::parse(text, SHAPE).map(drop);
        assert_eq!(parse(""), Err(OrderError::Title));
        assert_eq!(parse("drover order 1\n1 x\n"), Err(OrderError::Line(2)));
        assert_eq!(parse("drover order 1\n\n1 2 3\n"), Err(OrderError::Line(3)));
        assert_eq!(
            parse(&format!("drover order 1\n{0} {0}\n0 {0}", u64::MAX)),
            Ok(())
        );
    }

    #[test]
    fn first_uses_are_recorded_once_and_joined() {
        let recorder = Recorder::new(Geometry::new(SHAPE).unwrap());
        recorder.used(5..7);
        recorder.used(6..9);
        recorder.used(0..1);
        recorder.used(5..9);
        assert_eq!(
            recorder.runs(),
            [Chunks { first: 5, count: 4 }, Chunks { first: 0, count: 1 }]
        );
    }
}
