//! A memory region that is written at a rate moves to another process, over a real link.
//!
//! `move_region take DIR ADDRESS MIB MB_S` at one end, then `move_region move DIR ADDRESS MIB MB_S` at the other, with the
//! same directory: it has the key of both, and what was written is compared by a file in it. Each prints one line of JSON.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drover_core::{DeviceError, ImageName};
use drover_device::backend::MemoryDevice;
use drover_frontend::region::{Options, Region};
use drover_migrate::program::protocol::PartOffer;
use drover_migrate::program::{
    Host, Leecher, Part, Program, RemoteSite, Seeder, SeederOptions, Target,
};
use drover_net::{Code, Identity, Listener, Refusal};
use drover_store::machine::Machines;
use parking_lot::Mutex;

const PAGE: u64 = 4096;

/// Nanoseconds of a clock that all processes of a host share.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What a page holds after its write of that number.
fn page(index: u64, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE as usize];
    fastrand::Rng::with_seed(index << 32 ^ number).fill(&mut bytes[16..]);
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The program: it writes pages at a rate, and the time to page 0 each millisecond.
struct Writer {
    region: Arc<Region>,
    /// By which write each page has its contents.
    numbers: Mutex<Vec<u64>>,
    stop: AtomicBool,
    first_beat: AtomicU64,
}

impl Writer {
    fn new(region: Arc<Region>, numbers: Vec<u64>) -> Arc<Self> {
        Arc::new(Self {
            region,
            numbers: Mutex::new(numbers),
            stop: AtomicBool::new(false),
            first_beat: AtomicU64::new(0),
        })
    }

    fn start(self: &Arc<Self>, mb_s: f64, first: u64) -> JoinHandle<()> {
        let this = Arc::clone(self);
        std::thread::spawn(move || this.run(mb_s, first).expect("the region"))
    }

