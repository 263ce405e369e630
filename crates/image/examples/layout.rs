//! Measures an image: `cargo run --release -p drover-image --example layout -- IMAGE [as-is|opaque|raw|qcow2]`
//! prints its layout's size, and how fast it is made, looked up and walked.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use drover_image::{Conversion, Layout, LayoutLimits, open_for_sending};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: walk IMAGE [CONVERSION]")?;
    let conversion = match args.next().as_deref() {
        None | Some("as-is") => Conversion::AsIs,
        Some("opaque") => Conversion::Opaque,
        Some("raw") => Conversion::Raw,
        Some("qcow2") => Conversion::Qcow2,
        Some(other) => return Err(format!("no conversion {other:?}").into()),
    };
    let start = Instant::now();
    let out = open_for_sending(Path::new(&path), conversion)?;
    println!("opened in {:?}: {out:?}", start.elapsed());
    let layout = &out.layout;
    let start = Instant::now();
    let bytes = layout.encode();
    println!(
        "{} data bytes, {} metadata bytes, {} ranges; {} bytes encoded ({:.1} x) in {:?}",
        layout.data_bytes(),
        layout.metadata_bytes(),
        layout.ranges().len(),
        bytes.len(),
        layout.compression_ratio(),
        start.elapsed()
    );
    let start = Instant::now();
    black_box(Layout::decode(&bytes, LayoutLimits::default())?);
    println!("decoded in {:?}", start.elapsed());

    let blocks = layout.walk_blocks().max(1);
    let lookups = 1_000_000u64;
    let start = Instant::now();
    for i in 0..lookups {
        let block = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks;
        black_box(layout.pieces(block * 4096, 4096).count());
    }
    println!(
        "{:.0} ns for a block's pieces",
        start.elapsed().as_nanos() as f64 / lookups as f64
    );
    let start = Instant::now();
    let mut buf = vec![0u8; 1 << 20];
    let mut at = 0;
    while at < blocks * 4096 {
        layout.read(&*out.content, at, &mut buf)?;
        at += buf.len() as u64;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "walked {} blocks at {:.0} MB/s",
        layout.walk_blocks(),
        layout.walk_blocks() as f64 * 4096.0 / 1e6 / seconds
    );
    Ok(())
}
