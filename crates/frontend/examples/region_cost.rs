//! What a memory region costs: a fault, reading on, tracking writes (issue 4, figure 6).
//!
//! `cargo run --release -p drover-frontend --example region_cost -- [--json]`
//!
//! The device is in memory, as it is or with 1 ms added to every request, so that the figures are those of the region.
//! Every byte that is read is checked where that does not disturb the figure; baselines are anonymous memory.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_device::testing::Delay;
use drover_frontend::region::{Options, Region};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// Bytes of the regions that are read.
const READ: usize = 256 * MIB;
/// Bytes of the region that is written.
const WRITTEN: usize = 1024 * MIB;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// One figure.
struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
}

#[derive(Default)]
struct Figures(Vec<Figure>);

impl Figures {
    fn add(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        let name = name.into();
        eprintln!("{name}: {value:.2} {unit}");
        self.0.push(Figure { name, value, unit });
    }

    fn latency(&mut self, name: &str, mut taken: Vec<Duration>) {
        taken.sort_unstable();
        for (share, what) in [(50, "p50"), (99, "p99")] {
            let at = taken[(taken.len() - 1) * share / 100];
            self.add(format!("{name}, {what}"), at.as_secs_f64() * 1e6, "us");
        }
    }

    fn rate(&mut self, name: impl Into<String>, bytes: usize, taken: Duration) {
        let rate = bytes as f64 / MIB as f64 / taken.as_secs_f64();
        self.add(name, rate, "MiB/s");
    }

    fn json(&self) -> String {
        let lines: Vec<String> = self
            .0
            .iter()
            .map(|figure| {
                let Figure { name, value, unit } = figure;
                format!("  {{\"name\": \"{name}\", \"value\": {value:.3}, \"unit\": \"{unit}\"}}")
            })
            .collect();
        format!("[\n{}\n]", lines.join(",\n"))
    }
}

fn main() -> Outcome<()> {
    let mut figures = Figures::default();
    let memory = Arc::new(filled(READ)?);
    let late = Arc::new(Delay::new(
        memory.clone(),
        Duration::from_millis(1),
        Duration::ZERO,
    ));
    let devices: [(&str, Arc<dyn BlockDevice>, usize); 2] =
        [("memory", memory, 20_000), ("1 ms", late, 1_000)];
    plain_faults(&mut figures);
    holes(&mut figures)?;
    for (name, device, faults) in devices {
        single_faults(&mut figures, name, &device, faults)?;
        parallel_faults(&mut figures, name, &device, faults)?;
        for prefetch in [0, MIB, 4 * MIB] {
            let bytes = match (prefetch, name) {
                (0, "1 ms") => 4 * MIB,
                _ => READ,
            };
            sequential(&mut figures, name, &device, prefetch, bytes)?;
        }
        populate(&mut figures, name, &device)?;
    }
    tracking(&mut figures)?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{}", figures.json());
    }
    Ok(())
}

/// A device whose pages hold their own number.
fn filled(bytes: usize) -> Outcome<MemoryDevice> {
    let device = MemoryDevice::new(bytes as u64);
    let mut page = [0u8; PAGE];
    for at in (0..bytes).step_by(PAGE) {
        page[..8].copy_from_slice(&number(at).to_le_bytes());
        device.write(at as u64, &page)?;
    }
    Ok(device)
}

fn number(offset: usize) -> u64 {
    offset as u64 + 1
}

fn check(bytes: &[u8], offset: usize) -> Outcome<()> {
    let found = u64::from_le_bytes(bytes[offset..offset + 8].try_into()?);
    match found == number(offset) {
        true => Ok(()),
        false => Err(format!("{found} at {offset}").into()),
    }
}

fn region(device: &Arc<dyn BlockDevice>, prefetch: usize) -> Outcome<Region> {
    let options = Options {
        prefetch,
        threads: 16,
        ..Options::default()
    };
    Ok(Region::new(device.clone(), options)?)
}

/// Pages in random order, each once.
fn shuffled(count: usize) -> Vec<usize> {
    let mut pages: Vec<usize> = (0..READ / PAGE).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut pages);
    pages.truncate(count);
    pages
}

fn touched(bytes: &[u8], pages: &[usize]) -> Vec<Duration> {
    let touch = |page: &usize| {
        let began = Instant::now();
        black_box(bytes[page * PAGE]);
        began.elapsed()
    };
    pages.iter().map(touch).collect()
}

/// What the kernel's own fault costs.
fn plain_faults(figures: &mut Figures) {
    let mut plain = vec![0u8; READ];
    let taken = shuffled(20_000)
        .into_iter()
        .map(|page| {
            let began = Instant::now();
            black_box(&mut plain)[page * PAGE] = 1;
            began.elapsed()
        })
        .collect();
    figures.latency("fault of anonymous memory", taken);
}

fn holes(figures: &mut Figures) -> Outcome<()> {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(READ as u64));
    let mut region = region(&device, 0)?;
    let taken = touched(&region.hold(), &shuffled(20_000));
    figures.latency("fault of a hole", taken);
    Ok(())
}

fn single_faults(
    figures: &mut Figures,
    name: &str,
    device: &Arc<dyn BlockDevice>,
    count: usize,
) -> Outcome<()> {
    let mut region = region(device, 0)?;
    let pages = shuffled(count);
    let held = region.hold();
    let taken = touched(&held, &pages);
    for page in pages {
        check(&held, page * PAGE)?;
    }
    figures.latency(&format!("fault, {name}"), taken);
    Ok(())
}