    fn run(&self, mb_s: f64, mut number: u64) -> Result<(), DeviceError> {
        let pages = self.region.len() as u64 / PAGE;
        let (begun, mut written) = (Instant::now(), 0.0);
        let mut random = fastrand::Rng::with_seed(number);
        while !self.stop.load(Ordering::SeqCst) {
            self.region.write_at(0, &now().to_le_bytes())?;
            let first = &self.first_beat;
            let _ = first.compare_exchange(0, now(), Ordering::SeqCst, Ordering::SeqCst);
            while written < begun.elapsed().as_secs_f64() * mb_s * 1e6
                && !self.stop.load(Ordering::SeqCst)
            {
                let index = random.u64(1..pages);
                number += 1;
                self.region.write_at(index * PAGE, &page(index, number))?;
                self.numbers.lock()[index as usize] = number;
                written += PAGE as f64;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

struct Leaving {
    writer: Arc<Writer>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Program for Leaving {
    fn pause(&self) -> std::io::Result<Vec<u8>> {
        self.writer.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.lock().take() {
            thread.join().expect("the writer");
        }
        Ok(Vec::new())
    }

    fn resume(&self) {
        eprintln!("it stays");
    }
}

/// Where it goes: there it writes on, and another thread reads pages here and there.
struct Taking {
    bytes: u64,
    mb_s: f64,
    region: Mutex<Option<Arc<Region>>>,
    running: Mutex<Option<Threads>>,
    gap_ms: Mutex<f64>,
}

/// The writer, its thread, and one that reads: how long each read took, in ms.
type Threads = (Arc<Writer>, JoinHandle<()>, JoinHandle<Vec<f64>>);

impl Host for Taking {
    fn prepare(&self, parts: &[PartOffer]) -> Result<Vec<Target>, Refusal> {
        if parts.len() != 1 || parts[0].size != self.bytes {
            return Err(Refusal::new(Code::Denied, "another size is expected"));
        }
        let store = Arc::new(MemoryDevice::new(self.bytes));
        let made = Target::region(store, Options::default());
        let (target, region) = made.map_err(|e| Refusal::new(Code::Failed, e.to_string()))?;
        *self.region.lock() = Some(region);
        Ok(vec![target])
    }

    fn run(&self, _state: Vec<u8>) -> Result<(), String> {
        let region = self.region.lock().clone().ok_or("it was not prepared")?;
        let mut last = [0; 8];
        region.read_at(0, &mut last).map_err(|e| e.to_string())?;
        *self.gap_ms.lock() = now().saturating_sub(u64::from_le_bytes(last)) as f64 / 1e6;
        let pages = region.len() / PAGE as usize;
        let writer = Writer::new(Arc::clone(&region), vec![0; pages]);
        let writing = writer.start(self.mb_s, 1 << 30);
        let stop = Arc::clone(&writer);
        let reading = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(3);
            let (mut waits, mut bytes) = (Vec::new(), [0; 64]);
            while !stop.stop.load(Ordering::SeqCst) {
                let begun = Instant::now();
                let at = random.usize(1..pages) as u64 * PAGE;
                region.read_at(at, &mut bytes).expect("the region");
                waits.push(begun.elapsed().as_secs_f64() * 1e3);
                std::thread::sleep(Duration::from_millis(1));
            }
            waits
        });
        *self.running.lock() = Some((writer, writing, reading));
        Ok(())
    }
}

async fn take(directory: &Path, address: &str, bytes: u64, mb_s: f64) {
    let identity = Identity::load_or_create(directory.join("key")).expect("a key");
    let host = Arc::new(Taking {
        bytes,
        mb_s,
        region: Mutex::default(),
        running: Mutex::default(),
        gap_ms: Mutex::default(),
    });
    let name = ImageName::new("writer").expect("a name");
    let machines = Machines::new(directory.join("there"));
    let leecher = Leecher::new(name, machines, Arc::clone(&host));
    let address = address.parse().expect("an address");
    let listener = Listener::bind(address, &identity)
        .await
        .expect("a listener");
    println!("ready");
    let serving = Arc::clone(&leecher);
    tokio::spawn(async move { serving.listen(listener, identity.key()).await });
    leecher.complete().await.expect("all of it");
    // The seeder has to be told.
    let model = directory.join("model");
    let mut numbers = None;
    for _ in 0..600 {
        numbers = std::fs::read(&model).ok();
        if numbers.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let numbers = numbers.expect("what was written before");
    let (writer, writing, reading) = host.running.lock().take().expect("it runs");
    writer.stop.store(true, Ordering::SeqCst);
    writing.join().expect("the writer");
    let mut waits = reading.join().expect("the reader");
    waits.sort_by(f64::total_cmp);
    let later = writer.numbers.lock();
    let mut found = vec![0; PAGE as usize];
    let mut wrong = 0;
    for (index, before) in numbers.chunks_exact(8).enumerate().skip(1) {
        let before = u64::from_le_bytes(before.try_into().expect("eight bytes"));
        let number = before.max(later[index]);
        let expected = page(index as u64, number);
        let at = index as u64 * PAGE;
        let read = writer.region.read_at(at, &mut found);
        wrong += u64::from(read.is_err() || found != expected);
    }
    let gap = *host.gap_ms.lock();
    let of = |share: f64| waits.get((waits.len() as f64 * share) as usize).copied();
    println!(
        "{{\"gap_ms\": {gap:.3}, \"wrong_pages\": {wrong}, \"wait_p99_ms\": {:.3}, \"wait_longest_ms\": {:.3}}}",
        of(0.99).unwrap_or(0.0),
        waits.last().unwrap_or(&0.0),
    );
    assert_eq!(wrong, 0);
}

async fn leave(directory: &Path, address: &str, bytes: u64, mb_s: f64) {
    let identity = Identity::load_or_create(directory.join("key")).expect("a key");
    let store = Arc::new(MemoryDevice::new(bytes));
    let options = Options {
        writable: true,
        ..Options::default()
    };
    let region = Arc::new(Region::new(store, options).expect("a region"));
    let numbers: Vec<u64> = (0..bytes / PAGE).collect();
    for index in 1..bytes / PAGE {
        let written = region.write_at(index * PAGE, &page(index, index));
        written.expect("the region");
    }
    let writer = Writer::new(Arc::clone(&region), numbers);
    let thread = writer.start(mb_s, 1 << 24);
    let to = Arc::new(RemoteSite {
        addresses: vec![address.to_owned()],
        key: identity.key(),
        identity,
        name: "there".to_owned(),
    });
    let machines = Machines::new(directory.join("here"));
    let name = ImageName::new("writer").expect("a name");
    let mut seeder = Seeder::open(
        vec![Part::region("memory", region)],
        SeederOptions::new(name, machines, to),
    )
    .await
    .expect("a move");
    seeder.track().await.expect("the copy");
    let program = Arc::new(Leaving {
        writer: Arc::clone(&writer),
        thread: Mutex::new(Some(thread)),
    });
    let report = seeder.finalize(program).await.expect("the hand-over");
    let numbers: Vec<u8> = writer
        .numbers
        .lock()
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let model: PathBuf = directory.join("model");
    std::fs::write(directory.join("model.new"), numbers).expect("a file");
    std::fs::rename(directory.join("model.new"), model).expect("a file");
    println!(
        "{{\"pause_ms\": {:.3}, \"stop_ms\": {:.3}, \"send_ms\": {:.3}, \"behind\": {}, \"asked\": {}, \"rounds\": {}, \"sent\": {}, \"packed\": {}, \"whole_s\": {:.3}}}",
        report.pause.as_secs_f64() * 1e3,
        report.stop.as_secs_f64() * 1e3,
        report.send.as_secs_f64() * 1e3,
        report.behind,
        report.asked,
        report.rounds,
        report.sent,
        report.packed,
        report.whole.as_secs_f64(),
    );
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, directory, address, mib, mb_s] = &arguments[..] else {
        eprintln!("usage: move_region take|move DIR ADDRESS MIB MB_S");
        std::process::exit(2);
    };
    let directory = Path::new(directory);
    let bytes = mib.parse::<u64>().expect("MiB") << 20;
    let mb_s: f64 = mb_s.parse().expect("MB/s");
    match mode.as_str() {
        "take" => take(directory, address, bytes, mb_s).await,
        _ => leave(directory, address, bytes, mb_s).await,
    }
}
