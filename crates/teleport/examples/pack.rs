//! How small and how fast the literals of an image become at each effort: the blocks of the last
//! image that the ones before do not have, packed as one connection would. Times are processor time, so
//! that what else the machine does changes little.
//!
//! `cargo run --release -p drover-teleport --example pack -- FIRST.raw SECOND.raw`

use std::collections::HashSet;
use std::time::Duration;

use drover_image::{Conversion, open_for_sending};
use drover_teleport::protocol::{BATCH_BLOCKS, FRAME_BLOCKS};
use drover_teleport::testing::{MAX_WINDOW_LOG, Pace, Packer};
use drover_teleport::testing::{Walk, read_image};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut seen = HashSet::new();
    let mut literals = Vec::new();
    for path in std::env::args().skip(1) {
        let image = open_for_sending(path.as_ref(), Conversion::AsIs)?;
        let mut walk = Walk::new(&image);
        literals.clear();
        while let Some(batch) = walk.next_batch()? {
            for (i, digest) in batch.data.iter().zip(&batch.digests) {
                if seen.insert(*digest) {
                    let at = literals.len();
                    literals.resize(at + 4096, 0);
                    read_image(&image, batch.index * BATCH_BLOCKS + i, &mut literals[at..])?;
                }
            }
        }
    }
    println!("{} MB of literals", literals.len() / 1_000_000);
    let windows: Vec<u32> = vec![MAX_WINDOW_LOG, MAX_WINDOW_LOG - 2];
    for window in windows {
        for step in 0..Pace::STEPS {
            let effort = Pace::step(step).effort();
            let mut packer = Packer::new(window);
            let (start, mut packed) = (spent(), 0);
            for frame in literals.chunks(FRAME_BLOCKS * 4096) {
                let mut out = Vec::new();
                packer.pack(frame, effort, &mut out)?;
                packed += out.len();
            }
            let seconds = (spent() - start).as_secs_f64();
            println!(
                "window 2^{window} {:>8}: {:7.2} MB, {:7.1} MB/s",
                effort.to_string(),
                packed as f64 / 1e6,
                literals.len() as f64 / 1e6 / seconds
            );
        }
    }
    Ok(())
}

/// Processor time of this thread, as Linux counts it.
fn spent() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split(' ').next().and_then(|n| n.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}
