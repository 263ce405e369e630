//! Arithmetic on runs of chunks.

use drover_device::remote::{Chunks, Shape};

/// The size of `count` chunks in bytes.
pub fn bytes(shape: Shape, count: u32) -> u64 {
    u64::from(count) * u64::from(shape.chunk)
}

/// Whether the chunk at this index of a request has arrived, by its bitmap.
pub fn has_arrived(arrived: &[u64; 4], at: u64) -> bool {
    arrived
        .get((at / 64) as usize)
        .is_some_and(|bits| bits >> (at % 64) & 1 == 1)
}

/// The parts of a request's run that have not arrived.
pub fn missing(run: Chunks, arrived: &[u64; 4]) -> Vec<Chunks> {
    let mut runs: Vec<Chunks> = Vec::new();
    for index in (run.first..run.end()).filter(|index| !has_arrived(arrived, index - run.first)) {
        match runs.last_mut() {
            Some(last) if last.end() == index => last.count += 1,
            _ => runs.push(Chunks {
                first: index,
                count: 1,
            }),
        }
    }
    runs
}

/// Removes from `missing` the chunks of `run` for which `outstanding` holds. Returns whether there were any.
pub fn cut_out(
    missing: &mut Vec<Chunks>,
    run: Option<Chunks>,
    outstanding: impl Fn(u64) -> bool,
) -> bool {
    let Some(run) = run else {
        return false;
    };
    let mut any = false;
    let mut rest: Vec<Chunks> = Vec::new();
    for part in missing.drain(..) {
        if part.end() <= run.first || part.first >= run.end() {
            rest.push(part);
            continue;
        }
        for index in part.first..part.end() {
            if (run.first..run.end()).contains(&index) && outstanding(index) {
                any = true;
            } else {
                match rest.last_mut() {
                    Some(last) if last.end() == index => last.count += 1,
                    _ => rest.push(Chunks {
                        first: index,
                        count: 1,
                    }),
                }
            }
        }
    }
    *missing = rest;
    any
}

/// Splits a run into parts of at most `most` chunks.
pub fn split(run: Chunks, most: u32) -> impl Iterator<Item = Chunks> {
    (0..run.count.div_ceil(most)).map(move |n| Chunks {
        first: run.first + u64::from(n) * u64::from(most),
        count: most.min(run.count - n * most),
    })
}
