//! What experiments hand out: a table for people, JSON for programs.

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

/// The machine that a figure was measured on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its processor, as the kernel names it.
    pub processor: String,
    /// Logical cores.
    pub cores: usize,
    /// Main memory, in GiB, rounded: the kernel keeps a different part of it to itself at every start.
    pub memory_gib: u64,
    /// Kernel release.
    pub kernel: String,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = info
            .lines()
            .find_map(|l| {
                l.strip_prefix("model name")?
                    .split_once(": ")
                    .map(|(_, name)| name)
            })
            .unwrap_or("unknown");
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            processor: processor.to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_gib().unwrap_or(0),
            kernel: kernel.trim().to_owned(),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            processor,
            cores,
            memory_gib,
            kernel,
        } = self;
        write!(
            f,
            "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}"
        )
    }
}

fn memory_gib() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some((kib + (1 << 19)) >> 20)
}

/// An empty table whose columns, but for the first, hold numbers.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(header.iter().map(Cell::new));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Bytes as MiB.
pub fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// Least, median and greatest of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The greatest.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`; `None` when there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        Some(Self { min, median, max })
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2} to {:.2})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(
            Spread::of(&[3.0, 1.0, 2.0]).unwrap(),
            Spread {
                min: 1.0,
                median: 2.0,
                max: 3.0
            }
        );
        assert_eq!(Spread::of(&[4.0, 1.0]).unwrap().median, 2.5);
    }

    #[test]
    fn the_machine_is_named() {
        let machine = Machine::this();
        assert!(machine.cores >= 1 && !machine.kernel.is_empty());
    }
}