fn parallel_faults(
    figures: &mut Figures,
    name: &str,
    device: &Arc<dyn BlockDevice>,
    count: usize,
) -> Outcome<()> {
    let mut region = region(device, 0)?;
    let pages = shuffled(count);
    let held = region.hold();
    let began = Instant::now();
    std::thread::scope(|scope| {
        for share in pages.chunks(count.div_ceil(16)) {
            let held = &held;
            scope.spawn(move || black_box(touched(held, share)));
        }
    });
    let rate = count as f64 / began.elapsed().as_secs_f64();
    figures.add(format!("faults of 16 threads, {name}"), rate, "1/s");
    Ok(())
}

fn sequential(
    figures: &mut Figures,
    name: &str,
    device: &Arc<dyn BlockDevice>,
    prefetch: usize,
    bytes: usize,
) -> Outcome<()> {
    let mut region = region(device, prefetch)?;
    let held = region.hold();
    let began = Instant::now();
    for at in (0..bytes).step_by(PAGE) {
        check(&held, at)?;
    }
    let taken = began.elapsed();
    drop(held);
    let what = match prefetch {
        0 => "no prefetch".to_owned(),
        prefetch => format!("prefetch of {} MiB", prefetch / MIB),
    };
    figures.rate(format!("reading on, {name}, {what}"), bytes, taken);
    let reads = region.stats().device_reads as f64 / (bytes / MIB) as f64;
    figures.add(
        format!("device reads for it, {name}, {what}"),
        reads,
        "1/MiB",
    );
    Ok(())
}

fn populate(figures: &mut Figures, name: &str, device: &Arc<dyn BlockDevice>) -> Outcome<()> {
    let options = Options {
        populate: true,
        threads: 16,
        ..Options::default()
    };
    let began = Instant::now();
    let region = Region::new(device.clone(), options)?;
    while region.stats().resident_bytes < READ as u64 {
        if began.elapsed() > Duration::from_secs(60) {
            return Err("the region does not fill".into());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    figures.rate(format!("populating, {name}"), READ, began.elapsed());
    Ok(())
}

fn tracking(figures: &mut Figures) -> Outcome<()> {
    let device = Arc::new(filled(WRITTEN)?);
    let options = Options {
        writable: true,
        populate: true,
        ..Options::default()
    };
    let mut region = Region::new(device.clone(), options)?;
    region.prefault(0, WRITTEN as u64)?;
    let all = 0..WRITTEN / PAGE;
    scan(figures, &region, "nothing written", 0)?;
    // The mark is set, so every page's first write pays.
    let bytes = |region: &mut Region, work: &mut dyn FnMut(&mut [u8])| -> Outcome<Duration> {
        let mut held = region.hold();
        let bytes = held.bytes_mut().ok_or("not writable")?;
        let began = Instant::now();
        work(bytes);
        Ok(began.elapsed())
    };
    let taken = bytes(&mut region, &mut |bytes| bytes.fill(1))?;
    figures.rate("filling tracked memory, first write", WRITTEN, taken);
    let taken = bytes(&mut region, &mut |bytes| bytes.fill(2))?;
    figures.rate("filling tracked memory, again", WRITTEN, taken);
    scan(figures, &region, "all written", WRITTEN / PAGE)?;
    let words = |bytes: &mut [u8], value| {
        for page in all.clone() {
            bytes[page * PAGE] = value;
        }
    };
    let per_page = |taken: Duration| taken.as_secs_f64() * 1e9 / (WRITTEN / PAGE) as f64;
    let taken = bytes(&mut region, &mut |bytes| words(bytes, 3))?;
    figures.add("a byte a page, tracked, first", per_page(taken), "ns");
    let taken = bytes(&mut region, &mut |bytes| words(bytes, 4))?;
    figures.add("a byte a page, tracked, again", per_page(taken), "ns");
    let mut plain = vec![1u8; WRITTEN];
    let began = Instant::now();
    plain.fill(2);
    figures.rate("filling anonymous memory", WRITTEN, began.elapsed());
    let began = Instant::now();
    words(black_box(&mut plain), 3);
    figures.add("a byte a page, anonymous", per_page(began.elapsed()), "ns");
    drop(plain);
    region.dirty_since_mark(true)?;
    let mut random = fastrand::Rng::with_seed(2);
    let mut some: Vec<usize> = (0..WRITTEN / PAGE / 100)
        .map(|_| random.usize(all.clone()))
        .collect();
    bytes(&mut region, &mut |bytes| {
        for page in &some {
            bytes[page * PAGE] = 5;
        }
    })?;
    some.sort_unstable();
    some.dedup();
    scan(figures, &region, "one in a hundred written", some.len())?;
    let began = Instant::now();
    let pushed = region.push()?;
    figures.rate("pushing", pushed.bytes as usize, began.elapsed());
    let mut byte = [0];
    device.read((some[0] * PAGE) as u64, &mut byte)?;
    match byte {
        [5] => Ok(()),
        _ => Err("the device is not what was written".into()),
    }
}

fn scan(figures: &mut Figures, region: &Region, what: &str, pages: usize) -> Outcome<()> {
    let began = Instant::now();
    let runs = region.dirty_since_mark(true)?;
    let taken = began.elapsed();
    let found: u64 = runs.iter().map(|run| run.end - run.start).sum();
    if found != (pages * PAGE) as u64 {
        return Err(format!("{found} bytes were found written, not {pages} pages").into());
    }
    let per_gib = taken.as_secs_f64() * 1e3 / (WRITTEN / MIB / 1024) as f64;
    figures.add(format!("scan of 1 GiB, {what}"), per_gib, "ms");
    Ok(())
}
